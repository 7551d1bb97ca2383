"""Measure single operations on this machine, once, and keep what they took in `runs/calibration/`.

A step's time here is predicted from them. How long an operation takes depends on its kind and its
size. On a CPU each kind of OPERATIONS is measured at a few sizes; on a GPU large ones are, and
`prediction.time` has the rest.
"""

from __future__ import annotations

import itertools
import math
import re
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from pydantic import TypeAdapter, ValidationError
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from labutils.config.card import Gpu, Speed
from labutils.files import runs_dir, write_atomically
from labutils.machine import cuda_seconds, device_name
from labutils.memory.kinds import BATCHED, ELEMENTS, FLASH, FUNCTIONS, PRODUCT, RANDOM, ROWS, UPDATE
from labutils.techniques.precision import tf32

SECONDS = 0.02  # for each measurement; the fastest call in it counts
TOO_SLOW = 0.05  # seconds of a call: larger ones of its kind are not measured
# Operands are taken in turn from so many bytes of tensors: in a step, caches hold others too.
POOL_BYTES, MOST_TENSORS = 32 * 2**20, 512
# On a GPU: the side of a square product, the numbers of an elementwise operation, and attention's
# (sequences, heads, tokens, width).
SIDE, NUMBERS, ATTENDED = 4096, 2**26, (16, 12, 1024, 64)
# The kernel for older cards beside flash attention, forward and backward: measured on one card
# that is not named (heads of 64, 4,096 tokens), Dao-AILab/flash-attention#416.
EFFICIENT_SHARES = 0.8, 0.55
DTYPES = "float32", "bfloat16", "float16"


@dataclass(frozen=True)
class Measured:
    """Calls of one kind: `work` (FLOPs, or bytes), ascending, and `seconds` of each."""

    work: list[float]
    seconds: list[float]

    def at(self, work: float) -> float:
        """Return the seconds of so much work. Beyond the ends the rate is that of the end."""
        if work <= 0:
            return 0.0
        rates = np.divide(self.work, self.seconds)
        return work / float(np.interp(math.log(work), np.log(self.work), rates))


@dataclass(frozen=True)
class CpuRates:
    """What was measured on a CPU: products by dtype, other operations by kind."""

    call_seconds: float
    products: dict[str, Measured]
    kinds: dict[str, Measured]


RATES = {"cpu": TypeAdapter(CpuRates), "cuda": TypeAdapter(Speed)}


def rates_of(device: torch.device) -> CpuRates | Speed:
    """Return what was measured on a device of this machine. The first time takes some seconds."""
    return _rates(device.type, _path(device))


@lru_cache(maxsize=4)
def _rates(device_type: str, path: Path) -> CpuRates | Speed:
    with suppress(OSError, ValidationError):  # none is kept, or none that this version can read
        return RATES[device_type].validate_json(path.read_bytes())
    return calibrate(torch.device(device_type))


def calibrate(device: torch.device) -> CpuRates | Speed:
    """Measure a device of this machine, and keep what was measured."""
    rates = measure_cpu() if device.type == "cpu" else measure_gpu(device)
    # where nothing can be written it is measured again in the next process
    with suppress(OSError):
        write_atomically(_path(device), RATES[device.type].dump_json(rates, indent=1))
    _rates.cache_clear()
    return rates


def _path(device: torch.device) -> Path:
    name = re.sub(r"[\W_]+", "-", device_name(device).lower()).strip("-")
    return runs_dir() / "calibration" / f"{name}.json"


# ---- The operations


class Operation(NamedTuple):
    """How a kind of operation is measured: on tensors of some shapes.

    A call on one does `per_number` FLOPs (products and attention) or moves so many bytes (others)
    for each of its numbers; products do so for each step along the side `inner`. `prepared` takes a
    first tensor, and returns the call.
    """

    shapes: list[tuple[int, ...]]
    per_number: float
    prepared: Callable[[torch.Tensor], Callable[[torch.Tensor], object]]
    inner: int | None = None

    def work(self, shape: tuple[int, ...]) -> float:
        """Return the FLOPs or bytes of a call on a tensor of a shape."""
        steps = 1 if self.inner is None else shape[self.inner]
        return self.per_number * math.prod(shape) * steps


def _attention(q: torch.Tensor) -> Callable[[torch.Tensor], object]:
    k = torch.randn_like(q)
    return lambda v: F.scaled_dot_product_attention(q, k, v)


def _update(gradient: torch.Tensor) -> Callable[[torch.Tensor], object]:
    parts = [torch.nn.Parameter(part.clone()) for part in gradient.flatten().chunk(8)]
    for part in parts:
        part.grad = torch.randn_like(part)
    step = torch.optim.AdamW(parts, fused=True).step
    return lambda _: step()


