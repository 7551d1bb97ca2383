"""Numbers of any kind: curves and bands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes

from labutils.plotting.style import look_of, name_lines, new_axis, upright_unit


def curves(
    lines: Mapping[str, Mapping[float, float | None]],
    xlabel: str,
    ylabel: str,
    ax: Axes | None = None,
    log2_ticks: Sequence[float] = (),
) -> Axes:
    """Draw {label: {x: y}} as lines with their labels at their ends.

    A y of None leaves a gap. Of more than 12 points only the last has a marker. With `log2_ticks`
    the x axis is logarithmic and labelled there. The name of a precision has its colour; a label
    that says "predicted" is dashed, without markers.
    """
    ax, ends = new_axis(ax), []
    for i, (label, points) in enumerate(lines.items()):
        x = np.array(list(points), dtype=float)
        y = np.array([np.nan if value is None else value for value in points.values()])
        look = look_of(label, i)
        if "predicted" in label and len(y) < 6:  # few points are points
            look |= {"marker": "o", "mfc": "white"}
        ax.plot(x, y, **look, markevery=1 if len(y) <= 12 else [-1])
        if np.isfinite(y).any():
            last = np.flatnonzero(np.isfinite(y))[-1]
            ends.append((x[last], y[last], label, look["color"]))
    ax.set_xlabel(xlabel, loc="left")
    upright_unit(ax, ylabel)
    if log2_ticks:
        ax.set_xscale("log", base=2)
        ax.set_xticks(log2_ticks, [f"{tick:,g}" for tick in log2_ticks])
    name_lines(ax, ends)
    return ax


def bands(
    lines: Mapping[str, Mapping[float, Sequence[float]]],
    xlabel: str,
    ylabel: str,
    ax: Axes | None = None,
) -> Axes:
    """Draw {label: {x: values}} as lines of means, each in a band of ± the standard deviation."""
    means, spreads = {}, {}
    for label, points in lines.items():
        values = np.array(list(points.values()), dtype=float)  # (points, seeds)
        means[label] = dict(zip(points, values.mean(1), strict=True))
        spreads[label] = values.std(1, ddof=1)
    ax = curves(means, xlabel, ylabel, ax)
    for line, (label, mean) in zip(list(ax.lines), means.items(), strict=True):
        x, y, spread = list(mean), np.array(list(mean.values())), spreads[label]
        ax.fill_between(x, y - spread, y + spread, color=line.get_color(), alpha=0.15, lw=0)
    return ax
