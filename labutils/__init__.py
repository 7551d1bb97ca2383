"""labutils: what the four training-optimisation notebooks share.

Attributes load on first use, so importing is free.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

__version__ = "0.1.0"
# Torch's C++ code would write to stderr whenever CUDA runs out of memory, caught or not, and the
# profiler about freed blocks. Torch reads this when it is imported: so a script or notebook imports
# labutils before torch.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

_MODULES = {
    "checks": "checks",
    "numerics": "techniques.float_formats",
    "plotting": "plotting",
    "precision": "techniques.precision",
    "speed": "training.speed",
    "snapshot": "memory.snapshot",
}
_MODULE_OF = {
    **_MODULES,
    **dict.fromkeys(("Config", "ConfigError"), "config.schema"),
    **dict.fromkeys(("batches", "load_corpus", "padded_batches"), "workload.data"),
    **dict.fromkeys(("build_model",), "workload.gpt2"),
    **dict.fromkeys(("count_targets", "lm_loss_sum"), "techniques.loss"),
    **dict.fromkeys(("autocast", "grad_scaler", "tf32"), "techniques.precision"),
    **dict.fromkeys(("allocated_bytes", "free_memory"), "memory.device_memory"),
    **dict.fromkeys(("needed_gib", "predict_memory", "predict_module"), "prediction.memory"),
    **dict.fromkeys(
        ("fitting", "largest_micro_batch", "shape_that_fits", "size_that_fits"), "prediction.sizes"
    ),
    **dict.fromkeys(("closed_form", "static_gib"), "prediction.arithmetic"),
    **dict.fromkeys(("compare", "readable"), "training.compare"),
    **dict.fromkeys(("find_runs", "load_record", "reference_runs"), "training.records"),
    **dict.fromkeys(("evaluate", "train"), "training.loop"),
    "run_experiment": "training.experiment",
    "run_experiments": "training.experiments",
    "choose_device": "machine.gpu",
    "fit": "prediction.fit",
    "flops_per_token": "training.speed",
    "load_config": "config.reader",
    **dict.fromkeys(("matmul_rate", "support"), "machine.here"),
    "measure_step": "memory.measure",
    "peak_allocated": "memory.cpu_recorder",
    "setup": "session",
}
__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(
            f"module 'labutils' has no attribute {name!r}; it has: {', '.join(__all__)}"
        )
    module = importlib.import_module(f"labutils.{_MODULE_OF[name]}")
    value = module if name in _MODULES else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
