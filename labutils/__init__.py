"""labutils: what the four training-optimisation notebooks share.

Names load on first use, so importing is free. `__init__.pyi` tells editors where each one is
defined; a test keeps the two alike. A name that says little by itself is reached through its
module: `lab.allocator.Settings`.
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
    "adapters": "techniques.adapters",
    "allocator": "prediction.allocator",
    "arithmetic": "prediction.arithmetic",
    "autocast_dtypes": "techniques.autocast_dtypes",
    "by_layer": "training.by_layer",
    "capstone": "training.capstone",
    "checks": "checks",
    "convergence": "training.convergence",
    "exchange": "training.exchange",
    "four_bits": "techniques.four_bits",
    "eight_bits": "techniques.eight_bits",
    "frameworks": "training.engines.frameworks",
    "ladder": "training.ladder",
    "numerics": "techniques.float_formats",
    "play": "exhibits.play",
    "plotting": "plotting",
    "precision": "techniques.precision",
    "processes": "training.processes",
    "profiles": "training.profiles",
    "rounding": "techniques.rounding",
    "roofline": "prediction.roofline",
    "shapes": "training.shapes",
    "sharding": "training.sharding",
    "side_by_side": "training.side_by_side",
    "snapshot": "memory.snapshot",
    "speed": "training.speed",
    "stability": "training.stability",
    "tasks": "training.tasks",
}
_NAMES = {
    "config.card": ("CONTEXT_GIB",),
    "config.cards": ("CARDS",),
    "config.choices": ("MODELS",),
    "config.deepspeed": ("deepspeed_problems",),
    "config.reader": ("load_config",),
    "config.schema": ("Config", "ConfigError"),
    "guesses": ("answer", "guess", "scores"),
    "machine.here": ("card_of", "matmul_rate", "support"),
    "memory.cpu_recorder": ("peak_allocated",),
    "memory.device_memory": (
        "allocated_bytes",
        "cublas_bytes",
        "cuda_memory",
        "free_memory",
        "memory_limit",
    ),
    "memory.ledger": ("gib", "mib"),
    "memory.measure": ("measure_step",),
    "memory.snapshot_page": ("snapshot_kinds", "snapshot_page"),
    "memory.transfer": ("copy_gb_per_s",),
    "memory.tensors": (
        "flat_gradient",
        "kept_by_kind",
        "saved_for_backward",
        "saved_names",
    ),
    "prediction.advise": ("advise",),
    "prediction.arithmetic": ("n_parameters", "static_gib"),
    "prediction.changes": ("time_cost",),
    "prediction.fit": ("fit",),
    "prediction.large": ("predict_large",),
    "prediction.memory": ("needed_gib", "predict_memory"),
    "prediction.module": ("predict_module",),
    "prediction.published": ("config_of_row", "published"),
    "prediction.sharded": ("bus_seconds", "host_bytes", "sharded"),
    "prediction.selective": ("WithPolicy", "half_of_squares", "policy_cost"),
    "prediction.sizes": (
        "fitting",
        "largest_micro_batch",
        "longest_sequence",
        "shape_that_fits",
        "size_that_fits",
    ),
    "prediction.time": ("predict_module_time", "predict_time"),
    "session": ("explain_in_notebooks", "setup"),
    "techniques.checkpointing": ("set_checkpointing",),
    "techniques.compiling": ("CompiledLoss",),
    "techniques.loss": ("count_targets", "lm_loss_sum"),
    "techniques.optimizers": ("round_stochastically",),
    "techniques.precision": ("autocast", "tf32"),
    "training.adapters": ("fine_tune",),
    "training.alternate": ("alternate",),
    "training.by_seed": ("seed_table",),
    "training.compare": ("compare", "readable"),
    "training.experiment": ("run_experiment",),
    "training.experiments": ("run_experiments",),
    "training.gradients": ("compare_gradients", "full_gradient", "window_gradient"),
    "training.loop": ("evaluate", "to_device", "train"),
    "training.noise": ("paired_difference", "paired_ratio"),
    "training.records": ("find_runs", "load_record", "reference_runs"),
    "training.speed": ("flops_per_token",),
    "training.waiting": ("waits",),
    "workload.build": ("build",),
    "workload.data": ("batches", "load_corpus", "padded_batches", "padded_window", "sequences"),
    "workload.gpt2": ("build_model",),
    "workload.slow_source": ("SlowSource",),
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names}
__all__ = sorted([*_MODULES, *_MODULE_OF])


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        value = importlib.import_module(f"labutils.{_MODULES[name]}")
    elif name in _MODULE_OF:
        value = getattr(importlib.import_module(f"labutils.{_MODULE_OF[name]}"), name)
    else:
        known = ", ".join(__all__)
        raise AttributeError(f"module 'labutils' has no attribute {name!r}; it has: {known}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
