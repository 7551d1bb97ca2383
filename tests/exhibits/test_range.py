from __future__ import annotations

import math

import pytest
import torch
from selenium.webdriver.common.keys import Keys

import labutils as lab
from labutils.exhibits.play import NUMBER_FORMATS
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


def facts_of(root) -> dict[str, str]:
    rows = root.find_elements("css selector", "tr[data-fact]")
    cells = {row.get_attribute("data-fact"): row.find_elements("tag name", "td") for row in rows}
    return {name: found[1].text for name, found in cells.items()}


@pytest.mark.parametrize("one", NUMBER_FORMATS, ids=lambda one: one.name)
def test_a_button_jumps_to_a_format_that_torch_knows(show, one):
    root = show(lab.play.range("E5M2" if one.name != "E5M2" else "FP32"))
    root.find_element("css selector", f'[data-jump="{one.name}"]').send_keys(Keys.ENTER)
    shown = facts_of(root)
    if one.dtype:
        known = torch.finfo(one.dtype)
        assert float(shown["max"]) == pytest.approx(known.max, rel=1e-5)
        assert float(shown["min_normal"]) == pytest.approx(known.smallest_normal, rel=1e-5)
        assert float(shown["eps"]) == pytest.approx(known.eps, rel=1e-5)
    assert float(shown["min_subnormal"]) == pytest.approx(one.min_subnormal, rel=1e-5)
    assert f"This is {one.name}." in root.find_element("css selector", "[aria-live]").text
    pressed = root.find_elements("css selector", '[aria-pressed="true"]')
    assert [button.text for button in pressed] == [one.name]


def test_the_sliders_move_by_keys(show):
    root = show(lab.play.range("FP16"))
    exponent, mantissa = root.find_elements("css selector", "input[type=range]")
    sentence = root.find_element("css selector", "[aria-live]")
    for _ in range(3):
        exponent.send_keys(Keys.ARROW_RIGHT)
        mantissa.send_keys(Keys.ARROW_LEFT)
    assert "This is BF16. As many bits: FP16." in sentence.text
    mantissa.send_keys(Keys.ARROW_LEFT)
    assert "No format of this course" in sentence.text
    assert facts_of(root)["eps"] == str(2.0**-6)


def test_the_box_for_inf_changes_the_largest_number(show):
    root = show(lab.play.range("E4M3"))
    assert facts_of(root)["max"] == "448"
    root.find_element("css selector", "input[type=checkbox]").send_keys(" ")
    assert facts_of(root)["max"] == "240"


def test_the_real_formats_are_marks_with_names(show, browser):
    root = show(lab.play.range())
    names = [text.text for text in root.find_elements("css selector", "svg text")]
    assert {one.name for one in NUMBER_FORMATS} <= set(names)
    assert len(root.find_elements("css selector", "svg circle[r='6']")) == len(NUMBER_FORMATS)
    browser.execute_script("arguments[0].querySelector('details').open = true", root)
    rows = [row.text.split()[0] for row in root.find_elements("css selector", "details tbody tr")]
    assert rows == [one.name for one in NUMBER_FORMATS]
