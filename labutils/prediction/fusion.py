"""What is left of a step's bytes and launches where a compiler fuses neighbouring operations.

Between two matrix products (or fused attentions) all operations become one kernel. It reads what
was made outside, and writes what others need. What a backward kernel would read of the forward
pass's insides it computes again, from what those were made of. That is what TorchInductor does,
but for its exceptions: https://dev-discuss.pytorch.org/t/min-cut-optimal-recomputation.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from labutils.memory.kinds import ATTENTION_KINDS, PRODUCT_KINDS
from labutils.memory.ledger import GRADIENTS, OPTIMIZER
from labutils.prediction.work import Work

if TYPE_CHECKING:
    from labutils.prediction.trace import Segment, Storage

OPTIMIZER_PHASE, BACKWARD_PHASE = "optimizer", "backward"
Chain = list[Work]


def fuse(segments: Iterable[Segment]) -> None:
    """Write into each operation's work what is left of it in a compiled forward and backward pass.

    The optimizer's operations stay as they are: its step is not compiled.
    """
    chains: list[tuple[str, Chain]] = []
    for segment in segments:
        is_fused = segment.phase != OPTIMIZER_PHASE
        chain: Chain = []
        for event in segment.events:
            work = event.work
            if work is None:
                continue
            work.fused_bytes, work.fused_calls = work.n_bytes, work.calls
            if not is_fused or work.kind in PRODUCT_KINDS or work.kind in ATTENTION_KINDS:
                chains.append((segment.phase, [work]))
                chain = []
            elif chain:
                chain.append(work)
            else:
                chain = [work]
                chains.append((segment.phase, chain))
    _share_out(chains)
    for _, chain in chains:
        for work in chain:
            work.only_once = _makes_state(work)
            work.reads, work.writes = [], []


def _makes_state(work: Work) -> bool:
    made = [storage for storage, _ in work.writes if storage is not None]
    return not work.reads and bool(made) and all(one.category == OPTIMIZER for one in made)


def _share_out(chains: list[tuple[str, Chain]]) -> None:
    kept = _kept(chains)
    made_of: dict[int, dict[int, int]] = {}  # of what is not kept: {storage that is: bytes}
    for phase, chain in chains:
        if phase == OPTIMIZER_PHASE or _is_product(chain):
            continue
        inside = {id(storage) for work in chain for storage, _ in work.writes}
        seen: set[int] = set()  # read already, or made here
        for i, work in enumerate(chain):
            needed: dict[int, int] = {}
            for storage, n_bytes in work.reads:
                needed |= made_of.get(id(storage), {id(storage): n_bytes})
            new = {key: n_bytes for key, n_bytes in needed.items() if key not in seen | inside}
            seen |= new.keys()
            written = 0
            for storage, n_bytes in work.writes:
                if id(storage) in kept:
                    written += n_bytes
                else:
                    made_of[id(storage)] = needed
            work.fused_bytes = sum(new.values()) + written
            work.fused_calls = int(i == 0)


def _is_product(chain: Chain) -> bool:
    return chain[0].kind in PRODUCT_KINDS or chain[0].kind in ATTENTION_KINDS


def _kept(chains: list[tuple[str, Chain]]) -> set[int]:
    """Return the storages that exist: others than the chain that made them need them."""
    maker: dict[int, tuple[int, str]] = {}
    kept: set[int] = set()
    for number, (phase, chain) in enumerate(chains):
        for work in chain:
            for storage, _ in work.reads:
                made = maker.get(id(storage))
                if made and made[0] != number and not _computed_again(made[1], phase, chain):
                    kept.add(id(storage))
            for storage, _ in work.writes:
                if storage is not None:
                    maker[id(storage)] = number, phase
                    if _lasts(storage):
                        kept.add(id(storage))
    return kept


def _lasts(storage: Storage | Any) -> bool:
    return storage.category == GRADIENTS


def _computed_again(made_in: str, phase: str, chain: Chain) -> bool:
    is_forward = made_in not in (BACKWARD_PHASE, OPTIMIZER_PHASE)
    return is_forward and phase == BACKWARD_PHASE and not _is_product(chain)
