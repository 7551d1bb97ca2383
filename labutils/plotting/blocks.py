"""Segments of an allocator and the blocks in them: at some instants, or over a history."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes

from labutils.memory.ledger import MIB
from labutils.memory.snapshot import Event
from labutils.plotting.style import INK, Look, color_of, key, new_axis, upright_unit

IN_USE = color_of("gradients")
HOLE: Look = {"color": color_of("holes"), "hatch": "////"}
Box = list[int]  # [first event, last event, place in bytes, bytes]
Segment = Sequence[tuple[int, bool]]  # its blocks: (bytes, whether a tensor lives there)


def blocks(instants: Mapping[str, Sequence[Segment]], ax: Axes | None = None) -> Axes:
    """Draw {label: segments}, a row each: framed segments, the blocks in use, and the holes."""
    ax = new_axis(ax, height=0.45 * len(instants) + 1.4, grid="")
    for row, segments in enumerate(instants.values()):
        left = 0.0
        for segment in segments:
            begin = left
            for n_bytes, is_used in segment:
                look: Look = {"color": IN_USE} if is_used else HOLE
                ax.barh(row, n_bytes / MIB, 0.7, left, edgecolor="white", **look)
                left += n_bytes / MIB
            ax.barh(row, left - begin, 0.7, begin, fill=False, edgecolor=INK, lw=1.2)
        ax.text(left, row, f" {left:,.0f}", va="center")
    ax.set_yticks(range(len(instants)), list(instants), color=INK)
    ax.invert_yaxis()
    ax.margins(x=0.06)
    ax.set_xlabel("MiB reserved; each frame is a segment, filled: in use", loc="left")
    return ax


def block_history(
    trace: Sequence[Event], asked_by: Callable[[Event], str], ax: Axes | None = None
) -> Axes:
    """Draw every block of a history: its life from left to right, its place upwards."""
    boxes, segments = layout(trace, asked_by)
    ax = new_axis(ax, height=4.6, grid="")
    names = ["reserved and free", *boxes]
    colors = [color_of("holes"), *(color_of(who, i) for i, who in enumerate(boxes))]
    line_width = min(1, 20 / len(segments))  # many lines would hide what they divide
    for drawn, color in zip((segments, *boxes.values()), colors, strict=True):
        begins, ends, places, sizes = np.array(drawn).T
        look: Look = {"color": color, "linewidth": 0, "align": "edge"}  # or all would be edges
        ax.bar(begins, sizes / MIB, ends - begins, places / MIB, **look)
    begins, ends, places, _ = np.array(segments)[1:].T
    ax.hlines(places / MIB, begins, ends, colors="white", lw=line_width)
    ax.set_xlabel("events of the allocator, in order (not time)", loc="left")
    upright_unit(ax, "place, MiB reserved")
    ax.margins(0)
    key(ax, names, colors, n_columns=3)
    return ax


def layout(
    trace: Sequence[Event], asked_by: Callable[[Event], str]
) -> tuple[dict[str, list[Box]], list[Box]]:
    """Return ({who asked: boxes of its blocks}, boxes of the segments) of an allocator's history.

    Segments are stacked in the order of their birth, so that a place is a number of reserved bytes.
    One that goes back to the driver is drawn to the end. Blocks in segments from before the
    recording are left out.
    """
    segments: dict[int, Box] = {}  # by address
    living: dict[int, Box] = {}  # by address
    boxes: dict[str, list[Box]] = defaultdict(list)
    reserved = 0
    for i, event in enumerate(trace):
        address, n_bytes = event["addr"], event["size"]
        if event["action"] == "segment_alloc":
            segments[address] = [i, len(trace), reserved, n_bytes]
            reserved += n_bytes
        elif event["action"] == "alloc":
            segment = max((start for start in segments if start <= address), default=None)
            if segment is None or address >= segment + segments[segment][3]:
                continue  # in a segment from before the recording
            place = segments[segment][2] + address - segment
            living[address] = [i, len(trace), place, n_bytes]
            boxes[asked_by(event)].append(living[address])
        elif event["action"] == "free_completed" and address in living:
            living.pop(address)[1] = i
    return dict(boxes), list(segments.values())
