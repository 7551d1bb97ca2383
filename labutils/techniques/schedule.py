"""The learning rate of each step.

Taught in 02, section 5.
"""

from __future__ import annotations

import math

from labutils.config.choices import SCHEDULES

LAST = 0.1  # of the highest rate: where a cosine ends


def learning_rate_at(
    step: int, *, highest: float, schedule: str, warmup_steps: int, steps: int
) -> float:
    """Return the rate of optimizer step `step`, counted from 0.

    It rises linearly for `warmup_steps`, then stays (`constant`) or falls to a tenth of `highest`
    in the last of `steps` (`cosine`). Raises ValueError for an unknown schedule.
    """
    kind = SCHEDULES[schedule].name
    if step < warmup_steps:
        return highest * (step + 1) / warmup_steps
    match kind:
        case "constant":
            return highest
        case "cosine":
            progress = (step - warmup_steps) / max(1, steps - warmup_steps)
            return highest * (LAST + (1 - LAST) * (1 + math.cos(math.pi * progress)) / 2)
    raise ValueError(f"{schedule!r} has a row in `choices`, and no code in `learning_rate_at`")
