"""Replay a traced run through the caching allocator's rules: the bytes that a card must have, not
its tensors' alone.

Requests and frees come in the order of the trace, from moving the model to the card through three
optimizer steps.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

from labutils.memory.ledger import ROUNDING, WORKSPACES, MemoryLedger, downsample_timeline
from labutils.prediction.allocator import MIB, CachingAllocator, OutOfMemory, Settings, rounded
from labutils.prediction.trace import (
    BIRTH,
    CATEGORIES,
    DEATH,
    LASTING,
    OPERATION,
    Event,
    Segment,
    Trace,
)

# the first makes the optimizer's state, the second finds holes where there were none, the third is
# as all
STEPS = 3
REPEATED_MICRO_BATCHES = 4  # so many are replayed of a step that has more
# of the smallest limit: so far apart may the largest that fails and the smallest that does not be
FINENESS = 0.002
Request = tuple[int, int]  # number of the storage, bytes; 0 bytes give it back


def segments_of(
    trace: Trace, step: int, n_micro_batches: int, at_most: int = REPEATED_MICRO_BATCHES
) -> list[Segment]:
    """Return a step's segments in order, of `at_most` so many micro-batches.

    Those beyond the ones that were traced are like the last.
    """
    segments = trace.step(step)
    last = max(segment.micro_batch or 0 for segment in segments)
    repeated = [segment for segment in segments if segment.micro_batch == last]
    end = segments.index(repeated[-1]) + 1
    more = min(n_micro_batches, at_most) - last - 1
    return segments[:end] + max(more, 0) * repeated + segments[end:]


def walk(trace: Trace, n_micro_batches: int) -> Iterator[tuple[int, Segment, Event]]:
    """Yield (step, segment, event) of the first steps, in order; the model is moved in step 0.

    Left out are births of what lasts in all steps but the first, and storages of 0 bytes, for which
    nothing is asked.
    """
    alive: set[int] = set()
    moved = Segment("", 0, None, [Event(BIRTH, "", storage) for storage in trace.standing])
    for step in range(n_steps(trace)):
        for segment in ([moved] if step == 0 else []) + segments_of(trace, step, n_micro_batches):
            for event in segment.events:
                storage = event.storage
                if event.kind == BIRTH:
                    if not storage.n_bytes or (
                        storage.category in LASTING and id(storage) in alive
                    ):
                        continue
                    alive.add(id(storage))
                elif event.kind == DEATH:
                    if id(storage) not in alive:
                        continue
                    alive.remove(id(storage))
                yield step, segment, event


def n_steps(trace: Trace) -> int:
    """Return how many steps are replayed: those that were traced, if that is more than one."""
    traced = trace.segments[-1].step + 1
    return traced if traced > 1 else STEPS


def requests(trace: Trace, n_micro_batches: int = 1) -> list[Request]:
    """Return what the allocator is asked for, in order."""
    found: list[Request] = []
    keys: dict[int, int] = {}
    for _, _, event in walk(trace, n_micro_batches):
        if event.kind == BIRTH:
            keys[id(event.storage)] = len(found)
            found.append((len(found), event.storage.n_bytes))
        elif event.kind == DEATH:
            found.append((keys[id(event.storage)], 0))
    return found


def replayed(requests: list[Request], allocator: CachingAllocator) -> CachingAllocator:
    """Hand requests to an allocator and return it. Raises allocator.OutOfMemory."""
    blocks = {}
    for key, n_bytes in requests:
        if n_bytes:
            blocks[key] = allocator.allocate(n_bytes)
        else:
            allocator.free(blocks.pop(key))
    return allocator


def completes(
    requests: list[Request], limit_bytes: float, settings: Settings, as_cap: bool = False
) -> bool:
    """Return whether an allocator that can have `limit_bytes`, or is capped to them, meets all
    requests.
    """
    limits = {"cap_bytes" if as_cap else "limit_bytes": limit_bytes}
    try:
        replayed(requests, CachingAllocator(settings=settings, **limits))
    except OutOfMemory:
        return False
    return True


def smallest_limit(requests: list[Request], free: CachingAllocator, as_cap: bool = False) -> int:
    """Return the fewest bytes with which an allocator meets all requests, to FINENESS, in whole 2
    MiB.

    `free` is one that has met them without a limit. More may be reserved where more is there:
    before it gives up, the allocator returns what it has cached.
    """
    fails, enough = free.peak_allocated // (2 * MIB) - 1, -(-free.peak_reserved // (2 * MIB))
    while enough - fails > max(1, FINENESS * enough):
        middle = (fails + enough) // 2
        if completes(requests, middle * 2 * MIB, free.settings, as_cap):
            enough = middle
        else:
            fails = middle
    return enough * 2 * MIB


def ledger(
    trace: Trace, n_micro_batches: int, method: str, settings: Settings | None
) -> MemoryLedger:
    """Return the bytes by category at each phase's peak in the last replayed step, and the timeline
    of that step.

    With the `settings` of a card's allocator a category counts requests, rounded up to 512 bytes;
    what blocks have beyond that is ROUNDING, and the sum is what `torch.cuda.memory_allocated`
    tells. None is a CPU.
    """
    books = _Books(settings)
    last = n_steps(trace) - 1
    parts: list[tuple[Segment, list[int], list[list[int]]]] = []
    n_operations = 0
    for step, segment, event in walk(trace, n_micro_batches):
        books.enter(event)
        if step < last:
            continue
        if not parts or parts[-1][0] is not segment:
            parts.append((segment, [], []))
        n_operations += event.kind == OPERATION
        parts[-1][1].append(n_operations)
        parts[-1][2].append(list(books.now.values()))
    found: dict[str, dict[str, int]] = {}
    timeline = []
    for phase, group in itertools.groupby(parts, key=lambda part: part[0].phase):
        rows = list(group)
        at = np.array([i for _, positions, _ in rows for i in positions])
        alive = np.array([now for _, _, nows in rows for now in nows])
        timeline.append((phase, at, alive))
        peak = alive[alive.sum(axis=1).argmax()]
        if peak.sum() > sum(found.get(phase, {}).values()):
            found[phase] = dict(zip(books.now, peak.tolist(), strict=True))
    return MemoryLedger(phases=found, method=method, timeline=downsample_timeline(timeline))


class _Books:
    """What is alive, in bytes by category, while events go by."""

    def __init__(self, settings: Settings | None) -> None:
        self.on_card = settings is not None
        categories = (
            (*CATEGORIES, ROUNDING) if self.on_card else (c for c in CATEGORIES if c != WORKSPACES)
        )
        self.now = dict.fromkeys(categories, 0)
        self.allocator, self.blocks = CachingAllocator(settings=settings or Settings()), {}

    def enter(self, event: Event) -> None:
        storage = event.storage
        if storage is None:
            return
        n_bytes = rounded(storage.n_bytes) if self.on_card else storage.n_bytes
        self.now[storage.category] += n_bytes if event.kind == BIRTH else -n_bytes
        if not self.on_card:
            return
        if event.kind == BIRTH:
            block = self.blocks[id(storage)] = self.allocator.allocate(storage.n_bytes)
            self.now[ROUNDING] += block.size - n_bytes
        else:
            block = self.blocks.pop(id(storage))
            self.now[ROUNDING] -= block.size - n_bytes
            self.allocator.free(block)
