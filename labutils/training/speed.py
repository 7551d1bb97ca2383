"""The median step, tokens per second, and MFU with its denominator."""

from __future__ import annotations

import math
import re
import statistics
from functools import lru_cache

import torch
from torch import nn

from labutils.config.schema import Config
from labutils.machine.here import matmul_rate
from labutils.techniques.precision import COMPUTE_DTYPE, _name, _require_known, support, tf32
from labutils.training import distributed
from labutils.training.records import Timing

# Dense peaks in TFLOP/s from NVIDIA's datasheets, by a part of the card's name. FP32 runs outside
# the tensor cores.
DATASHEET_TFLOPS = {
    "V100-SXM2": {"fp32": 15.7, "fp16": 125.0},
    "Tesla T4": {"fp32": 8.1, "fp16": 65.0},
    "A100": {"fp32": 19.5, "tf32": 156.0, "fp16": 312.0, "bf16": 312.0},
    "H100 80GB HBM3": {"fp32": 67.0, "tf32": 494.0, "fp16": 989.0, "bf16": 989.0},
    "H100 PCIe": {"fp32": 51.0, "tf32": 378.0, "fp16": 756.0, "bf16": 756.0},
    "H200": {"fp32": 67.0, "tf32": 494.0, "fp16": 989.0, "bf16": 989.0},
}


def datasheet_tflops(card: str) -> dict[str, float]:
    """Return {precision: dense TFLOP/s} of a card by its full name; empty if unknown, sliced (MIG)
    or a variant.
    """
    words = set(re.split(r"[ -]", card))
    if words & {"MIG", "NVL", "Laptop"}:
        return {}
    fits = (
        rates for name, rates in DATASHEET_TFLOPS.items() if set(re.split(r"[ -]", name)) <= words
    )
    return next(fits, {})


@lru_cache(maxsize=8)
def peak_rate(precision: str, device: torch.device) -> tuple[float, str]:
    """Return (FLOP/s, where it is from): the denominator of an MFU.

    A datasheet's dense peak if the card is known, else a product measured here. On a CPU the
    float32 product's, or that of the precision's own dtype where it is faster: a 16-bit product
    without hardware is nobody's peak. An MFU without its denominator says nothing.
    """
    _require_known(precision)
    if device.type == "cuda":
        peaks = datasheet_tflops(torch.cuda.get_device_name(device))
        key = "bf16" if precision == "pure_bf16" else precision
        if key in peaks:
            return peaks[key] * 1e12, f"{peaks[key]:g} TFLOP/s, datasheet, dense"
        with tf32(precision == "tf32"):
            rate = matmul_rate(COMPUTE_DTYPE[precision], device, 4096)
        return rate, f"{rate / 1e12:.3g} TFLOP/s, a 4096² product measured here"
    rates = {
        dtype: matmul_rate(dtype, device, 512) for dtype in _worth_measuring(precision, device)
    }
    dtype = max(rates, key=rates.get)
    how = f"one thread's rate × {torch.get_num_threads()}"
    return rates[
        dtype
    ], f"{rates[dtype] / 1e12:.2g} TFLOP/s, a {_name(dtype)} 512² product measured here, {how}"


def _worth_measuring(precision: str, device: torch.device) -> list[torch.dtype]:
    own = COMPUTE_DTYPE[precision]
    slow = (
        own != torch.float32 and support(precision, device).slow
    )  # then a product of 512² takes a second
    return [torch.float32] if slow or own == torch.float32 else [torch.float32, own]


def flops_per_token(model: nn.Module, seq_len: int) -> float:
    """Return the model FLOPs of one training step (forward and backward) per token: 6·N + 12·L·d·T.

    N counts parameters without position embeddings. Kaplan et al. 2020 (2001.08361), PaLM appendix
    B (2204.02311). Recomputation is not counted, nor is what the optimizer does.
    """
    config = model.config
    n_params = sum(p.numel() for p in model.parameters()) - model.transformer.wpe.weight.numel()
    return 6.0 * n_params + 12.0 * config.n_layer * config.n_embd * seq_len


UNTIMED_STEPS = 2  # the first steps allocate optimizer state and choose kernels


def timing_of(
    step_ms: list[float], flops_per_token: float, config: Config, where: torch.device
) -> Timing | None:
    """Return medians over the steps after the first UNTIMED_STEPS (or what there is)."""
    timed = step_ms[min(UNTIMED_STEPS, max(0, len(step_ms) - 1)) :]
    if not timed:
        return None
    median = statistics.median(timed)
    quartiles = statistics.quantiles(timed, n=4) if len(timed) > 1 else [median] * 3
    # The notch of a box plot (McGill, Tukey, Larsen 1978): medians closer than this do not differ.
    spread = 1.57 * (quartiles[2] - quartiles[0]) / math.sqrt(len(timed)) / median
    tokens_per_s = config.tokens_per_step / median * 1000
    rate, denominator = peak_rate(config.precision, where)
    return Timing(
        median_step_ms=median,
        spread=spread,
        tokens_per_s=tokens_per_s,
        mfu=flops_per_token * tokens_per_s / rate / distributed.world_size(),
        mfu_denominator=denominator,
    )
