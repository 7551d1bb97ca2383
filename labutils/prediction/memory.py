"""Predict the peak memory of a training step, without running it and without a GPU.

The real model takes a real step on tensors without data (`prediction.trace`). What is alive at each
moment is the ledger. For a card the requests and frees of three steps, from moving the model to it,
are replayed through the caching allocator's rules (`prediction.allocator`): the answer is what the
card must have, and not only what tensors take.
"""

from __future__ import annotations

import itertools
import operator
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import nn

from labutils import machine
from labutils.config.card import CONTEXT_GIB, Card
from labutils.config.choices import COMPILE_MODES
from labutils.config.schema import Config, resolve
from labutils.memory.device_memory import without_expandable_segments
from labutils.memory.ledger import NOT_COMPILED, ROUNDING, WORKSPACES, MemoryLedger
from labutils.prediction.allocator import (
    DEFAULT,
    EXPANDABLE,
    MIB,
    CachingAllocator,
    OutOfMemory,
    Settings,
    rounded,
)
from labutils.prediction.compiled import NoPlan
from labutils.prediction.trace import (
    BIRTH,
    CATEGORIES,
    DEATH,
    OPERATION,
    Event,
    Segment,
    Storage,
    Trace,
    trace_config,
    traced_module,
)
from labutils.techniques.loss import LossFn

# A key of CARDS, "this" for the GPU here, "cpu", a device of torch, or a card.
Device = str | torch.device | Card
# Times what the allocator is predicted to need: with it no run of the recorded table is said to
# fit that does not complete.
MARGIN = 1.02
# Times the peak: a rule of thumb for a CPU, whose allocator is not replayed.
ALLOWANCE = 1.1
# the first makes the optimizer's state, the second finds holes where there were none, the third is
# as all
STEPS = 3
REPEATED_MICRO_BATCHES = 4  # so many are replayed of a step that has more
TIMELINE_POINTS = 400
# The smallest limit is known when a limit that fails and one that does not are so close, relative
# to the larger.
FINENESS = 0.002
Request = tuple[Storage, bool]  # it is asked for, or given back


def predict_memory(config: Config, device: Device = "a100") -> MemoryLedger:
    """Return the predicted ledger of one training step of a config on a device.

    `device` is a key of CARDS, "this" for the GPU here, "cpu", a `torch.device` or a `Card`. On a
    CPU `when_cpu` applies. Nothing is allocated.
    For a card the ledger also tells what the allocator reserves in three steps, and how much memory
    the smallest card has on which they complete.
    Raises ConfigError if the config cannot run there, and PrecisionUnsupported if the device lacks
    what it asks for.
    """
    run = resolve(config, machine.card_of(device))
    return predicted(run.config, run.card).ledger


def predict_module(
    model: nn.Module,
    batch: Any,
    loss_fn: LossFn,
    optimizer: Callable[[Any], torch.optim.Optimizer],
    *,
    precision: str = "fp32",
    device: Device = "a100",
    grad_accum_steps: int = 1,
    max_grad_norm: float = 0.0,
    keeps_gradients: bool = False,
    keeps_outputs: bool = False,
) -> MemoryLedger:
    """Return the predicted ledger of one step of any module: `loss_fn(model, batch)` is a scalar.

    The step adds up the gradients of so many micro-batches, each like `batch`, and clips their norm
    if `max_grad_norm` is above 0.

    `optimizer` makes one from parameters, for example `torch.optim.AdamW`. On a card it updates
    lists of tensors where torch does so by default. The module is left alone. Tensors that model or
    loss hold beside parameters and buffers are counted with these.
    Gradients are gone before forward, unless it `keeps_gradients`: a loop that calls `zero_grad`
    between forward and backward has those of the last step until then. What the model returns is
    gone before backward, unless it `keeps_outputs`: in a loop with `logits = model(x)` the name
    holds it until the next batch's replaces it. The ledger's head says which. What `loss_fn` keeps
    counts once.
    What `torch.compile` has made of the model or of `loss_fn` torch's compiler plans (half a
    minute for GPT-2). If it refuses, the ledger's head says so, and nothing counts as compiled.
    Raises ValueError for an unknown precision, and, with the line, for a step that depends on its
    data.
    """
    card = machine.card_of(device)
    loop = grad_accum_steps, max_grad_norm, keeps_gradients, keeps_outputs
    step = model, batch, loss_fn, optimizer, precision, card, *loop
    note = f", outputs {'kept through' if keeps_outputs else 'gone before'} backward"
    try:
        trace = traced_module(*step)
    except NoPlan as refusal:
        trace = traced_module(*step, as_eager=True)
        note += f"{NOT_COMPILED}: {refusal}"
    return prediction_of(trace, card, grad_accum_steps, note=note).ledger


def needed_gib(ledger: MemoryLedger, device: Device = "a100") -> float:
    """Return the memory in GiB that a device must have for a ledger's run.

    On a card the context is in it. Where the allocator was not replayed, a tenth more than the peak
    stands for what it cannot use.
    """
    if ledger.needed_bytes is not None:
        return ledger.needed_bytes / 2**30
    context = CONTEXT_GIB if machine.card_of(device).gpu else 0
    return ALLOWANCE * ledger.peak_bytes / 2**30 + context


