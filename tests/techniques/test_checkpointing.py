import pytest
import torch

from labutils.memory.tensors import flat_gradient
from labutils.techniques.checkpointing import on_host, set_checkpointing
from labutils.techniques.loss import lm_loss_sum
from labutils.workload.gpt2 import build_model


def gradient(model) -> torch.Tensor:
    ids = torch.zeros((2, 16), dtype=torch.int64)
    model.zero_grad()
    torch.manual_seed(1)  # of dropout
    lm_loss_sum(model, {"input_ids": ids, "labels": ids}).backward()
    return flat_gradient(model)


def test_a_model_switched_to_a_policy_is_one_built_with_it():
    switched = build_model(n_layer=3, dropout=0.1)
    names = list(switched.state_dict())
    for policy in ("every_2", "selective", "none"):
        set_checkpointing(switched, policy)
        built = build_model(n_layer=3, dropout=0.1, gradient_checkpointing=policy)
        assert type(switched.transformer.h) is type(built.transformer.h)
        assert list(switched.state_dict()) == names
        assert torch.equal(gradient(switched), gradient(built))
    before = switched.transformer.h
    with pytest.raises(ValueError, match="not one of"):
        set_checkpointing(switched, "blocks")
    assert switched.transformer.h is before


def test_offload_copies_activations_and_leaves_parameters_where_they_are():
    weight, kept = torch.nn.Parameter(torch.ones(2)), torch.arange(3.0)
    assert on_host(weight)() is weight
    bring_back = on_host(kept)
    kept.zero_()
    assert bring_back().tolist() == [0, 1, 2]
