"""Measure single operations on a GPU of this machine, and its host: its steps are predicted from
them, where nothing else says how fast it is.
"""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from functools import lru_cache, partial

import torch
from torch.nn import functional as F
from torch.utils.benchmark import Timer

from labutils import machine
from labutils.config.card import Speed
from labutils.config.reader import load_config
from labutils.memory.kinds import ELEMENTS, FLASH, PRODUCT, ROWS
from labutils.prediction.trace import StorageLog
from labutils.techniques.precision import tf32
from labutils.techniques.step import take_step
from labutils.workload.build import build_workload
from labutils.workload.data import build_data

SECONDS = 0.02  # for each measurement; the fastest calls in it count
N_TENSORS = 2  # operands are taken in turn: in a step, caches hold others too
# The kernel for older cards beside flash attention, forward and backward: measured on one card
# that is not named (heads of 64, 4,096 tokens), Dao-AILab/flash-attention#416.
EFFICIENT_SHARES = 0.8, 0.55
FLOAT32 = "float32"
DTYPES = FLOAT32, "bfloat16", "float16"


@lru_cache(maxsize=4)
def rates_of(device: torch.device) -> Speed:
    """Measure large operations on a GPU of this machine, in a few seconds, once in a process.

    `tflops` are the measured ones too: its datasheet is not known here. Attention is measured
    forward; backward is taken to reach the usual share of that.
    """
    gpu = machine.card(device).gpu

    def rate(kind: str, dtype: str = FLOAT32, shape: tuple[int, ...] = ()) -> float:
        work, seconds = measured(kind, dtype, device, shape)
        return work / seconds

    half = "bfloat16" if gpu.has_bf16 else "float16"
    reached = {dtype: rate(PRODUCT, dtype) / 1e12 for dtype in DTYPES}
    unaligned = {"unaligned_16bit": rate(PRODUCT, half) / rate(PRODUCT, half, ODD)}
    if gpu.capability >= (8, 0):
        with tf32(True):
            reached["TF32"] = rate(PRODUCT) / 1e12
            unaligned["unaligned"] = rate(PRODUCT) / rate(PRODUCT, shape=ODD)
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
        **unaligned,
    )


@lru_cache(maxsize=4)
def call_seconds(device: torch.device) -> float:
    """Measure what the host takes from one operation to the next: by steps of the small GPT-2.

    They keep no card busy. The quickest of some tenths of a second count, once in a process.
    """
    config = load_config("fp32").on("cpu")
    work = build_workload(config, device, build_data(config))
    batch = {name: ids.to(device) for name, ids in next(iter(work.data.batches)).items()}
    rest = {"n_targets": 1, "autocast": nullcontext, "scaler": work.scaler}
    step = partial(take_step, work.model, [batch], work.loss_fn, work.optimizer, **rest)
    step()
    with StorageLog() as log:
        step()
    n_calls = sum(event.work.host_calls for event in log.events if event.work)
    times = Timer("step()", globals={"step": step}).blocked_autorange(min_run_time=10 * SECONDS)
    return min(times.times) / n_calls


WIDE = 2**16, 1024
LONG = 2**10, 2**16  # up to 1,024 numbers a row have a softmax that is as quick as an addition
ODD = 4097, 4097  # sides of which none is a multiple of 16 bytes

OPERATIONS = {  # kind: (shape of its tensors, a call with a function that returns one by one)
    PRODUCT: ((4096, 4096), lambda x: x() @ x()),
    FLASH: ((16, 12, 1024, 64), lambda x: F.scaled_dot_product_attention(x(), x(), x())),
    ELEMENTS: (WIDE, lambda x: x() + x()),
    ROWS: (LONG, lambda x: torch.softmax(x(), -1)),
}


def measured(
    kind: str, dtype: str, device: torch.device, shape: tuple[int, ...] = ()
) -> tuple[float, float]:
    """Return (FLOPs, or bytes where there are none; seconds) of a call of an operation.

    Its work is counted as that of a predicted step is. `shape`: other than the usual one.
    """
    usual, operation = OPERATIONS[kind]
    pool = torch.randn(N_TENSORS, *(shape or usual), device=device).to(getattr(torch, dtype))
    call = partial(operation, partial(next, itertools.cycle(pool.unbind())))
    call()
    with StorageLog() as log:
        call()
    works = [event.work for event in log.events if event.work]
    timer = Timer("call()", globals={"call": call}, num_threads=torch.get_num_threads())
    flops = sum(work.flops for work in works)
    amount = flops or sum(work.n_bytes for work in works)
    return amount, min(timer.blocked_autorange(min_run_time=SECONDS).times)
