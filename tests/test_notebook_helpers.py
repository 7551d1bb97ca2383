"""The small helpers that notebooks use in place of a repeated phrase."""

import pytest
import torch
from torch import nn

import labutils as lab
from labutils.memory.ledger import MemoryLedger
from tests.helpers import CPU, two_layers


def test_a_ledger_tells_its_peak_in_three_units():
    phases = {"forward": {"activations": 2**20}, "backward": {"gradients": 3 * 2**29}}
    ledger = MemoryLedger(phases=phases, method="made up")
    assert (ledger.peak_bytes, ledger.peak_mib, ledger.peak_gib) == (3 * 2**29, 1536, 1.5)
    assert (lab.mib(2**19), lab.gib(2**31)) == (0.5, 2)


def test_sequences_are_the_training_part_of_the_offline_text():
    train, _ = lab.load_corpus(min_tokens=20_000).split(16)
    assert torch.equal(lab.sequences(16), train)
    assert lab.sequences(16, min_tokens=600_000).numel() > train.numel()


def test_a_batch_is_moved_with_all_its_tensors():
    batch = {"x": torch.ones(2), "deep": {"y": torch.ones(1)}, "name": "kept as it is"}
    moved = lab.to_device(batch, torch.device("meta"))
    assert moved["x"].is_meta and moved["deep"]["y"].is_meta
    assert moved["name"] == "kept as it is"
    assert lab.to_device(batch["x"], CPU).device == CPU


def test_a_flat_gradient_has_every_parameter_in_order():
    net = two_layers()
    net(torch.ones(3, 4)).sum().backward()
    flat = lab.flat_gradient(net)
    parts = [parameter.grad.flatten() for parameter in net.parameters()]
    assert torch.equal(flat, torch.cat(parts))
    net.zero_grad(set_to_none=False)
    assert flat.norm() > 0  # a copy: what happens to .grad later does not reach it
    net[2].bias.grad = None
    with pytest.raises(ValueError, match=r"2\.bias has no gradient"):
        lab.flat_gradient(net)


def test_views_of_one_storage_count_once_and_weights_not_at_all():
    layer = nn.Linear(8, 8, bias=False)
    x = torch.ones(4, 8, requires_grad=True)
    for weights_of, n_bytes in ((layer, 0), (nn.Identity(), layer.weight.nbytes)):
        with lab.saved_for_backward(weights_of) as kept:
            output = layer(x).sum() + (x[:2] * x[2:]).sum() + layer(x.view(2, 2, 8)).sum()
        assert kept.total() == x.nbytes + n_bytes
        output.backward()
        assert x.grad.all()  # the graph still works
