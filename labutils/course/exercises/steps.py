"""Runs of a reader's training step, or epoch, on a toy; and which mistake gives which gradient.

A step gets a window of micro-batches (x, y). A step on one batch is a window of one, an epoch is
several windows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from numpy.linalg import norm
from torch import nn

from labutils.course.exercises.core import Problem

Window = list[tuple[torch.Tensor, torch.Tensor]]  # micro-batches: x (rows, 4) and y (rows, 1)
Step = Callable[..., object]  # (model, window, optimizer, scaler, max_grad_norm)
RATE, LOSS_SCALE, GRAD_ACCUM_STEPS = 0.1, 256.0, 3
NO_CLIPPING, LOW_LIMIT = 1e9, 0.123  # a max_grad_norm that no gradient of a toy reaches, or each
TOLERANCE = 0.03  # relative; FP16 products are off by some 0.001


class Toy:
    """A linear layer 4 → 1, SGD and a gradient scaler; it notes what they do."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(4, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=RATE)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=LOSS_SCALE)
        self.passes = []  # (number, rows, dtype): where one goes forward, and where back
        self.weights = []  # (5,): first, and after each optimizer step
        self.n_passes = []  # forward passes until then
        self.is_autocast_in_backward = self.is_changed_outside = False
        self._note_step()
        self.model.register_forward_hook(self._note_forward)
        self.optimizer.register_step_pre_hook(self._compare)
        self.optimizer.register_step_post_hook(self._note_step)

    def _note_forward(self, _, __, output):
        # a pass that autograd does not record trains nothing: dummy passes do not count
        if output.requires_grad:
            self.passes.append((len(self.passes), output.numel(), output.dtype))
            output.register_hook(partial(self._note_backward, self.passes[-1]))

    def _note_backward(self, forward, _):
        self.passes.append(forward)
        self.is_autocast_in_backward |= torch.is_autocast_enabled("cpu")

    def _vector(self):
        return nn.utils.parameters_to_vector(self.model.parameters()).detach()

    # Weights that are stored in FP16 beside the step show here: they change between two steps.
    def _compare(self, *_):
        self.is_changed_outside |= not torch.equal(self._vector(), self.weights[-1])

    def _note_step(self, *_: object) -> None:
        self.weights.append(self._vector())
        self.n_passes.append(len(set(self.passes)))  # a set: who goes backward is noted twice

    def take(self, step: Step, window: Window, max_grad_norm: float = NO_CLIPPING) -> Toy:
        self.result = step(self.model, window, self.optimizer, self.scaler, max_grad_norm)
        self._compare()
        return self


def make_batches(*sizes: int) -> Window:
    """Return micro-batches of random rows, the same each time.

    By its seed a window without any one of them has a gradient that is off by a quarter or more.
    """
    torch.manual_seed(29)
    return [(torch.randn(n_rows, 4), torch.randn(n_rows, 1)) for n_rows in sizes]


# ---- the right gradient, and those of the mistakes


def micro_losses(weights: torch.Tensor, window: Window) -> torch.Tensor:
    """Return the mean squared error of each micro-batch, (n,), for a toy with these weights."""
    slope, offset = weights.split((4, 1))
    return torch.stack([(x @ slope[:, None] + offset - y).square().mean() for x, y in window])


def clipped(vector: torch.Tensor, max_norm: float) -> torch.Tensor:
    """Return the vector, shortened to `max_norm` if it is longer."""
    return vector * min(1.0, max_norm / vector.norm().item())


