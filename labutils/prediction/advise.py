"""Which changes would save most memory in *this* run, and which nothing: each is predicted."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from labutils.config.card import Card, PrecisionUnsupported
from labutils.config.choices import ATTENTION, EACH_BLOCK, OPTIMIZERS, SMALLEST_STATE
from labutils.config.reader import config_of
from labutils.config.resolve import resolve
from labutils.config.schema import Config, ConfigError
from labutils.machine import here
from labutils.memory.ledger import MIB, MemoryLedger
from labutils.prediction.changes import (
    CHUNK_TOKENS,
    NO_COST_CHANGES,
    faster_precision,
    reasons,
)
from labutils.prediction.memory import predict_memory
from labutils.prediction.time import predict_time

NOTHING = 0.005  # of the peak: less is called nothing
FREE = 0.02  # of the step: a change that takes less time is free


@dataclass(frozen=True)
class Advice:
    """One change: what it saves of the peak by itself (predicted), and what it costs.

    `added_ms` is what a step then takes longer (below 0: shorter), predicted; `time_cost` is the
    same as a fraction of the step. `peak_phase` is where the peak is then.
    """

    changes: dict[str, Any]
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
    helpful: list[Advice]
    useless: list[Advice]
    impossible: dict[str, str]
    best_three_peak_bytes: int  # with the first three together: savings do not add up

    def __str__(self) -> str:
        peak = f"{self.peak_bytes / MIB:,.0f} MiB, in the {self.peak_phase} phase"
        lines = [f"{self.config.name}: predicted peak {peak}"]
        for i, one in enumerate(self.helpful[:3], start=1):
            saved = f"{one.saved_bytes / MIB:,.0f} MiB"
            time = f"{one.added_ms:+.1f} ms a step ({100 * one.time_cost:+.0f} %)"
            lines.append(f"{i}. {one.name}: saves {saved}; {time}: {one.cost}")
        if self.helpful:
            best = f"{self.best_three_peak_bytes / MIB:,.0f} MiB"
            lines.append(f"   the best together: a peak of {best}")
        if self.useless:
            names = "; ".join(one.name for one in self.useless)
            lines.append(f"would do nothing here: {names}")
        for name, why in self.impossible.items():
            lines.append(f"not possible here: {name}: {why}")
        return "\n".join(lines)


def named(changes: dict[str, Any]) -> str:
    """Return changes as they would stand in a config."""
    return ", ".join(f"{key}: {value}" for key, value in changes.items())


def advise(run: Any, device: str | torch.device | Card = "a100") -> Advices:
    """Return what single changes would do to the predicted peak of a config, or of a record's.

    `device` as for `predict_memory`. Changes are tried that need no other model or length: those
    that change nothing that is computed, lower precision, smaller batches at equal tokens per step,
    recomputation, the loss in chunks, smaller or earlier optimizer steps.
    Raises what `predict_memory` raises, for the config as it is.
    """
    config = run if isinstance(run, Config) else config_of(run.config, run.name)
    resolved = resolve(config, here.card_of(device))
    config, card = resolved.config, resolved.card
    now = predict_memory(config, card)
    tried, impossible = [], {}
    for changes in candidates(config, card):
        slow = _slow_here(changes) if card.gpu is None else ""
        if slow:
            impossible[named(changes)] = slow
            continue
        try:
            ledger = predict_memory(config.model_copy(update=changes), card)
        except (ConfigError, PrecisionUnsupported) as problem:
            impossible[named(changes)] = str(problem).partition(": ")[2]
            continue
        tried.append(_advice(config, changes, card, now, ledger))
    tried.sort(key=_order)
    helpful, useless = [], []
    for one in tried:
        matters = one.saved_bytes > NOTHING * now.peak_bytes
        (helpful if matters else useless).append(one)
    return Advices(
        config=config,
        peak_bytes=now.peak_bytes,
        peak_phase=now.peak_phase,
        helpful=helpful,
        useless=useless,
        impossible=impossible,
        best_three_peak_bytes=_together(config, card, now.peak_bytes, helpful[:3]),
    )


def _advice(
    config: Config, changes: dict[str, Any], card: Card, now: MemoryLedger, then: MemoryLedger
) -> Advice:
    before = predict_time(config, card).step_ms
    added = predict_time(config.model_copy(update=changes), card).step_ms - before
    saved = now.peak_bytes - then.peak_bytes
    return Advice(changes, saved, added, added / before, reasons(config, changes), then.peak_phase)


def _order(advice: Advice) -> tuple[bool, float]:
    """Changes that take no time come first, most bytes first; then by bytes saved per ms lost."""
    if advice.time_cost <= FREE or advice.changes.keys() <= NO_COST_CHANGES.keys():
        return False, -advice.saved_bytes
    return True, -advice.saved_bytes / advice.added_ms


def _together(config: Config, card: Card, peak_bytes: int, advices: list[Advice]) -> int:
    """Return the peak with several changes, taken one after the other: some exclude each other."""
    together: dict[str, Any] = {}
    for one in advices:
        more = together | one.changes
        with suppress(ConfigError):
            peak = predict_memory(config.model_copy(update=more), card).peak_bytes
            if peak < peak_bytes:
                together, peak_bytes = more, peak
    return peak_bytes


def _slow_here(changes: dict[str, Any]) -> str:
    if "precision" not in changes:
        return ""
    answer = here.support(changes["precision"], torch.device("cpu"))
    return answer.reason if answer.slow else ""


def candidates(config: Config, card: Card) -> list[dict[str, Any]]:
    """Return the changes worth a try; each is one decision, though some need two keys."""
    found: list[dict[str, Any]] = [{key: value} for key, (value, _) in NO_COST_CHANGES.items()]
    if ATTENTION[config.attention].keeps_matrices:
        found.append({"attention": "auto"})
    if faster := faster_precision(config, card):
        found.append({"precision": faster.name})
    found += _smaller_batch(config)
    found.append({"gradient_checkpointing": EACH_BLOCK.name})
    quarter = config.micro_batch_size * config.seq_len // 4
    found.append({"loss_chunk_tokens": min(CHUNK_TOKENS, max(2, quarter))})
    if OPTIMIZERS[config.optimizer].is_adamw:
        found.append({"optimizer": SMALLEST_STATE.name})
    unclipped = {"max_grad_norm": 0.0} if config.max_grad_norm else {}
    found.append({"optimizer_in_backward": True} | unclipped)
    return [changes for changes in found if config.model_copy(update=changes) != config]


def _smaller_batch(config: Config) -> list[dict[str, Any]]:
    """Return the change to the next smaller micro-batch; with no accumulation to a smaller step."""
    size = config.micro_batch_size
    divisors = [n for n in range(1, size) if size % n == 0]
    if divisors and not config.optimizer_in_backward:
        return [{"micro_batch_size": divisors[-1]}]
    if divisors:  # it cannot accumulate
        tokens = divisors[-1] * config.seq_len
        return [{"tokens_per_step": tokens, "micro_batch_size": divisors[-1]}]
    if config.optimizer_in_backward:
        half = config.seq_len // 2
        return [{"tokens_per_step": half, "seq_len": half}]
    return []
