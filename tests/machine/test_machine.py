from __future__ import annotations

import os

import pytest
import torch

from labutils.machine import here, threads
from labutils.machine.gpu import GpuFacts, choose_device, diagnose
from labutils.machine.here import device_name, environment
from labutils.session import setup

CARD = ("NVIDIA RTX 4060",)
NEW = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_120", "compute_120")


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (GpuFacts(CARD, None, False), ("CPU build", "pip install")),
        (
            GpuFacts(
                CARD, "13.0", False, "The NVIDIA driver on your system is too old (found 11040)"
            ),
            ("too old", "update"),
        ),
        (GpuFacts(CARD, "13.0", False, "CUDA unknown error"), ("CUDA unknown error", "nvidia-smi")),
        (
            GpuFacts(CARD, "13.0", True, capability=(6, 1), arch_list=NEW),
            ("6.1", "install a torch that supports"),
        ),
        (
            GpuFacts(("Tesla V100",), "13.0", True, capability=(7, 0), arch_list=NEW),
            ("7.0", "Tesla V100"),
        ),
        (
            GpuFacts(CARD, "13.0", True, capability=(8, 9), arch_list=NEW, free_gib=0.6),
            ("0.6 GiB free", "restart"),
        ),
    ],
)
def test_unusable_card_is_named_with_its_mend(facts, expected):
    problem = diagnose(facts)
    assert facts.cards[0] in problem
    assert all(text in problem for text in expected)


@pytest.mark.parametrize(
    "facts",
    [
        GpuFacts((), None, False),
        GpuFacts(CARD, "13.0", False, hidden=True),  # CUDA_VISIBLE_DEVICES= is a choice
        GpuFacts((), None, True, capability=(9, 4), arch_list=("gfx942",)),  # ROCm
        GpuFacts((), "13.0", False, "Found no NVIDIA driver"),
        GpuFacts(
            CARD, "13.0", True, capability=(8, 9), arch_list=NEW, free_gib=3.4
        ),  # sm_86 code runs on 8.9
        GpuFacts(CARD, "13.0", True, capability=(9, 0), arch_list=("sm_90",)),
        GpuFacts(CARD, "13.0", True, capability=(12, 1), arch_list=NEW),
        GpuFacts(
            CARD, "12.8", True, capability=(12, 0), arch_list=("sm_80", "compute_90")
        ),  # compiled from PTX
        GpuFacts(CARD, "13.0", True, capability=(9, 0), arch_list=("sm_90a", "sm_90")),
    ],
)
def test_usable_card_or_none_is_no_problem(facts):
    assert diagnose(facts) is None


def test_newer_minor_code_does_not_run_on_an_older_card():
    assert "8.0" in diagnose(
        GpuFacts(CARD, "13.0", True, capability=(8, 0), arch_list=("sm_86", "sm_90"))
    )


def test_setup_warns_of_an_unusable_card_before_anything_trains(monkeypatch, capsys):
    monkeypatch.setattr("labutils.session.gpu_facts", lambda: GpuFacts(CARD, None, False))
    assert setup().type == "cpu"
    printed = capsys.readouterr().out
    assert printed.startswith("!! GPU NOT USED: NVIDIA RTX 4060")


def test_environment_is_text_and_names_the_device():
    where = choose_device()
    facts = environment(where)
    assert all(isinstance(value, str) and value for value in facts.values())
    assert facts["device"] == device_name(where)


def test_setup_says_when_other_programs_compute(monkeypatch, capsys):
    cpus = os.cpu_count()
    for busy, warned in ((0.1, False), (cpus, True)):
        monkeypatch.setattr(threads, "busy_cpus", lambda busy=busy: busy)
        threads.choose_threads.cache_clear()
        setup()
        assert ("This machine is busy" in capsys.readouterr().out) == warned


def test_what_torch_holds_unused_is_free(monkeypatch):
    """One answer to "how much is free on this card", whoever asks."""
    monkeypatch.setattr(here, "driver_memory", lambda device: (2 * 2**30, 8 * 2**30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 3 * 2**30)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 2**30)
    assert here.free_bytes(torch.device("cuda")) == 4 * 2**30
