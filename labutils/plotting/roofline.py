"""A roofline: the limits of a device, and operations under them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, NullFormatter

from labutils.plotting.style import BLACK, COLORS, MARKERS, STYLES, new_axis
from labutils.prediction.roofline import Roof

BEYOND = 4  # how far the roofs go beyond the points, and to both sides of the ridges


def roofline(
    roof: Roof,
    kinds: Mapping[str, str],
    points: Mapping[str, Sequence[tuple[float, float]]],
    ax: Axes | None = None,
) -> Axes:
    """Draw the roofs of some kinds of products, {label: kind}, and points on logarithmic axes.

    `points` are {label: [(FLOP per byte, FLOP per second), …]}.
    """
    ax = new_axis(ax)
    ridges = [roof.ridge(kind) for kind in kinds.values()]
    places = [*ridges, *(x for pairs in points.values() for x, _ in pairs)]
    low, high = min(places) / BEYOND, max(places) * BEYOND
    x = np.geomspace(low, high, 200)
    for i, (label, kind) in enumerate(kinds.items()):
        rates = [roof.rate(intensity, kind) / 1e9 for intensity in x]
        ax.plot(x, rates, color=BLACK, ls=STYLES[i], label=f"roof, {label}")
    for i, (label, pairs) in enumerate(points.items()):
        places, rates = zip(*pairs, strict=True)
        y = np.array(rates) / 1e9
        look = {"color": COLORS[i % len(COLORS)], "marker": MARKERS[i % len(MARKERS)]}
        ax.plot(places, y, ls="", mec=BLACK, ms=8, label=label, **look)
    ax.set(xscale="log", yscale="log", xlabel="FLOP per byte", ylabel="GFLOP/s")
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(LogLocator(numticks=8))
        axis.set_major_formatter("{x:,g}")
        axis.set_minor_formatter(NullFormatter())
    ax.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    return ax
