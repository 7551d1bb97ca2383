"""The formats of the exhibit `number`."""

from __future__ import annotations

from labutils.techniques.numerics import E4M3, E5M2, FORMATS, FloatFormat, rounded

NUMBER_FORMATS = (*FORMATS, E4M3, E5M2)


def described(one: FloatFormat) -> dict[str, object]:
    """Return what the page computes a format's numbers from.

    `saturates` says whether torch stores the largest number for what lies beyond it.
    """
    return {
        "name": one.name,
        "exponent": one.exponent_bits,
        "mantissa": one.mantissa_bits,
        "bias": one.bias,
        "max": one.max,
        "has_inf": one.has_inf,
        "saturates": one.dtype is not None and rounded(2 * one.max, one.dtype) == one.max,
    }
