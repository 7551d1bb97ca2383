"""What autocast makes of single operations, and the dtype of each tensor of a training step."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

SIXTEEN, WIDE, OWN = "16 bit", "float32", "on no list: as its input"
# CUDA's rule for each operation: PyTorch's documentation of AMP, and autocast_mode.h of its source.
CUDA_RULES = {
    "linear": SIXTEEN,
    "matmul": SIXTEEN,
    "conv2d": SIXTEEN,
    "attention": "16 bit (in the source, not in the documentation)",
    "layer_norm": WIDE,
    "softmax": WIDE,
    "exp": WIDE,
    "pow": WIDE,
    "sum": WIDE,
    "mse_loss": WIDE,
    "cross_entropy": WIDE,
    "batch_norm": OWN,
    "gelu": OWN,
    "16 bit + float32": "on no list: the wider of the two",
}


def operation_dtypes(device: torch.device) -> dict[str, torch.dtype]:
    """Return {operation of CUDA_RULES: dtype of its result} under BF16 autocast on a device.

    The first four get float32 inputs, the others BF16 ones. Tensors have at most 8×8 numbers.
    """
    x, image = torch.randn(8, 8, device=device), torch.randn(2, 3, 8, 8, device=device)
    low, filters = x.to(torch.bfloat16), torch.randn(4, 3, 3, 3, device=device)
    heads = x[None, None]
    mean, variance = torch.zeros(8, device=device), torch.ones(8, device=device)
    operations: dict[str, Callable[[], torch.Tensor]] = {
        "linear": partial(F.linear, x, x),
        "matmul": partial(torch.matmul, x, x),
        "conv2d": partial(F.conv2d, image, filters),
        "attention": partial(F.scaled_dot_product_attention, heads, heads, heads),
        "layer_norm": partial(F.layer_norm, low, (8,)),
        "softmax": partial(torch.softmax, low, -1),
        "exp": partial(torch.exp, low),
        "pow": partial(torch.pow, low, 2),
        "sum": partial(torch.sum, low),
        "mse_loss": partial(F.mse_loss, low, low),
        "cross_entropy": partial(F.cross_entropy, low, torch.arange(8, device=device)),
        "batch_norm": partial(F.batch_norm, low, mean, variance, training=True),
        "gelu": partial(F.gelu, low),
        "16 bit + float32": partial(torch.add, low, x),
    }
    with torch.autocast(device.type, dtype=torch.bfloat16):
        return {name: run().dtype for name, run in operations.items()}
