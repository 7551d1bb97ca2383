"""Bytes of one process where several share the weights, gradients and moments, by arithmetic."""

from __future__ import annotations

from labutils.memory.ledger import GRADIENTS, OPTIMIZER, PARAMETERS

# From which stage of ZeRO on a category is cut into one part per process.
CUT_FROM_STAGE = {OPTIMIZER: 1, GRADIENTS: 2, PARAMETERS: 3}


def sharded(static: dict[str, float], n_processes: int, stage: int) -> dict[str, float]:
    """Return the bytes by category of one process under ZeRO of a stage (0: every one has all).

    `static` are the bytes of one process alone. Categories that no stage cuts stay as they are:
    activations, for example. Not counted: what is gathered for a moment.
    Source: Rajbhandari et al. 2020 (arXiv 1910.02054). Raises ValueError for an unknown stage.
    """
    if stage not in (0, 1, 2, 3):
        raise ValueError(f"ZeRO has stages 1 to 3, and 0 for none; got {stage!r}")
    parts = {}
    for name, n_bytes in static.items():
        is_cut = stage >= CUT_FROM_STAGE.get(name, 4)
        parts[name] = n_bytes / n_processes if is_cut else n_bytes
    return parts
