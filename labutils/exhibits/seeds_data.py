"""The exhibit `seeds`: recorded runs of several precisions over seeds."""

from __future__ import annotations

import pandas as pd

from labutils.exhibits.exhibit import Exhibit, make_exhibit
from labutils.plotting import curves
from labutils.training.noise import T_95
from labutils.training.record import read_record

# Nats per token: half a per cent of the perplexity. At the small rate one step of FP32 gains more.
WORTH_TELLING = 0.005
KINDS = {"pure": "pure", "sr": "stochastic rounding"}  # parts of an arm's name, as words


def seeds() -> Exhibit:
    """Return an exhibit: recorded runs of several precisions, and whether two of them differ.

    The record is that of stability. {"rate arm": runs} have a number after each of `steps`; a loss
    that is not finite is NaN. `skipped` has the arms that skip steps.
    """
    rows = read_record("stability")
    facts = rows.attrs
    data = {
        "arms": {arm: _words(arm) for arm in rows.arm.unique()},
        "rates": [text.rsplit(" ", 1) for text in facts["rates"].partition(";")[0].split(", ")],
        "steps": rows.step.unique().tolist(),
        "t": T_95,
        "worth_telling": WORTH_TELLING,
        "loss": _runs(rows, "loss"),
        "skipped": _runs(rows[rows.arm.isin(rows[rows.skipped > 0].arm)], "skipped"),
        "made": f"{facts['device']}, torch {facts['torch']}, {facts['created'][:10]}",
    }
    losses = rows[rows.rate == "small"].groupby(["arm", "step"]).loss.mean().unstack("arm")
    above = losses.pure_bf16 - losses.fp32
    lines = {"pure BF16": dict(above), "BF16 autocast": dict(losses.bf16 - losses.fp32)}
    return make_exhibit(
        "seeds",
        "One run says little: precisions over seeds",
        "Choose two precisions, and how many seeds you have. See whether their losses differ.",
        data,
        curves(lines, "steps at the small rate", "loss above FP32, mean of the seeds"),
        f"Pure BF16 falls {above.iloc[-1]:.3f} behind FP32 and further with each step; "
        "BF16 autocast does not",
    )


def _words(arm: str) -> str:
    return " ".join(KINDS.get(part, part.upper()) for part in arm.split("_"))


def _runs(rows: pd.DataFrame, name: str) -> dict[str, list[list[float]]]:
    runs = {}
    for (rate, arm), table in rows.groupby(["rate", "arm"]):
        wide = table.pivot(index="seed", columns="step", values=name)
        runs[f"{rate} {arm}"] = wide.to_numpy().tolist()
    return runs
