from __future__ import annotations

import pytest
import torch

import labutils as lab
from labutils.config.cards import CARDS, Card
from labutils.prediction import sizes
from labutils.prediction.sizes import largest_micro_batch


@pytest.fixture
def card_of(monkeypatch):
    """Return a function that puts an RTX 4060 with so much free memory, in GiB, into this machine."""

    def on_a_4060(config, gib, _, limit):
        return largest_micro_batch(config, gib, "rtx4060", limit)

    def put(free_gib):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(sizes, "card_named", lambda _: Card(free_gib, CARDS["rtx4060"].gpu))
        monkeypatch.setattr(sizes, "largest_micro_batch", on_a_4060)

    return put


def test_a_model_that_does_not_fit_the_card_gives_way_to_a_smaller_one(card_of):
    medium = lab.load_config("checkpointing").on("cuda")
    card_of(80.0)
    assert lab.size_that_fits(medium) == {"micro_batch_size": 8, "tokens_per_step": 8 * 512}
    card_of(3.7)
    small = lab.size_that_fits(medium)
    assert small["model"] == "gpt2" and small["micro_batch_size"] >= 1
    assert small["tokens_per_step"] == 512 * small["micro_batch_size"]
    card_of(0.1)
    assert lab.size_that_fits(medium) == {
        "model": "gpt2-nano",
        "micro_batch_size": 1,
        "tokens_per_step": 512,
    }


def test_on_a_cpu_the_config_says_how_large(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert lab.size_that_fits(lab.load_config("checkpointing").on("cpu")) == {}
