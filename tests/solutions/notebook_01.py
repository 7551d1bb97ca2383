"""Answers to the exercises of notebook 01, right and wrong.

This folder can be removed without breaking the course.
"""

import torch
import torch.nn.functional as F

from tests.solutions.answers import Solution, broken

NOTEBOOK = "01-Mixed_Precision.ipynb"
SECRETS = r"2\.98|4e-08|\"B\", \"C\""  # what neither hints nor the notebook may say

VALUES = [7e-9, 2e-8, 4e-8, 5e-6, 6.1e-5, 1.0, 6e4, 7e4]
# Half the smallest subnormal number, 2.98e-8, is where rounding to 0 begins.
SURVIVORS = [4e-8, 5e-6, 6.1e-5, 1.0, 6e4]

# Only B and C differ in the weights alone.
CONTROL_RUNS = {
    "A": {"products": "FP32", "weights": "FP32", "rate": 3e-5, "seed": 0},
    "B": {"products": "BF16", "weights": "FP32", "rate": 3e-5, "seed": 0},
    "C": {"products": "BF16", "weights": "BF16", "rate": 3e-5, "seed": 0},
    "D": {"products": "BF16", "weights": "BF16", "rate": 2e-3, "seed": 0},
    "E": {"products": "BF16", "weights": "FP32", "rate": 3e-5, "seed": 1},
}

BYTES_PER_PARAMETER = 12  # float32 weight, gradient and momentum


def amp_step(model, x, y, optimizer, scaler, max_grad_norm):
    with torch.autocast("cpu", dtype=torch.float16):
        loss = F.mse_loss(model(x).float(), y)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)


SCALE = "    scaler.scale(loss).backward()\n"
UNSCALE = "    scaler.unscale_(optimizer)\n"
CLIP = "    torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)\n"
STEP = "    scaler.step(optimizer)\n"
OWN_STEP = "    optimizer.step()\n"
UPDATE = "    scaler.update()\n"
ZERO = "    optimizer.zero_grad(set_to_none=True)\n"


def changed(*changes):
    return broken(amp_step, *changes)


SOLUTIONS = [
    Solution(
        "fp16_survivors",
        given=(VALUES,),
        right=[SURVIVORS],
        wrong=[
            ([6.1e-5, 1.0, 6e4], "full precision, not the numbers"),
            ([5e-6, 6.1e-5, 1.0, 6e4], "full precision"),
            ([*SURVIVORS, 2e-8], "rounding takes it to 0"),
            ([*SURVIVORS, 7e4], "beyond the largest"),
            ([4e-8, 5e-6, 6.1e-5, 1.0], "well inside the range"),
            ([3.0], "some of the given values"),
            (5, "some of the given values"),
            ([], "full precision"),
        ],
    ),
    Solution(
        "bytes_per_parameter",
        right=[BYTES_PER_PARAMETER],
        wrong=[
            (16, "that is AdamW"),
            (6, "everything halved"),
            (8, "is missing"),
            (10, "in 16 bits"),
            (14, "only during a step"),
            ("x", "one number"),
            ([4, 4, 4], "it raised TypeError"),
        ],
    ),
    Solution(
        "control_runs",
        given=(CONTROL_RUNS,),
        right=[("B", "C"), ["C", "B"], {"B", "C"}],
        wrong=[
            (("A", "C"), "more than the weights (products)"),
            (("C", "E"), "more than the weights (seed)"),
            (("A", "D"), "more than the weights (products, rate)"),
            (("A", "B"), "same dtype"),
            (("C", "D"), "same dtype"),
            (("B", "E"), "same dtype"),
            (("B", "B"), "a pair of the letters"),
            (("B", "X"), "a pair of the letters"),
            ("BC", "a pair of the letters"),
        ],
    ),
    Solution(
        "amp_step",
        right=[
            amp_step,
            changed((ZERO, "    model.zero_grad()\n")),
            changed((SCALE, "    optimizer.zero_grad()\n" + SCALE), (ZERO, "")),
        ],
        wrong=[
            (changed((UNSCALE + CLIP, CLIP + UNSCALE)), "too short"),
            (changed((UNSCALE, "")), "too short"),
            (changed((CLIP, "")), "longer than max_grad_norm"),
            (changed((STEP, OWN_STEP)), "weights changed"),
            (changed((UPDATE, "")), "who updates it"),
            (changed((ZERO, "")), "never cleared"),
            (changed(("scaler.scale(loss)", "loss")), "scaler.scale"),
            (changed(("dtype=torch.float16", "enabled=False")), "is autocast on"),
            (changed(("torch.float16", "torch.bfloat16")), "for which dtype"),
            (changed((STEP, "")), "did not change the weights"),
            (changed((CLIP, CLIP + "    raise ValueError('x')\n")), "it raised ValueError"),
        ],
    ),
]
