"""`python -m labutils`: what the installed command `labutils` does."""

from labutils.course.cli import start

raise SystemExit(start())
