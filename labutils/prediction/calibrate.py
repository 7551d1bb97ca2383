"""Measure single operations on this machine, once, and keep what they took in `runs/calibration/`.

A step's time here is predicted from them. How long an operation takes depends on its kind and its
size. On a CPU each kind of OPERATIONS is measured at a few sizes; on a GPU large ones are, and
`prediction.time` has the rest. Their work is counted as that of a predicted step is.
"""

from __future__ import annotations

import itertools
import math
import os
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from pydantic import ConfigDict, TypeAdapter, ValidationError
from torch.nn import functional as F
from torch.optim.adamw import adamw
from torch.utils.benchmark import Timer

from labutils import machine
from labutils.config.card import Speed
from labutils.files import runs_dir, write_atomically
from labutils.memory.kinds import BATCHED, ELEMENTS, FLASH, FUNCTIONS, PRODUCT, RANDOM, ROWS, UPDATE
from labutils.prediction.trace import StorageLog
from labutils.prediction.work import Work
from labutils.techniques.precision import tf32

SECONDS = 0.02  # for each measurement; the fastest calls in it count
TOO_SLOW = 0.05  # seconds of a call: larger ones of its kind are not measured
# Operands are taken in turn from so many bytes of tensors: in a step, caches hold others too.
POOL_BYTES, MOST_TENSORS = 32 * 2**20, 512
# The kernel for older cards beside flash attention, forward and backward: measured on one card
# that is not named (heads of 64, 4,096 tokens), Dao-AILab/flash-attention#416.
EFFICIENT_SHARES = 0.8, 0.55
FLOAT32 = "float32"
DTYPES = FLOAT32, "bfloat16", "float16"


@dataclass(frozen=True)
class CpuRates:
    """What was measured on a CPU: by "kind dtype" [(FLOPs or bytes, seconds), ...], ascending.

    `call_seconds` are what an operation costs besides computing; the same where it is compiled.
    """

    call_seconds: tuple[float, float]
    curves: dict[str, list[tuple[float, float]]]

    def seconds(self, work: Work) -> float:
        """Return how long one operation computes, without the cost of its call.

        Beyond the ends of a curve the rate is that of the end. A dtype that was not measured takes
        the time of float32.
        """
        amount = work.flops or work.n_bytes
        if not amount:
            return 0.0
        of_float32 = self.curves[f"{work.kind} {FLOAT32}"]
        curve = self.curves.get(f"{work.kind} {work.dtype}", of_float32)
        known, seconds = np.transpose(curve)
        return amount / float(np.interp(math.log(amount), np.log(known), known / seconds))


# A field that has had another name must not be read as its usual number.
RATES = TypeAdapter(CpuRates | Speed, config=ConfigDict(extra="forbid"))


def rates_of(device: torch.device) -> CpuRates | Speed:
    """Return what was measured on a device of this machine. The first time takes some seconds.

    What is measured on a CPU beside other programs is kept for this process alone.
    """
    name = re.sub(r"[\W_]+", "-", machine.device_name(device).lower()).strip("-")
    return _rates(device, runs_dir() / "calibration" / f"{name}.json")


@lru_cache(maxsize=4)
def _rates(device: torch.device, path: Path) -> CpuRates | Speed:
    with suppress(OSError, ValidationError):  # none is kept, or none that this version can read
        return RATES.validate_json(path.read_bytes())
    is_cpu = device.type == "cpu"
    rates = measure_cpu() if is_cpu else measure_gpu(device)
    if not (is_cpu and others_compute()):
        # where nothing can be written it is measured again in the next process
        with suppress(OSError):
            write_atomically(path, RATES.dump_json(rates, indent=1))
    return rates


@cache  # once in a process: to look takes a third of a second
def others_compute() -> bool:
    """Return whether other programs leave fewer CPUs than torch has threads."""
    free = (os.cpu_count() or 1) - machine.busy_cpus()
    return free <= torch.get_num_threads() - machine.A_BIT


# ---- The operations


