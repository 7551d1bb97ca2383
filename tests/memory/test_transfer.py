from __future__ import annotations

from functools import partial

import pytest
import torch

from labutils.memory import transfer
from tests.helpers import CPU


def test_a_cpu_copies_nothing_to_itself():
    assert transfer.copy_gb_per_s(2**20, CPU) == {}


def test_the_fastest_copy_of_each_kind_counts(monkeypatch):
    """CUDA's calls are replaced: the arithmetic and the two kinds of source are what is tested."""
    seconds = iter([4.0, 2.0, 3.0, 1.0])  # two repeats, pageable first
    monkeypatch.setattr(transfer, "cuda_seconds", lambda copy, times: next(seconds))
    monkeypatch.setattr(torch.Tensor, "pin_memory", torch.Tensor.clone)
    monkeypatch.setattr(torch, "empty", partial(_empty, torch.empty))
    found = transfer.copy_gb_per_s(10**9 // 1000, torch.device("cuda"), repeats=2)
    assert found == {"pageable": pytest.approx(0.0005), "pinned": pytest.approx(0.001)}


def _empty(real, size, dtype, device):
    assert device == torch.device("cuda")
    return real(size, dtype=dtype)
