"""One optimizer step over a window of micro-batches: trained, measured and predicted by this.

Taught in 02, section 6.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn


def take_step(
    model: nn.Module,
    window: Iterable[Any],
    loss_fn: Callable[[nn.Module, Any], torch.Tensor],
    optimizer: torch.optim.Optimizer,
    *,
    n_targets: int | torch.Tensor,
    autocast: Callable[[], AbstractContextManager],
    scaler: torch.amp.GradScaler,
    max_grad_norm: float = 0.0,
    mean_loss: torch.Tensor | None = None,
    clip: Callable[[list[nn.Parameter], float], torch.Tensor] = nn.utils.clip_grad_norm_,
    phase: Callable[[str], object] = lambda name: None,
) -> torch.Tensor | None:
    """Update a model once, with the gradient of the mean loss over a window of micro-batches.

    `loss_fn(model, micro_batch)` returns a sum over targets; `n_targets` is their number in the
    whole window. `autocast()` returns a new context each time. The scaler of a precision that
    needs no loss scale is disabled: all its methods then pass everything through.
    Returns the gradient's norm before clipping, or None if `max_grad_norm` is 0.
    The mean loss is added to the scalar `mean_loss`, if there is one.
    `phase` is called where "forward", "backward", "optimizer" and "clear" begin.
    """
    for micro_batch in window:
        phase("forward")
        with autocast():
            # By the targets of the whole window: micro-batches may have unequal lengths.
            loss = loss_fn(model, micro_batch) / n_targets
        phase("backward")
        # Not under autocast: backward uses the dtypes that forward has chosen.
        scaler.scale(loss).backward()  # adds to the gradients of earlier micro-batches
        if mean_loss is not None:
            mean_loss += loss.detach()
        del loss  # it keeps the graph, and so the logits, alive into the next forward pass
    phase("optimizer")
    scaler.unscale_(optimizer)  # once, after the last backward and before clipping
    grad_norm = None
    if max_grad_norm:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        grad_norm = clip(parameters, max_grad_norm)
    scaler.step(optimizer)  # leaves the weights alone if a gradient is inf or NaN
    scaler.update()  # then the scale falls; after many good steps it rises
    phase("clear")
    optimizer.zero_grad(set_to_none=True)  # or the next step would add to these gradients
    return grad_norm
