"""What is left of a step's bytes and launches where a compiler fuses neighbouring operations.

Between two matrix products (or fused attentions) all operations become one kernel. It reads what
was made outside, and writes what others need. What a backward kernel would read of the forward
pass's insides it computes again, from what those were made of. That is what TorchInductor does,
but for its exceptions: https://dev-discuss.pytorch.org/t/min-cut-optimal-recomputation.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from labutils.memory.kinds import ATTENTION_KINDS, PRODUCT_KINDS
from labutils.memory.ledger import GRADIENTS, OPTIMIZER
from labutils.prediction.work import Work

if TYPE_CHECKING:
    from labutils.prediction.trace import Segment

OPTIMIZER_PHASE, BACKWARD_PHASE = "optimizer", "backward"


class Chain(NamedTuple):
    """Neighbours in one phase. What is not fused is alone in its chain."""

    phase: str
    is_fused: bool
    works: list[Work]


def fuse(segments: Iterable[Segment]) -> None:
    """Write into each operation's work what is left of it in a compiled forward and backward pass.

    The optimizer's operations stay as they are: its step is not compiled.
    """
    chains = _chains(segments)
    kept = _kept(chains)
    made_of: dict[int, dict[int, int]] = {}  # of what is not kept: {storage that is: bytes}
    for chain in chains:
        if chain.is_fused:
            _share_out(chain.works, kept, made_of)
    for chain in chains:
        for work in chain.works:
            categories = {storage.category for storage, _ in work.writes if storage is not None}
            work.only_once = not work.reads and categories == {OPTIMIZER}
            work.reads, work.writes = [], []


def _chains(segments: Iterable[Segment]) -> list[Chain]:
    chains = []
    for segment in segments:
        chain = None
        for work in (event.work for event in segment.events if event.work):
            work.fused_bytes, work.fused_calls = work.n_bytes, work.calls
            is_product = work.kind in (*PRODUCT_KINDS, *ATTENTION_KINDS)
            is_fused = segment.phase != OPTIMIZER_PHASE and not is_product
            if not (is_fused and chain and chain.is_fused):
                chain = Chain(segment.phase, is_fused, [])
                chains.append(chain)
            chain.works.append(work)
    return chains


def _share_out(works: list[Work], kept: set[int], made_of: dict[int, dict[int, int]]) -> None:
    """Divide what a fused kernel moves among its operations; the first has its launch."""
    seen = {id(storage) for work in works for storage, _ in work.writes}  # or read already
    for i, work in enumerate(works):
        needed: dict[int, int] = {}
        for storage, n_bytes in work.reads:
            needed |= made_of.get(id(storage), {id(storage): n_bytes})
        work.fused_bytes = sum(n_bytes for key, n_bytes in needed.items() if key not in seen)
        work.fused_calls = int(i == 0)
        seen |= needed.keys()
        for storage, n_bytes in work.writes:
            if id(storage) in kept:
                work.fused_bytes += n_bytes
            else:
                made_of[id(storage)] = needed


def _kept(chains: list[Chain]) -> set[int]:
    """Return the storages that exist: gradients, and what another chain reads than made it.

    A fused backward kernel computes again what the forward pass made.
    """
    maker: dict[int, Chain] = {}
    kept: set[int] = set()
    for chain in chains:
        computes_again = chain.is_fused and chain.phase == BACKWARD_PHASE
        for work in chain.works:
            for storage, _ in work.reads:
                made_by = maker.get(id(storage), chain)
                is_forward = made_by.phase not in (BACKWARD_PHASE, OPTIMIZER_PHASE)
                if made_by is not chain and not (is_forward and computes_again):
                    kept.add(id(storage))
            for storage, _ in work.writes:
                if storage is not None:
                    maker[id(storage)] = chain
                    if storage.category == GRADIENTS:
                        kept.add(id(storage))
    return kept
