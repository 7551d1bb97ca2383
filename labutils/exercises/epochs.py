"""Five judges of an epoch with accumulation: which of them does a reader's loop fail?"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from labutils.exercises.steps import (
    NO_CLIPPING,
    WINDOW_ROWS,
    Rows,
    Toy,
    Update,
    clipped,
    clipped_each_time,
    diagnose,
    make_batches,
    mean_gradient,
    mean_loss,
    wrong_sums,
)

JUDGES = ("step count", "equal lengths", "unequal lengths", "clipping", "logged losses")
Epoch = Callable[[nn.Module, list[Rows], torch.optim.Optimizer, int, float], object]
GRAD_ACCUM_STEPS = 3
EQUAL_ROWS = (4,) * len(WINDOW_ROWS)  # seven micro-batches: windows of three, three and one
CLIPPED_EACH_TIME = (
    "clipped after every micro-batch: parts of the window are cut before they are added."
)

OTHERWISE = (
    "not the gradient of the mean over all rows of the window. Were older gradients cleared?"
)


def judge_epoch(epoch: Epoch) -> dict[str, str | None]:
    """Return {judge: what it finds wrong, None if nothing} for `epoch`.

    Only `unequal lengths` sees micro-batches that differ in their number of rows. If the steps are
    not those of the windows, the other judges have nothing to compare and are left out.
    """
    for sizes in (EQUAL_ROWS, WINDOW_ROWS):
        _, updates = _run(epoch, sizes)
        if problem := _wrong_ends(updates, sizes):
            return {"step count": problem}
    max_norm = 0.3 * mean_gradient(Toy().weights(), _windows(EQUAL_ROWS)[0]).norm().item()
    return {
        "step count": None,
        "equal lengths": _wrong_updates(epoch, EQUAL_ROWS),
        "unequal lengths": _wrong_updates(epoch, WINDOW_ROWS),
        "clipping": _wrong_updates(epoch, EQUAL_ROWS, max_norm, times=2),
        "logged losses": _wrong_losses(epoch),
    }


def _windows(sizes: Sequence[int]) -> list[list[Rows]]:
    batches = make_batches(sizes)
    starts = range(0, len(batches), GRAD_ACCUM_STEPS)
    return [batches[start : start + GRAD_ACCUM_STEPS] for start in starts]


def _run(
    epoch: Epoch, sizes: Sequence[int], max_norm: float = NO_CLIPPING, times: int = 1
) -> tuple[object, list[Update]]:
    """Run an epoch on a new toy; return what it returns at last, and the optimizer's steps."""
    toy = Toy()
    for _ in range(times):
        losses = epoch(toy.model, make_batches(sizes), toy.optimizer, GRAD_ACCUM_STEPS, max_norm)
    return losses, toy.updates


def _wrong_ends(updates: Sequence[Update], sizes: Sequence[int]) -> str | None:
    """Compare the rows seen at each optimizer step with those at the windows' ends."""
    seen = [update.rows_seen for update in updates]
    expected = [sum(sizes[:3]), sum(sizes[:6]), sum(sizes)]
    if seen == expected:
        return None
    if not seen:
        return "the optimizer never stepped."
    if len(seen) > len(expected):
        return f"the optimizer stepped {len(seen)} times; {len(expected)} windows are there."
    if seen[0] == sizes[0]:
        return (
            f"the first step came after one micro-batch, not after {GRAD_ACCUM_STEPS}: counting "
            "starts at 0."
        )
    if seen == expected[:-1]:
        return "the last, shorter window never reached the weights."
    return "the optimizer steps at the wrong micro-batches."


def _wrong_updates(
    epoch: Epoch, sizes: Sequence[int], max_norm: float = NO_CLIPPING, times: int = 1
) -> str | None:
    """Compare each step of `times` epochs with the clipped gradient of its window."""
    _, updates = _run(epoch, sizes, max_norm, times)
    for i, (update, window) in enumerate(zip(updates, times * _windows(sizes), strict=True)):
        right = mean_gradient(update.weights, window)
        # without clipping the first two are right, and so nobody's misconception
        misconceptions = {
            "the gradients are not clipped.": right,
            CLIPPED_EACH_TIME: clipped_each_time(update.weights, window, max_norm),
            **wrong_sums(update.weights, window, GRAD_ACCUM_STEPS),
        }
        problem = diagnose(update.gradient, clipped(right, max_norm), misconceptions, OTHERWISE)
        if problem:
            epochs_before, step = divmod(i, len(updates) // times)
            return f"optimizer step {step + 1} of epoch {epochs_before + 1}: {problem}"
    return None


def _wrong_losses(epoch: Epoch) -> str | None:
    """Compare the reported losses with the means over rows, at the weights before each step."""
    losses, updates = _run(epoch, EQUAL_ROWS)
    if not isinstance(losses, (list, tuple, torch.Tensor)) or len(losses) != len(updates):
        return f"it returns no list with one loss per optimizer step: {len(updates)} of them."
    right, of_last = [], []
    for update, window in zip(updates, _windows(EQUAL_ROWS), strict=True):
        right.append(mean_loss(update.weights, window))
        of_last.append(mean_loss(update.weights, window[-1:]))
    otherwise = "they are not the means over all rows of each window."
    reported = torch.tensor([float(loss) for loss in losses])
    of_last_only = {"they are those of each window's last micro-batch only.": torch.stack(of_last)}
    return diagnose(reported, torch.stack(right), of_last_only, otherwise)
