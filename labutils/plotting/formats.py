"""Number formats: their bits, their range, their spacing, and what FP16 does to gradients."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from matplotlib.axes import Axes

from labutils.plotting.style import (
    BLACK,
    BLUE,
    COLORS,
    ORANGE,
    PURPLE,
    SKY,
    STYLES,
    VERMILION,
    YELLOW,
    new_axis,
)
from labutils.techniques.numerics import FORMATS, FP16, FloatFormat


def bit_layout(formats: Sequence[FloatFormat] = FORMATS, ax: Axes | None = None) -> Axes:
    """Draw one square per bit: sign, exponent, mantissa."""
    ax = new_axis(ax, 8, 0.55 * len(formats) + 0.9)
    for row, form in enumerate(formats):
        start = 0
        for part, n_bits, color in (
            ("sign", 1, BLACK),
            ("exponent", form.exponent_bits, ORANGE),
            ("mantissa", form.mantissa_bits, SKY),
        ):
            for i in range(n_bits):
                label = part if row == i == 0 else None
                ax.barh(row, 0.92, left=start + i, color=color, edgecolor="white", label=label)
            if n_bits > 1:
                middle = start + n_bits // 2 + 0.46  # of a square, not of a gap
                ax.text(middle, row, str(n_bits), ha="center", va="center", color=BLACK)
            start += n_bits
    ax.set_yticks(range(len(formats)), [form.name for form in formats])
    ax.invert_yaxis()
    ax.set_xlabel("bit")
    ax.legend(ncols=3, loc="lower right", frameon=False)
    return ax


def relative_spacing(formats: Sequence[FloatFormat] = FORMATS, ax: Axes | None = None) -> Axes:
    """Draw the distance to the next number, relative to the number: precision against range."""
    ax = new_axis(ax)
    for i, form in enumerate(formats):
        exponents = np.arange(np.log2(form.min_subnormal), np.log2(form.max))
        spacing = [form.spacing(2.0**e) / 2.0**e for e in exponents]
        width = 5 - i  # two lines coincide in part: the later, narrower one leaves both visible
        look = {"color": COLORS[i], "ls": STYLES[i], "lw": width}
        ax.plot(exponents, np.log2(spacing), **look, label=form.name)
        if form is FP16:  # it lies on TF32's line but for its subnormal numbers: name it there
            at = (exponents[0], np.log2(spacing[0]))
            ax.annotate("FP16", at, xytext=(6, -4), textcoords="offset points", color=COLORS[i])
    ax.set_xlabel("number, powers of two")
    ax.set_ylabel("relative spacing, powers of two")
    ax.legend(frameon=False, loc="center right", bbox_to_anchor=(1, 0.35))
    return ax


def gradient_histogram(gradients: torch.Tensor, scale: float = 1.0, ax: Axes | None = None) -> Axes:
    """Draw the magnitudes of real gradients, times `scale`, over what FP16 can hold."""
    ax = new_axis(ax)
    lowest, highest = -60, 20
    magnitudes = gradients.detach().flatten().double().abs().cpu().numpy() * scale
    exponents = np.log2(magnitudes[magnitudes > 0])
    ax.hist(exponents, bins=np.arange(lowest, highest + 1), color=BLUE)
    zero = np.log2(FP16.min_subnormal) - 1  # half the smallest number is where rounding to 0 begins
    normal = np.log2(FP16.min_normal)
    infinite = np.log2(FP16.max)
    top = ax.get_ylim()[1]
    for left, right, color, text in (
        (lowest, zero, VERMILION, "becomes 0"),
        (zero, normal, YELLOW, "subnormal"),
        (normal, infinite, "white", "normal"),
        (infinite, highest, PURPLE, "inf"),
    ):
        ax.axvspan(left, right, color=color, alpha=0.25, lw=0, zorder=0)  # behind the bars
        ax.text((left + right) / 2, top * 1.01, text, ha="center", va="bottom", fontsize="small")
    ax.set_xlim(lowest, highest)
    ax.set_xlabel(f"|gradient| × {scale:g}, powers of two")
    ax.set_ylabel("how many")
    return ax
