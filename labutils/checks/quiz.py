"""The self-test at the end of the course: ten statements, true or false."""

from __future__ import annotations

from collections.abc import Sequence

# (statement, whether it is true, why)
STATEMENTS = (
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


def self_test(answers: Sequence[bool | None]) -> None:
    """Print ten statements, and for each answer that is not None whether it is right, and why."""
    if len(answers) != len(STATEMENTS):
        print(f"There are {len(STATEMENTS)} statements; the list has {len(answers)} entries.")
        return
    pairs = zip(STATEMENTS, answers, strict=True)
    for number, ((text, truth, reason), answer) in enumerate(pairs, start=1):
        if answer is None:
            print(f"{number:2d}. open   {text}")
        else:
            verdict = "right" if answer is truth else "wrong"
            print(f"{number:2d}. {verdict}  {text} ({reason})")
