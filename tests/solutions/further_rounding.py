"""Answers to the exercise of further/rounding, right and wrong.

This folder can be removed without breaking the course.
"""

import math

import torch

from tests.solutions.answers import Solution, broken

NOTEBOOK = "further/rounding.ipynb"
SECRETS = r"lower = |eps / 4|nextafter"  # what neither hints nor the notebook may say


def limit(weight, dtype, direction):
    mantissa, exponent = math.frexp(weight)
    spacing = torch.finfo(dtype).eps * 2.0 ** (exponent - 1)
    lower = direction < 0 and mantissa == 0.5
    return spacing / 4 if lower else spacing / 2


def neighbours(weight, dtype, direction):
    toward = torch.tensor(math.copysign(math.inf, direction), dtype=dtype)
    return (torch.tensor(weight, dtype=dtype).nextafter(toward).item() - weight) * direction / 2


SOLUTIONS = {
    "lost_below": Solution(
        right=[limit, neighbours],
        wrong=[
            ("too high", broken(limit, ("spacing / 2", "spacing"))),
            ("1.5 in bfloat16", lambda w, dtype, direction: torch.finfo(dtype).eps * w / 2),
            ("0.375", lambda w, dtype, direction: torch.finfo(dtype).eps / 2),
            ("1.5 in float16", lambda w, dtype, direction: limit(w, torch.bfloat16, direction)),
            ("1 in bfloat16 and updates of sign -", broken(limit, ("spacing / 4", "spacing / 2"))),
            ("too low", lambda w, dtype, direction: torch.finfo(dtype).tiny),
            ("a positive number", lambda w, dtype, direction: None),
            ("it raised TypeError", lambda w, dtype: 1.0),
        ],
    ),
}
