"""Answers to the exercises of notebook 02, right and wrong."""

from itertools import islice

import torch
import torch.nn.functional as F

from tests.solutions.answers import Solution, broken
from tests.solutions.notebook_01 import (
    CLIP,
    HALF_WEIGHTS,
    OWN_STEP,
    SCALED_LIMIT,
    STEP,
    UNSCALE,
    UPDATE,
    ZERO,
)

NOTEBOOK = "02-Gradient_Accumulation.ipynb"
SECRETS = "line 9"  # what neither hints nor the notebook may say


def amp_window(model, micro_batches, optimizer, scaler, max_grad_norm):
    n_rows = sum(len(y) for _, y in micro_batches)
    for x, y in micro_batches:
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.mse_loss(model(x).float(), y, reduction="sum") / n_rows
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)


def accumulation_epoch(model, batches, optimizer, grad_accum_steps, max_grad_norm):
    losses, batches = [], iter(batches)
    while window := list(islice(batches, grad_accum_steps)):
        n_rows = sum(len(y) for _, y in window)
        window_loss = 0.0
        for x, y in window:
            loss = F.mse_loss(model(x), y, reduction="sum") / n_rows
            loss.backward()
            window_loss += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(window_loss)
    return losses


SUM = ', reduction="sum") / n_rows'  # in both functions
SCALE = "        scaler.scale(loss).backward()\n"
LOOP = "    for x, y in micro_batches:\n"
ONE_AUTOCAST = [  # an object, entered again for each micro-batch
    (LOOP, '    autocast = torch.autocast("cpu", dtype=torch.float16)\n' + LOOP),
    ('with torch.autocast("cpu", dtype=torch.float16):', "with autocast:"),
]
ADDED = [  # one backward pass for the sum of all losses
    (LOOP, "    losses = []\n" + LOOP),
    (SCALE, "        losses.append(loss)\n    scaler.scale(sum(losses)).backward()\n"),
]
WHOLE = "in [map(torch.cat, zip(*micro_batches))]:"
DUMMIES = "    for x, _ in list(micro_batches):\n        model(x)\n"
FIRST_ONLY = ("float16):", "float16, enabled=x is micro_batches[0][0]):")
TOO_HIGH = '    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)\n'
WITHOUT_GRAPH = "        with torch.no_grad():\n            model(x)\n"
OUTER = UNSCALE + CLIP + STEP + UPDATE + ZERO
WINDOWS = "    while window := list(islice(batches, grad_accum_steps)):\n"
BACKWARD = "            loss.backward()\n"
EPOCH_CLIP = "        torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)\n"
EPOCH_STEP = "        optimizer.step()\n"
EPOCH_ZERO = "        optimizer.zero_grad()\n"
STREAM = "iter(batches)"
LOGGED = "window_loss += loss.item()"


def each_time(*lines):
    """Return the change that also runs lines for each micro-batch."""
    return SCALE, SCALE + "".join("    " + line for line in lines)


def epoch(*changes):
    return broken(accumulation_epoch, *changes)


def windows_end_at(first, second):
    windows = f"(batches[:{first}], batches[{first}:{second}], batches[{second}:])"
    return epoch((STREAM, "batches"), (WINDOWS, f"    for window in {windows}:\n"))


MEAN_OF_MEANS = (SUM, ") / len(window)")
# {a judge: an epoch that it alone finds wrong}
ALONE = {
    "clipping": epoch((EPOCH_CLIP, "")),
    "unequal lengths": epoch(MEAN_OF_MEANS),
    "logged losses": epoch((LOGGED, "pass")),
    "step count": epoch((EPOCH_STEP, "")),
}

SOLUTIONS = {
    "amp_window": Solution(
        right=[
            amp_window,
            broken(amp_window, (SUM, ") * len(y) / n_rows")),
            broken(amp_window, (SUM, ', reduction="sum")'), ("(loss)", "(loss / n_rows)")),
            broken(amp_window, (LOOP, ZERO + LOOP), (UPDATE + ZERO, UPDATE)),
            broken(amp_window, (UNSCALE + CLIP, SCALED_LIMIT)),
            broken(amp_window, *ONE_AUTOCAST),
            broken(amp_window, (LOOP, LOOP + WITHOUT_GRAPH)),
            broken(amp_window, (LOOP, LOOP.replace("micro_batches", "reversed(micro_batches)"))),
        ],
        broken={
            "21 rows went through the model at once": [("in micro_batches:", WHOLE)],
            "the memory of the full batch": [(LOOP, DUMMIES + LOOP), ("in micro_batches:", WHOLE)],
            "the graphs of both are alive": ADDED,
            "the layer gave torch.float32": [FIRST_ONLY],
            "a number that belongs to one window": [("/ n_rows", "/ 21")],
            "weights also change outside": [(UPDATE, UPDATE + HALF_WEIGHTS)],
            "backward runs under autocast": [(SCALE, "    " + SCALE)],
            "the gradient grows with their number": [(SUM, ")")],
            "a mean of means": [(SUM, ") / len(micro_batches)")],
            "never divided": [(SUM, ', reduction="sum")')],
            "shrunk or cleared": [each_time(UNSCALE, UPDATE), (OUTER, CLIP + OWN_STEP + ZERO)],
            "with its own mean": [(SUM, ")"), (SCALE, "    " + ZERO + SCALE)],
            "more than once": [each_time(UNSCALE, UPDATE)],
            "it raised RuntimeError": [each_time(UNSCALE)],
            "clipped as a whole: 1.1": [(SCALE, "        if len(y) > 1:\n    " + SCALE)],
            "stepped 4 times": [each_time(UNSCALE, CLIP, STEP, UPDATE, ZERO), (OUTER, "")],
            "clipping still stands in the loop": [(CLIP, ""), each_time(CLIP)],
            "by how many rows": [(SUM, ', reduction="sum") / len(micro_batches)')],
            "the scaler saw an overflow": [(LOOP, TOO_HIGH + LOOP)],
            "clipped after every": [
                each_time(CLIP.replace("max_grad_norm)", "256 * max_grad_norm)"))
            ],
        },
    ),
    "break_one": Solution(
        given=("unequal lengths",),
        right=[
            ALONE["unequal lengths"],
            epoch(("sum(len(y) for _, y in window)", "len(window[0][1]) * len(window)")),
            epoch((BACKWARD, "            len(y) == 1 or loss.backward()\n")),
        ],
        wrong={
            "all five judges pass": accumulation_epoch,
            "as if it were full": epoch((SUM, ") / grad_accum_steps")),
            "not alone. equal lengths": epoch((SUM, ', reduction="sum")')),
            "last, shorter": epoch((STREAM, "iter(batches[:6])")),
            "step 2: older gradients": epoch((EPOCH_ZERO, "")),
            "unequal lengths still passes. What fails is clipping": ALONE["clipping"],
            "last micro-batch only": epoch((LOGGED, "window_loss = loss.item() * len(window)")),
            "not the means over all": ALONE["logged losses"],
            "one loss per optimizer step": epoch(("    return losses\n", "")),
            "could not be judged. step count: the optimizer never": ALONE["step count"],
            "10 times": epoch((BACKWARD, BACKWARD + "    " + EPOCH_STEP)),
            "counting starts at 0": windows_end_at(1, 4),
        },
    ),
}
