"""Numbers of any kind: values on a log axis, curves, bands, and a table in colours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, NullFormatter

from labutils.plotting.style import (
    COLORS,
    INK,
    MARKERS,
    MUTED,
    Look,
    look_of,
    name_lines,
    new_axis,
    upright_unit,
)


def reconcile(
    rows: Mapping[str, Mapping[str, float | None]],
    what: str,
    ax: Axes | None = None,
    unit: str = "×",
) -> Axes:
    """Draw {row: {guess, prediction, measurement, …: value}} as points on a log axis.

    Each kind has a line of its own in a row, so that equal values stay readable. The value 1 is
    marked. None is left out.
    """
    kinds = list(dict.fromkeys(kind for values in rows.values() for kind in values))
    ax = new_axis(ax, height=(0.2 * len(kinds) + 0.2) * len(rows) + 1.2, grid="x")
    for i, kind in enumerate(kinds):
        shift = 0.8 * ((i + 0.5) / len(kinds) - 0.5)
        xs, ys = [], []
        for y, values in enumerate(rows.values()):
            if values.get(kind) is not None:
                xs.append(float(values[kind]))
                ys.append(y + shift)
        for x, y in zip(xs, ys, strict=True):
            text = f"{x:,.0f}{unit}" if x >= 1000 else f"{x:.3g}{unit}"
            behind = {
                "facecolor": "white",
                "edgecolor": "none",
                "pad": 0.5,
            }  # hides the line at 1
            ax.annotate(text, (x, y), xytext=(10, -4), textcoords="offset points", bbox=behind)
        if xs:
            hollow: Look = {"mfc": "white", "mew": 1.6} if "predicted" in kind else {}
            look: Look = {"color": COLORS[i % len(COLORS)], "ms": 8, "label": kind}
            ax.plot(xs, ys, MARKERS[i % len(MARKERS)], **look, **hollow)
    ax.axvline(1, color=MUTED, lw=0.8, ls=":")
    ax.set_xscale("log")
    ax.xaxis.set_major_locator(LogLocator(subs=(1,), numticks=5))  # the labels are wide
    ax.xaxis.set_major_formatter("{x:g}")
    ax.xaxis.set_minor_formatter(NullFormatter())
    ax.set_yticks(range(len(rows)), list(rows), color=INK)
    ax.set_ylim(len(rows) - 0.5, -0.5)
    ax.margins(x=0.25)
    ax.set_xlabel(f"{what} (log scale)", loc="left")
    if kinds and rows:
        ax.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    return ax


def curves(
    lines: Mapping[str, Mapping[float, float | None]],
    xlabel: str,
    ylabel: str,
    ax: Axes | None = None,
    log2_ticks: Sequence[float] = (),
) -> Axes:
    """Draw {label: {x: y}} as lines with their labels at their ends.

    A y of None leaves a gap. With `log2_ticks` the x axis is logarithmic and labelled there. The
    name of a precision has its colour; a label that says "predicted" is dashed, without markers.
    """
    ax, ends = new_axis(ax), []
    for i, (label, points) in enumerate(lines.items()):
        x = np.array(list(points), dtype=float)
        y = np.array([np.nan if value is None else value for value in points.values()])
        look = look_of(label, i)
        if "predicted" in label and len(y) < 6:  # few points are points
            look |= {"marker": "o", "mfc": "white"}
        ax.plot(x, y, **look, markevery=max(1, len(y) // 12))
        if np.isfinite(y).any():
            last = np.flatnonzero(np.isfinite(y))[-1]
            ends.append((x[last], y[last], label, look["color"]))
    ax.set_xlabel(xlabel, loc="left")
    upright_unit(ax, ylabel)
    if log2_ticks:
        ax.set_xscale("log", base=2)
        ax.set_xticks(log2_ticks, [f"{tick:g}" for tick in log2_ticks])
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


def heat_map(
    values: np.ndarray,
    rows: Sequence[object],
    columns: Sequence[object],
    ax: Axes | None = None,
    fmt: str = "{:.0f}",
) -> Axes:
    """Draw a small table of numbers, shaded by value, with the values written in.

    `values` is `(len(rows), len(columns))`. A NaN leaves its field empty.
    """
    ax = new_axis(ax, 5.5, grid="")
    image = ax.imshow(values, cmap="cividis", aspect="auto")
    middle = (np.nanmin(values) + np.nanmax(values)) / 2
    for i, j in np.argwhere(~np.isnan(values)):
        value = values[i, j]
        color = INK if value > middle else "white"
        ax.text(j, i, fmt.format(value), ha="center", va="center", color=color)
    ax.set_xticks(range(len(columns)), columns)
    ax.set_yticks(range(len(rows)), rows)
    ax.figure.colorbar(image, ax=ax)
    return ax
