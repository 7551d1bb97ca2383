"""LoRA (Hu et al. 2021, arXiv 2106.09685): small trained matrices beside frozen layers, whose
weights may be in 4 bits (QLoRA, Dettmers et al. 2023, arXiv 2305.14314).

Plain torch, for teaching and for tracing; the library `bitsandbytes` has kernels for 4 bits.

Taught in adapters, section 5.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from torch import nn
from torch.nn import functional as F

BLOCK = 64  # 4-bit weights that share a scale
# The codes of NF4: quantiles of a normal distribution (QLoRA, appendix E).
NF4 = (-1.0, -0.6961928, -0.52507305, -0.39491749, -0.28444138, -0.18477343, -0.09105004, 0.0)
NF4 += (0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0)


class WithLora(nn.Module):
    """A frozen layer, plus twice the product of two trained matrices of a rank and a dtype.

    `layer` is an `nn.Linear` or a `FourBitLinear`.
    """

    def __init__(self, layer: nn.Module, rank: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer = layer
        self.lora_a = nn.Linear(layer.in_features, rank, bias=False, dtype=dtype)
        self.lora_b = nn.Linear(rank, layer.out_features, bias=False, dtype=dtype)
        nn.init.zeros_(self.lora_b.weight)  # no effect at first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # alpha / rank is 2.0, with an alpha of twice the rank
        return self.layer(x) + self.lora_b(self.lora_a(x)) * 2.0


def add_lora(
    model: nn.Module, names: Collection[str], rank: int, dtype: torch.dtype = torch.float32
) -> None:
    """Freeze `model`, and wrap each layer whose own name is in `names`.

    `dtype` is that of the matrices. Raises ValueError if no layer has such a name.
    """
    model.requires_grad_(False)
    _replace(model, names, lambda layer: WithLora(layer, rank, dtype))


def use_four_bits(model: nn.Module, names: Collection[str]) -> None:
    """Replace each `nn.Linear` whose own name is in `names`.

    Raises TypeError for one with a bias: it would be lost. Raises ValueError if no layer has such a
    name.
    """

    def four_bits(layer: nn.Linear) -> FourBitLinear:
        if layer.bias is not None:
            raise TypeError(f"a layer has a bias, which would be lost: {layer}")
        return FourBitLinear(layer.weight)

    _replace(model, names, four_bits)


def _replace(
    model: nn.Module, names: Collection[str], make: Callable[[nn.Module], nn.Module]
) -> None:
    """Put `make(layer)` in the place of each layer whose own name is in `names`."""
    paths = [path for path, _ in model.named_modules() if path.split(".")[-1] in names]
    if not paths:
        raise ValueError(f"no layer is called {' or '.join(names)}")
    for path in paths:
        model.set_submodule(path, make(model.get_submodule(path)))


def quantize(weight: torch.Tensor, codes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a weight as two codes a byte, `(n / 2,)` uint8, and a scale per block, `(n / 64,)`.

    Each number becomes the nearest of 16 `codes` times its block's scale, which is the largest
    magnitude in the block.
    """
    blocks = weight.detach().float().view(-1, BLOCK)
    scales = blocks.abs().amax(1)
    # Codes rise, so the numbers half-way between them tell which one is nearest. A block of zeros
    # has a scale of 0, which divides nothing.
    between = (codes[1:] + codes[:-1]) / 2
    index = torch.bucketize(blocks / scales.clamp(min=1e-30)[:, None], between).to(torch.uint8)
    pairs = index.view(-1, 2)
    return pairs[:, 0] * 16 + pairs[:, 1], scales


def dequantize(
    packed: torch.Tensor, scales: torch.Tensor, codes: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Return the numbers, `(n / 64, 64)`, that `quantize` has coded."""
    codes = codes.to(dtype)
    # 256 rows of two numbers, one for each byte
    table = torch.stack([codes.repeat_interleave(16), codes.repeat(16)], 1)
    # looked up, two numbers at once; an embedding takes no uint8
    numbers = F.embedding(packed.int(), table).view(len(scales), -1)
    return numbers.mul_(scales.to(dtype)[:, None])


class _FourBitProduct(torch.autograd.Function):
    """x · Wᵀ; the weight is made for the product and freed, in forward and again in backward."""

    @staticmethod
    def forward(ctx, x, packed, scales, codes):
        ctx.save_for_backward(packed, scales, codes)
        weight = dequantize(packed, scales, codes, x.dtype).view(-1, x.shape[-1])
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx, grad):
        weight = dequantize(*ctx.saved_tensors, grad.dtype).view(grad.shape[-1], -1)
        return grad @ weight, None, None, None


class FourBitLinear(nn.Module):
    """A frozen linear layer without a bias; its weight, given as `(n_out, n_in)`, is kept in NF4.

    On the meta device there are sizes without values, and the scales are 8-bit numbers: as many
    bytes as QLoRA's double quantisation keeps.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        # By name: where a model is made on the meta device, codes need values still.
        codes = torch.tensor(NF4, device="cpu" if weight.is_meta else weight.device)
        if weight.is_meta:
            packed = torch.empty(weight.numel() // 2, dtype=torch.uint8, device="meta")
            scales = torch.empty(weight.numel() // BLOCK, dtype=torch.uint8, device="meta")
        else:
            packed, scales = quantize(weight, codes)
        self.register_buffer("packed", packed)
        self.register_buffer("scales", scales)
        self.register_buffer("codes", codes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _FourBitProduct.apply(x, self.packed, self.scales, self.codes)
