"""LoRA (Hu et al. 2021, arXiv 2106.09685): small trained matrices beside frozen layers."""

from __future__ import annotations

import math
from collections.abc import Collection

import torch
from torch import nn
from torch.nn import functional as F


class WithLora(nn.Module):
    """A frozen layer, plus `alpha / rank` times the product of two trained matrices.

    `layer` is an `nn.Linear`, GPT-2's `Conv1D`, or another module with `sizes`, `(n_in, n_out)`.
    The matrices have the dtype of its weight, or `dtype` if it has none of a trainable dtype.
    """

    def __init__(
        self, layer: nn.Module, rank: int, alpha: float, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        self.layer, self.scale = layer.requires_grad_(False), alpha / rank
        n_in, n_out = sizes_of(layer)
        weight = getattr(layer, "weight", None)
        tensors = [*layer.parameters(), *layer.buffers()]
        made = {"dtype": dtype if weight is None else weight.dtype, "device": tensors[0].device}
        self.lora_a = nn.Parameter(torch.empty(rank, n_in, **made))
        self.lora_b = nn.Parameter(torch.zeros(n_out, rank, **made))
        nn.init.kaiming_uniform_(self.lora_a, a=math.sqrt(5))  # as peft does

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + F.linear(F.linear(x, self.lora_a), self.lora_b) * self.scale


def sizes_of(layer: nn.Module) -> tuple[int, int]:
    """Return (inputs, outputs) of a layer. Raises TypeError for one that has no such sizes."""
    if isinstance(layer, nn.Linear):
        return layer.in_features, layer.out_features
    if hasattr(layer, "sizes"):
        return layer.sizes
    if hasattr(layer, "nf") and hasattr(layer, "nx"):  # transformers' Conv1D: weight (in, out)
        return layer.nx, layer.nf
    raise TypeError(f"{type(layer).__name__} is no linear layer")


def add_lora(
    model: nn.Module,
    names: Collection[str],
    rank: int,
    alpha: float | None = None,
    dtype: torch.dtype = torch.float32,
) -> nn.Module:
    """Freeze `model`, and wrap each layer whose own name is in `names`; return the model.

    `alpha` is twice the rank if it is not given; `dtype` is for layers in 4 bits.
    Raises ValueError if no layer has such a name.
    """
    model.requires_grad_(False)
    found = []
    for parent in model.modules():
        found += [(parent, name) for name, _ in parent.named_children() if name in names]
    if not found:
        raise ValueError(f"no layer is called {' or '.join(names)}")
    for parent, name in found:
        layer = WithLora(getattr(parent, name), rank, alpha or 2 * rank, dtype)
        setattr(parent, name, layer)
    return model


def trained(parameters: object) -> list[nn.Parameter]:
    """Return those of some parameters that are not frozen."""
    return [p for p in parameters if p.requires_grad]
