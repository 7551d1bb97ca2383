"""Numbers in fewer bits:

Stochastic rounding to BF16, and 8-bit codes with a scale per 256 numbers.
"""

from __future__ import annotations

import torch

BLOCK = 256  # numbers that share one scale
FIRST, SECOND = (
    (torch.int8, 127, 1),
    (torch.uint8, 255, 2),
)  # codes of a moment: dtype, largest, square roots taken


def round_stochastically(x: torch.Tensor) -> torch.Tensor:
    """Return float32 `x` as bfloat16, rounded up or down by chance so that the mean of many
    roundings is `x`.

    To nearest, a weight stays as it is when its update is below half a step of its format (a step
    is 1/128 to 1/256 of it); by chance, it moves now and then. The 16 bits that bfloat16 drops get
    16 random ones added: a carry rounds up. Inf and NaN stay. See Zamirai et al. 2020 (2010.06192).
    Draws from the global generator.
    """
    noise = torch.randint_like(x, 1 << 16, dtype=torch.int32)
    rounded = noise.add_(x.view(torch.int32)).bitwise_and_(-(1 << 16)).view(torch.float32)
    return torch.where(x.isfinite(), rounded, x).bfloat16()


def pack(
    x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, kind: tuple[torch.dtype, int, int]
) -> None:
    """Write float32 `x`, `(blocks, BLOCK)`, as 8-bit `codes` of that shape and one `scale` per
    block, `(blocks, 1)`.

    Coded is the square root (of the second moment, which has no sign, the fourth root) of a number
    over the scale, so that small numbers, of which there are many, get most codes. Codes are
    rounded by chance, or a slow average would never move. In the second moment, which is divided
    by, no code is 0. After Dettmers et al. 2022 (2110.02861), whose codes are spaced otherwise. `x`
    is overwritten where it can be.
    """
    _, largest, n_roots = kind
    sizes = x.abs() if kind is FIRST else x
    scale.copy_(sizes.amax(dim=1, keepdim=True)).div_(largest**2**n_roots).clamp_(
        min=torch.finfo(torch.float32).tiny
    )
    sizes.div_(scale)
    for _ in range(n_roots):
        sizes.sqrt_()
    if kind is FIRST:
        sizes.copysign_(x)
    codes.copy_(
        sizes.add_(torch.rand_like(sizes))
        .floor_()
        .clamp_(-largest if kind is FIRST else 1, largest)
    )


def unpack(
    codes: torch.Tensor, scale: torch.Tensor, kind: tuple[torch.dtype, int, int]
) -> torch.Tensor:
    """Return the float32 numbers, `(blocks, BLOCK)`, that `pack` has coded."""
    x = codes.float()
    x = x.mul_(x.abs()) if kind is FIRST else x.square_().square_()
    return x.mul_(scale)
