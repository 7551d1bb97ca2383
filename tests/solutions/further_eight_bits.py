"""Answers to the exercise of further/eight_bits, right and wrong.

This folder can be removed without breaking the course.
"""

import torch

from tests.solutions.answers import Solution, broken

NOTEBOOK = "further/eight_bits.ipynb"
SECRETS = r"unflatten|largest == 0"  # what neither hints nor the notebook may say


def blocks_of(x, block):
    parts = x.unflatten(1, (-1, block))
    largest = parts.abs().amax(dim=-1, keepdim=True)
    scale = 448.0 / largest.masked_fill(largest == 0, 448.0)
    stored = (parts * scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
    return (stored.float() / scale).flatten(1)


def by_loop(x, block):
    y = torch.zeros_like(x)
    for i in range(len(x)):
        for start in range(0, x.shape[1], block):
            part = x[i, start : start + block]
            if part.abs().max() > 0:
                scale = 448.0 / part.abs().max()
                stored = (part * scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
                y[i, start : start + block] = stored.float() / scale
    return y


def in_place(x, block):
    return x.copy_(blocks_of(x, block))


def fixed_block(x, block):
    return blocks_of(x, 16)


def codes_alone(x, block):
    return blocks_of(x, block).to(torch.float8_e4m3fn)


SOLUTIONS = [
    Solution(
        "blockwise_fp8",
        right=[
            blocks_of,
            by_loop,
            broken(
                blocks_of, ("largest.masked_fill(largest == 0, 448.0)", "largest.clamp(min=1e-30)")
            ),
        ],
        wrong=[
            (lambda x, block: x.clone(), "nothing is rounded"),
            (broken(blocks_of, ("(-1, block)", "(1, -1)")), "one scale for each row"),
            (
                broken(blocks_of, (".amax(dim=-1, keepdim=True)", ".amax()")),
                "one scale for the whole tensor",
            ),
            (
                broken(blocks_of, ("largest.masked_fill(largest == 0, 448.0)", "largest")),
                "a block of zeros",
            ),
            (
                broken(blocks_of, ("float8_e4m3fn", "float8_e5m2"), ("448.0", "57344.0")),
                "numbers of E5M2",
            ),
            (broken(blocks_of, (" / scale)", ")")), "differ from the right ones"),
            (broken(blocks_of, (".flatten(1)", "")), "of the shape of x"),
            (in_place, "changes x itself"),
            (fixed_block, "another shape, or another block"),
            (codes_alone, "Return float32"),
            (
                broken(blocks_of, ("parts * scale", "parts"), (" / scale", "")),
                "without a scale",
            ),
            (lambda x, block: None, "must be a tensor"),
        ],
    ),
]
