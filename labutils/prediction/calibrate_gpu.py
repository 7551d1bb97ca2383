"""Measure large operations on this machine's GPU. The rest is `prediction.gpu_time`'s."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch.nn import functional as F

from labutils.config.card import Gpu, Speed
from labutils.machine.here import cuda_seconds
from labutils.prediction.gpu_time import EFFICIENT_SHARES
from labutils.techniques.precision import tf32

SIDE, ELEMENTS = 4096, 2**26


def measure_gpu(device: torch.device) -> Speed:
    """Measure large operations on a GPU, in a few seconds.

    `tflops` are the measured ones too: its datasheet is not known here.
    """
    with tf32(False):
        reached = {"float32": _gpu_products(torch.float32, device)}
    gpu = Gpu(torch.cuda.get_device_capability(device), 0, 0)
    if gpu.capability >= (8, 0):
        with tf32(True):
            reached["TF32"] = _gpu_products(torch.float32, device)
    for dtype in (torch.float16, torch.bfloat16):
        reached[str(dtype).removeprefix("torch.")] = _gpu_products(dtype, device)
    x = torch.randn(ELEMENTS // 1024, 1024, device=device)
    copied = 8 * ELEMENTS / cuda_seconds(partial(torch.mul, x, 2.0))
    normed = 8 * ELEMENTS / cuda_seconds(partial(torch.softmax, x, dim=-1))
    sixteen = reached["bfloat16" if gpu.has_bf16 else "float16"]
    return Speed(
        tflops=reached,
        gb_per_s=copied / 1e9,
        reached=reached,
        elements=1.0,
        rows=normed / copied,
        flash=_gpu_attention(device, gpu, sixteen * 1e12),
        source="measured here",
    )


def _gpu_products(dtype: torch.dtype, device: torch.device) -> float:
    a, b = (torch.randn(SIDE, SIDE, device=device).to(dtype) for _ in range(2))
    call = partial(torch.matmul, a, b)
    call()
    return 2 * SIDE**3 / cuda_seconds(call) / 1e12


def _gpu_attention(device: torch.device, gpu: Gpu, rate: float) -> tuple[float, float]:
    """Return the FLOP/s of fused attention, forward and backward, as shares of products'."""
    dtype = torch.bfloat16 if gpu.has_bf16 else torch.float16
    shape = 16, 12, 1024, 64
    q, k, v = (torch.randn(shape, device=device, dtype=dtype) for _ in range(3))
    q.requires_grad_()
    attend = partial(F.scaled_dot_product_attention, q, k, v)
    out = attend()
    gradient = torch.ones_like(out)
    again = partial(torch.autograd.grad, out, q, gradient, retain_graph=True)
    flops = 4 * math.prod(shape) * shape[2]
    forward = flops / cuda_seconds(attend)
    backward = 2.5 * flops / cuda_seconds(again)
    # older cards have another kernel, which is predicted as a share of this one
    kernel = (1.0, 1.0) if gpu.flash else EFFICIENT_SHARES
    return forward / rate / kernel[0], backward / rate / kernel[1]
