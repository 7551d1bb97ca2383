"""Answers to the exercises of notebook 04, right and wrong.

This folder can be removed without breaking the course.
"""

from tests.solutions.answers import Solution

NOTEBOOK = "04-Memory_Profiling.ipynb"
SECRETS = r"\b4198|\b17 sequences"  # what neither hints nor the notebook may say

SMI_MIB = (3.6 + 0.5) * 1024  # reserved segments and the context
LARGEST_BATCH = 17  # 500 without any sequence, and 200 for each

SOLUTIONS = [
    Solution(
        "nvidia_smi",
        given=(3.0, 3.6, 0.5),
        right=[SMI_MIB, 4198, 4198.4, 4199],
        wrong=[
            (3686.4, "context"),
            (3072, "tensors alone"),
            (3584, "cached"),
            (7270.4, "within"),
            (4100, "unit"),
            (4.1, "unit"),
            (9, "driver"),
        ],
    ),
    Solution(
        "leak",
        right=["running_mean", "running_mean()"],
        wrong=[("augment", "no leak"), ("forward", "Who"), ("mean", "name of")],
    ),
    Solution(
        "largest_batch",
        given=({2: 900, 6: 1700}, 4096),
        right=[LARGEST_BATCH],
        wrong=[
            (9, "through zero"),
            (14, "through zero"),
            (20, "before the first"),
            (17.98, "whole"),
            (18, "over"),
            (16, "one more"),
        ],
    ),
]
