"""The tables of exhibits: what is predicted, traced or trained for them, without words.

plan: each setting is predicted at the batch sizes of POINTS; the page draws straight lines between
them. amdahl: what the time ledger says of some cards. step, window: what is alive at each moment of a
training step. loss_scale, allreduce: real gradients. `benchmarks/exhibits.py` stores them.
"""

from __future__ import annotations

import base64
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.numerics import FP16
from labutils import machine
from labutils.config.card import CARDS, CONTEXT_GIB, CPU
from labutils.config.choices import PRECISIONS, SIXTEEN_BIT, WITH_BF16, Precision
from labutils.config.reader import load_config
from labutils.config.schema import Config, precision_on, resolve
from labutils.memory.kinds import PRODUCT
from labutils.memory.ledger import (
    ACTIVATIONS,
    CAST_WEIGHTS,
    GRADIENTS,
    LOGITS,
    MIB,
    OPTIMIZER,
    PARAMETERS,
    TEMPORARIES,
    WORKSPACES,
)
from labutils.memory.tensors import flat_gradient
from labutils.prediction import trace
from labutils.prediction.memory import STEPS, Prediction, predicted, segments_of, walk
from labutils.prediction.time import PRODUCTS, Clock, predict_time
from labutils.techniques import precision
from labutils.techniques.loss import count_targets, lm_loss_sum
from labutils.training.train import train
from labutils.workload.build import build_optimizer, float32_model
from labutils.workload.data import batches, sequences
from labutils.workload.gpt2 import build_model

# ---- plan

Setting = dict[str, Any]  # {switch: value}
SWITCHES: dict[str, tuple] = {
    "model": ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"),
    "precision": ("fp32", WITH_BF16.name, "pure_bf16"),
    "seq_len": (256, 512, 1024),
    "gradient_checkpointing": ("none", "block"),
    "optimizer": ("adamw", "adamw_8bit", "sgd"),
}
SHAPE = ("model", "precision", "seq_len", "gradient_checkpointing")  # what phases depend on
STANDING = ("model", "precision", "optimizer")  # what the update depends on
PHASES = ("forward", "loss", "backward", "optimizer")
POINTS = (1, 8, 64)  # batch sizes that are predicted
FIXED = (PARAMETERS, OPTIMIZER, WORKSPACES)  # equal in every phase and at every batch size
VARYING = (GRADIENTS, ACTIVATIONS, CAST_WEIGHTS, LOGITS, TEMPORARIES)
DEVICE = "a100"  # whose kernels and libraries the bytes are of
TIMED = ("t4", "rtx4090", "a100", "h100")
CHANGED = {"dropout": 0.0}  # what all settings change in the config of BF16


def settings(switches: tuple[str, ...]) -> Iterator[Setting]:
    """Yield all settings of some switches."""
    for values in itertools.product(*[SWITCHES[switch] for switch in switches]):
        yield dict(zip(switches, values, strict=True))


def key_of(setting: Setting, switches: tuple[str, ...]) -> str:
    """Return the name under which the table has what depends on some switches."""
    return "/".join(str(setting[switch]) for switch in switches)


def experiment(setting: Setting, batch: int = 1) -> Config:
    """Return the config of a setting: a step is one micro-batch of so many sequences."""
    shape = {"micro_batch_size": batch, "tokens_per_step": batch * setting["seq_len"]}
    return load_config(WITH_BF16.name, **CHANGED | shape | setting)


def rows_of(switches: tuple[str, ...], row_of: Callable[[Setting], Any]) -> dict[str, Callable]:
    """Return {key: what computes its row} for all settings of some switches."""
    return {key_of(setting, switches): partial(row_of, setting) for setting in settings(switches)}


def prediction_of(setting: Setting, batch: int) -> Prediction:
    """Return the prediction of a setting on DEVICE."""
    run = resolve(experiment(setting, batch), machine.card_of(DEVICE))
    return predicted(run.config, run.card)


def clock_of(step: trace.Trace, card_name: str, setting: Setting, *, update: bool) -> Clock | None:
    """Return the clock of a card after the update, or after all before it; None if it cannot."""
    card = machine.card_of(card_name)
    if card.support(experiment(setting).precision).slow:  # emulated, without the step's kernels
        return None
    clock = Clock(card, tf32=False)
    segments = segments_of(step, 1)
    clock.run([part for part in segments if (part.phase == PHASES[-1]) == update])
    return clock


