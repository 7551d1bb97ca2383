"""Predict the peak memory of a training step, by category and phase, without running it and without
a GPU.

The real model takes a real step on tensors without data (`prediction.trace`). Deep models are traced
with two and three layers only: a layer repeats, and bytes are affine in the number of sequences
(`labutils.extrapolation`). For a card the step's requests are replayed through the caching
allocator's rules (`labutils.replay`): what it must have, not only what tensors take.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from labutils.config.cards import CONTEXT_GIB
from labutils.config.schema import Config
from labutils.memory.ledger import MemoryLedger
from labutils.prediction import replay
from labutils.prediction.allocator import CachingAllocator, Settings
from labutils.prediction.arithmetic import closed_form
from labutils.prediction.extrapolation import CannotExtrapolate, extrapolated
from labutils.prediction.resolve import resolve
from labutils.prediction.trace import Trace, trace_step
from labutils.prediction.traces import (
    CPU,
    DEFAULT,
    EXPANDABLE,
    FEW_LAYERS,
    FEW_SEQUENCES,
    _fake_like,
    _fake_world,
    _settings,
    _step_only,
    _trace,
)
from labutils.techniques import checkpointing
from labutils.techniques.precision import autocast
from labutils.workload.gpt2 import SIZES

KNOWN_GOOD_TORCH = "2.11 to 2.13"
# of what the allocator needs at least: so near the prediction is, so that no "fits" is false
MARGIN = 1.02
# times the peak: a rule of thumb, where the allocator was not replayed (a CPU, the closed form)
ALLOWANCE = 1.1


def predict_memory(
    config: Config, device: str = "a100", *, keep_outputs: bool = False
) -> MemoryLedger:
    """Return the predicted ledger of one training step of a config on a device: bytes by category
    at each phase's peak.

    `device` is a key of CARDS, "this" for the GPU here, or "cpu" (then `when_cpu` applies, and no CUDA rule).
    `keep_outputs` predicts a loop that keeps the model's outputs, logits among them, from one step to the next.
    Nothing is allocated. For a card the ledger also tells what the allocator reserves in three
    steps, and of the smallest card on which they complete. Should torch have changed so that steps
    cannot be traced, a warning says so and the ledger is the closed form's; its `method` tells.
    Raises ConfigError if the config cannot run there, PrecisionUnsupported if the device lacks what
    it asks for.
    """
    resolved = resolve(config, device)
    return Sweep(resolved, device, keep_outputs).at(resolved.micro_batch_size).ledger


def needed_gib(ledger: MemoryLedger, device: str = "a100") -> float:
    """Return the memory that a device must have for a ledger's run, in GiB; on a card the context
    is in it.

    Where the allocator was not replayed, a tenth more than the peak stands for what it cannot use.
    """
    if ledger.needed_bytes is not None:
        return ledger.needed_bytes / 2**30
    return ALLOWANCE * ledger.peak_bytes / 2**30 + (0 if device == "cpu" else CONTEXT_GIB)


@dataclass(frozen=True)
class Prediction:
    """What a config's run asks for on a card:

    Its requests, in order. All else is computed when it is asked for.
    """

    trace: Trace
    n_micro_batches: int
    device: str
    settings: Settings

    @cached_property
    def ledger(self) -> MemoryLedger:
        """The ledger of a step, with what the allocator reserves in three, and the smallest card
        for them.
        """
        found = replay.ledger(
            self.trace, min(self.n_micro_batches, 2), f"predicted for {self.device}", self.settings
        )
        return found.model_copy(
            update={
                "reserved_bytes": self.with_default.peak_reserved,
                "reserved_expandable_bytes": self.with_expandable.peak_reserved,
                "needed_bytes": self.needed_bytes,
                "needed_expandable_bytes": self.needed_expandable_bytes,
            }
        )

    @cached_property
    def requests(self) -> list[replay.Request]:
        """What the allocator is asked for in three steps."""
        return replay.requests(self.trace, self.n_micro_batches)

    @cached_property
    def with_default(self) -> CachingAllocator:
        """An allocator with torch's default settings and no limit that has met the requests."""
        return replay.replayed(self.requests, CachingAllocator())

    @cached_property
    def with_expandable(self) -> CachingAllocator:
        """The same with expandable segments."""
        return replay.replayed(self.requests, CachingAllocator(settings=EXPANDABLE))

    @cached_property
    def as_set(self) -> CachingAllocator:
        """The same as the config and, for the GPU here, PYTORCH_ALLOC_CONF say."""
        if self.settings == DEFAULT:
            return self.with_default
        if self.settings == EXPANDABLE:
            return self.with_expandable
        return replay.replayed(self.requests, CachingAllocator(settings=self.settings))

    @cached_property
    def needed_expandable_bytes(self) -> int:
        """The memory of the smallest card with expandable segments, context and MARGIN included."""
        return self._needed(self.with_expandable)

    @cached_property
    def needed_bytes(self) -> int:
        """The memory of the smallest card on which three steps complete, context and MARGIN
        included.
        """
        return (
            self.needed_expandable_bytes
            if self.settings == EXPANDABLE
            else self._needed(self.as_set)
        )

    def _needed(self, free: CachingAllocator) -> int:
        return round(MARGIN * replay.smallest_limit(self.requests, free) + CONTEXT_GIB * 2**30)

    @property
    def needed_gib(self) -> float:
        """`needed_bytes` in GiB."""
        return self.needed_bytes / 2**30

    @property
    def bytes_taken(self) -> int:
        """What the allocator reserves where nothing limits it: quick, to compare configs by."""
        return self.as_set.peak_reserved

    def fits(self, budget_gib: float) -> bool:
        """Whether three steps complete on a card with so much memory, context and MARGIN included."""
        return replay.completes(
            self.requests, (budget_gib - CONTEXT_GIB) * 2**30 / MARGIN, self.settings
        )


