"""The switches of the exhibit `ledger`, and its table of all their settings, `ledger.json`."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from labutils.config.choices import PRECISIONS, WITH_BF16
from labutils.config.reader import load_config
from labutils.config.schema import Config
from labutils.files import write_atomically
from labutils.memory.ledger import (
    ACTIVATIONS,
    CAST_WEIGHTS,
    GRADIENTS,
    LOGITS,
    OPTIMIZER,
    PARAMETERS,
    TEMPORARIES,
    WORKSPACES,
)

TABLE = Path(__file__).parent / "ledger.json"
BASE = {"path": WITH_BF16.name, "dropout": 0.0}  # a config's name, and what all settings change
SWITCHES: dict[str, tuple] = {
    "model": ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"),
    "seq_len": (256, 512, 1024),
    "precision": tuple(row.name for row in PRECISIONS.values() if not (row.tf32 or row.loss_scale)),
    "attention": ("auto", "eager"),
    "gradient_checkpointing": ("none", "block"),
    "loss_chunk_tokens": (0, 512),
    "optimizer": ("adamw", "adamw_8bit", "sgd"),
}
SHAPE = [switch for switch in SWITCHES if switch != "optimizer"]  # these decide the pieces
BATCHES = 64
UNIT = 512  # bytes: the allocator rounds every request up to a multiple
DEVICE = "a100"  # whose kernels and libraries the bytes are of
FIXED = (PARAMETERS, OPTIMIZER, WORKSPACES)  # the same in every phase and at every batch size
VARYING = (GRADIENTS, ACTIVATIONS, CAST_WEIGHTS, LOGITS, TEMPORARIES)
# Where times, and what the smallest card has, are known: with AdamW at these batch sizes.
GRID = (1, 4, 16)
CARDS = ("t4", "rtx4090", "a100", "h100")

Setting = dict[str, Any]
Units = dict[str, int]  # by category, in UNIT
Piece = list[int]  # first batch size; VARYING at batch 0; VARYING per sequence


def settings(models: tuple[str, ...] = SWITCHES["model"]) -> Iterator[Setting]:
    """Yield every setting of the switches but the optimizer, which has a table of its own."""
    chosen = SWITCHES | {"model": models}
    for values in itertools.product(*[chosen[switch] for switch in SHAPE]):
        yield dict(zip(SHAPE, values, strict=True))


def key_of(*values: Any) -> str:
    """Return the name under which the table has something."""
    return "/".join(map(str, values))


def experiment(setting: Setting, batch: int = 1) -> Config:
    """Return the config of a setting: a step is one micro-batch of so many sequences."""
    shape = {"micro_batch_size": batch, "tokens_per_step": batch * setting["seq_len"]}
    base = dict(BASE)
    return load_config(base.pop("path"), **base | shape | setting)


def read() -> dict[str, Any]:
    """Return the table as it is stored."""
    return json.loads(TABLE.read_text(encoding="utf-8"))


def write(table: dict[str, Any]) -> None:
    """Store the table: a line for each setting."""
    lines = []
    for name, part in table.items():
        rows = []
        for key, row in part.items():
            rows.append(f'"{key}":' + json.dumps(row, separators=(",", ":")))
        lines.append(f'"{name}": {{\n' + ",\n".join(rows) + "\n}")
    write_atomically(TABLE, ("{\n" + ",\n".join(lines) + "\n}\n").encode())
