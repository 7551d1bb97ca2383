"""Drawings without measurements: what a training step consists of."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch

from labutils.plotting.style import BLACK, GREEN, ORANGE, PURPLE, SKY, new_axis

# Part of the step, what it makes, the format of its numbers under mixed precision, colour.
PARTS = (
    ("forward", "activations", "products 16-bit,\ntheir sums float32", SKY),
    ("loss", "one number", "float32", PURPLE),
    ("backward", "gradients", "inside 16-bit,\nstored float32", ORANGE),
    ("optimizer step", "new weights", "weights and\nmoments float32", GREEN),
    ("clear", "no gradients", "", "#dddddd"),
)
WIDTH, HEIGHT, GAP = 1.0, 0.5, 0.35


def training_step(ax: Axes | None = None) -> Axes:
    """Draw the five parts of a training step, what each makes, and its number format."""
    ax = new_axis(ax, 9, 2.2)
    for i, (name, makes, numbers, color) in enumerate(PARTS):
        left = i * (WIDTH + GAP)
        box = FancyBboxPatch(
            (left, 0), WIDTH, HEIGHT, boxstyle="round,pad=0.03", facecolor=color, edgecolor=BLACK
        )
        ax.add_patch(box)
        middle = left + WIDTH / 2
        ax.text(middle, 0.62 * HEIGHT, name, ha="center", va="center", weight="bold")
        ax.text(middle, 0.25 * HEIGHT, makes, ha="center", va="center", fontsize=9)
        ax.text(middle, -0.12, numbers, ha="center", va="top", fontsize=9)
        if i:
            start, end = (left - GAP + 0.05, HEIGHT / 2), (left - 0.05, HEIGHT / 2)
            ax.annotate("", end, start, arrowprops={"arrowstyle": "->", "color": BLACK})
    ax.set_xlim(-0.1, len(PARTS) * (WIDTH + GAP) - GAP + 0.1)
    ax.set_ylim(-0.5, HEIGHT + 0.15)
    ax.set_title("A training step: forward, loss, backward, optimizer step, clear")
    ax.axis("off")
    return ax
