"""The page's allocator follows `lab.allocator.CachingAllocator` event by event."""

from __future__ import annotations

import itertools
import json
import math
import random

import pytest
from selenium.webdriver.common.keys import Keys

import labutils as lab
from labutils.exhibits.allocator_data import story, told
from labutils.prediction.allocator import CachingAllocator
from labutils.prediction.blocks import DEFAULT, EXPANDABLE, OutOfMemory
from tests.helpers import REPO

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


def test_the_story_is_that_of_notebook_04():
    cells = json.loads((REPO / "04-Memory_Profiling.ipynb").read_text(encoding="utf-8"))["cells"]
    (source,) = [
        "".join(c["source"]) for c in cells if "".join(c["source"]).startswith("def story")
    ]
    names: dict = {"MIB": 1}
    exec(source, names)
    sizes, gone, n_made, right = [], [], itertools.count(), []

    def allocate(size):
        sizes.append(size)
        return next(n_made)

    for words in names["story"](allocate, gone.append, lambda: None):
        right.append((words, list(gone), list(sizes)))
        sizes.clear()
        gone.clear()
    assert story() == right


def cells_of(root, kind: str) -> list[str]:
    cells = root.find_elements("css selector", f'tr[data-kind="{kind}"] td')
    return [cell.text for cell in cells[1:]]


def part(root, name: str):
    return root.find_element("css selector", f'[data-part="{name}"]')


def test_the_story_gives_the_numbers_of_the_rules(show):
    root = show(lab.play.allocator(300))
    right = told(story())
    for i in range(5):
        assert part(root, "story").text.endswith(f"event {i + 1} of 5")
        part(root, "story").click()
        for kind in ("fixed", "expandable"):
            allocated, reserved, free, _ = map(float, cells_of(root, kind))
            assert allocated == right["allocated"][i]
            assert reserved == right[f"reserved, {kind}"][i]
            assert free == reserved - allocated
    part(root, "story").click()  # from the beginning
    assert cells_of(root, "fixed")[:2] == ["90", "100"]


def test_no_hole_is_large_enough_and_a_smaller_card_is_full(show, browser):
    root = show(lab.play.allocator())
    for _ in range(3):
        part(root, "story").click()
    assert "reserved grew by 20 MiB" in part(root, "sentence").text
    browser.execute_script(
        "arguments[0].value = 110; arguments[0].dispatchEvent(new Event('input'))",
        part(root, "limit"),
    )
    said = part(root, "sentence").text
    assert "Out of memory: 20 MiB were asked for. The card has 10 MiB left." in said
    assert "55 MiB are reserved and free, but the largest hole has 3 MiB." in said
    assert cells_of(root, "fixed") == ["45", "100", "55", "3"]


def test_a_click_or_a_key_frees_a_block_and_holes_merge(show, browser):
    root = show(lab.play.allocator())
    button = root.find_element("css selector", '[data-mib="3"]')
    for _ in range(3):
        button.click()
    assert cells_of(root, "fixed") == ["9", "20", "11", "11"]
    root.find_element("css selector", '[data-tensor="1"]').click()
    assert cells_of(root, "fixed") == ["6", "20", "14", "11"]
    block = root.find_element("css selector", '[data-tensor="2"]')
    assert block.get_attribute("aria-label") == "tensor 2, 3 MiB: free it"
    block.send_keys(Keys.ENTER)
    assert cells_of(root, "fixed") == ["3", "20", "17", "11"]
    browser.switch_to.active_element.send_keys(Keys.SPACE)  # the next block has the focus
    assert cells_of(root, "fixed") == ["0", "20", "20", "20"]
    part(root, "empty").click()
    assert "20 MiB went back to the driver" in part(root, "sentence").text
    assert cells_of(root, "fixed") == ["0", "0", "0", "0"]
    part(root, "undo").click()
    assert cells_of(root, "fixed") == ["0", "20", "20", "20"]
    part(root, "clear").click()
    assert cells_of(root, "fixed") == ["0", "0", "0", "0"]


def test_a_size_of_ones_own_is_rounded_and_expandable_segments_replay(show):
    root = show(lab.play.allocator())
    own = part(root, "own")
    own.clear()
    own.send_keys("0.25")
    part(root, "request").click()
    assert cells_of(root, "fixed") == ["0.25", "2", "1.75", "1.75"]
    assert "would take a hole of 1.75 MiB" in part(root, "useless").text
    own.clear()
    own.send_keys("0.0001")  # 105 bytes
    part(root, "request").click()
    assert "rounded up to 512 bytes" in part(root, "sentence").text
    own.clear()
    own.send_keys("25")
    said = part(root, "useless").text
    assert "1.75 MiB are free, but reserved would go from 2 to 28 MiB." in said
    part(root, "request").send_keys(Keys.ENTER)
    assert cells_of(root, "fixed")[1] == "28"
    assert cells_of(root, "expandable")[1] == "42"
    part(root, "expandable").send_keys(Keys.SPACE)
    lines = root.find_elements("css selector", ".line")
    assert len(lines) == 3  # 2 MiB of the small pool, and twice 20 MiB
    assert "segment 2: 40 MiB" in part(root, "maps").text
    own.clear()
    own.send_keys("999")
    part(root, "request").click()
    assert "at most 300 MiB" in part(root, "sentence").text


def test_every_second_tensor_goes(show):
    root = show(lab.play.allocator())
    for _ in range(4):
        root.find_element("css selector", '[data-mib="20"]').click()
    for left in ("40", "20", "0"):
        part(root, "second").click()
        assert cells_of(root, "fixed")[:2] == [left, "80"]
