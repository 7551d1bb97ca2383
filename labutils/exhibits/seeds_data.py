"""The exhibit `seeds`: recorded runs of five precisions over seeds."""

from __future__ import annotations

import math

import pandas as pd
from matplotlib.axes import Axes

from labutils.exhibits.exhibit import Exhibit, make_exhibit
from labutils.plotting import bands
from labutils.training import stability
from labutils.training.noise import T_95, paired_difference


def seeds(
    other: str = stability.ROUNDED_TO_NEAREST, base: str = stability.BASE, rate: str = "small"
) -> Exhibit:
    """Return an exhibit: recorded runs of five precisions, and whether two of them differ."""
    return make_exhibit(
        "seeds",
        "One run says little: precisions over seeds",
        "Choose two precisions, and how many seeds you have. See whether their losses differ.",
        data() | {"other": other, "base": base, "rate": rate},
        still(base, other, rate),
        "Differences of the loss of two precisions over the steps: mean and spread of the seeds.",
    )


def data() -> dict[str, object]:
    """Return {rate: {arm: a list for each seed}} of losses and of skipped steps, and their axes.

    A list has a number after each of `steps`; a loss that is not finite is None.
    """
    facts, rows = stability.read()
    loss: dict[str, dict[str, list]] = {}
    skipped: dict[str, dict[str, list]] = {}
    for (rate, arm), found in rows.groupby(["rate", "arm"]):
        loss.setdefault(rate, {})[arm] = _by_seed(found, "loss")
        skipped.setdefault(rate, {})[arm] = _by_seed(found, "skipped")
    return {
        "arms": {arm: words for arm, (_, _, words) in stability.ARMS.items()},
        "rates": stability.RATES,
        "steps": sorted(int(step) for step in rows.step.unique()),
        "seeds": int(rows.seed.nunique()),
        "every": stability.EVERY,
        "t": T_95,
        "worth_telling": stability.WORTH_TELLING,
        "loss": loss,
        "skipped": skipped,
        "made": f"{facts['device']}, torch {facts['torch']}, {facts['created'][:10]}",
    }


def still(base: str, other: str, rate: str) -> Axes:
    """Return an axis: the paired differences of `other` and `base` over the steps."""
    _, rows = stability.read()
    points, last = {}, None
    for step in sorted(rows.step.unique()):
        pair = [stability.column(rows, arm, rate, step) for arm in (base, other)]
        last = paired_difference(*pair, worth_telling=stability.WORTH_TELLING)
        points[int(step)] = [b - a for a, b in zip(*pair, strict=True)]
    words = f"{stability.ARMS[other][2]}, minus {stability.ARMS[base][2]}"
    ax = bands({words: points}, "step", "difference of the loss")
    ax.axhline(0, color="black", lw=0.8, ls=":")
    interval = f"{last.mean:+.3f}, 95 % interval {last.low:+.3f} to {last.high:+.3f}"
    ax.set_title(f"{rate} rate, after {max(points)} steps: {interval}")
    return ax


def _by_seed(rows: pd.DataFrame, name: str) -> list[list[float | None]]:
    table = rows.pivot(index="seed", columns="step", values=name).sort_index()
    found = []
    for numbers in table.to_numpy().tolist():
        found.append([None if math.isnan(number) else number for number in numbers])
    return found
