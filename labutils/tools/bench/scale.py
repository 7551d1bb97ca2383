"""How cost grows with batch, length, depth, width and vocabulary: measured beside predicted.

The predicted peak is the ledger's. The time of a step is predicted as a constant and a rate, fitted
to the two smallest points of a sweep: time = a + FLOPs / b. Where points leave the line, something
else has begun to cost, or products have become more efficient: the GFLOP/s tell.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
import torch
from matplotlib.axes import Axes
from tqdm import tqdm

from labutils.config.choices import Model
from labutils.memory.device_memory import free_memory
from labutils.memory.measure import measure_step
from labutils.plotting import BLUE, ORANGE
from labutils.prediction.module import predict_module
from labutils.techniques.loss import lm_loss_sum
from labutils.training.loop import to_device, train
from labutils.training.speed import flops_per_token
from labutils.workload.gpt2 import build_model

WARM, TIMED = 2, 8  # steps


@dataclass(frozen=True)
class Shape:
    """A GPT-2 of any depth and width, and the batch it trains on."""

    batch: int
    seq_len: int
    n_layer: int
    width: int
    vocab: int

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.batch * self.seq_len

    def model(self) -> torch.nn.Module:
        """Return the model, float32, on the CPU. A head is 64 wide."""
        heads = max(1, self.width // 64)
        row = Model("sweep", "", self.n_layer, heads, self.width, self.vocab)
        return build_model(row, seq_len=self.seq_len, dropout=0.0, activation="gelu_tanh")


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


FIELDS = {
    "batch": "batch",
    "length": "seq_len",
    "layers": "n_layer",
    "width": "width",
    "vocabulary": "vocab",
}
# Small on a CPU, GPT-2 124M's surroundings on a GPU.
BASES = {"cpu": Shape(4, 128, 4, 128, 2048), "cuda": Shape(8, 1024, 12, 768, 50304)}
VALUES = {
    "cpu": {
        "batch": (1, 2, 4, 8, 16),
        "length": (32, 64, 128, 256, 512),
        "layers": (1, 2, 4, 8),
        "width": (64, 128, 256, 512),
        "vocabulary": (2040, 2041, 2044, 2047, 2048),
    },
    "cuda": {
        "batch": (1, 2, 4, 8, 16, 32),
        "length": (128, 256, 512, 1024, 2048, 4096),
        "layers": (3, 6, 12, 24, 48),
        "width": (256, 512, 768, 1024, 1536, 2048),
        "vocabulary": (50250, 50256, 50257, 50264, 50272, 50304),
    },
}


def sweeps(device: torch.device) -> dict[str, list[tuple[int, Shape]]]:
    """Return {what grows: [(its value, shape)]} for a kind of device."""
    found = {}
    for name, values in VALUES[device.type].items():
        base = BASES[device.type]
        found[name] = [(value, replace(base, **{FIELDS[name]: value})) for value in values]
    return found


def measure(shape: Shape, device: torch.device, name: str) -> tuple[float, int, int, float]:
    """Return a step's median ms, measured peak, predicted peak and FLOPs in one precision.

    Raises torch.OutOfMemoryError.
    """
    model = shape.model()
    ids = torch.randint(0, min(shape.vocab, 2048), (shape.batch, shape.seq_len))
    batch = {"input_ids": ids, "labels": ids}
    predicted = predict_module(model, batch, lm_loss_sum, _adamw, precision=name, device=device)
    flops = flops_per_token(model, shape.seq_len) * shape.tokens
    model = model.to(device)
    optimizer = _adamw(model.parameters())
    endless = iter(lambda: batch, None)
    record = train(
        model,
        endless,
        lm_loss_sum,
        optimizer,
        steps=WARM + TIMED,
        precision=name,
        progress=False,
    )
    if record.outcome == "out_of_memory":
        raise torch.OutOfMemoryError(record.reason)
    measured = measure_step(
        model,
        [to_device(batch, device)],
        lm_loss_sum,
        optimizer,
        precision=name,
    )
    ms = statistics.median(record.series.step_ms[WARM:])
    return ms, measured.peak_bytes, predicted.peak_bytes, flops


def _adamw(parameters) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4, fused=True)


def run(device: torch.device, name: str, chosen: dict[str, list[tuple[int, Shape]]]) -> list[Point]:
    """Measure all sweeps; a shape that does not fit ends its sweep."""
    points: list[Point] = []
    bar = tqdm(total=sum(map(len, chosen.values())), desc="shapes")
    for sweep, shapes in chosen.items():
        mine = []
        for value, shape in shapes:
            point = _point(sweep, value, shape, device, name)
            free_memory()
            if point is None:
                break
            mine.append(point)
            bar.update()
        _predict_times(mine)
        points += mine
    bar.close()
    return points


def _point(sweep: str, value: int, shape: Shape, device: torch.device, name: str) -> Point | None:
    """Return None where memory runs out. The error is gone then, and with it the step's tensors."""
    try:
        ms, peak, predicted, flops = measure(shape, device, name)
    except torch.OutOfMemoryError:
        return None
    return Point(sweep, value, shape, flops, ms, peak, predicted)


