from __future__ import annotations

import math

import pytest
import torch

from labutils.techniques import rounding

BITS_16 = (torch.bfloat16, torch.float16)


def terms_of(n_terms: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.rand(n_terms, 512, generator=generator).add(0.1).to(dtype).double()


@pytest.mark.parametrize("dtype", [torch.float32, *BITS_16])
def test_one_rounding_has_the_predicted_error(dtype):
    generator = torch.Generator().manual_seed(0)
    values = 2 ** torch.rand(100_000, generator=generator, dtype=torch.float64)
    relative = (values.to(dtype).double() - values) / values / rounding.unit_roundoff(dtype)
    assert relative.abs().max() <= 1
    assert relative.square().mean().sqrt() == pytest.approx(rounding.ONE_ROUNDING, rel=0.02)


@pytest.mark.parametrize("dtype", BITS_16)
@pytest.mark.parametrize("n_terms", [1, 16, 64])
def test_a_short_sum_has_the_error_of_the_law(dtype, n_terms):
    terms = terms_of(n_terms, torch.float64)
    sums = rounding.partial_sums(terms, dtype)
    error = rounding.rms_error(sums, terms.cumsum(0))[-1].item()
    assert error == pytest.approx(rounding.sum_law(n_terms, dtype), rel=0.15)


def test_a_long_sum_leaves_the_law_and_stays_below_the_bound():
    terms = terms_of(1024, torch.bfloat16)
    error = rounding.rms_error(rounding.partial_sums(terms, torch.bfloat16), terms.cumsum(0))[-1]
    assert error > 3 * rounding.sum_law(1024, torch.bfloat16)
    assert error < rounding.sum_bound(1024, torch.bfloat16)


def test_partial_sums_are_those_of_a_loop_in_16_bits():
    terms = terms_of(20, torch.bfloat16).float()
    total = torch.zeros(512, dtype=torch.bfloat16)
    for term in terms:
        total += term.bfloat16()
    assert torch.equal(rounding.partial_sums(terms, torch.bfloat16)[-1], total.double())
    exact = terms.double().cumsum(0)
    torch.testing.assert_close(rounding.partial_sums(terms.double(), torch.float64), exact)


def test_the_law_grows_as_the_square_root():
    law = rounding.sum_law
    assert law(4_000_000, torch.float16) / law(1_000_000, torch.float16) == pytest.approx(2)
    assert law(1, torch.float16) == rounding.ONE_ROUNDING * 2**-11
    assert rounding.sum_bound(10, torch.bfloat16) == 10 * 2**-8
    assert pytest.approx(0.4247, abs=1e-4) == rounding.ONE_ROUNDING


def test_values_and_gradients_are_rounded():
    x = torch.tensor([math.pi, 1e-9], requires_grad=True)
    y = rounding.round_both_ways(x, torch.float16)
    assert y.dtype == torch.float32 and y.tolist() == [3.140625, 0.0]
    (y * torch.tensor([1e-9, math.e])).sum().backward()
    assert x.grad.tolist() == [0.0, 2.71875]
