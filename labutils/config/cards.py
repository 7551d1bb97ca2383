"""The cards that times and bytes can be predicted for: `cards.csv`, and a reader's own."""

from __future__ import annotations

import csv
import os
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field

from labutils.config.card import Card, Gpu, Speed
from labutils.config.choices import Rows
from labutils.config.reader import YamlFile, typed

TABLE = Path(__file__).with_suffix(".csv")
MOST_THREADS = {(7, 5): 1024, (8, 6): 1536, (8, 9): 1536, (12, 0): 1536}  # else 2048
KINDS = ("float32", "TF32", "float16", "bfloat16")  # of products
Tflops = Field(default=None, ge=0.1, le=100_000, description="dense TFLOP/s")
Share = Field(default=None, gt=0, le=1, description="share of what the card could do")


class CardRow(BaseModel):
    """A row of `cards.csv`, or a reader's YAML file: the first seven keys it must have."""

    name: str = Field(min_length=1, max_length=40)
    memory_gib: float = Field(ge=1, le=2048)
    compute_capability: str = Field(pattern=r"^\d+\.\d$", description="a number such as 8.9")
    multiprocessors: int = Field(ge=1, le=1024)
    bandwidth_gb_s: float = Field(ge=10, le=50_000)
    float32_tflops: float = Tflops
    tf32_tflops: float | None = Tflops
    float16_tflops: float | None = Tflops
    bfloat16_tflops: float | None = Tflops
    reached_float32: float | None = Tflops
    reached_tf32: float | None = Tflops
    reached_float16: float | None = Tflops
    reached_bfloat16: float | None = Tflops
    elements_share: float | None = Share
    rows_share: float | None = Share
    flash_forward: float | None = Share
    flash_backward: float | None = Share
    unaligned: float | None = Field(default=None, ge=1, le=10, description="1 or more")

    @property
    def card(self) -> Card:
        """The card; uncalibrated where nothing was measured on it."""
        tflops, reached = {}, {}
        for kind in KINDS:
            for column, rates in ((f"{kind}_tflops", tflops), (f"reached_{kind}", reached)):
                if rate := getattr(self, column.lower()):
                    rates[kind] = rate
        major, minor = self.compute_capability.split(".")
        capability = int(major), int(minor)
        threads = MOST_THREADS.get(capability, 2048)
        gpu = Gpu(capability, self.multiprocessors, threads, bf16="bfloat16" in tflops)
        shares: dict[str, Any] = {"elements": self.elements_share, "rows": self.rows_share}
        shares["unaligned"] = self.unaligned
        if self.flash_forward and self.flash_backward:
            shares["flash"] = self.flash_forward, self.flash_backward
        known = {name: share for name, share in shares.items() if share}
        speed = Speed(tflops, self.bandwidth_gb_s, reached, is_calibrated=bool(reached), **known)
        return Card(self.name, self.memory_gib, gpu, speed=speed)


def load_card(path: str | os.PathLike[str]) -> Card:
    """Return the card that a YAML file describes, with the columns of `cards.csv` as keys.

    Raises ConfigError with a line `file:line: …` for each mistake.
    """
    file = YamlFile(Path(path))
    values = typed(CardRow, file.values, file.add)
    for key, field in CardRow.model_fields.items():
        is_needed = field.is_required() or key == "float32_tflops"
        if is_needed and key not in file.values:
            file.add("", f"missing key `{key}`")
    file.raise_if_any()
    return CardRow(**values).card


def _shipped() -> Rows:
    lines = TABLE.read_text(encoding="utf-8").splitlines()
    rows = csv.DictReader(line for line in lines if not line.startswith("#"))
    cards = []
    for row in rows:
        values = {column: text for column, text in row.items() if text}
        cards.append(CardRow.model_validate(values).card)
    return Rows("cards", *cards)


CARDS = _shipped()
