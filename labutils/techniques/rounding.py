"""What rounding does to sums and to repeated updates: formulas, and the same by experiment.

The *unit roundoff* u of a format is half of its eps: rounding to nearest changes a normal number by
at most u times its size. Higham, Accuracy and Stability of Numerical Algorithms (2002), chapters 2
to 4; Higham and Mary, SIAM J. Sci. Comput. 41 (2019) for √K in place of K.
"""

from __future__ import annotations

import math
from typing import Any

import torch

# Root mean square of the error of one rounding, in units of u. An error is uniform within half a
# spacing, so its root mean square is spacing / √12. The spacing is 2 u / m of a number with
# mantissa m, 1 ≤ m < 2; over numbers whose logarithm is uniform the mean of 1/m² is 3 / (8 ln 2).
ONE_ROUNDING = 2 / math.sqrt(12) * math.sqrt(3 / (8 * math.log(2)))
# The same of a whole tensor, relative to its norm: √(mean of squared errors / mean of squares).
# Large numbers weigh more in it. The mean of m² is 3 / (2 ln 2).
ONE_ROUNDING_OF_NORM = 2 / math.sqrt(12) / math.sqrt(3 / (2 * math.log(2)))


def unit_roundoff(dtype: torch.dtype) -> float:
    """Return u: the largest relative change when a normal number is rounded to nearest."""
    return torch.finfo(dtype).eps / 2


def sum_bound(n_terms: int, dtype: torch.dtype) -> float:
    """Return what the relative error of a sum of positive terms never exceeds, added one by one.

    It is K u, for rounded products of numbers, too: Jeannerod and Rump, SIAM J. Matrix Anal. Appl.
    34 (2013).
    """
    return n_terms * unit_roundoff(dtype)


def sum_law(n_terms: int, dtype: torch.dtype) -> float:
    """Return the root mean square of the relative error if all roundings are independent.

    K like positive terms, added one by one: partial sum k is k/K of the whole and is rounded once,
    so the squares add up to c² u² (1² + … + K²) / K², about K/3 of them. c is ONE_ROUNDING.
    """
    squares = (n_terms + 1) * (2 * n_terms + 1) / (6 * n_terms)
    return ONE_ROUNDING * unit_roundoff(dtype) * math.sqrt(squares)


def partial_sums(terms: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the sums of the first 1, 2, … K of `terms`, `(K, n)`, added one by one in `dtype`.

    Each sum is rounded to `dtype` before the next term is added. The result is `(K, n)` float64.
    Terms are float32 or float64: one of 16 bits would be rounded before it is added.
    """
    total, sums = torch.zeros_like(terms[0]), torch.empty_like(terms)
    for i, term in enumerate(terms):
        total = (total + term).to(dtype).to(terms.dtype)
        sums[i] = total
    return sums.double()


def rms_error(computed: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Return the root mean square of the relative error over the last dimension."""
    return ((computed.double() - exact) / exact).square().mean(-1).sqrt()


class _RoundBothWays(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        ctx.dtype = dtype
        return x.to(dtype).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient.to(ctx.dtype).to(gradient.dtype), None


def round_both_ways(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return `x` with the values that `dtype` can store; its gradient is rounded in the same way.

    The tensor keeps its own dtype. So a product of two such tensors is one of 16-bit numbers with
    float32 sums, on every device and at float32's speed.
    """
    return _RoundBothWays.apply(x, dtype)
