"""Try a reader's epoch: seven unequal micro-batches in windows of three."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from labutils.checks.toy import Rows, clipped, make_toy, toy_with
from labutils.checks.windows import (
    NO_CLIPPING,
    NOT_ACCUMULATED,
    RIGHT,
    WINDOW_ROWS,
    Step,
    Watch,
    candidate_gradients,
    clipped_each_time,
    make_micro_batches,
    nearest,
    window_gradient,
)

Epoch = Callable[[nn.Module, list[Rows], torch.optim.Optimizer, int, float], object]
LEARNING_RATE, GRAD_ACCUM_STEPS = 0.1, 3
TOLERANCE = 1e-3


def try_epoch(epoch: Epoch) -> str | None:
    """Return what is wrong with an epoch; None if it is right."""
    batches = make_micro_batches(WINDOW_ROWS)
    starts = range(0, len(batches), GRAD_ACCUM_STEPS)
    windows = [batches[start : start + GRAD_ACCUM_STEPS] for start in starts]
    return _unclipped_epoch(epoch, batches, windows) or _clipped_epochs(epoch, batches, windows)


def _unclipped_epoch(epoch: Epoch, batches: list[Rows], windows: list[list[Rows]]) -> str | None:
    toy = make_toy(LEARNING_RATE)
    watch = Watch(toy)
    losses = epoch(toy.model, batches, toy.optimizer, GRAD_ACCUM_STEPS, NO_CLIPPING)
    problem = (
        _wrong_ends(watch.steps)
        or _wrong_steps(watch.steps, windows)
        or _wrong_losses(losses, watch.steps, windows)
    )
    if problem is None and watch.most_rows > max(WINDOW_ROWS):
        return NOT_ACCUMULATED
    return problem


def _wrong_ends(steps: Sequence[Step]) -> str | None:
    """Compare the rows seen at each optimizer step with those at the windows' ends."""
    seen = [step.rows_seen for step in steps]
    expected = [sum(WINDOW_ROWS[:3]), sum(WINDOW_ROWS[:6]), sum(WINDOW_ROWS)]
    if seen == expected:
        return None
    if not seen:
        return "the optimizer never stepped."
    if len(seen) > len(expected):
        return f"the optimizer stepped {len(seen)} times; {len(expected)} windows are there."
    if seen[0] == WINDOW_ROWS[0]:
        return (
            f"the first step came after one micro-batch, not after {GRAD_ACCUM_STEPS}: counting "
            "starts at 0."
        )
    if seen == expected[:-1]:
        return (
            "the last, shorter window never reached the weights. Its gradients would leak into "
            "the next epoch."
        )
    return "the optimizer steps at the wrong micro-batches."


def _wrong_steps(steps: Sequence[Step], windows: Sequence[list[Rows]]) -> str | None:
    """Compare each step with the gradient of its window."""
    for i, (step, window) in enumerate(zip(steps, windows, strict=True)):
        candidates = candidate_gradients(step.before, window, GRAD_ACCUM_STEPS)
        found = nearest((step.before - step.after) / LEARNING_RATE, candidates, TOLERANCE)
        if found == RIGHT:
            continue
        if found is None and i == 0:
            found = "not the gradient of the mean over all rows."
        elif found is None:
            found = "it also contains gradients of an earlier window: were they cleared?"
        return f"optimizer step {i + 1}: {found}"
    return None


def _wrong_losses(
    losses: object, steps: Sequence[Step], windows: Sequence[list[Rows]]
) -> str | None:
    """Compare the reported losses with the means over rows, at the weights before each step."""
    if not isinstance(losses, (list, tuple, torch.Tensor)) or len(losses) != len(windows):
        return f"return a list with one loss per optimizer step: {len(windows)} of them."
    right, last = [], []
    for step, window in zip(steps, windows, strict=True):
        model = toy_with(step.before).model
        x, y = (torch.cat(parts) for parts in zip(*window, strict=True))
        right.append(nn.functional.mse_loss(model(x), y).item())
        last_x, last_y = window[-1]
        last.append(nn.functional.mse_loss(model(last_x), last_y).item())
    given = torch.tensor([float(loss) for loss in losses])
    if torch.allclose(given, torch.tensor(right), rtol=1e-3):
        return None
    if torch.allclose(given, torch.tensor(last), rtol=1e-3):
        return "the steps are right; the losses are those of each window's last micro-batch only."
    return "the steps are right; the losses are not the means over all rows of each window."


def _clipped_epochs(epoch: Epoch, batches: list[Rows], windows: list[list[Rows]]) -> str | None:
    """Check two epochs in a row, with clipping."""
    toy = make_toy(LEARNING_RATE)
    watch = Watch(toy)
    max_norm = 0.3 * window_gradient(toy.weights(), windows[0]).norm().item()
    for _ in range(2):
        epoch(toy.model, batches, toy.optimizer, GRAD_ACCUM_STEPS, max_norm)
    for i, (step, window) in enumerate(zip(watch.steps, [*windows, *windows], strict=True)):
        right = window_gradient(step.before, window)
        candidates = {
            RIGHT: clipped(right, max_norm),
            "the gradients are not clipped.": right,
            "clipped after every micro-batch: parts of the window are cut before they are added.": (
                clipped_each_time(step.before, window, max_norm)
            ),
        }
        found = nearest((step.before - step.after) / LEARNING_RATE, candidates, TOLERANCE)
        if found == RIGHT:
            continue
        if found is None and i == len(windows):
            found = "not the clipped window. Were the gradients of the last window cleared?"
        elif found is None:
            found = "not that of the clipped window."
        which = f"optimizer step {i % len(windows) + 1} of epoch {i // len(windows) + 1}"
        return f"{which}, with clipping: {found}"
    return None
