"""Answers to the exercise of further/frameworks, right and wrong.

This folder can be removed without breaking the course.
"""

from tests.solutions.answers import Solution

NOTEBOOK = "further/frameworks.ipynb"
SECRETS = r"loss_sum \* n_micro|loss_sum / n_targets \*"  # what neither hints nor notebook may say

SOLUTIONS = {
    "loss_to_hand_over": Solution(
        right=[
            lambda loss_sum, n_targets, n_micro: loss_sum / n_targets * n_micro,
            lambda loss_sum, n_targets, n_micro: n_micro * loss_sum / n_targets,
        ],
        wrong=[
            ("3 times too small", lambda loss_sum, n_targets, n_micro: loss_sum / n_targets),
            ("only the framework divides", lambda loss_sum, n_targets, n_micro: loss_sum),
            ("nothing divides by it", lambda loss_sum, n_targets, n_micro: loss_sum * n_micro),
            (
                "enters twice",
                lambda loss_sum, n_targets, n_micro: loss_sum / n_targets * n_micro**2,
            ),
            (
                "not that of the full batch",
                lambda loss_sum, n_targets, n_micro: loss_sum / n_targets / n_micro,
            ),
            ("has no graph", lambda loss_sum, n_targets, n_micro: float(loss_sum.detach())),
            ("it raised TypeError", lambda loss_sum, n_targets: loss_sum),
        ],
    ),
}
