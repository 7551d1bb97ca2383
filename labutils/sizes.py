"""Which GPT-2, and how many sequences of it, the GPU in this machine can train."""

from __future__ import annotations

from typing import Any

import torch

from labutils import models
from labutils.cards import card_named
from labutils.config import Config
from labutils.solver import largest_micro_batch


def size_that_fits(config: Config, limit: int = 8) -> dict[str, Any]:
    """Return the overrides with which a step of one micro-batch fits the free memory of the GPU here; on a CPU none.

    `micro_batch_size` is at most `limit`. `model` is there only if not even one sequence of the config's own model
    fits: then it is the largest smaller one of which one does, or `gpt2-nano`.
    """
    if not torch.cuda.is_available():
        return {}
    free_gib = card_named("this").memory_gib
    names = list(models.SIZES)  # from the smallest to the largest
    for model in reversed(names[: names.index(config.model) + 1]):
        smaller = config.model_copy(update={"model": model})
        fits = largest_micro_batch(smaller, free_gib, "this", limit)
        if fits:
            break
    fits = max(1, fits)
    shape = {"micro_batch_size": fits, "tokens_per_step": fits * config.seq_len}
    return shape if model == config.model else {"model": model} | shape
