"""Changes to a config that save memory: which there are, and what each costs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from labutils.config.card import CPU, Card
from labutils.config.choices import (
    CHECKPOINTING,
    EACH_BLOCK,
    MODELS,
    OPTIMIZERS,
    PRECISIONS,
    SMALLEST_STATE,
    WITH_BF16,
    WITHOUT_BF16,
    Precision,
)
from labutils.config.schema import Config
from labutils.memory.device_memory import without_expandable_segments
from labutils.prediction.arithmetic import n_parameters
from labutils.prediction.time import predict_time

# These change neither results (beyond rounding) nor cost time: the value, and why it is free.
NO_COST_CHANGES = {
    "expandable_segments": (True, "the same tensors, fewer holes between them; Linux only"),
    "use_cache": (False, "training never reads the cache"),
    "activation": ("gelu_tanh", "the same function, fused"),
    "optimizer_impl": ("fused", "the same update, without temporaries"),
}
# What these cost is not in `time_cost`.
COSTS_WITHOUT_FLOPS = {
    "attention": "nothing: the same sums in another order, without (T, T) matrices",
    "optimizer": "a slower update, and moments of 8 bits: compare the losses",
    "optimizer_in_backward": "no clipping and no accumulation; the same update otherwise",
    "max_grad_norm": "no clipping",
    "loss_chunk_tokens": "no product twice; smaller ones, and more of them",
    "tokens_per_step": "fewer tokens in a step, so noisier gradients: another experiment",
    "seq_len": "less context: another experiment",
}
TIMED = ("micro_batch_size", "gradient_checkpointing")  # what they cost is predicted
CHUNK_TOKENS = 512
# Bytes per parameter that each further micro-batch moves: its gradient is read, added to what is
# there and written (12), and the weights are read in the forward and in the backward pass (8).
BYTES_PER_MICRO_BATCH = 20
# Of a CPU, about: 150 GFLOP/s over 10 GB/s. Only an order of changes depends on it.
CPU_FLOPS_PER_BYTE = 15.0


def flops_per_byte(precision: str, card: Card) -> float:
    """Return the FLOPs that a card computes while it moves one byte, both at achieved rates."""
    if card.speed is None:
        return CPU_FLOPS_PER_BYTE
    speed = card.speed
    return speed.product_rate(PRECISIONS[precision].kind) / (1e9 * speed.elements * speed.gb_per_s)


def time_cost(config: Config, changes: dict[str, Any], card: Card = CPU) -> float:
    """Return the time that changes add to a step, by hand, as a fraction of its FLOPs.

    It orders combinations of changes before any is traced; `prediction.time` predicts the time of
    those that are shown. Counted is what is computed twice, and what more micro-batches move. FLOPs
    are taken in the precision of the changes, so a faster precision is neither a gain nor a cost.
    """
    model = MODELS[config.model]
    new = config.model_copy(update=changes)
    products = 6 * n_parameters(config.model, 0)
    per_token = products + 12 * model.n_layer * model.width * config.seq_len
    more = new.grad_accum_steps - config.grad_accum_steps
    moved = more * BYTES_PER_MICRO_BATCH * n_parameters(config.model)
    moved_per_token = moved * flops_per_byte(new.precision, card) / config.tokens_per_step
    again = _flops_again(new) - _flops_again(config)
    return (again + moved_per_token) / per_token


def _flops_again(config: Config) -> float:
    """Return the FLOPs per token that a config computes twice."""
    if not CHECKPOINTING[config.gradient_checkpointing].repeats:
        return 0.0
    model = MODELS[config.model]
    in_products = 24 * model.n_layer * model.width**2
    in_attention = 4 * model.n_layer * model.width * config.seq_len
    return in_products + in_attention


def costs(config: Config, changes: dict[str, Any], card: Card) -> tuple[str, ...]:
    """Return a line for each change, `key value: costs …`: what it costs, and why.

    Milliseconds are predicted for the change alone, in the precision of the changes.
    """
    lines = []
    for key, value in changes.items():
        if key == "max_grad_norm" and "optimizer_in_backward" in changes:
            continue  # its line says so
        lines.append(f"{key} {value}: costs {_cost(config, changes, key, card)}")
    return tuple(lines)


def _cost(config: Config, changes: dict[str, Any], key: str, card: Card) -> str:
    if key in NO_COST_CHANGES:
        return f"nothing: {NO_COST_CHANGES[key][1]}"
    if key not in TIMED:
        return _reason(config, changes, key)
    base = config.model_copy(update={"precision": changes.get("precision", config.precision)})
    before = predict_time(base, card).step_ms
    added = predict_time(base.model_copy(update={key: changes[key]}), card).step_ms - before
    share = f"{added:+.0f} ms a step ({100 * added / before:+.0f} %)"
    return f"{share}: {_reason(config, changes, key)}"


def reasons(config: Config, changes: dict[str, Any]) -> str:
    """Return what changes cost besides time, and where the time goes."""
    keys = [key for key in changes if key != "max_grad_norm"]
    return "; ".join(_reason(config, changes, key) for key in keys)


def _reason(config: Config, changes: dict[str, Any], key: str) -> str:
    if key in NO_COST_CHANGES:
        return NO_COST_CHANGES[key][1]
    if key in COSTS_WITHOUT_FLOPS:
        return COSTS_WITHOUT_FLOPS[key]
    if key == "precision":
        if PRECISIONS[changes[key]].weights != "float32":
            return "weights of 8 significant bits lose small updates: compare the losses"
        return "matrix multiplications in 16 bits"
    if key == "micro_batch_size":
        steps = config.model_copy(update=changes).grad_accum_steps
        return f"{steps} micro-batches, not {config.grad_accum_steps}"
    return "each block's forward pass twice"


def free_changes(config: Config, card: Card) -> dict[str, Any]:
    """Return those of NO_COST_CHANGES that would change a config, and that exist on the card."""
    found = {}
    for key, (value, _) in NO_COST_CHANGES.items():
        if getattr(config, key) != value:
            found[key] = value
    if card.gpu is None or (card.is_here and without_expandable_segments()):
        found.pop("expandable_segments", None)
    return found


def faster_precision(config: Config, card: Card) -> Precision | None:
    """Return the 16-bit precision with float32 weights that a 32-bit config could take."""
    if PRECISIONS[config.precision].is_16bit:
        return None
    return WITH_BF16 if card.has_bf16 else WITHOUT_BF16


def combinations(config: Config, card: Card) -> Iterator[dict[str, Any]]:
    """Yield every combination of changes to a resolved config. The free ones are all in each."""
    free = free_changes(config, card)
    choices = _choices(config, card)
    sequences = config.micro_batch_size * config.grad_accum_steps
    for values in itertools.product(*choices.values()):
        changes = dict(zip(choices, values, strict=True))
        is_new = {key: value for key, value in changes.items() if getattr(config, key) != value}
        if "optimizer_in_backward" in is_new and not _may_step_in_backward(
            config, changes, sequences
        ):
            continue
        yield free | is_new


def _choices(config: Config, card: Card) -> dict[str, list[Any]]:
    """Return {key: values worth a try}; the config's own value comes first."""
    sequences = config.micro_batch_size * config.grad_accum_steps
    sizes = [n for n in range(config.micro_batch_size, 0, -1) if sequences % n == 0]
    if config.optimizer_in_backward:
        sizes = sizes[:1]  # it cannot accumulate
    chunks = [config.loss_chunk_tokens]
    has_larger_chunks = not 0 < config.loss_chunk_tokens <= CHUNK_TOKENS
    if has_larger_chunks and config.micro_batch_size * config.seq_len > CHUNK_TOKENS:
        chunks.append(CHUNK_TOKENS)
    optimizers = [config.optimizer]
    if OPTIMIZERS[config.optimizer].is_adamw:
        optimizers.append(SMALLEST_STATE.name)
    return {
        "gradient_checkpointing": _distinct(config.gradient_checkpointing, EACH_BLOCK.name),
        "loss_chunk_tokens": chunks,
        "precision": _precisions(config, card),
        "micro_batch_size": sizes,
        "optimizer": _distinct(*optimizers),
        "optimizer_in_backward": _distinct(config.optimizer_in_backward, True),
    }


def _precisions(config: Config, card: Card) -> list[str]:
    found = [config.precision]
    if card.gpu is None:
        return found  # few CPUs multiply 16-bit numbers fast
    faster = faster_precision(config, card)
    if faster and not (faster.loss_scale and config.optimizer_in_backward):
        found.append(faster.name)
    if card.has_bf16:
        found += [row.name for row in PRECISIONS.values() if row.weights == "bfloat16"]
    return _distinct(*found)


def _may_step_in_backward(config: Config, changes: dict[str, Any], sequences: int) -> bool:
    """Whether nothing needs all gradients at once. Tried last of all, with the smallest state."""
    return (
        changes["optimizer"] == SMALLEST_STATE.name
        and not PRECISIONS[changes["precision"]].loss_scale
        and not config.max_grad_norm
        and changes["micro_batch_size"] == sequences
    )


def _distinct(*values: Any) -> list[Any]:
    return list(dict.fromkeys(values))
