"""Which values of a config cannot go together, and which a kind of device never has."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from labutils.config.choices import ATTENTION, MODELS, NO_AUTOCAST, PRECISIONS, SIXTEEN_BIT


def contradictions(values: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    """Yield (key, message) for values that are fine alone but not together.

    Keys that are missing are not judged.
    """
    yield from _of_the_batch(values)
    if values.get("optimizer_in_backward"):
        yield from _of_a_step_in_backward(values)
    if values.get("weights") == "pretrained":
        yield from _of_pretrained_weights(values)


def _tokens_per_pass(values: Mapping[str, Any]) -> int:
    """Return the tokens of a micro-batch; 0 if a key is missing."""
    return values.get("seq_len", 0) * values.get("micro_batch_size", 0)


def _of_the_batch(values: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    per_pass = _tokens_per_pass(values)
    tokens = values.get("tokens_per_step", 0)
    if per_pass and tokens % per_pass:
        below = tokens // per_pass * per_pass
        nearest = f"{below} or {below + per_pass}" if below else f"{per_pass}"
        yield (
            "tokens_per_step",
            f"{tokens} is not a multiple of seq_len × micro_batch_size = {per_pass}; "
            f"nearest: {nearest}",
        )
    warmup, steps = values.get("lr_warmup_steps", 0), values.get("steps")
    if steps is not None and warmup > steps:
        yield (
            "lr_warmup_steps",
            f"{warmup} warm-up steps in a run of {steps} steps; set it to {steps} or less, 0 say",
        )


def _of_a_step_in_backward(values: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    if values.get("max_grad_norm"):
        yield (
            "max_grad_norm",
            "clipping needs all gradients at once; with optimizer_in_backward set it to 0",
        )
    precision = values.get("precision")
    if precision == SIXTEEN_BIT.name or (precision and PRECISIONS[precision].loss_scale):
        yield (
            "precision",
            "a loss scale needs all gradients at once; with optimizer_in_backward use bf16, say",
        )
    per_pass = _tokens_per_pass(values)
    if per_pass and values.get("tokens_per_step", 0) > per_pass:
        yield (
            "tokens_per_step",
            f"optimizer_in_backward updates after each micro-batch; set it to {per_pass}, "
            "or micro_batch_size up",
        )


def _of_pretrained_weights(values: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    model = values.get("model")
    if model and not MODELS[model].is_published:
        yield (
            "weights",
            f"{model} has no pretrained weights; use weights: random, or model: gpt2",
        )
    if values.get("pad_vocab"):
        yield (
            "pad_vocab",
            "pretrained weights have GPT-2's vocabulary of 50257; set pad_vocab: false",
        )
    if values.get("seq_len", 0) > 1024:
        yield (
            "seq_len",
            f"pretrained GPT-2 knows 1024 positions, not {values['seq_len']}; use weights: random",
        )


def impossible_on(device_type: str, config: Any) -> Iterable[tuple[str, str]]:
    """Yield (key, message) for what one kind of device never has, whatever its model."""
    row = ATTENTION[config.attention]
    if device_type == "cpu" and config.dropout > 0 and not row.drops_out_on_cpu:
        yield (
            "attention",
            "a CPU has flash attention without dropout only; use auto, or dropout: 0.0",
        )
    if device_type == "cuda" and row.only_16bit_on_cuda and config.precision in NO_AUTOCAST:
        yield (
            "attention",
            f"flash attention exists in 16 bits only, not for precision {config.precision}; "
            "use auto",
        )
