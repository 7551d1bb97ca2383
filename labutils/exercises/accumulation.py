"""Exercises of notebook 02, in their order.

Mend a window, break an epoch, design a control, find a bug, decide.
"""

from __future__ import annotations

from labutils.exercises import steps
from labutils.exercises.core import exercise
from labutils.exercises.epochs import JUDGES, Epoch, judge_epoch


@exercise(
    "Sort the calls in two groups: for every micro-batch, and once, when all micro-batches "
    "have passed.",
    "A sum of squared errors can be divided by any number you like. Which number gives the "
    "mean over all rows?",
    "unscale_ divides all that is in .grad. What is there after the second micro-batch, if "
    "the first was unscaled?",
)
def amp_window(step: steps.Step | None) -> str | None:
    """Check one FP16 step over a window.

    The function is `step(model, micro_batches, optimizer, scaler, max_grad_norm)`. `micro_batches`
    is a list of (x, y) with unequal numbers of rows. The loss is the mean squared error over all
    rows. The step is run on a small network on the CPU: without clipping, with it, with an
    overflow, and repeatedly.
    """
    return steps.first_problem(step, steps.make_batches(steps.WINDOW_ROWS[:4]))


@exercise(
    "Run the check on the unchanged loop first. Which judge can see a difference between two "
    "micro-batches of one window?",
    "Bug 5 of section 2 gives the right gradient at equal lengths. Where in the loop would it "
    "stand?",
    "Each row has the same weight in the right loop. Give each micro-batch the same weight "
    "instead, also in the short last window.",
)
def break_one(judge: str, epoch: Epoch | None) -> str | None:
    """Check that a broken epoch fails exactly one judge of `JUDGES`, the named one.

    The function is `epoch(model, batches, optimizer, grad_accum_steps, max_grad_norm)`. `batches`
    is a list of (x, y). It returns one loss per optimizer step. It is run on 7 micro-batches in
    windows of 3, with equal and with unequal numbers of rows, also with clipping.
    """
    if judge not in JUDGES:
        return f"there is no judge {judge!r}; there are: {', '.join(JUDGES)}."
    verdicts = judge_epoch(epoch)
    failed = {name: problem for name, problem in verdicts.items() if problem}
    if not failed:
        return "no judge finds anything wrong: this loop is still right."
    others = "; ".join(f"{name}: {why}" for name, why in failed.items() if name != judge)
    if judge not in verdicts:
        return f"{judge} could not be judged. {others}"
    if judge not in failed:
        return f"{judge} still passes. What fails is {others}"
    return f"{judge} fails, but it is not alone. {others}" if others else None


KEYS = {"n", "m", "rate", "tokens", "seeds"}


@exercise(
    "List what differs between the two runs of the cell. How many of these could cause a "
    "higher loss?",
    "The claim is about n alone. What must both runs then have in common, as numbers of sequences?",
    "Five pairs that share seeds can be compared. Which run without accumulation has as many "
    "sequences per step as 4 × 8?",
)
def accumulation_control(answer: tuple[dict, dict] | None) -> str | None:
    """Check two runs that show whether accumulation itself changes what a model learns.

    A run is {"n", "m", "rate", "tokens", "seeds"}: a window of n micro-batches with m sequences.
    """
    is_pair = isinstance(answer, (list, tuple)) and len(answer) == 2
    if not is_pair or not all(isinstance(run, dict) and run.keys() == KEYS for run in answer):
        return f"the answer is two runs, each with the keys {', '.join(sorted(KEYS))}."
    first, second = answer
    if first["n"] == second["n"]:
        return "both runs accumulate equally, so they cannot show what accumulation does."
    if first["n"] * first["m"] != second["n"] * second["m"]:
        return (
            "their batches differ, so the size of the batch could be the cause. Accumulation "
            "divides a batch into parts, and keeps its size."
        )
    if 1 not in (first["n"], second["n"]):
        return "both runs accumulate. The control is the run that does not."
    causes = {
        "rate": "their rates differ, so the rate could be the cause. Equal batches need no rule.",
        "tokens": "they see unequal numbers of tokens: the longer run has learned from more text.",
        "seeds": "their seeds differ, so weights and order of the text differ: these are no pairs.",
    }
    for key, problem in causes.items():
        if first[key] != second[key]:
            return problem
    if len(set(first["seeds"])) < 5:
        return "too few seeds: with fewer than five pairs, equal signs come by chance too often."
    return None


LATE_LINE = 9  # of `suspect` in notebook 02
INNOCENT = {
    1: "a count that begins at 0 is right: the first window has number 0.",
    2: "this takes what is left, so a shorter last window is stepped as well.",
    3: "here the error shows, but this line is right: the rate is set once per window. Which line "
    "makes its argument wrong?",
    4: "the targets of the whole window are counted before the first backward pass: that is right.",
    5: "an ordinary loop over the micro-batches of one window.",
    6: "a sum, divided by the targets of the window: that is right at unequal lengths, too.",
    7: "each micro-batch adds its gradient to .grad: that is right.",
    8: "the loss of the window is the sum of its parts, and .detach() keeps no graph.",
    10: "clipping stands after the last backward pass of the window, so it limits the whole sum.",
    11: "one optimizer step per window: that is right.",
    12: "clearing after the step is right. In the inner loop it would erase the sum.",
    13: "one loss per optimizer step: that is right.",
}


@exercise(
    "Say for each line whether it runs once per micro-batch or once per window.",
    "No judge of section 2 sees this bug, because every gradient is right. What else decides "
    "the size of a step?",
    "Which number is the schedule asked for in the second window, and which one should it be?",
)
def find_bug(line: int | None) -> str | None:
    """Check the number of the line in which notebook 02's function `suspect` is wrong."""
    if isinstance(line, bool) or not isinstance(line, int) or line not in {*INNOCENT, LATE_LINE}:
        return f"the answer is a line number from 1 to {max(INNOCENT)}."
    return None if line == LATE_LINE else f"line {line}: {INNOCENT[line]}"


REQUESTS = {
    "A": None,
    "B": "B's micro-batch is one sequence already: a window needs at least that much. What shrinks "
    "the activations of one sequence?",
    "C": "C's weights, gradients and moments alone need more than the card has, at any "
    "micro-batch.",
}


@exercise(
    "What is the smallest part that accumulation can send through the model?",
    "Compare the floor of section 3 with the 16 GiB of the card.",
    "Who has a micro-batch that fits, and wants more sequences in a step?",
)
def accumulation_request(request: str | None) -> str | None:
    """Check which of notebook 02's three requests accumulation can answer: "A", "B" or "C"."""
    letter = str(request).strip().upper()
    if letter not in REQUESTS:
        return f"the answer is one of {', '.join(REQUESTS)}, as a text."
    return REQUESTS[letter]
