"""Windows of unequal micro-batches: the right gradient, and the gradient of each misconception."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from labutils.checks.toy import Rows, Toy, clipped, gradient

WINDOW_ROWS = (2, 12, 1, 6, 9, 4, 3)  # unequal, so that a mean of means differs from the mean
NO_CLIPPING = 1e9  # a max_grad_norm that no gradient reaches
RIGHT = ""  # the key of the right gradient, beside the misconceptions
NOT_ACCUMULATED = (
    "the window went through the model at once: right, but it would need the memory of the full "
    "batch."
)


def make_micro_batches(sizes: Sequence[int]) -> list[Rows]:
    """Return micro-batches of random rows, the same each time."""
    generator = torch.Generator().manual_seed(1)
    micro_batches = []
    for n_rows in sizes:
        x = torch.randn(n_rows, 4, generator=generator)
        y = torch.randn(n_rows, 1, generator=generator)
        micro_batches.append((x, y))
    return micro_batches


def window_gradient(weights: torch.Tensor, window: Sequence[Rows]) -> torch.Tensor:
    """Return the gradient of the mean over all rows of a window."""
    return sum(_row_sums(weights, window)) / sum(_rows(window))


def candidate_gradients(
    weights: torch.Tensor, window: Sequence[Rows], grad_accum_steps: int
) -> dict[str, torch.Tensor]:
    """Return {misconception: the gradient it gives}, and the right one under `RIGHT`."""
    sums = _row_sums(weights, window)
    rows = _rows(window)
    means = [total / n for total, n in zip(sums, rows, strict=True)]
    mean_of_means = (
        "a mean of means: a row in a small micro-batch weighs more than one in a large "
        f"(rows per micro-batch: {rows})."
    )
    return {
        RIGHT: sum(sums) / sum(rows),
        "the micro-batches' means were added: the gradient grows with their number.": sum(means),
        mean_of_means: sum(means) / len(means),
        "a shorter last window was divided as if it were full.": sum(means) / grad_accum_steps,
        "sums were added and never divided.": sum(sums),
        "only the last micro-batch arrived: what the others left in .grad was shrunk or cleared.": (
            sums[-1] / sum(rows)
        ),
        "only the last micro-batch arrived, with its own mean.": means[-1],
    }


def clipped_each_time(
    weights: torch.Tensor, window: Sequence[Rows], max_norm: float
) -> torch.Tensor:
    """Return the window's gradient if it is clipped after every micro-batch."""
    total = torch.zeros_like(weights)
    n_rows = sum(_rows(window))
    for row_sum in _row_sums(weights, window):
        total = clipped(total + row_sum / n_rows, max_norm)
    return total


def _row_sums(weights: torch.Tensor, window: Sequence[Rows]) -> list[torch.Tensor]:
    """Return, for each micro-batch, the sum of its rows' gradients."""
    return [gradient(weights, x, y) * len(y) for x, y in window]


def _rows(window: Sequence[Rows]) -> list[int]:
    return [len(y) for _, y in window]


def nearest(
    found: torch.Tensor, candidates: dict[str, torch.Tensor], tolerance: float
) -> str | None:
    """Return the key of the candidate nearest to `found`.

    None if even that one is further away than the relative tolerance.
    """
    distances = {}
    for key, vector in candidates.items():
        distances[key] = ((found - vector).norm() / vector.norm()).item()
    key = min(distances, key=distances.get)
    return key if distances[key] < tolerance else None


@dataclass(frozen=True)
class Step:
    """One optimizer step: the weights before and after, and the rows seen until then."""

    before: torch.Tensor
    after: torch.Tensor
    rows_seen: int


class Watch:
    """Note each optimizer step of a network, and what goes forward through it."""

    def __init__(self, toy: Toy) -> None:
        self.steps: list[Step] = []
        self.dtypes: list[torch.dtype] = []
        self.rows = self.most_rows = 0
        self._toy = toy
        self._before = toy.weights()
        toy.model[0].register_forward_hook(self._forward)
        toy.optimizer.register_step_pre_hook(self._before_step)
        toy.optimizer.register_step_post_hook(self._after_step)

    def _forward(self, _module: nn.Module, inputs: tuple, out: torch.Tensor) -> None:
        self.rows += len(inputs[0])
        self.most_rows = max(self.most_rows, len(inputs[0]))
        self.dtypes.append(out.dtype)

    def _before_step(self, *_: object) -> None:
        self._before = self._toy.weights()

    def _after_step(self, *_: object) -> None:
        self.steps.append(Step(self._before, self._toy.weights(), self.rows))
