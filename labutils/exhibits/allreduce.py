"""The exhibit `allreduce`: what workers send to average their gradients, and how it is rounded."""

from __future__ import annotations

from labutils.exhibits import allreduce_data
from labutils.exhibits.exhibit import Exhibit, make_exhibit


def allreduce(n_workers: int = 8, number_format: str = "BF16") -> Exhibit:
    """Return an exhibit: what `n_workers` send to average gradients, and how the mean is rounded.

    The first call takes gradients of 64 sequences: seconds. 2 to 64 workers, a power of two.
    """
    if n_workers not in allreduce_data.WORKERS:
        raise ValueError(f"take one of {allreduce_data.WORKERS} workers, not {n_workers}")
    alt = "The error of the mean over 2 to 64 workers in a ring: a line each for FP32, BF16, FP16."
    return make_exhibit(
        "allreduce",
        "The exchange of gradients",
        "Choose workers, a model, a format, a link. See the bytes, the least time, the rounding.",
        allreduce_data.data(n_workers, number_format),
        allreduce_data.still(),
        alt,
    )