def candidates(
    weights: torch.Tensor, window: Window, max_norm: float, leftover: torch.Tensor
) -> dict[Problem, torch.Tensor]:
    """Return {mistake: the gradient with which the optimizer then steps}; None has the right one.

    `leftover` is the gradient of the step before.
    """
    rows = torch.tensor([[len(y)] for _, y in window])
    means = torch.func.jacrev(micro_losses)(weights, window)  # (n, 5): of each micro-batch
    parts = means * rows / rows.sum()
    whole, each_time, while_scaled = parts.sum(0), 0 * weights, 0 * weights
    for part in parts:
        each_time = clipped(each_time + part, max_norm)
        while_scaled = clipped(while_scaled + part, max_norm / LOSS_SCALE)
    # The first that fits is told. The right one leads: at equal lengths a mistake may equal it.
    return {
        None: clipped(whole, max_norm),
        "the gradients are not clipped.": whole,
        "the gradients were cleared before the step.": torch.zeros_like(whole),
        "clipped after every micro-batch: parts of the window are cut before they are added.": (
            each_time
        ),
        "scaled gradients were compared with max_grad_norm, and the scale taken out afterwards.": (
            clipped(whole, max_norm / LOSS_SCALE)
        ),
        "older gradients were still there: they were never cleared.": (
            clipped(leftover + whole, max_norm)
        ),
        "the micro-batches' means were added: the gradient grows with their number.": means.sum(0),
        "a mean of means: a row of a small micro-batch weighs more than one of a large one "
        f"(rows per micro-batch: {rows.flatten().tolist()}).": means.mean(0),
        "a shorter last window was divided as if it were full.": means.sum(0) / GRAD_ACCUM_STEPS,
        "the clipping still stands in the loop, where gradients carry the loss scale. It is taken "
        f"out afterwards, and max_grad_norm / {LOSS_SCALE:g}, the scale, is left.": while_scaled,
        "sums were added and never divided.": whole * rows.sum(),
        "each sum was divided by the number of micro-batches: by how many rows should it be?": (
            whole * rows.sum() / len(rows)
        ),
        "only the last micro-batch arrived: what the others left in .grad was shrunk or cleared.": (
            parts[-1]
        ),
        "only the last micro-batch arrived, with its own mean.": means[-1],
        "the step is as many times too long as the loss scale is large: is it ever taken out?": (
            whole * LOSS_SCALE
        ),
        "the step is far too short: does `update` stand before the step?": whole / LOSS_SCALE,
        "the step is far too short: was the scale taken out more than once?": (
            parts[-1] / LOSS_SCALE
        ),
    }


def recognised(
    answer: Any, known: Mapping[Problem, Any], otherwise: str, tolerance: float
) -> Problem:
    """Return the misconception that gives this answer, a number or a vector; None if it is right.

    `known` is {misconception, or None: the answer it gives}; the tolerance is relative.
    """
    for misconception, value in known.items():
        if norm(answer - value) <= tolerance * norm(value):
            return misconception
    return otherwise


def wrong_step(toy: Toy, windows: list[Window], max_norm: float = NO_CLIPPING) -> Problem:
    """Return what is wrong with the first optimizer step that is not its window's."""
    n_steps = len(toy.weights) - 1
    if n_steps != len(windows):
        return f"the optimizer stepped {n_steps} times; the number of windows is {len(windows)}."
    gradient = torch.zeros(5)
    for number, window in enumerate(windows):
        before, after = toy.weights[number : number + 2]
        known = candidates(before, window, max_norm, leftover=gradient)
        gradient = (before - after) / RATE
        ratio = gradient.norm() / known[None].norm()
        otherwise = f"not the mean over all rows, clipped as a whole: {ratio:.2g} times as long."
        if problem := recognised(gradient, known, otherwise, TOLERANCE):
            return f"optimizer step {number + 1}: {problem}"
    return None


# ---- an FP16 step


def wrong_passes(toy: Toy, window: Window) -> Problem:
    """Return what is wrong with the passes through the model: their rows, dtype, order."""
    passes = [each for each in toy.passes if toy.passes.count(each) > 1]  # they went backward
    if not passes:
        return "the function never called the model, or nothing went backward from its output."
    most = max(len(y) for _, y in window)
    for _, rows, dtype in passes:
        if rows > most:
            return (
                f"{rows} rows went through the model at once: right, but it would need the memory "
                "of the full batch."
            )
        if dtype != torch.float16:
            return f"the layer gave {dtype}: is autocast on each time, and for which dtype?"
    if passes != sorted(passes):
        return (
            "a micro-batch goes forward before the last one went backward: right, but the graphs "
            "of both are alive then, with the memory of the full batch. Call backward each time."
        )
    if toy.is_autocast_in_backward:
        return (
            "backward runs under autocast. End the `with` block after the loss: in backward each "
            "operation has the dtype of its forward pass anyway."
        )
    return None


