from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import labutils as lab
from labutils import machine
from labutils.config.card import CARDS
from labutils.prediction import sizes


@pytest.fixture
def card_of(monkeypatch):
    """Return a function that puts an RTX 4060 with so much free memory, in GiB, into this machine."""

    def put(free_gib):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        card = replace(CARDS["rtx4060"], memory_gib=free_gib)
        monkeypatch.setattr(
            machine, "card_of", lambda device: card if device == machine.THIS else device
        )

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


def test_the_longest_sequence_fits_and_one_unit_more_does_not(monkeypatch):
    tried = []

    def fits(config, budget_gib, device, limit):
        tried.append(config.seq_len)
        assert config.micro_batch_size == limit == 1
        assert config.tokens_per_step == config.seq_len
        return int(config.seq_len <= budget_gib)

    monkeypatch.setattr(sizes, "largest_micro_batch", fits)
    config = lab.load_config("checkpointing")
    assert sizes.longest_sequence(config, 5000) == 4096
    assert len(tried) <= 6
    assert sizes.longest_sequence(config, 5000, unit=512) == 4608
    assert sizes.longest_sequence(config, 100) == 0
    assert sizes.longest_sequence(config, 10**6) == 32768
