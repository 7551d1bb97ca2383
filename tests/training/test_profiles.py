"""Profiles of any call: operations once each, bytes, traces, and a clock beside them."""

from __future__ import annotations

import json

import torch

from labutils.training import profiles
from tests.helpers import CPU


def call():
    x = torch.ones(64, 64)
    return torch.tanh(x @ x) * 2


def test_operations_are_counted_and_annotations_left_out():
    own = profiles.own_ms(profiles.record(call, CPU, 3), CPU)
    assert own["tanh"][1] == own["mm"][1] == 3
    assert not [name for name in own if name.startswith("ProfilerStep")]
    times = [ms for ms, _ in own.values()]
    assert times == sorted(times, reverse=True)


def test_operations_can_be_chosen_by_the_shape_of_their_input():
    found = profiles.record(call, CPU)
    assert "tanh" in profiles.own_ms(found, CPU, (64, 64))
    assert profiles.own_ms(found, CPU, (1, 2, 3)) == {}


def test_bytes_are_those_of_the_tensors_that_are_made():
    own = profiles.own_mib(profiles.record(call, CPU, 2, memory=True), CPU)
    assert own["tanh"] == (2 * 64 * 64 * 4 / 2**20, 2)


def test_the_clock_leaves_out_the_first_call():
    calls = []
    assert len(profiles.clock_ms(lambda: calls.append(1), CPU, n=4)) == 4
    assert len(calls) == 5


def test_a_trace_stays_on_disk(tmp_path, monkeypatch):
    monkeypatch.setenv("LABUTILS_RUNS", str(tmp_path / "runs"))
    path = profiles.save_trace(profiles.record_stacks(call, CPU), "one")
    assert path == tmp_path / "runs" / "one.json"
    assert json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
