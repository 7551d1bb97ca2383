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
    return parts[row.what] + 1e3 * row.besides_gb / (
        card.speed.elements_share * card.speed.gb_per_s
    )


def uncalibrated(card: Card) -> Card:
    """Return a card on which nothing was measured."""
    return replace(card, speed=Speed(card.speed.tflops, card.speed.gb_per_s, {}))


def scored(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the errors in % by the id of published rows, and whether the step lies in its band.

    `error` is of the prediction, `uncalibrated` without what was measured on the card. `width` is
    half the band, in % of the prediction.
    """
    scores = {}
    for row in rows.itertuples():
        config, card = config_of_row(row.config), CARDS[row.card]
        score = {"card": row.card, "source": row.id[0]}
        for name, known in {"error": card, "uncalibrated": uncalibrated(card)}.items():
            ledger = predict_time(config, known)
            ms = predicted_ms(row, ledger, known, config.grad_accum_steps)
            low, high = ledger.low_ms / ledger.step_ms, ledger.high_ms / ledger.step_ms
            score[name] = 100 * (ms / row.ms - 1)
            score[f"{name} inside"] = low * ms <= row.ms <= high * ms
            score[f"{name} width"] = 50 * (high - low)
        scores[row.id] = score
    return pd.DataFrame.from_dict(scores, orient="index")


def by_group(table: pd.DataFrame, column: str, error: str = "error") -> pd.DataFrame:
    """Return the errors in % by card or source: steps, median of |error|, bias, and extremes.

    `covered` is the share of the steps, in %, that a band holds which was drawn around all others:
    from the 5 % to the 95 % quantile of measured by predicted.
    """
    ratios = 1 / (1 + table[error] / 100)
    groups = {}
    for name, own in ratios.groupby(table[column]):
        errors, others = table.loc[own.index, error], ratios.drop(own.index)
        groups[name] = {
            "steps": len(own),
            "median": errors.abs().median(),
            "bias": errors.mean(),
            "lowest": errors.min(),
            "highest": errors.max(),
            "covered": 100 * own.between(*others.quantile([0.05, 0.95])).mean(),
        }
    return pd.DataFrame.from_dict(groups, orient="index").round(1)


if __name__ == "__main__":
    table = scored(published())
    print(table.round(1).to_string())
    for error in ("error", "uncalibrated"):
        print(error, by_group(table, "card", error), by_group(table, "source", error), sep="\n")
