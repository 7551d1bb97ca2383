"""Fine-tunes a model with all its parameters, or with adapters alone, on the same batches."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import nn

from labutils.techniques.adapters import trained
from labutils.techniques.loss import count_targets, lm_loss_sum
from labutils.training.loop import to_device
from labutils.workload.data import batches


@dataclass(frozen=True)
class Tuned:
    """Losses of a fine-tuning: of each step, and of text that is held out, before and after."""

    losses: list[float]
    before: float
    after: float


def mean_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the loss of a batch per target."""
    return lm_loss_sum(model, batch) / count_targets(batch)


def fine_tune(
    model: nn.Module,
    ids: torch.Tensor,
    held_out: torch.Tensor,
    *,
    steps: int,
    learning_rate: float,
    seed: int,
    micro_batch_size: int = 8,
) -> Tuned:
    """Train what is not frozen in `model` by AdamW, float32, on batches of `ids`, `(n, T)`.

    Equal seeds give equal batches. Weight decay is off, so that frozen and trained start alike.
    """
    device = next(model.parameters()).device
    last = to_device({"input_ids": held_out, "labels": held_out}, device)
    optimizer = torch.optim.AdamW(trained(model.parameters()), learning_rate, weight_decay=0.0)
    before, losses = _loss_of(model, last), []
    for batch in itertools.islice(batches(ids, micro_batch_size, seed), steps):
        loss = mean_loss(model, to_device(batch, device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
    return Tuned(losses, before, _loss_of(model, last))


@torch.no_grad()
def _loss_of(model: nn.Module, batch: dict[str, torch.Tensor]) -> float:
    return mean_loss(model, batch).item()