SQUARES = [(side, side) for side in (32, 64, 128, 256, 512)]
# From cache to memory.
MATRICES = [(n // 128, 128) for n in (2**12, 2**15, 2**18, 2**21, 2**23)]
LENGTHS = 32, 64, 128, 256
# Bytes are each operand's, and the result's.
OPERATIONS = {
    PRODUCT: Operation(SQUARES, 2.0, lambda x: torch.randn_like(x).matmul, inner=0),
    BATCHED: Operation(
        [(16, 32, length) for length in LENGTHS],
        2.0,
        lambda x: torch.randn_like(x.mT).contiguous().matmul,
        inner=2,
    ),
    FLASH: Operation([(1, 16, length, 32) for length in LENGTHS], 4.0, _attention, inner=2),
    ELEMENTS: Operation(MATRICES, 12.0, lambda x: torch.randn_like(x).add),
    FUNCTIONS: Operation(MATRICES, 8.0, lambda _: torch.tanh),
    ROWS: Operation(MATRICES, 8.0, lambda _: partial(torch.softmax, dim=-1)),
    RANDOM: Operation(MATRICES, 8.0, lambda _: lambda x: torch.empty_like(x).bernoulli_(0.9)),
    UPDATE: Operation(MATRICES, 28.0, _update),
}


# ---- A CPU


def measure_cpu() -> CpuRates:
    """Measure single operations on this CPU with torch's threads, in a few seconds."""
    random_state = torch.get_rng_state()
    try:
        products = {name: _measured(OPERATIONS[PRODUCT], name) for name in DTYPES}
        others = {kind: row for kind, row in OPERATIONS.items() if kind != PRODUCT}
        kinds = {kind: _measured(operation) for kind, operation in others.items()}
        return CpuRates(_call_seconds(), products, kinds)
    finally:
        torch.set_rng_state(random_state)  # measuring changes no training


def _measured(operation: Operation, dtype: str = "float32") -> Measured:
    work, seconds = [], []
    for shape in operation.shapes:
        n_tensors = min(max(POOL_BYTES // (4 * math.prod(shape)), 2), MOST_TENSORS)
        tensors = [torch.randn(shape).to(getattr(torch, dtype)) for _ in range(n_tensors)]
        call, in_turn = operation.prepared(tensors[0]), itertools.cycle(tensors)
        work.append(operation.work(shape))
        seconds.append(_fastest(lambda call=call, in_turn=in_turn: call(next(in_turn))))
        if seconds[-1] > TOO_SLOW:
            break
    return Measured(work, seconds)


def _fastest(call: Callable[[], object]) -> float:
    """Return the seconds of the fastest call among those that fit in SECONDS; at least three."""
    call()
    seconds: list[float] = []
    end = time.perf_counter() + SECONDS
    while len(seconds) < 3 or time.perf_counter() < end:
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


class _Count(TorchDispatchMode):
    """Counts operations that compute something: views and empty tensors do not."""

    n = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        aliases = [result.alias_info for result in operation._schema.returns]
        is_view = any(alias and not alias.is_write for alias in aliases)
        is_idle = operation.__name__.startswith(("empty", "detach", "_unsafe_view"))
        self.n += not (is_view or is_idle)
        return operation(*args, **(kwargs or {}))


def _call_seconds() -> float:
    """Return what an operation of a training step costs besides computing.

    A layer is trained that is too small to compute anything to speak of: what takes time is
    Python, torch's dispatcher and autograd.
    """
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0, foreach=False)
    x = torch.zeros(1, 2, 8)

    def step() -> None:
        layer(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    with _Count() as count:
        step()
    return _fastest(step) / count.n


# ---- A GPU


def measure_gpu(device: torch.device) -> Speed:
    """Measure large operations on a GPU, in a few seconds.

    `tflops` are the measured ones too: its datasheet is not known here. Attention is measured
    forward; backward is taken to reach the usual share of that.
    """
    gpu = Gpu(torch.cuda.get_device_capability(device), 0, 0)
    reached = {}
    for name in (*DTYPES, "TF32") if gpu.capability >= (8, 0) else DTYPES:
        with tf32(name == "TF32"):
            dtype = "float32" if name == "TF32" else name
            reached[name] = _rate(device, PRODUCT, (SIDE, SIDE), dtype) / 1e12
    lines = NUMBERS // 1024, 1024
    moved = _rate(device, ELEMENTS, lines)
    half = "bfloat16" if gpu.has_bf16 else "float16"
    forward = _rate(device, FLASH, ATTENDED, half) / (1e12 * reached[half])
    if not gpu.flash:  # older cards have another kernel, which is predicted as a share of this one
        forward /= EFFICIENT_SHARES[0]
    return Speed(
        tflops=reached,
        gb_per_s=moved / 1e9,
        reached=reached,
        elements=1.0,
        rows=_rate(device, ROWS, lines) / moved,
        flash=(forward, forward * Speed.flash[1] / Speed.flash[0]),
    )


def _rate(device: torch.device, kind: str, shape: tuple[int, ...], dtype: str = "float32") -> float:
    """Return the FLOP/s, or bytes/s, of one operation on a GPU."""
    x = torch.randn(shape, device=device).to(getattr(torch, dtype))
    call = partial(OPERATIONS[kind].prepared(x), x)
    call()
    return OPERATIONS[kind].work(shape) / cuda_seconds(call)
