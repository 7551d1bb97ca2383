"""Answers to the exercises of notebook 01, right and wrong."""

import torch
import torch.nn.functional as F

from tests.solutions.answers import Solution, broken

NOTEBOOK = "01-Mixed_Precision.ipynb"
SECRETS = r"\"B\", \"C\"|\"C\", \"B\""  # what neither hints nor the notebook may say


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
AUTOCAST = '    with torch.autocast("cpu", dtype=torch.float16):\n'
LOSS = "        loss = F.mse_loss(model(x).float(), y)\n"
IF_SCALE_STAYS = "    if scaler.get_scale() == 256:\n        optimizer.zero_grad()\n"
HALF_WEIGHTS = "    [p.data.copy_(p.half()) for p in model.parameters()]\n"
SCALED_LIMIT = CLIP.replace("max_grad_norm)", "max_grad_norm * scaler.get_scale())")
OWN_GRADIENTS = """    parameters = list(model.parameters())
    for p, p.grad in zip(parameters, torch.autograd.grad(scaler.scale(loss), parameters)):
        pass
"""
HALF_LIMIT = (CLIP, CLIP.replace("max_grad_norm)", "max_grad_norm / 2)"))

SOLUTIONS = {
    "amp_step": Solution(
        right=[
            amp_step,
            broken(amp_step, (ZERO, "    model.zero_grad()\n")),
            broken(amp_step, (SCALE, "    optimizer.zero_grad()\n" + SCALE), (ZERO, "")),
            broken(amp_step, (UNSCALE + CLIP, SCALED_LIMIT)),  # scaler.step unscales
            broken(amp_step, (SCALE, OWN_GRADIENTS)),
            broken(
                amp_step, (AUTOCAST, "    with torch.no_grad():\n        model(x)\n" + AUTOCAST)
            ),
            broken(amp_step, (AUTOCAST, "    model(x)\n" + AUTOCAST)),  # goes nowhere
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
            "cleared before the step": [(STEP, ZERO + STEP)],
            "stored weights also change": [(STEP, STEP + HALF_WEIGHTS)],
            "weights also change outside the optimizer's step": [(STEP, HALF_WEIGHTS + STEP)],
            "backward runs under autocast": [(SCALE, "    " + SCALE)],
            "after an overflow inf stays": [(ZERO, IF_SCALE_STAYS)],
            "after a clean step the scale went from 256 to 128": [
                (UPDATE, "    scaler.update(scaler.get_scale() / 2)\n")
            ],
            "for which dtype": [("torch.float16", "torch.bfloat16")],
            "stepped 0 times": [(STEP, "")],
            "it raised ValueError": [(CLIP, "    raise ValueError('x')\n")],
        },
    ),
}
