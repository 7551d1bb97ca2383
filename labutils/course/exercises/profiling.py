"""Exercises of notebook 04: a history, a plan. What their answers hear stands in choices.yaml."""

from __future__ import annotations

import re
from collections.abc import Sequence

from labutils.course.exercises.core import Problem, exercise, numbers_in
from labutils.course.exercises.quiz import problem_of, read
from labutils.memory.ledger import MemoryLedger


@exercise(
    "Where are forward's blocks highest in the second step? Whose blocks begin there?",
    "Which colour lies over the whole width from the first step on, and was not there before? "
    "Leave out the library's workspaces.",
    "At the end subtract what is allocated from what is reserved.",
)
def history(answer: tuple[int, str, float]) -> Problem:
    """Check what was read from the recorded history: (event, who asked, MiB)."""
    table, numbers, text = read("choices")["history"], numbers_in(answer), str(answer).lower()
    if len(numbers) < 2:
        return table["otherwise"]
    begin = max(begin for begin in table["from event"] if begin <= numbers[0])
    asked = [problem for words, problem in table["who"].items() if re.search(words, text)]
    if len(asked) != 1 or re.search(r"\b(or|not|no)\b|n't", text):
        asked = [table["who else"]]
    is_near = abs(numbers[-1] - table["MiB"]) <= 1
    return table["from event"][begin] or asked[0] or (None if is_near else table["else"])


@exercise(
    "Which bytes per parameter are there when backward begins? When does the last 4 come?",
    "With a checkpoint per block, 1 number per token and unit of width stays in each layer.",
    "12 bytes per logit. 1 GiB has 2³⁰ bytes.",
)
def planned_peak(ledger: MemoryLedger, answer: Sequence[float]) -> Problem:
    """Check the three sums of a plan's peak in GiB, (static, blocks, logits), each to 2 %.

    The plan is GPT-2 large with a checkpoint for each block, and 8 sequences of 1,024 tokens. Of a
    right answer it says, by the ledger, what a card needs.
    """
    table, sums = read("choices")["planned_peak"], numbers_in(answer)
    if len(sums) != 3:
        return table["otherwise"]
    for number, (name, part) in zip(sums, table["parts"].items(), strict=True):
        if problem := problem_of(number, part):
            return f"{name}: {problem}"
    needed_gib = ledger.needed_bytes / 2**30  # with the context, and 2 %
    return (
        f"Right. The sum is {sum(sums):.2f} GiB, and {ledger.peak_gib:.2f} by the ledger. But with "
        f"holes in its segments and the context the card needs {needed_gib:.1f} GiB: these 8 "
        "sequences do not fit 16."
    )
