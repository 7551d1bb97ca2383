"""Answers to the exercises of notebook 02, right and wrong.

This folder can be removed without breaking the course.
"""

from itertools import islice

import torch
import torch.nn.functional as F

from tests.solutions.answers import Solution, broken

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


def epoch(*changes):
    return broken(accumulation_epoch, *changes)


ONLY_UNEQUAL = [
    epoch((SUM, ") / len(window)")),  # the mean of means
    epoch(("sum(len(y) for _, y in window)", "len(window[0][1]) * len(window)")),
]

WRONG_BREAKS = [
    (accumulation_epoch, "still right"),
    (epoch((SUM, ")")), "the gradient grows with their number"),
    (epoch((SUM, ") / grad_accum_steps")), "as if it were full"),
    (epoch((SUM, ', reduction="sum")')), "not alone. equal lengths"),
    (epoch((WINDOWS, SIX_BATCHES + WINDOWS)), "last, shorter"),
    (epoch((EPOCH_ZERO, "")), "not alone"),
    (epoch((EPOCH_CLIP, "")), "unequal lengths still passes. What fails is clipping"),
    (epoch((BACKWARD, BACKWARD + "    " + EPOCH_CLIP)), "clipped after every micro-batch"),
    (
        epoch(("window_loss += loss.item()", "window_loss = loss.item() * len(window)")),
        "last micro",
    ),
    (epoch(("window_loss += loss.item()", "window_loss = loss.item()")), "not the means over all"),
    (epoch(("    return losses\n", "")), "one loss per optimizer step"),
    (
        epoch((EPOCH_STEP, "")),
        "unequal lengths could not be judged. step count: the optimizer never",
    ),
    (epoch((BACKWARD, BACKWARD + "    " + EPOCH_STEP)), "windows are there"),
    (epoch(("iter(batches)", "iter([*batches[:1], *batches])")), "wrong micro-batches"),
    (epoch((EPOCH_STEP, "        raise ValueError('x')\n")), "it raised ValueError"),
]

RUN = {"n": 4, "m": 8, "rate": 2e-3, "tokens": 8192, "seeds": [0, 1, 2, 3, 4]}


def runs(**changes):
    """Return 4 × 8, and a second run that differs in `changes`."""
    return RUN, RUN | changes


SOLUTIONS = [
    Solution("amp_window", right=[amp_window], wrong=WRONG_WINDOWS),
    Solution("break_one", given=("unequal lengths",), right=ONLY_UNEQUAL, wrong=WRONG_BREAKS),
    Solution(
        "accumulation_control",
        right=[runs(n=1, m=32), (runs(n=1, m=32)[1], RUN)],
        wrong=[
            (runs(n=1), "the size of the batch could be the cause"),
            (runs(), "accumulate equally"),
            (runs(n=8, m=4), "both runs accumulate. The control"),
            (runs(n=1, m=32, rate=1e-3), "rates differ"),
            (runs(n=1, m=32, tokens=4 * 8192), "unequal numbers of tokens"),
            (runs(n=1, m=32, seeds=[5, 6, 7, 8, 9]), "no pairs"),
            ((RUN | {"seeds": [0]}, RUN | {"seeds": [0], "n": 1, "m": 32}), "too few seeds"),
            ((RUN,), "two runs"),
            ("AB", "two runs"),
            (3, "two runs"),
        ],
    ),
    Solution(
        "find_bug",
        right=[9],
        wrong=[
            (3, "here the error shows"),
            (6, "right at unequal lengths"),
            (10, "limits the whole sum"),
            (12, "would erase"),
            (0, "a line number from 1 to 13"),
            (True, "a line number"),
            ("9", "a line number"),
        ],
    ),
    Solution(
        "accumulation_request",
        right=["A", "a"],
        wrong=[
            ("B", "one sequence already"),
            ("C", "at any micro-batch"),
            ("AB", "one of A, B, C"),
            (1, "one of A, B, C"),
        ],
    ),
]
