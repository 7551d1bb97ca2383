"""Answers to the exercise of further/scaler, right and wrong.

This folder can be removed without breaking the course.
"""

from tests.solutions.answers import Solution
from tests.solutions.notebook_01 import (
    CLIP,
    OWN_STEP,
    SCALE,
    STEP,
    UNSCALE,
    UPDATE,
    ZERO,
    amp_step,
    changed,
)

NOTEBOOK = "further/scaler.ipynb"
SECRETS = r"max_grad_norm \*|del scaler"  # what neither hints nor the notebook may say

SOLUTIONS = [
    Solution(
        "break_clipping",
        right=[
            changed((UNSCALE + CLIP, CLIP + UNSCALE)),
            changed((UNSCALE, "")),
            changed((CLIP, "")),
            changed((", max_grad_norm)\n", ", max_grad_norm / 2)\n")),
            changed((UNSCALE + CLIP, UNSCALE + CLIP.replace("max_grad_norm)", "1024.0)"))),
        ],
        wrong=[
            (amp_step, "still right"),
            (changed((UPDATE, "")), "it raised RuntimeError"),
            (changed((STEP, OWN_STEP)), "These fail: an overflow is skipped"),
            (changed((ZERO, "")), "clipping passes. These fail: old gradients"),
            (changed(("dtype=torch.float16", "enabled=False")), "These fail: products in FP16"),
            (changed((STEP, "")), "not alone. These fail too: the weights move"),
            (changed((CLIP, ""), (ZERO, "")), "not alone. These fail too: old gradients"),
            (changed(("scaler.scale(loss)", "loss")), "it raised"),
            (changed((UNSCALE, UNSCALE + UNSCALE)), "it raised RuntimeError"),
            (changed((SCALE, "")), "it raised"),
        ],
    ),
]
