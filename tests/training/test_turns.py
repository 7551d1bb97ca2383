from __future__ import annotations

import pytest
import torch

from labutils.training.turns import time_in_turns

CPU = torch.device("cpu")


def test_calls_run_in_turns_and_the_first_round_is_not_timed():
    order = []
    calls = {"a": lambda: order.append("a"), "b": lambda: order.append("b")}
    found = time_in_turns(calls, CPU, rounds=3)
    assert order == ["a", "b"] * 4
    assert {name: len(times) for name, times in found.items()} == {"a": 3, "b": 3}
    assert min(found["a"]) >= 0


def test_no_round_is_refused():
    with pytest.raises(ValueError, match="at least one round"):
        time_in_turns({}, CPU, rounds=0)
