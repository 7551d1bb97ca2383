"""Check an exercise: "right", or which misconception the answer shows.

There is one module per notebook. To add an exercise, write it in that module with `@exercise`, call
it in the notebook as `lab.checks.NAME(...)`, and add its answers to `tests/solutions/`.
"""

from __future__ import annotations

from labutils.checks import accumulation, capstone, checkpointing, mixed_precision, profiling
from labutils.checks.core import collect_verdicts, exercises_in
from labutils.checks.quiz import self_test

__all__ = ["EXERCISES", "collect_verdicts", "hint", "self_test"]

NOTEBOOKS = (mixed_precision, accumulation, checkpointing, profiling, capstone)
EXERCISES = {name: check for module in NOTEBOOKS for name, check in exercises_in(module).items()}
globals().update(EXERCISES)


def hint(exercise: str, number: int = 1) -> None:
    """Print hint `number` (from 1) of an exercise; they grow more explicit."""
    if exercise not in EXERCISES:
        print(f"There is no exercise {exercise!r}; there are: {', '.join(EXERCISES)}")
        return
    hints = EXERCISES[exercise].hints
    number = max(1, min(int(number), len(hints)))
    print(f"Hint {number} of {len(hints)}: {hints[number - 1]}")
