"""Recorded runs: time, speed here and on cards, memory, and loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from labutils.plotting.memory import stacked_memory
from labutils.plotting.style import (
    INK,
    PREDICTED_BAR,
    Look,
    look_of,
    name_lines,
    new_axis,
    upright_unit,
)
from labutils.training.record import RunRecord, labels

FORMS = {  # of bars, by a word in the device's name
    "predicted": "Outlined: predicted for GPT-2 124M, not measured",
    "published": "Pale: measured by others",
}
Milliseconds = Mapping[str, float]  # of a step, by the name of a run


def four_panels(
    records: Sequence[RunRecord], elsewhere: Mapping[str, Milliseconds] | None = None
) -> np.ndarray:
    """Draw step time, speed, peak by category and loss; return the 2×2 axes.

    Speed is tokens per second, as a multiple of the first run's. `elsewhere` has milliseconds of
    equal steps on other devices, {device: {name: ms}}; a device whose name says "predicted" is
    drawn as outlines, and pale if it says "published". A run that took no step is left out.
    """
    figure, axes = plt.subplots(
        2, 2, figsize=(9, 7), dpi=96, height_ratios=(1.15, 1), layout="constrained"
    )
    figure.set_layout_engine("constrained", hspace=0.06)
    (times, speeds), (peaks, losses) = axes
    trained = [record for record in records if record.timing]
    runs = dict(zip(labels(trained), trained, strict=True))
    _times(times, {name: run.timing.median_step_ms for name, run in runs.items()})
    ms_per_token = {name: 1e3 / run.timing.tokens_per_s for name, run in runs.items()}
    _speeds(speeds, {"measured here": ms_per_token} | dict(elsewhere or {}))
    _losses(losses, runs)
    stacked_memory({n: run.memory.categories for n, run in runs.items() if run.memory}, peaks)
    peaks.set_title("Peak memory of a step", fontsize="medium")
    devices = {record.environment["device"] for record in trained}
    told = f"Filled: measured on {'; '.join(sorted(devices))}"
    told += "".join(
        f". {words}" for word, words in FORMS.items() if word in " ".join(elsewhere or {})
    )
    look: Look = {"loc": "outside lower left", "ncols": 5, "frameon": False, "borderpad": 0}
    handles, names = [], []
    if key := peaks.get_legend():  # the figure's: as its column's, it pushes the right one away
        handles, names = key.legend_handles, [text.get_text() for text in key.texts]
        key.remove()
    figure.legend(handles, names, title=told, alignment="left", **look)
    return axes


def _times(ax: Axes, ms: Milliseconds) -> None:
    new_axis(ax, grid="")
    texts = [f"{value:,.3g}" if value < 1000 else f"{value:,.0f}" for value in ms.values()]
    colors = [look_of(name, i)["color"] for i, name in enumerate(ms)]
    bars = ax.barh(range(len(ms)), list(ms.values()), 0.7, color=colors)
    ax.bar_label(bars, texts, padding=4)
    ax.set_yticks(range(len(ms)), list(ms), color=INK)
    ax.invert_yaxis()
    ax.margins(x=0.14)
    ax.set_title("Time of a step", fontsize="medium")
    ax.set_xlabel("ms, median", loc="left")


def _speeds(ax: Axes, devices: Mapping[str, Milliseconds]) -> None:
    """Draw each run's speed as a multiple of the first one's, on a log axis, by device."""
    new_axis(ax, grid="")
    row, ticks, names = 0.0, [], []
    for device, ms in devices.items():
        first, *others = ms
        headline: Look = {"xycoords": ax.get_yaxis_transform(), "va": "center", "weight": "bold"}
        headline["bbox"] = {"facecolor": "white", "edgecolor": "none", "pad": 1}
        ax.annotate(device, (0.01, row), **headline)
        for i, name in enumerate(others, start=1):
            row += 1
            color, speed = look_of(name, i)["color"], ms[first] / ms[name]
            look: Look = {"color": color, "alpha": 0.5 if "published" in device else 1.0}
            if "predicted" in device:
                look = {"edgecolor": color} | PREDICTED_BAR
            ax.barh(row, speed - 1, 0.75, 1, **look)
            side: Look = {"ha": "left" if speed >= 1 else "right", "va": "center"}
            shift = (5 if speed >= 1 else -5, 0)
            ax.annotate(f"{speed:.2g} ×", (speed, row), shift, textcoords="offset points", **side)
            ticks.append(row)
            names.append(name)
        row += 1.4
    ax.axvline(1, color=INK, lw=1)
    ax.set(xscale="log", ylim=(row - 0.8, -0.7), yticks=ticks)
    ax.set_yticklabels(names, color=INK)
    ax.set_xticks([], minor=True)
    ax.set_xticks([1 / 8, 1 / 2, 1, 2, 8], ["1/8", "1/2", "1", "2", "8"])
    ax.margins(x=0.3)
    ax.set_title("Speed", fontsize="medium")
    ax.set_xlabel(f"× {first}'s on the same device", loc="left")


def _losses(ax: Axes, runs: Mapping[str, RunRecord]) -> None:
    """Draw the loss against tokens seen, which is the only fair axis for unequal runs."""
    new_axis(ax)
    ends = []
    for i, (name, run) in enumerate(runs.items()):
        loss = run.series.loss
        tokens = np.arange(1, len(loss) + 1) * run.tokens_per_step
        look = look_of(name, i)
        ax.plot(tokens, loss, **look, markevery=[-1], lw=max(1, 3 - 0.7 * i))
        if loss:
            ends.append((tokens[-1], loss[-1], name, look["color"]))
    name_lines(ax, ends)
    upright_unit(ax, "nats per token")
    ax.set_title("Training loss", fontsize="medium")
    ax.xaxis.set_major_locator(MaxNLocator(4))
    ax.xaxis.set_major_formatter("{x:,.0f}")
    ax.set_xlabel("tokens trained on", loc="left")
