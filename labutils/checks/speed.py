"""Exercise of further/speed: the least time of a product."""

from __future__ import annotations

import math
from collections.abc import Callable

from labutils.checks.core import exercise

FloorMs = Callable[[int, int, int, int, float, float], float]
# Of products: rows, columns, length of the sums, bytes of a number, TFLOP/s, GB/s.
LARGE = (4096, 2048, 1024, 4, 20.0, 2000.0)  # its arithmetic takes longer
THIN = (1, 4096, 512, 4, 20.0, 2000.0)  # its bytes take longer
THIN_16 = (1, 4096, 512, 2, 20.0, 2000.0)


@exercise(
    hints=(
        "Find two times: one if only the arithmetic counted, one if only the bytes counted.",
        "An entry of the result is a sum of k terms. Each term is multiplied, and it is added.",
        "Three matrices are moved: two are read and one is written. How many entries has each?",
    )
)
def floor_ms(function: FloorMs | None) -> str | None:
    """Check `floor_ms(m, n, k, bytes_per_number, tflops, gb_per_s)`: ms by the roofline."""
    large, thin = _parts(*LARGE), _parts(*THIN)
    of_large = function(*LARGE)
    if not isinstance(of_large, (int, float)) or isinstance(of_large, bool):
        return f"a number of milliseconds is expected, not {of_large!r}."
    if _near(of_large, sum(large)):
        return "you add both times. Arithmetic and transfers go on side by side."
    if _near(of_large, large[0] / 2):
        return "a product multiplies and adds: that makes two operations for each term."
    if _near(of_large, large[1]):
        return "a large product is limited by its arithmetic. You return the smaller limit."
    for unit in (1e-3, 1e3, 1e-6, 1e6, 1e-9, 1e9):
        if _near(of_large, unit * large[0]):
            return f"the result is {unit:g} times the right one. Look at the units."
    if not _near(of_large, large[0]):
        return f"a large product should take {large[0]:.4g} ms; you return {of_large:.4g} ms."
    of_thin = function(*THIN)
    if _near(of_thin, thin[0]):
        return "a product with one row moves many bytes for little arithmetic: what limits it?"
    m, n, k = THIN[:3]
    if _near(of_thin, thin[1] * (m * k + k * n) / (m * k + k * n + m * n)):
        return "the result is written, too."
    if _near(function(*THIN_16), thin[1]) and not _near(thin[1], _parts(*THIN_16)[1]):
        return "numbers of two bytes need half the transfers of numbers of four."
    if not _near(of_thin, thin[1]) or not _near(function(*THIN_16), _parts(*THIN_16)[1]):
        return f"a product with one row should take {thin[1]:.4g} ms; you return {of_thin:.4g} ms."
    return None


def _parts(
    m: int, n: int, k: int, bytes_per_number: int, tflops: float, gb_per_s: float
) -> tuple[float, float]:
    """Return (ms of the arithmetic, ms of the transfers)."""
    moved = bytes_per_number * (m * k + k * n + m * n)
    return 2 * m * n * k / tflops / 1e9, moved / gb_per_s / 1e6


def _near(value: float, expected: float) -> bool:
    return math.isclose(value, expected, rel_tol=1e-6)
