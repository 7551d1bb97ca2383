"""Before a CPU run: is there room? After running out: the cheapest ways out."""

from __future__ import annotations

import torch

from labutils import machine
from labutils.config.card import CONTEXT_GIB
from labutils.config.choices import MODELS
from labutils.config.schema import Config
from labutils.memory.device_memory import free_memory
from labutils.memory.errors import GIB, readable_size
from labutils.prediction.arithmetic import n_parameters
from labutils.prediction.memory import needed_gib, predict_memory
from labutils.prediction.search import Plan, fit, named, single_changes_that_fit

MAX_SUGGESTIONS = 3
CPU = torch.device("cpu")


def require_host_memory(config: Config) -> None:
    """Raise torch.OutOfMemoryError if a config, resolved for a CPU, has no room.

    Linux would kill the whole process. (CUDA's allocator says no in time.) Where the plainest step
    has room, the ledger, which takes seconds, is not asked.
    """
    if plainest_step_bytes(config) < machine.free_bytes(CPU):
        return
    needed = needed_gib(predict_memory(config, CPU), CPU) * GIB
    free_memory()
    free = machine.free_bytes(CPU)
    if needed > free:
        asked = f"Tried to allocate {readable_size(needed)} (predicted, not tried)"
        raise torch.OutOfMemoryError(f"{asked}, of which {readable_size(free)} is free")


def plainest_step_bytes(config: Config) -> int:
    """Return more bytes than a step of a config takes: in FP32, nothing fused or computed again.

    A bound that no technique has to be taught to. Per token and layer autograd keeps less than 128
    bytes per unit of width, and 16 for each attention weight. Logits are there in less than 6
    float32 copies, parameters with gradients, AdamW's state and temporaries in 8.
    """
    model = MODELS[config.model]
    tokens = config.micro_batch_size * config.seq_len
    per_layer = 128 * model.width + 16 * model.n_head * config.seq_len
    logits = 6 * 4 * (model.vocabulary + 64)
    return 8 * 4 * n_parameters(config.model, config.seq_len, config.pad_vocab) + tokens * (
        model.n_layer * per_layer + logits
    )


def suggest_changes(config: Config, device: torch.device) -> str:
    """Return the cheapest changes of which each makes a config run in what is free now.

    All is predicted. Where no single change is enough, the cheapest combination is named.
    """
    card = machine.card(device)
    context_gib = CONTEXT_GIB if card.gpu else 0
    limit_gib = config.memory_limit_gib if card.gpu else 0
    budget = min(card.memory_gib, limit_gib + context_gib) if limit_gib else card.memory_gib
    try:
        plans = single_changes_that_fit(config, budget, card)[:MAX_SUGGESTIONS] or [
            fit(config, budget, card)
        ]
    except Exception as error:  # a hint must not cost what it is a hint for
        reason = f"the ledger cannot tell: {type(error).__name__}"
        return f"Ways out: a smaller micro_batch_size or seq_len ({reason})"
    free = readable_size((budget - context_gib) * GIB)
    needed = readable_size((plans[0].needed_gib - context_gib) * GIB)
    return _in_words(config.name, plans, budget, free, needed)


def _in_words(name: str, plans: list[Plan], budget_gib: float, free: str, needed: str) -> str:
    best = plans[0]
    options = "; or ".join(named(plan.changes) for plan in plans)
    if best.changes and best.fits(budget_gib):
        return f"{free} are free now. Cheapest ways out (predicted): {options}"
    if best.changes:
        return f"No change fits {free} free; the smallest needs {needed}: {options}"
    if best.fits(budget_gib):
        return (
            f"Alone {name} needs {needed} (predicted), and {free} are free now. So this was more "
            "than that run, or other tensors were alive beside it. Delete what you no longer need "
            "(in a notebook: restart the kernel), or make what ran smaller"
        )
    return f"None of the changes that the ledger tries makes it fit {free}: take a smaller model"
