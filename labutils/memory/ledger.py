"""The ledger of a training step: bytes by category, at the peak of each phase.

Taught in 04, section 1.
"""

from __future__ import annotations

import math

import pandas as pd
from pydantic import BaseModel, ConfigDict

from labutils.config.card import CONTEXT_GIB

MIB = 2**20
GIB = 2**30
FROZEN = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")


def mib(n_bytes: float) -> float:
    """Return bytes in MiB, 1024² bytes each."""
    return n_bytes / MIB


def gib(n_bytes: float) -> float:
    """Return bytes in GiB, 1024³ bytes each."""
    return n_bytes / GIB


def readable_size(n_bytes: float, digits: int = 0) -> str:
    """Return bytes in GiB, or in MiB with so many digits where they are less than one."""
    return f"{gib(n_bytes):,.2f} GiB" if n_bytes >= GIB else f"{mib(n_bytes):.{digits}f} MiB"


def at_least(n_bytes: float) -> str:
    """Return bytes in GiB, rounded up: no card of so much is too small."""
    return f"{math.ceil(100 * gib(n_bytes)) / 100:.2f}"


class MemoryLedger(BaseModel):
    """Bytes of one optimizer step, measured or predicted: by category, at each phase's peak."""

    model_config = FROZEN

    phases: dict[str, dict[str, int]]
    method: str
    # CUDA: what the caching allocator holds, more than is allocated
    reserved_bytes: int | None = None
    reserved_expandable_bytes: int | None = None  # the same with expandable segments, predicted
    # of the smallest card on which it completes, context included, predicted
    needed_bytes: int | None = None
    needed_expandable_bytes: int | None = None  # the same with expandable segments
    # (phase, [[position, bytes by category, …], …]) in order
    timeline: list[tuple[str, list[list[int]]]] = []

    def __str__(self) -> str:
        """A table of MiB, the peak, and what the allocator takes for it if that is known."""
        table = pd.DataFrame(self.phases) / MIB
        table.loc["total"] = table.sum()
        lines = [f"MiB allocated at each phase's peak, {self.method}", table.round(1).to_string()]
        peak = readable_size(self.peak_bytes, digits=1)
        lines += ["", f"peak {peak} allocated, in the {self.peak_phase} phase"]
        if self.needed_bytes is not None:
            figures = self.reserved_bytes, self.reserved_expandable_bytes
            plain, grown = (readable_size(n, digits=1) for n in figures)
            needed = f"{at_least(self.needed_bytes)} GiB"
            if self.needed_expandable_bytes != self.needed_bytes:
                needed += f", or {at_least(self.needed_expandable_bytes)} with them"
            lines += [
                f"torch's allocator reserves {plain} in three steps, {grown} with expandable",
                f"segments; a card needs {needed} ({CONTEXT_GIB} for CUDA and 2 % assumed)",
            ]
        return "\n".join(lines)

    @property
    def peak_phase(self) -> str:
        """The phase in which the step's peak falls."""
        return max(self.phases, key=lambda phase: sum(self.phases[phase].values()))

    @property
    def categories(self) -> dict[str, int]:
        """Bytes by category at the peak."""
        return self.phases[self.peak_phase]

    @property
    def peak_bytes(self) -> int:
        """Bytes allocated at the peak."""
        return sum(self.categories.values())

    @property
    def peak_mib(self) -> float:
        """`peak_bytes` in MiB."""
        return mib(self.peak_bytes)

    @property
    def peak_gib(self) -> float:
        """`peak_bytes` in GiB."""
        return gib(self.peak_bytes)


PARAMETERS, GRADIENTS, OPTIMIZER = "parameters", "gradients", "optimizer state"
# The other categories say when a tensor was made: in the forward pass, in the loss, after it (or
# all three).
ACTIVATIONS, CAST_WEIGHTS, LOGITS, TEMPORARIES = (
    "activations",
    "cast weights",
    "logits and loss",
    "temporaries",
)
KEPT_AND_TEMPORARY = "activations and temporaries"
# in the method of a compiled step that is counted as if it were not
NOT_COMPILED = ", not compiled"
# on CUDA: what cuBLAS keeps; what blocks are too large
WORKSPACES, ROUNDING = (
    "library workspaces",
    "rounding up",
)
CATEGORY_OF_PHASE = {"forward": ACTIVATIONS, "loss": LOGITS}
