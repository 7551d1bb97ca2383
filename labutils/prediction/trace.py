"""Trace one training step on *fake* tensors: what is alive, and when.

The step is the very one that trains (`take_step`), inside a log of operations and storages. From
its events come the ledger (which bytes are alive at each moment) and the requests that an
allocator gets (`prediction.allocator`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from labutils.memory.ledger import (
    ACTIVATIONS,
    CAST_WEIGHTS,
    GRADIENTS,
    LOGITS,
    OPTIMIZER,
    PARAMETERS,
    TEMPORARIES,
    WORKSPACES,
)
from labutils.memory.tensors import on_loss_begin, optimizer_tensors
from labutils.prediction.fusion import fuse
from labutils.prediction.storage_log import BIRTH, DEATH, Event, Segment, Storage, StorageLog
from labutils.techniques.optimizer_in_backward import OptimizerInBackward
from labutils.techniques.step import take_step

CATEGORIES = (
    PARAMETERS,
    GRADIENTS,
    OPTIMIZER,
    ACTIVATIONS,
    CAST_WEIGHTS,
    LOGITS,
    TEMPORARIES,
    WORKSPACES,
)
LASTING = (PARAMETERS, OPTIMIZER, WORKSPACES)  # what is alive from one step to the next


@dataclass(frozen=True)
class Trace:
    """The first step of a training run.

    `standing` are parameters and buffers, in the order in which they are made. In this step the
    optimizer makes its state, so later steps are this one without what lasts (LASTING). Where a
    second step was traced because it differs, its segments follow.
    """

    standing: list[Storage]
    segments: list[Segment]

    def step(self, number: int) -> list[Segment]:
        """Return the segments of a step, those of the last traced step for all later ones."""
        last = self.segments[-1].step
        return [segment for segment in self.segments if segment.step == min(number, last)]

    def lasting(self) -> list[Storage]:
        """Return what is alive before every step but the first."""
        found = list(self.standing)
        for segment in self.segments:
            for event in segment.events:
                if event.kind == BIRTH and event.storage.category in LASTING:
                    found.append(event.storage)
        return found


def trace_step(
    model: nn.Module,
    micro_batches: Sequence[Any],
    loss_fn: Callable[[nn.Module, Any], torch.Tensor],
    optimizer: torch.optim.Optimizer | OptimizerInBackward,
    log: StorageLog,
    *,
    autocast: Callable[[], AbstractContextManager] = nullcontext,
    loss_scale: float | None = None,
    max_grad_norm: float = 0.0,
    keep_outputs: bool = False,
) -> Trace:
    """Take the first step of a run on fake tensors inside `log` and return its trace.

    `loss_fn` returns the loss to differentiate: it has divided by the number of targets, if at all.
    `keep_outputs` traces a loop whose variable `outputs` holds the logits until the next forward
    pass has replaced them. That takes two steps.
    """
    for tensor in tensors_in_order(model):
        log.name(tensor, PARAMETERS)
    standing = [log.of(tensor) for tensor in tensors_in_order(model)]
    handles = _name_gradients(model, log)
    if isinstance(optimizer, OptimizerInBackward):
        optimizer.attach()  # after those hooks: a gradient has a name before it is freed
    kept: dict[str, Any] = {}  # what a loop's variables hold until the next step

    def keep(model: nn.Module, inputs: Any, outputs: Any) -> None:
        kept["outputs"] = outputs

    def traced_loss(model: nn.Module, micro_batch: Any) -> torch.Tensor:
        loss = loss_fn(model, log.on_device(micro_batch))
        # All that is traced of a GradScaler, whose other work is on a few scalars.
        return loss * torch.tensor(loss_scale) if loss_scale else loss

    def window() -> Iterator[Any]:
        for log.micro_batch, micro_batch in enumerate(micro_batches):
            yield micro_batch
        log.micro_batch = None

    def clip(parameters: list[nn.Parameter], max_norm: float) -> torch.Tensor:
        # clip_grad_norm_ in its two halves: a segment repeats one part only (see `extrapolation`)
        log.in_lists = True
        kept["norm"] = nn.utils.get_total_norm([p.grad for p in parameters])
        log.begin("optimizer")
        nn.utils.clip_grads_with_norm_(parameters, max_norm, kept["norm"])
        log.in_lists = False
        return kept["norm"]

    def begin(phase: str) -> None:
        if phase != "clear":  # to the ledger that is the end of the optimizer's phase
            log.begin(phase)

    if keep_outputs:
        handles.append(model.register_forward_hook(keep))
    handles.append(on_loss_begin(model, lambda: log.begin("loss")))
    for log.step in range(1 + keep_outputs):
        take_step(
            model,
            window(),
            traced_loss,
            _GroupByGroup(optimizer, log),
            n_targets=_Undivided(),
            autocast=autocast,
            # A scaler cannot run here: it reads whether a gradient is inf, and there is no data.
            scaler=torch.amp.GradScaler("cpu", enabled=False),
            max_grad_norm=max_grad_norm,
            clip=clip,
            phase=begin,
        )
        for tensor in optimizer_tensors(optimizer):
            log.name(tensor, OPTIMIZER)
    for handle in handles:
        handle.remove()
    log.events = []  # what dies from here on dies with the run
    _order_deaths(log.segments)
    fuse(log.segments)
    return Trace(standing, log.segments)


class _Undivided:
    """In place of a number of targets: a loss divided by this is the same tensor."""

    def __rtruediv__(self, loss: torch.Tensor) -> torch.Tensor:
        return loss


class _GroupByGroup:
    """An optimizer that takes one parameter group after the other: each is a segment."""

    def __init__(
        self, optimizer: torch.optim.Optimizer | OptimizerInBackward, log: StorageLog
    ) -> None:
        self.optimizer, self.log = optimizer, log

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    def step(self) -> None:
        self._each_group(self.optimizer.step)

    def zero_grad(self, set_to_none: bool) -> None:
        self._each_group(self.optimizer.zero_grad)

    def _each_group(self, call: Callable[[], Any]) -> None:
        self.log.begin("optimizer")
        if isinstance(self.optimizer, OptimizerInBackward):
            call()
            return
        groups = self.optimizer.param_groups
        for group in groups:
            self.optimizer.param_groups = [group]
            call()
            self.log.begin("optimizer")
        self.optimizer.param_groups = groups


def _name_gradients(model: nn.Module, log: StorageLog) -> list[RemovableHandle]:
    """Let each gradient be named as soon as backward has finished it."""
    handles = []
    for p in model.parameters():
        if not p.requires_grad:
            continue  # frozen: it has no gradient
        handle = p.register_post_accumulate_grad_hook(lambda p: log.name(p.grad, GRADIENTS))
        handles.append(handle)
    return handles


def tensors_in_order(module: nn.Module) -> Iterator[torch.Tensor]:
    """Yield a module's parameters and buffers, each once, in the order of `module.to(device)`."""
    found: dict[int, torch.Tensor] = {}
    for child in module.children():
        for tensor in tensors_in_order(child):
            found.setdefault(id(tensor), tensor)
    for tensor in (*module._parameters.values(), *module._buffers.values()):
        if tensor is not None:
            found.setdefault(id(tensor), tensor)
    return iter(found.values())


def _order_deaths(segments: list[Segment]) -> None:
    """Sort deaths that follow each other by birth.

    Autocast forgets cast weights in an order that differs each time.
    """
    number: dict[int, int] = {}
    for segment in segments:
        for event in segment.events:
            if event.kind == BIRTH:
                number[id(event.storage)] = len(number)
    for segment in segments:
        ordered: list[Event] = []
        for are_deaths, run in itertools.groupby(segment.events, key=_is_death):
            if are_deaths:
                run = sorted(run, key=lambda event: number.get(id(event.storage), -1))
            ordered += run
        segment.events[:] = ordered


def _is_death(event: Event) -> bool:
    return event.kind == DEATH
