"""A guess, marked on an axis."""

from __future__ import annotations

from matplotlib.axes import Axes

from labutils.plotting.style import PURPLE


def guess_line(ax: Axes, value: float | None) -> Axes:
    """Mark a guess on the x axis with a line of its own; None draws nothing."""
    if value is not None:
        ax.axvline(value, color=PURPLE, ls="-.", label="your guess")
        ax.legend(frameon=False)
    return ax
