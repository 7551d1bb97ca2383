"""Data-parallel training on the processes that `torchrun` starts: PyTorch's
DistributedDataParallel, and little else.

Each process trains the same model on its share of a step's micro-batches; gradients are summed over
the processes once a step. In a single process everything here does nothing.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def join(where: torch.device) -> torch.device:
    """Let the processes of a torchrun talk, and return this one's device. Without torchrun: `where`
    itself.

    Gloo on CPUs; NCCL on CUDA, where process number i takes card number i.
    """
    if not dist.is_torchelastic_launched():
        return where
    if where.type == "cuda":
        where = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(where)
    if not dist.is_initialized():  # once for all runs of a process
        dist.init_process_group("nccl" if where.type == "cuda" else "gloo")
        atexit.register(dist.destroy_process_group)
    return where


def world_size() -> int:
    """Return the number of processes; 1 without torchrun."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """Return this process's number, from 0; only number 0 prints and saves."""
    return dist.get_rank() if dist.is_initialized() else 0


def from_first(value: Any) -> Any:
    """Return what process number 0 has given, in every process:

    They must not decide differently.
    """
    box = [value]
    if dist.is_initialized():
        dist.broadcast_object_list(box, src=0)
    return box[0]


class _Loss(nn.Module):
    """A loss function as a module's forward pass:

    What DistributedDataParallel can wrap, whatever the loss calls.
    """

    def __init__(self, model: nn.Module, loss_fn: Callable[[nn.Module, Any], torch.Tensor]) -> None:
        super().__init__()
        self.model, self.loss_fn = model, loss_fn

    def forward(self, batch: Any) -> torch.Tensor:
        return self.loss_fn(self.model, batch)


class Replicas:
    """One model in every process of the group."""

    def __init__(self, model: nn.Module, loss_fn: Callable[[nn.Module, Any], torch.Tensor]) -> None:
        self.size, self.where = world_size(), next(model.parameters()).device
        self.loss = _Loss(model, loss_fn)
        if self.size > 1:
            ids = [self.where.index] if self.where.type == "cuda" else None
            self.loss = DistributedDataParallel(
                self.loss, device_ids=ids, gradient_as_bucket_view=True
            )

    def accumulating(self, is_last: bool) -> AbstractContextManager:
        """Around forward and backward pass:

        Gradients are exchanged after a step's last micro-batch only.
        """
        return nullcontext() if is_last or self.size == 1 else self.loss.no_sync()

    def total(self, value: Any) -> Any:
        """Return the sum of the processes' values, as a tensor; in a single process the value as it
        is.
        """
        if self.size == 1:
            return value
        tensor = torch.as_tensor(value, device=self.where).clone()
        dist.all_reduce(tensor)
        return tensor


def traffic(model: nn.Module) -> str:
    """Return in words what is exchanged in a step:

    Gradients have the weights' dtype, whatever autocast does.
    """
    n_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    dtypes = sorted({str(p.dtype).removeprefix("torch.") for p in model.parameters()})
    return f"{world_size()} processes, gradients in {' and '.join(dtypes)}: {n_bytes / 2**20:.1f} MiB once a step"
