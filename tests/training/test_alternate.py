"""Variants take turns, and the first round does not count."""

from __future__ import annotations

from collections import Counter
from functools import partial
from itertools import pairwise

import pytest

import labutils as lab
from labutils.training import alternate
from tests.helpers import CPU


def test_every_round_runs_each_variant_once_in_a_shuffled_order():
    called = []
    variants = {name: partial(called.append, name) for name in "abc"}
    times = lab.alternate(variants, 60, CPU)
    rounds = ["".join(called[i : i + 3]) for i in range(0, len(called), 3)]
    assert {"".join(sorted(order)) for order in rounds} == {"abc"}
    assert len(set(rounds)) == 6  # each variant follows each other one, and comes first and last
    repeats = Counter(a for a, b in pairwise(called) if a == b)
    assert max(repeats.values()) <= 3 * min(repeats.values())
    assert {name: len(series) for name, series in times.items()} == {"a": 60, "b": 60, "c": 60}
    assert min(min(series) for series in times.values()) >= 0


def test_a_round_keeps_the_fastest_of_its_passes(monkeypatch):
    clock = iter([9.0, 5.0, 3.0, 4.0, 8.0])
    monkeypatch.setattr(alternate, "_timed_ms", lambda variant, device: next(clock))
    assert lab.alternate({"a": print}, 2, CPU, passes=2) == {"a": [3.0, 4.0]}


@pytest.mark.parametrize(("rounds", "passes"), [(0, 1), (1, 0)])
def test_no_round_is_refused(rounds, passes):
    with pytest.raises(ValueError, match="at least one round"):
        lab.alternate({"a": print}, rounds, CPU, passes)
