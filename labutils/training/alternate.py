"""Variants are timed in turns, so that what slows a machine for a while slows all of them."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping

import torch


def alternate(
    variants: Mapping[str, Callable[[], object]],
    rounds: int,
    device: torch.device,
    passes: int = 1,
) -> dict[str, list[float]]:
    """Return {name: the milliseconds of each round}, after one pass that does not count.

    A pass runs every variant once, in a shuffled order, the same in each call: no variant always
    follows the same one, and none runs twice in a row more often than the others. A round keeps the
    fastest of its passes, since what disturbs a machine makes it slower, never faster. On a CUDA
    device the end is awaited. The numbers of a round are pairs for `paired_ratio`. Raises
    ValueError if there is no round, or no pass.
    """
    if rounds < 1 or passes < 1:
        raise ValueError(f"at least one round of one pass is timed; got {rounds} of {passes}")
    times: dict[str, list[float]] = {name: [] for name in variants}
    names, shuffled = list(variants), random.Random(0)
    for number in range(rounds * passes + 1):
        shuffled.shuffle(names)
        for name in names:
            milliseconds = _timed_ms(variants[name], device)
            if number:
                times[name].append(milliseconds)
    for name, series in times.items():
        starts = range(0, len(series), passes)
        times[name] = [min(series[start : start + passes]) for start in starts]
    return times


def _timed_ms(variant: Callable[[], object], device: torch.device) -> float:
    _wait(device)
    start = time.perf_counter()
    variant()
    _wait(device)
    return (time.perf_counter() - start) * 1000


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
