"""Exhibits: `lab.play.number()` and so on. Each is played with in the notebook or in a page.

They compute with the same numbers as the cells; no kernel and no network are needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from labutils.exhibits.exhibit import Exhibit, make_exhibit
from labutils.exhibits.ledger_data import page_data, peaks_at
from labutils.plotting import bit_layout, stacked_memory
from labutils.techniques.float_formats import E4M3, E5M2, FORMATS, FloatFormat, rounded

NUMBER_FORMATS = (*FORMATS, E4M3, E5M2)


def number(value: float = 0.1, number_format: str = "BF16") -> Exhibit:
    """Return an exhibit: type or drag a value, flip any bit, and see what six formats store."""
    data = {
        "value": repr(value),
        "format": number_format,
        "formats": [_described(one) for one in NUMBER_FORMATS],
    }
    alt = "The bits of six number formats, one square for each: sign, exponent and mantissa."
    return make_exhibit(
        "number",
        "A number under the microscope",
        "Type a value, drag its size, or flip a bit: see what each format stores, and the error.",
        data,
        bit_layout(NUMBER_FORMATS),
        alt,
    )


def _described(one: FloatFormat) -> dict[str, object]:
    return {
        "name": one.name,
        "exponent": one.exponent_bits,
        "mantissa": one.mantissa_bits,
        "bias": one.bias,
        "max": one.max,
        "has_inf": one.has_inf,
        "saturates": one.dtype is not None and rounded(2 * one.max, one.dtype) == one.max,
    }


def ledger(
    models: Sequence[str] = ("gpt2", "gpt2-medium"), micro_batch_size: int = 4, **start: Any
) -> Exhibit:
    """Return an exhibit: choose a model and switches of its config, and see the bytes of a step.

    `models` are those to choose from. `start` are the switches to begin with, as keys of a config. Raises ValueError for what the table lacks.
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
