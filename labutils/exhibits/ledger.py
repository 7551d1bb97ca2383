"""The exhibit `ledger`: bytes and milliseconds of a step, switch by switch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from labutils.exhibits.exhibit import Exhibit, make_exhibit
from labutils.exhibits.ledger_data import page_data, peaks_at
from labutils.plotting import stacked_memory


def ledger(
    models: Sequence[str] = ("gpt2", "gpt2-medium"), micro_batch_size: int = 4, **start: Any
) -> Exhibit:
    """Return an exhibit: choose a model and switches of its config, and see the bytes of a step.

    `models` are those to choose from; `ledger_switches.SWITCHES` names all. `start` are the
    switches to begin with, as keys of a config.
    Raises ValueError for what the table lacks.
    """
    data = page_data(models, micro_batch_size, start)
    first = data["start"]
    peaks = peaks_at(first, micro_batch_size)
    highest = max(sum(peak.values()) for peak in peaks.values()) / 2**30
    still = stacked_memory(peaks)
    still.set_title(f"{first['model']} in {first['precision']}: at most {highest:.2f} GiB")
    alt = f"Bytes of a step of {first['model']} by phase, stacked by category; the highest bar has "
    return make_exhibit(
        "ledger",
        "The memory of a step, switch by switch",
        "Choose a model and its switches, then drag the micro-batch: which phase needs most?",
        data,
        still,
        alt + f"{highest:.2f} GiB.",
    )
