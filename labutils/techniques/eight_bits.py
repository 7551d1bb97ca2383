"""Eight-bit floats, emulated: numbers rounded as FP8 stores them, and products of such numbers.

A product of two FP8 numbers is exact in float32. So rounding the operands and multiplying in
float32 gives what FP8 hardware gives, but for float32's roundings of scales and sums. Works on
every device.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import nn

Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Rounding = Callable[[torch.Tensor], torch.Tensor]


def fp8_scale(x: torch.Tensor, dtype: torch.dtype, block: int = 0) -> torch.Tensor:
    """Return the scale that takes the largest of |x| to the largest number of an FP8 `dtype`.

    A scalar, float32; with `block` one for so many consecutive numbers of the last dimension, of
    shape `(..., n_blocks, 1)`. 1 where all of x is 0. Raises ValueError if blocks do not divide it.
    """
    sizes = x.detach().float().abs()
    largest = _in_blocks(sizes, block).amax(dim=-1, keepdim=True) if block else sizes.amax()
    return torch.where(largest > 0, torch.finfo(dtype).max / largest, 1.0)


def fp8_rounded(
    x: torch.Tensor, dtype: torch.dtype, block: int = 0, scale: torch.Tensor | float | None = None
) -> torch.Tensor:
    """Return what is left of x after a trip through FP8: scaled, rounded, and scaled back; float32.

    Without a `scale` it is that of `fp8_scale`. Beyond the range it saturates: versions of torch
    differ in what they make of such numbers. A NaN stays.
    """
    if scale is None:
        scale = fp8_scale(x, dtype, block)
    scaled = (_in_blocks(x.float(), block) if block else x.float()) * scale
    limit = torch.finfo(dtype).max
    stored = scaled.clamp(-limit, limit).to(dtype).float()
    return (stored / scale).view(x.shape)


def _in_blocks(x: torch.Tensor, block: int) -> torch.Tensor:
    if x.shape[-1] % block:
        raise ValueError(f"blocks of {block} do not divide {x.shape[-1]} numbers")
    return x.unflatten(-1, (-1, block))


def rounded_product(operand: Rounding, gradient: Rounding) -> Product:
    """Return a product (x, weight) that rounds the operands of a linear layer's three products.

    `x` is `(tokens, n_in)`, `weight` `(n_in, n_out)`. `operand` rounds both, `gradient` rounds the
    gradient of the result. The gradients of x and of the weight are products of that rounded
    gradient with the other rounded operand. Sums and results have the dtype of the roundings.
    """

    class RoundedProduct(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            operands = operand(x), operand(weight)
            ctx.save_for_backward(*operands)
            return operands[0] @ operands[1]

        @staticmethod
        def backward(ctx: Any, of_result: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            x, weight = ctx.saved_tensors
            rounded = gradient(of_result)
            return rounded @ weight.T, x.T @ rounded

    return RoundedProduct.apply


def replace_products(model: nn.Module, product: Product) -> int:
    """Let `product(x, weight)` multiply in every linear layer of GPT-2's blocks; return how many.

    `x` is `(tokens, n_in)` and `weight` `(n_in, n_out)`, as transformers' Conv1D stores it. Biases
    are added as before. Embeddings and the output layer stay: recipes keep them in more bits.
    """
    n_replaced = 0
    for layer in model.modules():
        if type(layer).__name__ == "Conv1D":
            layer.product = product
            layer.forward = MethodType(_forward, layer)
            n_replaced += 1
    return n_replaced


def _forward(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y = layer.product(x.flatten(0, -2), layer.weight) + layer.bias
    return y.view(*x.shape[:-1], -1)
