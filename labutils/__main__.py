"""`python -m labutils`."""

import signal

from labutils.cli import main

signal.signal(signal.SIGTERM, signal.default_int_handler)  # a cluster's or a container's stop ends a run like Ctrl-C
raise SystemExit(main())
