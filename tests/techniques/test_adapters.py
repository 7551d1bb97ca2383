"""LoRA beside frozen layers, and frozen layers in 4 bits."""

import copy

import pytest
import torch
from torch import nn

from labutils.techniques.adapters import (
    NF4,
    FourBitLinear,
    add_lora,
    dequantize,
    quantize,
    use_four_bits,
)

X = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("in_four_bits", [False, True])
def test_only_adapters_learn_also_through_a_layer_in_4_bits(in_four_bits):
    net = nn.Sequential(nn.Linear(64, 64, bias=False))
    if in_four_bits:
        use_four_bits(net, ["0"])
    frozen = net(X)
    add_lora(net, ["0"], 4)
    assert torch.equal(net(X), frozen)  # no effect at first
    before = copy.deepcopy(net.state_dict())
    trained = [p for p in net.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, 0.05, foreach=False)
    for _ in range(20):
        net(X).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    moved = {name for name, now in net.state_dict().items() if not torch.equal(now, before[name])}
    assert moved == {"0.lora_a.weight", "0.lora_b.weight"}
    learned = net[0].lora_b(net[0].lora_a(X))
    assert torch.allclose(net(X), frozen + 2 * learned, atol=1e-6)


def test_what_cannot_be_replaced_is_refused():
    net = nn.Sequential(nn.Linear(64, 64))
    with pytest.raises(ValueError, match="no layer is called query"):
        add_lora(net, ["query"], 4)
    with pytest.raises(TypeError, match="has a bias"):
        use_four_bits(net, ["0"])


def test_every_weight_becomes_the_nearest_of_sixteen_codes():
    codes = torch.tensor(NF4)
    assert codes.equal(codes.sort().values)
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
