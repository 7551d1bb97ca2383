from __future__ import annotations

import re

import pytest
from selenium.webdriver.common.keys import Keys

import labutils as lab
from labutils.exhibits import amdahl_data
from labutils.exhibits.exhibit import Exhibit

SHARES = [k / 100 for k in range(101)]
SPEEDUPS = [2 ** (k / 8) for k in range(-48, 49)]
GRID = """
const { amdahl } = arguments[0].exhibit;
return arguments[1].map((share) => arguments[2].map((speedup) => amdahl(share, speedup)));
"""


@pytest.mark.parametrize("card", amdahl_data.SHOWN)
def test_the_shipped_file_is_what_the_time_ledger_predicts(card):
    """If it is stale: python -m labutils.exhibits.amdahl_data"""
    (row,) = [row for row in amdahl_data.cards() if row["card"] == card]
    right = amdahl_data.predicted(card)
    assert (row.pop("card"), row.pop("precision")) == (right.pop("card"), right.pop("precision"))
    assert row == pytest.approx(right, rel=2e-3)


def test_the_law_is_that_of_lab_speed(show, browser):
    found = browser.execute_script(GRID, show(lab.play.amdahl()), SHARES, SPEEDUPS)
    for share, row in zip(SHARES, found, strict=True):
        assert row == [lab.speed.amdahl(share, speedup) for speedup in SPEEDUPS], share


def row_of(root, point: str) -> list[str]:
    cells = root.find_elements("css selector", f'tr[data-point^="{point}"] td')
    return [cell.text for cell in cells]


def number(text: str) -> float:
    return float(re.search(r"[\d.]+", text)[0])


def test_every_card_has_its_point(show):
    root = show(lab.play.amdahl())
    for row in amdahl_data.cards():
        law = lab.speed.amdahl(row["share"], row["product"])
        cells = row_of(root, row["card"])
        assert number(cells[3]) == pytest.approx(law, rel=0.01)
        assert number(cells[4]) == pytest.approx(row["step"], rel=0.01)
    names = [text.text for text in root.find_elements("css selector", "svg text")]
    assert set(amdahl_data.SHOWN) <= set(names)


@pytest.mark.parametrize("i", range(len(amdahl_data.SHOWN)))
def test_a_button_goes_to_a_card_and_says_what_differs(show, i):
    root = show(lab.play.amdahl(0.1, 2.0))
    root.find_element("css selector", f'[data-jump="{i}"]').send_keys(Keys.ENTER)
    row = amdahl_data.cards()[i]
    ratio = row["step"] / lab.speed.amdahl(row["share"], row["product"])
    text = root.find_element("css selector", '[data-part="compared"]').text
    verdict = "faster" if ratio > 1 else "slower"
    assert ("agree" if abs(ratio - 1) < 0.02 else verdict) in text
    pressed = root.find_elements("css selector", '[aria-pressed="true"]')
    assert [button.text for button in pressed] == [row["card"]]


def test_the_sliders_move_by_keys(show):
    root = show(lab.play.amdahl(0.5, 2.0))
    share, speedup = root.find_elements("css selector", "input[type=range]")
    sentence = root.find_element("css selector", "[aria-live]")
    assert "Products are 50 %" in sentence.text and "limit" in sentence.text
    assert f"The step is {lab.speed.amdahl(0.5, 2):.3g}×" in sentence.text
    share.send_keys(Keys.ARROW_RIGHT)
    speedup.send_keys(Keys.ARROW_LEFT)
    assert "Products are 50.5 %" in sentence.text
    assert f"The step is {lab.speed.amdahl(0.505, 2**0.95):.3g}×" in sentence.text
    share.send_keys(Keys.END)
    assert "There is no limit" in sentence.text
    share.send_keys(Keys.HOME)
    assert "The step is 1× as fast" in sentence.text


def test_the_readers_point_is_exact_and_marked(show):
    root = show(lab.play.amdahl(share=0.7637, speedup=1.913, measured=1.3))
    assert row_of(root, "yours")[1:3] == ["76.4 %", "1.91×"]
    assert row_of(root, "yours")[4] == "1.3×"
    text = root.find_element("css selector", '[data-part="compared"]').text
    law = lab.speed.amdahl(0.7637, 1.913)
    assert f"says {law:.3g}×. You measured 1.3×. So the rest of the step changed" in text
    root = show(lab.play.amdahl(share=0.7637, speedup=1.913))
    assert row_of(root, "yours")[4] == "–"


def test_numbers_that_make_no_sense_are_refused():
    for wrong in ({"share": 1.5, "speedup": 2.0}, {"share": 0.5, "speedup": 0.0}, {"share": 0.5}):
        with pytest.raises(ValueError, match="speed-up"):
            lab.play.amdahl(**wrong)
    assert isinstance(lab.play.amdahl(share=0.0, speedup=0.03), Exhibit)
