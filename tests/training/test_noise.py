"""The rule for noise: what it tells, what it does not, and how often it is wrong."""

import math
import random
from collections import Counter
from functools import partial
from itertools import pairwise

import nbformat
import pytest

import labutils as lab
from labutils.training import noise
from labutils.training.noise import CANNOT_TELL, interval, paired_difference, paired_ratio
from tests.helpers import CPU, committed

FIRST = [1.0, 1.1, 0.9, 1.0, 1.05]


def test_a_difference_that_all_pairs_show_is_told():
    second = [1.2, 1.32, 1.08, 1.21, 1.24]
    assert paired_difference(FIRST, second, worth_telling=0.01).verdict == "larger"
    assert paired_difference(second, FIRST, worth_telling=0.01).verdict == "smaller"
    assert paired_ratio(FIRST, second, worth_telling=1.05).verdict == "larger"
    assert paired_ratio(second, FIRST, worth_telling=1.05).verdict == "smaller"


def test_the_interval_is_students():
    mean, low, high = interval([1.0, 2.0, 3.0, 4.0, 5.0])
    half = 2.776 * 2.5**0.5 / 5**0.5
    assert (mean, low, high) == pytest.approx((3.0, 3.0 - half, 3.0 + half))


def test_the_table_of_t_leaves_five_per_cent_outside():
    """Student's density, summed up to each entry by the midpoint rule."""
    for n, t in enumerate(noise.T_95, start=1):
        scale = math.gamma((n + 1) / 2) / (math.sqrt(n * math.pi) * math.gamma(n / 2))
        xs = [t * (i + 0.5) / 5000 for i in range(5000)]
        inside = 2 * t / 5000 * sum(scale * (1 + x * x / n) ** (-(n + 1) / 2) for x in xs)
        assert inside == pytest.approx(0.95, abs=5e-5), n


def test_a_ratio_is_the_same_either_way():
    second = [1.3, 1.32, 1.5, 1.21, 1.24]
    ratio = paired_ratio(FIRST, second, worth_telling=1.05)
    inverse = paired_ratio(second, FIRST, worth_telling=1.05)
    assert ratio.mean == pytest.approx(1 / inverse.mean)
    assert (ratio.low, ratio.high) == pytest.approx((1 / inverse.high, 1 / inverse.low))


def test_what_equal_pairs_differ_by_is_noise():
    second = [x + 0.2 for x in FIRST]
    identical = (FIRST, [x + d for x, d in zip(FIRST, (0.1, 0.3, 0.2, 0.25, 0.1), strict=True)])
    difference = paired_difference(FIRST, second, identical, worth_telling=0.01)
    assert difference.noise_high > 0.2
    assert difference.verdict == CANNOT_TELL and CANNOT_TELL in str(difference)
    without = paired_difference(FIRST, second, worth_telling=0.01)
    assert without.verdict == "larger" and "equal pairs" not in str(without)


def test_a_difference_too_small_to_care_about_is_not_told():
    second = [x + 0.02 + 0.001 * i for i, x in enumerate(FIRST)]
    assert paired_difference(FIRST, second, worth_telling=0.01).verdict == "larger"
    assert paired_difference(FIRST, second, worth_telling=0.05).verdict == CANNOT_TELL
    assert paired_difference(second, FIRST, worth_telling=0.05).verdict == CANNOT_TELL


def test_a_pair_with_a_run_that_diverged_is_left_out():
    nan = float("nan")
    difference = paired_difference([1.0, 1.0, nan], [1.2, 1.25, 9.0], worth_telling=0.0)
    assert difference.n_pairs == 2 and difference.mean == pytest.approx(0.225)
    assert paired_difference([nan], [1.0], worth_telling=0.0).verdict == CANNOT_TELL
    assert paired_difference([1.0], [2.0], worth_telling=0.0).verdict == CANNOT_TELL


@pytest.mark.parametrize("compare", [paired_difference, paired_ratio])
def test_pairs_need_two_numbers_each(compare):
    with pytest.raises(ValueError, match="5 and 4"):
        compare(FIRST, FIRST[:4], worth_telling=1.1)
    with pytest.raises(ValueError, match="0 and 0"):
        compare([], [], worth_telling=1.1)


