"""What would fit? Changes to a config that save memory, which few make it fit, and the largest
batch, sequence and model that a device can train.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any

import torch

from labutils import machine
from labutils.config.card import CONTEXT_GIB, CPU, Card, PrecisionUnsupported
from labutils.config.choices import (
    ATTENTION,
    CHECKPOINTING,
    EACH_BLOCK,
    MODELS,
    OPTIMIZERS,
    PRECISIONS,
    SMALLEST_STATE,
    WITH_BF16,
    WITHOUT_BF16,
)
from labutils.config.reader import config_of, load_config
from labutils.config.schema import Config, ConfigError, resolve
from labutils.machine import choose_device
from labutils.memory.device_memory import free_memory, without_expandable_segments
from labutils.memory.errors import GIB, readable_size
from labutils.memory.ledger import MIB
from labutils.prediction.memory import (
    Device,
    Prediction,
    boundary,
    needed_gib,
    predicted,
    with_more_sequences,
)
from labutils.prediction.time import predict_time
from labutils.prediction.trace import with_shape

Changes = dict[str, Any]  # {key of a config: new value}
# These change neither results (beyond rounding) nor cost time.
FREE_CHANGES: Changes = {
    "expandable_segments": True,
    "use_cache": False,
    "activation": "gelu_tanh",
    "optimizer_impl": "fused",
}
# What a change costs besides time, or why it costs nothing.
REASONS = {
    "expandable_segments": "the same tensors, fewer holes between them; Linux only",
    "use_cache": "training never reads the cache",
    "activation": "the same function, fused",
    "optimizer_impl": "the same update, without temporaries",
    "attention": "the same sums in another order, without (T, T) matrices",
    "precision": "matrix multiplications in 16 bits",
    "loss_chunk_tokens": "the same products in smaller pieces",
    "micro_batch_size": "more micro-batches, equal tokens per step",
    "gradient_checkpointing": "each block's forward pass twice",
    "optimizer": "a slower update, and moments of 8 bits: compare the losses",
    "optimizer_in_backward": "no clipping and no accumulation; the same update otherwise",
    "max_grad_norm": "no clipping",
    "pure_bf16": "weights of 8 significant bits lose small updates: compare the losses",
    "tokens_per_step": "fewer tokens in a step, so noisier gradients: another experiment",
    "seq_len": "less context: another experiment",
}
CHUNK_TOKENS = 512
NOTHING = 0.005  # of the peak: less is called nothing
FREE = 0.02  # of the step: a change that takes less time is free
FEW_SEQUENCES = 2, 3  # a batch of one has views where larger ones have copies
(PURE_BF16,) = (row.name for row in PRECISIONS.values() if row.weights == "bfloat16")
ON_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Plan:
    """Changes to a config, and what is predicted with them; computed when it is asked for.

    What needs a prediction raises ConfigError or PrecisionUnsupported if the device cannot run it.
    """

    config: Config  # as it runs on the card, with the changes
    card: Card
    changes: Changes = field(default_factory=dict)
    original: Plan | None = None  # the same without changes

    def changed(self, changes: Changes) -> Plan:
        """Return this one with changes."""
        return Plan(self.config.model_copy(update=changes), self.card, changes, self)

    @cached_property
    def prediction(self) -> Prediction:
        """What its run asks of the device."""
        return predicted(resolve(self.config, self.card).config, self.card)

    @cached_property
    def step_ms(self) -> float:
        """The predicted milliseconds of a step with the changes."""
        return predict_time(self.config, self.card).step_ms

    @property
    def time_cost(self) -> float:
        """The time that they add to a step, as a fraction of it; below 0 it is faster."""
        before = self.original or self
        return self.step_ms / before.step_ms - 1

    @property
    def peak_bytes(self) -> int:
        """The peak of the bytes allocated."""
        return self.prediction.tensors.peak_bytes

    @property
    def saved_bytes(self) -> int:
        """What the changes save of the peak."""
        return self.original.peak_bytes - self.peak_bytes

    @property
    def needed_gib(self) -> float:
        """The memory in GiB of the smallest device on which it runs."""
        return needed_gib(self.prediction.ledger, self.card)

    def fits(self, budget_gib: float) -> bool:
        """Whether it runs in so much memory, on a card with its context in it."""
        return self.prediction.fits(budget_gib)

    @property
    def name(self) -> str:
        """The changes as they would stand in a config."""
        return ", ".join(f"{key}: {value}" for key, value in self.changes.items())

    @property
    def costs(self) -> list[str]:
        """What each change costs besides time, or why it costs nothing."""
        items = self.changes.items()
        return [f"{key} {value}: {REASONS.get(value, REASONS[key])}" for key, value in items]


def unchanged(config: Config, device: Device) -> Plan:
    """Return the plan of a config on a device, without changes."""
    run = resolve(config, machine.card_of(device))
    return Plan(run.config, run.card)


# ---- The table of changes


def smaller_batches(config: Config) -> list[int]:
    """Return the smaller micro-batches of a step of equally many tokens, largest first."""
    sequences = config.tokens_per_step // config.seq_len
    smaller = reversed(range(1, config.micro_batch_size))
    return [size for size in smaller if sequences % size == 0]


def table_of(config: Config, card: Card) -> dict[str, Changes]:
    """Return the changes to a resolved config worth a try, each one decision, by the key that it is
    about: first those that are free.
    """
    table: dict[str, Changes] = {}
    for key, value in FREE_CHANGES.items():
        if getattr(config, key) != value:
            table[key] = {key: value}
    if card.gpu is None or (card.is_here and without_expandable_segments()):
        table.pop("expandable_segments", None)
    if ATTENTION[config.attention].keeps_matrices:
        table["attention"] = {"attention": "auto"}
    if not PRECISIONS[config.precision].is_16bit:
        faster = WITH_BF16 if card.has_bf16 else WITHOUT_BF16
        table["precision"] = {"precision": faster.name}
    half = config.seq_len // 2
    if config.optimizer_in_backward:  # it cannot accumulate
        tokens = half * config.micro_batch_size
        table["micro_batch_size"] = {"tokens_per_step": tokens, "seq_len": half}
    elif sizes := smaller_batches(config):
        table["micro_batch_size"] = {"micro_batch_size": sizes[0]}
    if not CHECKPOINTING[config.gradient_checkpointing].is_on:
        table["gradient_checkpointing"] = {"gradient_checkpointing": EACH_BLOCK.name}
    if not 0 < config.loss_chunk_tokens <= CHUNK_TOKENS:
        quarter = config.micro_batch_size * config.seq_len // 4
        table["loss_chunk_tokens"] = {"loss_chunk_tokens": min(CHUNK_TOKENS, max(2, quarter))}
    if OPTIMIZERS[config.optimizer].is_adamw and config.optimizer != SMALLEST_STATE.name:
        table["optimizer"] = {"optimizer": SMALLEST_STATE.name}
    if not config.optimizer_in_backward:
        table["optimizer_in_backward"] = {"optimizer_in_backward": True}
        if config.max_grad_norm:
            table["optimizer_in_backward"]["max_grad_norm"] = 0.0
    return table


def in_largest_batch(
    original: Plan, changes: Changes, budget_gib: float, tried: list[Plan]
) -> Plan | None:
    """Return a plan with changes, with the largest micro-batch that fits; None if there is none.

    The tokens per step stay. What could run is added to `tried`, the smallest micro-batch last.
    """
    sizes = [{"micro_batch_size": size} for size in smaller_batches(original.config)]
    for size in ({}, *sizes):
        plan = original.changed(changes | size)
        with suppress(ConfigError):  # an optimizer in backward cannot accumulate
            is_enough = plan.fits(budget_gib)
            tried.append(plan)
            if is_enough:
                return plan
    return None


# ---- Each change alone


@dataclass(frozen=True)
class Advice:
    """What was tried on a config: what helps, best first; what does nothing; what cannot be."""

    original: Plan
    helpful: list[Plan]
    useless: list[Plan]
    impossible: dict[str, str]
    best_three_peak_bytes: int  # with the first three together: savings do not add up

    def __str__(self) -> str:
        original = self.original
        phase = original.prediction.tensors.peak_phase
        peak = readable_mib(original.peak_bytes)
        lines = [f"{original.config.name}: predicted peak {peak}, in the {phase} phase"]
        for number, plan in enumerate(self.helpful[:3], start=1):
            saved, added_ms = readable_mib(plan.saved_bytes), plan.step_ms - original.step_ms
            time = f"{added_ms:+.1f} ms a step ({100 * plan.time_cost:+.0f} %)"
            _, _, cost = plan.costs[0].partition(": ")  # a second change follows from the first
            lines.append(f"{number}. {plan.name}: saves {saved}; {time}: {cost}")
        if self.helpful:
            peak = readable_mib(self.best_three_peak_bytes)
            lines.append(f"   the best together: a peak of {peak}")
        if self.useless:
            names = "; ".join(plan.name for plan in self.useless)
            lines.append(f"would do nothing here: {names}")
        lines += [f"not possible here: {name}: {why}" for name, why in self.impossible.items()]
        return "\n".join(lines)


def readable_mib(n_bytes: int) -> str:
    """Return bytes in whole MiB, as text."""
    return f"{n_bytes / MIB:,.0f} MiB"


def advise(run: Any, device: Device = "a100") -> Advice:
    """Return what single changes would do to the predicted peak of a config, or of a record's.

    `device` as for `predict_memory`. Changes are tried that need no other model: those that change
    nothing that is computed, lower precision, smaller batches at equal tokens per step,
    recomputation, the loss in chunks, smaller or earlier optimizer steps.
    Raises what `predict_memory` raises, for the config as it is.
    """
    config = run if isinstance(run, Config) else config_of(run.config, run.name)
    original = unchanged(config, device)
    helpful, useless, impossible = [], [], {}
    for changes in table_of(original.config, original.card).values():
        plan = original.changed(changes)
        try:
            if plan.card.gpu is None and "precision" in changes:
                answer = machine.support(changes["precision"], ON_CPU)
                if answer.slow:
                    raise PrecisionUnsupported(f"slow: {answer.reason}")
            matters = plan.saved_bytes > NOTHING * original.peak_bytes
        except (ConfigError, PrecisionUnsupported) as problem:
            impossible[plan.name] = str(problem).partition(": ")[2]
        else:
            (helpful if matters else useless).append(plan)
    helpful.sort(key=_bytes_for_time)
    useless.sort(key=_bytes_for_time)
    best = original
    for plan in helpful[:3]:  # one after the other: some exclude each other
        together = original.changed(best.changes | plan.changes)
        with suppress(ConfigError):
            best = min(best, together, key=lambda plan: plan.peak_bytes)
    return Advice(original, helpful, useless, impossible, best.peak_bytes)


def _bytes_for_time(plan: Plan) -> tuple[bool, float]:
    """Changes that take no time come first, most bytes first; then by bytes saved per ms lost."""
    is_free = plan.time_cost <= FREE or plan.changes.keys() <= FREE_CHANGES.keys()
    return not is_free, -plan.saved_bytes / (1 if is_free else plan.time_cost)


# ---- A few that make it fit


def fit(config: Config, budget_gib: float, device: Device = "a100") -> Plan:
    """Return few changes with which a step fits `budget_gib` of memory.

    Taken are all that are free, the loss in chunks, and 16-bit precision if that fits; then the
    quicker, by prediction, of smaller micro-batches (the tokens per step stay) and of checkpointed
    blocks. Where that is not enough come those that change the learning: weights in BF16, 8-bit
    moments, the optimizer step in backward where nothing is clipped or accumulated. At the end
    each change goes that is needed neither for the budget nor for time. If nothing fits, the plan
    that needs least is returned; `Plan.fits` tells.
    Raises ConfigError or PrecisionUnsupported if the config cannot run on the device at all.
    """
    return next(plans_that_fit(config, budget_gib, device))


def plans_that_fit(config: Config, budget_gib: float, device: Device = "a100") -> Iterator[Plan]:
    """Yield the plans between which `fit` chooses, quickest first: with checkpointed blocks and
    without. If nothing fits, the one that needs least.
    """
    original = unchanged(config, device)
    if original.fits(budget_gib):
        yield original
        return
    table = table_of(original.config, original.card)
    ways = [{}]
    if "gradient_checkpointing" in table:
        ways.append(table["gradient_checkpointing"])
    tried = [original]
    for recipe in _recipes(original, table):
        plans = [in_largest_batch(original, recipe | way, budget_gib, tried) for way in ways]
        fitting = [plan for plan in plans if plan]
        for plan in sorted(fitting, key=lambda plan: plan.step_ms):
            yield _without_superfluous(plan, budget_gib)
        if fitting:
            return
    least = min(tried, key=lambda plan: plan.needed_gib)
    yield _without_superfluous(least, least.needed_gib)


def _recipes(original: Plan, table: dict[str, Changes]) -> Iterator[Changes]:
    """Yield more and more changes: what is free, chunks, 16 bits; then those of the learning."""
    recipe: Changes = {}
    for key in (*FREE_CHANGES, "attention", "loss_chunk_tokens"):
        recipe |= table.get(key, {})
    if original.card.gpu:  # few CPUs multiply 16-bit numbers fast
        yield recipe | table.get("precision", {})
    yield recipe
    if original.card.gpu and original.card.has_bf16:
        recipe = recipe | {"precision": PURE_BF16}
        yield recipe
    recipe = recipe | table.get("optimizer", {})
    yield recipe
    if not original.config.max_grad_norm:
        yield recipe | table.get("optimizer_in_backward", {})


def _without_superfluous(plan: Plan, limit_gib: float) -> Plan:
    """Return a plan without those changes that it fits as well, and is as fast, without."""
    slowest = (1 + FREE) * plan.step_ms
    for key in sorted(plan.changes, key=lambda key: key in FREE_CHANGES):  # these go last
        fewer = dict(plan.changes)
        del fewer[key]
        simpler = plan.original.changed(fewer)
        if simpler.fits(limit_gib) and simpler.step_ms <= slowest:
            plan = simpler
    return plan


# ---- The largest sizes that fit


def largest_micro_batch(
    config: Config,
    budget_gib: float,
    device: Device = "a100",
    limit: int = 4096,
) -> int:
    """Return how many sequences (at most `limit`) fit in a step of one micro-batch.

    0 if not even one does.
    """
    run = resolve(config, machine.card_of(device))
    few, more = FEW_SEQUENCES

    @cache
    def of(size: int) -> Prediction:
        return predicted(with_shape(run.config, size), run.card)

    def fits(size: int) -> bool:
        # few sequences tell about all, but of a loss in chunks: it has other operations
        if size <= more or run.config.loss_chunk_tokens or run.card.gpu is None:
            return of(size).fits(budget_gib)
        requests = with_more_sequences(of(few).requests, of(more).requests, size - few)
        return replace(of(few), requests=requests).fits(budget_gib)

    return boundary(fits, 0, limit + 1)[0]


def size_that_fits(config: Config, limit: int = 8) -> Changes:
    """Return the overrides with which one micro-batch fits the GPU here; none on a CPU.

    `micro_batch_size` is at most `limit`. Where not one sequence fits, it is 1, and `model` is not
    the config's but the largest smaller one of which one sequence fits, or the smallest of all.
    """
    if not torch.cuda.is_available():
        return {}
    card = machine.card_of(machine.THIS)
    names = list(MODELS)  # from the smallest to the largest
    for model in reversed(names[: names.index(config.model) + 1]):
        smaller = config.model_copy(update={"model": model})
        size = largest_micro_batch(smaller, card.memory_gib, card, limit)
        if size:
            break
    size = max(size, 1)
    tokens = size * config.seq_len
    return {"model": model, "micro_batch_size": size, "tokens_per_step": tokens}


def fitting(*names: str, **overrides: Any) -> list[Config]:
    """Return the configs of some names or files; where memory is short, in smaller micro-batches.

    All get the size with which the first one's step fits the memory that is free here, by the
    ledger, and at least 1. `tokens_per_step` stays, so they accumulate. They remain comparable with
    each other and with other machines.
    """
    configs = [load_config(name, **overrides) for name in names]
    original = unchanged(configs[0], machine.card(choose_device()))
    tried: list[Plan] = []
    plan = in_largest_batch(original, {}, original.card.memory_gib, tried) or tried[-1]
    if not plan.changes:
        return configs
    size = plan.changes["micro_batch_size"]
    overrides |= {"note": f"micro-batch reduced to {size} to fit memory", "micro_batch_size": size}
    return [
        load_config(config_name, **overrides, name=config.name)
        for config_name, config in zip(names, configs, strict=True)
    ]


# ---- Before a run and after it: is there room, and what would make some?


def require_host_memory(config: Config) -> None:
    """Raise torch.OutOfMemoryError if a config, resolved for a CPU, has no room.

    Linux would kill the whole process. (CUDA's allocator says no in time.)
    """
    needed = Plan(config, CPU).needed_gib * GIB
    if needed <= machine.free_bytes(ON_CPU):
        return
    free_memory()
    free = machine.free_bytes(ON_CPU)
    if needed > free:
        asked = f"Tried to allocate {readable_size(needed)} (predicted, not tried)"
        raise torch.OutOfMemoryError(f"{asked}, of which {readable_size(free)} is free")


def suggest_changes(config: Config, device: torch.device) -> str:
    """Return the quickest changes with which a config runs in what is free now, all predicted."""
    card = machine.card(device)
    context_gib = CONTEXT_GIB if card.gpu else 0
    budget = card.memory_gib
    if card.gpu and config.memory_limit_gib:
        budget = min(budget, config.memory_limit_gib + context_gib)
    try:
        plans = list(plans_that_fit(config, budget, card))
        is_enough = plans[0].fits(budget)
        needed = readable_size((plans[0].needed_gib - context_gib) * GIB)
    except Exception as error:  # a hint must not cost what it is a hint for
        reason = f"the ledger cannot tell: {type(error).__name__}"
        return f"Ways out: a smaller micro_batch_size or seq_len ({reason})"
    free = readable_size((budget - context_gib) * GIB)
    options = "; or ".join(dict.fromkeys(plan.name for plan in plans))
    if not is_enough:
        smallest = options or "as it is. Take a smaller model"
        return f"No change fits {free} free; the smallest needs {needed}: {smallest}"
    if options:
        return f"{free} are free now. Cheapest ways out (predicted): {options}"
    return (
        f"Alone {config.name} needs {needed} (predicted), and {free} are free now. So this was "
        "more than that run, or other tensors were alive beside it. Delete what you no longer "
        "need (in a notebook: restart the kernel), or make what ran smaller"
    )
