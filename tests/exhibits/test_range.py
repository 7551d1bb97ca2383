from __future__ import annotations

import math

import pytest

import labutils as lab
from labutils.techniques.numerics import FloatFormat

# Every format of the sliders, by the script's own function.
DESCRIBE = """
const { describe } = arguments[0].exhibit;
return arguments[1].map(([e, m, has_inf]) => describe(e, m, has_inf));
"""
DIVISIONS = [[e, m, inf] for e in range(2, 9) for m in range(1, 24) for inf in (True, False)]


def test_every_division_of_bits_is_that_of_float_formats(show, browser):
    found = browser.execute_script(DESCRIBE, show(lab.play.range()), DIVISIONS)
    for (e, m, has_inf), facts in zip(DIVISIONS, found, strict=True):
        right = FloatFormat("x", e, m, has_inf=has_inf)
        for name in ("bias", "max", "min_normal", "min_subnormal", "eps"):
            assert facts[name] == getattr(right, name), (name, e, m, has_inf)
        assert facts["bits"] == 1 + e + m
        assert facts["span"] == pytest.approx(math.log2(right.max / right.min_subnormal))
