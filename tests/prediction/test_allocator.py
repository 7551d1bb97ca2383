"""The caching allocator's rules; tests/test_gpu.py holds them against torch's own."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from labutils.prediction.allocator import (
    DEFAULT,
    EXPANDABLE,
    MIB,
    CachingAllocator,
    OutOfMemory,
    Settings,
)


def filled(allocator: CachingAllocator, *mib: float) -> list:
    return [allocator.allocate(int(size * MIB)) for size in mib]


def freed(allocator: CachingAllocator, *mib: float) -> CachingAllocator:
    """Return the allocator with blocks of these sizes cached, each of which was used."""
    for block in filled(allocator, *mib):
        allocator.free(block)
    return allocator


@pytest.mark.parametrize(
    ("asked", "block", "segment_mib"),
    [
        (1, 512, 2),
        (512, 512, 2),
        (513, 1024, 2),
        (MIB, MIB, 2),
        (MIB + 1, MIB + 512, 20),
        (10 * MIB - 512, 10 * MIB - 512, 20),
        (10 * MIB, 10 * MIB, 10),
        (11 * MIB, 12 * MIB, 12),
    ],
)
def test_a_request_is_rounded_up_and_the_driver_asked_for_a_segment(asked, block, segment_mib):
    allocator = CachingAllocator()
    assert allocator.allocate(asked).size == block
    assert allocator.reserved == segment_mib * MIB


def test_a_rest_of_more_than_a_mib_is_split_off_in_the_large_pool_only():
    """A block of 11 MiB in a segment of 12 keeps its last MiB; of 10.5 MiB, the rest is a block of
    its own.
    """
    allocator = CachingAllocator()
    assert allocator.allocate(11 * MIB).size == 12 * MIB
    assert allocator.allocate(int(10.5 * MIB)).size == int(10.5 * MIB)
    assert allocator.allocate(1000).size == 1024  # small ones are split to 512 bytes


def test_the_smallest_free_block_that_is_large_enough_is_taken():
    allocator = CachingAllocator()
    large, _, small, _ = filled(allocator, 40, 12, 30, 12)
    for block in (large, small):
        allocator.free(block)
    reserved = allocator.reserved
    assert allocator.allocate(26 * MIB).address == small.address
    assert allocator.reserved == reserved


def test_neighbours_merge_and_holes_between_living_blocks_do_not():
    """Ten of 2 MiB fill a segment.

    Every second one freed, no hole takes 4 MiB; the others freed too, one takes 20.
    """
    allocator = CachingAllocator()
    blocks = filled(allocator, *[2] * 10)
    for block in blocks[::2]:
        allocator.free(block)
    allocator.free(allocator.allocate(4 * MIB))
    assert allocator.reserved == 40 * MIB
    for block in blocks[1::2]:
        allocator.free(block)
    allocator.allocate(19 * MIB)
    assert allocator.reserved == 40 * MIB


def test_before_it_gives_up_it_returns_whole_cached_segments():
    allocator = CachingAllocator(50 * MIB)
    small, *_ = filled(allocator, 3, 3)
    allocator.free(small)
    freed(allocator, 12, 12)
    allocator.allocate(28 * MIB)
    assert (allocator.reserved, allocator.peak_reserved) == (48 * MIB, 48 * MIB)
    assert allocator.n_retries == 1
    with pytest.raises(OutOfMemory, match=f"asked for {18 * MIB} bytes"):
        allocator.allocate(18 * MIB)


def test_expandable_segments_leave_no_hole_at_the_end_of_each_request():
    """Three of 33 MiB: segments of 34 MiB each, or one that grows in pieces of 20 MiB."""
    plain = freed(CachingAllocator(), 33, 33, 33)
    growing = freed(CachingAllocator(settings=EXPANDABLE), 33, 33, 33)
    assert (plain.reserved, growing.reserved) == (102 * MIB, 100 * MIB)
    growing.allocate(99 * MIB)  # the three are one now
    assert growing.reserved == 100 * MIB


def test_empty_cache_takes_whole_pieces_out_of_an_expandable_segment():
    allocator = CachingAllocator(settings=EXPANDABLE)
    first, _, last = filled(allocator, 50, 5, 45)
    allocator.free(first)
    allocator.empty_cache()
    assert allocator.reserved == 60 * MIB  # of 50 MiB two pieces; the third is shared
    allocator.allocate(45 * MIB)  # found room at the same addresses
    assert allocator.reserved == 100 * MIB
    allocator.free(last)
    allocator.empty_cache()
    assert allocator.reserved == 60 * MIB


def test_blocks_beyond_max_split_size_stay_whole():
    allocator = freed(CachingAllocator(settings=Settings(max_split_size_bytes=32 * MIB)), 64)
    allocator.allocate(4 * MIB)
    assert allocator.reserved == 84 * MIB  # the large block is not cut for it
    assert allocator.allocate(50 * MIB).size == 64 * MIB  # but serves whole what is nearly as large
    plain = freed(CachingAllocator(), 64)
    plain.allocate(4 * MIB)
    assert plain.reserved == 64 * MIB


def test_settings_are_read_as_torch_writes_them():
    assert Settings.parse("") == DEFAULT
    assert Settings.parse("expandable_segments:True") == EXPANDABLE
    text = "garbage_collection_threshold:0.6,max_split_size_mb:128"
    assert Settings.parse(text) == Settings(False, 128 * MIB)


@given(
    st.lists(st.tuples(st.integers(1, 60 * MIB), st.integers(0, 10**6)), max_size=60),
    st.sampled_from([DEFAULT, EXPANDABLE, Settings(max_split_size_bytes=20 * MIB)]),
    st.sampled_from([math.inf, 300 * MIB]),
)
@settings(max_examples=60, deadline=None)
def test_whatever_is_asked_for_the_books_balance(steps, how, limit):
    """Each step allocates, or frees one that lives.

    Blocks never overlap; when all is free, all goes back.
    """
    allocator, alive = CachingAllocator(limit, how), []
    for size, choice in steps:
        if alive and choice % 2:
            allocator.free(alive.pop(choice % len(alive)))
        else:
            try:
                alive.append(allocator.allocate(size))
            except OutOfMemory:
                continue
        in_use = sum(block.size for block in alive)
        assert allocator.allocated == in_use <= allocator.reserved <= limit
        ends = sorted((block.address, block.address + block.size) for block in alive)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ends))
    for block in alive:
        allocator.free(block)
    allocator.empty_cache()
    assert allocator.reserved == allocator.allocated == 0
