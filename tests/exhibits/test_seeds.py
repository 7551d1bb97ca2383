from __future__ import annotations

import random
import statistics

import pytest

import labutils as lab
from labutils.exhibits.seeds_data import WORTH_TELLING
from labutils.training.noise import PairedDifference


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
        little = 0.5 * WORTH_TELLING  # too little to tell, however clear
        shift, noise = generator.choice([(0.0, 0.05), (0.05, 0.05), (-1.0, 0.05), (little, 1e-6)])
        base = [generator.gauss(6, 0.2) for _ in range(n)]
        pairs.append((base, [one + generator.gauss(shift, noise) for one in base]))
    verdicts = set()
    for (base, other), found in zip(pairs, browser.execute_script(FIND, root, pairs), strict=True):
        right = difference(base, other)
        expected = [statistics.fmean(other), statistics.stdev(other), right.mean, right.low]
        assert found[:4] == pytest.approx(expected, rel=1e-9)
        assert found[4] == pytest.approx(right.high, rel=1e-9)
        assert found[5:] == [right.n_pairs, right.verdict]
        verdicts.add(right.verdict)
    assert verdicts == {"larger", "smaller", "cannot tell here"}
