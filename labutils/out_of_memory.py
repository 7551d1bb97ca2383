"""What to say when memory runs out: how much was asked for, how much is free, and the cheapest ways out."""

from __future__ import annotations

import os
import re
import sys
import traceback
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from labutils.config import Config

GIB = 2**30
WAYS = 3
ROOMY = 2  # times a CPU run's bytes: where so much is free, what the system's allocator keeps does not matter
WORDS = (
    "can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "CUDA out of memory",
    "CUDA error: out of memory",
    "CUDA driver error: out of memory",
    "[CUDA]: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
)


def recognised(error: BaseException) -> bool:
    """CUDA has an exception of its own; a CPU, drivers, cuBLAS and Triton say so in a RuntimeError's text."""
    ours = isinstance(error, (torch.OutOfMemoryError, MemoryError))
    return ours or (isinstance(error, RuntimeError) and any(text in str(error) for text in WORDS))


def said(error: BaseException) -> str:
    """Return what an error says in short: what was asked for, and what was free if it tells; else its first line."""
    text = str(error)
    asked = re.search(r"[Tt]ried to allocate ([\d.]+) (\w+)", text)
    free = re.search(r"([\d.]+ \w+ allowed);", text) or re.search(r"of which ([\d.]+ \w+) is( free)", text)
    if not asked:
        return (text.splitlines() or ["out of memory"])[0]
    amount = _amount(int(asked[1])) if asked[2] == "bytes" else " ".join(asked.groups())
    return f"asked for {amount} more" + (f", {''.join(free.groups())}" if free else "")


def _amount(n_bytes: float) -> str:
    return f"{n_bytes / GIB:,.2f} GiB" if n_bytes >= GIB else f"{n_bytes / 2**20:.0f} MiB"


def spare_host_memory(config: Config, where: torch.device) -> bool:
    """On a CPU, let freed blocks lie idle only if a resolved config takes little of what is free; return if it is much.

    By the closed form. See `memory.return_freed_blocks`.
    """
    from labutils.device import free_bytes
    from labutils.formula import closed_form, on_a_cpu
    from labutils.memory import MALLOC, MMAP_THRESHOLD, return_freed_blocks

    if where.type != "cpu":
        return False
    near = ROOMY * closed_form(on_a_cpu(config)).peak_bytes > free_bytes(where)
    if near != (os.environ.get(MALLOC) == str(MMAP_THRESHOLD)):
        return_freed_blocks(near)
    return near


def require_host_memory(config: Config, where: torch.device) -> None:
    """Raise torch.OutOfMemoryError if a config, resolved for a CPU, has no room: Linux would kill the whole process.

    By the ledger, which takes seconds. For a CPU only: CUDA's allocator says no in time.
    """
    from labutils.device import free_bytes
    from labutils.memory import free_memory
    from labutils.predict import needed_gib, predict_memory

    needed = needed_gib(predict_memory(config, "cpu"), "cpu") * GIB
    free_memory()
    if needed > (free := free_bytes(where)):
        raise torch.OutOfMemoryError(
            f"Tried to allocate {_amount(needed)} (predicted, not tried), of which {_amount(free)} is free"
        )


def ways_out(config: Config, where: torch.device) -> str:
    """Return the WAYS cheapest changes with each of which, as predicted, a config runs in the memory that is free now.

    Where no single one is enough, the cheapest combination. What the allocator cannot use counts: fragmentation.
    """
    from labutils.cards import CONTEXT_GIB
    from labutils.device import free_bytes
    from labutils.solver import enough_alone, fit

    on_card = where.type == "cuda"
    limit = config.memory_limit_gib if on_card else 0
    free = min(free_bytes(where) / GIB, limit or float("inf"))  # of a card: its context is there already
    budget, card = (free + CONTEXT_GIB, "this") if on_card else (free, "cpu")
    try:
        found = enough_alone(config, budget, card)[:WAYS] or [fit(config, budget, card)]
    except Exception as error:  # a hint must not cost what it is a hint for
        return f"Ways out: a smaller micro_batch_size or seq_len (the ledger cannot tell: {type(error).__name__})"
    needed = _amount((found[0].needed_gib - (CONTEXT_GIB if on_card else 0)) * GIB)
    if not found[0].changes and found[0].fits(budget):
        return (
            f"Alone {config.name} needs {needed} (predicted), and {_amount(free * GIB)} are free now. So this was more "
            "than that run, or other tensors were alive beside it. Delete what you no longer need (in a notebook: "
            "restart the kernel), or make what ran smaller"
        )
    if not found[0].changes:
        return f"None of the changes that the ledger tries makes it fit {_amount(free * GIB)}: take a smaller model"
    options = "; or ".join(", ".join(f"{key}: {value}" for key, value in one.changes.items()) for one in found)
    if not found[0].fits(budget):
        return (
            f"Nothing makes it fit the {_amount(free * GIB)} that are free; least, {needed}, is needed with {options}"
        )
    return f"{_amount(free * GIB)} are free now. Cheapest ways out (predicted): {options}"


def explain_in_notebooks(on: bool = True) -> None:
    """Let IPython answer an error that says out of memory in a few lines, and give back what the cell has allocated.

    The traceback, which IPython keeps, loses its frames' variables, so that the next cell finds the memory free. If the
    notebook has a `config`, its ways out are named. `on=False`: IPython as it is. Does nothing outside IPython.
    """
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    if shell is not None:
        shell.set_custom_exc((RuntimeError, MemoryError) if on else (), _answer if on else None)


def _answer(shell: Any, kind: type, error: BaseException, tb: Any, tb_offset: int | None = None) -> None:
    from labutils.config import Config
    from labutils.device import choose_device
    from labutils.memory import free_memory

    if not recognised(error):
        shell.showtraceback((kind, error, tb), tb_offset=tb_offset)
        return
    frames = [f for f in traceback.extract_tb(tb) if not f.filename.endswith("interactiveshell.py")]
    deepest = [f for f in frames if "ipython-input" in f.filename or "ipykernel_" in f.filename][-1:] or frames[:1]
    lines = [f"Out of memory: {said(error)}"]
    lines += [f"in line {f.lineno} of {'the cell' if f.name == '<module>' else f.name}: {f.line}" for f in deepest]
    sys.last_value = error
    free_memory()
    if isinstance(config := shell.user_ns.get("config"), Config):
        lines.append(f"For `config` ({config.name}): {ways_out(config, choose_device())}")
    error._render_traceback_ = lambda: lines
    shell.showtraceback((kind, error, tb), tb_offset=tb_offset)
