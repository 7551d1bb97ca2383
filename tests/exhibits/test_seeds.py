from __future__ import annotations

import math
import random
import statistics

import pytest
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select

import labutils as lab
from labutils.exhibits.seeds_data import WORTH_TELLING
from labutils.training.noise import PairedDifference

RECORD = lab.convergence.read_record("stability").losses
LAST = int(RECORD.step.max())


def column(arm: str, rate: str, name: str = "loss") -> list[float]:
    """Return a column of the record after the last step, in order of seeds."""
    rows = RECORD[(RECORD.arm == arm) & (RECORD.rate == rate) & (RECORD.step == LAST)]
    return rows.sort_values("seed")[name].tolist()


def difference(base: list[float], other: list[float]) -> PairedDifference:
    return lab.paired_difference(base, other, worth_telling=WORTH_TELLING)


FIND = """
const { mean, sigma, difference, verdict } = arguments[0].exhibit;
return arguments[1].map(([base, other]) => {
  const found = difference(base, other);
  return [mean(other), sigma(other), found.mean, found.low, found.high, found.n, verdict(found)]
    .map((one) => Number.isNaN(one) ? null : one);
});
"""


def test_its_statistics_are_those_of_python(browser, show):
    root = show(lab.play.seeds())
    generator, pairs = random.Random(0), []
    for _ in range(300):
        n = generator.randint(2, 8)
        shift = generator.choice([0.0, 0.05, -1.0])
        base = [generator.gauss(6, 0.2) for _ in range(n)]
        pairs.append((base, [one + generator.gauss(shift, 0.05) for one in base]))
    verdicts = set()
    for (base, other), found in zip(pairs, browser.execute_script(FIND, root, pairs), strict=True):
        right = difference(base, other)
        expected = [statistics.fmean(other), statistics.stdev(other), right.mean, right.low]
        assert found[:4] == pytest.approx(expected, rel=1e-9)
        assert found[4] == pytest.approx(right.high, rel=1e-9)
        assert found[5:] == [right.n_pairs, right.verdict]
        verdicts.add(right.verdict)
    assert verdicts == {"larger", "smaller", "cannot tell here"}


def test_a_pair_without_a_finite_loss_is_left_out(browser, show):
    root = show(lab.play.seeds())
    pairs = [([1.0, None, 3.0], [2.0, 5.0, 4.5]), ([None, None], [1.0, 2.0])]
    some, none = browser.execute_script(FIND, root, pairs)
    right = difference([1.0, math.nan, 3.0], [2.0, 5.0, 4.5])
    assert some[2:6] == pytest.approx([right.mean, right.low, right.high, 2])
    assert none[2:] == [None, None, None, 0, "cannot tell here"]


def choose(root, name: str, value: str) -> None:
    Select(root.find_element("css selector", f'[data-part="{name}"]')).select_by_value(value)


def sentence(root) -> str:
    return root.find_element("css selector", '[data-part="sentence"]').text


@pytest.mark.parametrize("rate", RECORD.rate.unique())
def test_it_shows_the_record(show, rate):
    root = show(lab.play.seeds(rate=rate))
    for arm in RECORD.arm.unique():
        losses = [loss for loss in column(arm, rate) if math.isfinite(loss)]
        skipped = statistics.fmean(column(arm, rate, "skipped"))
        cells = root.find_elements("css selector", f'tr[data-arm="{arm}"] td')
        loss, skips, lost = [cell.text for cell in cells][1:]
        if losses:
            assert float(loss.split(" ± ")[0]) == pytest.approx(statistics.fmean(losses), rel=1e-4)
        else:
            assert loss == "none is finite"
        assert float(skips) == pytest.approx(skipped, rel=1e-2)
        assert lost == f"{RECORD.seed.nunique() - len(losses)} of {RECORD.seed.nunique()}"


def test_choices_and_keys_change_the_answer(show):
    root = show(lab.play.seeds())
    choose(root, "other", "bf16")
    choose(root, "rate", "usual")
    pair = [column(arm, "usual") for arm in ("fp32", "bf16")]
    assert difference(*pair).verdict in sentence(root)
    assert f"{difference(*pair).mean:.3g}"[:6] in sentence(root)
    slider = root.find_element("css selector", '[data-part="seeds"]')
    slider.send_keys(Keys.HOME)
    assert "2 pairs" in sentence(root)
    assert len(root.find_elements("css selector", "svg circle")) == 2
    step = root.find_element("css selector", '[data-part="step"]')
    step.send_keys(Keys.HOME)
    assert root.find_element("css selector", '[data-part="at"]').text == "8"


def test_where_no_pair_is_left_it_cannot_tell(show):
    root = show(lab.play.seeds(other="fp32", base="fp32", rate="far too high"))
    assert "cannot tell here" in sentence(root)
