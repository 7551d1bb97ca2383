"""Blocks, pools and settings of torch's CUDA caching allocator: what its rules are about."""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass
from typing import NamedTuple

from labutils.memory.ledger import MIB

SMALLEST_BLOCK = 512  # kMinBlockSize: every request is rounded up to a multiple of it
SMALL_REQUEST = MIB  # kSmallSize: requests up to this size share the small pool
SMALL_SEGMENT = 2 * MIB  # kSmallBuffer: what the small pool asks the driver for
LARGE_SEGMENT = 20 * MIB  # large_segment_size: what requests of 1 to 10 MiB are cut from
LARGE_REQUEST = 10 * MIB  # kMinLargeAlloc: from here on a request gets a segment of its own,
ROUND_LARGE = 2 * MIB  # kRoundLarge: rounded up to a multiple of this
ADDRESSES = LARGE_SEGMENT * 2**24  # that an expandable segment can grow into: they cost nothing


class OutOfMemory(Exception):
    """The driver has no more. `asked` bytes were requested; the segment for them has `segment`."""

    def __init__(self, asked: int, segment: int) -> None:
        super().__init__(f"asked for {asked} bytes, in a segment of {segment}")
        self.asked, self.segment = asked, segment


class Settings(NamedTuple):
    """What PYTORCH_ALLOC_CONF says, as far as it changes which requests fit; torch's defaults."""

    expandable_segments: bool = False
    max_split_size_bytes: float = math.inf
    garbage_collection_threshold: float = 0.0  # of the cap; 0 is off

    @classmethod
    def parse(cls, text: str) -> Settings:
        """Read a value of PYTORCH_ALLOC_CONF, such as
        "expandable_segments:True,max_split_size_mb:128".
        """
        given = dict(part.split(":", 1) for part in text.split(",") if ":" in part)
        return cls(
            given.get("expandable_segments", "False").strip() == "True",
            float(given.get("max_split_size_mb", math.inf)) * MIB,
            float(given.get("garbage_collection_threshold", 0)),
        )


DEFAULT, EXPANDABLE = Settings(), Settings(expandable_segments=True)


@dataclass(eq=False, slots=True)
class Block:
    """A piece of a segment; `previous` and `next` are its neighbours in the same segment."""

    address: int
    size: int
    pool: Pool
    used: bool = False
    mapped: bool = True  # of an expandable segment: is there memory behind these addresses?
    previous: Block | None = None
    next: Block | None = None
    born: int = 0  # the pool's clock when this block was cached; only garbage collection asks


class Pool:
    """The free blocks of one kind, smallest first, of equal ones the lowest address first."""

    def __init__(self, segment_bytes: int) -> None:
        self.segment_bytes = segment_bytes
        self.free: list[tuple[int, int, Block]] = []
        self.unmapped: list[tuple[int, Block]] = []  # of expandable segments, lowest address first
        self.clock = 0

    def insert(self, block: Block) -> None:
        bisect.insort(self.free, (block.size, block.address, block))

    def remove(self, block: Block) -> None:
        del self.free[bisect.bisect_left(self.free, (block.size, block.address))]


def rounded(n_bytes: int) -> int:
    """Return the size of the block that a request is for. (round_size)"""
    return max(SMALLEST_BLOCK, -(-n_bytes // SMALLEST_BLOCK) * SMALLEST_BLOCK)


def segment_bytes(size: int) -> int:
    """Return what the driver is asked for where no free block is large enough.

    (get_allocation_size)
    """
    if size <= SMALL_REQUEST:
        return SMALL_SEGMENT
    if size < LARGE_REQUEST:
        return LARGE_SEGMENT
    return -(-size // ROUND_LARGE) * ROUND_LARGE


def merge(block: Block, neighbour: Block) -> None:
    """Add a neighbour to a block. (trymerge_blocks)"""
    if neighbour is block.previous:
        block.address = neighbour.address
        block.previous = neighbour.previous
        if block.previous:
            block.previous.next = block
    else:
        block.next = neighbour.next
        if block.next:
            block.next.previous = block
    block.size += neighbour.size


def could_grow_to(block: Block) -> int:
    return block.size + (block.next.size if block.next and not block.next.mapped else 0)


def with_room(unmapped: Block, size: int) -> Block | None:
    """Return where `size` free or unmapped bytes follow each other, at or before `unmapped`.

    (find_expandable_block)
    """
    first = unmapped
    if unmapped.previous and not unmapped.previous.used:
        first = unmapped.previous
    room, block = 0, first
    while block and not block.used and room < size:
        room += block.size
        block = block.next
    return first if room >= size else None
