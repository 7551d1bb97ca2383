from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import labutils as lab
from labutils.config.cards import CARDS
from labutils.machine import here


@pytest.fixture
def card_of(monkeypatch):
    """Return a function that puts an RTX 4060 with so much free memory, in GiB, into this machine."""

    def put(free_gib):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        card = replace(CARDS["rtx4060"], memory_gib=free_gib)
        monkeypatch.setattr(here, "card_of", lambda device: card if device == here.THIS else device)

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
