"""The exhibit `seeds`: recorded runs of several precisions over seeds."""

from __future__ import annotations

import pandas as pd

from labutils.exhibits.exhibit import Exhibit, make_exhibit
from labutils.plotting import curves
from labutils.training.convergence import read_record
from labutils.training.noise import T_95, paired_difference

# Nats per token: half a per cent of the perplexity. At the small rate one step of FP32 gains more.
WORTH_TELLING = 0.005
KINDS = {"pure": "pure", "sr": "stochastic rounding"}  # parts of an arm's name, as words


def seeds(other: str = "pure_bf16", base: str = "fp32", rate: str = "small") -> Exhibit:
    """Return an exhibit: recorded runs of several precisions, and whether two of them differ.

    The record is that of stability. A list has a number after each of `steps`; a loss that is not
    finite is NaN.
    """
    record = read_record("stability")
    facts, rows = record.facts, record.losses
    rates = facts["rates"].partition(";")[0].split(", ")  # such as "small 0.0001"
    steps = sorted(rows.step.unique().tolist())
    data = {
        "arms": {arm: _words(arm) for arm in rows.arm.unique()},
        "rates": dict(rate.rsplit(" ", 1) for rate in rates),
        "steps": steps,
        "seeds": int(rows.seed.nunique()),
        "every": steps[0],
        "t": T_95,
        "worth_telling": WORTH_TELLING,
        "loss": _lists(rows, "loss"),
        "skipped": _lists(rows, "skipped"),
        "made": f"{facts['device']}, torch {facts['torch']}, {facts['created'][:10]}",
    }
    lines: dict[str, dict[int, float]] = {"mean": {}, "low": {}, "high": {}}
    verdicts = {}
    for n in range(2, data["seeds"] + 1):
        last = [[run[-1] for run in data["loss"][rate][arm][:n]] for arm in (base, other)]
        gap = paired_difference(*last, worth_telling=WORTH_TELLING)
        verdicts[n] = gap.verdict
        for name, points in lines.items():
            points[n] = getattr(gap, name)
    return make_exhibit(
        "seeds",
        "One run says little: precisions over seeds",
        "Choose two precisions, and how many seeds you have. See whether their losses differ.",
        data | {"other": other, "base": base, "rate": rate},
        curves(lines, "seeds", "difference of the loss, 95 % interval"),
        f"{_words(other)} against {_words(base)}, {rate} rate: {verdicts[2]} with 2 seeds, "
        f"{verdicts[data['seeds']]} with {data['seeds']}",
    )


def _words(arm: str) -> str:
    return " ".join(KINDS.get(part, part.upper()) for part in arm.split("_"))


def _lists(rows: pd.DataFrame, name: str) -> dict[str, dict[str, list[list[float]]]]:
    """Return {rate: {arm: a list for each seed}} of a column, without arms that have only zeros."""
    lists: dict[str, dict[str, list[list[float]]]] = {}
    for (rate, arm), runs in rows.groupby(["rate", "arm"]):
        table = runs.pivot(index="seed", columns="step", values=name).to_numpy()
        if table.any():
            lists.setdefault(rate, {})[arm] = table.tolist()
    return lists
