"""Answers to the exercise of further/speed, right and wrong.

This folder can be removed without breaking the course.
"""

from tests.solutions.answers import Solution

NOTEBOOK = "further/speed.ipynb"
SECRETS = r"\"C\", \"D\"|\bC and D\b"  # what neither hints nor the notebook may say

RUNS = {
    "A": {"precision": "fp32", "activation": "gelu_new", "micro_batch_size": 2},
    "B": {"precision": "16 bit", "activation": "gelu_tanh", "micro_batch_size": 2},
    "C": {"precision": "16 bit", "activation": "gelu_tanh", "micro_batch_size": 4},
    "D": {"precision": "fp32", "activation": "gelu_tanh", "micro_batch_size": 4},
    "E": {"precision": "fp32", "activation": "gelu_new", "micro_batch_size": 2},
    "F": {"precision": "16 bit", "activation": "gelu_new", "micro_batch_size": 4},
}

SOLUTIONS = [
    Solution(
        "speed_control",
        given=(RUNS, "precision"),
        right=[("C", "D"), ["D", "C"], {"C", "D"}],
        wrong=[
            (("A", "B"), "and in activation"),
            (("A", "C"), "and in activation, micro_batch_size"),
            (("D", "F"), "and in activation"),
            (("B", "C"), "same precision. They show what micro_batch_size does"),
            (("C", "F"), "same precision. They show what activation does"),
            (("A", "E"), "show the noise"),
            (("C", "C"), "show the noise"),
            (("A", "Z"), "two of the names"),
            ("AB", "two of the names"),
            (("A",), "two of the names"),
            (3, "two of the names"),
        ],
    ),
]
