"""How cost grows with batch, length, depth and width: measured tokens/s and peak, and the predicted
lines.

The peak is the ledger's. The time of a step is predicted as a constant and a rate, fitted to the
two smallest points of a sweep: time = a + FLOPs / b. Where points leave the line, something else
has begun to cost, or products have become more efficient: the GFLOP/s tell.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from labutils.config.choices import Model
from labutils.memory.device_memory import free_memory
from labutils.memory.measure import measure_step
from labutils.prediction.memory import predict_module
from labutils.techniques.loss import lm_loss_sum
from labutils.training.loop import to_device, train
from labutils.training.speed import flops_per_token
from labutils.workload.gpt2 import build_model

SWITCHES = {"dropout": 0.0, "activation": "gelu_tanh"}
TIMED = 8


@dataclass(frozen=True)
class Shape:
    """A GPT-2 of any depth and width, and the batch it trains on."""

    batch: int
    seq_len: int
    n_layer: int
    width: int
    vocab: int

    def model(self) -> torch.nn.Module:
        """Return the model, float32, on the CPU."""
        heads = max(1, self.width // 64)
        row = Model("scale", "", self.n_layer, heads, self.width, self.vocab)
        return build_model(row, seq_len=self.seq_len, **SWITCHES)


@dataclass
class Point:
    """One shape: predicted and measured. `ms` is the median step."""

    sweep: str
    value: int
    shape: Shape
    flops: float
    ms: float
    peak_bytes: int
    predicted_bytes: int
    predicted_ms: float = float("nan")


def sweeps(where: torch.device) -> dict[str, list[tuple[int, Shape]]]:
    """Return {what grows: [(its value, shape)]}:

    Small on a CPU, GPT-2 124M's surroundings on a GPU.
    """
    if where.type == "cuda":
        base, sizes = (
            (8, 1024, 12, 768, 50304),
            ((1, 2, 4, 8, 16, 32), (128, 256, 512, 1024, 2048, 4096)),
        )
        sizes += ((3, 6, 12, 24, 48), (256, 512, 768, 1024, 1536, 2048))
    else:
        base, sizes = (4, 128, 4, 128, 2048), ((1, 2, 4, 8, 16), (32, 64, 128, 256, 512))
        sizes += ((1, 2, 4, 8), (64, 128, 256, 512))
    found = {}
    sizes += (
        ((50250, 50256, 50257, 50264, 50272, 50304),)
        if where.type == "cuda"
        else ((2040, 2041, 2044, 2047, 2048),)
    )
    for i, (name, values) in enumerate(
        zip(("batch", "length", "layers", "width", "vocabulary"), sizes, strict=True)
    ):
        found[name] = [(value, Shape(*base[:i], value, *base[i + 1 :])) for value in values]
    return found


def measure(shape: Shape, where: torch.device, name: str) -> tuple[float, int, int, float]:
    """Return (median ms of a step, measured peak, predicted peak, FLOPs of a step) in one
    precision.
    """
    model = shape.model()
    ids = torch.randint(0, min(shape.vocab, 2048), (shape.batch, shape.seq_len))
    batch = {"input_ids": ids, "labels": ids}
    adamw = lambda parameters: torch.optim.AdamW(parameters, lr=1e-4, fused=True)  # noqa: E731
    card = "this" if where.type == "cuda" else "cpu"
    predicted = predict_module(model, batch, lm_loss_sum, adamw, precision=name, device=card)
    flops = flops_per_token(model, shape.seq_len) * shape.batch * shape.seq_len
    model = model.to(where)
    optimizer = adamw(model.parameters())
    endless = iter(lambda: batch, None)
    record = train(
        model, endless, lm_loss_sum, optimizer, steps=TIMED + 2, precision=name, progress=False
    )
    if record.outcome == "out_of_memory":
        raise torch.OutOfMemoryError(record.reason)
    report = measure_step(model, [to_device(batch, where)], lm_loss_sum, optimizer, precision=name)
    return (
        statistics.median(record.series.step_ms[2:]),
        report.peak_bytes,
        predicted.peak_bytes,
        flops,
    )


def run(where: torch.device, name: str, chosen: dict[str, list[tuple[int, Shape]]]) -> list[Point]:
    """Measure all sweeps; a shape that does not fit ends its sweep."""
    points: list[Point] = []
    jobs = [(sweep, value, shape) for sweep, shapes in chosen.items() for value, shape in shapes]
    full = set()
    for sweep, value, shape in tqdm(jobs, desc="shapes"):
        if sweep in full:
            continue
        try:
            ms, peak, predicted, flops = measure(shape, where, name)
        except torch.OutOfMemoryError:
            full.add(sweep)
        if sweep in full:  # outside the handler, which keeps the traceback and with it the tensors
            free_memory()
            continue
        points.append(Point(sweep, value, shape, flops, ms, peak, predicted))
        free_memory()
    for sweep in chosen:
        mine = [p for p in points if p.sweep == sweep]
        if len(mine) > 1:
            slope = max(0.0, (mine[1].ms - mine[0].ms) / (mine[1].flops - mine[0].flops))
            for point in mine:
                point.predicted_ms = mine[0].ms + slope * (point.flops - mine[0].flops)
    return points


def table(points: Sequence[Point]):
    """Return a pandas table of all points."""
    import pandas as pd

    rows = [
        {
            "sweep": p.sweep,
            "value": p.value,
            "tokens/s": f"{1000 * p.shape.batch * p.shape.seq_len / p.ms:,.0f}",
            "predicted": f"{1000 * p.shape.batch * p.shape.seq_len / p.predicted_ms:,.0f}",
            "GFLOP/s": f"{p.flops / p.ms / 1e6:,.0f}",
            "peak MiB": f"{p.peak_bytes / 2**20:,.1f}",
            "ledger / measured": f"{p.predicted_bytes / p.peak_bytes:.4f}",
        }
        for p in points
    ]
    return pd.DataFrame(rows).set_index("sweep")


def figure(points: Sequence[Point], title: str, path: Path) -> None:
    """Save a figure: for each sweep tokens/s above and peak below, measured points and predicted
    lines.
    """
    import matplotlib.pyplot as plt

    from labutils.plotting import BLUE, ORANGE

    names = list(dict.fromkeys(p.sweep for p in points))
    figure, axes = plt.subplots(
        2, len(names), figsize=(3.4 * len(names), 5.6), layout="constrained", squeeze=False
    )
    for column, name in enumerate(names):
        mine = [p for p in points if p.sweep == name]
        x, tokens = (
            [p.value for p in mine],
            np.array([p.shape.batch * p.shape.seq_len for p in mine]),
        )
        rows = (
            (
                1000 * tokens / [p.ms for p in mine],
                1000 * tokens / [p.predicted_ms for p in mine],
                "tokens per second",
            ),
            (
                [p.peak_bytes / 2**20 for p in mine],
                [p.predicted_bytes / 2**20 for p in mine],
                "peak, MiB",
            ),
        )
        for ax, (measured, predicted, label) in zip(axes[:, column], rows, strict=True):
            ax.plot(x, predicted, "--", color=ORANGE, label="predicted")
            ax.plot(x, measured, "o", color=BLUE, label="measured")
            ax.set_xscale("log", base=2)
            ax.set_xticks(x, [str(value) for value in x])
            ax.set_ylim(0)
            ax.set(xlabel=name, ylabel=label if column == 0 else "")
            ax.spines[["top", "right"]].set_visible(False)
    axes[0, 0].legend(frameon=False)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=100)
    plt.close(figure)
