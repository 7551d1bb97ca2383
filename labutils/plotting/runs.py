"""Recorded runs: time, throughput, memory, loss, and the loss scale."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes

from labutils.plotting.memory import stacked_memory
from labutils.plotting.style import COLORS, line_look, new_axis, place_of
from labutils.training.compare import group_by_experiment
from labutils.training.records import RunRecord


def _trained(records: Sequence[RunRecord]) -> dict[str, list[RunRecord]]:
    return group_by_experiment([record for record in records if record.timing])


def _median_ms(runs: Sequence[RunRecord]) -> float:
    return float(np.median([run.timing.median_step_ms for run in runs]))


def _bars(ax: Axes, values: dict[str, float], xlabel: str) -> Axes:
    colors, texts = [], []
    for position, (name, value) in enumerate(values.items()):
        colors.append(COLORS[place_of(name, position)])
        texts.append(f"{value:,.3g}" if value < 1000 else f"{value:,.0f}")
    bars = ax.barh(range(len(values)), list(values.values()), color=colors)
    ax.bar_label(bars, texts, padding=3)
    ax.set_yticks(range(len(values)), list(values))
    ax.invert_yaxis()
    ax.margins(x=0.18)
    ax.set_xlabel(xlabel)
    return ax


def step_times(records: Sequence[RunRecord], ax: Axes | None = None) -> Axes:
    """Draw the median time of an optimizer step, in ms; repeated runs share a bar."""
    medians = {}
    for name, runs in _trained(records).items():
        medians[name] = _median_ms(runs)
    return _bars(new_axis(ax), medians, "median optimizer step, ms")


def throughput(records: Sequence[RunRecord], ax: Axes | None = None) -> Axes:
    """Draw tokens per second; repeated runs share a bar."""
    tokens_per_s = {}
    for name, runs in _trained(records).items():
        tokens_per_s[name] = 1000 * runs[0].tokens_per_step / _median_ms(runs)
    return _bars(new_axis(ax), tokens_per_s, "tokens per second")


def peaks(records: Sequence[RunRecord], ax: Axes | None = None) -> Axes:
    """Draw the measured peak of each run by category."""
    measured = {}
    for name, runs in _trained(records).items():
        if runs[0].memory:
            measured[name] = runs[0].memory.categories
    return stacked_memory(measured, ax)


def losses(records: Sequence[RunRecord], ax: Axes | None = None) -> Axes:
    """Draw the training loss against tokens seen, which is the only fair axis for unequal runs."""
    ax = new_axis(ax)
    for position, (name, runs) in enumerate(_trained(records).items()):
        series = runs[0].series.loss
        tokens = np.arange(1, len(series) + 1) * runs[0].tokens_per_step
        look = line_look(place_of(name, position))
        ax.plot(tokens, series, **look, markevery=max(1, len(series) // 8), ms=4, label=name)
    ax.set_xlabel("tokens trained on")
    ax.set_ylabel("training loss, nats per token")
    ax.legend(frameon=False)
    return ax


def four_panels(records: Sequence[RunRecord]) -> np.ndarray:
    """Draw step time, tokens/s, peak by category and loss; return the 2×2 axes."""
    figure, axes = plt.subplots(2, 2, figsize=(11, 6.4), layout="constrained")
    step_times(records, axes[0, 0])
    throughput(records, axes[0, 1])
    peaks(records, axes[1, 0])
    losses(records, axes[1, 1])
    devices: set[str] = set()
    for runs in _trained(records).values():
        devices |= {run.environment["device"] for run in runs}
    figure.suptitle("Measured on " + "; ".join(sorted(devices)), fontsize="medium")
    return axes
