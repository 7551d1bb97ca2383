"""Exercises of notebook 04: numbers, a history, leaks, a trace, the largest batch, a plan."""

from __future__ import annotations

from labutils.exercises.core import Right, exercise
from labutils.exercises.leaks import Training, try_training


@exercise(
    "Which of the numbers does the driver know of? It has never heard of tensors.",
    "The driver has handed out segments, and the process itself took something before its "
    "first tensor.",
    "1 GiB is 1024 MiB.",
)
def nvidia_smi(
    allocated_gib: float, reserved_gib: float, context_gib: float, answer: float | None
) -> str | None:
    """Check what nvidia-smi shows for a process, in MiB."""
    right_gib = reserved_gib + context_gib
    both_gib = allocated_gib + reserved_gib
    unit = "the right bytes, in another unit: 1 GiB is 1024 MiB."
    misconceptions = {
        1024 * right_gib: None,
        1024 * allocated_gib: "those are the tensors alone; the driver does not see tensors.",
        1024 * reserved_gib: "the context is missing: it is the process's as well.",
        1024 * (allocated_gib + context_gib): (
            "cached segments belong to the process until it returns them."
        ),
        1024 * (both_gib + context_gib): "allocated bytes lie within the reserved ones.",
        1024 * both_gib: (
            "allocated bytes lie within the reserved ones, and the context is missing."
        ),
        1000 * right_gib: unit,
        right_gib: unit,
        right_gib * 2**30 / 1e6: "those are MB of a million bytes; nvidia-smi counts in MiB.",
    }
    for mib, problem in misconceptions.items():
        if abs(answer - mib) < 1:
            return problem
    return "which of the three numbers does the driver know of?"


FIRST_BACKWARD_EVENT, EVENTS_NEAR = 912, 40  # of the recorded history's second step
FREE_AT_END_MIB, MIB_NEAR = 44.2, 1.0


@exercise(
    "Which colour begins in the second step where the blue blocks have reached their highest?",
    "Which colour lies over the whole width from the first step on, and was not there before? "
    "Leave out the library's workspaces.",
    "At the end subtract what is allocated from what is reserved.",
)
def history(answer: tuple[int, str, float] | None) -> str | None:
    """Check what was read from the recorded history: (event, who asked, MiB)."""
    event, who, free_mib = answer
    if abs(event - FIRST_BACKWARD_EVENT) > EVENTS_NEAR:
        if event < 300:
            return "the event: that is the first step; the question asks for the second."
        return "the event: look for the first orange block above the blue ones of the second step."
    problems = {
        "optim": None,
        "mov": "who asked: the model was there before the first step.",
        "cublas": "who asked: the workspaces outlive the step; the question leaves them out.",
        "forward": "who asked: forward's blocks end when backward has used them.",
        "backward": "who asked: gradients end with `zero_grad`; look at the end of a step.",
        "": "who asked: the answer is a name of the legend.",
    }
    name = next(word for word in problems if word in str(who).lower())
    if problems[name]:
        return problems[name]
    if abs(free_mib - FREE_AT_END_MIB) > MIB_NEAR:
        return "MiB: at the end, subtract what is allocated from what is reserved."
    return None


@exercise(
    "Whose results grow in number from step to step? Two lines' do.",
    "Line 1 has the highest peak, but what of it is alive at the end?",
    "Backward frees what a graph keeps. Which line builds a graph through which nothing ever "
    "goes backward?",
)
def leak(answer: int | None) -> str | None:
    """Check which line of notebook 04's little program must change."""
    problems = {
        1: "it has the highest peak, and nothing of it is alive at the end: a peak is no leak.",
        2: "its results are alive, true; but training alone would let go of them. Who still "
        "needs them?",
        3: None,
        4: "this line only gives its result a name; the next step gives the name away.",
        5: "backward frees its own graph, and the mean is detached here already.",
        6: None,
    }
    return problems.get(answer, "the answer is the number of a line, from 1 to 6.")


