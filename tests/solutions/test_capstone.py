"""The capstone's judge: right configs pass, and each classic wrong one hears why it is wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import labutils as lab
from tests.helpers import CPU, slow
from tests.solutions.answers import names_of

CELLS = ("s1-start", "s2-floor", "stalled", "s4-predicted", "s4-twin", "s4-judge")
AUTOCAST = {
    "micro_batch_size": 2,
    "precision": "bf16",
    "optimizer": "adamw_8bit",
    "activation": "gelu_tanh",
    "loss_chunk_tokens": 512,
    "gradient_checkpointing": "block",
}
SIXTEEN_BIT_WEIGHTS = {
    "micro_batch_size": 1,
    "precision": "pure_bf16",
    "optimizer": "adamw_8bit",
    "loss_chunk_tokens": 512,
}
STALLED = SIXTEEN_BIT_WEIGHTS | {"optimizer": "adamw"}


@pytest.fixture(scope="module")
def capstone() -> dict[str, Any]:
    """The names that the notebook's cells define."""
    return names_of("capstone", *CELLS, lab=lab, torch=torch, device=CPU)


def verdict(capstone, capsys, changes) -> str:
    capstone["judge"](changes)
    return capsys.readouterr().out


@pytest.mark.parametrize("changes", [AUTOCAST, SIXTEEN_BIT_WEIGHTS], ids=["autocast", "bf16"])
def test_a_solution_is_right_if_its_twin_learns(capstone, capsys, monkeypatch, changes):
    for loss, words in ((7.019, "Right."), (7.03, "Not yet: the twin learns less")):
        monkeypatch.setitem(capstone, "twin_loss", lambda chosen, loss=loss: loss if chosen else 7)
        assert words in verdict(capstone, capsys, changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"gradient_checkpointing": "block"}, "whatever the batch, 5.79 GiB stay"),
        ({"precision": "bf16", "micro_batch_size": 1}, "whatever the batch, 5.79 GiB stay"),
        ({"optimizer": "adamw_8bit"}, "largest part of the bytes is activations"),
        (AUTOCAST | {"micro_batch_size": 1, "precision": "fp32"}, "takes too long"),
        (STALLED, "32 % of the weights stall"),
        (STALLED | {"optimizer": "sgd"}, "32 % of the weights stall"),
        (AUTOCAST | {"micro_batch_size": 3}, "micro_batch_size"),
        ({"learning_rate": 1e-3}, "the task itself: learning_rate"),
        (AUTOCAST | {"seed": 1}, "the task itself: seed"),
    ],
    ids=str,
)
def test_a_classic_wrong_answer_hears_its_reason(capstone, capsys, changes, words):
    text = verdict(capstone, capsys, changes)
    assert "Not yet: " in text and words in text


@pytest.mark.parametrize("changes", [{}, SIXTEEN_BIT_WEIGHTS], ids=["fp32", "bf16"])
def test_the_floor_is_that_of_the_ledger(capstone, changes):
    config = lab.load_config("fp32", **(capstone["TASK"] | changes))
    phase = lab.predict_memory(config, "rtx4060").phases["optimizer"]
    counted = sum(phase.get(part, 0) for part in ("parameters", "gradients", "optimizer state"))
    floor = capstone["floor_gib"](config.precision, config.optimizer, False)
    assert floor == pytest.approx(lab.gib(counted) + lab.CONTEXT_GIB, rel=0.01)


@slow
def test_a_twin_learns_with_the_shares_of_its_config(capstone, runs, capsys):
    assert "Right." in verdict(capstone, capsys, SIXTEEN_BIT_WEIGHTS)
    (record, _), _ = lab.find_runs()
    assert record.config["model"] == "gpt2-nano"
