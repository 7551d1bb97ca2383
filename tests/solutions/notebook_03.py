"""Answers to the exercises of notebook 03, right and wrong.

This folder can be removed without breaking the course.
"""

from tests.solutions.answers import Solution

NOTEBOOK = "03-Gradient_Checkpointing.ipynb"
SECRETS = r"\[0, 4, 5\]|\b24 (times|runs)|\b30 segments"  # not in hints, nor in the notebook

BLOCK_RUNS = 24  # twelve in the forward pass, and every one again
SEGMENTS = 20  # √(4 · 100), five layers each
KEPT_MIB = [2, 2, 2, 2, 40, 2, 2, 2, 2, 2, 2, 2]
STARTS = [0, 4, 5]  # the huge layer alone

SOLUTIONS = [
    Solution(
        "block_runs",
        given=(12, 3),
        right=[BLOCK_RUNS],
        wrong=[
            (12, "without checkpointing"),
            (16, "not one block of each"),
            (21, "wherever it stands"),
            (20, "what goes in"),
            (36, "is not one"),
            (2, "more blocks"),
            (7, "block by block"),
            ("x", "block by block"),
        ],
    ),
    Solution(
        "best_segments",
        given=(100, 4),
        right=[SEGMENTS],
        wrong=[
            (10, "keeps as much as its input"),
            (100, "one checkpoint per layer"),
            (1, "one segment"),
            (5, "the other way"),
            (50, "too many segments"),
            (15, "too few segments"),
            (20.5, "whole number"),
            (0, "between 1 and 100"),
            ("x", "whole number"),
        ],
    ),
    Solution(
        "segment_lengths",
        given=(24, 16),
        right=[[2] * 4 + [1] * 16, (2, 2, 2, 2, *[1] * 16)],
        wrong=[
            ([1] * 24, "one checkpoint per layer"),
            ([2] * 12, "equally long"),
            ([1] * 16 + [2] * 4, "another order"),
            ([3] + [1] * 21, "than the number of inputs"),
            ([24], "equally long"),
            ([2] * 4, "8 layers together"),
            ([0, 24], "whole numbers above 0"),
            (20, "whole numbers above 0"),
        ],
    ),
    Solution(
        "placement",
        given=(KEPT_MIB, 1),
        right=[STARTS, [0.0, 4.0, 5.0]],
        wrong=[
            ([0, 3, 6, 9], "equally long"),
            ([0, 4], "equally long"),
            ([0], "One segment"),
            (list(range(12)), "at each layer"),
            ([0, 2, 4, 5, 8], "so many segments"),
            ([4, 5], "starts at layer 0"),
            ([0, 12], "from 0 to 11"),
            (5, "is a list of layer numbers"),
        ],
    ),
]
