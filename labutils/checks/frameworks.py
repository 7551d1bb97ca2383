"""Exercise of further/frameworks: the loss to hand over to a framework that divides it again."""

from __future__ import annotations

from collections.abc import Callable

import torch

from labutils.checks.core import exercise

Loss = Callable[[torch.Tensor, int, int], torch.Tensor]
SIZES = (7, 1, 4)  # targets of the micro-batches of one window
TOLERANCE = 1e-4


@exercise(
    "What reaches each gradient is your result, divided once more by the framework. Write "
    "down what should be left after this division.",
    "The gradient of the full batch belongs to the sum over all targets of the window, over "
    "their number.",
    "Two numbers enter. One comes from the loss of the window. The other one undoes what the "
    "framework does.",
)
def loss_to_hand_over(loss: Loss | None) -> str | None:
    """Check what a loop hands to a `backward` that divides by the micro-batches of a window.

    `loss(loss_sum, n_targets, n_micro_batches)` gets the sum over one micro-batch, the number of
    targets in the whole window, and how many micro-batches the window has. It returns a scalar.
    """
    expected = _gradient(lambda total, n, m: total / n * m)
    given = _gradient(loss)
    if given is None:
        return "the result has no graph: return a tensor that was computed from loss_sum."
    if _near(given, expected):
        return None
    n = len(SIZES)
    if _near(given, expected / n):
        return (
            f"with {n} micro-batches the gradient is {n} times too small: the framework divides "
            "by their number, and you have divided already."
        )
    if _near(given, expected * sum(SIZES)):
        return "the gradient grows with the number of targets: nothing divides by it."
    if _near(given, expected * sum(SIZES) / n):
        return "the gradient is that of a sum over targets: only the framework divides."
    if _near(given, expected * n):
        return "the number of micro-batches enters twice."
    return "the gradient of the window is not that of the full batch."


def _near(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool((a - b).norm() < TOLERANCE * b.norm())


def _gradient(loss: Loss) -> torch.Tensor | None:
    """Return the gradient that a window of unequal micro-batches leaves, divided as a framework
    does; None if the loss has no graph.
    """
    x = torch.linspace(-1, 2, sum(SIZES) * 3).sin().view(-1, 3)  # (targets, 3)
    weight = torch.ones(3, requires_grad=True)
    for rows in x.split(SIZES):
        handed_over = loss((rows @ weight).square().sum(), len(x), len(SIZES))
        if not isinstance(handed_over, torch.Tensor) or not handed_over.requires_grad:
            return None
        (handed_over / len(SIZES)).backward()
    return weight.grad
