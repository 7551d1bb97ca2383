"""The rule for noise, which notebook 01 writes out, and numbers in pairs."""

import math
import random
from functools import partial

import numpy as np
import pytest

import labutils as lab
from labutils.training import noise
from labutils.training.noise import CANNOT_TELL, TOO_SMALL, paired_difference, paired_ratio
from tests.helpers import CPU, code_of

FIRST = [1.0, 1.1, 0.9, 1.0, 1.05]
LARGER = [1.2, 1.32, 1.08, 1.21, 1.24]


def test_the_table_of_t_leaves_five_per_cent_outside():
    """Student's density, summed up to each entry."""
    for n, t in enumerate(noise.T_95, start=1):
        scale = math.gamma((n + 1) / 2) / (math.sqrt(n * math.pi) * math.gamma(n / 2))
        x = np.linspace(0, t, 5001)
        inside = 2 * scale * np.trapezoid((1 + x * x / n) ** (-(n + 1) / 2), x)
        assert inside == pytest.approx(0.95, abs=5e-5) and noise.student_t(n + 1) == t, n
    assert noise.student_t(99) == t
    with pytest.raises(ValueError, match="two pairs or more; there are 1"):
        noise.student_t(1)


def test_a_ratio_is_the_same_either_way():
    ratio = paired_ratio(FIRST, LARGER, (FIRST, FIRST), worth_telling=1.05)
    inverse = paired_ratio(LARGER, FIRST, worth_telling=1.05)
    assert (ratio.low, ratio.high) == pytest.approx((1 / inverse.high, 1 / inverse.low))
    assert (ratio.verdict, inverse.verdict) == ("larger", "smaller")
    for wrong in ([1.0, 1.0, 1.0], [1.0, 0.0]):
        with pytest.raises(ValueError, match=r"longer|math|positive"):
            paired_ratio([1.0, 1.0], wrong, worth_telling=1.1)


@pytest.mark.parametrize(
    ("factor", "options", "says"),
    [
        (1.26, {}, "26 % slower (25 to 27 %, 5 pairs)"),
        (0.74, {}, "26 % less time (25 to 27 %, 5 pairs)"),
        (
            1.005,
            {},
            "too small to matter, +0.5 % (-0.26 to +1.3 %, 5 pairs; equal pairs -0.88 to +0.88 %)",
        ),
        (1.06, {"of": "speed"}, "1.06 times as fast (1.05 to 1.07, 5 pairs)"),
        (2.0, {"by": 80}, "cannot tell here, 1.84 times as long (1.04 to 3.23, 5 pairs; equal"),
        (0.0257, {"of": "speed"}, "0.0257 times as fast (0.0255 to 0.0259, 5 pairs)"),
        (6.0, {}, "6 times as long (5.95 to 6.05, 5 pairs)"),
        (0.74, {"of": "size"}, "26 % smaller (25 to 27 %, 5 pairs)"),
    ],
)
def test_a_ratio_is_said_in_a_sentence(factor, options, says):
    given = {"worth_telling": 1.05, "by": 1.0} | options
    spread = given.pop("by")
    second = [factor * (1 + spread * x) for x in (0.01, -0.005, 0, -0.005, 0.00005)]
    equal = [1.0] * 5, [1 + spread * x for x in (0.01, -0.01, 0, 0, 0)]
    assert str(paired_ratio([1.0] * 5, second, equal, **given)).startswith(says)


def test_a_difference_is_said_with_its_unit_and_noise_where_it_decides():
    def said(*second, worth=0.005):
        pair = [6.0, 6.1, 6.2], second
        equal = pair[0], [6.0, 6.2, 6.1]
        return str(paired_difference(*pair, equal, worth_telling=worth, unit="nats"))

    assert said(7.0, 7.1, 7.3) == "1.03 nats more (0.89 to 1.18 nats, 3 pairs)"
    assert said(5.0, 5.1, 5.3) == "0.967 nats less (0.823 to 1.11 nats, 3 pairs)"
    noise = "equal pairs -0.248 to +0.248 nats"
    assert said(6.1, 6.2, 6.3) == f"{CANNOT_TELL}, +0.1 nats (+0.1 to +0.1 nats, 3 pairs; {noise})"
    assert said(6.0, 6.1, 6.2) == f"{TOO_SMALL}, +0 nats (+0 to +0 nats, 3 pairs; {noise})"
    # a run that diverged is left out
    assert said(7.0, 7.1, math.nan).startswith("1 nats more (1 to 1 nats, 2 pairs")
    assert said(6.1, math.nan, math.nan).startswith(f"{CANNOT_TELL}, +0.1 nats (-inf to +inf nats")
    assert said(math.nan, math.nan, math.nan).startswith(CANNOT_TELL)


def test_the_rule_on_the_page_is_the_package_s():
    rule: dict = {"lab": lab}
    for source in code_of("further/can_you_tell.ipynb").values():
        if "def interval(" in source or "def verdict(" in source:
            exec(source, rule)
    draw, verdicts = random.Random(1), set()
    for _ in range(900):
        zeros, shift = [0.0] * draw.randint(2, 40), draw.choice((-3.0, -1.0, 0.0, 1.0, 3.0))
        differences = [draw.gauss(shift, 1) for _ in zeros]
        equal_pairs = [draw.gauss(0, draw.choice((0.1, 1.0))) for _ in zeros]
        worth = draw.choice((0.0, 0.5, 2.0))
        ours = paired_difference(zeros, differences, (zeros, equal_pairs), worth_telling=worth)
        assert rule["interval"](differences) == pytest.approx((ours.low, ours.high))
        assert rule["verdict"](differences, equal_pairs, worth) == ours.verdict
        verdicts.add(ours.verdict)
    assert verdicts == {"larger", "smaller", TOO_SMALL, CANNOT_TELL}


# ---- Numbers in pairs


def test_every_round_runs_each_variant_once_in_a_shuffled_order():
    called = []
    times = lab.alternate({name: partial(called.append, name) for name in "abc"}, 60, CPU)
    rounds = {"".join(called[i : i + 3]) for i in range(0, len(called), 3)}
    assert rounds == {"abc", "acb", "bac", "bca", "cab", "cba"}
    assert {name: len(series) for name, series in times.items()} == {"a": 60, "b": 60, "c": 60}


def test_a_round_keeps_the_fastest_of_its_passes(monkeypatch):
    clock = iter([9.0, 5.0, 3.0, 4.0, 8.0])
    monkeypatch.setattr(noise, "_timed_ms", lambda variant, device: next(clock))
    assert lab.alternate({"a": print}, 2, CPU, passes=2) == {"a": [3.0, 4.0]}


def test_product_speeds_leave_out_what_the_device_lacks(monkeypatch):
    monkeypatch.setattr(noise.machine, "matmul_rate", lambda dtype, *_, **__: dtype.itemsize / 8)
    speeds = lab.product_speeds(("fp32", "tf32", "bf16"), CPU)
    means = {name: speed.mean for name, speed in speeds.items()}
    assert means == pytest.approx({"fp32": 1.0, "bf16": 0.5})
    assert [speed.verdict for speed in speeds.values()] == [TOO_SMALL, "smaller"]
