"""Answers to the exercises of notebook 01, right and wrong.

This folder can be removed without breaking the course.
"""

import torch
import torch.nn.functional as F

from tests.solutions.answers import Solution, broken

NOTEBOOK = "01-Mixed_Precision.ipynb"
SECRETS = r"\"B\", \"C\"|\"C\", \"B\""  # what neither hints nor the notebook may say

LOGS = {
    "A": "xxxxxxx.....x.....x.....x.....x.....",
    "B": "xxxxxxx.....x.xx..x.xx.x.xx.x..x.x..",
    "C": ".....x.....xxxxxxxxxxxxxxxxxxxxxxxxx",
    "D": "xxxxx.....x.....x.....x.....x.....x.",
}


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
        "scaler_log",
        given=(LOGS,),
        right=[("C", "B"), ["C", "B"]],
        wrong=[
            (("B", "C"), "in the other order"),
            (("C", "A"), "run A is healthy"),
            (("D", "B"), "run D is healthy"),
            (("C", "C"), "two different runs"),
            (("C", "X"), "two of the letters"),
            ("C", "two of the letters"),
            (5, "two of the letters"),
        ],
    ),
    Solution(
        "control_runs",
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