@exercise(
    "List all that is still referenced when a step is over: three lists. What do they hold?",
    "A tensor with a graph keeps what its graph keeps. Which of the three losses and outputs "
    "never goes backward?",
    "A Python number keeps nothing. Where can a number take the place of a tensor? And who "
    "takes the hook away?",
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
    "Draw both points. Does the line through them go through zero?",
    "How much does one more sequence cost, and what is left at zero sequences?",
    "A batch is a whole number, and it must not exceed the budget.",
)
def largest_batch(peaks: dict[int, float], budget: float, answer: int | None) -> str | None:
    """Check the largest batch under a budget, on the line through two measured peaks."""
    (small, peak_small), (large, peak_large) = sorted(peaks.items())
    per_sequence = (peak_large - peak_small) / (large - small)
    at_zero = peak_small - small * per_sequence
    through_zero = (
        "that divides the budget by the cost per sequence of one point: as if the line went "
        "through zero."
    )
    misconceptions = {
        budget // (peak_small / small): through_zero,
        budget // (peak_large / large): through_zero,
        budget // per_sequence: (
            "the slope is right; but part of the budget is gone before the first sequence."
        ),
        (budget - at_zero) // per_sequence: None,
    }
    if answer != int(answer):
        return "half a sequence cannot be trained: the answer is a whole number."
    needed = at_zero + answer * per_sequence
    comparison = "that is over the budget." if needed > budget else "one more fits."
    return misconceptions.get(answer, f"{answer} sequences need {needed:g}: {comparison}")


@exercise(
    "Count `aten::mm` between the beginning and the end of the span `backward`.",
    "A linear layer needs two products in backward: one for its input, one for its weight.",
    "16 linear layers in the blocks, and the head. Only the head's forward is an `mm`.",
)
def products_in_backward(answer: int | None) -> str | None:
    """Check how many products of a step run in backward, read from a trace."""
    problems = {
        34: None,
        35: "those are all of the step; one of them is the head's, in forward.",
        17: "a layer needs two: the gradient by its input, and the one by its weight.",
        16: "a layer needs two: the gradient by its input, and the one by its weight.",
        32: "those are the blocks' layers; the head has two as well.",
        33: "the head has two in backward, and one in forward.",
    }
    return problems.get(answer, "filter the events by name, and by their begin `ts`.")


@exercise(
    "At which instant is the peak? Only a `del` before it can lower it.",
    "The peak comes when backward has just begun. Which place lies before?",
    "Which line of the loop calls backward? A `del` must stand above it.",
)
def useful_del(answer: str | None) -> str | None:
    """Check at which place of the tutorial loop `del outputs` lowers the peak."""
    problems = {
        "A": None,
        "B": "the peak comes in backward: here it has passed.",
        "C": "the peak comes in backward: here it has passed.",
        "D": "by the next peak the new outputs have taken the name; the old ones are gone anyway.",
    }
    return problems.get(str(answer).strip().upper(), "the answer is A, B, C or D.")


@exercise(
    "Which bytes per parameter are there when backward begins? When does the last 4 come?",
    "With a checkpoint per block, 1 number per token and unit of width stays in each layer.",
    "12 bytes per logit. 1 GiB has 2³⁰ bytes.",
)
def planned_peak(ledger_gib: float, n_parameters: int, answer: float | None) -> str | None:
    """Check a peak that was computed by hand against the ledger's: graded on the error."""
    error = answer / ledger_gib - 1
    off = f"{100 * error:+.1f} % off the ledger"
    if abs(error) <= 0.05:
        return Right(f"{off}.")
    if abs(error) <= 0.15:
        return Right(f"{off}: near, for a plan. Which part is missing?")
    gradients_gib = 4 * n_parameters / 2**30
    misconceptions = {
        ledger_gib - gradients_gib: "4 bytes per parameter are missing.",
        ledger_gib + gradients_gib: "when backward begins, no weight has a gradient yet.",
    }
    for gib, problem in misconceptions.items():
        if abs(answer - gib) < 0.05 * ledger_gib:
            return f"{off}: {problem}"
    if answer > 1000:
        return f"{off}: the answer is in GiB of 2³⁰ bytes."
    return f"{off}: add weights and moments, what the blocks keep, and the logits."
