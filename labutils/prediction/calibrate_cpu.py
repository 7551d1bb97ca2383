"""Measure single operations on this CPU.

How long one takes depends on its kind and its size, so each kind is measured at a few sizes.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from labutils.memory.kinds import ELEMENTS, FUNCTIONS, RANDOM, ROWS, UPDATE

SECONDS = 0.02  # for each measurement; the fastest call in it counts
TOO_SLOW = 0.05  # seconds of a call: larger ones of its kind are not measured
# Elements of the tensors that elementwise operations are measured with: from cache to memory.
SIZES = (2**12, 2**15, 2**18, 2**21, 2**23)
COLUMNS = 128
SIDES = (32, 64, 128, 256, 512)  # of square products
# Of attention: 16 heads of 32.
HEADS, WIDTH, LENGTHS = 16, 32, (32, 64, 128, 256)
# Operands are taken in turn from so many bytes of tensors: in a step, caches hold others too.
POOL_BYTES, MOST_TENSORS = 32 * 2**20, 512


class Measured(BaseModel):
    """Calls of one kind: `work` (FLOPs, or bytes), ascending, and `seconds` of each."""

    model_config = ConfigDict(frozen=True)

    work: list[float]
    seconds: list[float]

    def at(self, work: float) -> float:
        """Return the seconds of so much work. Beyond the ends the rate is that of the end."""
        if work <= 0:
            return 0.0
        rates = np.divide(self.work, self.seconds)
        return work / float(np.interp(math.log(work), np.log(self.work), rates))


class CpuRates(BaseModel):
    """What was measured on a CPU. `products` are by dtype, `kinds` as in `memory.kinds`."""

    model_config = ConfigDict(frozen=True)

    device: str
    call_seconds: float
    products: dict[str, Measured]
    batched: Measured
    attention: Measured
    kinds: dict[str, Measured]


def measure_cpu(name: str = "") -> CpuRates:
    """Measure single operations on this CPU with torch's threads, in a few seconds."""
    random_state = torch.get_rng_state()
    try:
        products = {}
        for dtype in ("float32", "bfloat16", "float16"):
            products[dtype] = _products(getattr(torch, dtype))
        return CpuRates(
            device=name,
            call_seconds=_call_seconds(),
            products=products,
            batched=_batched(),
            attention=_attention(),
            # bytes per element: each operand, and the result
            kinds={
                ELEMENTS: _by_size(_add, 12),
                FUNCTIONS: _by_size(_tanh, 8),
                ROWS: _by_size(_softmax, 8),
                RANDOM: _by_size(_random, 8),
                UPDATE: _by_size(_update, 28),
            },
        )
    finally:
        torch.set_rng_state(random_state)  # measuring changes no training


def _best(call: Callable[[], object]) -> float:
    """Return the seconds of the fastest call among those that fit in SECONDS; at least three."""
    call()
    found = []
    end = time.perf_counter() + SECONDS
    while len(found) < 3 or time.perf_counter() < end:
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    return min(found)


def _products(dtype: torch.dtype) -> Measured:
    work, seconds = [], []
    for side in SIDES:
        left = torch.randn(side, side).to(dtype)
        work.append(2.0 * side**3)
        seconds.append(_best(_in_turn((side, side), left.matmul, dtype)))
        if seconds[-1] > TOO_SLOW:
            break
    return Measured(work=work, seconds=seconds)


def _batched() -> Measured:
    work, seconds = [], []
    for length in LENGTHS:
        left = torch.randn(HEADS, length, WIDTH)
        work.append(2.0 * HEADS * length * length * WIDTH)
        seconds.append(_best(_in_turn((HEADS, WIDTH, length), left.matmul)))
    return Measured(work=work, seconds=seconds)


def _attention() -> Measured:
    work, seconds = [], []
    for length in LENGTHS:
        q, k = (torch.randn(1, HEADS, length, WIDTH) for _ in range(2))
        attend = partial(F.scaled_dot_product_attention, q, k)
        work.append(4.0 * HEADS * length * length * WIDTH)
        seconds.append(_best(_in_turn((1, HEADS, length, WIDTH), attend)))
    return Measured(work=work, seconds=seconds)


def _by_size(make: Callable[[int], Callable[[], object]], bytes_per_element: int) -> Measured:
    work, seconds = [], []
    for n in SIZES:
        work.append(float(bytes_per_element * n))
        seconds.append(_best(make(n)))
    return Measured(work=work, seconds=seconds)


def _in_turn(
    shape: tuple[int, ...],
    operation: Callable[[torch.Tensor], object],
    dtype: torch.dtype = torch.float32,
) -> Callable[[], object]:
    """Return a call that takes the next tensor of POOL_BYTES each time."""
    n_tensors = min(max(POOL_BYTES // (4 * math.prod(shape)), 2), MOST_TENSORS)
    tensors = itertools.cycle([torch.randn(shape).to(dtype) for _ in range(n_tensors)])
    return lambda: operation(next(tensors))


def _add(n: int) -> Callable[[], object]:
    other = torch.randn(n // COLUMNS, COLUMNS)
    return _in_turn((n // COLUMNS, COLUMNS), other.add)


def _tanh(n: int) -> Callable[[], object]:
    return _in_turn((n // COLUMNS, COLUMNS), torch.tanh)


def _softmax(n: int) -> Callable[[], object]:
    return _in_turn((n // COLUMNS, COLUMNS), partial(torch.softmax, dim=-1))


def _random(n: int) -> Callable[[], object]:
    shape = n // COLUMNS, COLUMNS
    return _in_turn(shape, lambda tensor: torch.empty_like(tensor).bernoulli_(0.9))


def _update(n: int) -> Callable[[], object]:
    parameters = [torch.nn.Parameter(torch.randn(n // 8)) for _ in range(8)]
    for parameter in parameters:
        parameter.grad = torch.randn(n // 8)
    return torch.optim.AdamW(parameters, fused=True).step


class _Count(TorchDispatchMode):
    """Counts operations that compute something: views and empty tensors do not."""

    n = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        results = operation._schema.returns
        is_view = any(one.alias_info and not one.alias_info.is_write for one in results)
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
    return _best(step) / count.n
