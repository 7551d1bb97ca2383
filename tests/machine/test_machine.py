from __future__ import annotations

import os

import pytest
import torch

from labutils import machine
from labutils.machine import device_name, environment
from labutils.session import setup

GIB = 2**30


@pytest.fixture
def card(monkeypatch):
    """Put a card into this machine; return what is wrong with it."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def put(cuda="13.0", is_available=True, error="", free_gib=3.4, name="RTX 4060") -> str:
        def ones(*_sizes, device):
            if error:
                raise RuntimeError(f"{error}\nCompile with TORCH_USE_CUDA_DSA")
            return torch.zeros(1)

        monkeypatch.setattr(machine, "nvidia_smi", lambda _: (name,) if name else ())
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: is_available)
        monkeypatch.setattr(torch, "ones", ones)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free_gib * GIB - 1000, 8 * GIB))
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 1000)
        machine.gpu_problem.cache_clear()
        return machine.gpu_problem()

    yield put
    machine.gpu_problem.cache_clear()


def test_an_unusable_card_is_named_with_its_fix(card):
    assert "RTX 4060 is present, but this torch is a CPU build. Fix: python" in card(
        cuda=None, is_available=False
    )
    old = "The NVIDIA driver on your system is too old (found version 11040)."
    problem = card(is_available=False, error=old)
    assert f"RTX 4060 is present, but torch cannot compute on it: {old}" in problem
    assert "TORCH_USE_CUDA_DSA" not in problem and "Fix: update the NVIDIA driver" in problem
    assert machine.choose_device().type == "cpu"
    kernel = "CUDA error: no kernel image is available for execution on the device"
    assert kernel in card(error=kernel)
    assert machine.choose_device().type == "cpu"
    assert "0.6 GiB free" in card(free_gib=0.6)


def test_a_usable_card_or_none_is_no_problem(card, monkeypatch):
    assert card() == "" and machine.choose_device().type == "cuda"
    assert card(name="") == ""  # no nvidia-smi, as under ROCm
    assert card(is_available=False, name="") == "" and machine.choose_device().type == "cpu"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # a choice
    assert card(is_available=False) == ""


def test_setup_warns_of_an_unusable_card_before_anything_trains(card, capsys):
    card(cuda=None, is_available=False)
    assert setup().type == "cpu"
    assert capsys.readouterr().out.startswith("!! GPU NOT USED: RTX 4060")


def test_environment_is_text_and_names_the_device():
    where = machine.choose_device()
    facts = environment(where)
    assert all(isinstance(value, str) and value for value in facts.values())
    assert facts["device"] == device_name(where)


def test_setup_says_when_other_programs_compute(monkeypatch, capsys):
    for busy, warned in ((0.1, False), (os.cpu_count(), True)):
        monkeypatch.setattr(machine, "busy_cpus", lambda busy=busy: busy)
        machine.choose_threads.cache_clear()
        setup()
        assert ("This machine is busy" in capsys.readouterr().out) == warned


def test_what_torch_holds_unused_is_free(monkeypatch):
    """One answer to "how much is free on this card", whoever asks."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2 * GIB, 8 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 3 * GIB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: GIB)
    assert machine.free_bytes(torch.device("cuda")) == 4 * GIB
