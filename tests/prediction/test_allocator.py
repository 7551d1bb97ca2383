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
    rounded,
    segment_bytes,
)


def filled(allocator: CachingAllocator, *mib: float) -> list:
    return [allocator.allocate(int(size * MIB)) for size in mib]


@pytest.mark.parametrize(
    ("asked", "got"), [(1, 512), (512, 512), (513, 1024), (3 * MIB + 1, 3 * MIB + 512)]
)
def test_requests_are_rounded_up_to_512_bytes(asked, got):
    assert rounded(asked) == got
    assert CachingAllocator().allocate(asked).size == got


@pytest.mark.parametrize(
    ("mib", "segment"),
    [(0.001, 2), (1, 2), (1.001, 20), (9.9, 20), (10, 10), (11, 12), (20.5, 22), (147.2, 148)],
)
def test_the_driver_is_asked_for_segments(mib, segment):
    allocator = CachingAllocator()
    allocator.allocate(int(mib * MIB))
    assert allocator.reserved == segment_bytes(int(mib * MIB)) == segment * MIB


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
    assert allocator.reserved == 20 * MIB
    for block in blocks[::2]:
        allocator.free(block)
    allocator.free(allocator.allocate(4 * MIB))
    assert allocator.reserved == 40 * MIB
    for block in blocks[1::2]:
        allocator.free(block)
    allocator.allocate(19 * MIB)
    assert allocator.reserved == 40 * MIB


def test_before_it_gives_up_it_returns_what_is_cached():
    allocator = CachingAllocator(limit_bytes=50 * MIB)
    for block in filled(allocator, 12, 12, 12):
        allocator.free(block)
    allocator.allocate(44 * MIB)
    assert (allocator.reserved, allocator.peak_reserved, allocator.n_retries) == (
        44 * MIB,
        44 * MIB,
        1,
    )
    with pytest.raises(OutOfMemory) as caught:
        allocator.allocate(8 * MIB)
    assert (caught.value.asked, caught.value.segment) == (8 * MIB, 20 * MIB)


def test_empty_cache_gives_back_whole_segments_only():
    allocator = CachingAllocator()
    first, second, alone = filled(allocator, 3, 3, 30)
    for block in (first, alone):
        allocator.free(block)
    allocator.empty_cache()
    assert allocator.reserved == 20 * MIB
    allocator.free(second)
    allocator.empty_cache()
    assert allocator.reserved == allocator.allocated == 0


def test_expandable_segments_leave_no_hole_at_the_end_of_each_request():
    """Three of 33 MiB: segments of 34 MiB each, or one that grows in pieces of 20 MiB."""
    plain, growing = CachingAllocator(), CachingAllocator(settings=EXPANDABLE)
    for allocator in (plain, growing):
        blocks = filled(allocator, 33, 33, 33)
    assert (plain.reserved, growing.reserved) == (102 * MIB, 100 * MIB)
    for block in blocks:
        growing.free(block)
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
    allocator = CachingAllocator(settings=Settings(max_split_size_bytes=32 * MIB))
    allocator.free(allocator.allocate(64 * MIB))
    allocator.allocate(4 * MIB)
    assert allocator.reserved == 84 * MIB  # the large block is not cut for it
    assert allocator.allocate(50 * MIB).size == 64 * MIB  # but serves whole what is nearly as large
    plain = CachingAllocator()
    plain.free(plain.allocate(64 * MIB))
    plain.allocate(4 * MIB)
    assert plain.reserved == 64 * MIB


def test_oversize_blocks_go_back_before_everything_does():
    allocator = CachingAllocator(120 * MIB, Settings(max_split_size_bytes=32 * MIB))
    for block in filled(allocator, 40, 40, 16):
        allocator.free(block)
    allocator.allocate(76 * MIB)  # two of 40 MiB make room; the one of 16 stays
    assert allocator.reserved == 92 * MIB and allocator.n_retries == 0
    single = CachingAllocator(120 * MIB, Settings(max_split_size_bytes=32 * MIB))
    for block in filled(single, 36, 80):
        single.free(block)
    single.allocate(40 * MIB)  # 80 is too long for it, but goes: 36 alone would not do
    assert single.reserved == 76 * MIB and single.n_retries == 0


@pytest.mark.parametrize(("asked", "left"), [(76, 108), (108, 108)])
def test_oversize_blocks_go_largest_first_and_no_more_than_it_takes(asked, left):
    """40 and 36 make exactly 76; a block of just 32, the limit, is one of them too."""
    allocator = CachingAllocator(120 * MIB, Settings(max_split_size_bytes=32 * MIB))
    for block in filled(allocator, 40, 36, 32):
        allocator.free(block)
    allocator.allocate(asked * MIB)
    assert allocator.reserved == left * MIB and allocator.n_retries == 0


def test_garbage_collection_returns_the_longest_unused_first():
    allocator = CachingAllocator(
        settings=Settings(garbage_collection_threshold=0.5), cap_bytes=100 * MIB
    )
    for block in filled(allocator, 30, 40):
        allocator.free(block)
    for _ in range(9):
        allocator.free(allocator.allocate(35 * MIB))
    assert allocator.reserved == 70 * MIB
    allocator.allocate(
        46 * MIB
    )  # 70 are more than half of 100: the block of 30 goes, that of 40 was just used
    assert allocator.reserved == 86 * MIB and allocator.n_retries == 0


def test_settings_are_read_as_torch_writes_them():
    assert Settings.parse("") == DEFAULT
    assert Settings.parse("expandable_segments:True") == EXPANDABLE
    found = Settings.parse("garbage_collection_threshold:0.6,max_split_size_mb:128")
    assert found == Settings(False, 128 * MIB, 0.6)


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
        assert (
            allocator.allocated == sum(block.size for block in alive) <= allocator.reserved <= limit
        )
        ends = sorted((block.address, block.address + block.size) for block in alive)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ends))
    for block in alive:
        allocator.free(block)
    allocator.empty_cache()
    assert allocator.reserved == allocator.allocated == 0
