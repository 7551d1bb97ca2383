"""Which bytes tensors take, and where the loss begins."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle


def tensor_bytes(tensors: Sequence[torch.Tensor]) -> int:
    """Return the bytes of the storages behind some tensors, each storage once."""
    return sum(
        {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values()
    )


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the tensors an optimizer keeps from step to step:

    For Adam, two moments per parameter.
    """
    return [
        t
        for state in optimizer.state.values()
        for t in state.values()
        if isinstance(t, torch.Tensor)
    ]


def on_loss_begin(model: nn.Module, call: Callable[[], None]) -> RemovableHandle:
    """Call back where the forward phase ends: behind the last block of a Hugging Face model (its
    head makes logits), behind a whole module that has no `base_model`.
    """
    return getattr(model, "base_model", model).register_forward_hook(lambda *_: call())
