"""`python -m labutils`."""

import os
import signal

from labutils.tools.cli import main

if "RANK" not in os.environ:  # torchrun's processes must end at once
    # A cluster's stop signal then ends a run as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
raise SystemExit(main())
