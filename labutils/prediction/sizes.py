"""How many sequences of a batch, and which GPT-2, a device can train."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch

from labutils import machine
from labutils.config.card import Card
from labutils.config.choices import MODELS
from labutils.config.reader import load_config
from labutils.config.schema import Config, Run, resolve
from labutils.machine import choose_device
from labutils.prediction.memory import BatchSizes

LONGEST = 32768  # tokens of a sequence that a config may name


def largest(fits: Callable[[int], bool], limit: int) -> int:
    """Return the largest number up to `limit` that fits, by halving intervals; 0 if not 1 does."""
    low, high = 0, 1
    while high <= limit and fits(high):
        low, high = high, 2 * high
    high = min(high, limit + 1)
    while high - low > 1:  # `low` fits, `high` does not
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return low


def largest_micro_batch(
    config: Config,
    budget_gib: float,
    device: str | torch.device | Card = "a100",
    limit: int = 4096,
) -> int:
    """Return how many sequences (at most `limit`) fit in a step of one micro-batch.

    0 if not even one does.
    """
    run = resolve(config, machine.card_of(device))
    alone = {"micro_batch_size": 1, "tokens_per_step": run.config.seq_len}
    step = run.config.model_copy(update=alone)
    # what is free changes, the traces do not
    sizes = _batch_sizes(step.model_dump_json(), replace(run.card, memory_gib=0.0, speed=None))
    return largest(lambda size: sizes.at(size).fits(budget_gib), limit)


def longest_sequence(
    config: Config,
    budget_gib: float,
    device: str | torch.device | Card = "a100",
    *,
    unit: int = 1024,
) -> int:
    """Return the longest sequence, in tokens, of which one fits: a multiple of `unit`, or 0."""

    def fits(units: int) -> bool:
        shape = {"seq_len": units * unit, "micro_batch_size": 1, "tokens_per_step": units * unit}
        one = config.model_copy(update=shape)
        return largest_micro_batch(one, budget_gib, device, limit=1) == 1

    return unit * largest(fits, LONGEST // unit)


@lru_cache(maxsize=4)
def _batch_sizes(config_json: str, card: Card) -> BatchSizes:
    """Return the predictions for a resolved config. The next budget finds their traces."""
    return BatchSizes(Config.model_validate_json(config_json), card)


def shape_that_fits(config: Config, limit: int = 8) -> dict[str, int]:
    """Return the overrides with which one micro-batch fits the GPU here; none on a CPU.

    `micro_batch_size` is at most `limit`, and at least 1 even if not one sequence fits.
    """
    if not torch.cuda.is_available():
        return {}
    card = machine.card_of(machine.THIS)
    size = max(1, largest_micro_batch(config, card.memory_gib, card, limit))
    return {"micro_batch_size": size, "tokens_per_step": size * config.seq_len}


def size_that_fits(config: Config, limit: int = 8) -> dict[str, Any]:
    """Return the overrides of `shape_that_fits`, with a smaller model where not one sequence fits.

    `model` is then the largest smaller one of which one sequence fits, or the smallest of all.
    """
    if not torch.cuda.is_available():
        return {}
    card = machine.card_of(machine.THIS)
    names = list(MODELS)  # from the smallest to the largest
    not_larger = names[: names.index(config.model) + 1]
    for model in reversed(not_larger):
        smaller = config.model_copy(update={"model": model})
        if largest_micro_batch(smaller, card.memory_gib, card, limit=1):
            break
    changed = {} if model == config.model else {"model": model}
    return changed | shape_that_fits(config.model_copy(update={"model": model}), limit)


def fitting(*names: str, **overrides: Any) -> list[Config]:
    """Return the configs of some names or files; where memory is short, in smaller micro-batches.

    All get the size with which the first one's step fits the memory that is free here, by the
    ledger, and at least 1. `tokens_per_step` stays, so they accumulate. They remain comparable with
    each other and with other machines.
    """
    configs = [load_config(name, **overrides) for name in names]
    run = resolve(configs[0], machine.card(choose_device()))
    size = _size_for_equal_steps(run)
    if size == run.config.micro_batch_size:
        return configs
    note = f"micro-batch reduced to {size} to fit memory"
    smaller = overrides | {"note": note, "micro_batch_size": size}
    reduced = []
    for name, config in zip(names, configs, strict=True):
        reduced.append(load_config(name, **smaller | {"name": config.name}))
    return reduced


def _size_for_equal_steps(run: Run) -> int:
    """Return the largest micro-batch, at most the config's, that divides a step and fits."""
    sizes = BatchSizes(run.config, run.card)
    sequences = run.config.tokens_per_step // run.config.seq_len
    for size in range(run.config.micro_batch_size, 1, -1):
        if sequences % size == 0 and sizes.at(size).fits(run.card.memory_gib):
            return size
    return 1
