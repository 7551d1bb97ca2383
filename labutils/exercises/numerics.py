"""Exercise of further/rounding: the smallest update that a stored weight follows."""

from __future__ import annotations

from collections.abc import Callable

import torch

from labutils.exercises.core import exercise

# (weight, dtype, direction): a direction of -1 is towards 0 for these positive weights
CASES = (
    (1.5, torch.bfloat16, 1),
    (1.5, torch.bfloat16, -1),
    (0.375, torch.bfloat16, 1),
    (1.5, torch.float16, 1),
    (6.0, torch.float32, 1),
    (1.0, torch.bfloat16, 1),
    (1.0, torch.bfloat16, -1),
    (0.25, torch.float16, -1),
)
NEAR = 0.01  # an update this much below the limit must be lost, one as much above it must not


@exercise(
    "Which two stored numbers are the neighbours of the weight? An update is lost if the "
    "result lies nearer to the weight than to its neighbour.",
    "Between two powers of two the spacing stays the same. So it depends on the weight's "
    "exponent, and not on the weight itself: math.frexp gives an exponent.",
    "Look at 1.0: its neighbour above is farther away than its neighbour below.",
)
def lost_below(limit: Callable[[float, torch.dtype, int], float] | None) -> str | None:
    """Check `limit(weight, dtype, direction)`: updates below it are lost, updates above it are not.

    The weight is a positive number that `dtype` can store, the direction 1 or -1, and the update a
    positive number. Rounding is to nearest.
    """
    for weight, dtype, direction in CASES:
        found = limit(weight, dtype, direction)
        name, sign = str(dtype).removeprefix("torch."), "+" if direction > 0 else "-"
        at = f"for a weight of {weight:g} in {name} and updates of sign {sign}"
        if not isinstance(found, (int, float)) or not found > 0:
            return f"{at} the limit is a positive number; got {found!r}."
        if _moves(weight, dtype, direction * found * (1 - NEAR)):
            return f"{at} your limit is too high: an update just below it moves the weight."
        if not _moves(weight, dtype, direction * found * (1 + NEAR)):
            return f"{at} your limit is too low: an update just above it is lost."
    return None


def _moves(weight: float, dtype: torch.dtype, update: float) -> bool:
    return torch.tensor(weight + update, dtype=torch.float64).to(dtype).item() != weight
