"""Computes the tables of exhibits: `python -m benchmarks.exhibit_tables [--again]`.

plan: each setting is predicted at the batch sizes of POINTS; the page draws straight lines between
them. amdahl: what the time ledger says of some cards. step: what is alive at each moment of a
training step. What there is already is kept, so it can be stopped and continued.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from labutils.config.card import CONTEXT_GIB, CPU
from labutils.config.cards import CARDS
from labutils.config.choices import PRECISIONS, SIXTEEN_BIT, Precision
from labutils.config.reader import load_config
from labutils.config.resolve import precision_on, resolve
from labutils.config.schema import Config
from labutils.exhibits import plan_data as plan
from labutils.exhibits.exhibit import FOLDER
from labutils.files import write_atomically
from labutils.machine import here
from labutils.memory.kinds import PRODUCT
from labutils.memory.ledger import MIB
from labutils.prediction import replay, trace
from labutils.prediction.memory import BatchSizes
from labutils.prediction.time import PRODUCTS, Clock, predict_time
from labutils.techniques import precision
from labutils.techniques.loss import lm_loss_sum
from labutils.workload.build import build_optimizer, float32_model

CARDS_SHOWN = ("t4", "l4", "rtx4090", "a100", "h200")


def complete(name: str, part: str, makers: dict[str, Callable[[], Any]]) -> None:
    """Compute the rows that a part of a table lacks; store it after each of them."""
    path = FOLDER / f"{name}.json"
    table = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    rows = table.setdefault(part, {})
    for key, make in makers.items():
        if key not in rows:
            rows[key] = make()
            write_atomically(path, text_of(table).encode())
            print(name, part, key, flush=True)


def text_of(table: dict[str, dict[str, Any]]) -> str:
    """Return a table as JSON, with a line for each row of its parts."""
    parts = []
    for part, rows in table.items():
        texts = [json.dumps(row, separators=(",", ":")) for row in rows.values()]
        lines = [f'"{key}":{text}' for key, text in zip(rows, texts, strict=True)]
        parts.append(f'"{part}": {{\n' + ",\n".join(lines) + "\n}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


# ---- plan


def sizes_of(setting: plan.Setting) -> BatchSizes:
    """Return the predictions of a setting on DEVICE, at any batch size."""
    run = resolve(plan.experiment(setting), here.card_of(plan.DEVICE))
    return BatchSizes(run.config, run.card)


def clock_of(step: trace.Trace, card_name: str, sizes: BatchSizes, *, update: bool) -> Clock | None:
    """Return the clock of a card after the update, or after all before it; None if it cannot."""
    card = here.card_of(card_name)
    if not card.support(sizes.config.precision).ok:
        return None
    clock = Clock(card, tf32=False, is_compiled=False)
    segments = replay.segments_of(step, 1, 1)
    clock.run([part for part in segments if (part.phase == plan.PHASES[-1]) == update], [])
    return clock


def phases_of(setting: plan.Setting) -> dict[str, Any]:
    """Return what depends on SHAPE: MiB by phase, what a card must have, and milliseconds.

    They are predicted with AdamW. MiB are of VARYING, 0 or a list for POINTS. `needed` is what a
    card must have beyond CUDA's context, as a multiple of the peak. `ms` are those in which each
    card computes, for POINTS. `host` are those that the host takes to issue the work.
    """
    sizes = sizes_of(setting)
    ledgers = [sizes.at(batch).ledger for batch in plan.POINTS]
    mib = {}
    for phase in plan.PHASES[:-1]:
        rows = []
        for name in plan.VARYING:
            row = [round(ledger.phases[phase][name] / MIB) for ledger in ledgers]
            rows.append(row if any(row) else 0)
        mib[phase] = rows
    middle = ledgers[1]
    needed = (middle.needed_bytes - CONTEXT_GIB * 2**30) / middle.peak_bytes
    rows, host = [], 0.0
    for card in plan.TIMED:
        clocks = [clock_of(sizes.traces.at(n, 1), card, sizes, update=False) for n in plan.POINTS]
        rows.append(None if None in clocks else [busy_ms(clock) for clock in clocks])
        host = max([host, *[clock.host for clock in clocks if clock]])
    return {"MiB": mib, "needed": round(needed, 3), "ms": rows, "host": round(1e3 * host)}


def busy_ms(clock: Clock) -> float:
    """Return the milliseconds in which the card computes; below 100 with one digit more."""
    ms = round(1e3 * sum(clock.busy.values()), 1)
    return ms if ms < 100 else round(ms)


def update_of(setting: plan.Setting) -> dict[str, Any]:
    """Return what depends on STANDING: MiB in the optimizer's phase, and milliseconds as above."""
    sizes = sizes_of(setting | {"seq_len": 256, "gradient_checkpointing": "none"})
    at_peak = sizes.at(1).ledger.phases["optimizer"]
    clocks = [clock_of(sizes.traces.at(1, 1), card, sizes, update=True) for card in plan.TIMED]
    return {
        "MiB": [round(at_peak[name] / MIB) for name in (*plan.FIXED, *plan.VARYING)],
        "ms": [clock and busy_ms(clock) for clock in clocks],
        "host": round(1e3 * max(clock.host for clock in clocks if clock)),
    }


