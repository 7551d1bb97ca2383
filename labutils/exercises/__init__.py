"""Check an exercise: "right", or which misconception the answer shows.

There is one module per notebook that has exercises, and a second one for the code of notebooks 03
and 04. To add an exercise, write it in that module with `@exercise`, or in `choices.yaml`; name it
here, call it in the notebook as `lab.exercises.NAME(...)`, and add answers to `tests/solutions/`.
"""

# ruff: noqa: F401

from __future__ import annotations

from labutils.exercises.accumulation import accumulation_control, amp_window, break_one
from labutils.exercises.checkpoint_code import mended_forward, own_checkpoint
from labutils.exercises.checkpointing import best_segments, block_runs, swiglu_kept
from labutils.exercises.core import EXERCISES, VERDICTS, hint
from labutils.exercises.leaks import repair
from labutils.exercises.mixed_precision import amp_step, control_runs, scaler_log
from labutils.exercises.profiling import history, largest_batch, nvidia_smi, planned_peak
from labutils.exercises.quiz import (
    accumulation_request,
    find_bug,
    leak,
    products_in_backward,
    self_test,
    useful_del,
)
from labutils.exercises.steps import failures
