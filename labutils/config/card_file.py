"""A reader's own card, from its datasheet: a YAML file → Card."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from labutils.config.card import Card, Gpu, Speed
from labutils.config.yaml_source import Source, did_you_mean, mapping, read_node

Tflops = Annotated[float, Field(ge=0.1, le=100_000, description="0.1 to 100000 TFLOP/s, dense")]
MOST_THREADS = {(7, 5): 1024, (8, 6): 1536, (8, 9): 1536, (12, 0): 1536}  # else 2048


class CardFile(BaseModel):
    """The keys of such a file. Rates are dense: without sparsity."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: str = Field(min_length=1, max_length=40, description="a name of 1 to 40 characters")
    memory_gib: float = Field(ge=1, le=2048, description="1 to 2048 GiB")
    compute_capability: float = Field(
        ge=5, le=15, description="NVIDIA's number, 5.0 to 15.0, for example 8.9"
    )
    multiprocessors: int = Field(ge=1, le=1024, description="a whole number from 1 to 1024")
    bandwidth_gb_s: float = Field(ge=10, le=50_000, description="10 to 50000 GB/s")
    float32_tflops: Tflops
    tf32_tflops: Tflops | None = None
    float16_tflops: Tflops | None = None
    bfloat16_tflops: Tflops | None = None


def load_card(path: str | os.PathLike[str]) -> Card:
    """Return the card that a YAML file describes: uncalibrated, since nothing was measured on it.

    Raises ConfigError with a line `file:line:column: …` for each mistake.
    """
    path = Path(path)
    source = Source(str(path))
    node = read_node(path, source)
    source.raise_if_any()
    values = mapping(node, source)
    for key, message in _problems(values):
        source.add_for(key, message)
    source.raise_if_any()
    return _card(CardFile.model_validate(values))


def _problems(values: dict[str, Any]) -> list[tuple[str, str]]:
    fields = CardFile.model_fields
    try:
        CardFile.model_validate(values)
    except ValidationError as problem:
        found = []
        for error in problem.errors():
            key = str(error["loc"][0])
            if error["type"] == "extra_forbidden":
                hint = did_you_mean(key, fields)
                found.append((key, f"unknown key `{key}`.{hint} Known: {', '.join(fields)}"))
                continue
            expected = fields[key].description or "0.1 to 100000 TFLOP/s, dense"
            if error["type"] == "missing":
                found.append((key, f"missing key `{key}`: {expected}"))
            else:
                found.append((key, f"`{key}`: expected {expected}, got {error['input']!r}"))
        return found
    return []


def _card(file: CardFile) -> Card:
    tenths = round(10 * file.compute_capability)
    capability = divmod(tenths, 10)
    tflops = {"float32": file.float32_tflops}
    others = {
        "TF32": file.tf32_tflops,
        "float16": file.float16_tflops,
        "bfloat16": file.bfloat16_tflops,
    }
    for kind, rate in others.items():
        if rate is not None:
            tflops[kind] = rate
    gpu = Gpu(
        capability,
        file.multiprocessors,
        MOST_THREADS.get(capability, 2048),
        bf16=file.bfloat16_tflops is not None,
    )
    speed = Speed(tflops, file.bandwidth_gb_s, {}, is_calibrated=False, source="a datasheet")
    return Card(file.name, file.memory_gib, gpu, speed=speed)