PLAN_PARTS = (("phases", plan.SHAPE, phases_of), ("update", plan.STANDING, update_of))


# ---- amdahl


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


# ---- step

NAMES = {  # a part of GPT-2, for a reader; a part of a block follows "block N, "
    "wte": "token embedding",
    "wpe": "position embedding",
    "ln_1": "first layer norm",
    "attn.c_attn": "query, key, value",
    "attn.c_proj": "output of attention",
    "ln_2": "second layer norm",
    "mlp.c_fc": "first layer of the MLP",
    "mlp.act": "activation function",
    "mlp.c_proj": "second layer of the MLP",
    "ln_f": "last layer norm",
    "lm_head": "logits",
}
CLIPPED, STEPPED = "the gradients are clipped", "the weights are updated"
ENDS = {
    "loss": "the loss is known",
    "backward": "all gradients are complete",
    "optimizer": "the gradients are freed",
}


UPDATE, MARK = "optimizer", "mark"
Alive = Counter[tuple[str, str]]  # {(category, dtype): bytes}


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
    text: str
    made: str
    alive: Alive


def marked_trace(config: Config) -> trace.Trace:
    """Return the first step of a config on a CPU, with marks behind the parts of GPT-2."""
    with trace.fake_world(None) as (log, _):

        def mark(text: str, *made: torch.dtype) -> None:
            log.events.append(Mark(text, *map(name_of, made)))

        model = float32_model(config)
        for name, module in model.named_modules():
            if reader_name(name):
                module.register_forward_hook(partial(after_module, mark, reader_name(name)))
        for name, parameter in model.named_parameters():
            if name.endswith(".weight"):
                text = f"the gradient of a weight: {reader_name(name.removesuffix('.weight'))}"
                parameter.register_post_accumulate_grad_hook(partial(after_gradient, mark, text))
        optimizer = build_optimizer(model, config)
        optimizer.register_step_pre_hook(lambda *_: mark(CLIPPED))
        optimizer.register_step_post_hook(lambda *_: mark(STEPPED))
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


