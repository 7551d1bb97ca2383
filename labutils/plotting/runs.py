"""Recorded runs: speed here and on cards, memory, and loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from labutils.plotting.memory import stacked_memory
from labutils.plotting.style import (
    CLAIM,
    INK,
    Look,
    look_of,
    name_lines,
    new_axis,
    upright_unit,
)
from labutils.training.record import RunRecord, labels


def speed_and_memory(
    records: Sequence[RunRecord],
    cards: pd.DataFrame | None = None,
    speeds: Mapping[str, float] | None = None,
) -> np.ndarray:
    """Draw speed, and memory by category, beside what tutorials claim; return the two axes.

    Speed is tokens per second, as a multiple of the first run's on the same device, or what
    `speeds` says of a precision, if it was measured better. `cards` has
    milliseconds of equal steps on other devices, with columns `card` and `precision`, and
    `measured`, `predicted`, `published`: what was measured here is filled, what is predicted is
    outlined, and what others published is a mark across the bar. A run that took no step is left
    out.
    """
    figure, axes = plt.subplots(1, 2, figsize=(9, 4.3), dpi=96, layout="constrained")
    figure.set_layout_engine("constrained", wspace=0.06)
    trained = [record for record in records if record.timing]
    runs = dict(zip(labels(trained), trained, strict=True))
    here = pd.DataFrame({"card": "This machine", "precision": list(runs)})
    here["measured"] = [
        1 / speeds[name] if speeds else 1e3 / run.timing.tokens_per_s for name, run in runs.items()
    ]
    _speeds(axes[0], pd.concat([here, cards]).reset_index(drop=True))  # a None is passed over
    peaks = {name: run.memory.categories for name, run in runs.items() if run.memory}
    first = sum(next(iter(peaks.values()), {}).values())
    marks = {"“half”": first / 2}
    stacked_memory(peaks, axes[1], marks).set_title(
        "Peak memory of a step", fontsize="medium", pad=16
    )
    if names := axes[1].get_legend():  # the figure's: as its axis's, it is wider than the axis
        texts = [text.get_text() for text in names.texts]
        look: Look = {"loc": "outside lower right", "ncols": 5, "frameon": False, "borderpad": 0}
        figure.legend(names.legend_handles, texts, handlelength=1, columnspacing=1.4, **look)
        names.remove()
    return axes


def _speeds(ax: Axes, rows: pd.DataFrame) -> None:
    """Draw each row's speed as a multiple of its card's first, on a log axis."""
    new_axis(ax, grid="")
    ax.axvspan(2, 3, color=CLAIM, alpha=0.35, lw=0)
    above: Look = {"ha": "center", "va": "bottom", "weight": "bold"}
    # 6**0.5 is the middle of 2 and 3 on a log axis
    ax.annotate("“2–3 ×”", (6**0.5, 1), (0, 2), ax.get_xaxis_transform(), "offset points", **above)
    place, ticks = 0.0, {}
    for card, steps in rows.groupby("card", sort=False):
        known = steps.dropna(axis=1, how="all").columns.drop(["card", "precision"])
        look: Look = {"xycoords": ax.get_yaxis_transform(), "va": "center", "weight": "bold"}
        look["bbox"] = {"facecolor": "white", "edgecolor": "none", "pad": 1}
        words = ", ".join(known).replace("published", "published (black)")
        ax.annotate(f"{card}: {words}", (0.01, place), **look)
        speeds = steps[known].iloc[0] / steps[known]
        for i, name in enumerate(steps.precision[1:], start=1):
            place += 1
            color, speed = look_of(name, i)["color"], speeds.iloc[i]
            bar: Look = {"color": color}
            if "measured" not in known:
                # 26 is an opacity of 15 % in hexadecimal
                bar = {"facecolor": f"{color}26", "edgecolor": color, "linewidth": 1.3}
            # from 1, not from 0, which a log axis has not: slower points to the left
            ax.barh(place, speed.iloc[0] - 1, 0.75, 1, **bar)
            if "published" in known:
                ax.plot(2 * [speed.published], [place - 0.45, place + 0.45], color=INK, lw=2)
            side: Look = {"ha": "left" if speed.max() >= 1 else "right", "va": "center"}
            end, shift = (speed.max(), 5) if speed.max() >= 1 else (speed.min(), -5)
            text = f"{speed.iloc[0]:.2g} ×"
            ax.annotate(text, (end, place), (shift, 0), textcoords="offset points", **side)
            ticks[place] = name
        place += 1.4
    ax.axvline(1, color=INK, lw=1)
    ax.set(xscale="log", ylim=(place - 0.8, -0.7))
    ax.set_yticks(list(ticks), list(ticks.values()), color=INK)
    ax.set_xticks([], minor=True)
    ax.set_xticks([1 / 8, 1 / 4, 1 / 2, 1, 2, 4, 8], ["1/8", "1/4", "1/2", "1", "2", "4", "8"])
    ax.margins(x=0.3)
    ax.set_title("Speed", fontsize="medium", pad=16)
    ax.set_xlabel(f"tokens per second, × {rows.precision[0]}'s on the same device", loc="left")


def losses(records: Sequence[RunRecord], ax: Axes | None = None) -> Axes:
    """Draw losses against tokens seen, which is the only fair axis for unequal runs."""
    ax = new_axis(ax)
    ends = []
    for i, (name, run) in enumerate(zip(labels(records), records, strict=True)):
        loss = run.series.loss
        tokens = np.arange(1, len(loss) + 1) * run.tokens_per_step
        look = look_of(name, i)
        # each thinner than those before: equal losses lie on each other, and all are seen
        ax.plot(tokens, loss, **look, markevery=[-1], lw=max(1, 3 - 0.7 * i))
        if loss:
            ends.append((tokens[-1], loss[-1], name, look["color"]))
    name_lines(ax, ends)
    upright_unit(ax, "nats per token")
    ax.xaxis.set_major_locator(MaxNLocator(4))
    ax.xaxis.set_major_formatter("{x:,.0f}")
    ax.set_xlabel("tokens trained on", loc="left")
    return ax
