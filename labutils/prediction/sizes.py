"""Which GPT-2, and how many sequences of it, this machine can train."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from labutils.config.cards import CONTEXT_GIB
from labutils.config.reader import load_config
from labutils.config.schema import Config
from labutils.machine import here
from labutils.machine.gpu import card_named, choose_device
from labutils.prediction.arithmetic import closed_form, on_a_cpu
from labutils.prediction.fit import ROUGHLY
from labutils.prediction.memory import Sweep, needed_gib
from labutils.prediction.resolve import resolve
from labutils.workload.gpt2 import SIZES


def largest_micro_batch(
    config: Config, budget_gib: float, device: str = "a100", limit: int = 4096
) -> int:
    """Return how many sequences (at most `limit`) fit in a step of one micro-batch; 0 if not even
    one does.
    """
    resolved = resolve(config, device)
    alone = {"micro_batch_size": 1, "tokens_per_step": resolved.seq_len}
    sweep = _sweep(resolved.model_copy(update=alone).model_dump_json(), device)

    def fits(size: int) -> bool:
        return sweep.at(size).fits(budget_gib)

    low, high = 0, 1
    while high <= limit and fits(high):
        low, high = high, 2 * high
    high = min(high, limit + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def shape_that_fits(config: Config, limit: int = 8) -> dict[str, int]:
    """Return the overrides with which a step of one micro-batch fits the free memory of the GPU
    here; on a CPU none.

    `micro_batch_size` is at most `limit`, and at least 1 even if the ledger says that not one sequence fits.
    """
    if not torch.cuda.is_available():
        return {}
    fits = max(1, largest_micro_batch(config, card_named("this").memory_gib, "this", limit))
    return {"micro_batch_size": fits, "tokens_per_step": fits * config.seq_len}


def fitting(*names: str, **overrides: Any) -> list[Config]:
    """Return the configs of some names or files, with overrides; where memory is short, in smaller
    micro-batches.

    All get the size with which, by the ledger, the first one's step fits the memory that is free
    here, at least 1:
    `tokens_per_step` stays, so they accumulate, and remain comparable with each other and with other machines.
    """
    configs = [load_config(name, **overrides) for name in names]
    where = choose_device()
    device = "cpu" if where.type == "cpu" else "this"
    first = resolve(configs[0], device)
    budget = here.free_bytes(where) / 2**30 + (0 if device == "cpu" else CONTEXT_GIB)
    if (
        ROUGHLY * needed_gib(closed_form(on_a_cpu(first) if device == "cpu" else first), device)
        < budget
    ):
        return configs
    sweep, sequences = Sweep(first, device), first.tokens_per_step // first.seq_len
    sizes = [n for n in range(first.micro_batch_size, 0, -1) if sequences % n == 0]
    size = next((n for n in sizes if sweep.at(n).fits(budget)), 1)
    if size == first.micro_batch_size:
        return configs
    smaller = overrides | {
        "note": f"in micro-batches of {size}, for want of memory",
        "micro_batch_size": size,
    }
    return [
        load_config(n, **(smaller | {"name": c.name})) for n, c in zip(names, configs, strict=True)
    ]


@lru_cache(maxsize=4)
def _sweep(config_json: str, device: str) -> Sweep:
    """Return a sweep of a resolved config; the next budget finds its traces."""
    return Sweep(Config.model_validate_json(config_json), device)


def size_that_fits(config: Config, limit: int = 8) -> dict[str, Any]:
    """Return the overrides with which a step of one micro-batch fits the free memory of the GPU
    here; on a CPU none.

    `micro_batch_size` is at most `limit`. `model` is there only if not even one sequence of the config's own model
    fits: then it is the largest smaller one of which one does, or `gpt2-nano`.
    """
    if not torch.cuda.is_available():
        return {}
    free_gib = card_named("this").memory_gib
    names = list(SIZES)  # from the smallest to the largest
    for model in reversed(names[: names.index(config.model) + 1]):
        smaller = config.model_copy(update={"model": model})
        fits = largest_micro_batch(smaller, free_gib, "this", limit)
        if fits:
            break
    fits = max(1, fits)
    shape = {"micro_batch_size": fits, "tokens_per_step": fits * config.seq_len}
    return shape if model == config.model else {"model": model} | shape
