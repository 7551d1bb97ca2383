"""Hold the allocator's rules against torch's: random requests and frees on a CUDA device, all bytes
compared.

    PYTORCH_ALLOC_CONF=expandable_segments:True python -m tests.prediction.allocator_story CAP_MIB

A test runs it in a process of its own. A cap of 0 is none.
"""

from __future__ import annotations

import math
import os
import random
import sys
from contextlib import suppress

import torch

from labutils.memory.device_memory import memory_limit
from labutils.prediction.allocator import Block, CachingAllocator, OutOfMemory, Settings

CUDA = torch.device("cuda")


def ask_both(size: int, ours: CachingAllocator) -> tuple[torch.Tensor | None, Block | None]:
    """Return what torch and our allocator hand out for a request; None where memory is out."""
    tensor = block = None
    with suppress(torch.OutOfMemoryError):
        tensor = torch.empty(size, dtype=torch.uint8, device=CUDA)
    with suppress(OutOfMemory):
        block = ours.allocate(size)
    return tensor, block


def main(cap_mib: int, steps: int = 2000) -> None:
    dice, alive, refused = random.Random(0), [], 0
    settings = Settings.parse(os.environ.get("PYTORCH_ALLOC_CONF", ""))
    ours = CachingAllocator(cap_mib * 2**20 or math.inf, settings)
    with memory_limit(cap_mib / 1024, CUDA):
        for step in range(steps):
            if alive and dice.random() < 0.48:
                tensor, block = alive.pop(dice.randrange(len(alive)))
                del tensor
                ours.free(block)
            else:
                tensor, block = ask_both(int(2 ** dice.uniform(8, 26.5)), ours)
                assert (tensor is None) == (block is None), f"step {step}: one alone refused"
                if block:
                    alive.append((tensor, block))
                else:
                    refused += 1
                del tensor
            theirs = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
            assert theirs == (ours.allocated, ours.reserved), f"step {step}: theirs {theirs}"
    print(f"{refused} refused, {ours.n_retries} times the cache was emptied; all else equal")


if __name__ == "__main__":
    main(int(sys.argv[1]))
