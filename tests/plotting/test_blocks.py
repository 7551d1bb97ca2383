"""Blocks and holes: what is drawn adds up to what the allocator has reserved."""

from __future__ import annotations

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
import pytest

from labutils import plotting
from labutils.memory.history import layout
from labutils.memory.ledger import MIB
from labutils.prediction.allocator import CachingAllocator
from labutils.prediction.blocks import DEFAULT, EXPANDABLE

TRACE = [
    {"action": "segment_alloc", "addr": 1000, "size": 20},
    {"action": "alloc", "addr": 1000, "size": 5},
    {"action": "segment_alloc", "addr": 100, "size": 10},
    {"action": "alloc", "addr": 103, "size": 4},
    {"action": "free_requested", "addr": 1000, "size": 5},
    {"action": "free_completed", "addr": 1000, "size": 5},
    {"action": "free_completed", "addr": 7, "size": 5},  # from before the recording
]


@pytest.mark.parametrize("settings", [DEFAULT, EXPANDABLE], ids=["fixed", "expandable"])
def test_segments_hold_all_reserved_bytes_and_the_used_ones(settings):
    cache = CachingAllocator(settings=settings)
    blocks = [cache.allocate(3 * MIB) for _ in range(30)]
    for block in blocks[::2]:
        cache.free(block)
    cache.allocate(100)
    segments = cache.segments()
    sizes = [size for segment in segments for size, _ in segment]
    used = [size for segment in segments for size, is_used in segment if is_used]
    assert sum(sizes) == cache.reserved
    assert sum(used) == cache.allocated
    assert len(segments) == (2 if settings.expandable_segments else 6)


def test_blocks_are_drawn_in_the_frames_of_their_segments():
    ax = plotting.blocks({"before": [[(MIB, True), (MIB, False)]], "after": [[(2 * MIB, False)]]})
    frames = [patch for patch in ax.patches if not patch.get_fill()]
    assert [frame.get_width() for frame in frames] == [2, 2]
    assert [text.get_text() for text in ax.texts] == [" 2", " 2"]
    plt.close("all")


def test_a_block_lies_in_its_segment_from_its_allocation_to_its_end():
    boxes, segments = layout(TRACE, lambda event: f"{event['size']} bytes")
    assert segments == [(0, 7, 0, 20), (2, 7, 20, 10)]
    assert boxes == {"5 bytes": [(1, 5, 0, 5)], "4 bytes": [(3, 7, 23, 4)]}


def test_a_history_is_drawn_with_a_name_for_each_who_asked():
    ax = plotting.block_history(TRACE, lambda event: f"{event['size']} bytes")
    labels = [text.get_text() for text in ax.get_legend().get_texts()]
    assert labels == ["reserved and free", "5 bytes", "4 bytes"]
    plt.close("all")