def predicted(config: Config, card: Card) -> Prediction:
    """Return the prediction for a resolved config."""
    settings, note = allocator_settings(config, card), ""
    is_compiled = COMPILE_MODES[config.compile].is_on
    try:
        trace = trace_config(config, card.gpu, is_compiled)
    except NoPlan as refusal:
        trace, note = trace_config(config, card.gpu), f"{NOT_COMPILED}: {refusal}"
    return prediction_of(trace, card, config.grad_accum_steps, settings, note)


def prediction_of(
    trace: Trace,
    card: Card,
    n_micro_batches: int = 1,
    settings: Settings = DEFAULT,
    note: str = "",
) -> Prediction:
    """Return the prediction for a traced step of so many micro-batches."""
    requests = []
    for _, _, event in walk(trace, n_micro_batches):
        if event.storage:
            requests.append((event.storage, event.kind == BIRTH))
    return Prediction(trace, requests, card, settings, f"predicted for {card.name}{note}")


@dataclass(frozen=True)
class Prediction:
    """What a run asks of a device, in order. All else is computed when it is asked for."""

    trace: Trace
    requests: list[Request]  # of three steps
    card: Card
    settings: Settings
    method: str

    @cached_property
    def tensors(self) -> MemoryLedger:
        """The ledger of a step, without what the allocator takes for it."""
        settings = self.settings if self.card.gpu else None
        return ledger_of(self.trace, self.method, settings)

    @cached_property
    def ledger(self) -> MemoryLedger:
        """The ledger of a step, and what the allocator takes from the card for three."""
        if self.card.gpu is None:
            return self.tensors
        # a set: the run's settings are mostly one of the two, and a search takes many replays
        taken = {one: self.taken(one) for one in {DEFAULT, EXPANDABLE, self.settings}}
        figures = {
            "reserved_bytes": taken[DEFAULT][0],
            "reserved_expandable_bytes": taken[EXPANDABLE][0],
            "needed_bytes": taken[self.settings][1],
            "needed_expandable_bytes": taken[EXPANDABLE][1],
        }
        return self.tensors.model_copy(update=figures)

    def taken(self, settings: Settings) -> tuple[int, int]:
        """Return the bytes that an allocator reserves, and those of the smallest card."""
        unlimited = replayed(self.requests, CachingAllocator(settings=settings))
        limit = smallest_limit(self.requests, unlimited)
        return unlimited.peak_reserved, round(MARGIN * limit + CONTEXT_GIB * 2**30)

    def fits(self, budget_gib: float) -> bool:
        """Whether three steps complete in so much memory, on a card with its context in it."""
        if self.card.gpu is None:
            return needed_gib(self.tensors, self.card) <= budget_gib
        # one replay at the limit that `taken` would have to stay below, in place of its search
        for_tensors = (budget_gib - CONTEXT_GIB) * 2**30 / MARGIN
        return completes(self.requests, for_tensors, self.settings)


def allocator_settings(config: Config, card: Card) -> Settings:
    """Return how a config's run sets the allocator of a card.

    On the GPU here PYTORCH_ALLOC_CONF counts too, and whether the system has expandable segments.
    """
    if not card.is_here:
        return EXPANDABLE if config.expandable_segments else DEFAULT
    text = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""
    settings = Settings.parse(text)
    wanted = settings.expandable_segments or config.expandable_segments
    return settings._replace(expandable_segments=wanted and not without_expandable_segments())


# ---- Three steps, event by event


def segments_of(trace: Trace, n_micro_batches: int) -> list[Segment]:
    """Return a step's segments in order, of so many micro-batches and at least of those traced.

    Those beyond are like the last.
    """
    *passes, update = trace.segments
    last = passes[-1].micro_batch
    repeated = [segment for segment in passes if segment.micro_batch == last]
    return [*passes, *repeated * (n_micro_batches - last - 1), update]


def walk(trace: Trace, n_micro_batches: int = 1) -> Iterator[tuple[int, Segment, Event]]:
    """Yield (step, segment, event) of the first STEPS steps; the model is moved in step 0.

    What lasts is born in the first step alone, also what a loop keeps: its later births are left
    out. So are storages that are always empty, since for 0 bytes nothing is asked.
    """
    alive: set[Storage] = set()
    moved = Segment("", None, [Event(BIRTH, storage) for storage in trace.standing])
    segments = segments_of(trace, min(n_micro_batches, REPEATED_MICRO_BATCHES))
    for step in range(STEPS):
        for segment in segments if step else [moved, *segments]:
            for event in segment.events:
                storage = event.storage
                if event.kind == BIRTH:
                    # a rule that gives 0 bytes here may give more for more sequences
                    if storage in alive or not (storage.n_bytes or storage.rule):
                        continue
                    alive.add(storage)
                elif event.kind == DEATH:
                    if storage not in alive:
                        continue
                    alive.remove(storage)
                yield step, segment, event


