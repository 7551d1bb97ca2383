"""Predicted steps: where their milliseconds go, how far off they may be, what others measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from matplotlib.axes import Axes

from labutils.plotting.style import BLACK, BLUE, ORANGE, SKY, VERMILION, new_axis

if TYPE_CHECKING:
    from labutils.prediction.time import TimeLedger

# Colour and hatch of each share, in the order of `TimeLedger.shares`.
SHARE_LOOKS = ((BLUE, ""), (ORANGE, "//"), (SKY, ".."), ("#dddddd", "xx"))


def predicted_times(
    ledgers: Mapping[str, TimeLedger],
    published: Mapping[str, float] | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Draw {label: TimeLedger} as bars of ms on a log axis, each with its band.

    A bar is cut by the shares of the step, on the bar's own length. `published` are milliseconds
    that others measured, by the same labels.
    """
    ax = new_axis(ax, 8, 0.45 * len(ledgers) + 1.4)
    left = 0.4 * min((ledger.low_ms for ledger in ledgers.values()), default=1.0)
    labels = list(ledgers)
    points = {label: ms for label, ms in (published or {}).items() if label in ledgers}
    for y, (label, ledger) in enumerate(ledgers.items()):
        _draw_bar(ax, y, ledger, left, is_first=y == 0)
        at = (max(ledger.high_ms, points.get(label, 0)), y)
        text = f"{ledger.step_ms:,.0f}" if ledger.step_ms >= 10 else f"{ledger.step_ms:.2g}"
        ax.annotate(text, at, xytext=(9, -4), textcoords="offset points")
    if points:
        ys = [labels.index(label) for label in points]
        ax.plot(list(points.values()), ys, "D", color=VERMILION, mec=BLACK, ms=8, label="published")
    ax.set_xscale("log")
    ax.set_xlim(left, 2 * max((ledger.high_ms for ledger in ledgers.values()), default=10.0))
    ax.xaxis.set_major_formatter("{x:,g}")
    ax.set_yticks(range(len(labels)), labels)
    ax.invert_yaxis()
    ax.set_xlabel("ms of one optimizer step, predicted (log scale); the line is the band")
    ax.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    return ax


def _draw_bar(ax: Axes, y: int, ledger: TimeLedger, left: float, *, is_first: bool) -> None:
    start, ratio = left, ledger.step_ms / left
    for (name, share), (color, hatch) in zip(ledger.shares.items(), SHARE_LOOKS, strict=True):
        # lengths on a log axis are factors: each share gets its part of the bar's length
        end = start * ratio**share
        label = name if is_first else None
        ax.barh(y, end - start, left=start, color=color, hatch=hatch, edgecolor=BLACK, label=label)
        start = end
    ax.plot([ledger.low_ms, ledger.high_ms], [y, y], color=BLACK, lw=2, solid_capstyle="butt")
