"""Computes the table of the exhibit `choose`: `python -m benchmarks.choose_table`.

A row for each card and model: a config for each symptom, with its bytes and milliseconds. They are
what `lab.fit`, `predict_memory` and `predict_time` say of one job, the shipped float32 config.
"""

from __future__ import annotations

import argparse
import json
import math
from typing import Any

from labutils.config.card import CONTEXT_GIB, CPU, Card
from labutils.config.cards import CARDS
from labutils.config.choices import PRECISIONS
from labutils.config.reader import load_config
from labutils.config.resolve import resolve
from labutils.config.schema import Config
from labutils.exhibits.choose_data import (
    BASE,
    CHOSEN,
    MODELS_ON_CARDS,
    NO_CARD,
    TABLE,
    Row,
    base_on_cpu,
    read,
)
from labutils.files import write_atomically
from labutils.prediction.memory import BatchSizes
from labutils.prediction.search import fit
from labutils.prediction.time import predict_time

SYMPTOMS = ("begin", "memory", "slow", "nan")
LESS = 0.75  # of the memory, where a job fits and memory is short all the same
FASTER = {"activation": "gelu_tanh", "pad_vocab": True}
SAFER_RATE = 0.5  # times the learning rate, where a loss becomes NaN


def write(table: dict[str, dict[str, Row]]) -> None:
    """Store the table: a line for each row."""
    parts = []
    for card, models in table.items():
        rows = [f'"{model}": {json.dumps(row)}' for model, row in models.items()]
        parts.append(f'"{card}": {{\n' + ",\n".join(rows) + "\n}")
    write_atomically(TABLE, ("{\n" + ",\n".join(parts) + "\n}\n").encode())


def make() -> None:
    """Compute what the table lacks, and store it after each row."""
    known = read() if TABLE.exists() else {}
    table = {NO_CARD: known.get(NO_CARD) or {str(base_on_cpu().model): recommended_on_cpu()}}
    for card in CHOSEN:
        table[card] = known.get(card, {})
    for card in CHOSEN:
        for model in MODELS_ON_CARDS:
            if model not in table[card]:
                table[card][model] = recommended(CARDS[card], model)
                write(table)
                print(card, model, flush=True)
    write(table)


def recommended(card: Card, model: str) -> Row:
    """Return the row of a model on a card.

    `changes` are to the shipped config in float32. "base" has what that takes itself; its `gib` is
    all that a card must have, its `ms` a step.
    """
    base = load_config(BASE, model=model)
    precision = fastest_precision(base, card)
    start = base.model_copy(update={"precision": precision})
    begin = fit(start, card.memory_gib, card)
    found = {"base": facts(base, {}, card)}
    found["begin"] = facts(base, {"precision": precision} | begin.changes, card)
    found["memory"] = found["begin"]
    if not begin.changes:
        less = fit(start, less_than(begin.needed_gib, CONTEXT_GIB), card)
        found["memory"] = facts(base, {"precision": precision} | less.changes, card)
    found["slow"] = fastest(base, found["begin"], card)
    safe = found["begin"]["changes"] | {"learning_rate": SAFER_RATE * base.learning_rate}
    found["nan"] = facts(base, safe, card)
    return found


def recommended_on_cpu() -> Row:
    """Return the same without a card, for the model that is trained on a CPU; "ms" is None.

    `changes` are to what `when_cpu` sets. How fast a CPU is depends on the machine.
    """
    base = base_on_cpu()
    begin = fit(base, math.inf, CPU)
    less = fit(base, less_than(begin.needed_gib, 0), CPU)
    plain = {"changes": {}, "gib": round(begin.needed_gib, 2), "ms": None, "fits": True}
    memory = plain | {"changes": less.changes, "gib": round(less.needed_gib, 2)}
    slower = {"learning_rate": SAFER_RATE * base.learning_rate}
    found = {"base": plain, "begin": plain, "memory": memory, "slow": plain}
    return found | {"nan": plain | {"changes": slower}}


def less_than(gib: float, context_gib: float) -> float:
    """Return a smaller budget: the context stays as it is."""
    return context_gib + LESS * (gib - context_gib)


def fastest_precision(base: Config, card: Card) -> str:
    """Return the precision with float32 weights and the shortest predicted step on the card."""
    times = {}
    for row in PRECISIONS.values():
        support = card.support(row.name)
        if row.weights == "float32" and support.ok and not support.slow:
            config = base.model_copy(update={"precision": row.name})
            times[row.name] = predict_time(config, card).step_ms
    return min(times, key=times.get)


def fastest(base: Config, begin: dict[str, Any], card: Card) -> dict[str, Any]:
    """Return the facts of the shortest predicted step that fits, with what FASTER has."""
    found = [begin]
    sequences = base.tokens_per_step // base.seq_len
    for size in {begin["changes"].get("micro_batch_size", base.micro_batch_size), sequences}:
        changes = begin["changes"] | FASTER | {"micro_batch_size": size}
        found.append(facts(base, changes, card))
    fitting = [one for one in found if one["fits"]]
    return min(fitting or [begin], key=lambda one: one["ms"])


def facts(base: Config, changes: dict[str, Any], card: Card) -> dict[str, Any]:
    """Return what is predicted with some changes; without those that change nothing."""
    changes = {key: value for key, value in changes.items() if getattr(base, key) != value}
    config = base.model_copy(update=changes)
    run = resolve(config, card)
    prediction = BatchSizes(run.config, card).at(config.micro_batch_size)
    return {
        "changes": changes,
        "gib": round(prediction.needed_gib, 2),
        "ms": float(f"{predict_time(config, card).step_ms:.3g}"),
        "fits": prediction.fits(card.memory_gib),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Make the table of the exhibit `choose`.")
    parser.add_argument("--again", action="store_true", help="all, not only what is missing")
    if parser.parse_args().again:
        TABLE.unlink(missing_ok=True)
    make()
