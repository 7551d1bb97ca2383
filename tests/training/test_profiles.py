"""Profiles of any call: operations once each, and their sums by kind."""

import torch

from labutils.training import profiles
from tests.helpers import CPU


def test_operations_are_counted_and_annotations_left_out():
    x = torch.ones(64, 64)
    own = profiles.own_ms(profiles.record(lambda: torch.tanh(x @ x) * 2, CPU, 3), CPU)
    assert own["tanh"][1] == own["mm"][1] == 3
    assert not [name for name in own if name.startswith("ProfilerStep")]
    times = [ms for ms, _ in own.values()]
    assert times == sorted(times, reverse=True)


def test_operations_are_summed_by_kind():
    own = {"addmm": (3.0, 2), "mm": (1.0, 1), "add": (0.5, 4), "_softmax": (2.0, 1)}
    own["_scaled_dot_product_flash_attention_for_cpu"] = (8.0, 1)
    expected = {"product": 4.0, "elementwise": 0.5, "norm or softmax": 2.0, "flash attention": 8.0}
    assert profiles.ms_by_kind(own) == expected
