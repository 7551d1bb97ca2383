from __future__ import annotations

import pytest

import labutils as lab
from labutils.exhibits import amdahl_data
from labutils.exhibits.amdahl_data import amdahl
from labutils.exhibits.exhibit import Exhibit

SHARES = [k / 100 for k in range(101)]
SPEEDUPS = [2 ** (k / 8) for k in range(-48, 49)]
GRID = """
const { amdahl } = arguments[0].exhibit;
return arguments[1].map((share) => arguments[2].map((speedup) => amdahl(share, speedup)));
"""


@pytest.mark.parametrize("card", amdahl_data.SHOWN[:2])
def test_the_shipped_file_is_what_the_time_ledger_predicts(card):
    """If it is stale: python -m labutils.exhibits.amdahl_data"""
    (row,) = [row for row in amdahl_data.cards() if row["card"] == card]
    right = amdahl_data.predicted(card)
    assert (row.pop("card"), row.pop("precision")) == (right.pop("card"), right.pop("precision"))
    assert row == pytest.approx(right, rel=2e-3)


def test_the_law_is_that_of_lab_speed(show, browser):
    found = browser.execute_script(GRID, show(lab.play.amdahl()), SHARES, SPEEDUPS)
    for share, row in zip(SHARES, found, strict=True):
        assert row == [amdahl(share, speedup) for speedup in SPEEDUPS], share


def test_numbers_that_make_no_sense_are_refused():
    for wrong in ({"share": 1.5, "speedup": 2.0}, {"share": 0.5, "speedup": 0.0}, {"share": 0.5}):
        with pytest.raises(ValueError, match="speed-up"):
            lab.play.amdahl(**wrong)
    assert isinstance(lab.play.amdahl(share=0.0, speedup=0.03), Exhibit)
