"""Exercises of notebook 04: a history, a plan."""

from __future__ import annotations

from labutils.exercises.core import Problem, exercise, recognised

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