def test_a_ratio_needs_positive_numbers():
    with pytest.raises(ValueError, match="positive"):
        paired_ratio([1.0, 0.0], [1.0, 1.0], worth_telling=1.1)


@pytest.mark.parametrize("n_pairs", [5, 12, 24])
def test_noise_alone_is_seldom_called_a_difference(n_pairs):
    """Independent normal numbers, 1,000 draws: 5 % by design without equal pairs."""
    draw = random.Random(n_pairs)

    def series() -> list[float]:
        return [draw.gauss(100, 5) for _ in range(n_pairs)]

    alone = with_equal_pairs = 0
    for _ in range(1000):
        first, second = series(), series()
        told = paired_ratio(first, second, worth_telling=1.0001).verdict
        alone += told != CANNOT_TELL
        told = paired_ratio(first, second, (series(), series()), worth_telling=1.0001).verdict
        with_equal_pairs += told != CANNOT_TELL
    assert alone <= 60
    assert with_equal_pairs <= 30


def rule_of_notebook_01() -> dict:
    """Return the names that the notebook's cells of the rule define: `verdict`, `interval`."""
    names: dict = {}
    cells = nbformat.reads(committed("01-Mixed_Precision.ipynb"), as_version=4).cells
    for cell in cells:
        if "def interval(" in cell.source or "def verdict(" in cell.source:
            exec(cell.source, names)
    return names


def test_the_rule_on_the_page_is_the_package_s():
    rule, draw, verdicts = rule_of_notebook_01(), random.Random(1), set()
    for _ in range(600):
        n_pairs, shift = draw.choice((5, 9, 12)), draw.choice((-3.0, -1.0, 0.0, 1.0, 3.0))
        differences = [draw.gauss(shift, 1) for _ in range(n_pairs)]
        equal_pairs = [draw.gauss(0, draw.choice((0.1, 1.0))) for _ in range(n_pairs)]
        worth_telling = draw.choice((0.0, 0.5, 2.0))
        ours = paired_difference(
            [0.0] * n_pairs,
            differences,
            ([0.0] * n_pairs, equal_pairs),
            worth_telling=worth_telling,
        )
        assert rule["interval"](differences) == pytest.approx((ours.low, ours.high))
        assert rule["verdict"](differences, equal_pairs, worth_telling) == ours.verdict
        verdicts.add(ours.verdict)
    assert verdicts == {"larger", "smaller", CANNOT_TELL}


# ---- Numbers in pairs


def test_every_round_runs_each_variant_once_in_a_shuffled_order():
    called = []
    variants = {name: partial(called.append, name) for name in "abc"}
    times = lab.alternate(variants, 60, CPU)
    rounds = ["".join(called[i : i + 3]) for i in range(0, len(called), 3)]
    assert {"".join(sorted(order)) for order in rounds} == {"abc"}
    assert len(set(rounds)) == 6  # each variant follows each other one, and comes first and last
    repeats = Counter(a for a, b in pairwise(called) if a == b)
    assert max(repeats.values()) <= 3 * min(repeats.values())
    assert {name: len(series) for name, series in times.items()} == {"a": 60, "b": 60, "c": 60}


def test_a_round_keeps_the_fastest_of_its_passes(monkeypatch):
    clock = iter([9.0, 5.0, 3.0, 4.0, 8.0])
    monkeypatch.setattr(noise, "_timed_ms", lambda variant, device: next(clock))
    assert lab.alternate({"a": print}, 2, CPU, passes=2) == {"a": [3.0, 4.0]}
    for wrong in ({"rounds": 0}, {"rounds": 1, "passes": 0}):
        with pytest.raises(ValueError, match="at least one round"):
            lab.alternate({"a": print}, device=CPU, **wrong)


def test_product_speeds_leave_out_what_the_device_lacks(monkeypatch):
    monkeypatch.setattr(noise.here, "matmul_rate", lambda dtype, *_, **__: dtype.itemsize / 8)
    speeds = lab.product_speeds(("fp32", "tf32", "bf16"), CPU)
    assert {name: (speed.mean, speed.verdict) for name, speed in speeds.items()} == {
        "fp32": (1.0, "cannot tell here"),
        "bf16": (0.5, "smaller"),
    }
