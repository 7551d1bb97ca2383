"""labutils: what the four training-optimisation notebooks share. Attributes load on first use, so importing is free."""

from __future__ import annotations

import importlib
import os
from typing import Any

__version__ = "0.1.0"
# Torch's C++ code would write to stderr whenever CUDA runs out of memory, caught or not, and the profiler about freed
# blocks. Torch reads this when it is imported: so a script or notebook imports labutils before torch.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

_MODULE_OF = {
    "checks": "checks",
    "config": "config",
    "numerics": "numerics",
    "plotting": "plotting",
    "precision": "precision",
    "snapshot": "snapshot",
    **dict.fromkeys(("Config", "ConfigError", "load_config"), "config"),
    **dict.fromkeys(("batches", "load_corpus", "padded_batches"), "data"),
    **dict.fromkeys(("choose_device", "setup"), "device"),
    **dict.fromkeys(("build_model", "count_targets", "lm_loss_sum", "flops_per_token"), "models"),
    **dict.fromkeys(("autocast", "grad_scaler", "matmul_rate", "support", "tf32"), "precision"),
    **dict.fromkeys(("allocated_bytes", "free_memory", "measure_step", "peak_allocated"), "memory"),
    **dict.fromkeys(("needed_gib", "predict_memory", "predict_module"), "predict"),
    **dict.fromkeys(("fit", "fitting", "largest_micro_batch", "shape_that_fits"), "solver"),
    "size_that_fits": "sizes",
    **dict.fromkeys(("closed_form", "static_gib"), "formula"),
    **dict.fromkeys(("compare", "find_runs", "load_record", "readable", "reference_runs"), "records"),
    **dict.fromkeys(("evaluate", "train"), "training"),
    **dict.fromkeys(("run_experiment", "run_experiments"), "experiment"),
}
__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'labutils' has no attribute {name!r}; it has: {', '.join(__all__)}")
    module = importlib.import_module(f"labutils.{_MODULE_OF[name]}")
    value = module if name == _MODULE_OF[name] else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
