"""The rows of a ladder as bars, from top to bottom."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes

from labutils.plotting.style import BLACK, PURPLE, SKY, VERMILION
from labutils.training.ladder import Row


def ladder(rows: Mapping[str, Row], on_card: Mapping[str, Row]) -> np.ndarray:
    """Draw the measured peaks here, marked with the predicted ones, and those predicted on an A100.

    A row that was not measured says "not here". Returns the two axes.
    """
    figure, axes = plt.subplots(1, 2, figsize=(11, 0.27 * len(rows) + 1.6), layout="constrained")
    names = list(rows)
    here = [rows[name].measured_mib for name in names]
    there = [on_card[name].predicted_mib for name in names]
    _bars(axes[0], here, names, "peak here, MiB")
    _bars(axes[1], there, [""] * len(names), "predicted peak on an A100, MiB")
    predicted = [rows[name].predicted_mib for name in names]
    ys = [y for y, value in enumerate(predicted) if value is not None]
    marks = [predicted[y] for y in ys]
    axes[0].plot(marks, ys, "|", color=VERMILION, ms=13, mew=2, label="predicted")
    figure.legend(loc="outside lower left", frameon=False)
    return axes


def _bars(ax: Axes, values: Sequence[float | None], names: Sequence[str], xlabel: str) -> None:
    for y, value in enumerate(values):
        if value is None:
            ax.text(0, y, " not measured here", va="center", fontsize="small")
            continue
        ax.barh(y, value, color=SKY, edgecolor=BLACK)
        ax.annotate(
            f"{value:,.0f}",
            (value, y),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            fontsize="small",
        )
    ax.spines[["top", "right"]].set_visible(False)
    ax.set_yticks(range(len(names)), names)
    ax.set_ylim(len(names) - 0.4, -0.6)
    ax.margins(x=0.12)
    ax.set_xlabel(xlabel)


def guess_line(ax: Axes, value: float | None) -> Axes:
    """Mark a guess on the x axis with a line of its own; None draws nothing."""
    if value is not None:
        ax.axvline(value, color=PURPLE, ls="-.", label="your guess")
        ax.legend(frameon=False)
    return ax
