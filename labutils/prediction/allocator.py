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

from labutils.prediction.blocks import (
    ADDRESSES,
    DEFAULT,
    LARGE_SEGMENT,
    SMALL_REQUEST,
    SMALL_SEGMENT,
    SMALLEST_BLOCK,
    Block,
    OutOfMemory,
    Pool,
    Settings,
    could_grow_to,
    merge,
    rounded,
    segment_bytes,
    with_room,
)


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
