"""What an exported script can say: all else is refused, and not written as something else."""

from __future__ import annotations

from labutils.config.schema import KEYS, Config, ConfigError

# What the template has code for. A new row trains here at once, and is exported once it is there.
WRITTEN = {
    "precision": ("fp32", "tf32", "fp16", "bf16", "pure_bf16"),
    "optimizer": ("adamw", "adamw_bf16", "adamw_8bit", "sgd"),
    "attention": ("eager", "sdpa", "math", "efficient", "flash", "auto"),
    "activation": ("gelu_new", "gelu_tanh"),
    "gradient_checkpointing": (
        *("none", "block", "every_2", "every_3", "every_4", "selective", "offload"),
    ),
    "compile": ("off", "default", "reduce-overhead", "max-autotune"),
    "lr_schedule": ("constant", "cosine"),
}


# Keys that a script reads, or needs not. One that came later is exported at its default only.
KEYS_WRITTEN = {
    "name",
    "note",
    "seed",
    "model",
    "weights",
    "corpus",
    "seq_len",
    "micro_batch_size",
    "tokens_per_step",
    "steps",
    "learning_rate",
    "lr_schedule",
    "lr_warmup_steps",
    "weight_decay",
    "max_grad_norm",
    "eval_every",
    "save_every",
    "precision",
    "init_scale",
    "growth_interval",
    "optimizer",
    "optimizer_impl",
    "optimizer_in_backward",
    "dropout",
    "activation",
    "use_cache",
    "attention",
    "pad_vocab",
    "loss_chunk_tokens",
    "compile",
    "gradient_checkpointing",
    "memory_limit_gib",
    "expandable_segments",
}


def require_written(c: Config) -> None:
    """Raise ConfigError for a value that the template would silently write as another."""
    for key in set(KEYS) - KEYS_WRITTEN:
        if getattr(c, key) != Config.model_fields[key].default:
            raise ConfigError(f"{c.name}: `{key}`: export does not write this key yet")
    for key, values in WRITTEN.items():
        if getattr(c, key) not in values:
            message = f"export has no code for {getattr(c, key)!r}; it has for {', '.join(values)}"
            raise ConfigError(f"{c.name}: `{key}`: {message}")
