"""The rules of torch's CUDA caching allocator, on paper: which requests fit, and what the card must
have for them.

`CachingAllocator` asks an imagined driver for *segments*, cuts *blocks* out of them, and keeps
freed blocks for later requests, as c10/cuda/CUDACachingAllocator.cpp does (torch 2.13; each rule
names its function there). Bytes depend on the order of requests alone, so nothing has to be
computed and no GPU is needed. One stream, no CUDA graphs, no garbage collection. Before torch 2.13
one rule differs: of equal free blocks the one with the lowest address was taken, which the driver
chooses, and not the one in the segment that was made first (pytorch/pytorch#183591).
"""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass, field
from itertools import islice
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
    """The driver has no more."""


class Settings(NamedTuple):
    """What PYTORCH_ALLOC_CONF says, as far as it changes which requests fit; torch's defaults."""

    expandable_segments: bool = False
    max_split_size_bytes: float = math.inf

    @classmethod
    def parse(cls, text: str) -> Settings:
        """Read a value of PYTORCH_ALLOC_CONF, such as
        "expandable_segments:True,max_split_size_mb:128".
        """
        given = dict(part.split(":", 1) for part in text.split(",") if ":" in part)
        return cls(
            given.get("expandable_segments", "False").strip() == "True",
            float(given.get("max_split_size_mb", math.inf)) * MIB,
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

    def split(self, size: int) -> Block:
        """Keep `size` bytes and return the rest as a block of its own."""
        rest = Block(self.address + size, self.size - size, self.pool, mapped=self.mapped)
        rest.previous, rest.next = self, self.next
        if self.next:
            self.next.previous = rest
        self.next, self.size = rest, size
        return rest

    def merge(self, neighbour: Block) -> None:
        """Take in a neighbour. (try_merge_blocks)"""
        if neighbour is self.previous:
            self.address, self.previous = neighbour.address, neighbour.previous
            if self.previous:
                self.previous.next = self
        else:
            self.next = neighbour.next
            if self.next:
                self.next.previous = self
        self.size += neighbour.size

    @property
    def could_grow_to(self) -> int:
        """Its bytes, with those of the unmapped block behind it."""
        return self.size + (self.next.size if self.next and not self.next.mapped else 0)


@dataclass
class Pool:
    """The blocks of one kind that are not used.

    `free` are the mapped ones, smallest first, of equal ones the lowest address first; `unmapped`
    those without memory behind them, lowest address first.
    """

    segment_bytes: int
    free: list[tuple[int, int, Block]] = field(default_factory=list)
    unmapped: list[tuple[int, Block]] = field(default_factory=list)

    # No two blocks have one address, so sorting never compares the blocks themselves.
    def _place(self, block: Block) -> tuple[list, tuple]:
        if block.mapped:
            return self.free, (block.size, block.address, block)
        return self.unmapped, (block.address, block)

    def insert(self, block: Block) -> None:
        """Keep a block, merged with unused neighbours of its kind. (free_block)"""
        for neighbour in (block.previous, block.next):
            if neighbour and not neighbour.used and neighbour.mapped == block.mapped:
                self.remove(neighbour)
                block.merge(neighbour)
        bisect.insort(*self._place(block))

    def remove(self, block: Block) -> None:
        blocks, entry = self._place(block)
        del blocks[bisect.bisect_left(blocks, entry)]


def up(n_bytes: int, unit: int) -> int:
    """Return bytes rounded up to whole units."""
    return -(-n_bytes // unit) * unit


def rounded(n_bytes: int) -> int:
    """Return the size of the block that a request is for. (round_size)"""
    return max(SMALLEST_BLOCK, up(n_bytes, SMALLEST_BLOCK))


def segment_bytes(size: int) -> int:
    """Return what the driver is asked for where no free block is large enough.

    (get_allocation_size)
    """
    if size <= SMALL_REQUEST:
        return SMALL_SEGMENT
    return LARGE_SEGMENT if size < LARGE_REQUEST else up(size, ROUND_LARGE)


class CachingAllocator:
    """Meets requests. `allocated`, `reserved` and their peaks are bytes.

    `limit_bytes` is what the driver can give.
    """

    def __init__(self, limit_bytes: float = math.inf, settings: Settings = DEFAULT) -> None:
        self.limit_bytes, self.settings = limit_bytes, settings
        self.small, self.large = Pool(SMALL_SEGMENT), Pool(LARGE_SEGMENT)
        self.allocated = self.reserved = self.peak_allocated = self.peak_reserved = 0
        self.n_retries = 0  # how often all cached segments went back before a request could be met
        self._next_address = 0
        self._used: set[Block] = set()

    def allocate(self, n_bytes: int) -> Block:
        """Return a block of at least `n_bytes`.

        Raises OutOfMemory. (DeviceCachingAllocator::malloc)
        """
        size = rounded(n_bytes)
        pool = self.small if size <= SMALL_REQUEST else self.large
        block = self._find(pool, size) or self._new_block(pool, size)
        if not block:
            self.n_retries += 1
            self.empty_cache()
            block = self._new_block(pool, size)
        if not block:
            raise OutOfMemory(f"asked for {size} bytes, in a segment of {segment_bytes(size)}")
        block.used = True
        if self._should_split(block, size):
            pool.insert(block.split(size))
        self._used.add(block)
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return block

    def free(self, block: Block) -> None:
        """Keep a block for later; nothing goes back to the driver. (free_block)"""
        self.allocated -= block.size
        block.used = False
        self._used.remove(block)
        block.pool.insert(block)

    def empty_cache(self) -> None:
        """Give memory in which nothing is used back to the driver. (release_cached_blocks)"""
        for pool in (self.small, self.large):
            for _, _, block in list(pool.free):  # a copy: the loop takes blocks out
                if self.settings.expandable_segments:
                    self._unmap(block)
                elif not block.previous and not block.next:  # alone: the segment is free as a whole
                    pool.remove(block)
                    self.reserved -= block.size

    def segments(self) -> list[list[tuple[int, bool]]]:
        """Return the mapped blocks of each segment by address: (bytes, whether it is in use)."""
        free = [block for pool in (self.small, self.large) for *_, block in pool.free]
        segments: list[list[tuple[int, bool]]] = []
        for block in sorted([*self._used, *free], key=lambda block: block.address):
            if block.previous is None or not block.previous.mapped:
                segments.append([])
            segments[-1].append((block.size, block.used))
        return segments

    def _find(self, pool: Pool, size: int) -> Block | None:
        """Return the smallest free block that is large enough, taken from its pool.

        (get_free_block)
        """
        at = bisect.bisect_left(pool.free, (size,))
        if at == len(pool.free):
            return None
        block = pool.free[at][2]
        if self.settings.expandable_segments:  # of those that can grow, the one that can grow least
            for _, _, larger in islice(pool.free, at + 1, None):
                if larger.could_grow_to >= block.could_grow_to:
                    break
                block = larger
        # longer blocks are never split, so small requests avoid them
        longest = self.settings.max_split_size_bytes
        at_most = longest - 1 if size < longest else size + LARGE_SEGMENT - 1
        if block.size > at_most:
            return None
        pool.remove(block)
        return block

    def _should_split(self, block: Block, size: int) -> bool:
        """Whether what remains of a block is worth keeping apart. (should_split)"""
        remaining = block.size - size
        if block.pool is self.small or self.settings.expandable_segments:
            return remaining >= SMALLEST_BLOCK
        return remaining > SMALL_REQUEST and size < self.settings.max_split_size_bytes

    def _new_block(self, pool: Pool, size: int) -> Block | None:
        """Return a block with new memory behind it; None if the driver has no more.

        (alloc_block)
        """
        if self.settings.expandable_segments:
            return self._grow(pool, size)
        segment = segment_bytes(size)
        return self._at_new_addresses(pool, segment) if self._reserve(segment) else None

    def _at_new_addresses(self, pool: Pool, size: int, mapped: bool = True) -> Block:
        block = Block(self._next_address, size, pool, mapped=mapped)
        self._next_address += size
        return block

    def _reserve(self, n_bytes: int) -> bool:
        if self.reserved + n_bytes > self.limit_bytes:
            return False
        self.reserved += n_bytes
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        return True

    def _grow(self, pool: Pool, size: int) -> Block | None:
        """Put memory behind more addresses of the expandable segment.

        (try_allocate_expandable_block)
        """
        starts = (with_room(unmapped, size) for _, unmapped in pool.unmapped)
        block = next(filter(None, starts), None)
        if not block:
            block = self._at_new_addresses(pool, ADDRESSES, mapped=False)
            pool.insert(block)
        if not block.mapped:
            block = self._map(block, size)
        while block and block.size < size:
            block = self._map(block.next, size - block.size)  # merged with what is mapped before it
        if block:
            pool.remove(block)
        return block

    def _map(self, block: Block, size: int) -> Block | None:
        """Put memory behind the beginning of an unmapped block, in whole pieces. (map_block)"""
        pool = block.pool
        size = min(block.size, up(size, pool.segment_bytes))
        if not self._reserve(size):
            return None
        pool.remove(block)
        rest = block.split(size) if block.size > size else None
        block.mapped = True
        pool.insert(block)
        if rest:
            pool.insert(rest)
        return block

    def _unmap(self, block: Block) -> None:
        """Take the memory from behind the whole pieces that lie in a free block. (unmap_block)"""
        pool, piece = block.pool, block.pool.segment_bytes
        begin, end = up(block.address, piece), (block.address + block.size) // piece * piece
        if end <= begin:
            return
        pool.remove(block)
        self.reserved -= end - begin
        parts = [block]
        for cut in (begin, end):
            size = cut - parts[-1].address
            if 0 < size < parts[-1].size:
                parts.append(parts[-1].split(size))
        for part in parts:
            part.mapped = not begin <= part.address < end
        for part in parts:
            pool.insert(part)


def with_room(unmapped: Block, size: int) -> Block | None:
    """Return where `size` free or unmapped bytes follow each other, at or before `unmapped`.

    (find_expandable_block)
    """
    before = unmapped.previous
    first = before if before and not before.used else unmapped
    room, block = 0, first
    while block and not block.used and room < size:
        room += block.size
        block = block.next
    return first if room >= size else None
