"""Predicted steps: how long, where their milliseconds go, what others measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from labutils.plotting.style import BLACK, BLUE, ORANGE, SKY, VERMILION, new_axis

if TYPE_CHECKING:
    from labutils.prediction.time import TimeLedger

# Colour and hatch of each share, in the order of `TimeLedger.shares`.
SHARE_LOOKS = ((BLUE, ""), (ORANGE, "//"), (SKY, ".."), ("#dddddd", "xx"))
SEEN = 0.005  # a smaller share is no visible part of a bar: it has no name in the legend
ABOVE = 0.3  # a published time stands this far above its band, so that neither hides the other


def predicted_times(
    ledgers: Mapping[str, TimeLedger],
    published: Mapping[str, float] | None = None,
    ax: Sequence[Axes] | None = None,
) -> Axes:
    """Draw {label: TimeLedger}: at the left its ms and their band, at the right its shares in %.

    `published` are milliseconds that others measured, by the same labels. `ax` is a pair of axes;
    the left one is returned.
    """
    if ax is None:
        size = (9, 0.4 * len(ledgers) + 1.6)
        _, ax = plt.subplots(1, 2, figsize=size, layout="constrained", sharey=True)
    left, right = (new_axis(one) for one in ax)
    points = {label: ms for label, ms in (published or {}).items() if label in ledgers}
    _draw_times(left, ledgers, points)
    _draw_shares(right, ledgers)
    for one in (left, right):
        one.set_yticks(range(len(ledgers)), list(ledgers))
        one.set_ylim(len(ledgers) - 0.4, -0.6)
    right.tick_params(left=False, labelleft=False)
    return left


def _draw_times(ax: Axes, ledgers: Mapping[str, TimeLedger], points: Mapping[str, float]) -> None:
    for y, ledger in enumerate(ledgers.values()):
        ax.plot([ledger.low_ms, ledger.high_ms], [y, y], color=BLACK, lw=2, solid_capstyle="butt")
        text = f"{ledger.step_ms:,.0f}" if ledger.step_ms >= 10 else f"{ledger.step_ms:.2g}"
        at = (ledger.high_ms, y)
        ax.annotate(text, at, xytext=(6, 0), textcoords="offset points", va="center")
    ms = [ledger.step_ms for ledger in ledgers.values()]
    ax.plot(ms, range(len(ms)), "o", color=BLUE, mec=BLACK, ms=8, label="predicted, with its band")
    if points:
        ys = [list(ledgers).index(label) - ABOVE for label in points]
        ax.plot(list(points.values()), ys, "D", color=VERMILION, mec=BLACK, ms=6, label="published")
    ax.set_xscale("log")
    ax.set_xlim(right=2.5 * max((one.high_ms for one in ledgers.values()), default=10.0))
    ax.xaxis.set_major_formatter("{x:,g}")
    ax.set_xlabel("ms of one optimizer step (log scale)")
    ax.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=2)


def _draw_shares(ax: Axes, ledgers: Mapping[str, TimeLedger]) -> None:
    seen: set[str] = set()
    for y, ledger in enumerate(ledgers.values()):
        start = 0.0
        for (name, share), (color, hatch) in zip(ledger.shares.items(), SHARE_LOOKS, strict=True):
            look = {"color": color, "hatch": hatch, "edgecolor": BLACK, "height": 0.6}
            label = name if share >= SEEN and name not in seen else None
            seen |= {label} if label else set()
            ax.barh(y, 100 * share, left=start, label=label, **look)
            start += 100 * share
    ax.set_xlim(0, 100)
    ax.set_xlabel("share of the step, %")
    ax.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=2)
