"""The rules of torch's CUDA caching allocator, on paper: which requests fit, and what the card must
have for them.

`CachingAllocator` asks an imagined driver for *segments*, cuts *blocks* out of them, and keeps
freed blocks for later requests, as c10/cuda/CUDACachingAllocator.cpp does (torch 2.13; each rule
names its function there). Bytes depend on the order of requests alone, so nothing has to be
computed and no GPU is needed. One stream, no CUDA graphs.
"""

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


class CachingAllocator:
    """Meets requests. `allocated`, `reserved` and their peaks are bytes.

    `limit_bytes` is what the driver can give; `cap_bytes` is
    `torch.cuda.set_per_process_memory_fraction`'s.
    """

    def __init__(
        self,
        limit_bytes: float = math.inf,
        settings: Settings = DEFAULT,
        cap_bytes: float = math.inf,
    ) -> None:
        self.limit_bytes, self.settings, self.cap_bytes = limit_bytes, settings, cap_bytes
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
        block = self._find(pool, size) or self._ask_driver(pool, size)
        if self._should_split(block, size):
            self._split(block, size)
        block.used = True
        self._used.add(block)
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return block

    def free(self, block: Block) -> None:
        """Keep a block for later, merged with free neighbours; nothing goes back to the driver.

        (free_block)
        """
        self.allocated -= block.size
        block.used = False
        self._used.remove(block)
        for neighbour in (block.previous, block.next):
            if neighbour and not neighbour.used and neighbour.mapped:
                block.pool.remove(neighbour)
                merge(block, neighbour)
        block.born = block.pool.clock
        block.pool.insert(block)

    def empty_cache(self) -> None:
        """Give segments in which nothing is used back to the driver. (release_cached_blocks)"""
        for pool in (self.small, self.large):
            for _, _, block in list(pool.free):
                if self.settings.expandable_segments:
                    self._unmap(block)
                elif not block.previous and not block.next:
                    self._release(block)

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
        pool.clock += 1
        at = bisect.bisect_left(pool.free, (size, -1))
        if at == len(pool.free):
            return None
        if self.settings.expandable_segments:  # of those that can grow, the one that can grow least
            while at + 1 < len(pool.free) and could_grow_to(pool.free[at + 1][2]) < could_grow_to(
                pool.free[at][2]
            ):
                at += 1
        block = pool.free[at][2]
        # longer blocks are never split, so small requests avoid them
        longest = self.settings.max_split_size_bytes
        if (size < longest <= block.size) or (
            size >= longest and block.size >= size + LARGE_SEGMENT
        ):
            return None
        del pool.free[at]
        return block

    def _ask_driver(self, pool: Pool, size: int) -> Block:
        """Return a new block; where the driver has no more, first give back what is cached.

        (malloc, alloc_block)
        """
        self._collect_garbage()
        segment = segment_bytes(size)
        block = self._new_block(pool, size, segment)
        if not block and self._release_oversize(pool, size):
            block = self._new_block(pool, size, segment)
        if not block:
            self.n_retries += 1
            self.empty_cache()
            block = self._new_block(pool, size, segment)
        if not block:
            raise OutOfMemory(size, segment)
        return block

    def _new_block(self, pool: Pool, size: int, segment: int) -> Block | None:
        # asked once: a segment that grows may exceed the cap by a piece
        if self.reserved + segment > self.cap_bytes:
            return None
        if self.settings.expandable_segments:
            return self._grow(pool, size)
        if not self._reserve(segment):
            return None
        block = Block(self._next_address, segment, pool)
        self._next_address += segment
        return block

    def _reserve(self, n_bytes: int) -> bool:
        if self.reserved + n_bytes > self.limit_bytes:
            return False
        self.reserved += n_bytes
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        return True

    def _should_split(self, block: Block, size: int) -> bool:
        """Whether what remains of a block is worth keeping apart. (should_split)"""
        remaining = block.size - size
        if block.pool is self.small or self.settings.expandable_segments:
            return remaining >= SMALLEST_BLOCK
        return remaining > SMALL_REQUEST and size < self.settings.max_split_size_bytes

    def _split(self, block: Block, size: int) -> None:
        rest = Block(
            block.address + size, block.size - size, block.pool, previous=block, next=block.next
        )
        rest.born = block.pool.clock
        if block.next:
            block.next.previous = rest
        block.next, block.size = rest, size
        block.pool.insert(rest)

    def _release(self, block: Block) -> None:
        block.pool.remove(block)
        self.reserved -= block.size

    def _release_oversize(self, pool: Pool, size: int) -> bool:
        """Give back a block beyond `max_split_size`, or as many as it takes.

        (release_available_cached_blocks)
        """
        longest, found = self.settings.max_split_size_bytes, 0
        if longest == math.inf:
            return False
        size = max(size, longest)
        at = bisect.bisect_left(pool.free, (size, -1))
        if at < len(pool.free):
            self._release(pool.free[at][2])
            return True
        for length, _, block in reversed(pool.free[:]):  # none is large enough: the largest first
            if found >= size or length < longest:
                break
            self._release(block)
            found += length
        return found >= size

    def _collect_garbage(self) -> None:
        """Give back unsplit large blocks, those unused longest first.

        (garbage_collect_cached_blocks)
        """
        if not self.settings.garbage_collection_threshold or self.cap_bytes == math.inf:
            return
        threshold = self.settings.garbage_collection_threshold * self.cap_bytes
        goal = threshold - self.reserved
        whole = [block for _, _, block in self.large.free if not block.previous and not block.next]
        while goal < 0 and whole:
            ages = {block.address: self.large.clock - block.born for block in whole}
            mean = sum(ages.values()) / len(ages)
            for block in [block for block in whole if ages[block.address] >= mean]:
                self._release(block)
                whole.remove(block)
                goal += block.size

    def _grow(self, pool: Pool, size: int) -> Block | None:
        """Put memory behind more addresses of the expandable segment.

        (try_allocate_expandable_block)
        """
        block = next((found for _, u in pool.unmapped if (found := with_room(u, size))), None)
        if not block:
            block = Block(self._next_address, ADDRESSES, pool, mapped=False)
            self._next_address += ADDRESSES
            bisect.insort(pool.unmapped, (block.address, block))
        if not block.mapped:
            block = self._map(block, size)
        while block and block.size < size:
            block = self._map(block.next, size - block.size)
        if block:
            pool.remove(block)
        return block

    def _map(self, block: Block, size: int) -> Block | None:
        """Map the beginning of an unmapped block, in whole pieces, and merge it with free
        neighbours. (map_block)
        """
        pool = block.pool
        size = min(block.size, -(-size // pool.segment_bytes) * pool.segment_bytes)
        if not self._reserve(size):
            return None
        pool.unmapped.remove((block.address, block))
        if block.size > size:
            self._split_unmapped(block, size)
        block.mapped = True
        for neighbour in (block.previous, block.next):
            if neighbour and not neighbour.used and neighbour.mapped:
                pool.remove(neighbour)
                merge(block, neighbour)
        pool.insert(block)
        return block

    def _split_unmapped(self, block: Block, size: int) -> None:
        rest = Block(
            block.address + size,
            block.size - size,
            block.pool,
            mapped=False,
            previous=block,
            next=block.next,
        )
        if block.next:
            block.next.previous = rest
        block.next, block.size = rest, size
        bisect.insort(block.pool.unmapped, (rest.address, rest))

    def _unmap(self, block: Block) -> None:
        """Take the memory from behind the whole pieces that lie in a free block. (unmap_block)"""
        pool, piece = block.pool, block.pool.segment_bytes
        begin = -(-block.address // piece) * piece
        end = (block.address + block.size) // piece * piece
        if end <= begin:
            return
        pool.remove(block)
        self.reserved -= end - begin
        if begin > block.address:
            front = Block(
                block.address, begin - block.address, pool, previous=block.previous, next=block
            )
            if block.previous:
                block.previous.next = front
            block.previous = front
            pool.insert(front)
        if end < block.address + block.size:
            back = Block(
                end, block.address + block.size - end, pool, previous=block, next=block.next
            )
            if block.next:
                block.next.previous = back
            block.next = back
            pool.insert(back)
        block.address, block.size, block.mapped = begin, end - begin, False
        for neighbour in (block.previous, block.next):
            if neighbour and not neighbour.mapped:
                pool.unmapped.remove((neighbour.address, neighbour))
                merge(block, neighbour)
        bisect.insort(pool.unmapped, (block.address, block))
