"""Variants take turns, and the first round does not count."""

from __future__ import annotations

import pytest

import labutils as lab
from tests.helpers import CPU


def test_every_round_runs_each_variant_once_in_alternating_order():
    called = []
    variants = {"a": lambda: called.append("a"), "b": lambda: called.append("b")}
    times = lab.alternate(variants, 3, CPU)
    assert "".join(called) == "abbaabba"
    assert {name: len(series) for name, series in times.items()} == {"a": 3, "b": 3}
    assert min(min(series) for series in times.values()) >= 0


def test_no_round_is_refused():
    with pytest.raises(ValueError, match="at least one round"):
        lab.alternate({"a": lambda: None}, 0, CPU)
