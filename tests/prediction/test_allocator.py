"""The caching allocator's rules; tests/test_gpu.py holds them against torch's own."""

import itertools
import math

import pytest

from labutils.prediction.allocator import MIB, CachingAllocator, OutOfMemory, Settings
from tests.prediction.allocator_story import story


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
        (513, 1024, 2),
        (MIB, MIB, 2),
        (MIB + 1, MIB + 512, 20),
        (10 * MIB - 512, 10 * MIB - 512, 20),
        (10 * MIB, 10 * MIB, 10),
        (int(10.5 * MIB), int(10.5 * MIB), 12),  # the rest is a block of its own
        (11 * MIB, 12 * MIB, 12),  # a rest of one MiB is not
    ],
)
def test_a_request_is_rounded_up_and_the_driver_asked_for_a_segment(asked, block, segment_mib):
    allocator = CachingAllocator()
    assert allocator.allocate(asked).size == block
    assert allocator.reserved == segment_mib * MIB


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


def test_blocks_beyond_max_split_size_stay_whole():
    allocator = freed(CachingAllocator(settings=Settings(max_split_size_bytes=32 * MIB)), 64)
    allocator.allocate(4 * MIB)
    assert allocator.reserved == 84 * MIB  # the large block is not cut for it
    assert allocator.allocate(50 * MIB).size == 64 * MIB  # but serves whole what is nearly as large
    plain = freed(CachingAllocator(), 64)
    plain.allocate(4 * MIB)
    assert plain.reserved == 64 * MIB


def test_settings_are_read_as_torch_writes_them():
    assert Settings.parse("") == Settings()
    assert Settings.parse("expandable_segments:True") == Settings(True)
    text = "garbage_collection_threshold:0.6,max_split_size_mb:128"
    assert Settings.parse(text) == Settings(False, 128 * MIB)


@pytest.mark.parametrize("limit", [math.inf, 300 * MIB])
@pytest.mark.parametrize(
    "how", [Settings(), Settings(True), Settings(max_split_size_bytes=20 * MIB)]
)
def test_whatever_is_asked_for_the_books_balance(how, limit):
    """Blocks never overlap; when all is free, all goes back."""
    for seed in range(20):
        allocator = CachingAllocator(limit, how)
        for _, alive in story(seed, allocator):
            in_use = sum(block.size for block in alive.values())
            assert allocator.allocated == in_use <= allocator.reserved <= limit
            blocks = sorted(alive.values(), key=lambda block: block.address)
            for block, following in itertools.pairwise(blocks):
                assert block.address + block.size <= following.address
        for block in alive.values():
            allocator.free(block)
        allocator.empty_cache()
        assert allocator.reserved == allocator.allocated == 0
