from __future__ import annotations

import pytest
import torch

from labutils.memory.tensors import flat_gradient
from labutils.techniques.checkpointing import on_host, set_checkpointing
from labutils.techniques.loss import lm_loss_sum
from labutils.workload.gpt2 import build_model


def test_a_model_switched_to_a_policy_is_one_built_with_it():
    switched = build_model(n_layer=3, dropout=0.1)
    names = [name for name, _ in switched.named_parameters()]
    ids = torch.zeros((2, 16), dtype=torch.int64)
    for policy in ("every_2", "selective", "none", "block"):
        set_checkpointing(switched, policy)
        built = build_model(n_layer=3, dropout=0.1, gradient_checkpointing=policy)
        assert type(switched.transformer.h) is type(built.transformer.h)
        assert [name for name, _ in switched.named_parameters()] == names
        gradients = []
        for model in (switched, built):
            model.zero_grad()
            torch.manual_seed(1)
            lm_loss_sum(model, {"input_ids": ids, "labels": ids}).backward()
            gradients.append(flat_gradient(model))
        assert torch.equal(*gradients)


def test_offload_copies_activations_and_leaves_parameters_where_they_are():
    weight, kept = torch.nn.Parameter(torch.ones(2)), torch.arange(3.0)
    assert on_host(weight)() is weight
    bring_back = on_host(kept)
    kept.zero_()
    assert bring_back().tolist() == [0, 1, 2]


def test_an_unknown_policy_leaves_the_model_alone():
    model = build_model(n_layer=2, gradient_checkpointing="block")
    before = model.transformer.h
    with pytest.raises(ValueError, match="not one of"):
        set_checkpointing(model, "blocks")
    assert model.transformer.h is before
