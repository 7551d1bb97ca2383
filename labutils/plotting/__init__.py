"""Records, ledgers and numbers → matplotlib axes.

Each function takes an axis, or makes one, and returns it. None shows or saves. `lab.setup()` gives
all figures one look, a bare `plt.plot` too.
"""

from __future__ import annotations

from labutils.plotting.blocks import block_history, blocks
from labutils.plotting.memory import snapshot, stacked_memory, timeline
from labutils.plotting.numbers import bands, curves
from labutils.plotting.runs import losses, speed_and_memory
from labutils.plotting.style import CATEGORIES, COLORS, INK, MARKERS, MUTED, PRECISIONS

__all__ = [
    "CATEGORIES",
    "COLORS",
    "INK",
    "MARKERS",
    "MUTED",
    "PRECISIONS",
    "bands",
    "block_history",
    "blocks",
    "curves",
    "losses",
    "snapshot",
    "speed_and_memory",
    "stacked_memory",
    "timeline",
]
