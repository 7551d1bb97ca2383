"""The learning rate of each step."""

from __future__ import annotations

import math
from typing import Any


def learning_rate_at(step: int, config: Any) -> float:
    """Return the rate of optimizer step `step` (from 0):

    Linear warm-up, then constant or cosine to a tenth.
    """
    if step < config.lr_warmup_steps:
        return config.learning_rate * (step + 1) / config.lr_warmup_steps
    if config.lr_schedule == "constant":
        return config.learning_rate
    progress = (step - config.lr_warmup_steps) / max(1, config.steps - config.lr_warmup_steps)
    return config.learning_rate * (0.1 + 0.9 * (1 + math.cos(math.pi * progress)) / 2)
