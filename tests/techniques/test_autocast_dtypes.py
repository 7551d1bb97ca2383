"""What autocast gives: by operation, and inside a step."""

from __future__ import annotations

import torch

import labutils as lab
from labutils.techniques.autocast_dtypes import CUDA_RULES, operation_dtypes, step_dtypes
from tests.helpers import CPU


def test_every_operation_has_a_rule_and_a_dtype():
    found = operation_dtypes(CPU)
    assert list(found) == list(CUDA_RULES)
    products = ("linear", "matmul", "conv2d", "attention")
    assert all(found[name] == torch.bfloat16 for name in products)
    assert found["cross_entropy"] == found["16 bit + float32"] == torch.float32


def test_in_a_step_weights_are_float32_and_gradients_of_activations_are_not():
    model = lab.build_model("gpt2-nano")
    batch = next(lab.batches(lab.sequences(16), 1, seed=0))
    found = step_dtypes(model, batch, lab.lm_loss_sum)
    assert found["weight"] == found["the weight's .grad"] == torch.float32
    assert found["moment of AdamW"] == found["residual stream after a block"] == torch.float32
    assert found["query, key, value"] == torch.bfloat16
    assert found["gradient of query, key, value"] == torch.bfloat16
    assert not model.transformer.h[0]._forward_hooks  # nothing is left behind
