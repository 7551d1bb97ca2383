"""LoRA beside frozen layers, and frozen layers in 4 bits."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import labutils as lab
from labutils.memory.ledger import OPTIMIZER
from labutils.techniques.adapters import (
    NF4,
    FourBitLinear,
    add_lora,
    dequantize,
    quantize,
    trained,
    use_four_bits,
)


@pytest.fixture
def ids() -> torch.Tensor:
    return lab.sequences(32)[:8]


def nano() -> nn.Module:
    return lab.build_model("gpt2-nano", dropout=0.0)


def losses_of(model: nn.Module, ids: torch.Tensor, steps: int) -> list[float]:
    """Train what is not frozen on the same few sequences, and return the loss of each step."""
    batch = {"input_ids": ids, "labels": ids}
    optimizer = torch.optim.AdamW(trained(model.parameters()), 1e-2)
    losses = []
    for _ in range(steps):
        loss = lab.lm_loss_sum(model, batch) / lab.count_targets(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_only_adapters_learn(ids):
    model = add_lora(nano(), ["c_attn", "c_fc"], 4)
    before = copy.deepcopy(model.state_dict())
    losses = losses_of(model, ids, steps=4)
    moved = {name for name, now in model.state_dict().items() if not torch.equal(now, before[name])}
    assert moved and all("lora_" in name for name in moved)
    assert losses[-1] < losses[0]
    with pytest.raises(ValueError, match="no layer is called query"):
        add_lora(model, ["query"], 4)


def test_peft_does_the_same(ids):
    peft = pytest.importorskip("peft")
    ours = add_lora(nano(), ["c_attn"], rank=4)
    settings = {"r": 4, "lora_alpha": 8, "lora_dropout": 0.0, "fan_in_fan_out": True}
    theirs = peft.get_peft_model(
        nano(), peft.LoraConfig(target_modules=["c_attn"], task_type="CAUSAL_LM", **settings)
    )
    own = [p for name, p in ours.named_parameters() if "lora_a" in name]
    other = [p for name, p in theirs.named_parameters() if "lora_A" in name]
    with torch.no_grad():
        for a, b in zip(own, other, strict=True):
            b.copy_(a)
    assert losses_of(ours, ids, 5) == pytest.approx(losses_of(theirs, ids, 5), rel=1e-6)


def adamw(parameters):
    return torch.optim.AdamW(trained(parameters), foreach=False)


def test_the_predicted_bytes_of_adapters_are_measured(ids):
    batch = {"input_ids": ids[:4], "labels": ids[:4]}
    model = add_lora(nano(), ["c_attn"], 8)
    predicted = lab.predict_module(model, batch, lab.lm_loss_sum, adamw, device="cpu")
    optimizer = adamw(model.parameters())
    lab.lm_loss_sum(model, batch).backward()
    optimizer.step()
    measured = lab.measure_step(model, [batch], lab.lm_loss_sum, optimizer)
    assert predicted.peak_bytes == pytest.approx(measured.peak_bytes, rel=0.005)
    n_trained = sum(p.numel() for p in trained(model.parameters()))
    assert measured.categories[OPTIMIZER] == pytest.approx(8 * n_trained, rel=0.01)


def test_every_weight_becomes_the_nearest_of_sixteen_codes():
    codes = torch.tensor(NF4)
    assert len(codes) == 16 and codes.equal(codes.sort().values)
    weight = torch.randn(6, 64, generator=torch.Generator().manual_seed(0))
    packed, scales = quantize(weight, codes)
    distances = (weight[:, :, None] - scales[:, None, None] * codes).abs()
    error = (dequantize(packed, scales, codes, torch.float32) - weight).abs()
    assert torch.allclose(error, distances.amin(2), atol=1e-6)
    assert packed.nbytes == weight.numel() // 2


def test_a_four_bit_layer_is_its_rounded_weight_forward_and_backward():
    weight = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
    layer = FourBitLinear(weight)
    x = torch.randn(3, 64, requires_grad=True)
    layer(x).square().sum().backward()
    plain = x.detach().clone().requires_grad_()
    rounded = dequantize(layer.packed, layer.scales, layer.codes, torch.float32).view(32, 64)
    assert (rounded - weight).norm() < 0.12 * weight.norm()
    (plain @ rounded.T).square().sum().backward()
    assert torch.allclose(x.grad, plain.grad, rtol=1e-4, atol=1e-4)


def test_a_four_bit_layer_learns_through_its_adapter():
    net = nn.Sequential(nn.Linear(64, 64, bias=False))
    use_four_bits(net, ["0"])
    add_lora(net, ["0"], 4)
    optimizer = torch.optim.Adam(trained(net.parameters()), 0.05)
    x = torch.randn(16, 64)
    losses = []
    for _ in range(20):
        loss = net(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]
    assert len(trained(net.parameters())) == 2
    with pytest.raises(TypeError, match="without a bias"):
        use_four_bits(nn.Sequential(nn.Linear(64, 64)), ["0"])
