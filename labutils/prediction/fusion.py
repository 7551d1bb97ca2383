"""What is left of a step's bytes and launches where a compiler fuses neighbouring operations.

Between two matrix products (or fused attentions) all operations become one kernel. It reads what
was made outside, and writes what others need. What a backward kernel would read of the forward
pass's insides it computes again, from what those were made of. That is what TorchInductor does,
but for its exceptions: https://dev-discuss.pytorch.org/t/min-cut-optimal-recomputation.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import groupby
from typing import NamedTuple

from labutils.memory.kinds import ATTENTION_KINDS, PRODUCT_KINDS
from labutils.memory.ledger import GRADIENTS
from labutils.prediction.trace import Segment, Storage
from labutils.prediction.work import Work

OPTIMIZER_PHASE, BACKWARD_PHASE = "optimizer", "backward"


class Chain(NamedTuple):
    """Neighbours in one phase: all of them fused, or none."""

    phase: str
    is_fused: bool
    works: list[Work]


def fuse(segments: Iterable[Segment]) -> dict[Work, Work]:
    """Return what is left of each operation that is fused in a compiled forward and backward pass.

    The first of a chain has the launch of its kernel. The optimizer's step is not compiled.
    """
    chains = _chains(segments)
    kept = _kept(chains)
    made_of: dict[Storage, dict[Storage, int]] = {}  # of what is not kept: {what is: bytes}
    left = {}
    for chain in chains:
        if not chain.is_fused:
            continue
        seen = {storage for work in chain.works for storage, _ in work.writes}  # or read already
        for i, work in enumerate(chain.works):
            needed: dict[Storage, int] = {}
            for storage, n_bytes in work.reads:
                needed |= made_of.get(storage, {storage: n_bytes})
            moved = sum(n_bytes for storage, n_bytes in needed.items() if storage not in seen)
            seen |= needed.keys()
            for storage, n_bytes in work.writes:
                if storage in kept:
                    moved += n_bytes
                else:
                    made_of[storage] = needed
            left[work] = replace(work, n_bytes=moved, calls=int(i == 0))
    return left


def _is_product(work: Work) -> bool:
    return work.kind in (*PRODUCT_KINDS, *ATTENTION_KINDS)


def _chains(segments: Iterable[Segment]) -> list[Chain]:
    chains = []
    for segment in segments:
        works = [event.work for event in segment.events if event.work]
        for is_product, group in groupby(works, _is_product):
            is_fused = not is_product and segment.phase != OPTIMIZER_PHASE
            chains.append(Chain(segment.phase, is_fused, list(group)))
    return chains


def _kept(chains: list[Chain]) -> set[Storage]:
    """Return the storages that exist: gradients, and what another chain reads than made it.

    A fused backward kernel computes again what the forward pass made.
    """
    maker: dict[Storage, Chain] = {}
    kept = set()
    for chain in chains:
        computes_again = chain.is_fused and chain.phase == BACKWARD_PHASE
        for work in chain.works:
            for storage, _ in work.reads:
                # what no chain has made, as weights and batch, exists without being kept
                made_by = maker.get(storage, chain)
                is_made_again = computes_again and made_by.phase != BACKWARD_PHASE
                if made_by is not chain and not is_made_again:
                    kept.add(storage)
            for storage, _ in work.writes:
                if storage:
                    maker[storage] = chain
                    if storage.category == GRADIENTS:
                        kept.add(storage)
    return kept
