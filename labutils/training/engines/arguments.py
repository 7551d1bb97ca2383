"""Arguments of the frameworks, beside the line of the ten-line loop that each one replaces.

The tables ask the installed versions, by `inspect.signature`, for defaults and for what is left.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable

import pandas as pd

from labutils.training.engines.parts import require

OWNERS = {  # how a table names a class or function → where it is
    "TrainingArguments": ("transformers", "TrainingArguments"),
    "transformers.Trainer": ("transformers", "Trainer"),
    "Accelerator": ("accelerate", "Accelerator"),
    "GradScalerKwargs": ("accelerate.utils", "GradScalerKwargs"),
    "lightning.Trainer": ("lightning", "Trainer"),
    "Fabric": ("lightning.fabric", "Fabric"),
    "MixedPrecision": ("lightning.fabric.plugins", "MixedPrecision"),
}

# topic → line of the loop → arguments that stand for it
DECODED = {
    "precision": {
        "with torch.autocast(…, dtype=…): … (FP16 also takes a scaler)": {
            "TrainingArguments": "bf16 fp16",
            "Accelerator": "mixed_precision",
            "lightning.Trainer": "precision",
            "Fabric": "precision",
        },
        "GradScaler(init_scale=…, growth_interval=…)": {
            "GradScalerKwargs": "init_scale growth_interval",
            "Accelerator": "kwargs_handlers",
            "MixedPrecision": "scaler",
            "Fabric": "plugins",
            "lightning.Trainer": "plugins",
        },
        'torch.backends.cuda.matmul.fp32_precision = "tf32"': {"TrainingArguments": "tf32"},
        "model.to(16 bits), for evaluation only": {
            "TrainingArguments": "fp16_full_eval bf16_full_eval"
        },
    },
    "accumulation": {
        "for micro_batch in window: … backward()": {
            "TrainingArguments": "gradient_accumulation_steps",
            "Accelerator": "gradient_accumulation_steps gradient_accumulation_plugin",
            "lightning.Trainer": "accumulate_grad_batches",
        },
        "loss / n_targets, counted over all processes": {
            "TrainingArguments": "average_tokens_across_devices",
            "transformers.Trainer": "compute_loss_func",
        },
        "clip_grad_norm_(parameters, max_norm)": {
            "TrainingArguments": "max_grad_norm",
            "lightning.Trainer": "gradient_clip_val gradient_clip_algorithm",
        },
        "DataLoader(shuffle=…, drop_last=…)": {
            "TrainingArguments": "train_sampling_strategy dataloader_drop_last"
        },
    },
    "checkpointing": {
        "checkpoint(block, x, use_reentrant=False)": {
            "TrainingArguments": "activation_checkpointing activation_checkpointing_kwargs"
        },
    },
    "the rest": {
        "AdamW(…, fused=True)": {"TrainingArguments": "optim adam_beta2 weight_decay"},
        "torch.compile(model)": {
            "TrainingArguments": "torch_compile torch_compile_backend torch_compile_mode",
            "Accelerator": "dynamo_backend",
        },
        "device = torch.device(…)": {
            "TrainingArguments": "use_cpu",
            "Accelerator": "cpu",
            "lightning.Trainer": "accelerator",
            "Fabric": "accelerator",
        },
        "losses.append(loss.item())": {
            "TrainingArguments": "logging_steps logging_nan_inf_filter",
            "lightning.Trainer": "log_every_n_steps",
        },
    },
}

# owner → name in older tutorials > what to write now (nothing, where nothing took its place)
RENAMED = {
    "TrainingArguments": [
        "evaluation_strategy > eval_strategy",
        "no_cuda > use_cpu",
        "per_gpu_train_batch_size > per_device_train_batch_size",
        "group_by_length > train_sampling_strategy",
        "adafactor > optim",
        "torchdynamo > torch_compile_backend",
        "gradient_checkpointing > activation_checkpointing",
        "gradient_checkpointing_kwargs > activation_checkpointing_kwargs",
        "push_to_hub_token > hub_token",
        "fp16_backend >",
        "half_precision_backend >",
        "fp16_opt_level >",
        "auto_precision >",
        "max_seq_length >",
    ],
    "transformers.Trainer": ["tokenizer > processing_class"],
    "Accelerator": ["fp16 > mixed_precision", "dispatch_batches > dataloader_config"],
    "lightning.Trainer": [
        "gpus > devices",
        "amp_backend >",
        "amp_level >",
        "checkpoint_callback > enable_checkpointing",
        "progress_bar_refresh_rate > enable_progress_bar",
        "track_grad_norm > callbacks",
    ],
}


def owner(name: str) -> Callable:
    """Return a class or function of OWNERS. Raises FrameworkMissing, KeyError."""
    module, attribute = OWNERS[name]
    return getattr(require(module), attribute)


def parameters_of(name: str) -> dict[str, inspect.Parameter]:
    """Return the arguments that a class of OWNERS takes in its installed version."""
    return dict(inspect.signature(owner(name)).parameters)


def decoded(topic: str) -> pd.DataFrame:
    """Return the arguments of a topic of DECODED: owner, name, default here, line of the loop.

    An argument that the installed version lacks says so. Raises KeyError for an unknown topic.
    """
    rows = []
    for line, by_owner in DECODED[topic].items():
        for name, arguments in by_owner.items():
            known = parameters_of(name)
            for argument in arguments.split():
                found = known.get(argument)
                default = "not an argument here" if found is None else _shown(found.default)
                rows.append((line, name, argument, default))
    columns = ["in the loop", "of", "argument", "default here"]
    return pd.DataFrame(rows, columns=columns).set_index("in the loop")


def _shown(default: object) -> str:
    if default is inspect.Parameter.empty:
        return "none: must be given"
    return repr(getattr(default, "value", default))


def renamed() -> pd.DataFrame:
    """Return older names: owner, old name, new name, and whether the installed version takes it."""
    rows = []
    for name, names in RENAMED.items():
        known = parameters_of(name)
        for text in names:
            old, _, new = map(str.strip, text.partition(">"))
            state = "still taken" if old in known else "TypeError"
            rows.append((name, old, new or "nothing: remove it", state))
    return pd.DataFrame(rows, columns=["of", "older name", "write instead", "older name gives"])
