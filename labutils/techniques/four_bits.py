"""Frozen weights in 4 bits: NF4 codes, a scale per block of 64, and scales that are quantised, too.

Source: QLoRA, Dettmers et al. 2023 (arXiv 2305.14314). Ours is plain torch, for teaching and for
tracing; the library `bitsandbytes` has kernels for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist

import torch
from torch import nn
from torch.nn import functional as F

BLOCK = 64  # weights that share a scale
SCALES_BLOCK = 256  # scales that share a scale of their own


def nf4_codes() -> torch.Tensor:
    """Return the 16 numbers of NF4, `(16,)`: quantiles of a normal distribution, from -1 to 1.

    Eight are positive, seven negative, and zero is exact. The outermost quantile is the mean of
    1 - 1/30 and 1 - 1/32, as in bitsandbytes.
    """
    outermost = 1 - (1 / 30 + 1 / 32) / 2
    positive = torch.linspace(outermost, 0.5, 9, device="cpu")[:-1].tolist()
    negative = torch.linspace(outermost, 0.5, 8, device="cpu")[:-1].tolist()
    quantile = NormalDist().inv_cdf
    codes = [quantile(p) for p in positive] + [0.0] + [-quantile(p) for p in negative]
    found = torch.tensor(sorted(codes), device="cpu")
    return found / found.max()


@dataclass(frozen=True)
class FourBit:
    """A weight in 4 bits: two codes a byte `(n / 2,)` uint8, and a scale per block `(n / 64,)`."""

    packed: torch.Tensor
    scales: torch.Tensor
    codes: torch.Tensor
    shape: torch.Size

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return the weight again, rounded to what 4 bits can say."""
        return _dequantized(self.packed, self.scales, self.codes, self.shape, dtype)


def quantize(weight: torch.Tensor, codes: torch.Tensor, block: int = BLOCK) -> FourBit:
    """Return `weight` with each number replaced by the nearest code times its block's scale.

    The scale of a block is its largest magnitude. Raises ValueError if blocks do not come out even.
    """
    if weight.numel() % block or block % 2:
        raise ValueError(f"{weight.numel()} weights are no whole number of blocks of {block}")
    blocks = weight.detach().float().view(-1, block)
    scales = blocks.abs().amax(1)
    between = (codes[1:] + codes[:-1]) / 2
    index = torch.bucketize(blocks / scales.clamp(min=1e-30)[:, None], between).to(torch.uint8)
    pairs = index.view(-1, 2)
    return FourBit(pairs[:, 0] * 16 + pairs[:, 1], scales, codes, weight.shape)


def double_quantized(scales: torch.Tensor, block: int = SCALES_BLOCK) -> torch.Tensor:
    """Return the scales as 8-bit numbers would give them back: a mean, and a scale per `block`.

    QLoRA keeps 8-bit floating-point numbers here; ours are 255 equally distant ones.
    """
    mean = scales.mean()
    centred = F.pad(scales - mean, (0, -len(scales) % block)).view(-1, block)
    step = centred.abs().amax(1, keepdim=True).clamp(min=1e-30) / 127
    return ((centred / step).round() * step).flatten()[: len(scales)] + mean


def bits_per_weight(block: int = BLOCK, double: bool = True) -> float:
    """Return the bits of a code with its share of the scales."""
    return 4 + (8 / block + 32 / (block * SCALES_BLOCK) if double else 32 / block)


def _dequantized(
    packed: torch.Tensor,
    scales: torch.Tensor,
    codes: torch.Tensor,
    shape: torch.Size,
    dtype: torch.dtype,
) -> torch.Tensor:
    full = F.pad(codes, (0, 16 - len(codes))).to(dtype)
    # 256 rows of two numbers, one for each byte
    table = torch.stack([full.repeat_interleave(16), full.repeat(16)], 1)
    numbers = F.embedding(packed.int(), table).view(len(scales), -1)
    return numbers.mul_(scales.to(dtype)[:, None]).view(shape)


class _FourBitProduct(torch.autograd.Function):
    """x · Wᵀ; the weight is made for the product and freed, in forward and again in backward."""

    @staticmethod
    def forward(ctx, x, packed, scales, codes, shape):
        ctx.save_for_backward(packed, scales, codes)
        ctx.shape = shape
        return F.linear(x, _dequantized(packed, scales, codes, shape, x.dtype))

    @staticmethod
    def backward(ctx, grad):
        weight = _dequantized(*ctx.saved_tensors, ctx.shape, grad.dtype)
        return grad @ weight, None, None, None, None


class FourBitLinear(nn.Module):
    """A frozen linear layer whose weight is kept in NF4; `sizes` are (inputs, outputs).

    `shape` is that of the weight, `(n_out, n_in)`. The scales are 8-bit numbers where `weight` is
    None, as many bytes as double quantisation keeps: for tracing, without values.
    """

    def __init__(self, shape: torch.Size, weight: torch.Tensor | None = None) -> None:
        super().__init__()
        self.sizes = (shape[1], shape[0])
        self.shape = shape
        n = shape.numel()
        if weight is None:
            packed = torch.empty(n // 2, dtype=torch.uint8)
            scales = torch.empty(n // BLOCK, dtype=torch.uint8)
        else:
            made = quantize(weight, nf4_codes())
            packed, scales = made.packed, double_quantized(made.scales)
        self.register_buffer("packed", packed)
        self.register_buffer("scales", scales)
        self.register_buffer("codes", nf4_codes())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _FourBitProduct.apply(x, self.packed, self.scales, self.codes, self.shape)


def use_four_bits(model: nn.Module, names: tuple[str, ...], *, keep_values: bool = True) -> None:
    """Replace each `nn.Linear` whose own name is in `names`.

    Raises TypeError for another module, and for one with a bias: it would be lost.
    """
    found = []
    for parent in model.modules():
        found += [(parent, name) for name, _ in parent.named_children() if name in names]
    for parent, name in found:
        layer = getattr(parent, name)
        if not isinstance(layer, nn.Linear) or layer.bias is not None:
            raise TypeError(f"{name} is no nn.Linear without a bias: {layer}")
        values = layer.weight if keep_values else None
        setattr(parent, name, FourBitLinear(layer.weight.shape, values))
