"""Steps that others measured on named cards, and how near the predictions are to them.

`python -m labutils.prediction.published` prints the table.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import pandas as pd
import yaml

from labutils.config.card import Card, Speed
from labutils.config.cards import CARDS
from labutils.config.reader import load_config
from labutils.config.schema import Config
from labutils.files import REFERENCE_DIR
from labutils.prediction.time import TimeLedger, predict_time

# What the published loops have that is not in the table: no dropout, AdamW over lists of tensors.
BASE = {
    "tokens_per_step": 0,
    "dropout": 0.0,
    "activation": "gelu_tanh",
    "optimizer_impl": "foreach",
    "max_grad_norm": 0.0,
}


@lru_cache(maxsize=1)
def published() -> pd.DataFrame:
    """Return the rows of `reference/published.csv`: milliseconds, and what was timed."""
    return pd.read_csv(REFERENCE_DIR / "published.csv", dtype={"memory": str})


def config_of_row(text: str) -> Config:
    """Return the config of a row, from its `key=value` words."""
    values = dict(BASE)
    for word in text.split():
        key, _, value = word.partition("=")
        values[key] = yaml.safe_load(value)
    values["tokens_per_step"] = (
        values["tokens_per_step"] or values["micro_batch_size"] * values["seq_len"]
    )
    return load_config("fp32", **values)


def predicted_ms(ledger: TimeLedger, what: str, n_micro_batches: int) -> float:
    """Return that part of a predicted step which a row's time is of."""
    phases = ledger.phases_ms
    forward = phases["forward"] + phases["loss"]
    if what == "forward":
        return forward
    if what == "forward and backward":
        return forward + phases["backward"]
    return ledger.step_ms / (n_micro_batches if what == "micro-step" else 1)


def datasheet_only(card: Card) -> Card:
    """Return a card that reaches its datasheet's peaks: what a plain roofline assumes."""
    speed = card.speed
    ideal = Speed(speed.tflops, speed.gb_per_s, speed.tflops, elements=1.0, rows=1.0)
    return replace(card, speed=ideal)


def scored(rows: pd.DataFrame | None = None) -> pd.DataFrame:
    """Return published rows, all if none are given, beside their predictions and a roofline's."""
    found = []
    for row in (published() if rows is None else rows).itertuples():
        config = config_of_row(row.config)
        ledger = predict_time(config, row.card)
        ms = predicted_ms(ledger, row.what, config.grad_accum_steps)
        roofline = predict_time(config, datasheet_only(CARDS[row.card]))
        roofline_ms = predicted_ms(roofline, row.what, config.grad_accum_steps)
        low, high = ledger.low_ms / ledger.step_ms, ledger.high_ms / ledger.step_ms
        error = ms / row.ms - 1
        found.append(
            {
                "id": row.id,
                "card": row.card,
                "what": row.what,
                "published ms": row.ms,
                "predicted ms": round(ms, 1),
                "error %": round(100 * error),
                "roofline error %": round(100 * (roofline_ms / row.ms - 1)),
                "band": f"{100 * (low - 1):+.0f} to {100 * (high - 1):+.0f} %",
                "inside": low * ms <= row.ms <= high * ms,
            }
        )
    return pd.DataFrame(found)


if __name__ == "__main__":
    table = scored()
    print(table.to_string(index=False))
    median = table["error %"].abs().median()
    print(f"median |error| {median:.0f} %, inside the band {table['inside'].mean():.0%}")
