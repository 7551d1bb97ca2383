"""The same training on the processes of `accelerate launch -m labutils run CONFIG`.

Every process trains the same model on its share of a step's micro-batches, and Accelerate lets
them exchange gradients: by DDP, or as its own settings say (on CPUs always by DDP; sharding has not
been tried yet). A process that runs alone needs no Accelerate: everything here then does nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from accelerate import Accelerator


def world_size() -> int:
    """Return the number of processes."""
    return int(os.environ.get("WORLD_SIZE", 1))


def rank() -> int:
    """Return this process's number, from 0; only number 0 prints and saves."""
    return int(os.environ.get("RANK", 0))


@cache
def accelerator() -> Accelerator:
    """Return Accelerate's own view of several processes, which it joins."""
    from accelerate import Accelerator  # an extra, which only such processes need

    # autocast is the config's
    return Accelerator(cpu=not torch.cuda.is_available(), mixed_precision="no")


def own_device(device: torch.device) -> torch.device:
    """Return this process's device: on CUDA each has a card of its own."""
    return accelerator().device if world_size() > 1 else device


def from_first(value: Any) -> Any:
    """Return in every process what process number 0 has given: all must decide alike."""
    box = [value]
    if world_size() > 1:
        torch.distributed.broadcast_object_list(box, src=0)
    return box[0]


class _Loss(nn.Module):
    """A loss function as a module's forward pass, which is what Accelerate prepares."""

    def __init__(self, model: nn.Module, loss_fn: Callable[[nn.Module, Any], torch.Tensor]) -> None:
        super().__init__()
        self.model, self.loss_fn = model, loss_fn

    def forward(self, batch: Any) -> torch.Tensor:
        return self.loss_fn(self.model, batch)


class Replicas:
    """One model in every process, and its optimizer."""

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[[nn.Module, Any], torch.Tensor],
        optimizer: torch.optim.Optimizer,
    ) -> None:
        self.loss, self.optimizer, self.size = _Loss(model, loss_fn), optimizer, world_size()
        if self.size > 1:
            self.loss, self.optimizer = accelerator().prepare(self.loss, optimizer)

    def in_turn(self, window: Sequence[Any]) -> Iterator[Any]:
        """Yield a step's micro-batches; gradients are exchanged after the last one only."""
        for i, micro_batch in enumerate(window, start=1):
            waits = self.size > 1 and i < len(window)
            # Entered here, this lasts until the next micro-batch is asked for: after backward.
            with accelerator().no_sync(self.loss) if waits else nullcontext():
                yield micro_batch

    def mean(self, value: Any) -> Any:
        """Return the mean of the processes' values, as a tensor; the value itself in one process.

        A loss divided by the mean number of targets gives each process a gradient whose mean over
        the processes is that of them all.
        """
        if self.size == 1:
            return value
        tensor = torch.as_tensor(value, dtype=torch.float32, device=accelerator().device).clone()
        return accelerator().reduce(tensor, reduction="mean")
