from __future__ import annotations

import os
import subprocess
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

import labutils as lab
from labutils import machine
from labutils.config.card import Card, Gpu, PrecisionUnsupported
from labutils.config.choices import PRECISIONS
from labutils.config.schema import fewer_steps, precision_on, resolve
from labutils.machine import matmul_rate
from labutils.techniques import precision
from labutils.training.runs import datasheet_tflops, peak_rate
from tests.helpers import CPU


def gpu(capability, bf16=None) -> Card:
    return Card("some card", 8.0, Gpu(capability, 40, 1024, bf16))


CARDS = {  # compute capability, BF16 hardware → precisions with fast hardware, precisions refused
    "GTX 1080": ((6, 1), False, set(), {"tf32", "bf16"}),
    "V100": ((7, 0), False, {"fp16"}, {"tf32", "bf16"}),
    "T4": ((7, 5), False, {"fp16"}, {"tf32", "bf16"}),
    "A100": ((8, 0), True, {"fp16", "tf32", "bf16"}, set()),
    "RTX 4090": ((8, 9), True, {"fp16", "tf32", "bf16"}, set()),
    "H200": ((9, 0), True, {"fp16", "tf32", "bf16"}, set()),
}


@pytest.mark.parametrize("card", CARDS)
def test_support_of_named_cards(card):
    capability, bf16, fast, refused = CARDS[card]
    answers = {p: gpu(capability, bf16).support(p) for p in ("tf32", "fp16", "bf16")}
    assert {p for p, a in answers.items() if not a.ok} == refused
    assert {p for p, a in answers.items() if a.ok and not a.slow} == fast
    assert all(a.reason for a in answers.values())
    assert all("use fp16" in answers[p].reason for p in refused)


def test_emulated_bf16_is_not_support(monkeypatch):
    """Asked for BF16 on a T4, torch says yes unless emulation is left out."""
    facts = SimpleNamespace(
        major=7, minor=5, multi_processor_count=40, max_threads_per_multi_processor=1024
    )
    monkeypatch.setattr(
        torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: facts)
    monkeypatch.setattr(machine, "free_bytes", lambda device: 2**33)
    answers = {p: machine.support(p, torch.device("cuda")).ok for p in PRECISIONS}
    assert answers == {"fp32": True, "tf32": False, "fp16": True, "bf16": False, "pure_bf16": False}


def test_tf32_is_refused_on_a_cpu_with_a_way_out():
    with pytest.raises(PrecisionUnsupported, match=r"tf32 cannot run here.*use fp32"):
        machine.card(CPU).require("tf32")


def test_cpu_probe_answers_from_the_measured_ratio(monkeypatch):
    for ratio, slow in ((1.1, False), (80.0, True)):
        monkeypatch.setattr(machine, "cpu_slowdown", lambda dtype, ratio=ratio: ratio)
        assert machine.support("bf16", CPU).slow is slow


def test_slow_precision_runs_fewer_steps_never_more():
    assert [fewer_steps(n) for n in (4, 60, 800)] == [4, 8, 100]
    config = lab.load_config("bf16")
    for ratio, steps in ((80.0, 8), (1.1, 60)):
        cpu = Card("cpu", 8.0, slowdown=lambda dtype, ratio=ratio: ratio)
        run = resolve(config, cpu, to_train=True)
        assert (run.steps, run.config.steps) == (steps, 60) and "bfloat16" in run.reason


def test_tf32_switch_is_put_back():
    before = torch.backends.cuda.matmul.fp32_precision
    with pytest.raises(RuntimeError, match="inside"), precision.tf32(True):
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
        raise RuntimeError("inside")
    with precision.tf32(False):
        assert torch.backends.cuda.matmul.fp32_precision == "ieee"
    assert torch.backends.cuda.matmul.fp32_precision == before


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("fp32", torch.float32),
        ("fp16", torch.float16),
        ("bf16", torch.bfloat16),
        ("pure_bf16", torch.float32),  # whose weights are BF16 already: what is not stays as it is
    ],
)
def test_autocast_gives_the_dtype_of_the_precision(name, dtype):
    with precision.autocast(name, CPU):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == dtype


ASKED = {
    "autocast": lambda name: precision.autocast(name, CPU),
    "grad_scaler": lambda name: precision.grad_scaler(name, CPU),
    "support": lambda name: machine.support(name, CPU),
    "support of a card": lambda name: gpu((8, 0)).support(name),
    "require": lambda name: machine.card(CPU).require(name),
    "peak_rate": lambda name: peak_rate(name, CPU),
}


