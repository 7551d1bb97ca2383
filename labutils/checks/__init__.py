"""Check an exercise: "right", or which misconception the answer shows.

There is one module per notebook that has exercises, and a second one for the code of notebook 03.
To add an exercise, write it in that module with `@exercise`, call it in the notebook as
`lab.checks.NAME(...)`, and add its answers to `tests/solutions/`.
"""

from __future__ import annotations

from collections.abc import Callable

from labutils.checks import (
    accumulation,
    capstone,
    checkpoint_code,
    checkpointing,
    eight_bits,
    frameworks,
    mixed_precision,
    numerics,
    profiling,
    scaler,
    speed,
    where_time_goes,
)
from labutils.checks.core import VERDICTS, exercises_in
from labutils.checks.quiz import self_test

__all__ = ["EXERCISES", "VERDICTS", "hint", "self_test"]

NOTEBOOKS = (
    mixed_precision,
    accumulation,
    checkpointing,
    checkpoint_code,
    profiling,
    capstone,
    numerics,
    frameworks,
    scaler,
    speed,
    eight_bits,
    where_time_goes,
)
EXERCISES: dict[str, Callable[..., None]] = {}
for module in NOTEBOOKS:
    found = exercises_in(module)
    if twice := EXERCISES.keys() & found.keys():
        raise ImportError(f"two notebooks have an exercise of this name: {', '.join(twice)}")
    EXERCISES |= found
globals().update(EXERCISES)


def hint(exercise: str, number: int = 1) -> None:
    """Print hint `number` (from 1) of an exercise; they grow more explicit."""
    if exercise not in EXERCISES:
        print(f"There is no exercise {exercise!r}; there are: {', '.join(EXERCISES)}")
        return
    hints = EXERCISES[exercise].hints
    number = max(1, min(int(number), len(hints)))
    print(f"Hint {number} of {len(hints)}: {hints[number - 1]}")
