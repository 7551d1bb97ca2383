"""Which bytes tensors take, what autograd keeps of them, and how gradients differ.

Taught in 03, section 1.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.hooks import RemovableHandle


def tensor_bytes(tensors: Sequence[torch.Tensor]) -> int:
    """Return the bytes of the storages behind some tensors, each storage once."""
    return sum(
        {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values()
    )


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the tensors that an optimizer keeps. For Adam: two moments per parameter."""
    return [
        t
        for state in optimizer.state.values()
        for t in state.values()
        if isinstance(t, torch.Tensor)
    ]


def flat_gradient(module: nn.Module) -> torch.Tensor:
    """Return the gradients of all parameters one behind the other: `(n_parameters,)`, a copy.

    Raises ValueError if a parameter has none.
    """
    parts = []
    for name, parameter in module.named_parameters():
        if parameter.grad is None:
            raise ValueError(f"{name} has no gradient: call backward() first")
        parts.append(parameter.grad.flatten())
    return torch.cat(parts)


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


@contextmanager
def saved_for_backward(
    module: nn.Module, label: Callable[[torch.Tensor], Hashable] = lambda tensor: "kept"
) -> Iterator[Counter]:
    """Count the bytes that autograd keeps for the backward pass of what is computed inside.

    Yields a Counter, `{label(tensor): bytes}`; its `total()` is the sum. Each storage counts once,
    under the first tensor that is saved of it. Weights of `module` do not count: they stand
    anyway. Keep the result of the forward pass until the block ends: if its graph is freed
    earlier, another tensor can take the place of a counted one and is missed.
    """
    seen = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    kept: Counter = Counter()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            kept[label(tensor)] += storage.nbytes()
        return tensor.detach()  # the tensor itself would be held by its own graph, for ever

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield kept


def on_loss_begin(model: nn.Module, call: Callable[[], None]) -> RemovableHandle:
    """Call back where the forward phase ends: behind the last block of a Hugging Face model (its
    head makes logits), behind a whole module that has no `base_model`.
    """
    return getattr(model, "base_model", model).register_forward_hook(lambda *_: call())
