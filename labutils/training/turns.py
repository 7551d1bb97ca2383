"""Times that can be compared: several calls run in turns, round after round."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch


def time_in_turns(
    calls: Mapping[str, Callable[[], object]], device: torch.device, rounds: int = 7
) -> dict[str, list[float]]:
    """Return {name: milliseconds of each round}: in a round each call runs once, in order.

    So a slow moment of the machine does not hit one call alone, and numbers of one round are pairs
    for `paired_difference`. One round more runs before the others, and is not timed. A GPU is
    waited for after each call. Raises ValueError without rounds.
    """
    if rounds < 1:
        raise ValueError(f"at least one round must be timed; got {rounds}")
    found: dict[str, list[float]] = {name: [] for name in calls}
    for i in range(rounds + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            if i:
                found[name].append(1000 * (time.perf_counter() - start))
    return found
