"""Find the cheapest changes with which a training step fits a memory budget, and the largest batch that does."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from labutils import models
from labutils.cards import CONTEXT_GIB, card_named, resolve
from labutils.config import Config, load_config
from labutils.device import choose_device, free_bytes
from labutils.formula import closed_form, n_parameters, on_a_cpu
from labutils.memory import without_expandable_segments
from labutils.predict import PlainPrediction, Prediction, Sweep, needed_gib
from labutils.records import MemoryLedger

ROUGHLY = 1.1  # the closed form overstates a peak by less where attention is fused; a test compares
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
# FLOPs that a card computes while it moves one byte, from the datasheet of the A100 80 GB: TFLOP/s over 2.0 TB/s. Other
# cards have other ratios of the same order (T4, FP16: 65 over 0.32).
FLOPS_PER_BYTE = {"fp32": 19.5 / 2.0, "tf32": 156 / 2.0, "fp16": 312 / 2.0, "bf16": 312 / 2.0, "pure_bf16": 312 / 2.0}
# What each further micro-batch moves, bytes per parameter: its gradient is read, added to what is there and written
# (12), and the weights are read in the forward and in the backward pass (8).
BYTES_PER_MICRO_BATCH = 20


@dataclass(frozen=True)
class Fit:
    """Changes to a config, what each costs and why, the time they add (see `time_cost`), and what is predicted."""

    changes: dict[str, Any]
    costs: tuple[str, ...]
    time_cost: float
    prediction: Prediction | PlainPrediction

    @property
    def ledger(self) -> MemoryLedger:
        """The ledger of a step with the changes."""
        return self.prediction.ledger

    @property
    def needed_gib(self) -> float:
        """The memory of the smallest device on which it runs, in GiB."""
        return self.prediction.needed_gib

    def fits(self, budget_gib: float) -> bool:
        """Whether it runs in so much memory, on a card with its context in it."""
        return self.prediction.fits(budget_gib)


def time_cost(config: Config, changes: dict[str, Any]) -> float:
    """Return the predicted time that changes add to a step: what is computed twice, and what more micro-batches move.

    As a fraction of the step's FLOPs in the precision of the changes, so that a faster precision counts neither as a
    gain nor as a cost; the costs of several changes add up. Smaller products' inefficiency is not in it, nor what
    `offload` moves to the host and back, nor the attention that `selective` repeats with dropout.
    """
    n_layer, _, width, _ = models.SIZES[config.model]
    new = config.model_copy(update=changes)
    per_token = 6 * n_parameters(config.model, 0) + 12 * n_layer * width * config.seq_len
    moved = (new.grad_accum_steps - config.grad_accum_steps) * BYTES_PER_MICRO_BATCH * n_parameters(config.model)
    again = _flops_again(new) - _flops_again(config)
    return (again + moved * FLOPS_PER_BYTE[new.precision] / config.tokens_per_step) / per_token


def _flops_again(config: Config) -> float:
    """Return the FLOPs per token that a config computes twice."""
    n_layer, _, width, _ = models.SIZES[config.model]
    blocks = 24 * n_layer * width**2 + 4 * n_layer * width * config.seq_len
    repeats_products = config.gradient_checkpointing not in ("none", "selective", "offload")
    return repeats_products * blocks


def fit(config: Config, budget_gib: float, device: str = "a100") -> Fit:
    """Return the changes that cost least time with which a config's step fits `budget_gib` of card memory.

    Searched: micro-batch size (the tokens per step stay: it accumulates), checkpointing, the loss in chunks, 16-bit
    precision if the device has it, and what is free. Of equal costs the fewest changes win. What changes the learning
    comes last: pure BF16, then 8-bit moments without it and with it, then, where nothing is clipped or accumulated, the
    optimizer step in backward too. If nothing fits, the smallest of all is returned; `Fit.fits` tells.
    Raises ConfigError or PrecisionUnsupported if the config cannot run on the device at all.
    """
    resolved = resolve(config, device)
    tried = _Trials(resolved, device)

    def without_the_superfluous(found: Fit, limit_gib: float) -> Fit:
        for key in list(found.changes):
            fewer = tried({k: v for k, v in found.changes.items() if k != key})
            if fewer.fits(limit_gib) and fewer.time_cost <= found.time_cost:
                found = fewer
        return found

    found = tried({})
    if found.fits(budget_gib):
        return found
    candidates = _candidates(resolved, device)
    by_recipe: dict[tuple, Fit] = {}

    def smallest(recipe: tuple) -> Fit:
        """Everything that saves memory, with the batch whole or in single sequences: splitting may add gradients."""
        if recipe not in by_recipe:
            same = [c for c in candidates if _recipe(resolved, c) == recipe]
            everything = max(same, key=lambda changes: (len(changes), -changes.get("micro_batch_size", 0)))
            whole = {key: value for key, value in everything.items() if key != "micro_batch_size"}
            by_recipe[recipe] = min(tried(everything), tried(whole), key=lambda one: one.prediction.bytes_taken)
        return by_recipe[recipe]

    for changes in candidates:
        if tried.hopeless(changes, budget_gib):
            continue  # not worth a trace
        if smallest(_recipe(resolved, changes)).fits(budget_gib):
            found = tried(changes)
            if found.fits(budget_gib):
                return without_the_superfluous(found, budget_gib)
    furthest = max(_for_the_last(changes)[1:] for changes in candidates)  # other recipes keep more bytes per parameter
    recipes = {_recipe(resolved, changes) for changes in candidates if _for_the_last(changes)[1:] == furthest}
    found = min(map(smallest, recipes), key=lambda one: one.prediction.bytes_taken)
    return without_the_superfluous(found, max(budget_gib, found.needed_gib))


def enough_alone(config: Config, budget_gib: float, device: str = "a100") -> list[Fit]:
    """Return the changes, one beside the free ones, each of which makes a config's step fit; cheapest first.

    Empty if the config fits as it is, or if one change is not enough: see `fit`.
    """
    resolved = resolve(config, device)
    tried, found = _Trials(resolved, device), {}
    if tried({}).fits(budget_gib):
        return []
    for changes in _candidates(resolved, device):
        alone = tuple(key for key in changes if key not in FREE)
        if len(alone) < 2 and alone not in found and not tried.hopeless(changes, budget_gib):
            one = tried(changes)
            if one.fits(budget_gib):
                found[alone] = one
    return list(found.values())


class _Trials:
    """Ledgers of a config with changes; traces are kept."""

    def __init__(self, config: Config, device: str) -> None:
        self.config, self.device = config, device
        self.sweeps: dict[tuple, Sweep] = {}

    def __call__(self, changes: dict[str, Any]) -> Fit:
        others = {key: value for key, value in changes.items() if key != "micro_batch_size"}
        config = self.config.model_copy(update=others)
        sweep = self.sweeps.setdefault(tuple(others.items()), Sweep(config, self.device))
        found = sweep.at(changes.get("micro_batch_size", config.micro_batch_size))
        return Fit(changes, costs(self.config, changes), time_cost(self.config, changes), found)

    def hopeless(self, changes: dict[str, Any], budget_gib: float) -> bool:
        """Whether the closed form, which is of fused attention, is far above the budget."""
        rough = needed_gib(closed_form(self.config.model_copy(update=changes)), self.device)
        return self.config.attention not in ("eager", "math") and rough > ROUGHLY * budget_gib


def _candidates(config: Config, device: str) -> list[dict[str, Any]]:
    """Return every combination of changes, best first; the free ones are all in each."""
    return sorted(_combinations(config, device), key=lambda changes: _rank(config, changes))


def _combinations(config: Config, device: str) -> Iterator[dict[str, Any]]:
    has_bf16 = device != "cpu" and card_named(device).flash
    free = {key: value for key, (value, _) in FREE.items() if getattr(config, key) != value}
    if device == "cpu" or (device == "this" and without_expandable_segments()):
        free.pop("expandable_segments", None)
    sequences = config.micro_batch_size * config.grad_accum_steps
    sizes = [n for n in range(config.micro_batch_size, 0, -1) if sequences % n == 0]
    sizes = sizes[:1] if config.optimizer_in_backward else sizes  # it cannot accumulate, nor have a loss scale
    precisions = [config.precision]
    if config.precision in ("fp32", "tf32") and device != "cpu":  # few CPUs multiply 16-bit numbers fast
        precisions += ["bf16"] if has_bf16 else [] if config.optimizer_in_backward else ["fp16"]
    if has_bf16 and config.precision != "pure_bf16":
        precisions.append("pure_bf16")
    choices = {
        "gradient_checkpointing": dict.fromkeys((config.gradient_checkpointing, "block")),
        "loss_chunk_tokens": [config.loss_chunk_tokens],
        "precision": precisions,
        "micro_batch_size": sizes,
        "optimizer": dict.fromkeys((config.optimizer, "adamw_8bit")),
        "optimizer_in_backward": dict.fromkeys((config.optimizer_in_backward, True)),
    }
    larger_chunks = not 0 < config.loss_chunk_tokens <= CHUNK_TOKENS
    if larger_chunks and config.micro_batch_size * config.seq_len > CHUNK_TOKENS:
        choices["loss_chunk_tokens"].append(CHUNK_TOKENS)
    for values in itertools.product(*choices.values()):
        changes = dict(zip(choices, values, strict=True))
        if changes["optimizer"] != config.optimizer and not config.optimizer.startswith("adamw"):
            continue
        if changes["optimizer_in_backward"] != config.optimizer_in_backward and (
            changes["optimizer"] != "adamw_8bit"
            or changes["precision"] == "fp16"
            or config.max_grad_norm
            or changes["micro_batch_size"] < sequences
        ):
            continue
        yield free | {key: value for key, value in changes.items() if getattr(config, key) != value}


def _rank(config: Config, changes: dict[str, Any]) -> tuple:
    return (
        _for_the_last(changes),
        round(time_cost(config, changes), 2),
        len(changes),
        -changes.get("micro_batch_size", 0),
    )


def _for_the_last(changes: dict[str, Any]) -> tuple[bool, bool, bool]:
    return "optimizer_in_backward" in changes, "optimizer" in changes, changes.get("precision") == "pure_bf16"


def _recipe(config: Config, changes: dict[str, Any]) -> tuple:
    return tuple(changes.get(k, getattr(config, k)) for k in ("precision", "optimizer", "optimizer_in_backward"))


def costs(config: Config, changes: dict[str, Any]) -> tuple[str, ...]:
    """Return a line for each change, `key value: costs …`: what it costs, and why."""
    lines = []
    for key, value in changes.items():
        if key == "max_grad_norm" and "optimizer_in_backward" in changes:
            continue  # said there
        share = 100 * time_cost(config, {key: value, "precision": changes.get("precision", config.precision)})
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


def largest_micro_batch(config: Config, budget_gib: float, device: str = "a100", limit: int = 4096) -> int:
    """Return how many sequences (at most `limit`) fit in a step of one micro-batch; 0 if not even one does."""
    resolved = resolve(config, device)
    alone = {"micro_batch_size": 1, "tokens_per_step": resolved.seq_len}
    sweep = _sweep(resolved.model_copy(update=alone).model_dump_json(), device)

    def fits(size: int) -> bool:
        return sweep.at(size).fits(budget_gib)

    low, high = 0, 1
    while high <= limit and fits(high):
        low, high = high, 2 * high
    high = min(high, limit + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def shape_that_fits(config: Config, limit: int = 8) -> dict[str, int]:
    """Return the overrides with which a step of one micro-batch fits the free memory of the GPU here; on a CPU none.

    `micro_batch_size` is at most `limit`, and at least 1 even if the ledger says that not one sequence fits.
    """
    if not torch.cuda.is_available():
        return {}
    fits = max(1, largest_micro_batch(config, card_named("this").memory_gib, "this", limit))
    return {"micro_batch_size": fits, "tokens_per_step": fits * config.seq_len}


def fitting(*names: str, **overrides: Any) -> list[Config]:
    """Return the configs of some names or files, with overrides; where memory is short, in smaller micro-batches.

    All get the size with which, by the ledger, the first one's step fits the memory that is free here, at least 1:
    `tokens_per_step` stays, so they accumulate, and remain comparable with each other and with other machines.
    """
    configs = [load_config(name, **overrides) for name in names]
    where = choose_device()
    device = "cpu" if where.type == "cpu" else "this"
    first = resolve(configs[0], device)
    budget = free_bytes(where) / 2**30 + (0 if device == "cpu" else CONTEXT_GIB)
    if ROUGHLY * needed_gib(closed_form(on_a_cpu(first) if device == "cpu" else first), device) < budget:
        return configs
    sweep, sequences = Sweep(first, device), first.tokens_per_step // first.seq_len
    sizes = [n for n in range(first.micro_batch_size, 0, -1) if sequences % n == 0]
    size = next((n for n in sizes if sweep.at(n).fits(budget)), 1)
    if size == first.micro_batch_size:
        return configs
    smaller = overrides | {"note": f"in micro-batches of {size}, for want of memory", "micro_batch_size": size}
    return [load_config(n, **(smaller | {"name": c.name})) for n, c in zip(names, configs, strict=True)]


@lru_cache(maxsize=4)
def _sweep(config_json: str, device: str) -> Sweep:
    """Return a sweep of a resolved config; the next budget finds its traces."""
    return Sweep(Config.model_validate_json(config_json), device)
