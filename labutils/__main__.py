"""`python -m labutils`."""

import os
import signal

from labutils.tools.cli import main

if "RANK" not in os.environ:  # torchrun's processes must end at once
    signal.signal(
        signal.SIGTERM, signal.default_int_handler
    )  # a cluster's stop ends a run like Ctrl-C
raise SystemExit(main())
