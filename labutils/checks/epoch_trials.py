"""Five judges of an epoch with accumulation: which of them does a reader's loop fail?"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from labutils.checks.toy import Rows, clipped, make_toy, toy_with
from labutils.checks.windows import (
    NO_CLIPPING,
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

JUDGES = ("step count", "equal lengths", "unequal lengths", "clipping", "logged losses")
Epoch = Callable[[nn.Module, list[Rows], torch.optim.Optimizer, int, float], object]
LEARNING_RATE, GRAD_ACCUM_STEPS = 0.1, 3
EQUAL_ROWS = (4,) * len(WINDOW_ROWS)  # seven micro-batches: windows of three, three and one
TOLERANCE = 1e-3


def judge_epoch(epoch: Epoch) -> dict[str, str | None]:
    """Return {judge: what it finds wrong, None if nothing} for `epoch`.

    Only `unequal lengths` sees micro-batches that differ in their number of rows. If the steps are
    not those of the windows, the other judges have nothing to compare and are left out.
    """
    losses, steps = _run(epoch, EQUAL_ROWS)
    _, unequal_steps = _run(epoch, WINDOW_ROWS)
    equal, unequal = _windows(EQUAL_ROWS), _windows(WINDOW_ROWS)
    ends = _wrong_ends(steps, EQUAL_ROWS) or _wrong_ends(unequal_steps, WINDOW_ROWS)
    if ends:
        return {"step count": ends}
    return {
        "step count": None,
        "equal lengths": _wrong_steps(steps, equal),
        "unequal lengths": _wrong_steps(unequal_steps, unequal),
        "clipping": _wrong_clipping(epoch, equal),
        "logged losses": _wrong_losses(losses, steps, equal),
    }


def _windows(rows: Sequence[int]) -> list[list[Rows]]:
    batches = make_micro_batches(rows)
    starts = range(0, len(batches), GRAD_ACCUM_STEPS)
    return [batches[start : start + GRAD_ACCUM_STEPS] for start in starts]


def _run(epoch: Epoch, rows: Sequence[int]) -> tuple[object, list[Step]]:
    """Run one epoch without clipping; return what it returns, and its optimizer steps."""
    toy = make_toy(LEARNING_RATE)
    watch = Watch(toy)
    batches = make_micro_batches(rows)
    losses = epoch(toy.model, batches, toy.optimizer, GRAD_ACCUM_STEPS, NO_CLIPPING)
    return losses, watch.steps


def _wrong_ends(steps: Sequence[Step], rows: Sequence[int]) -> str | None:
    """Compare the rows seen at each optimizer step with those at the windows' ends."""
    seen = [step.rows_seen for step in steps]
    expected = [sum(rows[:3]), sum(rows[:6]), sum(rows)]
    if seen == expected:
        return None
    if not seen:
        return "the optimizer never stepped."
    if len(seen) > len(expected):
        return f"the optimizer stepped {len(seen)} times; {len(expected)} windows are there."
    if seen[0] == rows[0]:
        return (
            f"the first step came after one micro-batch, not after {GRAD_ACCUM_STEPS}: counting "
            "starts at 0."
        )
    if seen == expected[:-1]:
        return "the last, shorter window never reached the weights."
    return "the optimizer steps at the wrong micro-batches."


def _wrong_steps(steps: Sequence[Step], windows: Sequence[list[Rows]]) -> str | None:
    """Compare each step with the gradient of its window."""
    for i, (step, window) in enumerate(zip(steps, windows, strict=True)):
        candidates = candidate_gradients(step.before, window, GRAD_ACCUM_STEPS)
        moved = (step.before - step.after) / LEARNING_RATE
        if nearest(moved, {RIGHT: candidates.pop(RIGHT)}, TOLERANCE) == RIGHT:
            continue  # asked alone: at equal lengths a mean of means is the right gradient, too
        found = nearest(moved, candidates, TOLERANCE)
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
        return f"it returns no list with one loss per optimizer step: {len(windows)} of them."
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
        return "they are those of each window's last micro-batch only."
    return "they are not the means over all rows of each window."


def _wrong_clipping(epoch: Epoch, windows: list[list[Rows]]) -> str | None:
    """Check two epochs in a row, with clipping."""
    toy = make_toy(LEARNING_RATE)
    watch = Watch(toy)
    max_norm = 0.3 * window_gradient(toy.weights(), windows[0]).norm().item()
    for _ in range(2):
        batches = make_micro_batches(EQUAL_ROWS)
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
        return f"{which}: {found}"
    return None
