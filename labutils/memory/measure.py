"""Measure what one training step takes: its peak by phase and category."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from labutils.memory.cpu_recorder import CpuRecorder
from labutils.memory.cuda_recorder import CudaRecorder
from labutils.memory.ledger import MemoryLedger
from labutils.memory.tensors import when_loss_begins
from labutils.techniques.loss import count_targets
from labutils.techniques.optimizers import StepInBackward


def measure_step(
    model: nn.Module,
    micro_batches: Sequence[Any],
    loss_fn: Callable[[nn.Module, Any], torch.Tensor],
    optimizer: torch.optim.Optimizer,
    *,
    count_targets: Callable[[Any], int] = count_targets,
    autocast: Callable[[], AbstractContextManager] = nullcontext,
    scaler: torch.amp.GradScaler | None = None,
    max_grad_norm: float = 0.0,
) -> MemoryLedger:
    """Run one optimizer step over `micro_batches` as `train` does, and return its peak bytes by
    phase and category.

    Phases: forward, loss, backward, optimizer (with unscaling and clipping). The step really
    updates the model; never time it: instrumented steps are slow. `loss_fn` returns a sum over
    `count_targets(micro_batch)`; `micro_batches` are already on the model's device. On a CPU every
    byte has a category, and the ledger a timeline. On CUDA the allocator tells totals: at the peak
    of backward, what autograd keeps and what is temporary are one category. Of an
    `optimizers.StepInBackward` the gradients, which do not outlive backward, are temporaries on a CPU.
    Raises ValueError if the optimizer makes its state in this very step: the first step has another
    peak than others.
    """
    device = next(model.parameters()).device
    scaler = scaler or torch.amp.GradScaler(device.type, enabled=False)
    optimizer.zero_grad(set_to_none=True)
    parameters = list(model.parameters())
    n_targets, n_states = sum(map(count_targets, micro_batches)), len(optimizer.state)
    recorder = (CudaRecorder if device.type == "cuda" else CpuRecorder)(model, optimizer)
    handle = when_loss_begins(model, lambda: recorder.begin("loss"))
    try:
        with recorder.recording():
            if isinstance(optimizer, StepInBackward):
                optimizer.attach()  # after the recorder's hooks, which read gradients
            for micro_batch in micro_batches:
                recorder.begin("forward")
                with autocast():
                    loss = loss_fn(model, micro_batch) / n_targets
                recorder.begin("backward")
                scaler.scale(loss).backward()
                del loss
            recorder.begin("optimizer")
            scaler.unscale_(optimizer)
            if max_grad_norm:
                nn.utils.clip_grad_norm_(parameters, max_grad_norm)
            scaler.step(optimizer)
            scaler.update()
            recorder.end()
    finally:
        handle.remove()
    report = recorder.report()
    optimizer.zero_grad(set_to_none=True)
    if len(optimizer.state) != n_states:
        raise ValueError("the optimizer had no state yet: run an ordinary step first")
    return report
