"""The page's sums are those of further/checkpointing's exercise."""

from __future__ import annotations

import random

import labutils as lab

COST = """
const [root, cases] = arguments;
return cases.map(([lengths, ratio, keep]) => root.exhibit.cost(lengths, ratio, keep));
"""


def some_lengths(n_layer: int, rng: random.Random) -> list[int]:
    inner = sorted(rng.sample(range(1, n_layer), rng.randrange(n_layer)))
    ends = [*inner, n_layer]
    return [end - start for start, end in zip([0, *inner], ends, strict=True)]


def peak_of(lengths: list[int], ratio: float) -> float:
    """Return the peak in inputs: while segment i is computed again, i inputs are alive."""
    return max(i + ratio * length for i, length in enumerate(lengths, 1))


def smallest_peak(n_layer: int, ratio: float) -> float:
    """Return the smallest peak: below it the longest possible segments hold too few layers."""
    numbers = range(1, n_layer + 1)
    for peak in sorted({i + ratio * n for i in numbers for n in numbers}):
        if sum(int((peak - i) / ratio) for i in numbers if peak > i) >= n_layer:
            return peak
    raise AssertionError("one segment holds all layers")


def test_peaks_are_those_of_the_exercise(browser, show):
    root = show(lab.play.segments())
    rng = random.Random(0)
    cases = []
    for _ in range(2_000):
        n_layer, r = rng.randrange(2, 49), rng.randrange(1, 65) / 2
        cases.append([some_lengths(n_layer, rng), r, False])
    found = browser.execute_script(COST, root, cases)
    for (lengths, r, _), page in zip(cases, found, strict=True):
        n = len(lengths)
        assert page["peak"] == peak_of(lengths, r)
        assert page["forward"] == n
        assert page["rule"] == n + r * max(lengths)
        assert page["runsAgain"] == sum(lengths)
        at = page["at"]
        assert at + r * lengths[at - 1] == page["peak"]


def test_the_smallest_peak_is_that_of_the_exercise(browser, show):
    root = show(lab.play.segments())
    cases = [(n, r / 2) for n in (2, 3, 5, 12, 24, 36, 48) for r in (1, 2, 3, 8, 18, 32, 64)]
    script = "return arguments[1].map(([n, r]) => arguments[0].exhibit.best(n, r));"
    found = browser.execute_script(script, root, cases)
    for (n, r), page in zip(cases, found, strict=True):
        assert page == smallest_peak(n, r), (n, r)
