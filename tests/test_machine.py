"""What this machine is: a card that cannot be used is named with its fix; threads are chosen once."""

import os
import re
import sys
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from tqdm import tqdm

import labutils as lab
from labutils import machine
from labutils.course import session
from labutils.course.session import setup
from tests.helpers import CPU

GIB = 2**30


@pytest.fixture
def card(monkeypatch):
    """Put a card into this machine; return what is wrong with it."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def put(cuda="13.0", is_available=True, error="", free_gib=3.4, name="RTX 4060") -> str:
        error = RuntimeError(f"{error}\nCompile with TORCH_USE_CUDA_DSA") if error else None
        monkeypatch.setattr(machine, "nvidia_smi", lambda _: name)
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(torch, "ones", Mock(return_value=torch.zeros(1), side_effect=error))
        answers = {"is_available": is_available, "get_device_name": "RTX 4060"}
        answers |= {"mem_get_info": ((free_gib - 0.5) * GIB, 8 * GIB), "memory_reserved": GIB // 2}
        for function, answer in answers.items():
            monkeypatch.setattr(torch.cuda, function, Mock(return_value=answer))
        machine.gpu_problem.cache_clear()
        return machine.gpu_problem()

    yield put
    machine.gpu_problem.cache_clear()


@pytest.mark.parametrize(
    ("visible", "answer"),
    [
        (None, "NVIDIA A"),
        ("", "NVIDIA A"),
        ("1,0", "NVIDIA B, Max-Q"),
        ("GPU-22ab", "NVIDIA B, Max-Q"),  # as much of a UUID as is unique
        ("7", "NVIDIA A"),
        ("MIG-1", "NVIDIA A"),
    ],
)
def test_a_field_is_that_of_the_card_which_is_visible_first(monkeypatch, visible, answer):
    cards = "0, GPU-11-a, NVIDIA A\n1, GPU-22ab-c, NVIDIA B, Max-Q\n"
    run = Mock(return_value=SimpleNamespace(stdout=cards))
    monkeypatch.setattr(machine.subprocess, "run", run)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert machine.nvidia_smi("name") == answer
    assert "--query-gpu=index,uuid,name" in run.call_args.args[0]


def test_a_field_is_empty_where_there_is_no_card(monkeypatch):
    nothing = SimpleNamespace(stdout="No devices were found\n")
    for answer in (FileNotFoundError(), nothing):
        monkeypatch.setattr(machine.subprocess, "run", Mock(side_effect=[answer]))
        assert machine.nvidia_smi("name") == ""


OLD = "The NVIDIA driver on your system is too old (found version 11040)."
KERNEL = "CUDA error: no kernel image is available for execution on the device"


@pytest.mark.parametrize(
    ("facts", "problem"),
    [
        ({"cuda": None, "is_available": False}, "present, but this torch is a CPU build. Fix: pyt"),
        ({"is_available": False, "error": OLD}, f"{OLD}. Fix: update the NVIDIA driver"),
        ({"error": KERNEL}, f"RTX 4060 is present, but torch cannot compute on it: {KERNEL}. Fix"),
        # where torch knows the card, nvidia-smi may speak of another one
        ({"free_gib": 0.6, "name": "A100"}, "RTX 4060 has 0.6 GiB free"),
    ],
)
def test_an_unusable_card_is_named_with_its_fix_before_anything_trains(
    card, capsys, facts, problem
):
    assert problem in card(**facts)
    assert setup().type == "cpu"
    assert capsys.readouterr().out.startswith("!! GPU NOT USED: RTX 4060")


def test_a_usable_card_or_none_is_no_problem(card, monkeypatch):
    assert card() == "" and machine.choose_device().type == "cuda"
    assert card(name="") == ""  # no nvidia-smi, as under ROCm
    assert card(is_available=False, name="") == "" and machine.choose_device().type == "cpu"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # a choice
    assert card(is_available=False) == ""


def test_on_colab_it_is_a_problem_that_no_gpu_was_chosen(card, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "google.colab", SimpleNamespace())
    card(is_available=False, name="")
    assert setup().type == "cpu"
    said = capsys.readouterr().out
    assert said.startswith("!! GPU NOT USED: this session of Colab has none. Fix: Runtime, Change")
    assert card() == ""
    assert "is a CPU build" in card(cuda=None, is_available=False)  # one is there


@pytest.mark.parametrize(
    ("free_gib", "n_cards", "said"),
    [
        (14.2, 1, "gpu_memory_gib 14.7\n"),
        (6.2, 2, "gpu_memory_gib 14.7 (6.2 of them free), card 0 of 0 to 1 (CUDA_VISIBLE_DEVICES"),
    ],
)
def test_setup_says_what_is_free_of_a_card_and_which_it_is(
    card, monkeypatch, capsys, free_gib, n_cards, said
):
    card(free_gib=free_gib + 0.25)
    facts = {"device": "Tesla T4", "device_type": "cuda", "gpu_memory_gib": "14.7"}
    monkeypatch.setattr(machine, "environment", lambda device: facts)
    monkeypatch.setattr(session, "cap_to_free", lambda device: None)
    # what torch holds unused is free: here half of what it holds
    for function, answer in ("memory_allocated", GIB // 4), ("device_count", n_cards):
        monkeypatch.setattr(torch.cuda, function, Mock(return_value=answer))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    setup()
    assert f"device Tesla T4, {said}" in capsys.readouterr().out


@pytest.fixture
def choose(monkeypatch):
    """Return a function that sets what other programs take of four CPUs, and chooses."""
    before = torch.get_num_threads()
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(machine, "usable_cpus", lambda: 4)

    def _choose(busy: float) -> str:
        monkeypatch.setattr(machine, "busy_cpus", lambda: busy)
        return machine.choose_threads()

    machine.choose_threads.cache_clear()
    torch.set_num_threads(4)
    yield _choose
    torch.set_num_threads(before)
    machine.choose_threads.cache_clear()


@pytest.mark.parametrize("n_cpus", [4, 2])
def test_a_quiet_machine_computes_with_the_cpus_that_it_may_use(choose, monkeypatch, n_cpus):
    monkeypatch.setattr(machine, "usable_cpus", lambda: n_cpus)
    assert choose(0.3) == "" and torch.get_num_threads() == n_cpus


def test_a_busy_machine_computes_with_one_thread_and_says_so(choose, capsys):
    sentence = choose(1.0)
    assert "1.0 of 4 CPUs" in sentence and "1 thread here, not 4" in sentence
    assert choose(0.0) == sentence and torch.get_num_threads() == 1  # chosen once
    if setup().type == "cpu":
        assert f"!! {sentence}" in capsys.readouterr().out


def test_the_users_own_number_stays(choose, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert "times mean little" in choose(4.0) and torch.get_num_threads() == 4


def test_what_takes_long_shows_a_bar_and_what_is_quick_prints_nothing(monkeypatch, capsys):
    """Timing in turns, measuring a step, looking for changes that fit."""

    def work(gib):
        lab.alternate({"a": int, "b": int}, rounds=2, device=CPU)
        model, ids = lab.build_model(), lab.sequences(16)[:2]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        lab.measure_step(model, [{"input_ids": ids, "labels": ids}], lab.lm_loss_sum, optimizer)
        lab.Forecast(lab.load_config("fp32"), lab.card_of("cpu")).way_out(gib)

    work(10)
    assert capsys.readouterr() == ("", "")

    def at_once(*args, delay, **options):
        assert delay == 3
        return tqdm(*args, **options | {"mininterval": 0})

    monkeypatch.setattr(machine, "tqdm", at_once)
    work(0.001)
    said = capsys.readouterr().err  # in a notebook it would be stdout
    assert re.search("(?s)timing.*6/6.*measuring a step.*4/4.*changes tried", said)
