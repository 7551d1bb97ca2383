"""Changes to a config, and what each costs."""

from __future__ import annotations

from typing import Any

from labutils.config.schema import Config
from labutils.prediction.arithmetic import n_parameters
from labutils.workload.gpt2 import SIZES

FREE = {  # change neither results (beyond rounding) nor cost time
    "expandable_segments": (True, "the same tensors, fewer holes between them; Linux only"),
    "use_cache": (False, "training never reads the cache"),
    "activation": ("gelu_tanh", "the same function, fused"),
    "optimizer_impl": ("fused", "the same update, without temporaries"),
}
WITHOUT_FLOPS = {  # what they cost is not in `time_cost`
    "attention": "nothing: the same sums in another order, without (T, T) matrices",
    "optimizer": "a slower update, and moments of 8 bits: compare the losses",
    "optimizer_in_backward": "no clipping and no accumulation; the same update otherwise",
    "max_grad_norm": "no clipping",
    "tokens_per_step": "fewer tokens in a step, so noisier gradients: another experiment",
    "seq_len": "less context: another experiment",
}
CHUNK_TOKENS = 512
# FLOPs that a card computes while it moves one byte, from the datasheet of the A100 80 GB: TFLOP/s
# over 2.0 TB/s. Other cards have other ratios of the same order (T4, FP16: 65 over 0.32).
FLOPS_PER_BYTE = {
    "fp32": 19.5 / 2.0,
    "tf32": 156 / 2.0,
    "fp16": 312 / 2.0,
    "bf16": 312 / 2.0,
    "pure_bf16": 312 / 2.0,
}
# What each further micro-batch moves, bytes per parameter: its gradient is read, added to what is
# there and written (12), and the weights are read in the forward and in the backward pass (8).
BYTES_PER_MICRO_BATCH = 20


def time_cost(config: Config, changes: dict[str, Any]) -> float:
    """Return the predicted time that changes add to a step: what is computed twice, and what more
    micro-batches move.

    As a fraction of the step's FLOPs in the precision of the changes, so that a faster precision
    counts neither as a gain nor as a cost; the costs of several changes add up. Smaller products'
    inefficiency is not in it, nor what
    `offload` moves to the host and back, nor the attention that `selective` repeats with dropout.
    """
    n_layer, _, width, _ = SIZES[config.model]
    new = config.model_copy(update=changes)
    per_token = 6 * n_parameters(config.model, 0) + 12 * n_layer * width * config.seq_len
    moved = (
        (new.grad_accum_steps - config.grad_accum_steps)
        * BYTES_PER_MICRO_BATCH
        * n_parameters(config.model)
    )
    again = _flops_again(new) - _flops_again(config)
    return (again + moved * FLOPS_PER_BYTE[new.precision] / config.tokens_per_step) / per_token


def _flops_again(config: Config) -> float:
    """Return the FLOPs per token that a config computes twice."""
    n_layer, _, width, _ = SIZES[config.model]
    blocks = 24 * n_layer * width**2 + 4 * n_layer * width * config.seq_len
    repeats_products = config.gradient_checkpointing not in ("none", "selective", "offload")
    return repeats_products * blocks


def costs(config: Config, changes: dict[str, Any]) -> tuple[str, ...]:
    """Return a line for each change, `key value: costs …`: what it costs, and why."""
    lines = []
    for key, value in changes.items():
        if key == "max_grad_norm" and "optimizer_in_backward" in changes:
            continue  # said there
        share = 100 * time_cost(
            config, {key: value, "precision": changes.get("precision", config.precision)}
        )
        if key in FREE:
            reason = f"nothing: {FREE[key][1]}"
        elif key == "precision":
            reason = "no time; products are rounded to 16 bits"
            if value == "pure_bf16":
                reason = "no time, but weights of 8 significant bits lose small updates: compare the losses"
        elif key == "micro_batch_size":
            steps = config.model_copy(update=changes).grad_accum_steps
            reason = f"about {share:.0f} % of the step: {steps} micro-batches, not {config.grad_accum_steps}"
        elif key == "loss_chunk_tokens":
            reason = "no product twice; smaller ones, and more of them"
        elif key in WITHOUT_FLOPS:
            reason = WITHOUT_FLOPS[key]
        else:
            reason = f"about {share:.0f} % of the step: each block's forward pass twice"
        lines.append(f"{key} {value}: costs {reason}")
    return tuple(lines)