class Operation(NamedTuple):
    """How a kind of operation is measured: on tensors of some shapes on a CPU, of one on a GPU.

    `call` takes a function that returns such tensors, one after the other.
    """

    shapes: list[tuple[int, ...]]
    call: Callable[[Callable[[], torch.Tensor]], object]
    large: tuple[int, ...] = ()

    def measured(
        self, shape: tuple[int, ...], dtype: str, device: torch.device
    ) -> tuple[float, float]:
        """Return (FLOPs, or bytes where there are none; seconds) of a call."""
        n_tensors = min(max(POOL_BYTES // (4 * math.prod(shape)), 2), MOST_TENSORS)
        pool = torch.randn(n_tensors, *shape, device=device).to(getattr(torch, dtype))
        in_turn = itertools.cycle(pool.unbind())
        works, seconds = _timed(partial(self.call, partial(next, in_turn)))
        flops = sum(work.flops for work in works)
        return flops or sum(work.n_bytes for work in works), seconds


def _timed(call: Callable[[], object]) -> tuple[list[Work], float]:
    """Return the operations of a call, and how many seconds the fastest of some calls takes."""
    call()
    with StorageLog() as log:
        call()
    works = [event.work for event in log.events if event.work]
    timer = Timer("call()", globals={"call": call}, num_threads=torch.get_num_threads())
    return works, min(timer.blocked_autorange(min_run_time=SECONDS).times)


def _update(x: Callable[[], torch.Tensor]) -> None:
    rates = {"lr": 0.0, "beta1": 0.9, "beta2": 0.999, "weight_decay": 0.0, "eps": 1e-8}
    switches = {"fused": True, "amsgrad": False, "maximize": False}
    adamw([x()], [x()], [x()], [x()], [], [torch.ones(())], **switches, **rates)


SQUARES = [(side, side) for side in (32, 64, 128, 256, 512)]
MATRICES = [(lines, 128) for lines in (2**5, 2**8, 2**11, 2**14, 2**16)]  # from cache to memory
HEADS = [(1, 16, length, 32) for length in (32, 64, 128, 256)]
WIDE = 2**16, 1024
OPERATIONS = {
    PRODUCT: Operation(SQUARES, lambda x: x() @ x(), (4096, 4096)),
    BATCHED: Operation(HEADS, lambda x: x() @ x().mT),
    FLASH: Operation(
        HEADS, lambda x: F.scaled_dot_product_attention(x(), x(), x()), (16, 12, 1024, 64)
    ),
    ELEMENTS: Operation(MATRICES, lambda x: x() + x(), WIDE),
    FUNCTIONS: Operation(MATRICES, lambda x: torch.tanh(x())),
    ROWS: Operation(MATRICES, lambda x: torch.softmax(x(), -1), WIDE),
    RANDOM: Operation(MATRICES, lambda x: torch.empty_like(x()).bernoulli_(0.9)),
    UPDATE: Operation(MATRICES, _update),
}


# ---- A CPU


def measure_cpu() -> CpuRates:
    """Measure single operations on this CPU with torch's threads, in a few seconds."""
    curves = {}
    with torch.random.fork_rng(devices=[]):  # measuring changes no training
        for kind, operation in OPERATIONS.items():
            for dtype in DTYPES if kind == PRODUCT else (FLOAT32,):
                curves[f"{kind} {dtype}"] = _curve(operation, dtype)
        return CpuRates(2 * (_call_seconds(),), curves)


def _curve(operation: Operation, dtype: str) -> list[tuple[float, float]]:
    curve = []
    for shape in operation.shapes:
        curve.append(operation.measured(shape, dtype, torch.device("cpu")))
        if curve[-1][1] > TOO_SLOW:
            break
    return curve


def _call_seconds() -> float:
    """Return what an operation of a training step costs besides computing.

    A layer is trained that is too small to compute anything to speak of: what takes time is
    Python, torch's dispatcher and autograd.
    """
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0, foreach=False)

    def step() -> None:
        layer(torch.zeros(1, 2, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    works, seconds = _timed(step)
    return seconds / sum(work.calls for work in works)


# ---- A GPU


def measure_gpu(device: torch.device) -> Speed:
    """Measure large operations on a GPU, in a few seconds.

    `tflops` are the measured ones too: its datasheet is not known here. Attention is measured
    forward; backward is taken to reach the usual share of that.
    """
    gpu = machine.card(device).gpu

    def rate(kind: str, dtype: str = FLOAT32) -> float:
        work, seconds = OPERATIONS[kind].measured(OPERATIONS[kind].large, dtype, device)
        return work / seconds

    reached = {dtype: rate(PRODUCT, dtype) / 1e12 for dtype in DTYPES}
    if gpu.capability >= (8, 0):
        with tf32(True):
            reached["TF32"] = rate(PRODUCT) / 1e12
    half = "bfloat16" if gpu.has_bf16 else "float16"
    forward = rate(FLASH, half) / (1e12 * reached[half])
    if not gpu.flash:  # older cards have another kernel, which is predicted as a share of this one
        forward /= EFFICIENT_SHARES[0]
    moved = rate(ELEMENTS)
    return Speed(
        tflops=reached,
        gb_per_s=moved / 1e9,
        reached=reached,
        elements_share=1.0,
        rows_share=rate(ROWS) / moved,
        flash_forward=forward,
        flash_backward=forward * Speed.flash_backward / Speed.flash_forward,
    )