def phases_of(setting: Setting) -> dict[str, Any]:
    """Return what depends on SHAPE: MiB by phase, what a card must have, and milliseconds.

    They are predicted with AdamW. MiB are of VARYING, 0 or a list for POINTS. `needed` is what a
    card must have beyond CUDA's context, as a multiple of the peak. `ms` are those in which each
    card computes, for POINTS. `host` are those that the host takes to issue the work.
    """
    predictions = [prediction_of(setting, batch) for batch in POINTS]
    ledgers = [prediction.ledger for prediction in predictions]
    mib = {}
    for phase in PHASES[:-1]:
        rows = []
        for name in VARYING:
            row = [round(ledger.phases[phase][name] / MIB) for ledger in ledgers]
            rows.append(row if any(row) else 0)
        mib[phase] = rows
    middle = ledgers[1]
    needed = (middle.needed_bytes - CONTEXT_GIB * 2**30) / middle.peak_bytes
    rows, host = [], 0.0
    for card in TIMED:
        clocks = [clock_of(p.trace, card, setting, update=False) for p in predictions]
        rows.append(None if None in clocks else [busy_ms(clock) for clock in clocks])
        host = max([host, *[clock.host for clock in clocks if clock]])
    return {"MiB": mib, "needed": round(needed, 3), "ms": rows, "host": round(1e3 * host)}


def busy_ms(clock: Clock) -> float:
    """Return the milliseconds in which the card computes; below 100 with one digit more."""
    ms = round(1e3 * sum(clock.busy.values()), 1)
    return ms if ms < 100 else round(ms)


def update_of(setting: Setting) -> dict[str, Any]:
    """Return what depends on STANDING: MiB in the optimizer's phase, and milliseconds as above."""
    setting = setting | {"seq_len": 256, "gradient_checkpointing": "none"}
    prediction = prediction_of(setting, 1)
    at_peak = prediction.ledger.phases["optimizer"]
    clocks = [clock_of(prediction.trace, card, setting, update=True) for card in TIMED]
    return {
        "MiB": [round(at_peak[name] / MIB) for name in (*FIXED, *VARYING)],
        "ms": [clock and busy_ms(clock) for clock in clocks],
        "host": round(1e3 * max(clock.host for clock in clocks if clock)),
    }


# ---- amdahl

CARDS_SHOWN = ("t4", "l4", "rtx4090", "a100", "h200")


def card_speeds(card: str) -> dict[str, str | float]:
    """Return what the time ledger says of GPT-2 124M on a card, in 16 bits against float32.

    `share` is that of matrix products in a float32 step, `product` how many times as fast they are
    in 16 bits, and `step` how many times as fast the whole step is. Four digits each.
    """
    name = precision_on(SIXTEEN_BIT.name, CARDS[card])
    before, after = (predict_time(load_config(path), card) for path in ("fp32", name))
    numbers = {
        "share": before.shares[PRODUCTS],
        "product": before.operations[PRODUCT]["ms"] / after.operations[PRODUCT]["ms"],
        "step": before.step_ms / after.step_ms,
    }
    rounded = {key: float(f"{value:.4g}") for key, value in numbers.items()}
    return {"card": card, "precision": name, **rounded}


def cards() -> list[dict[str, str | float]]:
    """Return what is said of each of CARDS_SHOWN, the fastest products last."""
    return sorted(map(card_speeds, CARDS_SHOWN), key=itemgetter("product"))


# ---- step

# Parts of GPT-2 that are told from each other; the page has words for them, and for other marks.
SHOWN = ("wte", "wpe", "ln_1", "c_attn", "c_proj", "ln_2", "c_fc", "act", "ln_f", "lm_head")
CLIP, STEP, END, PEAK = "clip", "step", "end", "peak"  # the other marks
MARK = "mark"
SIGNS = {trace.BIRTH: 1, trace.DEATH: -1}
Alive = Counter[tuple[str, str]]  # {(category, dtype): bytes}
Part = tuple[str, int | None]  # phase, and micro-batch; the optimizer's has none
State = tuple[trace.Segment, Any, Counter]  # with the event after which so many bytes are alive


