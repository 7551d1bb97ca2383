"""Exercise of notebook 01: one FP16 step."""

from __future__ import annotations

from collections.abc import Callable

from labutils.exercises import steps
from labutils.exercises.core import Problem, exercise


@exercise(
    "Four calls belong to the scaler: scale, unscale_, step, update. Which are there, and in "
    "which order?",
    "The norm that clipping compares with max_grad_norm must be that of the true gradients.",
    "What must happen to gradients before the next backward pass adds to them?",
)
def amp_step(step: Callable) -> Problem:
    """Check one FP16 training step: `step(model, x, y, optimizer, scaler, max_grad_norm)`.

    The loss is the mean squared error. The step is run on a linear layer on the CPU: without
    clipping, with it, on data that overflows, and repeatedly.
    """
    return steps.first_problem(steps.on_one_batch(step), 16)
