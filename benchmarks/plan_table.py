"""Computes the table of the exhibit `plan`: `python -m benchmarks.plan_table`.

Each setting is predicted at the batch sizes of POINTS; the page draws straight lines between them.
Nothing is computed twice: what the table has already is kept.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from labutils import machine
from labutils.config.card import CONTEXT_GIB
from labutils.config.schema import resolve
from labutils.exhibits.plan_data import (
    DEVICE,
    FIXED,
    PHASES,
    POINTS,
    SHAPE,
    STANDING,
    TABLE,
    TIMED,
    VARYING,
    Setting,
    experiment,
    key_of,
    settings,
)
from labutils.files import write_atomically
from labutils.memory.ledger import MIB
from labutils.prediction.memory import Prediction, predicted, segments_of
from labutils.prediction.time import Clock
from labutils.prediction.trace import Trace


def prediction_of(setting: Setting, batch: int) -> Prediction:
    """Return the prediction of a setting on DEVICE."""
    run = resolve(experiment(setting, batch), machine.card_of(DEVICE))
    return predicted(run.config, run.card)


def clock_of(trace: Trace, card_name: str, setting: Setting, *, update: bool) -> Clock | None:
    """Return the clock of a card after the update, or after all before it; None if it cannot."""
    card = machine.card_of(card_name)
    if not card.support(experiment(setting).precision).ok:
        return None
    clock = Clock(card, tf32=False, is_compiled=False)
    segments = segments_of(trace, 1)
    clock.run([part for part in segments if (part.phase == PHASES[-1]) == update], [])
    return clock


def phases_of(setting: Setting) -> dict[str, Any]:
    """Return what depends on SHAPE: MiB by phase, what a card must have, and milliseconds.

    They are predicted with AdamW. MiB are of VARYING, 0 or a list for POINTS. `needed` is what a card must have beyond CUDA's
    context, as a multiple of the peak. `ms` are those in which each card computes, for POINTS.
    `host` are those that the host takes to issue the work.
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


def write(table: dict[str, Any]) -> None:
    """Store the table: a line for each setting."""
    parts = []
    for name in ("phases", "update"):
        rows = []
        for key, row in table[name].items():
            rows.append(f'"{key}":' + json.dumps(row, separators=(",", ":")))
        parts.append(f'"{name}": {{\n' + ",\n".join(rows) + "\n}")
    write_atomically(TABLE, ("{\n" + ",\n".join(parts) + "\n}\n").encode())


def make(models: list[str]) -> None:
    """Compute what the table lacks of some models, and store it after each setting."""
    table: dict[str, Any] = {"phases": {}, "update": {}}
    if TABLE.exists():
        table |= json.loads(TABLE.read_text(encoding="utf-8"))
    parts = {"update": (STANDING, update_of), "phases": (SHAPE, phases_of)}
    for part, (switches, compute) in parts.items():
        for setting in settings(switches):
            key = key_of(setting, switches)
            if key not in table[part] and setting["model"] in models:
                table[part][key] = compute(setting)
                write(table)
                print(part, key, flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser("python -m benchmarks.plan_table", description=__doc__)
    parser.add_argument("--again", action="store_true", help="all, not only what is missing")
    models = [setting["model"] for setting in settings(("model",))]
    parser.add_argument("--models", nargs="+", default=models, help="only these")
    options = parser.parse_args()
    if options.again:
        TABLE.unlink(missing_ok=True)
    make(options.models)