class Mark(NamedTuple):
    """Stands among the events of a trace: what was just done, and the dtype of its result."""

    name: str
    made: str = ""
    kind: str = MARK
    storage: None = None
    work: None = None


class Moment(NamedTuple):
    """What is alive after a part of a step."""

    phase: str
    name: str
    made: str
    alive: Alive


def marked_trace(config: Config) -> trace.Trace:
    """Return the first step of a config on a CPU, with marks behind the parts of GPT-2."""
    with trace.fake_world(None) as (log, _):

        def mark(text: str, *made: torch.dtype) -> None:
            log.events.append(Mark(text, *map(name_of, made)))

        model = float32_model(config)
        for name, module in model.named_modules():
            if name.endswith(SHOWN):
                module.register_forward_hook(partial(after_module, mark, name))
        for name, parameter in model.named_parameters():
            if name.endswith(".weight"):
                parameter.register_post_accumulate_grad_hook(partial(after_gradient, mark, name))
        optimizer = build_optimizer(model, config)
        optimizer.register_step_pre_hook(lambda *_: mark(CLIP))
        optimizer.register_step_post_hook(lambda *_: mark(STEP))
        ids = torch.zeros((config.micro_batch_size, config.seq_len), dtype=torch.int64)
        return trace.trace_step(
            model,
            [{"input_ids": ids, "labels": ids}],
            lambda model, batch: lm_loss_sum(model, batch) / config.seq_len,
            optimizer,
            log,
            autocast=partial(precision.autocast, config.precision, trace.ON_CPU),
            loss_scale=config.init_scale if PRECISIONS[config.precision].loss_scale else None,
            max_grad_norm=config.max_grad_norm,
        )


def after_module(mark: Callable, text: str, *results: Any) -> None:
    mark(text, results[-1].dtype)


def after_gradient(mark: Callable, text: str, parameter: torch.Tensor) -> None:
    mark(text, parameter.grad.dtype)


def states_of(
    step: trace.Trace, n_micro_batches: int, group_of: Callable[[trace.Storage], Any]
) -> tuple[Counter, list[State]]:
    """Return {group: bytes alive} before a later step than the first, and after its events."""
    before, alive = Counter(), Counter()
    states: list[State] = []
    for number, segment, event in walk(step, n_micro_batches):
        if number == STEPS - 1 and not states:
            before = Counter(alive)
        if event.kind in SIGNS:
            alive[group_of(event.storage)] += SIGNS[event.kind] * event.storage.n_bytes
        if number == STEPS - 1:
            states.append((segment, event, Counter(alive)))
    return before, states


def moments_of(config: Config) -> list[Moment]:
    """Return the moments of a resolved config's step on a CPU, after the first step.

    Each phase has its peak, which is that of `predict_memory`, and ends with END.
    """
    before, states = states_of(marked_trace(config), 1, group_of)
    moments = [Moment("forward", "", "", before)]
    for phase, of_phase in itertools.groupby(states, key=lambda state: state[0].phase):
        place, peak = len(moments), moments[-1].alive
        for _, event, alive in of_phase:
            if event.kind == MARK:
                moments.append(Moment(phase, event.name, event.made, alive))
            if alive.total() > peak.total():
                place, peak = len(moments), alive
        moments.insert(place, Moment(phase, PEAK, "", peak))
        moments.append(Moment(phase, END, "", alive))
    return moments


def run_of(row: Precision) -> dict[str, Any]:
    """Return a step of the small GPT-2 in a precision, on a CPU.

    A moment is [phase, name, dtype of what it made, [group, bytes more, …]]; the first one counts
    from nothing. `groups` are [category, dtype].
    """
    config = resolve(load_config(row.name), CPU).config
    moments = moments_of(config)
    groups = sorted({group for moment in moments for group in moment.alive})
    groups.sort(key=lambda group: trace.CATEGORIES.index(group[0]))
    before: Alive = Counter()
    lines = []
    for moment in moments:
        changes: list[int] = []
        for i, group in enumerate(groups):
            more = moment.alive[group] - before[group]
            changes += [i, more] if more else []
        lines.append([moment.phase, moment.name, moment.made, changes])
        before = moment.alive
    about = {"autocast": row.products if row.autocast else "", "scaler": row.loss_scale}
    about["MiB"] = [round(moment.alive.total() / MIB, 2) for moment in moments]
    halves = [group for group in groups if group[1].endswith("16")]
    sizes = [sum(moment.alive[group] for group in halves) for moment in moments]
    about["MiB in 16 bits"] = [round(n_bytes / MIB, 2) for n_bytes in sizes]
    return {**about, "groups": groups, "moments": lines}


