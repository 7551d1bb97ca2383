"""The exhibit `seeds`: recorded runs of several precisions over seeds."""

from __future__ import annotations

import math

import pandas as pd
from matplotlib.axes import Axes

from labutils.exhibits.exhibit import Exhibit, make_exhibit
from labutils.plotting import bands
from labutils.training.convergence import read_record
from labutils.training.noise import T_95, paired_difference

# Nats per token: half a per cent of the perplexity. At the small rate one step of FP32 gains more.
WORTH_TELLING = 0.005
KINDS = {"pure": "pure", "sr": "stochastic rounding"}  # parts of an arm's name, as words


def seeds(other: str = "pure_bf16", base: str = "fp32", rate: str = "small") -> Exhibit:
    """Return an exhibit: recorded runs of several precisions, and whether two of them differ."""
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
    rows = read_record("stability")
    facts = rows.attrs
    loss: dict[str, dict[str, list]] = {}
    skipped: dict[str, dict[str, list]] = {}
    for (rate, arm), found in rows.groupby(["rate", "arm"]):
        loss.setdefault(rate, {})[arm] = _by_seed(found, "loss")
        skipped.setdefault(rate, {})[arm] = _by_seed(found, "skipped")
    rates = facts["rates"].partition(";")[0].split(", ")  # such as "small 0.0001"
    steps = sorted(int(step) for step in rows.step.unique())
    return {
        "arms": {arm: _words(arm) for arm in rows.arm.unique()},
        "rates": dict(rate.rsplit(" ", 1) for rate in rates),
        "steps": steps,
        "seeds": int(rows.seed.nunique()),
        "every": steps[0],
        "t": T_95,
        "worth_telling": WORTH_TELLING,
        "loss": loss,
        "skipped": skipped,
        "made": f"{facts['device']}, torch {facts['torch']}, {facts['created'][:10]}",
    }


def still(base: str, other: str, rate: str) -> Axes:
    """Return an axis: the paired differences of `other` and `base` over the steps."""
    rows = read_record("stability")
    table = rows[rows.rate == rate].pivot(index="step", columns=["arm", "seed"], values="loss")
    gaps = (table[other] - table[base]).T.to_dict("list")
    pair = [table[arm].iloc[-1].tolist() for arm in (base, other)]
    last = paired_difference(*pair, worth_telling=WORTH_TELLING)
    ax = bands({f"{_words(other)}, minus {_words(base)}": gaps}, "step", "difference of the loss")
    ax.axhline(0, color="black", lw=0.8, ls=":")
    interval = f"{last.mean:+.3f}, 95 % interval {last.low:+.3f} to {last.high:+.3f}"
    ax.set_title(f"{rate} rate, after {max(gaps)} steps: {interval}")
    return ax


def _words(arm: str) -> str:
    return " ".join(KINDS.get(part, part.upper()) for part in arm.split("_"))


def _by_seed(rows: pd.DataFrame, name: str) -> list[list[float | None]]:
    table = rows.pivot(index="seed", columns="step", values=name).sort_index()
    by_seed = []
    for numbers in table.to_numpy().tolist():
        by_seed.append([None if math.isnan(number) else number for number in numbers])
    return by_seed
