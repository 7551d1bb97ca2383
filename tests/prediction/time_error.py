"""How near the predicted times are to published steps: `python -m tests.prediction.time_error`.

No constant was fitted to these steps: all come from single operations. So the errors of a card, or
of a source, are those of a ledger that does not know its steps. Harder is to leave out what was
measured on the card as well: it is predicted as an uncalibrated one.
"""

from __future__ import annotations

from dataclasses import replace

import pandas as pd

from labutils.config.card import CARDS, Card, Speed
from labutils.prediction.published import config_of_row, published
from labutils.prediction.time import TimeLedger, predict_time


def predicted_ms(row, ledger: TimeLedger, card: Card, n_micro_batches: int) -> float:
    """Return the milliseconds of what was timed in a row: a part of the step, or more than it."""
    phases = ledger.phases_ms
    forward = phases["forward"] + phases["loss"]
    parts = {
        "forward": forward,
        "forward and backward": forward + phases["backward"],
        "step": ledger.step_ms,
        "micro-step": ledger.step_ms / n_micro_batches,
    }
    return parts[row.what] + 1e3 * row.besides_gb / (card.speed.elements * card.speed.gb_per_s)


def uncalibrated(card: Card) -> Card:
    """Return a card on which nothing was measured."""
    return replace(card, speed=Speed(card.speed.tflops, card.speed.gb_per_s, {}))


def datasheet_only(card: Card) -> Card:
    """Return a card that reaches its datasheet's peaks: what a plain roofline assumes."""
    speed = card.speed
    ideal = Speed(speed.tflops, speed.gb_per_s, speed.tflops, 1.0, 1.0, unaligned=1.0, layers=1.0)
    return replace(card, speed=ideal)


def scored(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the errors in % by the id of published rows, and whether the step lies in its band.

    `error` is of the prediction, `uncalibrated` without what was measured on the card, `roofline`
    at its datasheet's peaks. `width` is half the band, in % of the prediction.
    """
    scores = {}
    for row in rows.itertuples():
        config, card = config_of_row(row.config), CARDS[row.card]
        score = {"card": row.card, "source": row.id[0], "compiled": config.compile != "off"}
        for name, known in {
            "error": card,
            "uncalibrated": uncalibrated(card),
            "roofline": datasheet_only(card),
        }.items():
            ledger = predict_time(config, known)
            ms = predicted_ms(row, ledger, known, config.grad_accum_steps)
            score[name] = 100 * (ms / row.ms - 1)
            low, high = ledger.low_ms / ledger.step_ms, ledger.high_ms / ledger.step_ms
            if name != "roofline":
                score[f"{name} inside"] = low * ms <= row.ms <= high * ms
                score[f"{name} width"] = 50 * (high - low)
        scores[row.id] = score
    return pd.DataFrame.from_dict(scores, orient="index")


def by_group(table: pd.DataFrame, column: str, error: str = "error") -> pd.DataFrame:
    """Return the errors in % by card or source: steps, median of |error|, bias, and extremes.

    `covered` is the share of the steps, in %, that a band holds which was drawn around all others:
    from the 5 % to the 95 % quantile of measured by predicted.
    """
    groups = {}
    for name, group in table.groupby(column):
        others = 1 / (1 + table.loc[table.index.difference(group.index), error] / 100)
        ratio = 1 / (1 + group[error] / 100)
        groups[name] = {
            "steps": len(group),
            "median": group[error].abs().median(),
            "bias": group[error].mean(),
            "lowest": group[error].min(),
            "highest": group[error].max(),
            "covered": 100 * ratio.between(*others.quantile([0.05, 0.95])).mean(),
        }
    return pd.DataFrame.from_dict(groups, orient="index").round(1)


if __name__ == "__main__":
    table = scored(published())
    print(table.round(1).to_string(), table.describe().round(1).to_string(), sep="\n")
    for error in ("error", "uncalibrated"):
        print(error, by_group(table, "card", error), by_group(table, "source", error), sep="\n")
