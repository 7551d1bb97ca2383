"""Records, ledgers and numbers → matplotlib axes.

Each function takes an axis, or makes one, and returns it. None shows or saves.
"""

from __future__ import annotations

from labutils.plotting.blocks import block_history, blocks
from labutils.plotting.checkpointing import kept_in_block, pareto
from labutils.plotting.formats import bit_layout, gradient_histogram, relative_spacing
from labutils.plotting.ladder import guess_line
from labutils.plotting.memory import snapshot, stacked_memory, timeline
from labutils.plotting.numbers import (
    bands,
    bars_beside,
    curves,
    heat_map,
    reconcile,
    steps,
    strips,
)
from labutils.plotting.predicted_time import predicted_times
from labutils.plotting.roofline import roofline
from labutils.plotting.runs import four_panels
from labutils.plotting.style import (
    BLACK,
    BLUE,
    CATEGORY_LOOKS,
    COLORS,
    GREEN,
    MARKERS,
    ORANGE,
    PURPLE,
    SKY,
    STYLES,
    VERMILION,
    YELLOW,
)

__all__ = [
    "BLACK",
    "BLUE",
    "CATEGORY_LOOKS",
    "COLORS",
    "GREEN",
    "MARKERS",
    "ORANGE",
    "PURPLE",
    "SKY",
    "STYLES",
    "VERMILION",
    "YELLOW",
    "bands",
    "bars_beside",
    "bit_layout",
    "block_history",
    "blocks",
    "curves",
    "four_panels",
    "gradient_histogram",
    "guess_line",
    "heat_map",
    "kept_in_block",
    "pareto",
    "predicted_times",
    "reconcile",
    "relative_spacing",
    "roofline",
    "snapshot",
    "stacked_memory",
    "steps",
    "strips",
    "timeline",
]
