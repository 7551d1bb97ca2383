"""Answers to the exercises of notebook 02, right and wrong.

This folder can be removed without breaking the course.
"""

from itertools import islice

import torch
import torch.nn.functional as F

from tests.solutions.answers import Solution, broken

NOTEBOOK = "02-Gradient_Accumulation.ipynb"
SECRETS = r"0\.8145|14\.9\b|0\.95 ?\*\* ?4"  # what neither hints nor the notebook may say

FLOOR_GIB = 16e9 / 2**30  # weights, gradients and two moments, 4 bytes each, of 10⁹ parameters
BETA2 = 0.95**4


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
UNSCALE = "    scaler.unscale_(optimizer)\n"
CLIP = "    torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)\n"
STEP = "    scaler.step(optimizer)\n"
OWN_STEP = "    optimizer.step()\n"
UPDATE = "    scaler.update()\n"
ZERO = "    optimizer.zero_grad(set_to_none=True)\n"


def inner(*lines):
    """Indent lines, so that they run for each micro-batch."""
    return "".join("    " + line for line in lines)


def window(*changes):
    return broken(amp_window, *changes)


def window_at_once(model, micro_batches, optimizer, scaler, max_grad_norm):
    x, y = (torch.cat(parts) for parts in zip(*micro_batches, strict=True))
    amp_window(model, [(x, y)], optimizer, scaler, max_grad_norm)


WRONG_WINDOWS = [
    (window((SUM, ")")), "the gradient grows with their number"),
    (window((SUM, ") / len(micro_batches)")), "a mean of means"),
    (window((SUM, ', reduction="sum")')), "never divided"),
    (
        window(
            (UNSCALE + CLIP + STEP + UPDATE, CLIP + OWN_STEP),
            (SCALE, SCALE + inner(UNSCALE, UPDATE)),
        ),
        "only the last",
    ),
    (window((SCALE, SCALE + inner(UNSCALE, UPDATE))), "more than once"),
    (window((SCALE, SCALE + inner(UNSCALE))), "it raised RuntimeError"),
    (window((SCALE, inner(ZERO) + SCALE)), "only the last micro-batch"),
    (
        window(
            (SCALE, SCALE + inner(UNSCALE, CLIP, STEP, UPDATE, ZERO)),
            (UNSCALE + CLIP + STEP + UPDATE, ""),
        ),
        "4 times",
    ),
    (window((UNSCALE + CLIP, CLIP + UNSCALE)), "far too short"),
    (window((UNSCALE, "")), "far too short"),
    (window((CLIP, "")), "longer than max_grad_norm"),
    (window((STEP, OWN_STEP)), "The whole window must be skipped"),
    (window((UNSCALE, ""), (STEP + UPDATE, OWN_STEP)), "is the scale ever taken out"),
    (window((UPDATE, "")), "updated once"),
    (window((ZERO, "")), "never cleared"),
    (window(("dtype=torch.float16", "enabled=False")), "is autocast on"),
    (window((STEP, "")), "stepped 0 times"),
    (window((UPDATE, UPDATE + "    raise ValueError('x')\n")), "it raised ValueError"),
    (window_at_once, "full batch"),
]

WINDOWS = "    while window := list(islice(batches, grad_accum_steps)):\n"
SIX_BATCHES = "    batches = list(batches)[:6]\n    batches = iter(batches)\n"
BACKWARD = "            loss.backward()\n"
EPOCH_CLIP = "        torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)\n"
EPOCH_STEP = "        optimizer.step()\n"
EPOCH_ZERO = "        optimizer.zero_grad()\n"
AS_IF_FULL = ', reduction="sum") / sum(len(y) for _, y in window) * len(window) / grad_accum_steps'


def epoch(*changes):
    return broken(accumulation_epoch, *changes)


def tail_not_clipped(model, batches, optimizer, n, max_grad_norm):
    losses = []
    for start in range(0, len(batches), n):
        is_full = start + n <= len(batches)
        limit = max_grad_norm if is_full else 1e9
        losses += accumulation_epoch(model, batches[start : start + n], optimizer, n, limit)
    return losses


def tail_not_cleared(model, batches, optimizer, n, max_grad_norm):
    """The last window steps, and its gradients stay for the next epoch."""
    clear = optimizer.zero_grad
    n_full = len(batches) // n * n
    losses = accumulation_epoch(model, batches[:n_full], optimizer, n, max_grad_norm)
    optimizer.zero_grad = lambda *_, **__: None
    try:
        return losses + accumulation_epoch(model, batches[n_full:], optimizer, n, max_grad_norm)
    finally:
        optimizer.zero_grad = clear


WRONG_EPOCHS = [
    (epoch((SUM, ")")), "the gradient grows with their number"),
    (epoch((SUM, ") / len(window)")), "a mean of means"),
    (epoch((SUM, ', reduction="sum")')), "never divided"),
    (epoch((SUM, AS_IF_FULL)), "as if it"),
    (epoch((WINDOWS, SIX_BATCHES + WINDOWS)), "last, shorter"),
    (epoch((EPOCH_ZERO, "")), "earlier window"),
    (epoch((EPOCH_CLIP, "")), "not clipped"),
    (epoch((BACKWARD, BACKWARD + "    " + EPOCH_CLIP)), "clipped after every micro-batch"),
    (epoch(("loss += loss.item()", "loss = loss.item() * n_rows / len(y)")), "micro-batch only"),
    (epoch(("window_loss += loss.item()", "window_loss = loss.item()")), "not the means over all"),
    (epoch(("    return losses\n", "")), "one loss per optimizer step"),
    (epoch((EPOCH_STEP, "")), "never stepped"),
    (epoch((BACKWARD, BACKWARD + "    " + EPOCH_STEP)), "windows are there"),
    (epoch(("iter(batches)", "iter([*batches[:1], *batches])")), "wrong micro-batches"),
    (tail_not_clipped, "step 3 of epoch 1, with clipping: the gradients are not clipped"),
    (tail_not_cleared, "Were the gradients of the last window cleared"),
]

SOLUTIONS = [
    Solution("amp_window", right=[amp_window], wrong=WRONG_WINDOWS),
    Solution("accumulation_epoch", right=[accumulation_epoch], wrong=WRONG_EPOCHS),
    Solution(
        "floor_gib",
        given=(1e9,),
        right=[FLOOR_GIB, 14.9],
        wrong=[
            (16, "right in GB"),
            (12e9 / 2**30, "gradients are missing"),
            (4e9 / 2**30, "what does AdamW remember"),
            (8e9 / 2**30, "what does AdamW remember"),
            (6, "too low"),
            (12.5, "too low"),
            (13, "too low"),
            (14.4, "too low"),
            (40, "too high"),
            ("x", "a number of GiB"),
            ("14.9", "a number of GiB"),
            (float("nan"), "a number of GiB"),
            (-1, "a number of GiB"),
            (True, "a number of GiB"),
        ],
    ),
    Solution(
        "beta2",
        given=(0.95, 4),
        right=[BETA2, 0.815],
        wrong=[
            (0.95, "unchanged"),
            (0.95**0.25, "other direction"),
            (1 - 0.05 / 4, "other direction"),
            (0.8, "first-order"),
            (0.95 / 4, "not a length"),
            (0.5, "compare half-lives"),
        ],
    ),
]
