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
