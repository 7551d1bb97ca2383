"""The engine `accelerate`: a loop of one's own around `accelerate.Accelerator`."""

from __future__ import annotations

import itertools

import torch

from labutils.techniques.loss import count_targets
from labutils.training.engines.parts import Parts, StepSeries, require, scale_of
from labutils.training.records import Series


def train(parts: Parts) -> Series:
    """Train with `accelerate.Accelerator`; return what the loop saw."""
    accelerate = require("accelerate")
    config, log = parts.config, StepSeries()
    parts.checkpoint()
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)  # of earlier runs
    accelerator = accelerate.Accelerator(
        mixed_precision=parts.mixed,
        gradient_accumulation_steps=config.grad_accum_steps,
        cpu=parts.device.type == "cpu",
    )
    if parts.scaler.is_enabled():
        # On a CPU Accelerate would silently train in float32; elsewhere with scales of its own.
        accelerator.native_amp, accelerator.scaler = True, parts.scaler
    model, optimizer = accelerator.prepare(parts.model, parts.optimizer)
    for step in range(parts.steps):
        parts.begin_step(step, optimizer)
        log.begin(scale_of(accelerator.scaler), optimizer.param_groups[0]["lr"])
        window = list(itertools.islice(parts.micro_batches, config.grad_accum_steps))
        n_targets = sum(map(count_targets, window))
        total, norm = torch.zeros((), device=parts.device), float("nan")
        for batch in window:
            batch = {key: value.to(parts.device) for key, value in batch.items()}
            with accelerator.accumulate(model):
                loss = parts.loss_fn(model, batch) / n_targets
                # `backward` divides by the micro-batches of a window: the targets did that already
                accelerator.backward(loss * config.grad_accum_steps)
                if accelerator.sync_gradients and config.max_grad_norm:
                    norm = accelerator.clip_grad_norm_(model.parameters(), config.max_grad_norm)
                optimizer.step()  # only on the last micro-batch of a window
                optimizer.zero_grad()
            total += loss.detach()
        log.end(float(total), float(norm))
    return log.series(scale_of(accelerator.scaler))
