"""Self-tests at the end of a notebook: statements, true or false, each with its reason."""

from __future__ import annotations

from collections.abc import Sequence

# (statement, whether it is true, why)
STATEMENTS = (  # notebook 04, and the course
    (
        "A technique that saves activations always lowers the peak.",
        False,
        "only if activations are alive at the peak",
    ),
    (
        "empty_cache() frees tensors that a variable still holds.",
        False,
        "it returns cached segments in which no tensor lives",
    ),
    (
        "nvidia-smi shows at least what PyTorch has reserved.",
        True,
        "reserved segments, and the context",
    ),
    (
        "A snapshot made without _record_memory_history first has no history.",
        True,
        "only the present state",
    ),
    (
        "Twice the batch needs at least twice the memory.",
        False,
        "weights and moments do not grow with it",
    ),
    (
        "More accumulation steps at the same micro-batch lower the peak.",
        False,
        "the micro-batch must shrink",
    ),
    (
        "After a failed cell, tensors of its functions can still be alive.",
        True,
        "the traceback keeps their frames",
    ),
    (
        "In a small model with a large vocabulary the logits can outweigh a block.",
        True,
        "section 4",
    ),
    (
        "A BF16 weight rounded to nearest follows every small update.",
        False,
        "below half a step it does not move",
    ),
    (
        "Freeing gradients in backward still allows clipping by the global norm.",
        False,
        "that needs all gradients",
    ),
)


ACCUMULATION = (
    (
        "A window's gradient is right only if its number of targets is known before the step.",
        True,
        "each summed loss is divided by that number, or the sum of gradients is, later",
    ),
    (
        "A test with packed sequences finds the mean of means.",
        False,
        "at equal lengths it gives the right gradient",
    ),
    (
        "An error that float64 does not shrink is not rounding.",
        True,
        "rounding shrinks with eps; dropout and batch norm do not",
    ),
    (
        "Accumulation lets 10⁹ float32 parameters train with AdamW in 8 GiB.",
        False,
        "weights, gradients and moments alone are more, at any micro-batch size",
    ),
    (
        "Against the same micro-batch, a second micro-batch can raise the peak.",
        True,
        "the first one's gradients are alive during its backward pass",
    ),
    (
        "A difference of two timings counts if it is larger than 5 %.",
        False,
        "it counts if it is larger than what two identical variants differ by",
    ),
    (
        "Loss against optimizer steps is a fair comparison of two batch sizes.",
        False,
        "a larger batch has then seen more text: compare at equal tokens",
    ),
    (
        "If 4 × 8 learns worse than 1 × 8 at one rate, accumulation has harmed the learning.",
        False,
        "the batch has changed as well: the control is 1 × 32",
    ),
    (
        "unscale_ and clipping run once per window, after its last backward pass.",
        True,
        "before it, .grad holds a part of the sum",
    ),
    (
        "A schedule that counts micro-batches changes no gradient, so it is harmless.",
        False,
        "the rate then ends its schedule n times too early",
    ),
)
QUIZZES = {"course": STATEMENTS, "accumulation": ACCUMULATION}


def self_test(answers: Sequence[bool | None], quiz: str = "course") -> None:
    """Print the statements of a quiz, and for each answer that is not None whether it is right.

    The reason stands beside it. Raises KeyError for a quiz that is not in `QUIZZES`.
    """
    statements = QUIZZES[quiz]
    if len(answers) != len(statements):
        print(f"There are {len(statements)} statements; the list has {len(answers)} entries.")
        return
    pairs = zip(statements, answers, strict=True)
    for number, ((text, truth, reason), answer) in enumerate(pairs, start=1):
        if answer is None:
            print(f"{number:2d}. open   {text}")
        else:
            verdict = "right" if answer is truth else "wrong"
            print(f"{number:2d}. {verdict}  {text} ({reason})")
