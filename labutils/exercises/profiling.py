"""Exercises of notebook 04: numbers, a history, the largest batch, a plan."""

from __future__ import annotations

from labutils.exercises.core import Problem, exercise, recognised


@exercise(
    "Which of the numbers does the driver know of? It has never heard of tensors.",
    "The driver has handed out segments, and the process itself took something before its "
    "first tensor.",
    "1 GiB is 1024 MiB.",
)
def nvidia_smi(
    allocated_gib: float, reserved_gib: float, context_gib: float, answer: float
) -> Problem:
    """Check what nvidia-smi shows for a process, in MiB."""
    right_gib = reserved_gib + context_gib
    known = {
        None: right_gib,
        "those are the tensors alone; the driver does not see tensors.": allocated_gib,
        "the context is missing: it is the process's as well.": reserved_gib,
        "cached segments belong to the process until it returns them.": allocated_gib + context_gib,
        "allocated bytes lie within the reserved ones.": allocated_gib + right_gib,
        "allocated bytes lie within the reserved ones, and the context is missing.": (
            allocated_gib + reserved_gib
        ),
        "the right bytes, in another unit: 1 GiB is 1024 MiB, not 1000.": right_gib * 1000 / 1024,
        "the right bytes, in another unit: that is GiB.": right_gib / 1024,
        "those are MB of a million bytes; nvidia-smi counts in MiB.": right_gib * 2**20 / 1e6,
    }
    otherwise = "which of the three numbers does the driver know of?"
    return recognised(answer / 1024, known, otherwise, tolerance=1 / 4096)


FIRST_BACKWARD_EVENT, EVENTS_NEAR = 912, 40  # of the recorded history's second step
FREE_AT_END_MIB, MIB_NEAR = 44.2, 1.0


@exercise(
    "Where are forward's blocks highest in the second step? Whose blocks begin there?",
    "Which colour lies over the whole width from the first step on, and was not there before? "
    "Leave out the library's workspaces.",
    "At the end subtract what is allocated from what is reserved.",
)
def history(answer: tuple[int, str, float]) -> Problem:
    """Check what was read from the recorded history: (event, who asked, MiB)."""
    event, who, free_mib = answer
    if abs(event - FIRST_BACKWARD_EVENT) > EVENTS_NEAR:
        if event < 300:
            return "the event: that is the first step; the question asks for the second."
        return "the event: look for backward's first block above forward's in the second step."
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
    "Draw both points. Does the line through them go through zero?",
    "How much does one more sequence cost, and what is left at zero sequences?",
    "A batch is a whole number, and it must not exceed the budget.",
)
def largest_batch(peaks: dict[int, float], budget: float, answer: int) -> Problem:
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
    if answer % 1:
        return "half a sequence cannot be trained: the answer is a whole number."
    needed = at_zero + answer * per_sequence
    comparison = "that is over the budget." if needed > budget else "one more fits."
    return misconceptions.get(answer, f"{answer} sequences need {needed:g}: {comparison}")


@exercise(
    "Which bytes per parameter are there when backward begins? When does the last 4 come?",
    "With a checkpoint per block, 1 number per token and unit of width stays in each layer.",
    "12 bytes per logit. 1 GiB has 2³⁰ bytes.",
)
def planned_peak(ledger_gib: float, n_parameters: int, answer: float) -> Problem:
    """Check a peak that was computed by hand against the ledger's: graded on the error."""
    error = answer / ledger_gib - 1
    print(f"{100 * error:+.1f} % off the ledger.")
    if 0.05 < abs(error) <= 0.15:
        print("That is near, for a plan. Which part is off?")
    if abs(error) <= 0.15:
        return None
    if answer > 1000:
        return "the answer is in GiB of 2³⁰ bytes."
    gradients_gib = 4 * n_parameters / 2**30
    known = {
        "4 bytes per parameter are missing.": ledger_gib - gradients_gib,
        "when backward begins, no weight has a gradient yet.": ledger_gib + gradients_gib,
    }
    otherwise = "add weights and moments, what the blocks keep, and the logits."
    return recognised(answer, known, otherwise, tolerance=0.05)
