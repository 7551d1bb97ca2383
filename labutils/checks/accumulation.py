"""Exercises of notebook 02: one FP16 window, an epoch, the memory floor, Adam's beta2."""

from __future__ import annotations

import torch
from torch import nn

from labutils.checks.core import exercise
from labutils.checks.epoch_trials import Epoch, try_epoch
from labutils.checks.window_trials import AmpWindow, try_window


@exercise(
    hints=(
        "Sort the calls in two groups: for every micro-batch, and once, when all micro-batches "
        "have passed.",
        "A sum of squared errors can be divided by any number you like. Which number gives the "
        "mean over all rows?",
        "unscale_ divides all that is in .grad. What is there after the second micro-batch, if "
        "the first was unscaled?",
    )
)
def amp_window(step: AmpWindow | None) -> str | None:
    """Check one FP16 step over a window.

    The function is `step(model, micro_batches, optimizer, scaler, max_grad_norm)`. `micro_batches`
    is a list of (x, y) with unequal numbers of rows. The loss is the mean squared error over all
    rows. The step is run on a small network on the CPU: without clipping, with it, with an
    overflow, and repeatedly.
    """
    return try_window(step)


@exercise(
    hints=(
        "Write down after which micro-batches the optimizer steps, for 7 micro-batches and "
        "windows of 3.",
        "Each row of a window must get the same weight. How many rows are there, and when do you "
        "know it?",
        "Collect a window first, whatever its length, then go through it. The loss to report is "
        "that of the window.",
    )
)
def accumulation_epoch(epoch: Epoch | None) -> str | None:
    """Check an epoch with accumulation, which returns one loss per optimizer step.

    The function is `epoch(model, batches, optimizer, grad_accum_steps, max_grad_norm)`. `batches`
    is a list of (x, y) with unequal numbers of rows. Step and loss are those of the mean squared
    error over all rows of a window. It is run on 7 micro-batches in windows of 3, also with
    clipping.
    """
    return try_epoch(epoch)


@exercise(
    hints=(
        "Accumulation shrinks what grows with the batch. List what does not.",
        "Section 3 shows the categories at the peak. Which of them are alive between two "
        "micro-batches?",
        "Bytes per parameter, times parameters, and a GiB is 2³⁰ bytes.",
    )
)
def floor_gib(n_params: float, answer: float | None) -> str | None:
    """Check the GiB that float32 training with AdamW needs, however small the micro-batch.

    The model has `n_params` parameters.
    """
    if isinstance(answer, bool) or not isinstance(answer, (int, float)) or not 0 < answer < 1e6:
        return "the answer is a number of GiB, greater than 0."
    kept_bytes = _adamw_bytes_per_parameter()
    weights, gradients, *_ = (n_bytes * n_params / 2**30 for n_bytes in kept_bytes)
    right = sum(kept_bytes) * n_params / 2**30

    def near(gib: float) -> bool:
        return abs(answer / gib - 1) < 0.02

    if near(right):
        return None
    if near(right * 2**30 / 1e9):
        return "right in GB (10⁹ bytes); a GiB is 2³⁰ bytes."
    if near(right - gradients):
        return (
            "the gradients are missing. They are what accumulates, so they stay alive between "
            "micro-batches."
        )
    if near(weights) or near(2 * weights):
        return "weights, or weights and gradients, are not all: what does AdamW remember?"
    if answer < right:
        return (
            "too low. Which of weights, gradients and moments would a smaller micro-batch shrink?"
        )
    return (
        "too high: with a micro-batch small enough, what grows with the batch is next to nothing."
    )


def _adamw_bytes_per_parameter() -> list[int]:
    """Return the bytes of a weight, its gradient and its two moments after a real step."""
    layer = nn.Linear(2, 2, bias=False)
    optimizer = torch.optim.AdamW(layer.parameters())
    layer(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    state = optimizer.state[layer.weight]
    kept = (layer.weight, layer.weight.grad, state["exp_avg"], state["exp_avg_sq"])
    return [tensor.element_size() for tensor in kept]


@exercise(
    hints=(
        "What is remembered of a squared gradient after k steps is the decay rate to the power "
        "of k.",
        "After how many steps is half of it left? How many tokens are that before, and how many "
        "after the change?",
        "One step with the larger batch must forget as much as the steps it replaces did together.",
    )
)
def beta2(now: float, factor: float, answer: float | None) -> str | None:
    """Check the decay rate of Adam's second moment that keeps its half-life in tokens.

    The batch becomes `factor` times as large; `now` is the decay rate before.
    """

    def near(value: float) -> bool:
        return abs(answer - value) < 1e-3

    if near(now**factor):
        return None
    if near(now):
        return "unchanged, it forgets per step as before; but a step has more tokens now."
    if near(now ** (1 / factor)) or near(1 - (1 - now) / factor):
        return "that is the other direction: right for a batch that many times smaller."
    if near(1 - (1 - now) * factor):
        return (
            "close: that is the first-order approximation. Several steps in a row multiply their "
            "decay rates."
        )
    if near(now / factor):
        return "a decay rate is not a length: dividing it does not divide the half-life."
    return (
        "compare half-lives: steps until half is forgotten, times tokens per step, before and "
        "after."
    )
