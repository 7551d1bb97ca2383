"""Answers to the exercises of notebook 01, right and wrong."""

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
CLIP_FIRST = (UNSCALE + CLIP, CLIP + UNSCALE)
HALF_LIMIT = (CLIP, CLIP.replace("max_grad_norm)", "max_grad_norm / 2)"))

SOLUTIONS = {
    "scaler_log": Solution(
        given=(LOGS,),
        right=[("C", "B"), ["C", "B"]],
        wrong={
            "in the other order": ("B", "C"),
            "run A is healthy": ("C", "A"),
            "two of the letters": ("C", "X"),
        },
    ),
    "control_runs": Solution(
        right=[("B", "C"), ["C", "B"], {"B", "C"}],
        wrong={
            "more than the weights (products)": ("A", "C"),
            "more than the weights (rate)": ("B", "D"),
            "more than the weights (seed)": ("C", "E"),
            "same dtype": ("A", "B"),
            "a pair of the letters": ("B", "B"),
        },
    ),
    "amp_step": Solution(
        right=[
            amp_step,
            broken(amp_step, (ZERO, "    model.zero_grad()\n")),
            broken(amp_step, (SCALE, "    optimizer.zero_grad()\n" + SCALE), (ZERO, "")),
        ],
        wrong={"never called the model": lambda *_: None},
        broken={
            "scaled gradients were compared": [CLIP_FIRST],
            "are not clipped": [(CLIP, "")],
            "clipped as a whole: 0.5 times": [HALF_LIMIT],
            "weights changed": [(STEP, OWN_STEP)],
            "is it ever taken out": [(UNSCALE, ""), (STEP + UPDATE, OWN_STEP)],
            "who updates it": [(UPDATE, "")],
            "never cleared": [(ZERO, "")],
            "for which dtype": [("torch.float16", "torch.bfloat16")],
            "stepped 0 times": [(STEP, "")],
            "it raised ValueError": [(CLIP, "    raise ValueError('x')\n")],
        },
    ),
}
