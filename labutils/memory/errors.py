"""Is an error one that says out of memory, and what did it ask for?

Taught in 04, section 7.
"""

from __future__ import annotations

import re

import torch

from labutils.memory.ledger import readable_size

WORDS = (
    "can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "CUDA out of memory",
    "CUDA error: out of memory",
    "CUDA driver error: out of memory",
    "[CUDA]: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
)


def is_out_of_memory(error: BaseException) -> bool:
    """CUDA has an exception of its own; a CPU, drivers, cuBLAS and Triton say so in a
    RuntimeError's text.
    """
    ours = isinstance(error, (torch.OutOfMemoryError, MemoryError))
    return ours or (isinstance(error, RuntimeError) and any(text in str(error) for text in WORDS))


def short_message(error: BaseException) -> str:
    """Return what was asked for, and what was free if the error tells; else its first line."""
    text = str(error)
    asked = re.search(r"[Tt]ried to allocate ([\d.]+) (\w+)", text)
    free = re.search(r"([\d.]+ \w+ allowed);", text) or re.search(
        r"of which ([\d.]+ \w+) is( free)", text
    )
    if not asked:
        return (text.splitlines() or ["out of memory"])[0]
    amount = readable_size(int(asked[1])) if asked[2] == "bytes" else " ".join(asked.groups())
    return f"asked for {amount} more" + (f", {''.join(free.groups())}" if free else "")
