"""How near the predicted times are to published steps: `python -m tests.prediction.time_error`.

No constant was fitted to these steps. So each card, and each source, is predicted as if its steps
had been left out.
"""

from __future__ import annotations

from dataclasses import replace

import pandas as pd

from labutils.config.card import CARDS, Card, Speed
from labutils.prediction.published import config_of_row, published
from labutils.prediction.time import TimeLedger, predict_time


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
    ideal = Speed(speed.tflops, speed.gb_per_s, speed.tflops, 1.0, 1.0, unaligned=1.0, layers=1.0)
    return replace(card, speed=ideal)


def scored(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the errors in % of predictions and of a plain roofline, by the id of published rows.

    `inside` tells whether the published time lies in the band.
    """
    found = {}
    for row in rows.itertuples():
        config = config_of_row(row.config)
        ledger = predict_time(config, row.card)
        roofline = predict_time(config, datasheet_only(CARDS[row.card]))
        ms, roofline_ms = (
            predicted_ms(each, row.what, config.grad_accum_steps) for each in (ledger, roofline)
        )
        low, high = ledger.low_ms / ledger.step_ms, ledger.high_ms / ledger.step_ms
        errors = 100 * (ms / row.ms - 1), 100 * (roofline_ms / row.ms - 1)
        found[row.id] = *errors, low * ms <= row.ms <= high * ms
    return pd.DataFrame(found, index=["error", "roofline", "inside"]).T


def by_group(table: pd.DataFrame, column: str) -> pd.DataFrame:
    """Return the errors in % of published steps by card or source: median, bias, and extremes."""
    rows = published().set_index("id")
    rows["source"] = rows.index.str[0]  # ids begin with a letter for their source
    groups = rows.loc[table.index, column]
    errors = table.error.astype(float).groupby(groups)
    return pd.DataFrame(
        {
            "steps": errors.size(),
            "median error": errors.apply(lambda group: group.abs().median()),
            "bias": errors.mean(),
            "lowest": errors.min(),
            "highest": errors.max(),
        }
    ).round(1)


if __name__ == "__main__":
    table = scored(published())
    print(table.to_string(), by_group(table, "card"), by_group(table, "source"), sep="\n\n")
    print(table.drop(columns="inside").abs().astype(float).median(), table.error.mean())
