"""The roofline of a device, and which roof each operation of a training step lies under.

Williams, Waterman and Patterson, CACM 2009, doi:10.1145/1498765.1498785.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

import pandas as pd
import torch

from labutils.config.card import SLOW_RATIO, Card
from labutils.config.choices import PRECISIONS
from labutils.config.resolve import resolve
from labutils.config.schema import Config
from labutils.machine import here
from labutils.memory.kinds import PRODUCT_KINDS
from labutils.prediction.time import Clock, step_of, with_speed
from labutils.prediction.work import Work

MEMORY, ARITHMETIC = "memory", "arithmetic"
# Sides of the products that a CPU's roof is measured with; float32 numbers of a pass, and passes.
SIZES = (256, 512)
NUMBERS, PASSES = 2**24, 5


@dataclass(frozen=True)
class Roof:
    """What limits operations on a device: FLOP/s by the kind of products, and bytes per second.

    Kinds are dtypes' names, and "TF32".
    """

    flops_per_s: Mapping[str, float]
    bytes_per_s: float

    def ridge(self, kind: str) -> float:
        """Return the FLOP per byte at which both limits meet."""
        return self.flops_per_s[kind] / self.bytes_per_s

    def rate(self, intensity: float, kind: str) -> float:
        """Return the highest FLOP/s at so many FLOP per byte."""
        return min(self.flops_per_s[kind], intensity * self.bytes_per_s)


def roof_of(device: str | torch.device | Card = "a100", *, datasheet: bool = False) -> Roof:
    """Return the roof of a device: what large products and long elementwise operations reach there.

    This machine is measured now (a CPU) or once (a GPU); other cards were measured by others.
    `datasheet` asks for a card's peaks instead. `device` as for `predict_memory`. Raises ValueError
    for a CPU's datasheet.
    """
    card = with_speed(here.card_of(device))
    if card.gpu is None:
        if datasheet:
            raise ValueError("a CPU's roof is measured: there is no datasheet of it")
        return _measured_cpu()
    speed = card.speed
    if datasheet:
        rates = {kind: 1e12 * tflops for kind, tflops in speed.tflops.items()}
        return Roof(rates, 1e9 * speed.gb_per_s)
    rates = {kind: speed.product_rate(kind) for kind in ("float32", "float16", "bfloat16", "TF32")}
    return Roof(rates, 1e9 * speed.gb_per_s * speed.elements)


def _measured_cpu() -> Roof:
    """Measure products of a few sizes in each dtype, and passes over 64 MiB.

    The numbers are changed in place. A copy would tell less: many CPUs read its target as well.
    """
    cpu = torch.device("cpu")
    rates = {}
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        name = str(dtype).removeprefix("torch.")
        sizes = SIZES[:1] if here.cpu_slowdown(name) > SLOW_RATIO else SIZES
        rates[name] = max(here.matmul_rate(dtype, cpu, n, repeats=3) for n in sizes)
    numbers = torch.ones(NUMBERS)
    seconds = []
    for _ in range(PASSES):
        begin = time.perf_counter()
        numbers.neg_()
        seconds.append(time.perf_counter() - begin)
    return Roof(rates, 2 * numbers.nbytes / min(seconds))  # read once and written once


def operations(
    config: Config, device: str | torch.device | Card = "a100", roof: Roof | None = None
) -> pd.DataFrame:
    """Return a row for each kind of operation of an eager training step; products by their shape.

    `shape` is (batch, rows, columns, length of the sums) of a product. `GFLOP` counts products and
    attention: the arithmetic of all others is small beside their bytes, and not counted. `GB` is
    what an operation reads and writes if nothing of it is in a cache. `intensity` is FLOP per byte,
    `ms` the time ledger's prediction without launches, `floor_ms` what the roof allows at best, and
    `limit` the roof above: MEMORY or ARITHMETIC. Largest `ms` first. `device` as for
    `predict_memory`, `roof` as `roof_of` returns it.
    """
    run = resolve(config, here.card_of(device))
    card = with_speed(run.card)
    precision = PRECISIONS[run.config.precision]
    clock = Clock(card, tf32=precision.tf32, is_compiled=False)
    roof = roof or roof_of(card)
    rows: dict[tuple, dict] = {}
    segments, after = step_of(run.config, card)
    works = [event.work for segment in segments for event in segment.events if event.work]
    for work in [*works, *after]:
        if work.only_once:
            continue
        kind = _kind_of_product(work, precision.tf32)
        key = work.kind, _shape(work), kind
        row = rows.setdefault(key, {"calls": 0, "GFLOP": 0.0, "GB": 0.0, "ms": 0.0})
        row["calls"] += 1
        row["GFLOP"] += work.flops / 1e9
        row["GB"] += work.n_bytes / 1e9
        row["ms"] += 1e3 * clock.time.seconds(work)
    found = [_with_limits(key, row, roof) for key, row in rows.items()]
    table = pd.DataFrame(found).sort_values("ms", ascending=False)
    return table.reset_index(drop=True)


def _shape(work: Work) -> tuple[int, ...]:
    if work.kind not in PRODUCT_KINDS:
        return ()
    return (*map(int, work.shape), int(work.inner))


def _kind_of_product(work: Work, is_tf32: bool) -> str:
    if not work.flops:
        return ""
    return "TF32" if is_tf32 and work.dtype == "float32" else work.dtype


def _with_limits(key: tuple, row: dict, roof: Roof) -> dict:
    operation, shape, kind = key
    moving = row["GB"] * 1e9 / roof.bytes_per_s
    computing = row["GFLOP"] * 1e9 / roof.flops_per_s[kind] if kind else 0.0
    return {
        "operation": operation,
        "shape": shape,
        "products in": kind,
        **row,
        "intensity": row["GFLOP"] / row["GB"] if row["GB"] else 0.0,
        "floor_ms": 1e3 * max(moving, computing),
        "limit": ARITHMETIC if computing > moving else MEMORY,
    }


def by_kind(table: pd.DataFrame) -> pd.DataFrame:
    """Return the sums of a table of `operations` by kind of operation, largest `ms` first."""
    sums = table.groupby("operation")[["calls", "GFLOP", "GB", "ms", "floor_ms"]].sum()
    sums["intensity"] = sums["GFLOP"] / sums["GB"]
    return sums.sort_values("ms", ascending=False)
