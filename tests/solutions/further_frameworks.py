"""Answers to the exercise of further/frameworks, right and wrong.

This folder can be removed without breaking the course.
"""

from tests.solutions.answers import Solution

NOTEBOOK = "further/frameworks.ipynb"
SECRETS = r"loss_sum \* n_micro|loss_sum / n_targets \*"  # what neither hints nor notebook may say

SOLUTIONS = [
    Solution(
        "loss_to_hand_over",
        right=[
            lambda loss_sum, n_targets, n_micro: loss_sum / n_targets * n_micro,
            lambda loss_sum, n_targets, n_micro: n_micro * loss_sum / n_targets,
        ],
        wrong=[
            (lambda loss_sum, n_targets, n_micro: loss_sum / n_targets, "3 times too small"),
            (lambda loss_sum, n_targets, n_micro: loss_sum, "only the framework divides"),
            (lambda loss_sum, n_targets, n_micro: loss_sum * n_micro, "nothing divides by it"),
            (
                lambda loss_sum, n_targets, n_micro: loss_sum / n_targets * n_micro**2,
                "enters twice",
            ),
            (
                lambda loss_sum, n_targets, n_micro: loss_sum / n_targets / n_micro,
                "not that of the full batch",
            ),
            (lambda loss_sum, n_targets, n_micro: float(loss_sum.detach()), "has no graph"),
            (lambda loss_sum, n_targets: loss_sum, "it raised TypeError"),
        ],
    ),
]
