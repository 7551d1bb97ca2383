"""Recorded runs: speed here and on cards, memory, and loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.ticker import MaxNLocator

from labutils.plotting.memory import stacked_memory
from labutils.plotting.numbers import curves
from labutils.plotting.style import CLAIM, INK, Look, look_of, new_axis
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
    above: Look = {"ha": "center", "va": "bottom"}
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
                pale = [0.85 + 0.15 * part for part in to_rgb(color)]
                bar = {"facecolor": pale, "edgecolor": color, "linewidth": 1.3}
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


def losses(records: Sequence[RunRecord]) -> np.ndarray:
    """Draw losses against tokens seen, the only fair axis for unequal runs, and below them how far
    each lies above the first run's; return the two axes.
    """
    options: Look = {"figsize": (7.5, 4.6), "sharex": True, "layout": "constrained"}
    _, axes = plt.subplots(2, 1, height_ratios=(3, 2), **options)
    lines: dict[str, dict[float, float]] = {}
    for name, run in zip(labels(records), records, strict=True):
        lines[name] = {n * run.tokens_per_step: x for n, x in enumerate(run.series.loss, 1)}
    first, of_first = next(iter(lines.items()))
    above = {
        name: {tokens: x - of_first[tokens] for tokens, x in line.items() if tokens in of_first}
        for name, line in lines.items()
    }
    curves(lines, "", "nats per token", axes[0])
    curves(above, "tokens trained on", f"nats above {first}", axes[1])
    for ax in axes:
        # each thinner than those before: equal losses lie on each other, and all are seen
        for i, line in enumerate(ax.lines):
            line.set(lw=max(1, 3 - 0.7 * i), markevery=[-1])
    axes[1].xaxis.set_major_locator(MaxNLocator(4))
    axes[1].xaxis.set_major_formatter("{x:,.0f}")
    return axes