def ledger_of(trace: Trace, method: str, settings: Settings | None) -> MemoryLedger:
    """Return the bytes by category at each phase's peak in the last step, and its timeline.

    Of the micro-batches those count that were traced: later ones are like the last.
    With the `settings` of a card's allocator a category counts requests, rounded up to 512 bytes;
    what blocks have beyond that is ROUNDING, and the sum is what `torch.cuda.memory_allocated`
    tells. None is a CPU.
    """
    on_card = settings is not None
    allocator, blocks = CachingAllocator(settings=settings or DEFAULT), {}
    categories = [*CATEGORIES, ROUNDING] if on_card else [c for c in CATEGORIES if c != WORKSPACES]
    now = dict.fromkeys([*CATEGORIES, ROUNDING], 0)
    moments: list[tuple[str, int, list[int]]] = []  # phase, position, bytes by category
    n_operations = 0
    for step, segment, event in walk(trace):
        storage = event.storage
        if event.kind == OPERATION:
            n_operations += step == STEPS - 1
        else:
            if event.kind == BIRTH:
                blocks[storage] = allocator.allocate(storage.n_bytes)
            sign = 1 if event.kind == BIRTH else -1
            n_bytes = rounded(storage.n_bytes) if on_card else storage.n_bytes
            now[storage.category] += sign * n_bytes
            now[ROUNDING] += sign * (blocks[storage].size - n_bytes)
            if event.kind == DEATH:
                allocator.free(blocks.pop(storage))
        if step == STEPS - 1:
            moments.append((segment.phase, n_operations, [now[name] for name in categories]))
    phases: dict[str, dict[str, int]] = {}
    timeline = []
    by_phase = itertools.groupby(moments, key=operator.itemgetter(0))
    parts = [(phase, list(part)) for phase, part in by_phase]
    n_points = max(4, TIMELINE_POINTS // len(parts))
    for phase, part in parts:
        _, positions, rows = zip(*part, strict=True)
        alive = np.array(rows)
        at_peak = alive.sum(axis=1).argmax()
        # of a long phase a few points are enough, the peak among them
        shown = np.union1d(np.linspace(0, len(rows) - 1, n_points).round().astype(int), at_peak)
        timeline.append((phase, np.column_stack([positions, alive])[shown].tolist()))
        peak = alive[at_peak]
        # a phase comes once for each micro-batch
        if peak.sum() > sum(phases.get(phase, {}).values()):
            phases[phase] = dict(zip(categories, peak.tolist(), strict=True))
    return MemoryLedger(phases=phases, method=method, timeline=timeline)


# ---- What the allocator makes of them


def replayed(requests: list[Request], allocator: CachingAllocator) -> CachingAllocator:
    """Hand requests to an allocator and return it. Raises allocator.OutOfMemory."""
    blocks = {}
    for storage, is_birth in requests:
        if is_birth:
            blocks[storage] = allocator.allocate(storage.n_bytes)
        else:
            allocator.free(blocks.pop(storage))
    return allocator


def completes(requests: list[Request], limit_bytes: float, settings: Settings) -> bool:
    """Return whether an allocator that can have `limit_bytes` meets all requests."""
    try:
        replayed(requests, CachingAllocator(limit_bytes, settings))
    except OutOfMemory:
        return False
    return True


def with_more_sequences(low: list[Request], high: list[Request], more: int) -> list[Request]:
    """Return the requests of `more` sequences than `low` has, where `high` has one more than `low`.

    Both ask for the same; what their bytes are computed from is affine in the number of sequences.
    """
    grown: dict[Storage, Storage] = {}
    requests = []
    for (few, is_birth), (many, _) in zip(low, high, strict=True):
        if many not in grown:
            n_bytes = few.n_bytes + more * (many.n_bytes - few.n_bytes)
            if many.rule:
                pairs = zip(few.numbers, many.numbers, strict=True)
                n_bytes = many.rule(*[a + more * (b - a) for a, b in pairs])
            grown[many] = replace(many, n_bytes=n_bytes)
        requests.append((grown[many], is_birth))
    return requests


def smallest_limit(requests: list[Request], unlimited: CachingAllocator) -> int:
    """Return the fewest bytes with which an allocator meets all requests, to FINENESS, in whole 2
    MiB.

    `unlimited` is one that has met them. More may be reserved where more is there: before it gives
    up, the allocator returns what it has cached.
    """
    unit = 2 * MIB
    # One unit less than is alive at once is surely too little; what was reserved without a limit
    # is surely enough.
    _, enough = boundary(
        lambda n: not completes(requests, n * unit, unlimited.settings),
        unlimited.peak_allocated // unit - 1,
        -(-unlimited.peak_reserved // unit),
        FINENESS,
    )
    return enough * unit


def boundary(
    holds: Callable[[int], bool], low: int, high: int, fineness: float = 0.0
) -> tuple[int, int]:
    """Return numbers between which `holds` ends, by halving the interval from `low`, for which it
    holds, to `high`, for which it does not.

    They are neighbours, or at most `fineness` of the upper one apart.
    """
    while high - low > max(1, fineness * high):
        middle = (low + high) // 2
        if holds(middle):
            low = middle
        else:
            high = middle
    return low, high
