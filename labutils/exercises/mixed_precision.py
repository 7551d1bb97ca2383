"""Exercises of notebook 01: one FP16 step, a scaler's log, a control."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from labutils.exercises import steps
from labutils.exercises.core import Problem, exercise, one_cause

# The runs that the notebook lists.
CONTROL_RUNS = {
    "A": {"products": "FP32", "weights": "FP32", "rate": 3e-5, "seed": 0},
    "B": {"products": "BF16", "weights": "FP32", "rate": 3e-5, "seed": 0},
    "C": {"products": "BF16", "weights": "BF16", "rate": 3e-5, "seed": 0},
    "D": {"products": "BF16", "weights": "BF16", "rate": 2e-3, "seed": 0},
    "E": {"products": "BF16", "weights": "FP32", "rate": 3e-5, "seed": 1},
}


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


@exercise(
    "A scaler that works skips steps now and then. Look at what becomes of the scale in each log.",
    "Each skip halves the scale, five clean steps in a row double it. Where does it end?",
    "If the gradients were finite, some small scale would let them pass.",
)
def scaler_log(logs: Mapping[str, str], answer: Sequence[str]) -> Problem:
    """Check which log shows gradients that no scale makes finite, and which growing gradients.

    In a log each `.` is a clean step, each `x` a skipped one. The answer is two letters.
    """
    if len(set(answer)) != 2 or not set(answer) <= set(logs):
        return f"the answer is two of the letters {', '.join(logs)}, in the order of the questions."
    late_skips = {letter: log[len(log) // 2 :].count("x") for letter, log in logs.items()}
    *healthy, growing, hopeless = sorted(logs, key=late_skips.get)
    for letter in healthy:
        if letter in answer:
            return (
                f"run {letter} is healthy: its scale started too high and was found by skipping. "
                "Later one step is skipped after each doubling."
            )
    if list(answer) != [hopeless, growing]:
        return "these are the two runs, but in the other order."
    return None


@exercise(
    "If two runs differ in one thing only, this thing is the cause of what differs.",
    "Compare two runs key by key. How many keys differ?",
    "The seed counts, too: two seeds begin with other weights.",
)
def control_runs(answer: Sequence[str]) -> Problem:
    """Check which two of CONTROL_RUNS show the effect of 16-bit weights alone: two letters."""
    if len(set(answer)) != 2 or not set(answer) <= set(CONTROL_RUNS):
        return f"the answer is a pair of the letters {', '.join(CONTROL_RUNS)}."
    problems = {
        "weights": "the weights of both runs have the same dtype. So their difference says nothing "
        "about 16-bit weights."
    }
    for cause in ("products", "rate", "seed"):
        problems[cause] = f"the runs differ in more than the weights ({cause}). Which is the cause?"
    return one_cause(*(CONTROL_RUNS[letter] for letter in answer), problems)
