"""`python -m labutils`."""

from labutils.cli import main

raise SystemExit(main())