def first_problem(step: Step, *sizes: int) -> Problem:
    """Return what is wrong with a step over micro-batches of these numbers of rows."""
    window = make_batches(*sizes)
    toy = Toy().take(step, window)
    if problem := wrong_passes(toy, window):
        return problem
    if len(toy.weights) != 2:
        why = "" if len(toy.weights) > 1 else " Nothing called it, or the scaler saw an overflow."
        return f"the optimizer stepped {len(toy.weights) - 1} times, not once.{why}"
    if toy.is_changed_outside:
        return (
            "the stored weights also change outside the optimizer's step. They stay in float32: "
            "autocast makes the 16-bit copies."
        )
    clipped_toy = Toy().take(step, window, LOW_LIMIT)
    problem = wrong_step(toy, [window]) or wrong_step(clipped_toy, [window], LOW_LIMIT)
    if problem:
        return problem
    (x, y), *others = window
    overflow = [(x, 1e6 * y), *others]  # 1e6 times the loss scale is far beyond FP16's 65,504
    clean_scale, toy = toy.scaler.get_scale(), Toy().take(step, overflow)
    scale = toy.scaler.get_scale()
    if len(toy.weights) != 1:
        return (
            "a batch overflowed, and the weights changed. The whole step must be skipped: the "
            "optimizer must step through the scaler."
        )
    if (clean_scale, scale) != (LOSS_SCALE, LOSS_SCALE / 2):
        return (
            f"after a clean step the scale went from {LOSS_SCALE:g} to {clean_scale:g}, and after "
            f"an overflow to {scale:g}. It should stay, and be halved: who updates it, and is it "
            "updated once?"
        )
    leftovers = (
        (window, "the second step also contains the first one's gradients: they were never"),
        (
            overflow,
            "after an overflow inf stays in .grad, so each later step is skipped: it is never",
        ),
    )
    for first, why in leftovers:
        toy, cleared_toy = Toy().take(step, first), Toy().take(step, first)
        cleared_toy.model.zero_grad()
        weights, cleared_weights = (each.take(step, window).weights for each in (toy, cleared_toy))
        if not torch.equal(weights[-1], cleared_weights[-1]):
            return f"{why} cleared."
    return None


def on_one_batch(step: Callable[..., object]) -> Step:
    """Return a step on one batch, `step(model, x, y, …)`, as a step over a window of one."""
    return lambda model, window, *others: step(model, *window[0], *others)


# ---- an epoch

STEPS = {  # after how many micro-batches the optimizer stepped; windows end after 3, 6 and 7
    (): "the optimizer never stepped.",
    (3, 6): "the last, shorter window never reached the weights.",
    (1, 4, 7): "the first step came after one micro-batch, not after 3: counting starts at 0.",
}


def judge_epoch(epoch: Callable) -> dict[str, Problem]:
    """Return {judge: what it finds wrong, None if nothing} for an epoch: see `break_one`.

    Only `unequal lengths` sees micro-batches that differ in their number of rows. If the steps are
    not those of the windows, the other judges have nothing to compare and are left out.
    """
    equal, unequal = make_batches(*7 * [4]), make_batches(2, 12, 1, 6, 9, 4, 3)
    windows = windows_of(equal)

    def step(model: nn.Module, batches: Window, optimizer: Any, _: Any, max_norm: float) -> object:
        return epoch(model, batches, optimizer, GRAD_ACCUM_STEPS, max_norm)

    toy = Toy().take(step, equal)
    steps = tuple(toy.n_passes[1:])
    if steps != (3, 6, 7):
        otherwise = f"the optimizer stepped {len(steps)} times, after micro-batches {steps}."
        return {"step count": STEPS.get(steps, f"{otherwise} The windows end after 3, 6 and 7.")}
    clipped_toy = Toy().take(step, equal, LOW_LIMIT).take(step, equal, LOW_LIMIT)
    return {
        "step count": None,
        "equal lengths": wrong_step(toy, windows),
        "unequal lengths": wrong_step(Toy().take(step, unequal), windows_of(unequal)),
        "clipping": wrong_step(clipped_toy, 2 * windows, LOW_LIMIT),
        "logged losses": wrong_losses(toy, windows),
    }


def windows_of(batches: Window) -> list[Window]:
    return [batches[:3], batches[3:6], batches[6:]]


def wrong_losses(toy: Toy, windows: list[Window]) -> Problem:
    """Compare the reported losses with the means over rows, at the weights before each step."""
    losses = toy.result
    if not hasattr(losses, "__len__") or len(losses) != len(windows):
        return f"it returns no list with one loss per optimizer step: {len(windows)} of them."
    steps = zip(toy.weights, windows, strict=False)  # without the weights after the last step
    right = [micro_losses(weights, window) for weights, window in steps]
    known = {
        None: torch.stack([of_window.mean() for of_window in right]),
        "they are those of each window's last micro-batch only.": (
            torch.stack([of_window[-1] for of_window in right])
        ),
    }
    otherwise = "they are not the means over all rows of each window."
    return recognised(torch.tensor([float(loss) for loss in losses]), known, otherwise, TOLERANCE)
