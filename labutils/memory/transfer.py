"""How fast a GPU's copies from the host are, from pageable and from pinned memory."""

from __future__ import annotations

import torch

from labutils.machine import cuda_seconds


def copy_gb_per_s(n_bytes: int, device: torch.device, repeats: int = 5) -> dict[str, float]:
    """Return {"pageable", "pinned": 10^9 bytes per second} of a copy from host to device.

    The fastest of `repeats`; pinning itself is not timed. Empty on a CPU, which copies nothing.
    """
    if device.type != "cuda":
        return {}
    pageable = torch.ones(n_bytes, dtype=torch.uint8)
    sources = {"pageable": pageable, "pinned": pageable.pin_memory()}
    target = torch.empty(n_bytes, dtype=torch.uint8, device=device)
    found = {}
    for name, source in sources.items():

        def copy(source: torch.Tensor = source) -> None:
            target.copy_(source, non_blocking=True)

        copy()
        found[name] = n_bytes / min(cuda_seconds(copy, 3) for _ in range(repeats)) / 1e9
    return found
