"""What autocast gives: by operation, and inside a step."""

from __future__ import annotations

import torch

from labutils.techniques.autocast_dtypes import CUDA_RULES, operation_dtypes
from tests.helpers import CPU


def test_every_operation_has_a_rule_and_a_dtype():
    found = operation_dtypes(CPU)
    assert list(found) == list(CUDA_RULES)
    products = ("linear", "matmul", "conv2d", "attention")
    assert all(found[name] == torch.bfloat16 for name in products)
    assert found["cross_entropy"] == found["16 bit + float32"] == torch.float32
