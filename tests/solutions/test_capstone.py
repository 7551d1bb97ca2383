"""The capstone's judge: right configs pass, and each classic wrong one hears why it is wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import labutils as lab
from tests.helpers import slow
from tests.solutions.answers import names_of

CELLS = "s1-start s2-floor stalled matmul train s4-twin rule task s4-predicted slow learns s4-judge"
AUTOCAST = {
    "micro_batch_size": 2,
    "precision": "bf16",
    "optimizer": "adamw_8bit",
    "activation": "gelu_tanh",
    "loss_chunk_tokens": 512,
    "gradient_checkpointing": "block",
}
TEXTBOOK = {"micro_batch_size": 1, "activation": "gelu_new", "loss_chunk_tokens": 0}
PURE = AUTOCAST | {"precision": "pure_bf16", "gradient_checkpointing": "none"}
NEAREST = PURE | {"optimizer": "adamw"}


@pytest.fixture(scope="module")
def capstone() -> dict[str, Any]:
    """The names that the notebook's cells define."""
    return names_of("capstone", CELLS, lab=lab, torch=torch)


def verdict(capstone, capsys, changes) -> str:
    capstone["judge"](changes)
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "losses", "words"),
    [
        (AUTOCAST, [7.0, 7.01, 7.0], "Right."),
        (PURE, [6, 6, 6], "Right."),
        (AUTOCAST, [7.1, 7.1, 7.11], "learns less. Take one key out"),
        (NEAREST, [7.1, 7.1, 7.11], "32 % of its weights stall"),
        (AUTOCAST, [6, 7, 8], "3 seeds cannot tell. Set SEEDS = 6"),
    ],
)
def test_the_loss_is_judged_by_the_rule(capstone, capsys, monkeypatch, changes, losses, words):
    given = {capstone["checked"](changes).note: losses}
    monkeypatch.setitem(capstone, "twin_losses", lambda c: given.get(c.note, [7, 7, 7]))
    assert words in verdict(capstone, capsys, changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "whatever the batch, 5.79 GiB stay"),
        ({"optimizer": "adamw_8bit"}, "most of its bytes are activations"),
        (AUTOCAST | TEXTBOOK, "too slow, above all in the backward phase"),
        (AUTOCAST | {"micro_batch_size": 3}, "use a micro_batch_size of 1, 2, 4 or 8"),
        ({"optimiser": "sgd"}, "Did you mean `optimizer`?"),
        ({"seed": 1, "corpus": "x", "weights": "x"}, "the task fixes corpus, seed, weights"),
        (["sgd"], "write a dictionary"),
    ],
)
def test_a_classic_wrong_answer_hears_its_reason(capstone, capsys, changes, words):
    text = verdict(capstone, capsys, changes)
    assert "Not yet (question " in text and words in text


@pytest.mark.parametrize("changes", [{}, PURE], ids=["fp32", "bf16"])
def test_the_floor_is_that_of_the_ledger(capstone, changes):
    config = capstone["checked"](changes)
    phase = lab.predict_memory(config, "rtx4060").phases["optimizer"]
    counted = sum(phase.get(part, 0) for part in ("parameters", "gradients", "optimizer state"))
    floor = capstone["floor_gib"](config.precision, config.optimizer, False)
    assert floor == pytest.approx(lab.gib(counted) + lab.CONTEXT_GIB, rel=0.01)


@slow
def test_a_twin_in_bf16_can_fail_on_any_cpu(capstone, capsys):
    assert "Right." in verdict(capstone, capsys, PURE)
    assert "weights stall" in verdict(capstone, capsys, NEAREST)
