"""Before a CPU run: is there room? After running out: the cheapest ways out."""

from __future__ import annotations

import os

import torch

from labutils.config.cards import CONTEXT_GIB
from labutils.config.schema import Config
from labutils.machine import here
from labutils.memory.device_memory import MALLOC, MMAP_THRESHOLD, free_memory, return_freed_blocks
from labutils.memory.errors import GIB, readable_size
from labutils.prediction.arithmetic import closed_form, on_a_cpu
from labutils.prediction.fit import enough_alone, fit
from labutils.prediction.memory import needed_gib, predict_memory

WAYS = 3
# times a CPU run's bytes: where so much is free, what the system's allocator keeps does not matter
ROOMY = 2


def spare_host_memory(config: Config, where: torch.device) -> bool:
    """On a CPU, let freed blocks lie idle only if a resolved config takes little of what is free;
    return if it is much.

    By the closed form. See `memory.return_freed_blocks`.
    """
    if where.type != "cpu":
        return False
    near = ROOMY * closed_form(on_a_cpu(config)).peak_bytes > here.free_bytes(where)
    if near != (os.environ.get(MALLOC) == str(MMAP_THRESHOLD)):
        return_freed_blocks(near)
    return near


def require_host_memory(config: Config, where: torch.device) -> None:
    """Raise torch.OutOfMemoryError if a config, resolved for a CPU, has no room: Linux would kill
    the whole process.

    By the ledger, which takes seconds. For a CPU only: CUDA's allocator says no in time.
    """
    needed = needed_gib(predict_memory(config, "cpu"), "cpu") * GIB
    free_memory()
    if needed > (free := here.free_bytes(where)):
        raise torch.OutOfMemoryError(
            f"Tried to allocate {readable_size(needed)} (predicted, not tried), of which {readable_size(free)} is free"
        )


def ways_out(config: Config, where: torch.device) -> str:
    """Return the WAYS cheapest changes with each of which, as predicted, a config runs in the
    memory that is free now.

    Where no single one is enough, the cheapest combination. What the allocator cannot use counts:
    fragmentation.
    """
    on_card = where.type == "cuda"
    limit = config.memory_limit_gib if on_card else 0
    free = min(
        here.free_bytes(where) / GIB, limit or float("inf")
    )  # of a card: its context is there already
    budget, card = (free + CONTEXT_GIB, "this") if on_card else (free, "cpu")
    try:
        found = enough_alone(config, budget, card)[:WAYS] or [fit(config, budget, card)]
    except Exception as error:  # a hint must not cost what it is a hint for
        return f"Ways out: a smaller micro_batch_size or seq_len (the ledger cannot tell: {type(error).__name__})"
    free_now = readable_size(free * GIB)
    needed = readable_size((found[0].needed_gib - (CONTEXT_GIB if on_card else 0)) * GIB)
    if not found[0].changes and found[0].fits(budget):
        return (
            f"Alone {config.name} needs {needed} (predicted), and {free_now} are free now. So this was more "
            "than that run, or other tensors were alive beside it. Delete what you no longer need (in a notebook: "
            "restart the kernel), or make what ran smaller"
        )
    if not found[0].changes:
        return f"None of the changes that the ledger tries makes it fit {free_now}: take a smaller model"
    options = "; or ".join(
        ", ".join(f"{key}: {value}" for key, value in one.changes.items()) for one in found
    )
    if not found[0].fits(budget):
        return f"Nothing makes it fit the {free_now} that are free; least, {needed}, is needed with {options}"
    return f"{free_now} are free now. Cheapest ways out (predicted): {options}"
