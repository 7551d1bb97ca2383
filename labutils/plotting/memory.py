"""Memory: peaks by category, one step from left to right, and a history by line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes

from labutils.memory.ledger import MIB, MemoryLedger
from labutils.memory.snapshot import Snapshot
from labutils.plotting.style import BLACK, CATEGORY_LOOKS, COLORS, OTHER_CATEGORY, new_axis

HATCHES = ("", "//", "..", "xx")


def stacked_memory(
    peaks: Mapping[str, Mapping[str, float]],
    ax: Axes | None = None,
    marks: Mapping[str, float | None] | None = None,
    xlabel: str = "bytes allocated at the peak, MiB",
) -> Axes:
    """Draw {label: {category: bytes}} as stacked bars, in MiB.

    A category without bytes is left out, and the legend names what can be seen: 1/400 of the
    longest bar. `marks` are {label: bytes} drawn as lines across the bars, for example a guess;
    None is left out. `xlabel` says of which instant the bytes are.
    """
    ax = new_axis(ax, 8, 0.45 * len(peaks) + 1.9)
    in_legend = set(marks or {})
    longest = max((sum(parts.values()) for parts in peaks.values()), default=0)
    over_marks = {"facecolor": "white", "edgecolor": "none", "pad": 1}
    for row, parts in enumerate(peaks.values()):
        left = 0.0
        for category, n_bytes in parts.items():
            if n_bytes:
                width = n_bytes / MIB
                color, hatch = CATEGORY_LOOKS.get(category, OTHER_CATEGORY)
                look = {"color": color, "hatch": hatch, "edgecolor": "white"}
                ax.barh(row, width, left=left, label=category, **look)
                left += width
            if n_bytes > longest / 400:
                in_legend.add(category)
        n_digits = 0 if left >= 100 else 1
        ax.text(left, row, f" {left:,.{n_digits}f}", va="center", bbox=over_marks, zorder=3)
    for label, n_bytes in (marks or {}).items():
        if n_bytes is not None:
            ax.axvline(n_bytes / MIB, color=BLACK, ls="--", lw=2, label=label)
    ax.set_yticks(range(len(peaks)), list(peaks))
    ax.invert_yaxis()
    ax.margins(x=0.14)
    ax.set_xlabel(xlabel)
    handles, labels = ax.get_legend_handles_labels()
    all_handles = dict(zip(labels, handles, strict=True))
    each_once = {label: all_handles[label] for label in all_handles if label in in_legend}
    ax.legend(
        each_once.values(),
        each_once,
        loc="upper center",
        bbox_to_anchor=(0.5, 0),
        borderaxespad=4.5,  # in font sizes: the same distance below a low and a high figure
        ncols=3,
        frameon=False,
    )
    return ax


def timeline(ledger: MemoryLedger, ax: Axes | None = None) -> Axes:
    """Draw what is alive in one step from left to right, stacked by category.

    Phases are named, and the peak is marked.
    """
    ax = new_axis(ax, 9, 3.4)
    points = []
    for _, segment in ledger.timeline:
        points += segment
    table = np.array(points, dtype=float)  # (points, 1 + categories)
    begin = table[0, 0]
    at = table[:, 0] - begin
    by_category = table[:, 1:].T / MIB
    _stack_categories(ax, at, ledger.categories, by_category)
    # On CUDA the peak lies between two looks at the allocator, so above what is drawn.
    top = ledger.peak_bytes / MIB
    at_peak = at[by_category.sum(axis=0).argmax()]
    ax.plot(at_peak, top, "v", color=BLACK, ms=8)
    ax.annotate(f"{top:,.2f} MiB", (at_peak, top), xytext=(6, 4), textcoords="offset points")
    for phase, segment in ledger.timeline:
        start = segment[0][0] - begin
        end = segment[-1][0] - begin
        ax.axvline(start, color=BLACK, lw=0.8, ls=":")
        if end - start > 0.03 * at[-1]:  # else its name has no room
            middle = (start + end) / 2
            ax.text(middle, 1.14 * top, phase, ha="center", va="center", fontsize="small")
    ax.set(xlim=(0, at[-1]), ylim=(0, 1.22 * top), xticks=[], ylabel="MiB allocated")
    ax.set_xlabel(f"operations of one step in order, not in time ({ledger.method})")
    ax.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    return ax


def _stack_categories(
    ax: Axes, at: np.ndarray, categories: Sequence[str], by_category: np.ndarray
) -> None:
    """Stack the categories that ever have bytes; `by_category` is (categories, points), in MiB."""
    names, rows = [], []
    for name, row in zip(categories, by_category, strict=True):
        if row.any():
            names.append(name)
            rows.append(row)
    for name, layer in zip(names, ax.stackplot(at, rows, labels=names), strict=True):
        color, hatch = CATEGORY_LOOKS[name]
        layer.set(facecolor=color, hatch=hatch, edgecolor="white", linewidth=0)


def snapshot(history: Snapshot, ax: Axes | None = None, n_lines: int = 7) -> Axes:
    """Draw a memory history from left to right, stacked by the line that allocated.

    Small lines are summed up.
    """
    ax = new_axis(ax, 10, 4.6)
    alive = history.alive() / MIB  # (events, lines)
    order = np.argsort(-alive.max(axis=0), kind="stable") if alive.size else []
    labels, rows = [], []
    for i in order[:n_lines]:
        labels.append(
            history.lines[i].lstrip("_")[:70]
        )  # matplotlib hides labels that begin with _
        rows.append(alive[:, i])
    if len(order) > n_lines:
        labels.append("all other lines")
        rows.append(alive[:, order[n_lines:]].sum(axis=1))
    for i, layer in enumerate(ax.stackplot(np.arange(len(alive)), rows, labels=labels)):
        color = COLORS[i % len(COLORS)]
        hatch = HATCHES[i % len(HATCHES)]
        layer.set(facecolor=color, hatch=hatch, edgecolor="white", linewidth=0)
    ax.set(xlim=(0, max(1, len(alive) - 1)), ylim=(0, None), ylabel="MiB allocated since the start")
    ax.set_xlabel(f"allocations and frees, in order: {history.method}")
    ax.legend(
        frameon=False,
        loc="upper center",
        bbox_to_anchor=(0.5, -0.2),
        prop={"family": "monospace", "size": "small"},
    )
    return ax
