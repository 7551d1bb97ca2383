"""Measure what one training step takes: its peak by phase and category."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from labutils.config.choices import PRECISIONS
from labutils.memory.cpu_recorder import CpuRecorder
from labutils.memory.cuda_recorder import CudaRecorder
from labutils.memory.ledger import MemoryLedger
from labutils.memory.tensors import on_loss_begin
from labutils.techniques.loss import count_targets
from labutils.techniques.optimizer_in_backward import OptimizerInBackward
from labutils.techniques.precision import autocast, grad_scaler, tf32
from labutils.techniques.step import take_step


def measure_step(
    model: nn.Module,
    micro_batches: Sequence[Any],
    loss_fn: Callable[[nn.Module, Any], torch.Tensor],
    optimizer: torch.optim.Optimizer,
    *,
    count_targets: Callable[[Any], int] = count_targets,
    precision: str = "fp32",
    scaler: torch.amp.GradScaler | None = None,
    max_grad_norm: float = 0.0,
) -> MemoryLedger:
    """Take one optimizer step as `train` does; return its peak bytes by phase and category.

    `loss_fn` returns a sum over `count_targets(micro_batch)`. The micro-batches are on the model's
    device already. The step really updates the model. Never time it: what is recorded is slow.
    The phases are forward, loss, backward, and optimizer (with unscaling and clipping).
    Without the training's `scaler` fp16 gets a new one. Its first scale may be too large: then the
    step is skipped, and temporaries of the optimizer are missed.

    On a CPU every byte has a category, and the ledger has a timeline. CUDA's allocator only tells
    totals: at the peak of backward, activations and temporaries are one category. The gradients
    of an `OptimizerInBackward` do not outlive backward: on a CPU they are temporaries.
    Raises ValueError if the optimizer makes its state in this step, which gives it another peak.
    """
    device = next(model.parameters()).device
    scaler = scaler or grad_scaler(precision, device)
    optimizer.zero_grad(set_to_none=True)
    n_states = len(optimizer.state)
    recorder = (CudaRecorder if device.type == "cuda" else CpuRecorder)(model, optimizer)

    def phase(name: str) -> None:
        if name == "clear":
            recorder.end()  # gradients are recognised while they are there
        else:
            recorder.begin(name)

    handle = on_loss_begin(model, lambda: recorder.begin("loss"))
    try:
        with tf32(PRECISIONS[precision].tf32), recorder.recording():
            if isinstance(optimizer, OptimizerInBackward):
                optimizer.attach()  # after the recorder's hooks, which read gradients
            take_step(
                model,
                micro_batches,
                loss_fn,
                optimizer,
                n_targets=sum(map(count_targets, micro_batches)),
                autocast=partial(autocast, precision, device),
                scaler=scaler,
                max_grad_norm=max_grad_norm,
                phase=phase,
            )
    finally:
        handle.remove()
    if len(optimizer.state) != n_states:
        raise ValueError("the optimizer had no state yet: run an ordinary step first")
    return recorder.report()
