"""Variants take turns, and the first round does not count."""

from __future__ import annotations

import pytest

import labutils as lab
from labutils.training import alternate
from tests.helpers import CPU


def test_every_round_runs_each_variant_once_in_alternating_order():
    called = []
    variants = {"a": lambda: called.append("a"), "b": lambda: called.append("b")}
    times = lab.alternate(variants, 3, CPU)
    assert "".join(called) == "abbaabba"
    assert {name: len(series) for name, series in times.items()} == {"a": 3, "b": 3}
    assert min(min(series) for series in times.values()) >= 0


def test_a_round_keeps_the_fastest_of_its_passes(monkeypatch):
    clock = iter([9.0, 5.0, 3.0, 4.0, 8.0])
    monkeypatch.setattr(alternate, "_timed_ms", lambda variant, device: next(clock))
    assert lab.alternate({"a": print}, 2, CPU, passes=2) == {"a": [3.0, 4.0]}


@pytest.mark.parametrize(("rounds", "passes"), [(0, 1), (1, 0)])
def test_no_round_is_refused(rounds, passes):
    with pytest.raises(ValueError, match="at least one round"):
        lab.alternate({"a": print}, rounds, CPU, passes)
