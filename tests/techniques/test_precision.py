from types import SimpleNamespace

import pytest
import torch

from labutils import machine
from labutils.config.card import Card, Gpu
from labutils.config.choices import PRECISIONS
from labutils.config.reader import load_config
from labutils.config.schema import precision_on, resolve
from labutils.techniques import precision
from labutils.training.run import datasheet_tflops
from tests.helpers import CPU


def gpu(capability) -> Card:
    return Card("some card", 8.0, Gpu(capability, 40, 1024))


CARDS = {  # compute capability → precisions with fast hardware, emulated, and refused ones
    "T4": ((7, 5), {"fp16"}, {"bf16"}, {"tf32"}),
    "A100": ((8, 0), {"fp16", "tf32", "bf16"}, set(), set()),
}


@pytest.mark.parametrize("card", CARDS)
def test_support_of_named_cards(card):
    capability, fast, slow, refused = CARDS[card]
    answers = {p: gpu(capability).support(p) for p in ("tf32", "fp16", "bf16")}
    assert {p for p, a in answers.items() if not a.ok} == refused
    assert {p for p, a in answers.items() if a.ok and a.slow} == slow
    assert {p for p, a in answers.items() if a.ok and not a.slow} == fast
    assert all(a.reason for a in answers.values())
    assert all("fp16" in answers[p].reason for p in refused | slow)


def test_emulated_bf16_is_slow(monkeypatch):
    """Asked for BF16 on a T4, torch says yes, as if it had hardware for it."""
    facts = SimpleNamespace(
        name="", major=7, minor=5, multi_processor_count=40, max_threads_per_multi_processor=1024
    )
    monkeypatch.setattr(
        torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: facts)
    monkeypatch.setattr(machine, "free_bytes", lambda device: 2**33)
    t4 = machine.card(torch.device("cuda"))
    assert t4.support("bf16").slow and not t4.support("fp16").slow
    steps = {name: resolve(load_config(name), t4).steps for name in ("fp16", "bf16")}
    assert steps == {"fp16": 60, "bf16": 8}


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
def test_autocast_gives_the_dtype_of_the_precision_and_only_fp16_is_scaled(name, dtype):
    with precision.autocast(name, CPU):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == dtype
    assert precision.grad_scaler(name, CPU).is_enabled() == (name == "fp16")


def test_16bit_is_no_precision_until_a_card_decides():
    with pytest.raises(ValueError, match="'16bit' is not one of the precisions"):
        precision.autocast("16bit", CPU)
    assert [precision_on("16bit", gpu(c)) for c in ((8, 0), (7, 5))] == ["bf16", "fp16"]
    assert [precision_on(p, gpu((7, 5))) for p in PRECISIONS] == list(PRECISIONS)


@pytest.mark.parametrize(
    ("card", "fp16"),
    [
        ("NVIDIA H200", 989.4),
        ("NVIDIA H100 PCIe", 756.0),
        ("Tesla T4", 65.0),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA H200 NVL", None),
        ("NVIDIA RTX A1000 Laptop GPU", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
    ],
)
def test_datasheet_peak_belongs_to_the_very_card(card, fp16):
    assert datasheet_tflops(card).get("float16") == fp16
