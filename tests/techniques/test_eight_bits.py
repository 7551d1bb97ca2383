"""FP8 emulated: what is stored, which scales, and products beside those of the hardware."""

from __future__ import annotations

import pytest
import torch

import labutils as lab
from labutils.techniques.eight_bits import (
    fp8_rounded,
    fp8_scale,
    replace_products,
    rounded_product,
)

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FORMATS = {E4M3: lab.numerics.E4M3, E5M2: lab.numerics.E5M2}


@pytest.mark.parametrize("dtype", FORMATS)
def test_numbers_of_the_format_stay_and_others_move_by_half_a_spacing(dtype):
    patterns = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    stored = patterns[patterns.isfinite()]
    assert torch.equal(fp8_rounded(stored, dtype, scale=1.0), stored)
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    errors = (fp8_rounded(x, dtype, scale=1.0) - x).abs()
    limits = torch.tensor([FORMATS[dtype].spacing(value) / 2 for value in x.tolist()])
    assert (errors <= limits).all() and (errors > limits / 2).any()


@pytest.mark.parametrize("dtype", FORMATS)
def test_beyond_the_range_numbers_saturate_and_nan_stays(dtype):
    largest = torch.finfo(dtype).max
    x = torch.tensor([2 * largest, -1e9, float("inf"), float("nan")])
    found = fp8_rounded(x, dtype, scale=1.0)
    assert found[:3].tolist() == [largest, -largest, largest] and found[3].isnan()


@pytest.mark.parametrize("size", [1e-12, 1.0, 1e12])
def test_a_scale_makes_the_error_independent_of_the_size(size):
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)) * size
    assert fp8_scale(x, E4M3) * x.abs().max() == pytest.approx(448)
    error = (fp8_rounded(x, E4M3) - x).norm() / x.norm()
    assert 0.01 < error < 0.04
    assert torch.equal(fp8_rounded(torch.zeros(4), E4M3), torch.zeros(4))


def test_an_outlier_spoils_its_own_block_alone():
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    spoiled = x.clone()
    spoiled[2, 5] = 2.0**24
    whole, blocks = fp8_rounded(spoiled, E4M3), fp8_rounded(spoiled, E4M3, block=16)
    assert (whole == 0).sum() == x.numel() - 1
    lost = blocks == 0
    assert lost.sum() == 15 and lost[2, :16].sum() == 15
    assert fp8_scale(spoiled, E4M3, block=16).shape == (8, 4, 1)
    with pytest.raises(ValueError, match="do not divide"):
        fp8_rounded(x, E4M3, block=24)


def product_of(dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (the product of the hardware or of torch, the emulated one), K = 512."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 512, generator=generator).to(device)
    weight = torch.randn(512, 32, generator=generator).to(device)
    scales = fp8_scale(x, dtype), fp8_scale(weight, E4M3)
    x8 = (x * scales[0]).to(dtype)
    weight8 = (weight * scales[1]).to(E4M3).T.contiguous().T  # by columns
    found = torch._scaled_mm(
        x8, weight8, scale_a=1 / scales[0], scale_b=1 / scales[1], out_dtype=torch.float32
    )
    return found, fp8_rounded(x, dtype) @ fp8_rounded(weight, E4M3)


@pytest.mark.parametrize("dtype", FORMATS)
def test_the_emulation_gives_what_torch_gives_on_a_cpu(dtype):
    found, emulated = product_of(dtype, torch.device("cpu"))
    assert (found - emulated).norm() < 1e-5 * emulated.norm()  # the order of sums in float32


@pytest.mark.gpu
@pytest.mark.gpu_card  # a product of the tensor cores
@pytest.mark.parametrize("dtype", FORMATS)
def test_the_emulation_gives_what_the_hardware_gives(dtype):
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("no FP8 products before compute capability 8.9 (Ada, Hopper)")
    found, emulated = product_of(dtype, torch.device("cuda"))
    # tensor cores keep about 14 bits of a sum (2412.19437); rounding to FP8 is an error of 4e-2
    assert (found - emulated).norm() < 2e-3 * emulated.norm()


def test_the_products_of_all_linear_layers_of_the_blocks_are_replaced():
    model = lab.build_model("gpt2-nano", dropout=0.0).eval()
    ids = torch.arange(32)[None]
    before = model(ids).logits
    shapes = []

    def product(x, weight):
        shapes.append((tuple(x.shape), tuple(weight.shape)))
        return x @ weight

    assert replace_products(model, product) == 16
    assert torch.allclose(model(ids).logits, before, atol=1e-5)
    assert len(shapes) == 16
    assert shapes[0] == ((32, 128), (128, 384))
    replace_products(model, lambda x, weight: 0 * (x @ weight))
    assert not torch.allclose(model(ids).logits, before, atol=1e-2)


def test_all_three_products_of_a_layer_have_rounded_operands():
    generator = torch.Generator().manual_seed(0)
    x, weight, gradient = (
        torch.randn(n, k, generator=generator) for n, k in ((6, 8), (8, 4), (6, 4))
    )
    x.requires_grad_(), weight.requires_grad_()
    product = rounded_product(lambda v: fp8_rounded(v, E4M3), lambda v: fp8_rounded(v, E5M2))
    result = product(x, weight)
    result.backward(gradient)
    x4, w4 = fp8_rounded(x.detach(), E4M3), fp8_rounded(weight.detach(), E4M3)
    g5 = fp8_rounded(gradient, E5M2)
    assert torch.equal(result, x4 @ w4)
    assert torch.equal(x.grad, g5 @ w4.T) and torch.equal(weight.grad, x4.T @ g5)
    assert not torch.equal(g5, fp8_rounded(gradient, E4M3))
