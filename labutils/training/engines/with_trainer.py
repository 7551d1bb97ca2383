"""The engine `trainer`: Hugging Face's Trainer takes the steps."""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Iterator
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR

from labutils.config.choices import CHECKPOINTING
from labutils.training.engines.parts import Parts, StepSeries, require, scale_of
from labutils.training.records import Series


class Rows(torch.utils.data.IterableDataset):
    """Single sequences, in the order of the micro-batches: such a data set is never shuffled."""

    def __init__(self, micro_batches: Iterator[dict[str, torch.Tensor]]) -> None:
        self.micro_batches = micro_batches

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for batch in self.micro_batches:
            for row in range(len(batch["input_ids"])):
                yield {key: values[row] for key, values in batch.items()}


def arguments_of(parts: Parts, folder: str) -> dict[str, Any]:
    """Return the arguments of `TrainingArguments` that say what a config says."""
    config = parts.config
    found = {
        "output_dir": folder,
        "max_steps": parts.steps,
        "per_device_train_batch_size": config.micro_batch_size,
        "gradient_accumulation_steps": config.grad_accum_steps,
        "max_grad_norm": config.max_grad_norm,
        "use_cpu": parts.device.type == "cpu",
        "seed": config.seed,
        "logging_steps": 1,
        "logging_nan_inf_filter": False,  # or a NaN would be shown as an earlier mean
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    if parts.mixed != "no":
        found[parts.mixed] = True
    if CHECKPOINTING[config.gradient_checkpointing].is_on:
        known = inspect.signature(require("transformers").TrainingArguments).parameters
        switch = "activation_checkpointing"
        if switch not in known:  # its name in older versions
            switch = "gradient_checkpointing"
        found |= {switch: True, f"{switch}_kwargs": {"use_reentrant": False}}
    return found


def train(parts: Parts) -> Series:
    """Train with `transformers.Trainer`; return what its callback saw."""
    require("accelerate")  # Trainer needs it
    transformers = require("transformers")
    log = StepSeries()
    # GPT2LMHeadModel states no loss type. Trainer would then count the first token of each
    # sequence as a target, and divide by too many.
    parts.model.loss_type = "ForCausalLM"

    class Watch(transformers.TrainerCallback):
        def on_step_begin(self, args, state, control, optimizer=None, **_):
            parts.begin_step(state.global_step, optimizer)
            log.begin(scale_of(trainer.accelerator.scaler), optimizer.param_groups[0]["lr"])

        def on_log(self, args, state, control, logs=None, **_):
            if "loss" in logs:
                norm = logs["grad_norm"] if parts.config.max_grad_norm else float("nan")
                log.end(logs["loss"], norm)

    with tempfile.TemporaryDirectory() as folder:
        trainer = transformers.Trainer(
            parts.model,
            transformers.TrainingArguments(**arguments_of(parts, folder)),
            train_dataset=Rows(parts.micro_batches),
            optimizers=(parts.optimizer, LambdaLR(parts.optimizer, lambda step: 1.0)),
            callbacks=[Watch(), *parts.callbacks],
        )
        trainer.remove_callback(transformers.PrinterCallback)
        if parts.scaler.is_enabled():
            # On a CPU Accelerate would silently train in float32; elsewhere with scales of its own.
            trainer.accelerator.native_amp = True
            trainer.accelerator.scaler = parts.scaler
        trainer.train()
        return log.series(scale_of(trainer.accelerator.scaler))
