"""Exhibits: `lab.play.number()` and so on. Each is played with in the notebook or in a page.

They compute with the same numbers as the cells; no kernel and no network are needed.
"""

from __future__ import annotations

from pathlib import Path

from labutils.exhibits.exhibit import FOLDER, Exhibit, make_exhibit, page
from labutils.files import runs_dir, write_atomically
from labutils.plotting import bit_layout
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


def save_all(path: str | Path | None = None) -> Path:
    """Write one page with all exhibits, by default `runs/exhibits.html`; return its path."""
    makers = [maker for name, maker in globals().items() if (FOLDER / f"{name}.html").exists()]
    target = Path(path) if path else runs_dir() / "exhibits.html"
    text = page("Things to play with", [maker() for maker in makers])
    write_atomically(target, text.encode())
    return target