def group_of(storage: trace.Storage) -> tuple[str, str]:
    return storage.category, name_of(storage.dtype)


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# ---- window: bytes are affine in the sequences of a micro-batch, from two on

SEQ_LEN = 64  # as in section 3 of notebook 02
LARGEST = 128  # sequences: up to here no moment is missed that could be a phase's peak
# Of the ledger's categories: a CPU has no workspaces, and float32 no cast weights.
LACKING = (WORKSPACES, CAST_WEIGHTS)
WINDOW = [name for name in (*FIXED, *VARYING) if name not in LACKING]
MOMENTS = 14  # of each phase at least, where it has so many


def window_config(n: int, m: int) -> Config:
    """Return the config of n micro-batches with m sequences each, as in notebook 02."""
    shape = {"seq_len": SEQ_LEN, "micro_batch_size": m, "tokens_per_step": n * m * SEQ_LEN}
    model = {"model": "gpt2-nano", "steps": 1, "lr_warmup_steps": 0}
    return load_config("configs/accumulation_config.yaml", **model, **shape)


def bytes_in(m: int) -> dict[Part, np.ndarray]:
    """Return {part: bytes (events, WINDOW)} of a step of 2 × m sequences."""
    step = trace.trace_config(resolve(window_config(2, m), CPU).config, None)
    parts: dict[Part, list[list[int]]] = {}
    for segment, _, alive in states_of(step, 2, attrgetter("category"))[1]:
        rows = parts.setdefault((segment.phase, segment.micro_batch), [])
        rows.append([alive[category] for category in WINDOW])
    return {part: np.array(rows) for part, rows in parts.items()}


def film() -> list[dict[str, Any]]:
    """Return the parts of a step of two micro-batches, in order: phase, micro-batch, and moments.

    A moment has [bytes at 0 sequences, bytes per sequence] for each of WINDOW. The second
    micro-batch stands for all later ones. Moments are evenly spread; those at which a phase can
    have its peak are among them.
    """
    low, high = bytes_in(2), bytes_in(3)
    parts = []
    for (phase, micro_batch), two in low.items():
        per_sequence = high[phase, micro_batch] - two
        standing = two - 2 * per_sequence
        sizes = np.arange(2, LARGEST + 1)[:, None]
        peaks = (standing.sum(axis=1) + sizes * per_sequence.sum(axis=1)).argmax(axis=1)
        evenly = np.linspace(0, len(two) - 1, MOMENTS).round().astype(int)
        moments = np.stack([standing, per_sequence], axis=2)[np.union1d(evenly, peaks)]
        part = {"phase": phase, "micro_batch": micro_batch, "moments": moments.tolist()}
        parts.append(part)
    return parts


# ---- loss_scale, allreduce: gradients of the small GPT-2 on a CPU

# Where a new part of an octave [2^e, 2^(e+1)) begins, as a multiple of 2^e: behind its first
# number, where rounding goes up to the smallest normal number, and where it goes beyond the
# largest. Multiplied by any power of two, all numbers of one part become the same kind of FP16.
EPS = FP16.spacing(1.0)
OCTAVE_PARTS = (1.0, 2 - EPS, 2 - EPS / 2)


def counted(values: torch.Tensor) -> list[list[int]]:
    """Return [e, n, n, n, n] for each octave [2^e, 2^(e+1)) with absolute values in it.

    The four counts are those of its parts: exactly 2^e, and between the bounds of OCTAVE_PARTS.
    Zeros are left out. With these counts the shares of `fp16_fate` are exact at every power of two.
    """
    half, exponent = torch.frexp(values[values != 0].abs().double())  # half is 0.5 to 1
    bounds = torch.tensor(OCTAVE_PARTS[1:], dtype=torch.float64)
    part = torch.bucketize(2 * half, bounds, right=True) + 1
    part[half == 0.5] = 0
    rows = []
    for e in exponent.unique().tolist():
        rows.append([e - 1, *torch.bincount(part[exponent == e], minlength=4).tolist()])
    return rows


