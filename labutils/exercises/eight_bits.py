"""Exercise of further/eight_bits: FP8 with a scale for each block."""

from __future__ import annotations

from collections.abc import Callable

import torch

from labutils.exercises.core import exercise

ROWS, COLUMNS, BLOCK = 6, 64, 16
FORMAT = torch.float8_e4m3fn


@exercise(
    "A tensor of (rows, columns) can be seen as (rows, blocks, block): `x.view(...)`.",
    "`amax(dim=-1, keepdim=True)` is the largest of each block, and its shape fits for a "
    "multiplication.",
    "The largest of a block of zeros is 0. Divide by something else there, for example with "
    "`torch.where` or `clamp(min=...)`. At the end return to the shape of x.",
)
def blockwise_fp8(round_blocks: Callable[[torch.Tensor, int], torch.Tensor] | None) -> str | None:
    """Check `round_blocks(x, block)`: x through E4M3, with one scale for each block of a row."""
    x = _numbers()
    before = x.clone()
    found = round_blocks(x, BLOCK)
    if not isinstance(found, torch.Tensor) or found.shape != x.shape:
        return f"the result must be a tensor of the shape of x, {tuple(x.shape)}."
    if not torch.equal(x, before):
        return "your function changes x itself. Return a new tensor."
    if found.dtype != torch.float32:
        return f"the result is {found.dtype}. Return float32, scaled back to the size of x."
    if found[-1].isnan().any() or found.isnan().any():
        return "there is NaN in the result. What is the scale of a block of zeros?"
    right = _right(x, BLOCK)
    if _is_near(found, right):
        other = _numbers(columns=3 * BLOCK)
        is_general = _is_near(round_blocks(other, BLOCK // 2), _right(other, BLOCK // 2))
        return None if is_general else "another shape, or another block, gives a wrong result."
    for answer, problem in _mistakes(x):
        if _is_near(found, answer):
            return problem
    error = (found - right).abs().max() / right.abs().max()
    return f"the numbers differ from the right ones, by up to {error:.1g} of the largest."


def _numbers(columns: int = COLUMNS) -> torch.Tensor:
    """Return numbers of very different size from block to block and row to row; the last are 0."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, columns, generator=generator)
    x *= 2.0 ** torch.arange(0, -6 * ROWS, -6)[:, None]
    x[:, BLOCK : 2 * BLOCK] *= 2.0**30
    x[-1] = 0
    return x


def _right(x: torch.Tensor, block: int, dtype: torch.dtype = FORMAT) -> torch.Tensor:
    parts = x.view(len(x), -1, block)
    return _through(parts, parts.abs().amax(-1, keepdim=True), dtype).view(x.shape)


def _through(x: torch.Tensor, largest: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    limit = torch.finfo(dtype).max
    scale = torch.where(largest > 0, limit / largest, 1.0)
    return (x * scale).clamp(-limit, limit).to(dtype).float() / scale


def _mistakes(x: torch.Tensor) -> list[tuple[torch.Tensor, str]]:
    sizes = x.abs()
    return [
        (x, "nothing is rounded."),
        (_through(x, sizes.amax(), FORMAT), "there is one scale for the whole tensor."),
        (_through(x, sizes.amax(1, keepdim=True), FORMAT), "there is one scale for each row."),
        (_through(x, sizes.amax(0, keepdim=True), FORMAT), "there is one scale for each column."),
        (_right(x, BLOCK, torch.float8_e5m2), "these are numbers of E5M2, not of E4M3."),
        (_through(x, torch.tensor(448.0), FORMAT), "x is rounded without a scale."),
    ]


def _is_near(found: torch.Tensor, right: torch.Tensor) -> bool:
    # scales may be rounded otherwise: a unit in the last place of float32, but no step of FP8
    return torch.allclose(found, right, rtol=1e-5, atol=0.0)