def _predict_times(points: Sequence[Point]) -> None:
    if len(points) < 2:
        return
    first, second = points[:2]
    slope = max(0.0, (second.ms - first.ms) / (second.flops - first.flops))
    for point in points:
        point.predicted_ms = first.ms + slope * (point.flops - first.flops)


def table(points: Sequence[Point]) -> pd.DataFrame:
    """Return a table of all points."""
    return pd.DataFrame([_row(point) for point in points]).set_index("sweep")


def _row(p: Point) -> dict[str, str | int]:
    return {
        "sweep": p.sweep,
        "value": p.value,
        "tokens/s": f"{1000 * p.shape.tokens / p.ms:,.0f}",
        "predicted": f"{1000 * p.shape.tokens / p.predicted_ms:,.0f}",
        "GFLOP/s": f"{p.flops / p.ms / 1e6:,.0f}",
        "peak MiB": f"{p.peak_bytes / 2**20:,.1f}",
        "ledger / measured": f"{p.predicted_bytes / p.peak_bytes:.4f}",
    }


def figure(points: Sequence[Point], title: str, path: Path) -> None:
    """Save a figure: a column for each sweep, tokens/s above and peak below."""
    sweeps: dict[str, list[Point]] = {}
    for point in points:
        sweeps.setdefault(point.sweep, []).append(point)
    size = (3.4 * len(sweeps), 5.6)
    figure, axes = plt.subplots(2, len(sweeps), figsize=size, layout="constrained", squeeze=False)
    for column, (name, mine) in enumerate(sweeps.items()):
        x = [p.value for p in mine]
        speed = [
            (1000 * p.shape.tokens / p.ms, 1000 * p.shape.tokens / p.predicted_ms) for p in mine
        ]
        peak = [(p.peak_bytes / 2**20, p.predicted_bytes / 2**20) for p in mine]
        _draw(axes[0, column], x, speed, name)
        _draw(axes[1, column], x, peak, name)
    axes[0, 0].set_ylabel("tokens per second")
    axes[1, 0].set_ylabel("peak, MiB")
    axes[0, 0].legend(frameon=False)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=100)
    plt.close(figure)


def _draw(ax: Axes, x: list[int], pairs: list[tuple[float, float]], name: str) -> None:
    measured, predicted = zip(*pairs, strict=True)
    ax.plot(x, predicted, "--", color=ORANGE, label="predicted")
    ax.plot(x, measured, "o", color=BLUE, label="measured")
    ax.set_xscale("log", base=2)
    ax.set_xticks(x, [str(value) for value in x])
    ax.set_ylim(0)
    ax.set_xlabel(name)
    ax.spines[["top", "right"]].set_visible(False)
