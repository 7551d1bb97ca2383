"""The look of every figure: one meaning for each colour, and words where the data is."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from textwrap import fill
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backend_bases import RendererBase
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox, ScaledTranslation

Look = dict[str, Any]  # arguments of a function of matplotlib
STYLE = Path(__file__).with_name("labutils.mplstyle")
INK, MUTED, FAINT = "#1F2933", "#52606D", "#E4E7EB"  # words and marks; units; what is behind
# Memory: blue stays from step to step, warm comes and goes, grey belongs to nobody's tensors.
# Neighbours in a stack differ in lightness, so that a grey print tells them apart.
CATEGORIES = {
    "parameters": "#17375E",
    "gradients": "#2F6DA3",
    "optimizer state": "#6FA3C8",
    "activations": "#F2C14E",
    "activations and temporaries": "#F2C14E",
    "cast weights": "#B7791F",
    "gathered weights": "#B7791F",  # of other processes
    "logits and loss": "#E07A3F",
    "temporaries": "#A63A2B",
    "library workspaces": "#7B8794",
    "rounding up": "#B8C2CC",
    "holes": FAINT,  # reserved, and of no use to any tensor
}
# A phase, or who asked for memory, has the colour of what it makes.
PHASES = {
    "moving the model": CATEGORIES["parameters"],
    "forward": CATEGORIES["activations"],
    "backward": CATEGORIES["temporaries"],
    "optimizer": CATEGORIES["optimizer state"],
    "cuBLAS's workspaces": CATEGORIES["library workspaces"],
}
# Precisions: 32 bits are grey, 16 bits have a colour. The marker repeats it.
PRECISIONS = {
    "fp32": ("#3E4C59", "o"),
    "tf32": ("#8796A5", "D"),
    "fp16": ("#8E44AD", "^"),
    "bf16": ("#0B7A75", "s"),
    "pure_bf16": ("#5FB0AA", "P"),
}
CLAIM = "#9AA5B1"  # what tutorials say: nobody's tensors and no precision
OTHER = "#D5DBE1"  # the sum of what is not named
COLORS = (INK, "#C05621", "#5F6C79", "#4D7C0F", "#BE3F7F")  # of lines that are neither
MARKERS = "osDv^PX*"
PREDICTED_LINE: Look = {"color": MUTED, "ls": (0, (3, 2)), "marker": ""}


def use_style() -> None:
    """Give every figure of this process the course's look, and in Jupyter an alternative text."""
    plt.style.use(STYLE)
    if "inline" in plt.get_backend() and (shell := sys.modules["IPython"].get_ipython()):
        plt.switch_backend(plt.get_backend())  # Jupyter's own formatter is there only then
        png = shell.display_formatter.formatters["image/png"]
        as_png = png.lookup_by_type(Figure)
        if getattr(as_png, "func", None) is not described_png:
            png.for_type(Figure, partial(described_png, as_png))


def described_png(as_png: Callable[[Figure], str], figure: Figure) -> tuple[str, dict[str, str]]:
    """Return a figure as PNG in base64, and its metadata: what it shows in words."""
    return as_png(figure), {"alt": alternative_text(figure)}


def color_of(name: str, position: int = 0) -> str:
    """Return the colour of a category or a phase, else that of a position among lines."""
    return (CATEGORIES | PHASES).get(name) or COLORS[position % len(COLORS)]


def on_color(color: str) -> str:
    """Return the colour of words that can be read on a colour."""
    return "white" if sum(to_rgb(color)) < 1.4 else INK


def look_of(name: str, position: int) -> Look:
    """Return colour and marker of a line, as arguments of `Axes.plot`: a precision's own, or those
    of its position. A name that says "predicted" is dashed and grey, without markers.
    """
    usual = COLORS[position % len(COLORS)], MARKERS[position % len(MARKERS)]
    color, marker = PRECISIONS.get(name.lower(), usual)
    return {"color": color, "marker": marker} | (PREDICTED_LINE if "predicted" in name else {})


def new_axis(ax: Axes | None, width: float = 7.5, height: float = 3.2, grid: str = "y") -> Axes:
    """Return `ax`, or the axis of a new figure of this size in inches, with a grid along `grid`."""
    if ax is None:
        _, ax = plt.subplots(figsize=(width, height), layout="constrained")
    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.tick_params(axis="y", length=0)
    ax.grid(visible=False)
    if grid:
        ax.grid(axis=grid, color=FAINT)
    return ax


def upright_unit(ax: Axes, unit: str) -> None:
    """Write the unit of y upright above the axis, and make room for it under a title set later."""
    ax.annotate(unit, (0, 1), (0, 5), "axes fraction", textcoords="offset points", color=MUTED)
    ax.set_ylabel(unit, visible=False)  # for the alternative text
    ax.set_title = partial(ax.set_title, pad=19)  # type: ignore[method-assign]


def name_lines(ax: Axes, ends: Sequence[tuple[float, float, str, str]]) -> None:
    """Write names, (x, y, text, colour), beside the ends of lines, on any scale set later.

    Names that would cover each other move apart.
    """

    def place(i: int, renderer: RendererBase) -> Bbox:
        right, heights = ax.transData.transform([(x, y) for x, y, *_ in ends]).T
        order, gap = (
            np.argsort(heights, kind="stable"),
            float(renderer.points_to_pixels(13 * n_lines)),
        )
        for _ in range(100):  # what is too near is pushed apart, both by a half
            push = np.clip(gap - np.diff(heights[order]), 0, None) / 2
            heights[order[:-1]] -= push
            heights[order[1:]] += push
        lowest = ax.bbox.y0 + gap * (0.5 + np.arange(len(order)))
        heights[order] = np.maximum(heights[order], lowest)
        return Bbox.from_bounds(right[i], heights[i], 0, 0)

    names = [fill(text, 26) for _, _, text, _ in ends]
    n_lines = max((name.count("\n") + 1 for name in names), default=1)
    look: Look = {"textcoords": "offset points", "va": "center", "annotation_clip": False}
    look["bbox"] = {"facecolor": "white", "edgecolor": "none", "pad": 0.5, "alpha": 0.7}
    for i, name in enumerate(names):
        darker = 0.65 if on_color(ends[i][3]) == INK else 1.0  # pale, it could not be read
        look["color"] = [darker * part for part in to_rgb(ends[i][3])]
        ax.annotate(name, (0, 0), (7, 0), partial(place, i), **look)


def key(ax: Axes, names: Sequence[str], colors: Sequence[str], n_columns: int = 4) -> None:
    """Write a key below the axis, from its left end, in the order of the names."""
    boxes = [plt.Rectangle((0, 0), 1, 1, color=color) for color in colors]
    below = ScaledTranslation(0, -40 / 72, ax.figure.dpi_scale_trans)
    look: Look = {"bbox_to_anchor": (0, 0), "bbox_transform": ax.transAxes + below}
    look |= {"handlelength": 1.0, "handleheight": 1.0, "ncols": n_columns, "frameon": False}
    ax.legend(boxes, names, loc="upper left", borderpad=0, borderaxespad=0, **look)


def alternative_text(figure: Figure) -> str:
    """Return what a figure shows in words: titles, which are findings, and what the axes count."""
    words = [figure.get_suptitle()]
    for ax in figure.axes:
        words += [ax.get_title("left"), ax.get_title("center")]
        across, upwards = ax.get_xlabel(), ax.get_ylabel()
        words += [across and f"From left to right: {across}", upwards and f"Upwards: {upwards}"]
    return ". ".join(filter(None, (text.strip().rstrip(".") for text in words)))
