"""Colours, hatches, markers and line styles, and the axis that every figure begins with."""

from __future__ import annotations

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

# Okabe and Ito's palette, which colour-blind readers can tell apart. Markers and line styles
# differ as well.
BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
YELLOW, BLUE, VERMILION, PURPLE = "#F0E442", "#0072B2", "#D55E00", "#CC79A7"
COLORS = (BLUE, ORANGE, GREEN, VERMILION, PURPLE, SKY, BLACK, YELLOW)
STYLES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)), "-")
MARKERS = "osD^vPX*"
CATEGORY_LOOKS = {  # colour and hatch of each memory category
    "parameters": (BLUE, ""),
    "gradients": (ORANGE, "//"),
    "optimizer state": (GREEN, ".."),
    "activations and temporaries": (SKY, "\\\\"),
    "activations": (SKY, "--"),
    "cast weights": (YELLOW, ""),
    "gathered weights": (YELLOW, "//"),  # of other processes
    "logits and loss": (PURPLE, "xx"),
    "temporaries": (VERMILION, "oo"),
    "library workspaces": (BLACK, ".."),
    "rounding up": ("#999999", ""),
    "holes": ("#dddddd", "xx"),  # reserved, and of no use to any tensor
}
OTHER_CATEGORY = (PURPLE, "xx")
FIXED_PLACES = ("fp32", "tf32", "fp16", "bf16")  # a precision looks the same in every figure


def new_axis(ax: Axes | None, width: float = 7, height: float = 3.2) -> Axes:
    """Return `ax`, or the axis of a new figure of this size in inches, without upper frame."""
    if ax is None:
        _, ax = plt.subplots(figsize=(width, height), layout="constrained")
    ax.spines[["top", "right"]].set_visible(False)
    return ax


def place_of(name: str, position: int) -> int:
    """Return the index of a run's colour, marker and line style."""
    if name in FIXED_PLACES:
        return FIXED_PLACES.index(name)
    return len(FIXED_PLACES) + position % (len(COLORS) - len(FIXED_PLACES))


def line_look(place: int) -> dict[str, object]:
    """Return the colour, line style and marker of a line, as arguments of `Axes.plot`."""
    return {"color": COLORS[place], "ls": STYLES[place], "marker": MARKERS[place]}
