"""Memory: peaks by category, one step from left to right, and a history by line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from numpy.lib.stride_tricks import sliding_window_view

from labutils.memory.ledger import MIB, MemoryLedger
from labutils.memory.snapshot import Snapshot
from labutils.plotting.style import (
    CATEGORIES,
    COLORS,
    INK,
    MUTED,
    OTHER,
    Look,
    color_of,
    key,
    new_axis,
    on_color,
    upright_unit,
)


def stacked_memory(
    peaks: Mapping[str, Mapping[str, float]],
    ax: Axes | None = None,
    marks: Mapping[str, float | None] | None = None,
    xlabel: str = "MiB allocated at the peak",
) -> Axes:
    """Draw {label: {category: bytes}} as stacked bars, in MiB.

    Labels "a: b" and "a: c" make a group with the headline a; a label that says "predicted" is
    hatched. Names of categories stand in one bar, that with room for most of them; a key has the
    others that can be seen: 1/400 of the longest bar. `marks` are {label: bytes} drawn as lines
    across the bars, for example a guess; None is left out. `xlabel` says of which instant the
    bytes are.
    """
    ax = new_axis(ax, height=0.3 * len(peaks) + 1.5, grid="")
    longest = max((sum(parts.values()) for parts in peaks.values()), default=0)
    at_marks = [n_bytes / MIB for n_bytes in (marks or {}).values() if n_bytes is not None]
    seen: list[dict[str, Rectangle]] = []
    place, ticks, group = 0.0, [], ""
    for label, parts in peaks.items():
        head, _, name = label.rpartition(": ")
        if head != group:
            place += 1.1
            ax.annotate(head, (0, place), (0, -3), textcoords="offset points", weight="bold")
        left, group, place = 0.0, head, place + 1
        seen.append({})
        for category, n_bytes in parts.items():
            if n_bytes:
                look: Look = {"color": color_of(category), "edgecolor": "white", "linewidth": 0.8}
                look["hatch"] = "////" if "predicted" in label else ""
                [bar] = ax.barh(place, n_bytes / MIB, 0.82, left, **look)
                left += n_bytes / MIB
                if n_bytes > longest / 400:
                    seen[-1][category] = bar
        n_digits = 0 if left >= 100 else 1
        total: Look = {"textcoords": "offset points", "va": "center", "zorder": 3}
        beyond = [at for at in at_marks if 0 <= at - left < 0.07 * longest / MIB]
        end = max([left, *beyond]), place  # a mark is crossed by no number
        ax.annotate(f"{left:,.{n_digits}f}", end, (5, 0), **total)
        ticks.append((place, name))
    for label, n_bytes in (marks or {}).items():
        if n_bytes is not None:
            ax.axvline(n_bytes / MIB, color=INK, ls="--", lw=1.2)
            text: Look = {"textcoords": "offset points", "annotation_clip": False, "color": INK}
            ax.annotate(label, (n_bytes / MIB, 0.35), (3, 2), **text)
    ax.set_yticks([at for at, _ in ticks], [name for _, name in ticks], color=INK)
    ax.set_ylim(place + 0.6, 0.35)
    ax.margins(x=0.1)
    ax.set_xlabel(xlabel, loc="left")
    without = _without_room(ax, seen, at_marks)
    if names := sorted(without, key=[*CATEGORIES, *without].index):
        key(ax, names, list(map(color_of, names)))
    return ax


def _without_room(
    ax: Axes, rows: Sequence[Mapping[str, Rectangle]], marks: Sequence[float]
) -> list[str]:
    """Write names into the pieces of one bar, beside `marks` in MiB; return the other names."""
    look: Look = {"ha": "center", "va": "center", "size": 7.5}
    texts = {
        name: ax.text(0, 0, name, color=on_color(color_of(name)), **look)
        for name in dict.fromkeys(name for row in rows for name in row)
    }
    ax.figure.draw_without_rendering()  # only now the widths are known
    pixels = np.ptp(ax.transData.transform([(0, 0), (1, 0)])[:, 0])

    def places(row: Mapping[str, Rectangle]) -> dict[str, tuple[float, float]]:
        """Return where in a bar the names stand that have room in it."""
        found = {}
        for name, bar in row.items():
            ends = bar.get_x(), bar.get_x() + bar.get_width()
            cuts = sorted([*ends, *(mark for mark in marks if ends[0] < mark < ends[1])])
            start, end = max(pairwise(cuts), key=lambda piece: piece[1] - piece[0])
            if texts[name].get_window_extent().width <= 0.94 * pixels * (end - start):
                found[name] = (start + end) / 2, bar.get_y() + bar.get_height() / 2
        return found

    best = max(map(places, rows), key=len, default={})
    for name, text in texts.items():
        if name in best:
            text.set_position(best[name])
        else:
            text.remove()
    return [name for name in texts if name not in best]


def timeline(ledger: MemoryLedger, ax: Axes | None = None) -> Axes:
    """Draw what is alive in one step from left to right, stacked by category.

    Phases are named, and the peak is marked. A name stands in its area, or else in a key.
    """
    ax = new_axis(ax, height=3.6, grid="")
    points = []
    for _, segment in ledger.timeline:
        points += segment
    table = np.array(points, dtype=float)  # (points, 1 + categories)
    begin = table[0, 0]
    at = table[:, 0] - begin
    by_category = table[:, 1:].T / MIB
    rows = {n: row for n, row in zip(ledger.categories, by_category, strict=True) if row.any()}
    for name, layer in zip(rows, ax.stackplot(at, list(rows.values())), strict=True):
        layer.set(facecolor=color_of(name), linewidth=0)  # an edge would hide a short peak
    # On CUDA the peak lies between two looks at the allocator, so above what is drawn.
    top = ledger.peak_bytes / MIB
    at_peak = at[by_category.sum(axis=0).argmax()]
    ax.plot(at_peak, top, "v", color=INK, ms=7)
    look: Look = {"textcoords": "offset points", "weight": "bold"}
    ax.annotate(f"{top:,.1f} MiB", (at_peak, top), (6, 4), **look)
    for phase, segment in ledger.timeline:
        start = segment[0][0] - begin
        end = segment[-1][0] - begin
        ax.axvline(start, color=MUTED, lw=0.8, ls=(0, (2, 2)))
        over: Look = {"transform": ax.get_xaxis_transform(), "ha": "center", "color": MUTED}
        height = 0.92 if end - start > 0.06 * at[-1] else 0.97  # above its neighbours' names
        over["bbox"] = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}
        ax.text((start + end) / 2, height, phase, **over)
    # room above the peak for its number and for the phases' names
    ax.set(xlim=(0, at[-1]), ylim=(0, 1.28 * top), xticks=[])
    upright_unit(ax, "MiB allocated")
    ax.set_xlabel(f"operations of one step in order, not in time ({ledger.method})", loc="left")
    starts = [segment[0][0] - begin for _, segment in ledger.timeline]
    if names := _without_area(ax, at, rows, starts):
        key(ax, names, list(map(color_of, names)))
    return ax


def _without_area(
    ax: Axes, at: np.ndarray, rows: Mapping[str, np.ndarray], lines: Sequence[float]
) -> list[str]:
    """Write each name into its area, where that is high all along it and no upright line crosses;
    return the other names.
    """
    grid = np.linspace(0, at[-1], 400)
    crossed = np.searchsorted(grid, lines).clip(max=399)
    below, without = np.zeros(400), []
    for name, row in rows.items():
        above = below + np.interp(grid, at, row)
        n = 4 * len(name) + 8  # so many of the 400 places has a name in a figure 7 inches wide
        floor = sliding_window_view(below, n).max(axis=1)
        open_above = above.copy()
        open_above[crossed] = 0
        room = sliding_window_view(open_above, n).min(axis=1) - floor
        i = room.argmax()
        if room[i] > 0.055 * ax.get_ylim()[1]:
            look: Look = {"ha": "center", "va": "center", "size": 7.5}
            place = grid[i + n // 2], floor[i] + room[i] / 2
            ax.text(*place, name, color=on_color(color_of(name)), **look)
        else:
            without.append(name)
        below = above
    return without


def snapshot(history: Snapshot, ax: Axes | None = None, n_lines: int = 5) -> Axes:
    """Draw a memory history from left to right, stacked by the line that allocated.

    Small lines are summed up.
    """
    ax = new_axis(ax, height=4.6, grid="")
    alive = history.alive() / MIB  # (events, lines)
    order = list(np.argsort(-alive.max(axis=0), kind="stable")) if alive.size else []
    names = [history.lines[i][:70] for i in order[:n_lines]]
    rows, colors = [alive[:, i] for i in order[:n_lines]], list(COLORS[: len(names)])
    if len(order) > n_lines:
        names.append("all other lines")
        rows.append(alive[:, order[n_lines:]].sum(axis=1))
        colors.append(OTHER)
    for color, layer in zip(colors, ax.stackplot(np.arange(len(alive)), rows), strict=True):
        layer.set(facecolor=color, edgecolor="white", linewidth=0.3)
    # at least 1: a history of one event would give an axis from 0 to 0, an empty one from 0 to -1
    ax.set(xlim=(0, max(1, len(alive) - 1)), ylim=(0, None))
    upright_unit(ax, "MiB allocated since the start")
    ax.set_xlabel(f"allocations and frees, in order: {history.method}", loc="left")
    key(ax, names, colors, n_columns=1)
    return ax
