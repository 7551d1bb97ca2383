"""Check an exercise: "right", or which misconception the answer shows.

Exercises whose answers are letters or numbers are in `choices.yaml`, the others in modules with
`@exercise`. To add one, write it there; name it in `quiz.py` or its module and here, call it in the
notebook as `lab.exercises.NAME(...)`, and add answers to `tests/solutions/`.
"""

# ruff: noqa: F401

from __future__ import annotations

from labutils.course.exercises.checkpoint_code import mended_forward, own_checkpoint
from labutils.course.exercises.core import EXERCISES, VERDICTS, hint
from labutils.course.exercises.leaks import repair
from labutils.course.exercises.loops import (
    accumulation_control,
    amp_step,
    amp_window,
    break_one,
)
from labutils.course.exercises.profiling import history, planned_peak
from labutils.course.exercises.quiz import (
    accumulation_request,
    best_segments,
    block_runs,
    control_runs,
    find_bug,
    largest_batch,
    leak,
    nvidia_smi,
    padded_labels,
    products_outside_backward,
    scaler_log,
    self_test,
    sixteen_bits,
    swiglu_kept,
    useful_del,
)
