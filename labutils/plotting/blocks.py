"""Segments of an allocator and the blocks in them: at some instants, or over a history."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes

from labutils.memory.ledger import MIB
from labutils.memory.snapshot import Event
from labutils.plotting.style import BLACK, BLUE, CATEGORY_LOOKS, COLORS, new_axis

HOLE = CATEGORY_LOOKS["holes"]
HATCHES = ("", "//", "..", "xx", "\\\\")
Box = list[int]  # [first event, last event, place in bytes, bytes]
Segment = Sequence[tuple[int, bool]]  # its blocks: (bytes, whether a tensor lives there)


def blocks(instants: Mapping[str, Sequence[Segment]], ax: Axes | None = None) -> Axes:
    """Draw {label: segments}, a row each: framed segments, the blocks in use, and the holes."""
    ax = new_axis(ax, 10, 0.55 * len(instants) + 1.4)
    for row, segments in enumerate(instants.values()):
        left = 0.0
        for segment in segments:
            begin = left
            for n_bytes, is_used in segment:
                color, hatch = (BLUE, "") if is_used else HOLE
                label = "in use" if is_used else "reserved and free"
                look = {"color": color, "hatch": hatch, "edgecolor": "white", "label": label}
                ax.barh(row, n_bytes / MIB, 0.7, left, **look)
                left += n_bytes / MIB
            ax.barh(row, left - begin, 0.7, begin, fill=False, edgecolor=BLACK, lw=1.5)
        ax.text(left, row, f" {left:,.0f}", va="center")
    ax.set_yticks(range(len(instants)), list(instants))
    ax.invert_yaxis()
    ax.margins(x=0.06)
    ax.set_xlabel("MiB reserved; each frame is a segment")
    handles, labels = ax.get_legend_handles_labels()
    each_once = dict(zip(labels, handles, strict=True))
    ax.legend(each_once.values(), each_once, loc="center left", bbox_to_anchor=(1, 0.5))
    return ax


def block_history(
    trace: Sequence[Event], asked_by: Callable[[Event], str], ax: Axes | None = None
) -> Axes:
    """Draw every block of a history: its life from left to right, its place upwards."""
    boxes, segments = layout(trace, asked_by)
    ax = new_axis(ax, 10, 4.6)
    looks = [("reserved and free", segments, *HOLE)]
    for i, (who, its_boxes) in enumerate(boxes.items()):
        looks.append((who, its_boxes, COLORS[i], HATCHES[i]))
    for label, drawn, color, hatch in looks:
        begins, ends, places, sizes = np.array(drawn).T
        look = {"color": color, "hatch": hatch, "edgecolor": "white", "linewidth": 0}
        ax.bar(begins, sizes / MIB, ends - begins, places / MIB, align="edge", label=label, **look)
    ax.set(xlabel="events of the allocator, in order (not time)", ylabel="place, MiB reserved")
    ax.margins(0)
    ax.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    return ax


def layout(
    trace: Sequence[Event], asked_by: Callable[[Event], str]
) -> tuple[dict[str, list[Box]], list[Box]]:
    """Return ({who asked: boxes of its blocks}, boxes of the segments) of an allocator's history.

    Segments are stacked in the order of
    their birth, so that a place is a number of reserved bytes. A segment that goes back to the
    driver, and a block from before the recording, are left out.
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
            segment = max(start for start in segments if start <= address)
            place = segments[segment][2] + address - segment
            living[address] = [i, len(trace), place, n_bytes]
            boxes[asked_by(event)].append(living[address])
        elif event["action"] == "free_completed" and address in living:
            living.pop(address)[1] = i
    return dict(boxes), list(segments.values())