def moments_of(config: Config, *, has_scaler: bool) -> list[Moment]:
    """Return the moments of a resolved config's step on a CPU, after the first step.

    The first is before the forward pass, the last after the gradients are cleared. Each phase up to
    backward has a moment with its peak, which is that of `predict_memory`.
    """
    step = marked_trace(config)
    living = {id(storage) for storage in step.lasting()}
    alive: Alive = Counter()
    for storage in step.lasting():
        alive[group_of(storage)] += storage.n_bytes
    moments = [Moment("forward", "before the step", "", Counter(alive))]
    for phase, segments in itertools.groupby(step.segments, key=lambda segment: segment.phase):
        part: list[Moment] = []
        place, peak = 0, Counter(alive)
        for event in itertools.chain(*[segment.events for segment in segments]):
            storage = event.storage
            if event.kind == MARK:
                part.append(Moment(phase, event.name, event.made, Counter(alive)))
            elif event.kind == trace.BIRTH and storage.category not in trace.LASTING:
                living.add(id(storage))
                alive[group_of(storage)] += storage.n_bytes
            elif event.kind == trace.DEATH and id(storage) in living:
                living.remove(id(storage))
                alive[group_of(storage)] -= storage.n_bytes
            if alive.total() > peak.total():
                place, peak = len(part), Counter(alive)
        part.append(Moment(phase, ENDS.get(phase, ""), "", Counter(alive)))
        part.insert(place, Moment(phase, "the most bytes of this phase", "", peak))
        if phase == UPDATE:
            part = lines_of_update(part, moments[-1].alive, has_scaler=has_scaler)
        moments += [moment for moment in part if moment.text]
    return moments


def lines_of_update(update: list[Moment], before: Alive, *, has_scaler: bool) -> list[Moment]:
    """Return the moments of a loop's lines behind the backward pass.

    A GradScaler cannot run in the trace. It divides in place, and changes one number: the bytes
    stay.
    """
    clipped = next(moment.alive for moment in update if moment.text == CLIPPED)
    stepped = [moment.alive for moment in update if moment.text == STEPPED][-1]
    lines = [
        Moment("unscale", "the gradients are divided by the scale", "", before),
        Moment("clip", CLIPPED, "", clipped),
        Moment("step", STEPPED, "", stepped),
        Moment("update", "the scaler chooses the next scale", "", stepped),
        Moment("clear", ENDS[UPDATE], "", update[-1].alive),
    ]
    return [line for line in lines if has_scaler or line.phase not in ("unscale", "update")]


def run_of(row: Precision) -> dict[str, Any]:
    """Return a step of the small GPT-2 in a precision, on a CPU.

    A moment is [phase, text, dtype of what it made, [group, bytes more, …]]; the first one counts
    from nothing. `groups` are [category, dtype].
    """
    config = resolve(load_config(row.name), CPU).config
    moments = moments_of(config, has_scaler=row.loss_scale)
    groups = sorted({group for moment in moments for group in moment.alive})
    groups.sort(key=lambda group: trace.CATEGORIES.index(group[0]))
    before: Alive = Counter()
    lines = []
    for moment in moments:
        changes: list[int] = []
        for i, group in enumerate(groups):
            more = moment.alive[group] - before[group]
            changes += [i, more] if more else []
        lines.append([moment.phase, moment.text, moment.made, changes])
        before = moment.alive
    about = {"autocast": row.products if row.autocast else "", "scaler": row.loss_scale}
    return {**about, "groups": groups, "moments": lines}


def group_of(storage: trace.Storage) -> tuple[str, str]:
    return storage.category, name_of(storage.dtype)


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def reader_name(module: str) -> str:
    """Return what a reader calls a part of GPT-2, "" for a part without a name."""
    parts = module.removeprefix("transformer.").split(".")
    if parts[0] != "h" or len(parts) < 3:
        return NAMES.get(".".join(parts), "")
    label = NAMES.get(".".join(parts[2:]), "")
    return label and f"block {int(parts[1]) + 1}, {label}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser("python -m benchmarks.exhibit_tables", description=__doc__)
    parser.add_argument("--again", action="store_true", help="all, not only what is missing")
    if parser.parse_args().again:
        for path in FOLDER.glob("*.json"):
            path.unlink()
    rows = [row for row in PRECISIONS.values() if not row.not_on_cpu and row.weights == "float32"]
    complete("step", "runs", {row.name: partial(run_of, row) for row in rows})
    cards = {card: partial(card_speeds, card) for card in CARDS_SHOWN}
    complete("amdahl", "cards", cards)
    for part, switches, predicted in PLAN_PARTS:
        settings = list(plan.settings(switches))
        makers = {plan.key_of(one, switches): partial(predicted, one) for one in settings}
        complete("plan", part, makers)
