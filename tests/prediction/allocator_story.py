"""Random requests and frees, for the allocator's rules; and the rules held against torch's own.

    PYTORCH_ALLOC_CONF=expandable_segments:True python -m tests.prediction.allocator_story CAP_MIB

compares all bytes on a CUDA device. A test runs it in a process of its own. A cap of 0 is none.
Of equal free blocks torch 2.13 and later take the one in the segment that was made first, as the
rules do; versions before it take the one with the lowest address, which the driver chooses. There
the rules are given the driver's addresses.
"""

import math
import os
import random
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch

from labutils.memory.device_memory import memory_limit
from labutils.prediction.allocator import MIB, Block, CachingAllocator, OutOfMemory, Settings

CUDA = torch.device("cuda")
BY_ADDRESS = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)
EDGES = (512, MIB, MIB + 1, 10 * MIB - 1, 10 * MIB, 19 * MIB)


def story(
    seed: int, cache: CachingAllocator, n: int = 150, share_emptied: float = 0.04
) -> Iterator[tuple[dict, dict[int, Block]]]:
    """Yield so many events, as the exhibit has them, and the blocks that are alive after each."""
    dice, alive = random.Random(seed), {}
    for number in range(n):
        choice = dice.random()
        if choice < share_emptied:
            event = {"empty": True}
            cache.empty_cache()
        elif choice < 0.45 and alive:
            gone = dice.choice(list(alive))
            event = {"free": [gone]}
            cache.free(alive.pop(gone))
        else:
            n_bytes = dice.choice([dice.choice(EDGES), int(2 ** dice.uniform(0, 26))])
            event = {"new": [[number, n_bytes]]}
            with suppress(OutOfMemory):
                alive[number] = cache.allocate(n_bytes)
        yield event, alive


class BesideTorch(CachingAllocator):
    """The rules, each request of which torch's allocator meets first."""

    def __init__(self, *limits: Any) -> None:
        super().__init__(*limits)
        self.tensors: dict[Block, torch.Tensor] = {}
        self.refused = 0

    def allocate(self, n_bytes: int) -> Block:
        known = {segment["address"] for segment in torch.cuda.memory_snapshot()}
        try:
            tensor = torch.empty(n_bytes, dtype=torch.uint8, device=CUDA)
        except torch.OutOfMemoryError:
            self.refused += 1
            block = super().allocate(n_bytes)
            raise AssertionError(f"{block} has room for {n_bytes}, and torch has none") from None
        if BY_ADDRESS:
            segments = {segment["address"] for segment in torch.cuda.memory_snapshot()}
            self._next_address = max(segments - known, default=self._next_address)
        block = super().allocate(n_bytes)
        self.tensors[block] = tensor
        return block

    def free(self, block: Block) -> None:
        del self.tensors[block]
        super().free(block)


def main(cap_mib: int) -> None:
    settings = Settings.parse(os.environ.get("PYTORCH_ALLOC_CONF", ""))
    ours = BesideTorch(cap_mib * MIB or math.inf, settings)
    with memory_limit(cap_mib / 1024, CUDA):
        for event, alive in story(0, ours, 2000, share_emptied=0.0):
            assert len(ours.tensors) == len(alive), f"{event}: torch alone had room"
            theirs = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
            assert theirs == (ours.allocated, ours.reserved), f"{event}: theirs {theirs}"
    print(f"{ours.refused} refused, {ours.n_retries} times the cache was emptied; all else equal")


if __name__ == "__main__":
    main(int(sys.argv[1]))
