"""Bytes of one process under ZeRO, by arithmetic."""

from __future__ import annotations

import pytest

import labutils as lab

STATIC = {"parameters": 4.0, "gradients": 4.0, "optimizer state": 8.0, "activations": 5.0}


def test_each_stage_cuts_one_category_more():
    totals = [sum(lab.sharded(STATIC, 4, stage).values()) for stage in (0, 1, 2, 3)]
    assert totals == [21, 15, 12, 9]


def test_activations_are_never_cut():
    assert all(lab.sharded(STATIC, 64, stage)["activations"] == 5 for stage in (0, 1, 2, 3))


def test_an_unknown_stage_is_refused():
    with pytest.raises(ValueError, match="stages 1 to 3"):
        lab.sharded(STATIC, 2, 4)


def test_the_host_needs_what_deepspeed_prints_for_t5_small():
    # 60.5 million parameters: 1.35 and 1.52 GiB, as its estimator prints them
    n = 60_506_624
    assert f"{lab.gib(lab.host_bytes(n)):.2f}" == "1.35"
    assert f"{lab.gib(lab.host_bytes(n, weights_too=True)):.2f}" == "1.52"


def test_the_bus_carries_gradients_and_weights():
    assert lab.bus_seconds(8e9, 32) == 1.0
