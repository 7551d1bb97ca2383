"""Number formats, bit by bit."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes

from labutils.plotting.style import COLORS, INK, new_axis, on_color
from labutils.techniques.numerics import FORMATS, FloatFormat


def bit_layout(formats: Sequence[FloatFormat] = FORMATS, ax: Axes | None = None) -> Axes:
    """Draw one square per bit: sign, exponent, mantissa."""
    ax = new_axis(ax, height=0.5 * len(formats) + 0.9, grid="")
    for row, form in enumerate(formats):
        start = 0
        for part, n_bits, color in (
            ("sign", 1, INK),
            ("exponent", form.exponent_bits, COLORS[1]),
            ("mantissa", form.mantissa_bits, COLORS[2]),
        ):
            for i in range(n_bits):
                label = part if row == i == 0 else None
                ax.barh(row, 0.92, left=start + i, color=color, edgecolor="white", label=label)
            if n_bits > 1:
                middle = start + n_bits // 2 + 0.46  # of a square, not of a gap
                ax.text(middle, row, str(n_bits), ha="center", va="center", color=on_color(color))
            start += n_bits
    ax.set_yticks(range(len(formats)), [form.name for form in formats], color=INK)
    ax.invert_yaxis()
    ax.set_xlabel("bit", loc="left")
    ax.legend(ncols=3, loc="lower right", frameon=False)
    return ax
