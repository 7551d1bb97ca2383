"""The cheapest changes with which a training step fits a memory budget."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch

from labutils.config.card import Card
from labutils.config.choices import PRECISIONS
from labutils.config.resolve import resolve
from labutils.config.schema import Config
from labutils.machine import here
from labutils.memory.ledger import MemoryLedger
from labutils.prediction.arithmetic import least_bytes
from labutils.prediction.changes import NO_COST_CHANGES, combinations, costs, time_cost
from labutils.prediction.memory import BatchSizes, CpuPrediction, Prediction
from labutils.prediction.time import predict_time


@dataclass(frozen=True)
class Plan:
    """Changes to a config, and what is predicted with them.

    `rank` is the time that they add to a step, by hand: see `changes.time_cost`.
    """

    config: Config  # without the changes
    card: Card
    changes: dict[str, Any]
    rank: float
    prediction: Prediction | CpuPrediction

    @cached_property
    def costs(self) -> tuple[str, ...]:
        """What each change costs, and why."""
        return costs(self.config, self.changes, self.card)

    @cached_property
    def step_ms(self) -> float:
        """The predicted milliseconds of a step with the changes."""
        return predict_time(self.config.model_copy(update=self.changes), self.card).step_ms

    @cached_property
    def time_cost(self) -> float:
        """The predicted time that they add to a step, as a fraction of it; below 0 it is faster."""
        if not self.changes:
            return 0.0
        return self.step_ms / predict_time(self.config, self.card).step_ms - 1

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
    """Return the changes that cost least time with which a step fits `budget_gib` of memory.

    Tried are the micro-batch size (the tokens per step stay: it accumulates), checkpointing, the
    loss in chunks, 16-bit precision, and what is free. Of equal costs the fewest changes win.
    What changes the learning comes last: weights in BF16, then 8-bit moments, then the optimizer
    step in backward where nothing is clipped or accumulated. If nothing fits, the plan that needs
    least is returned; `Plan.fits` tells.
    Raises ConfigError or PrecisionUnsupported if the config cannot run on the device at all.
    """
    run = resolve(config, here.card_of(device))
    plans = Plans(run.config, run.card)
    as_it_is = plans.of({})
    if as_it_is.fits(budget_gib):
        return as_it_is
    candidates = plans.candidates()
    for changes in candidates:
        if plans.is_hopeless(changes, budget_gib):
            continue  # not worth a trace
        if plans.smallest_like(changes).fits(budget_gib):
            found = plans.of(changes)
            if found.fits(budget_gib):
                return plans.without_superfluous(found, budget_gib)
    found = plans.smallest_of_all()
    return plans.without_superfluous(found, max(budget_gib, found.needed_gib))


def single_changes_that_fit(
    config: Config, budget_gib: float, device: str | torch.device | Card = "a100"
) -> list[Plan]:
    """Return the plans of one change, beside free ones, that make a step fit; cheapest first.

    Empty if the config fits as it is, or if one change is not enough: see `fit`.
    """
    run = resolve(config, here.card_of(device))
    plans = Plans(run.config, run.card)
    if plans.of({}).fits(budget_gib):
        return []
    found: dict[tuple[str, ...], Plan] = {}
    for changes in plans.candidates():
        alone = tuple(key for key in changes if key not in NO_COST_CHANGES)
        if len(alone) < 2 and alone not in found and not plans.is_hopeless(changes, budget_gib):
            plan = plans.of(changes)
            if plan.fits(budget_gib):
                found[alone] = plan
    return list(found.values())


class Plans:
    """Plans for one resolved config on one card. Traces and candidates are kept."""

    def __init__(self, config: Config, card: Card) -> None:
        self.config, self.card = config, card
        self.by_other_changes: dict[tuple, BatchSizes] = {}
        self.smallest: dict[tuple, Plan] = {}
        self._candidates: list[dict[str, Any]] = []

    def of(self, changes: dict[str, Any]) -> Plan:
        """Return what is predicted with some changes."""
        others = dict(changes)
        size = others.pop("micro_batch_size", self.config.micro_batch_size)
        key = tuple(others.items())
        if key not in self.by_other_changes:
            changed = self.config.model_copy(update=others)
            self.by_other_changes[key] = BatchSizes(changed, self.card)
        prediction = self.by_other_changes[key].at(size)
        rank = time_cost(self.config, changes, self.card)
        return Plan(self.config, self.card, changes, rank, prediction)

    def is_hopeless(self, changes: dict[str, Any], budget_gib: float) -> bool:
        """Whether the bytes per parameter alone are more than the budget."""
        return least_bytes(self.config.model_copy(update=changes)) > budget_gib * 2**30

    def candidates(self) -> list[dict[str, Any]]:
        """Return every combination of changes, best first."""
        if not self._candidates:
            rank = partial(_rank, self.config, self.card)
            self._candidates = sorted(combinations(self.config, self.card), key=rank)
        return self._candidates

    def smallest_like(self, changes: dict[str, Any]) -> Plan:
        """Return the plan that needs least of those with the same recipe as some changes.

        It has everything that saves memory, with the batch whole or in single sequences: splitting
        it may add gradients. If it does not fit, no plan of the recipe does.
        """
        recipe = self._recipe(changes)
        if recipe not in self.smallest:
            same = [one for one in self.candidates() if self._recipe(one) == recipe]
            everything = max(same, key=_most_changes_smallest_batch)
            whole = dict(everything)
            whole.pop("micro_batch_size", None)
            both = self.of(everything), self.of(whole)
            self.smallest[recipe] = min(both, key=_bytes_taken)
        return self.smallest[recipe]

    def smallest_of_all(self) -> Plan:
        """Return the plan that needs least. Other recipes keep more bytes per parameter."""
        furthest = max(_changes_of_the_learning(one)[1:] for one in self.candidates())
        plans = []
        for changes in self.candidates():
            if _changes_of_the_learning(changes)[1:] == furthest:
                plans.append(self.smallest_like(changes))
        return min(plans, key=_bytes_taken)

    def without_superfluous(self, plan: Plan, limit_gib: float) -> Plan:
        """Return a plan without those changes that it fits as well, and as fast, without."""
        for key in list(plan.changes):
            fewer = dict(plan.changes)
            del fewer[key]
            simpler = self.of(fewer)
            if simpler.fits(limit_gib) and simpler.rank <= plan.rank:
                plan = simpler
        return plan

    def _recipe(self, changes: dict[str, Any]) -> tuple:
        """Return what decides the bytes per parameter that stand whatever the batch."""
        changed = self.config.model_copy(update=changes)
        return changed.precision, changed.optimizer, changed.optimizer_in_backward


def _rank(config: Config, card: Card, changes: dict[str, Any]) -> tuple:
    cost = round(time_cost(config, changes, card), 2)
    size = changes.get("micro_batch_size", 0)
    return _changes_of_the_learning(changes), cost, len(changes), -size


def _changes_of_the_learning(changes: dict[str, Any]) -> tuple[bool, bool, bool]:
    """Return which changes of the learning are among some: they are tried in this order."""
    precision = changes.get("precision")
    has_short_weights = precision is not None and PRECISIONS[precision].weights != "float32"
    return "optimizer_in_backward" in changes, "optimizer" in changes, has_short_weights


def _most_changes_smallest_batch(changes: dict[str, Any]) -> tuple[int, int]:
    return len(changes), -changes.get("micro_batch_size", 0)


def _bytes_taken(plan: Plan) -> int:
    return plan.prediction.bytes_taken
