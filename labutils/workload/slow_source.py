"""Data that come slowly, as from a disk or a network: to see what loading in advance does."""

from __future__ import annotations

import time

import torch
from torch.utils.data import Dataset


class SlowSource(Dataset):
    """Rows of `blocks`, `(n, T)`; each takes `ms` more milliseconds to come. They are slept."""

    def __init__(self, blocks: torch.Tensor, ms: float) -> None:
        self.blocks, self.ms = blocks, ms

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        time.sleep(self.ms / 1e3)
        return {"input_ids": self.blocks[i], "labels": self.blocks[i]}
