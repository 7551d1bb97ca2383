"""Right answers to the exercises of notebook 02.

This folder can be removed without breaking the course.
"""

from itertools import islice

import torch
import torch.nn.functional as F

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
