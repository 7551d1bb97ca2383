"""Profiles of any call: operations once each, bytes, traces, and a clock beside them."""

from __future__ import annotations

import json

import torch

from labutils.training import profiles
from tests.helpers import CPU


def call():
    x = torch.ones(64, 64)
    return torch.tanh(x @ x) * 2


def test_operations_are_counted_and_annotations_left_out():
    own = profiles.own_ms(profiles.record(call, CPU, 3), CPU)
    assert own["tanh"][1] == own["mm"][1] == 3
    assert not [name for name in own if name.startswith("ProfilerStep")]
    times = [ms for ms, _ in own.values()]
    assert times == sorted(times, reverse=True)


def test_a_trace_stays_on_disk(tmp_path, monkeypatch):
    monkeypatch.setenv("LABUTILS_RUNS", str(tmp_path / "runs"))
    path = profiles.save_trace(profiles.record_stacks(call, CPU), "one")
    assert path == tmp_path / "runs" / "one.json"
    assert json.loads(path.read_text(encoding="utf-8"))["traceEvents"]


def test_operations_are_summed_by_kind():
    own = {"addmm": (3.0, 2), "mm": (1.0, 1), "add": (0.5, 4), "_softmax": (2.0, 1)}
    own["_scaled_dot_product_flash_attention_for_cpu"] = (8.0, 1)
    found = profiles.ms_by_kind(own)
    expected = {"product": 4.0, "elementwise": 0.5, "norm or softmax": 2.0, "flash attention": 8.0}
    assert found == expected


def test_kernels_with_tensor_cores_are_told_by_name():
    kernels = {
        "ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_32x5_tn": 6.0,
        "void at::native::vectorized_elementwise_kernel<4, ...>": 1.0,
        "ampere_sgemm_128x64_tn": 1.0,
    }
    assert profiles.tensor_core_share(kernels) == 0.75
    assert profiles.tensor_core_share({}) is None


def test_a_profile_of_a_cpu_has_no_kernels():
    found = profiles.record(lambda: torch.ones(4) + 1, torch.device("cpu"))
    assert profiles.kernel_ms(found) == {}
