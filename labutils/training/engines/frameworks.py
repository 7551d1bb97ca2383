"""What further/frameworks takes from here: `lab.frameworks`."""

from __future__ import annotations

import logging
import os
import warnings

from labutils.training.engines.arguments import DECODED, decoded, renamed
from labutils.training.engines.parts import FrameworkMissing, require
from labutils.training.engines.run import ENGINES, run_engine

__all__ = ["DECODED", "ENGINES", "FrameworkMissing", "decoded", "ready", "renamed", "run_engine"]


def ready() -> None:
    """Prepare a notebook: no framework writes progress or advice, and none looks for a model hub.

    Call it before the first import of a framework. Raises FrameworkMissing.
    """
    os.environ["HF_HUB_OFFLINE"] = "1"
    for package in ("accelerate", "lightning"):
        require(package)
    for name in ("accelerate", "lightning.fabric", "lightning.pytorch", "transformers"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"(accelerate|lightning|transformers)\b")
