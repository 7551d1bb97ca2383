"""Changes to a config that save memory: what each does alone, and which few make it fit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from labutils import machine
from labutils.config.card import Card, PrecisionUnsupported
from labutils.config.choices import (
    ATTENTION,
    CHECKPOINTING,
    EACH_BLOCK,
    OPTIMIZERS,
    PRECISIONS,
    SMALLEST_STATE,
    WITH_BF16,
    WITHOUT_BF16,
    Precision,
)
from labutils.config.reader import config_of
from labutils.config.schema import Config, ConfigError, resolve
from labutils.memory.device_memory import without_expandable_segments
from labutils.memory.ledger import MIB, MemoryLedger
from labutils.prediction.memory import BatchSizes, CpuPrediction, Prediction, predict_memory
from labutils.prediction.time import predict_time

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
    "loss_chunk_tokens": "no product twice; smaller ones, and more of them",
    "micro_batch_size": "more micro-batches, equal tokens per step",
    "gradient_checkpointing": "each block's forward pass twice",
    "optimizer": "a slower update, and moments of 8 bits: compare the losses",
    "optimizer_in_backward": "no clipping and no accumulation; the same update otherwise",
    "max_grad_norm": "no clipping",
    "tokens_per_step": "fewer tokens in a step, so noisier gradients: another experiment",
    "seq_len": "less context: another experiment",
}
SHORT_WEIGHTS = "weights of 8 significant bits lose small updates: compare the losses"
CHUNK_TOKENS = 512
NOTHING = 0.005  # of the peak: less is called nothing
FREE = 0.02  # of the step: a change that takes less time is free


def named(changes: Changes) -> str:
    """Return changes as they would stand in a config."""
    return ", ".join(f"{key}: {value}" for key, value in changes.items())


def reasons(changes: Changes) -> str:
    """Return what changes cost besides time, and why they cost nothing."""
    texts = []
    for key, value in changes.items():
        is_short = key == "precision" and PRECISIONS[value].weights != "float32"
        if key != "max_grad_norm" or len(changes) == 1:  # the key beside it says so
            texts.append(SHORT_WEIGHTS if is_short else REASONS[key])
    return "; ".join(texts)


def free_changes(config: Config, card: Card) -> Changes:
    """Return those of FREE_CHANGES that would change a config, and that exist on the card."""
    free = {key: value for key, value in FREE_CHANGES.items() if getattr(config, key) != value}
    if card.gpu is None or (card.is_here and without_expandable_segments()):
        free.pop("expandable_segments", None)
    if ATTENTION[config.attention].keeps_matrices:
        free["attention"] = "auto"
    return free


def faster_precision(config: Config, card: Card) -> Precision | None:
    """Return the 16-bit precision with float32 weights that a 32-bit config could take."""
    if PRECISIONS[config.precision].is_16bit:
        return None
    return WITH_BF16 if card.has_bf16 else WITHOUT_BF16


def chunks(config: Config) -> Changes:
    """Return the loss in chunks: a quarter of a micro-batch at most."""
    quarter = config.micro_batch_size * config.seq_len // 4
    return {"loss_chunk_tokens": min(CHUNK_TOKENS, max(2, quarter))}


def smaller_batches(config: Config) -> list[int]:
    """Return the smaller micro-batches of a step of equally many tokens, largest first."""
    sequences = config.tokens_per_step // config.seq_len
    sizes = range(config.micro_batch_size - 1, 0, -1)
    return [size for size in sizes if sequences % size == 0]


# ---- Each change alone


@dataclass(frozen=True)
class Advice:
    """One change: what it saves of the peak by itself (predicted), and what it costs.

    `added_ms` is what a step then takes longer (below 0: shorter), predicted; `time_cost` is the
    same as a fraction of the step. `peak_phase` is where the peak is then.
    """

    changes: Changes
    saved_bytes: int
    added_ms: float
    time_cost: float
    cost: str
    peak_phase: str

    @property
    def name(self) -> str:
        """The change as it would stand in a config."""
        return named(self.changes)


@dataclass(frozen=True)
class Advices:
    """What was tried on a config: what helps, best first; what does nothing; what cannot be."""

    config: Config
    peak_bytes: int
    peak_phase: str
    helpful: list[Advice] = field(default_factory=list)
    useless: list[Advice] = field(default_factory=list)
    impossible: dict[str, str] = field(default_factory=dict)
    best_three_peak_bytes: int = 0  # with the first three together: savings do not add up

    def __str__(self) -> str:
        peak = f"{self.peak_bytes / MIB:,.0f} MiB, in the {self.peak_phase} phase"
        lines = [f"{self.config.name}: predicted peak {peak}"]
        for number, advice in enumerate(self.helpful[:3], start=1):
            saved = f"{advice.saved_bytes / MIB:,.0f} MiB"
            time = f"{advice.added_ms:+.1f} ms a step ({100 * advice.time_cost:+.0f} %)"
            lines.append(f"{number}. {advice.name}: saves {saved}; {time}: {advice.cost}")
        if self.helpful:
            best = f"{self.best_three_peak_bytes / MIB:,.0f} MiB"
            lines.append(f"   the best together: a peak of {best}")
        if self.useless:
            names = "; ".join(advice.name for advice in self.useless)
            lines.append(f"would do nothing here: {names}")
        for name, why in self.impossible.items():
            lines.append(f"not possible here: {name}: {why}")
        return "\n".join(lines)


def advise(run: Any, device: str | torch.device | Card = "a100") -> Advices:
    """Return what single changes would do to the predicted peak of a config, or of a record's.

    `device` as for `predict_memory`. Changes are tried that need no other model: those that change
    nothing that is computed, lower precision, smaller batches at equal tokens per step,
    recomputation, the loss in chunks, smaller or earlier optimizer steps.
    Raises what `predict_memory` raises, for the config as it is.
    """
    config = run if isinstance(run, Config) else config_of(run.config, run.name)
    resolved = resolve(config, machine.card_of(device))
    config, card = resolved.config, resolved.card
    now, ms = predict_memory(config, card), predict_time(config, card).step_ms
    tried: list[Advice] = []
    impossible = {}
    for changes in single_changes(config, card):
        try:
            _require_speed(changes, card)
            changed = config.model_copy(update=changes)
            then, added = predict_memory(changed, card), predict_time(changed, card).step_ms - ms
        except (ConfigError, PrecisionUnsupported) as problem:
            impossible[named(changes)] = str(problem).partition(": ")[2]
            continue
        saved = now.peak_bytes - then.peak_bytes
        advice = Advice(changes, saved, added, added / ms, reasons(changes), then.peak_phase)
        tried.append(advice)
    tried.sort(key=_bytes_for_time)
    matters = NOTHING * now.peak_bytes
    helpful = [advice for advice in tried if advice.saved_bytes > matters]
    return Advices(
        config=config,
        peak_bytes=now.peak_bytes,
        peak_phase=now.peak_phase,
        helpful=helpful,
        useless=[advice for advice in tried if advice.saved_bytes <= matters],
        impossible=impossible,
        best_three_peak_bytes=_together(config, card, now.peak_bytes, helpful[:3]),
    )


def single_changes(config: Config, card: Card) -> Iterator[Changes]:
    """Yield the changes to a resolved config worth a try; each is one decision."""
    for key, value in free_changes(config, card).items():
        yield {key: value}
    if faster := faster_precision(config, card):
        yield {"precision": faster.name}
    yield from _smaller_batch(config)
    if not CHECKPOINTING[config.gradient_checkpointing].is_on:
        yield {"gradient_checkpointing": EACH_BLOCK.name}
    if chunks(config)["loss_chunk_tokens"] != config.loss_chunk_tokens:
        yield chunks(config)
    if OPTIMIZERS[config.optimizer].is_adamw and config.optimizer != SMALLEST_STATE.name:
        yield {"optimizer": SMALLEST_STATE.name}
    unclipped = {"max_grad_norm": 0.0} if config.max_grad_norm else {}
    if not config.optimizer_in_backward:
        yield {"optimizer_in_backward": True} | unclipped


def _smaller_batch(config: Config) -> list[Changes]:
    """Return the change to the next smaller micro-batch, or step where nothing accumulates."""
    sizes = [size for size in smaller_batches(config) if config.micro_batch_size % size == 0]
    if sizes and not config.optimizer_in_backward:
        return [{"micro_batch_size": sizes[0]}]
    if sizes:
        return [{"tokens_per_step": sizes[0] * config.seq_len, "micro_batch_size": sizes[0]}]
    if config.optimizer_in_backward:
        half = config.seq_len // 2
        return [{"tokens_per_step": half, "seq_len": half}]
    return []


def _require_speed(changes: Changes, card: Card) -> None:
    """Raise PrecisionUnsupported for a precision that this CPU computes slowly."""
    if card.gpu is None and "precision" in changes:
        answer = machine.support(changes["precision"], torch.device("cpu"))
        if answer.slow:
            raise PrecisionUnsupported(f"slow: {answer.reason}")


def _bytes_for_time(advice: Advice) -> tuple[bool, float]:
    """Changes that take no time come first, most bytes first; then by bytes saved per ms lost."""
    if advice.time_cost <= FREE or advice.changes.keys() <= FREE_CHANGES.keys():
        return False, -advice.saved_bytes
    return True, -advice.saved_bytes / advice.added_ms


def _together(config: Config, card: Card, peak_bytes: int, advices: list[Advice]) -> int:
    """Return the peak with several changes, taken one after the other: some exclude each other."""
    together: Changes = {}
    for advice in advices:
        more = together | advice.changes
        with suppress(ConfigError):
            peak = predict_memory(config.model_copy(update=more), card).peak_bytes
            if peak < peak_bytes:
                together, peak_bytes = more, peak
    return peak_bytes


# ---- A few that make it fit


@dataclass(frozen=True)
class Plan:
    """Changes to a config, and what is predicted with them."""

    config: Config  # without the changes
    card: Card
    changes: Changes
    prediction: Prediction | CpuPrediction

    @cached_property
    def step_ms(self) -> float:
        """The predicted milliseconds of a step with the changes."""
        return predict_time(self.config.model_copy(update=self.changes), self.card).step_ms

    @cached_property
    def time_cost(self) -> float:
        """The predicted time that they add to a step, as a fraction of it; below 0 it is faster."""
        return self.step_ms / predict_time(self.config, self.card).step_ms - 1

    @cached_property
    def costs(self) -> tuple[str, ...]:
        """What each change costs, and why."""
        return tuple(
            f"{key} {value}: {reasons({key: value})}" for key, value in self.changes.items()
        )

    @property
    def ledger(self) -> MemoryLedger:
        """The ledger of a step with the changes."""
        return self.prediction.ledger

    @property
    def needed_gib(self) -> float:
        """The memory in GiB of the smallest device on which it runs."""
        return self.prediction.needed_gib

    def fits(self, budget_gib: float) -> bool:
        """Whether it runs in so much memory, on a card with its context in it."""
        return self.prediction.fits(budget_gib)


def fit(config: Config, budget_gib: float, device: str | torch.device | Card = "a100") -> Plan:
    """Return few changes with which a step fits `budget_gib` of memory.

    Taken are all that are free, the loss in chunks, and 16-bit precision if that fits; then the
    quicker, by prediction, of smaller micro-batches (the tokens per step stay) and of checkpointed
    blocks. Where that is not enough come those that change the learning: weights in BF16, 8-bit
    moments, the optimizer step in backward where nothing is clipped or accumulated. At the end
    each change goes that is needed neither for the budget nor for time. If nothing fits, the plan
    that needs least is returned; `Plan.fits` tells.
    Raises ConfigError or PrecisionUnsupported if the config cannot run on the device at all.
    """
    run = resolve(config, machine.card_of(device))
    plans = Plans(run.config, run.card)
    if plans.of({}).fits(budget_gib):
        return plans.of({})
    smallest: list[Plan] = []
    for recipe in _recipes(run.config, run.card):
        checkpointed = recipe | _checkpointing(run.config)[-1]
        sizes = plans.sizes(checkpointed)
        # splitting a batch may add gradients: the whole one can be the smaller
        fewest = [plans.of(checkpointed | size) for size in (sizes[0], sizes[-1])]
        if any(plan.fits(budget_gib) for plan in fewest):
            found = []
            for checkpointing in _checkpointing(run.config):
                found += plans.first_that_fits(recipe | checkpointing, budget_gib)
            quickest = min(found, key=lambda plan: plan.step_ms)
            return plans.without_superfluous(quickest, budget_gib)
        smallest += fewest
    least = min(smallest, key=lambda plan: plan.prediction.bytes_taken)
    return plans.without_superfluous(least, max(budget_gib, least.needed_gib))


def single_changes_that_fit(
    config: Config, budget_gib: float, device: str | torch.device | Card = "a100"
) -> list[Plan]:
    """Return the plans of one change, beside free ones, that make a step fit; quickest first.

    Empty if the config fits as it is, or if one change is not enough: see `fit`.
    """
    run = resolve(config, machine.card_of(device))
    config, card = run.config, run.card
    plans = Plans(config, card)
    if plans.of({}).fits(budget_gib):
        return []
    free = free_changes(config, card)
    tried = [{}, *_checkpointing(config)[1:], chunks(config)]
    if card.gpu and (faster := faster_precision(config, card)):
        tried.append({"precision": faster.name})
    found = [plans.of(free | changes) for changes in tried]
    found += [plans.of(free | size) for size in plans.sizes(free)[1:]]
    fitting = [plan for plan in found if plan.fits(budget_gib)]
    quickest = sorted(fitting, key=lambda plan: plan.step_ms)
    by_keys = {tuple(plan.changes): plan for plan in reversed(quickest)}
    return list(by_keys.values())[::-1]


class Plans:
    """Plans for one resolved config on one card. Traces are kept."""

    def __init__(self, config: Config, card: Card) -> None:
        self.config, self.card = config, card
        self._sizes: dict[str, BatchSizes] = {}

    def of(self, changes: Changes) -> Plan:
        """Return what is predicted with some changes."""
        changed = self.config.model_copy(update=changes)
        key = changed.model_copy(update={"micro_batch_size": 1}).model_dump_json()
        if key not in self._sizes:
            self._sizes[key] = BatchSizes(changed, self.card)
        prediction = self._sizes[key].at(changed.micro_batch_size)
        return Plan(self.config, self.card, changes, prediction)

    def sizes(self, changes: Changes) -> list[Changes]:
        """Return the micro-batches that can stand beside some changes, largest first."""
        if self.config.model_copy(update=changes).optimizer_in_backward:
            return [{}]  # it cannot accumulate
        return [{}, *({"micro_batch_size": size} for size in smaller_batches(self.config))]

    def first_that_fits(self, changes: Changes, budget_gib: float) -> list[Plan]:
        """Return the plan with the largest micro-batch that fits, beside some changes."""
        for size in self.sizes(changes):
            plan = self.of(changes | size)
            if plan.fits(budget_gib):
                return [plan]
        return []

    def without_superfluous(self, plan: Plan, limit_gib: float) -> Plan:
        """Return a plan without those changes that it fits as well, and is as fast, without."""
        slowest = (1 + FREE) * plan.step_ms
        for key in sorted(plan.changes, key=lambda key: key in FREE_CHANGES):  # these go last
            fewer = {other: value for other, value in plan.changes.items() if other != key}
            simpler = self.of(fewer)
            if simpler.fits(limit_gib) and simpler.step_ms <= slowest:
                plan = simpler
        return plan


def _recipes(config: Config, card: Card) -> list[Changes]:
    """Return more and more changes: what is free, chunks, 16 bits; then those of the learning."""
    base = free_changes(config, card)
    if not 0 < config.loss_chunk_tokens <= CHUNK_TOKENS:
        base |= chunks(config)
    recipes = [base]
    faster = faster_precision(config, card)
    # few CPUs multiply 16-bit numbers fast; a loss scale needs all gradients at once
    is_possible = faster and not (faster.loss_scale and config.optimizer_in_backward)
    if card.gpu and is_possible:
        recipes.insert(0, base | {"precision": faster.name})
    if card.gpu and card.has_bf16:
        short = [row.name for row in PRECISIONS.values() if row.weights == "bfloat16"]
        recipes.append(base | {"precision": short[0]})
    if OPTIMIZERS[config.optimizer].is_adamw:
        recipes.append(recipes[-1] | {"optimizer": SMALLEST_STATE.name})
    last = config.model_copy(update=recipes[-1])
    scales = PRECISIONS[last.precision].loss_scale
    if not (scales or last.max_grad_norm or last.grad_accum_steps > 1):
        recipes.append(recipes[-1] | {"optimizer_in_backward": True})
    return recipes


def _checkpointing(config: Config) -> list[Changes]:
    if CHECKPOINTING[config.gradient_checkpointing].is_on:
        return [{}]
    return [{}, {"gradient_checkpointing": EACH_BLOCK.name}]