def as_counted(octaves: list[list[int]]) -> torch.Tensor:
    """Return values, float64, of which `counted` says the same: one of each part, repeated."""
    ones = torch.tensor((1.0, 1.5, *OCTAVE_PARTS[1:]), dtype=torch.float64)
    parts = [ones.repeat_interleave(torch.tensor(counts)) * 2.0**e for e, *counts in octaves]
    return torch.cat(parts)


def fp16_fate(values: torch.Tensor, scale: float = 1.0) -> dict[str, float]:
    """Return which share of the non-zero `values`, multiplied by `scale`, FP16 keeps: the four
    shares sum to 1.

    "zero": lost; "subnormal": kept with fewer bits; "normal"; "inf": overflow.
    """
    scaled = values.detach().flatten().double().abs().cpu() * scale
    scaled = scaled[scaled > 0]
    stored = scaled.to(torch.float16)
    shares = {
        "zero": stored == 0,
        "subnormal": (stored > 0) & (stored < FP16.min_normal),
        "normal": (stored >= FP16.min_normal) & stored.isfinite(),
        "inf": stored.isinf(),
    }
    return {name: mask.double().mean().item() for name, mask in shares.items()}


RUN: dict[str, Any] = {"seq_len": 128, "size": 4, "rate": 2e-3}  # of the small GPT-2, from seed 0


def trained(steps: int) -> tuple[torch.nn.Module, list[float]]:
    """Return the model after some steps of RUN, and the largest weight gradient of each."""
    model, largest = build_model("gpt2-nano"), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=RUN["rate"])
    optimizer.register_step_pre_hook(lambda *_: largest.append(flat_gradient(model).abs().max()))
    stream = batches(sequences(RUN["seq_len"]), RUN["size"], seed=0)
    train(model, stream, lm_loss_sum, optimizer, steps=steps, progress=False)
    return model, [size.item() for size in largest]


def mean_loss(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return lm_loss_sum(model, batch) / count_targets(batch)


def real_gradients() -> torch.Tensor:
    """Return what query, key and value pass back in each block, as in section 7 of notebook 01:
    after 12 steps of RUN, in float32. With it stands the largest gradient of a weight, the first to
    overflow.
    """
    model, kept = trained(12)[0].eval(), []
    for block in model.transformer.h:
        block.attn.c_attn.register_full_backward_hook(
            lambda _, __, outputs: kept.append(outputs[0])
        )
    stream = batches(sequences(RUN["seq_len"]), RUN["size"], seed=0)
    batch = next(itertools.islice(stream, 12, None))
    mean_loss(model, batch).backward()
    of_weights = flat_gradient(model).abs().max()
    return torch.cat([*(gradient.flatten() for gradient in kept), of_weights[None]])


def workers() -> str:
    """Return 64 elements of 64 workers' gradients before training, `(64, 64)`, float32 in base64.

    Each worker has a sequence of 32 tokens. An element that is 0 for one of them is left out: it
    says nothing about rounding.
    """
    model, stream = build_model("gpt2-nano", dropout=0.0), batches(sequences(32), 1, seed=0)
    rows = []
    for _ in range(64):
        model.zero_grad()
        mean_loss(model, next(stream)).backward()
        rows.append(flat_gradient(model)[::97])
    nonzero = torch.stack(rows)[:, (torch.stack(rows) != 0).all(0)]
    values = nonzero[:, :: nonzero.shape[1] // 64][:, :64].contiguous()
    return base64.b64encode(values.numpy().tobytes()).decode()


# What computes the parts of an exhibit's data that take time, or that come out a little different
# on another machine.
SHOWN_PRECISIONS = [
    row for row in PRECISIONS.values() if not row.not_on_cpu and row.weights == "float32"
]
TABLES: dict[str, dict[str, Any]] = {
    "allreduce": {"gradients": workers},
    "amdahl": {"cards": cards},
    "loss_scale": {
        "octaves": lambda: counted(real_gradients()),
        "largest": lambda: trained(30)[1],
    },
    "plan": {"phases": rows_of(SHAPE, phases_of), "update": rows_of(STANDING, update_of)},
    "step": {"runs": {row.name: partial(run_of, row) for row in SHOWN_PRECISIONS}},
    "window": {"film": film},
}
