"""The page's allocator follows `lab.allocator.CachingAllocator` event by event."""

from __future__ import annotations

import math
import random

import pytest

import labutils as lab
from labutils.prediction.allocator import DEFAULT, EXPANDABLE, CachingAllocator, OutOfMemory

MIB = 2**20
# Plays events on the page's allocator: [number, bytes] requests, [number, 0] frees, [] empties.
PLAY = """
const [root, sequences] = arguments;
const { Allocator } = root.exhibit;
const listed = (list) => list.map((block) => [block.address, block.size]);
return sequences.map(({ limit, expandable, events }) => {
  const cache = new Allocator(limit === null ? Infinity : limit, expandable);
  const blocks = {};
  return events.map(([number, bytes]) => {
    let got = null;
    if (number === undefined) cache.emptyCache();
    else if (bytes) {
      const block = cache.allocate(bytes);
      if (block) { blocks[number] = block; got = [block.address, block.size]; }
    } else if (blocks[number]) { cache.free(blocks[number]); delete blocks[number]; }
    return [got, cache.allocated, cache.reserved, cache.retries,
      listed(cache.small.free), listed(cache.large.free), listed(cache.large.unmapped)];
  });
});
"""
SIZES = (1, 512, 513, 300_000, MIB, MIB + 1, 3 * MIB, 10 * MIB - 1, 10 * MIB, 20 * MIB, 50 * MIB)


def some_sequence(rng: random.Random, expandable: bool) -> dict:
    limit = rng.choice([None, 60 * MIB, 150 * MIB, 300 * MIB])
    events, alive = [], []
    for number in range(150):
        what = rng.random()
        if what < 0.04:
            events.append([])
        elif what < 0.45 and alive:
            events.append([alive.pop(rng.randrange(len(alive))), 0])
        else:
            n_bytes = rng.choice([*SIZES, rng.randrange(1, 2 * MIB), rng.randrange(1, 30 * MIB)])
            events.append([number, n_bytes])
            alive.append(number)
    return {"limit": limit, "expandable": expandable, "events": events}


def played(sequence: dict) -> list[list]:
    """Return what `PLAY` returns, from the rules in Python."""
    settings = EXPANDABLE if sequence["expandable"] else DEFAULT
    limit = math.inf if sequence["limit"] is None else sequence["limit"]
    cache, blocks, found = CachingAllocator(limit, settings), {}, []

    def listed(pairs):
        return [[block.address, block.size] for block in pairs]

    for event in sequence["events"]:
        got = None
        if not event:
            cache.empty_cache()
        elif event[1]:
            try:
                block = blocks[event[0]] = cache.allocate(event[1])
                got = [block.address, block.size]
            except OutOfMemory:
                pass
        elif event[0] in blocks:
            cache.free(blocks.pop(event[0]))
        free = [listed(block for *_, block in pool.free) for pool in (cache.small, cache.large)]
        unmapped = listed(block for _, block in cache.large.unmapped)
        now = cache.allocated, cache.reserved, cache.n_retries
        found.append([got, *now, *free, unmapped])
    return found


@pytest.mark.parametrize("expandable", [False, True], ids=["fixed", "expandable"])
def test_random_events_leave_what_the_rules_leave(browser, show, expandable):
    rng = random.Random(expandable)
    sequences = [some_sequence(rng, expandable) for _ in range(200)]
    pages = browser.execute_script(PLAY, show(lab.play.allocator()), sequences)
    n_failed = n_retried = 0
    for sequence, page in zip(sequences, pages, strict=True):
        right = played(sequence)
        for i, (one, other) in enumerate(zip(page, right, strict=True)):
            assert one == other, (sequence["limit"], i, sequence["events"][: i + 1])
        n_retried += right[-1][3]
        n_failed += sum(
            bool(e) and e[1] > 0 and r[0] is None
            for e, r in zip(sequence["events"], right, strict=True)
        )
    assert n_failed > 500 and n_retried > 500  # all rules were needed
