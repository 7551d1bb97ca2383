"""The cards that times and bytes can be predicted for: `cards.csv`, and a reader's own."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from labutils.config.card import Card, Gpu, Speed
from labutils.config.choices import Rows

TABLE = Path(__file__).with_suffix(".csv")
MOST_THREADS = {(7, 5): 1024, (8, 6): 1536, (8, 9): 1536, (12, 0): 1536}  # else 2048
Tflops = Annotated[float, Field(ge=0.1, le=100_000)]  # dense
Share = Annotated[float, Field(gt=0, le=1)]


class CardRow(BaseModel):
    """A row of `cards.csv`, or a reader's YAML file: the first six keys it must have."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    name: str = Field(min_length=1, max_length=40)
    memory_gib: float = Field(ge=1, le=2048)
    compute_capability: str = Field(pattern=r"^\d+\.\d$", description="a number such as 8.9")
    multiprocessors: int = Field(ge=1, le=1024)
    bandwidth_gb_s: float = Field(ge=10, le=50_000)
    float32_tflops: Tflops
    tf32_tflops: Tflops | None = None
    float16_tflops: Tflops | None = None
    bfloat16_tflops: Tflops | None = None
    reached_float32: Tflops | None = None
    reached_tf32: Tflops | None = None
    reached_float16: Tflops | None = None
    reached_bfloat16: Tflops | None = None
    elements_share: Share = Speed.elements
    rows_share: Share = Speed.rows
    flash_forward: Share = Speed.flash[0]
    flash_backward: Share = Speed.flash[1]
    unaligned: float = Field(default=Speed.unaligned, ge=1, le=10)

    @property
    def card(self) -> Card:
        """The card; uncalibrated where nothing was measured on it."""
        tflops = self._by_kind("{}_tflops")
        speed = Speed(
            tflops,
            self.bandwidth_gb_s,
            self._by_kind("reached_{}"),
            elements=self.elements_share,
            rows=self.rows_share,
            flash=(self.flash_forward, self.flash_backward),
            unaligned=self.unaligned,
        )
        major, minor = self.compute_capability.split(".")
        capability = int(major), int(minor)
        threads = MOST_THREADS.get(capability, 2048)
        gpu = Gpu(capability, self.multiprocessors, threads, bf16="bfloat16" in tflops)
        return Card(self.name, self.memory_gib, gpu, speed=speed)

    def _by_kind(self, column: str) -> dict[str, float]:
        """Return the numbers of four columns that are given, by the kind of products."""
        rates = {}
        for kind in ("float32", "TF32", "float16", "bfloat16"):
            rates[kind] = getattr(self, column.format(kind.lower()))
        return {kind: rate for kind, rate in rates.items() if rate}


def _shipped() -> Rows:
    lines = TABLE.read_text(encoding="utf-8").splitlines()
    cards = []
    for row in csv.DictReader(line for line in lines if not line.startswith("#")):
        values = {column: text for column, text in row.items() if text}
        cards.append(CardRow.model_validate(values).card)
    return Rows("cards", *cards)


CARDS = _shipped()
