"""Exercises of notebook 04: nvidia-smi, which line leaks, a leak to repair, the largest batch."""

from __future__ import annotations

from labutils.checks.core import exercise
from labutils.checks.leak_trials import Training, try_training


@exercise(
    hints=(
        "Which of the numbers does the driver know of? It has never heard of tensors.",
        "The driver has handed out segments, and the process itself took something before its "
        "first tensor.",
        "1 GiB is 1024 MiB.",
    )
)
def nvidia_smi(
    allocated_gib: float, reserved_gib: float, context_gib: float, answer: float | None
) -> str | None:
    """Check what nvidia-smi shows for a process, in MiB."""
    right_gib = reserved_gib + context_gib
    misconceptions = {
        allocated_gib: "those are the tensors alone; the driver does not see tensors.",
        reserved_gib: "the context is missing: it is the process's as well.",
        allocated_gib + context_gib: (
            "cached segments belong to the process until it returns them."
        ),
        allocated_gib + reserved_gib + context_gib: (
            "allocated bytes lie within the reserved ones."
        ),
        allocated_gib + reserved_gib: (
            "allocated bytes lie within the reserved ones, and the context is missing."
        ),
    }
    if abs(answer - right_gib * 1024) < 1:
        return None
    for gib, problem in misconceptions.items():
        if abs(answer - gib * 1024) < 1:
            return problem
    if abs(answer - right_gib * 1000) < 1 or abs(answer - right_gib) < 0.01:
        return "the right bytes, in another unit: 1 GiB is 1024 MiB."
    if abs(answer - right_gib * 2**30 / 1e6) < 1:
        return "those are MB of a million bytes; nvidia-smi counts in MiB."
    return "which of the three numbers does the driver know of?"


@exercise(
    hints=(
        "Whose results grow in number from step to step? Two lines' do.",
        "`augment` has the highest peak, but what of it is alive at the end?",
        "Backward frees what a graph keeps. Which function builds a graph through which nothing "
        "ever goes backward?",
    )
)
def leak(answer: str | None) -> str | None:
    """Check which function of notebook 04's little program keeps a graph alive."""
    problems = {
        "running_mean": None,
        "forward": (
            "its results are alive, true; but training alone would let go of them. Who still "
            "needs them?"
        ),
        "augment": (
            "it has the highest peak, and nothing of it is alive at the end: a peak is no leak."
        ),
    }
    name = str(answer).strip("() ")
    return problems.get(name, "the answer is the name of one of the three functions.")


@exercise(
    hints=(
        "List all that is still referenced when a step is over: three lists. What do they hold?",
        "A tensor with a graph keeps what its graph keeps. Which of the three losses and outputs "
        "never goes backward?",
        "A Python number keeps nothing. Where can a number take the place of a tensor? And who "
        "takes the hook away?",
    )
)
def repair(training: Training | None) -> str | None:
    """Check that a training loop no longer leaks.

    The function is `training(model, batches, held_out, optimizer)`, with batches of (x, y). It
    returns the loss of each step, the held-out loss after each step, and the largest output of
    `model[0]`. It is run on a small network. The bytes alive after each optimizer step must not
    rise, and the results must be those of the leaking loop.
    """
    return try_training(training)


@exercise(
    hints=(
        "Draw both points. Does the line through them go through zero?",
        "How much does one more sequence cost, and what is left at zero sequences?",
        "A batch is a whole number, and it must not exceed the budget.",
    )
)
def largest_batch(peaks: dict[int, float], budget: float, answer: int | None) -> str | None:
    """Check the largest batch under a budget, on the line through two measured peaks."""
    (small, peak_small), (large, peak_large) = sorted(peaks.items())
    per_sequence = (peak_large - peak_small) / (large - small)
    at_zero = peak_small - small * per_sequence
    right = (budget - at_zero) // per_sequence
    if answer == right:
        return None
    if answer in (budget // (peak_small / small), budget // (peak_large / large)):
        return (
            "that divides the budget by the cost per sequence of one point: as if the line went "
            "through zero."
        )
    if answer == budget // per_sequence:
        return "the slope is right; but part of the budget is gone before the first sequence."
    if answer != int(answer):
        return "half a sequence cannot be trained: the answer is a whole number."
    needed = at_zero + answer * per_sequence
    if needed > budget:
        return f"{answer} sequences need {needed:g}: that is over the budget."
    return f"{answer} sequences need {needed:g}: one more fits."
