"""Predict for any module, not only for a config's GPT-2."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from labutils import machine
from labutils.config.card import Card
from labutils.memory.ledger import MemoryLedger
from labutils.prediction import replay
from labutils.prediction.allocator import DEFAULT
from labutils.prediction.memory import Prediction
from labutils.prediction.trace import ON_CPU, Trace, fake_world, trace_step
from labutils.techniques.precision import autocast


def predict_module(
    model: nn.Module,
    batch: Any,
    loss_fn: Callable[[nn.Module, Any], torch.Tensor],
    optimizer: Callable[[Any], torch.optim.Optimizer],
    *,
    precision: str = "fp32",
    device: str | torch.device | Card = "a100",
) -> MemoryLedger:
    """Return the predicted ledger of one step of any module: `loss_fn(model, batch)` is a scalar.

    `optimizer` makes one from parameters, for example `torch.optim.AdamW`. On a card it updates
    lists of tensors where torch does so by default. The module is left alone.
    Raises ValueError for an unknown precision.
    """
    card = machine.card_of(device)
    trace = traced_module(model, batch, loss_fn, optimizer, precision, card)
    if card.gpu is None:
        return replay.ledger(trace, 1, "predicted for cpu", None)
    return Prediction(trace, 1, card.name, DEFAULT).ledger


def traced_module(
    model: nn.Module,
    batch: Any,
    loss_fn: Callable[[nn.Module, Any], torch.Tensor],
    optimizer: Callable[[Any], torch.optim.Optimizer],
    precision: str,
    card: Card,
) -> Trace:
    """Return the trace of one step of any module on a card. The module is left alone."""
    # without data, and on the CPU wherever the batch lies
    without_data = tree_map_only(torch.Tensor, _empty_on_cpu, batch)
    with fake_world(card.gpu) as (log, fake):
        # a deep copy in which every tensor already has its fake counterpart
        memo = {}
        for tensor in (*model.parameters(), *model.buffers()):
            memo[id(tensor)] = _twin(tensor)
        twin = copy.deepcopy(model, memo)
        updates = optimizer(twin.parameters())
        if card.gpu:
            _take_lists(updates)
        return trace_step(
            twin.train(),
            [tree_map_only(torch.Tensor, fake.from_tensor, without_data)],
            loss_fn,
            updates,
            log,
            autocast=partial(autocast, precision, ON_CPU),
        )


def _take_lists(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer update lists of tensors where CUDA's default does: nothing else was chosen.

    Its temporaries are then as large as all tensors of a group, not as one (`foreach` in the
    documentation of `torch.optim.AdamW`).
    """
    for group in optimizer.param_groups:
        is_open = group.get("foreach", False) is None
        if is_open and not group.get("fused") and not group.get("differentiable"):
            group["foreach"] = True


def _empty_on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype)


def _twin(tensor: torch.Tensor) -> torch.Tensor:
    twin = _empty_on_cpu(tensor)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(twin, requires_grad=tensor.requires_grad)
    return twin
