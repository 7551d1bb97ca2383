"""Data-parallel training on the processes that `torchrun` starts.

Each process trains the same model on its share of a step's micro-batches. PyTorch's
DistributedDataParallel takes the processes' mean gradient once a step. In a single process
everything here does nothing.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def join(device: torch.device) -> torch.device:
    """Let the processes of a torchrun talk, and return this one's device.

    Without torchrun that is `device` itself. On CUDA, process number i takes card number i.
    """
    if not dist.is_torchelastic_launched():
        return device
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    if not dist.is_initialized():  # once for all runs of a process
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        atexit.register(dist.destroy_process_group)
    return device


def world_size() -> int:
    """Return the number of processes; 1 without torchrun."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """Return this process's number, from 0; only number 0 prints and saves."""
    return dist.get_rank() if dist.is_initialized() else 0


def from_first(value: Any) -> Any:
    """Return in every process what process number 0 has given: all must decide alike."""
    box = [value]
    if dist.is_initialized():
        dist.broadcast_object_list(box, src=0)
    return box[0]


class _Loss(nn.Module):
    """A loss function as a module's forward pass, which is what DistributedDataParallel wraps."""

    def __init__(self, model: nn.Module, loss_fn: Callable[[nn.Module, Any], torch.Tensor]) -> None:
        super().__init__()
        self.model, self.loss_fn = model, loss_fn

    def forward(self, batch: Any) -> torch.Tensor:
        return self.loss_fn(self.model, batch)


class Replicas:
    """One model in every process of the group."""

    def __init__(self, model: nn.Module, loss_fn: Callable[[nn.Module, Any], torch.Tensor]) -> None:
        self.size, self.device = world_size(), next(model.parameters()).device
        self.loss = _Loss(model, loss_fn)
        if self.size > 1:
            ids = [self.device.index] if self.device.type == "cuda" else None
            self.loss = DistributedDataParallel(
                self.loss, device_ids=ids, gradient_as_bucket_view=True
            )

    def in_turn(self, window: Sequence[Any]) -> Iterator[Any]:
        """Yield a step's micro-batches; gradients are exchanged after the last one only."""
        for i, micro_batch in enumerate(window, start=1):
            is_last = i == len(window)
            # Entered here, this lasts until the next micro-batch is asked for: after backward.
            with nullcontext() if is_last or self.size == 1 else self.loss.no_sync():
                yield micro_batch

    def mean(self, value: Any) -> Any:
        """Return the mean of the processes' values, as a tensor.

        In a single process this is the value as it is. A loss divided by the mean number of
        targets gives each process a gradient whose mean over the processes is that of them all.
        """
        if self.size == 1:
            return value
        tensor = torch.as_tensor(value, device=self.device).clone()
        dist.all_reduce(tensor)
        return tensor / self.size


def traffic(model: nn.Module) -> str:
    """Return in words what is exchanged in a step."""
    n_bytes, dtypes = 0, set()
    for p in model.parameters():
        n_bytes += p.numel() * p.element_size()
        dtypes.add(str(p.dtype).removeprefix("torch."))  # gradients have it too, autocast or not
    kinds = " and ".join(sorted(dtypes))
    return f"{world_size()} processes, gradients in {kinds}: {n_bytes / 2**20:.1f} MiB once a step"