@pytest.mark.parametrize("ask", ASKED.values(), ids=list(ASKED))
def test_what_is_no_precision_is_refused_with_the_choices(ask):
    with pytest.raises(ValueError, match="fp32, tf32, fp16, bf16, pure_bf16"):
        ask("half")


def test_16bit_is_no_precision_until_a_card_decides():
    with pytest.raises(ValueError, match="'16bit' is not one of the precisions"):
        precision.autocast("16bit", CPU)
    assert [precision_on("16bit", gpu(c)) for c in ((8, 0), (7, 5))] == ["bf16", "fp16"]
    assert [precision_on(p, gpu((7, 5))) for p in PRECISIONS] == list(PRECISIONS)
    with pytest.raises(ValueError, match="'half'"):
        precision_on("half", gpu((8, 0)))


def test_only_fp16_is_scaled():
    scaled = {p for p in PRECISIONS if precision.grad_scaler(p, CPU).is_enabled()}
    assert scaled == {"fp16"}


@pytest.mark.parametrize(
    ("card", "fp16"),
    [
        ("NVIDIA H200", 989.4),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.0),
        ("Tesla T4", 65.0),
        ("NVIDIA RTX A1000 Laptop GPU", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        ("NVIDIA H200 NVL", None),
        ("NVIDIA GeForce RTX 4060", None),
    ],
)
def test_datasheet_peak_belongs_to_the_very_card(card, fp16):
    assert datasheet_tflops(card).get("float16") == fp16


def test_peak_rate_of_a_known_card_is_its_datasheets(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    rates = {p: peak_rate.__wrapped__(p, torch.device("cuda"))[0] for p in PRECISIONS}
    tflops = {"fp32": 66.9, "tf32": 494.7, "fp16": 989.4, "bf16": 989.4, "pure_bf16": 989.4}
    assert {p: rate / 1e12 for p, rate in rates.items()} == pytest.approx(tflops)


def test_peak_rate_says_where_it_is_from():
    rate, source = peak_rate("fp32", CPU)
    assert rate > 1e8
    assert "measured here" in source


@pytest.mark.parametrize("failing", [False, True])
def test_probing_puts_the_number_of_threads_back(failing, monkeypatch):
    def broken():
        raise RuntimeError("inside")

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        if failing:
            monkeypatch.setattr(machine.time, "thread_time", broken)
        with pytest.raises(RuntimeError, match="inside") if failing else nullcontext():
            matmul_rate(torch.float32, CPU, 8)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.fixture
def busy_machine():
    """More programs that compute than there are CPUs."""
    loop = [sys.executable, "-c", "while True: pass"]
    programs = [subprocess.Popen(loop) for _ in range(2 + (os.cpu_count() or 1))]
    yield
    for program in programs:
        program.kill()
        program.wait()


@pytest.mark.busy
def test_what_is_slow_does_not_depend_on_what_else_runs(busy_machine):
    """By the clock, two threads that wait for each other give ratios from 0.0 to 200.

    A factor of 3 remains possible: a program on the same core takes its share of the caches and of
    the core.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for dtype in (torch.float16, torch.bfloat16):
            ratios = [
                machine.cpu_slowdown.__wrapped__(str(dtype).removeprefix("torch."))
                for _ in range(5)
            ]
            assert max(ratios) < 3 * min(ratios), ratios
    finally:
        torch.set_num_threads(threads)


def test_the_peak_of_a_cpu_is_its_fastest_product(monkeypatch):
    rates = {torch.float32: 1e12, torch.bfloat16: 3e12, torch.float16: 5e11}
    monkeypatch.setattr(machine, "matmul_rate", lambda dtype, device, n: rates[dtype])
    monkeypatch.setattr(
        machine, "cpu_slowdown", lambda name: rates[torch.float32] / rates[getattr(torch, name)]
    )
    found = {p: peak_rate.__wrapped__(p, CPU) for p in ("fp32", "fp16", "bf16", "pure_bf16")}
    assert {p: rate for p, (rate, _) in found.items()} == {
        "fp32": 1e12,
        "fp16": 1e12,
        "bf16": 3e12,
        "pure_bf16": 3e12,
    }
    assert "bfloat16" in found["bf16"][1] and "float32" in found["fp16"][1]
