"""Predict how long a training step takes on a card that need not be here.

The traced step (`prediction.trace`) is run on two clocks. The host issues one operation after the
other. The card computes each as soon as it is issued and the one before is done; how long that
takes is the answer of `GpuTime`. A CPU's steps are not predicted: they are measured.

What a card reaches was measured on single operations; `config.cards` names the sources. The
constants below are estimates from the sources named beside them. None was fitted to steps of GPT-2.
But four facts were looked for because such steps were slower than predicted, and then taken from
other measurements: `layers` and `unaligned` of `config.card.Speed`, what an L4 sustains, and what a
call takes its host.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd
import torch
from pydantic import BaseModel
from torch import nn

from labutils import machine
from labutils.config.card import Card
from labutils.config.choices import COMPILE_MODES, PRECISIONS
from labutils.config.schema import Config, precision_on, resolve
from labutils.memory.kinds import (
    ATTENTION_KINDS,
    BATCHED,
    EFFICIENT,
    ELEMENTS,
    FLASH,
    FUNCTIONS,
    PRODUCT,
    PRODUCT_KINDS,
    ROWS,
)
from labutils.memory.ledger import FROZEN, GRADIENTS
from labutils.prediction.calibrate import EFFICIENT_SHARES, call_seconds, rates_of
from labutils.prediction.fusion import OPTIMIZER_PHASE, fuse
from labutils.prediction.memory import Device, segments_of
from labutils.prediction.trace import (
    BIRTH,
    OPERATION,
    Event,
    Segment,
    Trace,
    trace_config,
    traced_module,
)
from labutils.prediction.work import Work
from labutils.techniques.loss import LossFn

SHARES = PRODUCTS, ATTENTION, MEMORY, LAUNCHES = (
    "matrix products",
    "attention",
    "memory-bound operations",
    "launches",
)
SHARE_OF = {PRODUCT: PRODUCTS, BATCHED: ATTENTION, FLASH: ATTENTION, EFFICIENT: ATTENTION}
# Host: from one call by Python to the next, with autograd. Of forward passes that waited for it, on
# what is very likely an H20, 672 calls took 21.5 ms (github.com/ShibukiZero/assignment2-systems,
# ch1/1_1_5c: small, 128 tokens, FP32; in BF16 it is 194 casts more, and 22.6). Others report 7 to
# 20 µs an operation, without a model's Python. This machine's is measured. Compiled code is taken
# to need as long for a kernel: on an H100 the small steps of configs/optimized took 57 ms, for 680
# kernels that compute for 14.
CALL_SECONDS = 32e-6
# Of a card elsewhere the host is not known: that of our H100 took 51 to 58 µs a call, by
# `calibrate.call_seconds`. No upper end of a band is below such a host's time.
SLOW_CALL_SECONDS = 58e-6
# Assumed: a kernel's start and end, behind another, whatever it computes.
KERNEL_SECONDS = 3e-6
# A product is computed in tiles, one or more waves of as many as there are multiprocessors:
# (side of a tile, share of the rate that it reaches). cuBLAS chooses; here the quicker one wins.
# The shares are assumed. With them NeuSight's float32 products above 10 GFLOP are met within 10 %.
TILES = ((128, 1.0), (64, 0.8))
# Tensor cores are most efficient where sides are multiples of 16 bytes: NVIDIA's guide "Matrix
# Multiplication Background", 2.2. Inductor pads most of the rest away: 1.3 is assumed.
ALIGNED = {"TF32": 4, "float16": 8, "bfloat16": 8}  # numbers in 16 bytes
UNALIGNED_COMPILED = 1.3
# torch's own kernels move 16-bit numbers in pieces of 8 bytes, and one by one where they convert
# them; from Hopper on in 16, since torch 2.7. The old ones reached on an H100 0.84 of float32's
# bandwidth (pytorch/pytorch#145746), conversions on an A100 0.81 of an elementwise operation's
# (#195542, taken to be of 40 GB). Where a multiprocessor has less bandwidth than an A100's it was
# not measured.
SIXTEEN_BIT_SHARES = {(8, 0): 0.82}  # by compute capability
# How far below and above the prediction a measurement may lie, as shares of the prediction. No
# constant was fitted to the steps of published.csv. They took 0.86 to 1.14 times as long as
# predicted, compiled 0.85 to 1.47 times: `pytest -m slow -s tests/prediction/test_time.py` prints
# the errors. Equal configs on equal cards differ by 7 %, compiled by 25 %, between three people.
EAGER_BAND, COMPILED_BAND = (0.20, 0.25), (0.20, 0.40)
# The same steps took 0.65 to 1.57 times as long as predicted without what was measured on their
# card. Where the card waits, hosts differ by more than a factor of two.
WIDE_BAND = 0.40, 0.60
# Any module: 16 steps of a model with norms, softmax and rotations by hand took 0.95 to 1.26 times
# as long as predicted (test_time.py; very likely an H20).
MODULE_BAND = 0.20, 0.40
# Where the peak in 16 bits is assumed it may be twice as much: products then take half as long.
ASSUMED_BAND = 0.70, 0.60
# More of the step than this is waiting for the host.
LAUNCH_BOUND = 0.15


class TimeLedger(BaseModel):
    """Milliseconds of one optimizer step, predicted: where they go, and in which phase.

    `shares` are fractions of the step; batched products count as attention. `launch_bound` says
    that the device waits for its host. `why_band` says what makes the band from `low_ms` to
    `high_ms` as wide as it is.
    """

    model_config = FROZEN

    step_ms: float
    low_ms: float
    high_ms: float
    tokens_per_s: float
    shares: dict[str, float]
    launch_bound: bool
    phases_ms: dict[str, float]
    # kind of operation: {"operations", "ms", "gflop", "gbyte"} of a step
    operations: dict[str, dict[str, float]]
    method: str
    why_band: str

    def __str__(self) -> str:
        """A table of milliseconds by kind of operation, the step with its band, and its tokens."""
        shares = pd.Series(self.shares)
        table = pd.DataFrame({"ms": shares * self.step_ms, "%": 100 * shares})
        between = f"between {self.low_ms:.0f} and {self.high_ms:.0f}"
        lines = [
            f"Milliseconds of one optimizer step, {self.method}:",
            table.map("{:.1f}".format).to_string(),
            f"step {self.step_ms:.1f} ms, {between} ({self.why_band})",
        ]
        if self.tokens_per_s:  # of a module it may not be known
            lines.append(f"{self.tokens_per_s:,.0f} tokens per second")
        if self.launch_bound:
            lines.append("The card waits for its host: fewer and larger operations would be faster")
        return "\n".join(lines)


def predict_time(config: Config, device: Device = "a100") -> TimeLedger:
    """Return the predicted time of one training step of a config on a card, after warm-up.

    `device` as for `predict_memory`, but no CPU. For this machine's GPU single operations are
    measured, and its host (`prediction.calibrate`); for another card operations are published
    measurements, and the host is assumed. Not predicted: clocks lowered for heat or power, loading
    data, other hosts, other versions of torch.
    Raises ValueError for a CPU, ConfigError if the config cannot run there, and
    PrecisionUnsupported if the card lacks what it asks for.

    The error on the 89 rows of `lab.published()`: 8 % in the median, -4 % in the mean, from 32 %
    too fast (compiled by torch before 2.6) to 17 % too slow; 87 lie in the band. Of three the time
    of the host is known, and taken; with the usual one they took 1.2 to 1.8 times as long. Without
    what was measured on their card: 12 % in the median, from 36 % too fast to 53 % too slow. On the
    19 that came when the rest of the model stood (ids A, J and O): 19 % in the median.
    """
    run = resolve(config, machine.card_of(device))
    return timed(run.config, run.card)


def timed(config: Config, card: Card) -> TimeLedger:
    """Return the predicted time for a resolved config."""
    precision = PRECISIONS[config.precision]
    trace = trace_config(config, card.gpu)
    n_micro_batches = config.grad_accum_steps
    segments = segments_of(trace, n_micro_batches)
    if precision.loss_scale:
        segments.append(_unscaling(trace))
    fused = fuse(trace.segments) if COMPILE_MODES[config.compile].is_on else None
    clock = Clock(card, tf32=precision.tf32, fused=fused)
    clock.run(segments)
    return clock.ledger(config.tokens_per_step, is_small=config.micro_batch_size == 1)


def predict_module_time(
    model: nn.Module,
    batch: Any,
    loss_fn: LossFn,
    optimizer: Callable[[Any], torch.optim.Optimizer],
    *,
    precision: str = "fp32",
    device: Device = "a100",
    grad_accum_steps: int = 1,
    n_tokens: int = 0,
    **loop: Any,
) -> TimeLedger:
    """Return the predicted time of one step of any module: see `predict_module`, which takes the
    same arguments.

    `n_tokens` of a step are needed for `tokens_per_s` alone.
    """
    card = machine.card_of(device)
    # of a compiled module's time nothing is known
    options = {"grad_accum_steps": grad_accum_steps, "as_eager": True} | loop
    trace = traced_module(model, batch, loss_fn, optimizer, precision, card, **options)
    clock = Clock(card, tf32=PRECISIONS[precision_on(precision, card)].tf32)
    clock.run(segments_of(trace, grad_accum_steps))
    return clock.ledger(n_tokens, is_small=False, is_module=True)


def _unscaling(trace: Trace) -> Segment:
    """Return what a GradScaler does: it reads every gradient, and writes it divided."""
    events = [event for part in trace.segments if part.micro_batch == 0 for event in part.events]
    births = [event.storage for event in events if event.kind == BIRTH]
    n_bytes = sum(storage.n_bytes for storage in births if storage.category == GRADIENTS)
    event = Event(OPERATION, work=Work(ELEMENTS, 2 * n_bytes))
    return Segment(OPTIMIZER_PHASE, None, [event])


@dataclass(frozen=True)
class GpuTime:
    """Seconds of operations on a card. `tf32`: products of float32 numbers may round to TF32."""

    card: Card
    tf32: bool
    is_compiled: bool

    def seconds(self, work: Work) -> float:
        """Return how long one operation keeps the card busy, its kernel's start included."""
        speed = self.card.speed
        share = speed.elements_share
        if not self.is_compiled:
            if work.kind == ROWS:
                share = speed.rows_share
            elif work.kind in (ELEMENTS, FUNCTIONS) and work.has_16bit:
                share *= SIXTEEN_BIT_SHARES.get(self.card.gpu.capability, 1.0)
        arithmetic = 0.0
        if work.kind in PRODUCT_KINDS:
            arithmetic = self._product(work)
        elif work.kind in ATTENTION_KINDS:
            arithmetic = work.flops / self._attention_rate(work)
        moved = work.n_bytes / (share * speed.gb_per_s * 1e9)
        return max(arithmetic, moved) + work.calls * KERNEL_SECONDS

    def _product(self, work: Work) -> float:
        exact = self._product_in(work.dtype, work)
        if self.tf32 and work.dtype == "float32":  # TF32 is allowed, and not always faster
            return min(exact, self._product_in("TF32", work))
        return exact

    def _product_in(self, kind: str, work: Work) -> float:
        gpu, speed = self.card.gpu, self.card.speed
        rate = speed.layer_rate(kind)
        batch, rows, columns = work.shape
        # small ones are split along their sums, so that all multiprocessors have a share
        fastest = 2 * work.flops / rate
        for side, share in TILES:
            tiles = batch * math.ceil(rows / side) * math.ceil(columns / side)
            in_a_tile = 2 * side * side * work.inner
            waves = math.ceil(tiles / gpu.n_sms)
            fastest = min(fastest, waves * in_a_tile / (rate / gpu.n_sms) / share)
        has_tensor_cores = gpu.capability >= (7, 0) and kind in speed.tflops
        n_aligned = ALIGNED.get(kind, 1) if has_tensor_cores else 1
        if any(side % n_aligned for side in (rows, columns, int(work.inner))):
            eager = (kind.endswith("16") and speed.unaligned_16bit) or speed.unaligned
            fastest *= UNALIGNED_COMPILED if self.is_compiled else eager
        return fastest

    def _attention_rate(self, work: Work) -> float:
        # In float32 the fused kernel has no TF32: it splits each number (OpMultiplyAddFastF32), and
        # reaches about what products in float32 do, by four steps in TF32 on an H100.
        speed = self.card.speed
        share = speed.flash_backward if work.is_backward else speed.flash_forward
        if work.dtype == "float32":
            share = 1.0
        if work.kind == EFFICIENT:
            share *= EFFICIENT_SHARES[work.is_backward]
        return speed.product_rate(work.dtype) * share


