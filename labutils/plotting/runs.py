"""Recorded runs: time, throughput, memory, loss, and the loss scale."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from labutils.plotting.memory import stacked_memory
from labutils.plotting.style import BLUE, COLORS, VERMILION, line_look, new_axis, place_of
from labutils.training.compare import group_by_experiment
from labutils.training.records import RunRecord


def _trained(records: Sequence[RunRecord]) -> dict[str, list[RunRecord]]:
    return group_by_experiment([record for record in records if record.timing])


def _median_ms(runs: Sequence[RunRecord]) -> float:
    return float(np.median([run.timing.median_step_ms for run in runs]))


def _bars(ax: Axes, values: dict[str, float], xlabel: str) -> Axes:
    colors, texts = [], []
    for position, (name, value) in enumerate(values.items()):
        colors.append(COLORS[place_of(name, position)])
        texts.append(f"{value:,.3g}" if value < 1000 else f"{value:,.0f}")
    bars = ax.barh(range(len(values)), list(values.values()), color=colors)
    ax.bar_label(bars, texts, padding=3)
    ax.set_yticks(range(len(values)), list(values))
    ax.invert_yaxis()
    ax.margins(x=0.18)
    ax.set_xlabel(xlabel)
    return ax


def step_times(records: Sequence[RunRecord], ax: Axes | None = None) -> Axes:
    """Draw the median time of an optimizer step, in ms; repeated runs share a bar."""
    medians = {}
    for name, runs in _trained(records).items():
        medians[name] = _median_ms(runs)
    return _bars(new_axis(ax), medians, "median optimizer step, ms")


def throughput(records: Sequence[RunRecord], ax: Axes | None = None) -> Axes:
    """Draw tokens per second; repeated runs share a bar."""
    tokens_per_s = {}
    for name, runs in _trained(records).items():
        tokens_per_s[name] = 1000 * runs[0].tokens_per_step / _median_ms(runs)
    return _bars(new_axis(ax), tokens_per_s, "tokens per second")


def peaks(records: Sequence[RunRecord], ax: Axes | None = None) -> Axes:
    """Draw the measured peak of each run by category."""
    measured = {}
    for name, runs in _trained(records).items():
        if runs[0].memory:
            measured[name] = runs[0].memory.categories
    return stacked_memory(measured, ax)


def losses(records: Sequence[RunRecord], ax: Axes | None = None) -> Axes:
    """Draw the training loss against tokens seen, which is the only fair axis for unequal runs."""
    ax = new_axis(ax)
    for position, (name, runs) in enumerate(_trained(records).items()):
        series = runs[0].series.loss
        tokens = np.arange(1, len(series) + 1) * runs[0].tokens_per_step
        look = line_look(place_of(name, position))
        ax.plot(tokens, series, **look, markevery=max(1, len(series) // 8), ms=4, label=name)
    ax.set_xlabel("tokens trained on")
    ax.set_ylabel("training loss, nats per token")
    ax.legend(frameon=False)
    return ax


def losses_by_seed(
    losses: Mapping[str, Sequence[Sequence[float]]],
    baseline: str,
    axes: Sequence[Axes] | None = None,
) -> np.ndarray:
    """Draw losses over several seeds: {run: (n_seeds, n_steps), nats per token}.

    At the left the mean over the seeds and a band of one standard deviation. At the right the loss
    minus the baseline's with the same seed: the mean, and a band from the smallest to the largest.
    Returns the two axes.
    """
    if axes is None:
        _, axes = plt.subplots(1, 2, figsize=(10, 3.4), layout="constrained")
    left, right = (new_axis(ax) for ax in axes)
    reference = np.asarray(losses[baseline])
    steps = np.arange(1, reference.shape[1] + 1)
    for position, (name, runs) in enumerate(losses.items()):
        look = line_look(place_of(name, position)) | {"ms": 4, "markevery": max(1, len(steps) // 6)}
        found = np.asarray(runs)
        mean, spread = found.mean(axis=0), found.std(axis=0, ddof=1)
        left.plot(steps, mean, **look, label=name)
        left.fill_between(steps, mean - spread, mean + spread, color=look["color"], alpha=0.15)
        apart = found - reference
        right.plot(steps, apart.mean(axis=0), **look, label=name)
        right.fill_between(steps, apart.min(0), apart.max(0), color=look["color"], alpha=0.25)
    left.set(xlabel="step", ylabel="training loss, nats per token")
    right.set(xlabel="step", ylabel=f"loss minus {baseline}, same seed")
    for ax in (left, right):
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    left.legend(frameon=False)
    return np.array([left, right])


def four_panels(records: Sequence[RunRecord]) -> np.ndarray:
    """Draw step time, tokens/s, peak by category and loss; return the 2×2 axes."""
    figure, axes = plt.subplots(2, 2, figsize=(11, 6.4), layout="constrained")
    step_times(records, axes[0, 0])
    throughput(records, axes[0, 1])
    peaks(records, axes[1, 0])
    losses(records, axes[1, 1])
    devices: set[str] = set()
    for runs in _trained(records).values():
        devices |= {run.environment["device"] for run in runs}
    figure.suptitle("Measured on " + "; ".join(sorted(devices)), fontsize="medium")
    return axes


def loss_scale(record: RunRecord, ax: Axes | None = None) -> Axes:
    """Draw the loss scale of each step; a cross marks a skipped step."""
    ax = new_axis(ax)
    scale = np.array(record.series.loss_scale)
    skipped = np.array(record.series.skipped)
    steps = np.arange(1, len(scale) + 1)
    ax.step(steps, scale, where="mid", color=BLUE, label="loss scale used")
    look = {"color": VERMILION, "ms": 9, "ls": ""}
    ax.plot(steps[skipped], scale[skipped], "X", **look, label="overflow: step skipped")
    ax.set_yscale("log", base=2)
    ax.set_xlabel("optimizer step")
    ax.set_ylabel("loss scale")
    ax.legend(frameon=False)
    return ax
