"""Predict the peak memory of a training step, without running it and without a GPU.

The real model takes a real step on tensors without data (`prediction.trace`). For a card the step's
requests are replayed through the caching allocator's rules (`prediction.replay`). So the answer is
what the card must have, and not only what tensors take.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property

import torch

from labutils import machine
from labutils.config.card import CONTEXT_GIB, Card
from labutils.config.schema import Config, resolve
from labutils.memory.device_memory import without_expandable_segments
from labutils.memory.ledger import MemoryLedger
from labutils.prediction import replay
from labutils.prediction.allocator import DEFAULT, EXPANDABLE, CachingAllocator, Settings
from labutils.prediction.trace import Trace, Traces

# Of what the allocator needs at least: so near is the prediction, so that no "fits" is false.
MARGIN = 1.02
# Times the peak: a rule of thumb for a CPU, whose allocator is not replayed.
ALLOWANCE = 1.1


def predict_memory(
    config: Config, device: str | torch.device | Card = "a100", *, keep_outputs: bool = False
) -> MemoryLedger:
    """Return the predicted ledger of one training step of a config on a device.

    `device` is a key of CARDS, "this" for the GPU here, "cpu", a `torch.device` or a `Card`. On a
    CPU `when_cpu` applies. `keep_outputs` predicts a loop whose variable keeps the model's outputs,
    logits among them, from one step to the next. Nothing is allocated.
    For a card the ledger also tells what the allocator reserves in three steps, and how much memory
    the smallest card has on which they complete.
    Raises ConfigError if the config cannot run there, and PrecisionUnsupported if the device lacks
    what it asks for.
    """
    run = resolve(config, machine.card_of(device))
    return BatchSizes(run.config, run.card, keep_outputs).at(run.config.micro_batch_size).ledger


def needed_gib(ledger: MemoryLedger, device: str | torch.device | Card = "a100") -> float:
    """Return the memory in GiB that a device must have for a ledger's run.

    On a card the context is in it. Where the allocator was not replayed, a tenth more than the peak
    stands for what it cannot use.
    """
    if ledger.needed_bytes is not None:
        return ledger.needed_bytes / 2**30
    context = CONTEXT_GIB if machine.card_of(device).gpu else 0
    return ALLOWANCE * ledger.peak_bytes / 2**30 + context


@dataclass(frozen=True)
class Prediction:
    """What a config's run asks of a card, in order. All else is computed when it is asked for."""

    trace: Trace
    n_micro_batches: int
    card_name: str
    settings: Settings

    @cached_property
    def ledger(self) -> MemoryLedger:
        """The ledger of a step, and what the allocator takes from the card for three."""
        n_traced = min(self.n_micro_batches, 2)
        method = f"predicted for {self.card_name}"
        found = replay.ledger(self.trace, n_traced, method, self.settings)
        reserved = {
            "reserved_bytes": self.with_default.peak_reserved,
            "reserved_expandable_bytes": self.with_expandable.peak_reserved,
            "needed_bytes": self.needed_bytes,
            "needed_expandable_bytes": self.needed_expandable_bytes,
        }
        return found.model_copy(update=reserved)

    @cached_property
    def requests(self) -> list[replay.Request]:
        """What the allocator is asked for in three steps."""
        return replay.requests(self.trace, self.n_micro_batches)

    @cached_property
    def with_default(self) -> CachingAllocator:
        """An unlimited allocator with torch's default settings, after the requests."""
        return replay.replayed(self.requests, CachingAllocator())

    @cached_property
    def with_expandable(self) -> CachingAllocator:
        """The same with expandable segments."""
        return replay.replayed(self.requests, CachingAllocator(settings=EXPANDABLE))

    @cached_property
    def as_set(self) -> CachingAllocator:
        """The same as the config says, and on the GPU here PYTORCH_ALLOC_CONF."""
        if self.settings == DEFAULT:
            return self.with_default
        if self.settings == EXPANDABLE:
            return self.with_expandable
        return replay.replayed(self.requests, CachingAllocator(settings=self.settings))

    @cached_property
    def needed_expandable_bytes(self) -> int:
        """The smallest card's memory with expandable segments, context and MARGIN included."""
        return self._needed(self.with_expandable)

    @cached_property
    def needed_bytes(self) -> int:
        """The smallest card's memory on which three steps complete, context and MARGIN included."""
        if self.settings == EXPANDABLE:
            return self.needed_expandable_bytes
        return self._needed(self.as_set)

    def _needed(self, unlimited: CachingAllocator) -> int:
        limit = replay.smallest_limit(self.requests, unlimited)
        return round(MARGIN * limit + CONTEXT_GIB * 2**30)

    @property
    def needed_gib(self) -> float:
        """`needed_bytes` in GiB."""
        return self.needed_bytes / 2**30

    @property
    def bytes_taken(self) -> int:
        """What the allocator reserves where nothing limits it: quick, to compare configs by."""
        return self.as_set.peak_reserved

    def fits(self, budget_gib: float) -> bool:
        """Whether three steps complete on a card with so much memory, its context included."""
        for_tensors = (budget_gib - CONTEXT_GIB) * 2**30 / MARGIN
        return replay.completes(self.requests, for_tensors, self.settings)


@dataclass(frozen=True)
class CpuPrediction:
    """A ledger without requests to replay: of a CPU."""

    ledger: MemoryLedger

    @property
    def needed_gib(self) -> float:
        """The memory in GiB that must be free, about."""
        return ALLOWANCE * self.ledger.peak_bytes / 2**30

    @property
    def bytes_taken(self) -> int:
        """The peak: quick, to compare configs by."""
        return self.ledger.peak_bytes

    def fits(self, budget_gib: float) -> bool:
        """Whether so much memory is enough."""
        return self.needed_gib <= budget_gib


class BatchSizes:
    """Predictions for a resolved config at any micro-batch size. Two sizes are traced for all."""

    def __init__(self, config: Config, card: Card, keep_outputs: bool = False) -> None:
        self.config, self.card = config, card
        self.traces = Traces(config, card.gpu, keep_outputs)

    def at(self, micro_batch_size: int) -> Prediction | CpuPrediction:
        """Return the prediction with so many sequences at a time, `tokens_per_step` staying."""
        tokens = self.config.seq_len * micro_batch_size
        n_micro_batches = max(self.config.tokens_per_step // tokens, 1)
        n_traced = min(n_micro_batches, 2)
        trace = self.traces.at(micro_batch_size, n_traced)
        if self.card.gpu is None:
            return CpuPrediction(replay.ledger(trace, n_traced, "predicted for cpu", None))
        settings = allocator_settings(self.config, self.card)
        return Prediction(trace, n_micro_batches, self.card.name, settings)


def allocator_settings(config: Config, card: Card) -> Settings:
    """Return how a config's run sets the allocator of a card.

    On the GPU here PYTORCH_ALLOC_CONF counts too, and whether the system has expandable segments.
    """
    if not card.is_here:
        return EXPANDABLE if config.expandable_segments else DEFAULT
    text = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""
    found = Settings.parse(text)
    wanted = found.expandable_segments or config.expandable_segments
    return found._replace(expandable_segments=wanted and not without_expandable_segments())
