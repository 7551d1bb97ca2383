"""Check an exercise: "right", or which misconception the answer shows.

There is one module per notebook that has exercises, and a second one for the code of notebook 03.
To add an exercise, write it in that module with `@exercise`, name it here, call it in the notebook
as `lab.exercises.NAME(...)`, and add its answers to `tests/solutions/`.
"""

from __future__ import annotations

from labutils.exercises.accumulation import (
    accumulation_control,
    accumulation_request,
    amp_window,
    break_one,
    find_bug,
)
from labutils.exercises.checkpoint_code import mended_forward, own_checkpoint
from labutils.exercises.checkpointing import best_segments, block_runs, swiglu_kept
from labutils.exercises.core import EXERCISES, VERDICTS, hint
from labutils.exercises.mixed_precision import amp_step, control_runs, scaler_log
from labutils.exercises.profiling import (
    history,
    largest_batch,
    leak,
    nvidia_smi,
    planned_peak,
    products_in_backward,
    repair,
    useful_del,
)
from labutils.exercises.quiz import self_test
from labutils.exercises.steps import failures

__all__ = [
    "EXERCISES",
    "VERDICTS",
    "accumulation_control",
    "accumulation_request",
    "amp_step",
    "amp_window",
    "best_segments",
    "block_runs",
    "break_one",
    "control_runs",
    "failures",
    "find_bug",
    "hint",
    "history",
    "largest_batch",
    "leak",
    "mended_forward",
    "nvidia_smi",
    "own_checkpoint",
    "planned_peak",
    "products_in_backward",
    "repair",
    "scaler_log",
    "self_test",
    "swiglu_kept",
    "useful_del",
]
