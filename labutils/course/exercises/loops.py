"""Exercises that are code, of notebooks 01 and 02: a step, a window, an epoch, and a control."""

from __future__ import annotations

from collections.abc import Callable

from labutils.course.exercises.core import Problem, exercise
from labutils.course.exercises.steps import Step, first_problem, judge_epoch, on_one_batch


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
    return first_problem(on_one_batch(step), 16)


@exercise(
    "Sort the calls in two groups: for every micro-batch, and once, when all micro-batches "
    "have passed.",
    "A sum of squared errors can be divided by any number you like. Which number gives the "
    "mean over all rows?",
    "unscale_ divides all that is in .grad. What is there after the second micro-batch, if "
    "the first was unscaled?",
)
def amp_window(step: Step) -> Problem:
    """Check one FP16 step over a window.

    The function is `step(model, micro_batches, optimizer, scaler, max_grad_norm)`. `micro_batches`
    is a list of (x, y) with unequal numbers of rows. The loss is the mean squared error over all
    rows. The step is run on a linear layer on the CPU: without clipping, with it, with an
    overflow, and repeatedly; then over a window of another size.
    """
    if problem := first_problem(step, 2, 12, 1, 6):
        return problem
    # another window, for a function into which the first one's number of rows is written
    problem = first_problem(step, 5, 3)
    return problem and (
        "right for micro-batches of 2, 12, 1 and 6 rows, but not for two of 5 and 3. Does the "
        f"function hold a number that belongs to one window? {problem}"
    )


@exercise(
    "Run the check on the unchanged loop first. Which judge can see a difference between two "
    "micro-batches of one window?",
    "Bug 5 of section 2 gives the right gradient at equal lengths. Where in the loop would it "
    "stand?",
    "Each row has the same weight in the right loop. Give each micro-batch the same weight "
    "instead, also in the short last window.",
)
def break_one(judge: str, epoch: Callable) -> Problem:
    """Check that a broken epoch fails exactly one judge of `judge_epoch`, the named one.

    The function is `epoch(model, batches, optimizer, grad_accum_steps, max_grad_norm)`. `batches`
    is a list of (x, y). It returns one loss per optimizer step. It is run on 7 micro-batches in
    windows of 3, with equal and with unequal numbers of rows. With clipping it is run twice on one
    model: steps 4 to 6 are those of the second epoch.
    """
    verdicts = judge_epoch(epoch)
    failed = {name: problem for name, problem in verdicts.items() if problem}
    if not failed:
        return "all five judges pass: none of them sees a difference to the right loop."
    others = "; ".join(f"{name}: {why}" for name, why in failed.items() if name != judge)
    if judge not in verdicts:
        return f"{judge} could not be judged. {others}"
    if judge not in failed:
        return f"{judge} still passes. What fails is {others}"
    return f"{judge} fails, but it is not alone. {others}" if others else None


@exercise(
    "List what differs between the two runs of the cell. How many of these could cause a "
    "higher loss?",
    "The claim is about n alone. What must both runs then have in common, as numbers of sequences?",
    "Five pairs that share seeds can be compared. Which run without accumulation has as many "
    "sequences per step as 4 × 8?",
)
def accumulation_control(answer: tuple[dict, dict]) -> Problem:
    """Check two runs that show whether accumulation itself changes what a model learns.

    A run is {"n", "m", "rate", "tokens", "seeds"}: a window of n micro-batches with m sequences.
    """
    try:
        # a set of floats: seeds in another order, or in a tuple, are the same seeds
        first, second = (
            {**run, "batch": run["n"] * run["m"], "seeds": {*map(float, run["seeds"])}}
            for run in answer
        )
        parts = [run[key] for run in answer for key in ("n", "m")]
        rates = [run[key] for run in answer for key in ("rate", "tokens")]
        are_runs = min(parts + rates) > 0 and not any(part % 1 for part in parts)
    except (KeyError, TypeError, ValueError):
        are_runs = False
    if not are_runs:
        return (
            "the answer is two runs, (run_a, run_b). Each is a dictionary: n and m are whole "
            "numbers, rate and tokens are numbers above 0, and seeds is a list."
        )
    problems = {
        "n": "both runs accumulate equally, so they cannot show what accumulation does.",
        "batch": "their batches differ, so the size of the batch could be the cause. Accumulation "
        "divides a batch into parts, and keeps its size.",
        "rate": "their rates differ, so the rate could be the cause. Equal batches need no rule.",
        "tokens": "they see unequal numbers of tokens: the longer run has learned from more text.",
        "seeds": "their seeds differ, so weights and order of the text differ: these are no pairs.",
    }
    # n is what the runs are about and must differ; all else must be equal
    for key, problem in problems.items():
        if (first[key] == second[key]) == (key == "n"):
            return problem
    if 1 not in (first["n"], second["n"]):
        return "both runs accumulate. The control is the run that does not."
    if first["tokens"] < 32 * first["batch"]:
        return "with so few tokens a run takes no step: a sequence of section 5 has 32 tokens."
    if len(first["seeds"]) < 5:
        return "too few seeds: with fewer than five pairs, equal signs come by chance too often."
    return None
