"""The rules of torch's allocator for the exhibit's script, and the story that notebook 04 tells."""

from __future__ import annotations

from labutils.memory.ledger import MIB
from labutils.prediction import allocator
from labutils.prediction.allocator import DEFAULT, EXPANDABLE, CachingAllocator

RULES = {  # in bytes
    "smallest_block": allocator.SMALLEST_BLOCK,
    "small_request": allocator.SMALL_REQUEST,
    "small_segment": allocator.SMALL_SEGMENT,
    "large_segment": allocator.LARGE_SEGMENT,
    "large_request": allocator.LARGE_REQUEST,
    "round_large": allocator.ROUND_LARGE,
    "addresses": allocator.ADDRESSES,
}
EMPTY_CACHE = "empty_cache"
Story = list[tuple[str, list[int], list[int]]]


def story() -> Story:
    """Return section 1 of notebook 04: (words, tensors that go, MiB of new tensors) of each event.

    A tensor is counted from 0, in the order in which they were made.
    """
    thirty = 30
    return [
        ("30 tensors of 3 MiB", [], thirty * [3]),
        ("every second one deleted", list(range(0, thirty, 2)), []),
        ("one of 20 MiB", [], [20]),
        (EMPTY_CACHE, [], []),
        ("20 deleted, one of 50", [thirty], [50]),
    ]


def told(events: Story) -> dict[str, list[float]]:
    """Return {line: MiB after each event}: allocated, and reserved in both kinds of segments."""
    lines: dict[str, list[float]] = {}
    for settings in (DEFAULT, EXPANDABLE):
        cache, tensors = CachingAllocator(settings=settings), []
        kind = "expandable" if settings.expandable_segments else "fixed"
        allocated = lines["allocated"] = []
        reserved = lines[f"reserved, {kind}"] = []
        for words, gone, sizes in events:
            for number in gone:
                cache.free(tensors[number])
            for size in sizes:
                tensors.append(cache.allocate(size * MIB))
            if words == EMPTY_CACHE:
                cache.empty_cache()
            allocated.append(cache.allocated / MIB)
            reserved.append(cache.reserved / MIB)
    return lines
