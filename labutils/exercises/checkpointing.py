"""Exercises of notebook 03: what is kept, how often a block runs, how many segments."""

from __future__ import annotations

import math

from labutils.exercises.core import Problem, exercise


@exercise(
    "Walk through it as through the block of GPT-2. Only one operation is not in the table.",
    "The derivative of a · b needs b for a, and a for b.",
    "SiLU keeps its input. Its output is read by somebody, too.",
)
def swiglu_kept(width: int, answer: int) -> Problem:
    """Check how many times its input half a block with SwiGLU keeps; hidden layers are `width` h.

    It computes x + W3 (SiLU(W1 n) * W2 n), where n is the layer norm of x.
    """
    right = 2 + 4 * width  # x and n; what SiLU reads, both factors, and what W3 reads
    misconceptions = {
        right - width: (
            "one of four wide tensors is missing. Name them: what SiLU reads, what the "
            "multiplication reads, what W3 reads."
        ),
        right - 2 * width: (
            "that is the count for GELU. The multiplication keeps both of its factors."
        ),
        right + width: "one wide tensor is counted twice, although two operations read it.",
        right - 1: "the norm keeps its input, and W1 and W2 keep theirs.",
        right - 2: "the norm keeps its input, and W1 and W2 keep theirs.",
        right + 1: "the sum keeps nothing, and W1 and W2 read the same tensor.",
        10: "that is the second half of GPT-2's block.",
        right: None,
    }
    return misconceptions.get(answer, "go through it operation by operation: what does each read?")


@exercise(
    "Count the forward pass first. Then ask of each block: are the results inside it there "
    "when backward arrives?",
    "A segment keeps its input only. What must run before backward can go through the segment's "
    "first block?",
    "Backward begins in the last segment. Is this one treated as the others are?",
)
def block_runs(n_layer: int, size: int, answer: int) -> Problem:
    """Check how often a block's forward runs in one step.

    The model has `n_layer` blocks, checkpointed in segments of `size` blocks.
    """
    n_segments = n_layer // size
    misconceptions = {
        n_layer: "that is a step without checkpoints. What does backward find inside a segment?",
        n_layer + n_segments: (
            "each segment is computed again, not one block of each: only its input is kept."
        ),
        2 * n_layer - size: (
            "the last segment could be kept, but a checkpointed segment is computed again "
            "wherever it stands."
        ),
        2: "that is one block's count; there are more blocks.",
        2 * n_layer - n_segments: (
            "a segment's first block runs again too: kept is what goes in, not what comes out."
        ),
        3 * n_layer: "backward costs as much as two forward passes, but it is not one.",
        2 * n_layer: None,
    }
    return misconceptions.get(answer, "count block by block: how often does each run?")


@exercise(
    "Two things are alive together: all the segments' inputs, and the layers of one segment.",
    "Count in inputs: n segments keep n of them. What does one segment of 1/n of the layers "
    "keep, in inputs?",
    "Write the sum as a function of n, and try n smaller and larger until it no longer falls.",
)
def best_segments(n_layer: int, ratio: float, answer: float) -> Problem:
    """Check the number of equal segments with the smallest peak.

    Each layer keeps `ratio` times its input.
    """
    possible = range(1, n_layer + 1)
    if answer not in possible:
        return (
            f"the answer is a whole number: {n_layer} layers have between 1 and {n_layer} segments."
        )

    def peak(n: int) -> float:
        return n + ratio * math.ceil(n_layer / n)

    best = min(possible, key=peak)
    misconceptions = {
        round(n_layer**0.5): (
            "that is best if a layer keeps as much as its input. Here it keeps more, so segments "
            "should be shorter."
        ),
        n_layer: "one checkpoint per layer: all the inputs together are the largest part then.",
        1: (
            "one segment keeps nothing in between, and all layers at once when it is computed "
            "again."
        ),
        round((n_layer / ratio) ** 0.5): (
            "the ratio acts the other way: layers that keep much ask for shorter segments, so for "
            "more of them."
        ),
    }
    if peak(answer) == peak(best):
        return None
    few_or_many = "few" if answer < best else "many"
    otherwise = (
        f"{peak(answer):g} inputs at the peak; there is a smaller sum. "
        f"Are there too {few_or_many} segments?"
    )
    return misconceptions.get(answer, otherwise)