class Clock:
    """Runs operations in order: the host issues them, the device computes them."""

    def __init__(self, card: Card, *, tf32: bool, fused: dict[Work, Work] | None = None) -> None:
        """`fused`: what a compiler leaves of operations; None where there is no compiler.

        A GPU of this machine is measured, and its host: nothing else says how fast they are.
        """
        if card.gpu is None:
            raise ValueError("times are predicted for cards; a CPU's are measured: labutils run")
        self.fused, self.is_compiled = fused or {}, fused is not None
        self.call_seconds, self.slow_call_seconds = CALL_SECONDS, SLOW_CALL_SECONDS
        if card.is_here:
            device = torch.device("cuda")
            with torch.random.fork_rng([device]):  # whoever draws numbers goes on with theirs
                card = replace(card, speed=card.speed or rates_of(device))
                self.call_seconds = self.slow_call_seconds = call_seconds(device)
        self.card = card
        self.time = GpuTime(card, tf32, self.is_compiled)
        self.host = self.device = 0.0  # seconds since the step began
        self.slow_host = self.slow_device = 0.0  # the same, with the slowest host that was measured
        self.needs_tensor_cores = tf32  # or 16 bits
        self.busy = dict.fromkeys(SHARES[:3], 0.0)
        self.phases: Counter[str] = Counter()
        self.operations: defaultdict[str, Counter[str]] = defaultdict(Counter)

    def run(self, segments: Iterable[Segment]) -> None:
        """Run a step, or parts of one."""
        for segment in segments:
            begun = self.device
            for event in segment.events:
                if event.work and not event.work.only_once:
                    self._operation(event.work)
            self.phases[segment.phase] = self.phases[segment.phase] + self.device - begun

    def _operation(self, work: Work) -> None:
        left = self.fused.get(work, work)
        seconds = self.time.seconds(left)
        calls = left.calls if self.is_compiled else left.host_calls
        self.host += calls * self.call_seconds
        self.device = max(self.device, self.host) + seconds
        self.slow_host += calls * self.slow_call_seconds
        self.slow_device = max(self.slow_device, self.slow_host) + seconds
        self.needs_tensor_cores |= work.has_16bit
        self.busy[SHARE_OF.get(work.kind, MEMORY)] += seconds
        gflop, gbyte = left.flops / 1e9, left.n_bytes / 1e9
        self.operations[work.kind].update(operations=1, ms=1e3 * seconds, gflop=gflop, gbyte=gbyte)

    def ledger(self, n_tokens: int, *, is_small: bool, is_module: bool = False) -> TimeLedger:
        """Return what was counted, with a band.

        `is_small`: a batch of one sequence. `is_module`: not the GPT-2 whose steps were compared.
        """
        step_ms = 1e3 * self.device
        shares = {name: seconds / self.device for name, seconds in self.busy.items()}
        shares[LAUNCHES] = 1 - sum(shares.values())
        is_bound = shares[LAUNCHES] > LAUNCH_BOUND
        (below, above), why = self._band(is_bound, is_small)
        if is_module:
            below, above = max(below, MODULE_BAND[0]), max(above, MODULE_BAND[1])
            why += "; a model of other operations took up to 1.26 times as long"
        high_ms, slow_ms = step_ms * (1 + above), 1e3 * self.slow_device
        if slow_ms > high_ms:
            high_ms, why = slow_ms, f"{why}; the upper end is for a host as slow as our H100's"
        return TimeLedger(
            step_ms=step_ms,
            low_ms=step_ms * (1 - below),
            high_ms=high_ms,
            tokens_per_s=n_tokens / self.device,
            shares=shares,
            launch_bound=is_bound,
            phases_ms={phase: 1e3 * seconds for phase, seconds in self.phases.items()},
            operations={kind: dict(counts) for kind, counts in self.operations.items()},
            method=f"predicted for {self.card.name}",
            why_band=why,
        )

    def _band(self, is_bound: bool, is_small: bool) -> tuple[tuple[float, float], str]:
        speed = self.card.speed
        if speed.assumed and self.needs_tensor_cores:
            why = f"`float16_tflops` is not given: {speed.assumed:g} times float32's is assumed"
            return ASSUMED_BAND, f"uncalibrated, and {why}, it may be more"
        if not speed.reached:
            return WIDE_BAND, "uncalibrated: nothing was measured on this card, only its datasheet"
        if is_bound:
            return WIDE_BAND, "the card waits for its host, and hosts differ"
        if is_small:
            return WIDE_BAND, "one sequence at a time: small operations, and the host matters"
        if self.is_compiled:
            return COMPILED_BAND, "compiled, published steps took 0.85 to 1.47 times as long"
        return EAGER_BAND, "published steps took 0.86 to 1.14 times as long"
