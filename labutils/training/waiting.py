"""How long a loop waits for its data, and how long it computes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch


def waits(
    batches: Iterator[Any], step: Callable[[Any], object], n: int, device: torch.device
) -> tuple[list[float], list[float]]:
    """Return (ms of waiting for each of `n` batches, ms of each step), after one of both.

    On a CUDA device the end of a step is awaited. Raises StopIteration if the batches end.
    """
    waiting, computing = [], []
    for _ in range(n + 1):
        begin = time.perf_counter()
        batch = next(batches)
        there = time.perf_counter()
        step(batch)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        waiting.append(1e3 * (there - begin))
        computing.append(1e3 * (time.perf_counter() - there))
    return waiting[1:], computing[1:]
