# PYTHON_ARGCOMPLETE_OK
"""`python -m labutils`: what the installed command `labutils` does."""

from labutils.tools.cli import start

raise SystemExit(start())
