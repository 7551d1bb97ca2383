from __future__ import annotations

from itertools import product

import pytest
import torch

import labutils as lab
from labutils.exhibits import allreduce_data

FORMATS = {one.name: one for one in allreduce_data.FORMATS}
EXCHANGE = """
const { formats, exchange, errorOf } = arguments[0].exhibit;
return arguments[3].map((n) => {
  const mean = exchange(n, formats[arguments[1]], arguments[2], arguments[4]);
  return [mean.map(String), errorOf(mean, n)];
});
"""
BYTES = """
const { formats, sentBytes, leastSeconds } = arguments[0].exhibit;
const [n, parameters, format] = [arguments[1], arguments[2], formats[arguments[3]]];
return [sentBytes(n, parameters, format), leastSeconds(n, parameters, format, 2)];
"""


@pytest.fixture
def root(show):
    return show(lab.play.allreduce())


@pytest.mark.parametrize("order", allreduce_data.ORDERS)
@pytest.mark.parametrize("name", FORMATS)
def test_the_page_sums_as_torch_does_bit_for_bit(root, browser, name, order):
    cases = list(product([1.0, 2.0**-13, 2.0**-16, 2.0**15, 2.0**20], [*allreduce_data.WORKERS, 1]))
    for scale, n in cases:
        [(texts, error)] = browser.execute_script(EXCHANGE, root, name, order, [n], scale)
        some = allreduce_data.gradients()[:n]
        right = allreduce_data.exchanged_mean(some, FORMATS[name].dtype, order, scale)
        values = [float(text.replace("Infinity", "inf")) for text in texts]
        mean = torch.tensor(values, dtype=torch.float64)
        assert torch.equal(mean.nan_to_num(7, 8, 9), right.double().nan_to_num(7, 8, 9)), n
        if mean.isfinite().all():
            judge = some.double().mean(0)
            wrong = ((mean - judge).norm() / judge.norm()).item()
            assert error == pytest.approx(wrong, rel=1e-9, abs=1e-15)


def test_some_values_of_this_test_are_lost_and_some_overflow():
    """Otherwise the comparison above would say nothing about the ends of FP16."""
    some = allreduce_data.gradients()
    assert some.shape == (64, 64) and some.all()
    small = allreduce_data.exchanged_mean(some[:8], torch.float16, "ring", 2.0**-16)
    large = allreduce_data.exchanged_mean(some, torch.float16, "ring", 2.0**20)
    assert (small == 0).any() and small.any()
    assert large.isinf().any() and large.isfinite().any()


def test_bytes_and_least_time_are_those_of_a_ring(root, browser):
    for name, n in product(FORMATS, allreduce_data.WORKERS):
        size = torch.finfo(FORMATS[name].dtype).bits // 8
        right = 2 * (n - 1) / n * size * 1_000_000
        found = browser.execute_script(BYTES, root, n, 1_000_000, name)
        assert found == pytest.approx([right, right / 2e9])


def test_a_number_of_workers_without_data_is_refused():
    with pytest.raises(ValueError, match="not 7"):
        lab.play.allreduce(7)
