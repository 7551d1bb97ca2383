"""The engine `fabric`: a loop of one's own around `lightning.fabric.Fabric`."""

from __future__ import annotations

import itertools
import logging
import warnings

import torch

from labutils.config.choices import PRECISIONS
from labutils.techniques.loss import count_targets
from labutils.training.engines.parts import Parts, StepSeries, require, scale_of
from labutils.training.records import Series

MIXED = {"bfloat16": "bf16-mixed", "float16": "16-mixed"}  # dtype of products → its name here


def train(parts: Parts) -> Series:
    """Train with `lightning.fabric.Fabric`; return what the loop saw."""
    require("lightning")
    fabric = _fabric(parts)
    config, log = parts.config, StepSeries()
    parts.checkpoint()
    scaler = parts.scaler if parts.scaler.is_enabled() else None
    model, optimizer = fabric.setup(parts.model, parts.optimizer)
    for step in range(parts.steps):
        parts.begin_step(step, optimizer)
        log.begin(scale_of(scaler), optimizer.param_groups[0]["lr"])
        window = list(itertools.islice(parts.micro_batches, config.grad_accum_steps))
        n_targets = sum(map(count_targets, window))
        total, norm = torch.zeros((), device=parts.device), float("nan")
        for batch in window:
            loss = parts.loss_fn(model, fabric.to_device(batch)) / n_targets
            fabric.backward(loss)
            total += loss.detach()
        if config.max_grad_norm:
            norm = fabric.clip_gradients(  # unscales first
                model, optimizer, max_norm=config.max_grad_norm, error_if_nonfinite=False
            )
        optimizer.step()
        optimizer.zero_grad()
        log.end(float(total), float(norm))
    return log.series(scale_of(scaler))


def _fabric(parts: Parts):
    """Return a Fabric of the config's precision, with the config's scaler."""
    fabric = require("lightning.fabric")
    accelerator = "cpu" if parts.device.type == "cpu" else "cuda"
    row = PRECISIONS[parts.config.precision]
    precision = MIXED[row.products] if row.autocast else "32-true"
    how = {"precision": precision}
    if parts.scaler.is_enabled():
        # On a CPU Fabric would train in bfloat16, with a warning; elsewhere with its own scales.
        plugin = fabric.plugins.MixedPrecision(precision, parts.device.type, parts.scaler)
        how = {"plugins": [plugin]}
    logging.getLogger("lightning.fabric").setLevel(logging.WARNING)  # else it writes to stderr
    with warnings.catch_warnings(action="ignore"):
        return fabric.Fabric(accelerator=accelerator, devices=1, **how)