@dataclass(frozen=True)
class PlainPrediction:
    """A ledger without requests to replay: of a CPU, or from the closed form."""

    ledger: MemoryLedger
    device: str

    @property
    def needed_gib(self) -> float:
        """The memory that the device must have, about, in GiB."""
        return needed_gib(self.ledger, self.device)

    @property
    def bytes_taken(self) -> int:
        """The peak: quick, to compare configs by."""
        return self.ledger.peak_bytes

    def fits(self, budget_gib: float) -> bool:
        """Whether a device has enough with so much memory."""
        return self.needed_gib <= budget_gib


@dataclass
class Sweep:
    """The ledgers of one config, resolved for its device, at any micro-batch size; two sizes are
    traced for all.
    """

    config: Config
    device: str
    keep_outputs: bool = False
    _traces: dict[tuple[int, int], Trace] = field(default_factory=dict)

    def at(self, micro_batch_size: int) -> Prediction | PlainPrediction:
        """Return the prediction with `micro_batch_size` sequences at a time, `tokens_per_step`
        staying.
        """
        n_micro_batches = max(
            self.config.tokens_per_step // (self.config.seq_len * micro_batch_size), 1
        )
        if not tracing_works():
            tokens = n_micro_batches * self.config.seq_len * micro_batch_size
            changes = {"micro_batch_size": micro_batch_size, "tokens_per_step": tokens}
            return PlainPrediction(closed_form(self.config.model_copy(update=changes)), self.device)
        trace = self._at(micro_batch_size, min(n_micro_batches, 2))
        if self.device == "cpu":
            return PlainPrediction(
                replay.ledger(trace, min(n_micro_batches, 2), "predicted for cpu", None), "cpu"
            )
        return Prediction(trace, n_micro_batches, self.device, _settings(self.config, self.device))

    def _at(self, micro_batch_size: int, n_micro_batches: int) -> Trace:
        """Return a trace; a second micro-batch meets the gradients of the first, and all later ones
        are like it.
        """
        key = micro_batch_size, n_micro_batches
        low, high = FEW_SEQUENCES
        chunk = self.config.loss_chunk_tokens
        # affine in the batch only if each further sequence brings whole chunks, and two of them are
        # not all there are
        uneven = chunk and (self.config.seq_len % chunk or self.config.seq_len < 2 * chunk)
        if key not in self._traces and self._traces and micro_batch_size > high and not uneven:
            a, b = (self._at(size, n_micro_batches) for size in (low, high))
            with suppress(CannotExtrapolate):
                self._traces[key] = extrapolated(a, b, micro_batch_size - low)
        if key not in self._traces:
            self._traces[key] = self._traced(*key)
        return self._traces[key]

    def _traced(self, micro_batch_size: int, n_micro_batches: int) -> Trace:
        step = _step_only(self.config).model_dump_json()
        traced = partial(
            _trace, step, self.device, micro_batch_size, n_micro_batches, self.keep_outputs
        )
        n_layer = SIZES[self.config.model][0]
        unit = checkpointing.BLOCKS_PER_UNIT.get(self.config.gradient_checkpointing, 1)
        low, high = (
            n * unit + n_layer % unit for n in FEW_LAYERS
        )  # what repeats is a unit; the last may be smaller
        if n_layer > low + high:  # else all of them cost no more
            with suppress(
                CannotExtrapolate
            ):  # an optimizer that goes through the parameters one by one
                return extrapolated(traced(low), traced(high), (n_layer - low) // unit)
        return traced(n_layer)


def predict_module(
    model: nn.Module,
    batch: Any,
    loss_fn: Callable[[nn.Module, Any], torch.Tensor],
    optimizer: Callable[[Any], torch.optim.Optimizer],
    *,
    precision: str = "fp32",
    device: str = "a100",
) -> MemoryLedger:
    """Return the predicted ledger of one step of any module: `loss_fn(model, batch)` is a scalar.

    `optimizer` makes one from parameters, for example `torch.optim.AdamW`. The module itself is left alone.
    Raises RuntimeError if steps cannot be traced with this torch: a closed form exists for GPT-2
    only.
    """
    if not tracing_works():
        raise RuntimeError(
            f"a step cannot be traced with torch {torch.__version__}; known to work: {KNOWN_GOOD_TORCH}"
        )
    return _predict_module(model, batch, loss_fn, optimizer, precision, device)


def _predict_module(
    model: nn.Module,
    batch: Any,
    loss_fn: Callable,
    optimizer: Callable,
    precision: str,
    device: str,
) -> MemoryLedger:
    on_cpu = tree_map_only(
        torch.Tensor, lambda t: torch.empty(t.shape, dtype=t.dtype), batch
    )  # wherever it lies
    with _fake_world(device) as (log, fake):
        # a deep copy in which every tensor already has its fake counterpart
        tensors = [*model.parameters(), *model.buffers()]
        memo = {id(t): _fake_like(t) for t in tensors}
        twin = copy.deepcopy(model, memo)
        trace = trace_step(
            twin.train(),
            [tree_map_only(torch.Tensor, fake.from_tensor, on_cpu)],
            loss_fn,
            optimizer(twin.parameters()),
            log,
            autocast=partial(autocast, precision, CPU),
        )
    if device == "cpu":
        return replay.ledger(trace, 1, "predicted for cpu", None)
    return Prediction(trace, 1, device, DEFAULT).ledger


class UsesItsWeightTwice(nn.Module):
    """256 float32 numbers, and the peak of its backward pass; a test asks the real allocator."""

    BACKWARD_BYTES = (
        3080  # the weight and its first gradient, the second for a moment, three scalars
    )

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(256))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight + self.weight * x


@lru_cache(maxsize=1)
def tracing_works() -> bool:
    """Whether this torch can be traced: it must count the bytes of a small step right. Warns if
    not.

    The log rests on private parts of torch. Two gradients of one weight are summed in place, as
    they are where nobody watches; a log that can no longer tell counts one more buffer.
    """
    module = UsesItsWeightTwice()
    try:
        ledger = _predict_module(
            module, torch.empty(256), lambda m, x: m(x).sum(), torch.optim.SGD, "fp32", "cpu"
        )
        found = sum(ledger.phases["backward"].values())
        problem = (
            "" if found == module.BACKWARD_BYTES else f"{found} bytes for {module.BACKWARD_BYTES}"
        )
    except Exception as error:  # whatever a changed private interface raises
        problem = f"{type(error).__name__}: {error}"
    if problem:
        warnings.warn(
            f"A training step cannot be traced with torch {torch.__version__} ({problem[:100]}). Known to work: torch "
            f"{KNOWN_GOOD_TORCH}. Predictions come from the closed form, which is rougher.",
            stacklevel=2,
        )
    return not problem
