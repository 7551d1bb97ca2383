"""A block of GPT-2 with what it keeps for the backward pass."""

from __future__ import annotations

from collections.abc import Mapping

from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch, Rectangle

from labutils.plotting.style import CATEGORIES, INK, new_axis

HALVES = (  # the operations of a block, each after the tensor that it reads
    ("norm 1", "linear", "attention", "linear"),
    ("norm 2", "linear", "GELU", "linear"),
)
SQUARE, PITCH, ROW = 0.34, 2.6, 2.9


def kept_in_block(kept: Mapping[str, int], ax: Axes | None = None) -> Axes:
    """Draw a block of GPT-2 and, as squares, the numbers that it keeps for each of its input's.

    `kept` names the eight tensors that its operations read, in order, with their squares. The first
    is the input: a checkpoint keeps it, so it has a colour of its own. Raises ValueError if there
    are not eight.
    """
    if len(kept) != 8:
        raise ValueError(f"a block's operations read 8 large tensors, not {len(kept)}")
    ax = new_axis(ax, 7.5, 4.2, grid="")
    tensors = list(kept.items())
    for half, operations in enumerate(HALVES):
        middle = -half * ROW
        for i, operation in enumerate(operations):
            name, n = tensors[4 * half + i]
            is_input = half == i == 0
            _draw_tensor(
                ax,
                i * PITCH,
                middle,
                name,
                n,
                CATEGORIES["parameters" if is_input else "activations"],
            )
            _draw_operation(ax, i * PITCH + 1.35, middle, operation)
        _draw_sum(ax, 4 * PITCH, middle)
    ax.set_xlim(-0.9, 4 * PITCH + 0.6)
    ax.set_ylim(-ROW - 1.35, 1.2)
    ax.set_aspect("equal")
    ax.axis("off")
    return ax


def _draw_tensor(ax: Axes, x: float, y: float, name: str, n: int, color: str) -> None:
    """Draw `n` squares over each other, from the line down, and the tensor's name below."""
    for row in range(n):
        corner = (x - SQUARE / 2, y - (row + 0.5) * SQUARE)
        ax.add_patch(Rectangle(corner, SQUARE, SQUARE, facecolor=color, edgecolor=INK))
    below = y - (n - 0.5) * SQUARE - 0.08
    label = f"{n}: {name}".replace(" of ", "\nof ").replace(", ", ",\n")
    ax.text(x, below, label, ha="center", va="top", fontsize=8.5)


def _draw_operation(ax: Axes, x: float, y: float, name: str) -> None:
    arrow = {"arrowstyle": "->", "color": INK}
    ax.annotate("", (x - 0.62, y), (x - 1.15, y), arrowprops=arrow)
    box = FancyBboxPatch((x - 0.5, y - 0.22), 1, 0.44, boxstyle="round,pad=0.08", facecolor="white")
    ax.add_patch(box)
    ax.text(x, y, name, ha="center", va="center", fontsize=9)
    ax.annotate("", (x + 1.05, y), (x + 0.6, y), arrowprops=arrow)


def _draw_sum(ax: Axes, x: float, y: float) -> None:
    """Draw the sum at a half's end, and the way around from the half's input."""
    ax.text(x + 0.1, y, "+", ha="center", va="center", fontsize=15)
    above = y + 0.75
    around = [(0, y + SQUARE / 2 + 0.03), (0, above), (x + 0.1, above)]
    ax.plot([px for px, _ in around], [py for _, py in around], color=INK, lw=1)
    arrow = {"arrowstyle": "->", "color": INK}
    ax.annotate("", (x + 0.1, y + 0.2), (x + 0.1, above), arrowprops=arrow)
