"""Times products of matrices of given shapes, in turns: do sides that 8 or 64 divide pay?"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from labutils.training.noise import alternate

Shape = tuple[int, int, int, int]  # batch, rows, columns, length of the sums
AGAIN = ", again"


def flops(shape: Shape) -> int:
    """Return the operations of a product: two for each entry of the result and term of its sum."""
    return 2 * math.prod(shape)


def n_bytes(shape: Shape, dtype: torch.dtype) -> int:
    """Return the bytes of both factors and of the result."""
    batch, rows, columns, inner = shape
    return batch * (rows * inner + inner * columns + rows * columns) * dtype.itemsize


def product(shape: Shape, dtype: torch.dtype, device: torch.device) -> Callable[[], torch.Tensor]:
    """Return a call that multiplies (batch, rows, inner) by (batch, inner, columns).

    The random numbers are drawn apart from torch's global generator.
    """
    batch, rows, columns, inner = shape
    generator = torch.Generator(device).manual_seed(0)
    draw = partial(torch.randn, device=device, generator=generator)
    first = draw(batch, rows, inner).to(dtype).squeeze(0)
    second = draw(batch, inner, columns).to(dtype).squeeze(0)
    return partial(torch.matmul, first, second)


def sweep(
    sizes: Mapping[str, Sequence[int]],
    dtype: torch.dtype,
    device: torch.device,
    rounds: int = 7,
    passes: int = 2,
) -> dict[str, list[float]]:
    """Return {name: ps per FLOP of each round} of n×n by n×n products; `sizes` is {name: [n, …]}.

    A name's number is the mean over its sizes, so each size counts the same. The first name is
    timed twice, the second time as "NAME, again": the two tell the noise. Takes turns as
    `alternate` does, so the numbers of a round are pairs.
    """
    first = next(iter(sizes))
    groups = {**sizes, first + AGAIN: sizes[first]}
    calls = {}
    for name, group in groups.items():
        for n in group:
            calls[name, n] = product((1, n, n, n), dtype, device)
    times = alternate(calls, rounds, device, passes)
    found = {}
    for name, group in groups.items():
        columns = []
        for n in group:
            columns.append([1e9 * ms / flops((1, n, n, n)) for ms in times[name, n]])
        found[name] = [statistics.mean(row) for row in zip(*columns, strict=True)]
    return found
