"""`python -m labutils`: what the installed command `labutils` does."""

from labutils.cli import start

raise SystemExit(start())
