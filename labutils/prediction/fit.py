"""The cheapest changes with which a training step fits a memory budget."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from labutils.config.schema import Config
from labutils.machine.gpu import card_named
from labutils.memory.device_memory import without_expandable_segments
from labutils.memory.ledger import MemoryLedger
from labutils.prediction.arithmetic import closed_form
from labutils.prediction.changes import CHUNK_TOKENS, FREE, costs, time_cost
from labutils.prediction.memory import PlainPrediction, Prediction, Sweep, needed_gib
from labutils.prediction.resolve import resolve

ROUGHLY = 1.1  # the closed form overstates a peak by less where attention is fused; a test compares


@dataclass(frozen=True)
class Fit:
    """Changes to a config, what each costs and why, the time they add (see `time_cost`), and what
    is predicted.
    """

    changes: dict[str, Any]
    costs: tuple[str, ...]
    time_cost: float
    prediction: Prediction | PlainPrediction

    @property
    def ledger(self) -> MemoryLedger:
        """The ledger of a step with the changes."""
        return self.prediction.ledger

    @property
    def needed_gib(self) -> float:
        """The memory of the smallest device on which it runs, in GiB."""
        return self.prediction.needed_gib

    def fits(self, budget_gib: float) -> bool:
        """Whether it runs in so much memory, on a card with its context in it."""
        return self.prediction.fits(budget_gib)


def fit(config: Config, budget_gib: float, device: str = "a100") -> Fit:
    """Return the changes that cost least time with which a config's step fits `budget_gib` of card
    memory.

    Searched: micro-batch size (the tokens per step stay: it accumulates), checkpointing, the loss
    in chunks, 16-bit precision if the device has it, and what is free. Of equal costs the fewest
    changes win. What changes the learning comes last: pure BF16, then 8-bit moments without it and
    with it, then, where nothing is clipped or accumulated, the optimizer step in backward too. If
    nothing fits, the smallest of all is returned; `Fit.fits` tells. Raises ConfigError or
    PrecisionUnsupported if the config cannot run on the device at all.
    """
    resolved = resolve(config, device)
    tried = _Trials(resolved, device)

    def without_the_superfluous(found: Fit, limit_gib: float) -> Fit:
        for key in list(found.changes):
            fewer = tried({k: v for k, v in found.changes.items() if k != key})
            if fewer.fits(limit_gib) and fewer.time_cost <= found.time_cost:
                found = fewer
        return found

    found = tried({})
    if found.fits(budget_gib):
        return found
    candidates = _candidates(resolved, device)
    by_recipe: dict[tuple, Fit] = {}

    def smallest(recipe: tuple) -> Fit:
        """Everything that saves memory, with the batch whole or in single sequences:

        Splitting may add gradients.
        """
        if recipe not in by_recipe:
            same = [c for c in candidates if _recipe(resolved, c) == recipe]
            everything = max(
                same, key=lambda changes: (len(changes), -changes.get("micro_batch_size", 0))
            )
            whole = {key: value for key, value in everything.items() if key != "micro_batch_size"}
            by_recipe[recipe] = min(
                tried(everything), tried(whole), key=lambda one: one.prediction.bytes_taken
            )
        return by_recipe[recipe]

    for changes in candidates:
        if tried.hopeless(changes, budget_gib):
            continue  # not worth a trace
        if smallest(_recipe(resolved, changes)).fits(budget_gib):
            found = tried(changes)
            if found.fits(budget_gib):
                return without_the_superfluous(found, budget_gib)
    furthest = max(
        _for_the_last(changes)[1:] for changes in candidates
    )  # other recipes keep more bytes per parameter
    recipes = {
        _recipe(resolved, changes)
        for changes in candidates
        if _for_the_last(changes)[1:] == furthest
    }
    found = min(map(smallest, recipes), key=lambda one: one.prediction.bytes_taken)
    return without_the_superfluous(found, max(budget_gib, found.needed_gib))


def enough_alone(config: Config, budget_gib: float, device: str = "a100") -> list[Fit]:
    """Return the changes, one beside the free ones, each of which makes a config's step fit;
    cheapest first.

    Empty if the config fits as it is, or if one change is not enough: see `fit`.
    """
    resolved = resolve(config, device)
    tried, found = _Trials(resolved, device), {}
    if tried({}).fits(budget_gib):
        return []
    for changes in _candidates(resolved, device):
        alone = tuple(key for key in changes if key not in FREE)
        if len(alone) < 2 and alone not in found and not tried.hopeless(changes, budget_gib):
            one = tried(changes)
            if one.fits(budget_gib):
                found[alone] = one
    return list(found.values())


class _Trials:
    """Ledgers of a config with changes; traces are kept."""

    def __init__(self, config: Config, device: str) -> None:
        self.config, self.device = config, device
        self.sweeps: dict[tuple, Sweep] = {}

    def __call__(self, changes: dict[str, Any]) -> Fit:
        others = {key: value for key, value in changes.items() if key != "micro_batch_size"}
        config = self.config.model_copy(update=others)
        sweep = self.sweeps.setdefault(tuple(others.items()), Sweep(config, self.device))
        found = sweep.at(changes.get("micro_batch_size", config.micro_batch_size))
        return Fit(changes, costs(self.config, changes), time_cost(self.config, changes), found)

    def hopeless(self, changes: dict[str, Any], budget_gib: float) -> bool:
        """Whether the closed form, which is of fused attention, is far above the budget."""
        rough = needed_gib(closed_form(self.config.model_copy(update=changes)), self.device)
        return self.config.attention not in ("eager", "math") and rough > ROUGHLY * budget_gib


def _candidates(config: Config, device: str) -> list[dict[str, Any]]:
    """Return every combination of changes, best first; the free ones are all in each."""
    return sorted(_combinations(config, device), key=lambda changes: _rank(config, changes))


def _combinations(config: Config, device: str) -> Iterator[dict[str, Any]]:
    has_bf16 = device != "cpu" and card_named(device).flash
    free = {key: value for key, (value, _) in FREE.items() if getattr(config, key) != value}
    if device == "cpu" or (device == "this" and without_expandable_segments()):
        free.pop("expandable_segments", None)
    sequences = config.micro_batch_size * config.grad_accum_steps
    sizes = [n for n in range(config.micro_batch_size, 0, -1) if sequences % n == 0]
    sizes = (
        sizes[:1] if config.optimizer_in_backward else sizes
    )  # it cannot accumulate, nor have a loss scale
    precisions = [config.precision]
    if (
        config.precision in ("fp32", "tf32") and device != "cpu"
    ):  # few CPUs multiply 16-bit numbers fast
        precisions += ["bf16"] if has_bf16 else [] if config.optimizer_in_backward else ["fp16"]
    if has_bf16 and config.precision != "pure_bf16":
        precisions.append("pure_bf16")
    choices = {
        "gradient_checkpointing": dict.fromkeys((config.gradient_checkpointing, "block")),
        "loss_chunk_tokens": [config.loss_chunk_tokens],
        "precision": precisions,
        "micro_batch_size": sizes,
        "optimizer": dict.fromkeys((config.optimizer, "adamw_8bit")),
        "optimizer_in_backward": dict.fromkeys((config.optimizer_in_backward, True)),
    }
    larger_chunks = not 0 < config.loss_chunk_tokens <= CHUNK_TOKENS
    if larger_chunks and config.micro_batch_size * config.seq_len > CHUNK_TOKENS:
        choices["loss_chunk_tokens"].append(CHUNK_TOKENS)
    for values in itertools.product(*choices.values()):
        changes = dict(zip(choices, values, strict=True))
        if changes["optimizer"] != config.optimizer and not config.optimizer.startswith("adamw"):
            continue
        if changes["optimizer_in_backward"] != config.optimizer_in_backward and (
            changes["optimizer"] != "adamw_8bit"
            or changes["precision"] == "fp16"
            or config.max_grad_norm
            or changes["micro_batch_size"] < sequences
        ):
            continue
        yield free | {key: value for key, value in changes.items() if getattr(config, key) != value}


def _rank(config: Config, changes: dict[str, Any]) -> tuple:
    return (
        _for_the_last(changes),
        round(time_cost(config, changes), 2),
        len(changes),
        -changes.get("micro_batch_size", 0),
    )


def _for_the_last(changes: dict[str, Any]) -> tuple[bool, bool, bool]:
    return (
        "optimizer_in_backward" in changes,
        "optimizer" in changes,
        changes.get("precision") == "pure_bf16",
    )


def _recipe(config: Config, changes: dict[str, Any]) -> tuple:
    return tuple(
        changes.get(k, getattr(config, k))
        for k in ("precision", "optimizer", "optimizer_in_backward")
    )
