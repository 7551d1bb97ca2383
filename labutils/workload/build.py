"""From a resolved config to what is trained: model, optimizer, loss and batches."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from labutils import machine
from labutils.config.choices import COMPILE_MODES
from labutils.config.schema import Config, resolve
from labutils.techniques import compiling, optimizers, precision
from labutils.techniques.loss import LossFn, lm_loss_sum
from labutils.techniques.optimizer_in_backward import OptimizerInBackward
from labutils.workload.data import Data, build_data
from labutils.workload.gpt2 import MODEL_KEYS, build_model


@dataclass
class Workload:
    """All that a training step needs. The model is on its device."""

    model: nn.Module
    optimizer: torch.optim.Optimizer | OptimizerInBackward
    loss_fn: LossFn
    scaler: torch.amp.GradScaler
    data: Data


def build(config: Config, device: torch.device) -> Workload:
    """Return what a config trains on a device of this machine.

    Raises ConfigError, PrecisionUnsupported, DataError or WeightsUnavailable.
    """
    run = resolve(config, machine.card(device), to_train=True)
    return build_workload(run.config, device, build_data(run.config))


def build_workload(config: Config, device: torch.device, batches: Data) -> Workload:
    """Return what a resolved config trains on a device, with batches that are made already."""
    model = build_experiment_model(config, device)
    return Workload(
        model=model,
        optimizer=build_optimizer(model, config),
        loss_fn=build_loss(config, device, accumulates=config.grad_accum_steps > 1),
        scaler=precision.grad_scaler(
            config.precision, device, config.init_scale, config.growth_interval
        ),
        data=batches,
    )


def build_experiment_model(config: Config, device: torch.device) -> nn.Module:
    """Return a resolved config's model on a device, in training mode.

    Weights are float32, or what the precision keeps: bfloat16 for `pure_bf16`.
    """
    return float32_model(config).to(device, dtype=precision.weights_dtype(config.precision))


def float32_model(config: Config, **others: Any) -> nn.Module:
    """Return a config's model, float32, on the CPU; `others` are arguments of `build_model`."""
    return build_model(**{key: getattr(config, key) for key in MODEL_KEYS} | others)


def build_optimizer(
    model: nn.Module, config: Config
) -> torch.optim.Optimizer | OptimizerInBackward:
    """Return a config's optimizer of a model's parameters."""
    optimizer = optimizers.build_optimizer(
        model,
        optimizer=config.optimizer,
        implementation=config.optimizer_impl,
        learning_rate=config.learning_rate,
        weight_decay=config.weight_decay,
    )
    return OptimizerInBackward(optimizer) if config.optimizer_in_backward else optimizer


def build_loss(config: Config, device: torch.device, accumulates: bool) -> LossFn:
    """Return a config's loss, summed over targets: of all logits or in chunks, compiled or not."""
    loss_fn = partial(lm_loss_sum, chunk_tokens=config.loss_chunk_tokens)
    if not COMPILE_MODES[config.compile].is_on:
        return loss_fn
    return compiling.CompiledLoss(loss_fn, config.compile, device, accumulates)
