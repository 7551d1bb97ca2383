"""Recorded runs: time, throughput, memory, loss, and the loss scale."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes

from labutils.plotting.memory import stacked_memory
from labutils.plotting.style import COLORS, line_look, new_axis, place_of
from labutils.training.record import RunRecord, labels


def four_panels(records: Sequence[RunRecord]) -> np.ndarray:
    """Draw step time, tokens/s, peak by category and loss; return the 2×2 axes.

    A run that took no step is left out.
    """
    figure, axes = plt.subplots(2, 2, figsize=(11, 6.4), layout="constrained")
    trained = [record for record in records if record.timing]
    median_ms, tokens_per_s, peaks = {}, {}, {}
    for position, (name, run) in enumerate(zip(labels(trained), trained, strict=True)):
        median_ms[name] = run.timing.median_step_ms
        tokens_per_s[name] = run.timing.tokens_per_s
        if run.memory:
            peaks[name] = run.memory.categories
        _loss(axes[1, 1], name, run, place_of(name, position))
    _bars(axes[0, 0], median_ms, "median optimizer step, ms")
    _bars(axes[0, 1], tokens_per_s, "tokens per second")
    stacked_memory(peaks, axes[1, 0])
    axes[1, 1].set(xlabel="tokens trained on", ylabel="training loss, nats per token")
    axes[1, 1].legend(frameon=False)
    devices = {record.environment["device"] for record in trained}
    figure.suptitle("Measured on " + "; ".join(sorted(devices)), fontsize="medium")
    return axes


def _bars(ax: Axes, values: dict[str, float], xlabel: str) -> None:
    ax = new_axis(ax)
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


def _loss(ax: Axes, name: str, run: RunRecord, place: int) -> None:
    """Draw the loss against tokens seen, which is the only fair axis for unequal runs."""
    series = run.series.loss
    tokens = np.arange(1, len(series) + 1) * run.tokens_per_step
    every = max(1, len(series) // 8)
    new_axis(ax).plot(tokens, series, **line_look(place), markevery=every, ms=4, label=name)
