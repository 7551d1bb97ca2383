"""What the exhibit `allreduce` computes from: real gradients of 64 workers, models, and links.

Speeds of links are those of one direction. PCI Express: lanes × GT/s × 128/130 (PCI-SIG). Ethernet
and InfiniBand: the speed in their names. NVLink: half of what NVIDIA publishes for both directions,
600 and 900 GB/s (nvidia.com/en-us/data-center/nvlink).
"""

from __future__ import annotations

import base64
from functools import lru_cache

import torch
from matplotlib.axes import Axes

from labutils.config.choices import MODELS
from labutils.exhibits.number_data import described
from labutils.plotting import curves
from labutils.prediction.arithmetic import n_parameters
from labutils.techniques.loss import count_targets, lm_loss_sum
from labutils.techniques.numerics import BF16, FP16, FP32
from labutils.training.gradients import compare_gradients, window_gradient
from labutils.workload.data import batches, sequences
from labutils.workload.gpt2 import build_model

FORMATS = (FP32, BF16, FP16)
WORKERS = (2, 4, 8, 16, 32, 64)
N_ELEMENTS = 64
ORDERS = ("ring", "tree")
PCIE = 16 * 128 / 130 / 8  # 16 lanes, per GT/s: in 10^9 bytes a second
LINKS = {
    "10 Gbit/s Ethernet": 10 / 8,
    "100 Gbit/s Ethernet": 100 / 8,
    "PCI Express 4.0 × 16": 16 * PCIE,
    "InfiniBand NDR, 400 Gbit/s": 400 / 8,
    "PCI Express 5.0 × 16": 32 * PCIE,
    "NVLink 3 (A100)": 300.0,
    "NVLink 4 (H100)": 450.0,
}


@lru_cache(maxsize=1)
def gradients() -> torch.Tensor:
    """Return 64 elements of 64 workers' gradients, `(64, 64)`, float32, on the CPU.

    Each worker has one sequence of 32 tokens and the small GPT-2 before training. Elements that are
    0 for a worker are not taken: they say nothing about rounding.
    """
    with torch.random.fork_rng(devices=[]):
        model = build_model("gpt2-nano", dropout=0.0)
        stream, rows = batches(sequences(32), 1, seed=0), []
        for _ in range(max(WORKERS)):
            rows.append(window_gradient(model, [next(stream)], _mean_loss))
    found = torch.stack([row[::97] for row in rows])  # every 97th: from all layers
    kept = found[:, (found != 0).all(0)]
    return kept[:, :: kept.shape[1] // N_ELEMENTS][:, :N_ELEMENTS].clone()


def _mean_loss(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return lm_loss_sum(model, batch) / count_targets(batch)


def exchanged_mean(
    gradients: torch.Tensor, dtype: torch.dtype, order: str, scale: float = 1.0
) -> torch.Tensor:
    """Return the workers' mean gradient as DDP's hooks compute it, float32, `(n,)`.

    `gradients` are float32, `(n_workers, n)`. They are multiplied by `scale`, rounded to `dtype`,
    divided by the number of workers (against overflow) and added. Then `scale` is taken out.
    """
    parts = (gradients * scale).to(dtype).div_(len(gradients))
    total = _added_in_a_ring(parts) if order == "ring" else _added_in_a_tree(parts)
    return total.float() / scale


def _added_in_a_ring(parts: torch.Tensor) -> torch.Tensor:
    """Part c of n begins at worker c and visits the others in turn."""
    n_workers, sums = len(parts), []
    for c, chunk in enumerate(parts.tensor_split(n_workers, dim=1)):
        total = chunk[c]
        for hop in range(1, n_workers):
            total = total + chunk[(c + hop) % n_workers]
        sums.append(total)
    return torch.cat(sums)


def _added_in_a_tree(parts: torch.Tensor) -> torch.Tensor:
    """Neighbours are added, then their sums, and so on; each number of WORKERS is a power of 2."""
    while len(parts) > 1:
        parts = parts[0::2] + parts[1::2]
    return parts[0]


def packed(values: torch.Tensor) -> str:
    """Return float32 numbers as base64 of their bytes, the lowest byte first."""
    return base64.b64encode(values.numpy().astype("<f4").tobytes()).decode()


def models() -> dict[str, int]:
    """Return {model: number of parameters}."""
    return {name: n_parameters(name) for name in MODELS}


def errors(order: str) -> dict[str, dict[int, float]]:
    """Return {format: {workers: error of the mean gradient}}, relative to its norm in float64."""
    found: dict[str, dict[int, float]] = {}
    for one in FORMATS:
        found[one.name] = {}
        for n in WORKERS:
            some = gradients()[:n]
            mean = exchanged_mean(some, one.dtype, order).double()
            found[one.name][n] = compare_gradients(mean, some.double().mean(0)).error
    return found


def data(n_workers: int, number_format: str) -> dict[str, object]:
    """Return what the page gets. It begins with `n_workers` that send `number_format`."""
    return {
        "n": n_workers,
        "format": number_format,
        "formats": [described(one) for one in FORMATS],
        "workers": list(WORKERS),
        "elements": N_ELEMENTS,
        "gradients": packed(gradients()),
        "models": models(),
        "parameters": models()["gpt2"],
        "links": LINKS,
        "link": "PCI Express 4.0 × 16",
    }


def still() -> Axes:
    """Draw the error of the mean over the number of workers, in a ring."""
    lines = errors("ring")
    ax = curves(lines, "workers", "error of the mean gradient", log2_ticks=WORKERS)
    ax.set_yscale("log")
    last = [f"{name} {points[64]:.1g}" for name, points in lines.items()]
    ax.set_title(f"Error of the mean of 64 workers: {', '.join(last)}")
    return ax
