"""Where each block of an allocator's history lay, from when to when, and who asked for it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Event = Mapping[str, Any]  # of `device_traces` in `torch.cuda.memory._dump_snapshot`
Box = tuple[int, int, int, int]  # (first event, last event, place in bytes, bytes)


def layout(
    trace: Sequence[Event], asked_by: Callable[[Event], str]
) -> tuple[dict[str, list[Box]], list[Box]]:
    """Return ({who asked: boxes of its blocks}, boxes of the segments).

    Segments are stacked in the order of their birth, so that a place is a number of reserved bytes.
    A segment that goes back to the driver, and a block from before the recording, are left out.
    """
    segments: dict[int, Box] = {}  # by address
    living: dict[int, int] = {}  # address: the event that allocated it
    boxes: dict[str, list[Box]] = defaultdict(list)
    reserved = 0

    def close(address: int, end: int) -> None:
        begin = living.pop(address)
        segment = max(start for start in segments if start <= address)
        place = segments[segment][2] + address - segment
        boxes[asked_by(trace[begin])].append((begin, end, place, trace[begin]["size"]))

    for i, event in enumerate(trace):
        address = event["addr"]
        if event["action"] == "segment_alloc":
            segments[address] = (i, len(trace), reserved, event["size"])
            reserved += event["size"]
        elif event["action"] == "alloc":
            living[address] = i
        elif event["action"] == "free_completed" and address in living:
            close(address, i)
    for address in list(living):
        close(address, len(trace))
    return dict(boxes), list(segments.values())
