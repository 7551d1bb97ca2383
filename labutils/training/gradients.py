"""A window's gradient, and how far it is from the right one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from labutils.memory.tensors import flat_gradient


@dataclass(frozen=True)
class GradientDifference:
    """How a gradient differs from the right one: three numbers without unit.

    `error` is the norm of the difference, `length` the norm, both relative to the right one's norm.
    `cosine` is that of the angle between the two: 1 means the same direction.
    """

    error: float
    length: float
    cosine: float

    def __str__(self) -> str:
        times = f"{self.length:.2f} times as long"
        return f"error {self.error:.1e}, {times}, cosine {self.cosine:.3f}"


def compare_gradients(gradient: torch.Tensor, right: torch.Tensor) -> GradientDifference:
    """Return how `gradient` differs from `right`, both `(n_parameters,)`; `right` is not all 0."""
    norm = right.norm()
    return GradientDifference(
        error=((gradient - right).norm() / norm).item(),
        length=(gradient.norm() / norm).item(),
        cosine=F.cosine_similarity(gradient, right, dim=0).item(),
    )


def window_gradient(
    model: nn.Module,
    window: Iterable[Any],
    loss_fn: Callable[[nn.Module, Any], torch.Tensor],
) -> torch.Tensor:
    """Return the sum of the gradients of `loss_fn(model, micro_batch)`, a scalar, over a window.

    The result is `(n_parameters,)`, a copy. Gradients that stood in `.grad` before are lost.
    """
    model.zero_grad(set_to_none=True)
    for micro_batch in window:
        loss_fn(model, micro_batch).backward()
    return flat_gradient(model)
