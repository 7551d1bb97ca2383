"""The median step, tokens per second, and MFU with its denominator."""

from __future__ import annotations

import math
import random
import re
import statistics
import time
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from labutils.config.cards import CARDS
from labutils.config.choices import PRECISIONS
from labutils.config.schema import Config
from labutils.machine import here
from labutils.techniques.precision import autocast, products_dtype, tf32
from labutils.training import accelerated, profiles
from labutils.training.noise import PairedDifference, paired_ratio
from labutils.training.records import Timing

# Part of a product's name: its row among the cards, which has the datasheet's dense peaks.
PRODUCTS_ON_SHEETS = {
    "V100-SXM2": "v100",
    "Tesla T4": "t4",
    "A100": "a100",
    "H100 80GB HBM3": "h100",
    "H100 PCIe": "h100-pcie",
    "H200": "h200",
}
# {part of the name: {kind of product: TFLOP/s}}. FP32 runs outside the tensor cores.
DATASHEET_TFLOPS = {name: CARDS[row].speed.tflops for name, row in PRODUCTS_ON_SHEETS.items()}


def datasheet_tflops(card: str) -> dict[str, float]:
    """Return {kind of product: dense TFLOP/s} of a card by its full name.

    Empty if the card is unknown, sliced (MIG) or a variant.
    """
    words = set(re.split(r"[ -]", card))
    if words & {"MIG", "NVL", "Laptop"}:
        return {}
    for name, rates in DATASHEET_TFLOPS.items():
        if set(re.split(r"[ -]", name)) <= words:
            return rates
    return {}


FLOAT32 = next(iter(PRECISIONS))
WORTH_TELLING = 1.1  # a product that is 10 % faster would make a step a few percent faster


@lru_cache(maxsize=8)
def peak_rate(precision: str, device: torch.device) -> tuple[float, str]:
    """Return (FLOP/s, where it is from): the denominator of an MFU, which says nothing without it.

    A datasheet's dense peak if the card is known, else a product measured here. On a CPU the
    float32 product's, or that of the precision's own dtype where it is faster: a 16-bit product
    without hardware is nobody's peak.
    """
    row = PRECISIONS[precision]
    if device.type == "cuda":
        peaks = datasheet_tflops(torch.cuda.get_device_name(device))
        kind = row.kind
        if kind in peaks:
            return peaks[kind] * 1e12, f"{peaks[kind]:g} TFLOP/s, datasheet, dense"
        with tf32(row.tf32):
            rate = here.matmul_rate(products_dtype(precision), device, 4096)
        return rate, f"{rate / 1e12:.3g} TFLOP/s, a 4096² product measured here"
    rate, kind = here.matmul_rate(torch.float32, device, 512), "float32"
    # without fast hardware a product of 512² takes a second
    if row.is_16bit and not here.support(precision, device).slow:
        own = here.matmul_rate(products_dtype(precision), device, 512)
        if own > rate:
            rate, kind = own, row.products
    how = f"one thread's rate × {torch.get_num_threads()}"
    return rate, f"{rate / 1e12:.2g} TFLOP/s, a {kind} 512² product measured here, {how}"


def product_speeds(
    precisions: Sequence[str], device: torch.device, n: int = 0, rounds: int = 5
) -> dict[str, PairedDifference]:
    """Return {precision: the speed of a product, × float32's}; "larger" is faster.

    The product is n×n by n×n: 4096 on CUDA and 256 on a CPU, if `n` is 0. Each round measures
    float32 twice and the others, in a shuffled order: the two of float32 are the equal pair. A
    precision that the device lacks is left out.
    """
    n = n or (4096 if device.type == "cuda" else 256)
    usable = [name for name in precisions if here.support(name, device).ok]
    rates: dict[str, list[float]] = {name: [] for name in ("base", "again", *usable)}
    names, shuffled = list(rates), random.Random(0)
    for _ in range(rounds):
        shuffled.shuffle(names)
        for name in names:
            row = PRECISIONS[name if name in usable else FLOAT32]
            with tf32(row.tf32):
                rates[name].append(here.matmul_rate(products_dtype(row.name), device, n))
    equal_pair = (rates["base"], rates["again"])
    speeds = {}
    for name in usable:
        speeds[name] = paired_ratio(
            rates["base"], rates[name], equal_pair, worth_telling=WORTH_TELLING
        )
    return speeds


def amdahl(share: float, speedup: float) -> float:
    """Return the speed-up of a whole of which a `share` (0 to 1) becomes `speedup` times as fast.

    Amdahl's law (1967). Raises ValueError for a share beyond 0 to 1, or a speed-up not positive.
    """
    if not 0 <= share <= 1 or speedup <= 0:
        raise ValueError(f"a share is 0 to 1 and a speed-up positive; got {share} and {speedup}")
    return 1 / (1 - share + share / speedup)


PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")


def product_ms(
    model: nn.Module,
    batch: dict[str, torch.Tensor],
    loss_fn: Callable[[nn.Module, Any], torch.Tensor],
    precision: str,
    repeats: int = 5,
) -> tuple[float, float]:
    """Return (milliseconds in matrix products, in all operations) of an AdamW step: profiled.

    The fastest of `repeats` steps after a warm-up. After one second no further step begins, but
    one is always taken. On CUDA the time of kernels counts, elsewhere that of operations on the
    CPU. `batch` lies on the model's device. The steps change the weights; no loss is scaled.
    """
    device = next(model.parameters()).device
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    activity = torch.profiler.ProfilerActivity
    activities = [activity.CPU, activity.CUDA] if device.type == "cuda" else [activity.CPU]
    is_tf32 = PRECISIONS[precision].tf32
    found: list[tuple[float, float]] = []  # (all operations, products)
    begun = time.perf_counter()
    for _ in range(1 + repeats):
        if len(found) > 1 and time.perf_counter() - begun > 1:
            break
        with torch.profiler.profile(activities=activities) as profile, tf32(is_tf32):
            with autocast(precision, device):
                loss = loss_fn(model, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if device.type == "cuda":
                torch.cuda.synchronize()
        times = {name: ms for name, (ms, _) in profiles.own_ms(profile, device).items()}
        products = sum(times.get(name, 0.0) for name in PRODUCTS)
        found.append((sum(times.values()), products))
    whole_ms, products_ms = min(found[1:])
    return products_ms, whole_ms


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
    step_ms: list[float], flops_per_token: float, config: Config, device: torch.device
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
    rate, denominator = peak_rate(config.precision, device)
    return Timing(
        median_step_ms=median,
        spread=spread,
        tokens_per_s=tokens_per_s,
        mfu=flops_per_token * tokens_per_s / rate / accelerated.world_size(),
        mfu_denominator=denominator,
    )
