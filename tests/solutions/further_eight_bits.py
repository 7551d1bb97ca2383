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


SOLUTIONS = {
    "blockwise_fp8": Solution(
        right=[
            blocks_of,
            by_loop,
            broken(
                blocks_of, ("largest.masked_fill(largest == 0, 448.0)", "largest.clamp(min=1e-30)")
            ),
        ],
        wrong=[
            ("nothing is rounded", lambda x, block: x.clone()),
            ("one scale for each row", broken(blocks_of, ("(-1, block)", "(1, -1)"))),
            (
                "one scale for the whole tensor",
                broken(blocks_of, (".amax(dim=-1, keepdim=True)", ".amax()")),
            ),
            (
                "a block of zeros",
                broken(blocks_of, ("largest.masked_fill(largest == 0, 448.0)", "largest")),
            ),
            (
                "numbers of E5M2",
                broken(blocks_of, ("float8_e4m3fn", "float8_e5m2"), ("448.0", "57344.0")),
            ),
            ("differ from the right ones", broken(blocks_of, (" / scale)", ")"))),
            ("of the shape of x", broken(blocks_of, (".flatten(1)", ""))),
            ("changes x itself", in_place),
            ("another shape, or another block", fixed_block),
            ("Return float32", codes_alone),
            ("without a scale", broken(blocks_of, ("parts * scale", "parts"), (" / scale", ""))),
            ("must be a tensor", lambda x, block: None),
        ],
    ),
}
