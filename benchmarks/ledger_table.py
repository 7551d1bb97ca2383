"""Computes the table of the exhibit `ledger`: `python -m benchmarks.ledger_table`.

A step is one micro-batch. Within a range of batch sizes each category of a phase is affine in the
batch, so a table of such ranges ("pieces") holds every batch size from 1 to BATCHES. They are found
in traces (`prediction.trace`); the allocator is replayed only for what a card must have.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

from labutils.config.resolve import resolve
from labutils.exhibits.ledger_switches import (
    BATCHES,
    CARDS,
    DEVICE,
    FIXED,
    GRID,
    SWITCHES,
    TABLE,
    UNIT,
    VARYING,
    Piece,
    Setting,
    Units,
    experiment,
    key_of,
    read,
    settings,
    write,
)
from labutils.machine import here
from labutils.prediction.blocks import rounded
from labutils.prediction.memory import BatchSizes, Prediction, allocator_settings
from labutils.prediction.replay import n_steps, segments_of, walk
from labutils.prediction.time import Clock
from labutils.prediction.trace import BIRTH, CATEGORIES, Trace


def sizes_of(setting: Setting) -> BatchSizes:
    """Return the predictions of a setting on DEVICE, at any batch size."""
    run = resolve(experiment(setting), here.card_of(DEVICE))
    return BatchSizes(run.config, run.card)


def peaks(trace: Trace) -> dict[str, Units]:
    """Return what is alive at each phase's peak, by category.

    As in a ledger (`replay.ledger`), but what blocks have beyond their requests is not counted, so
    that no allocator is needed.
    """
    now, total, found = dict.fromkeys(CATEGORIES, 0), 0, {}
    last = n_steps(trace) - 1
    for step, segment, event in walk(trace, 1):
        if event.storage:
            change = rounded(event.storage.n_bytes) // UNIT
            change = change if event.kind == BIRTH else -change
            now[event.storage.category] += change
            total += change
        if step == last and total > found.get(segment.phase, (0,))[0]:
            found[segment.phase] = total, dict(now)
    return {phase: units for phase, (_, units) in found.items()}


def pieces(at: Callable[[int], list[int]], last: int = BATCHES) -> list[Piece]:
    """Return the ranges of 1 to `last` in which the numbers `at(batch)` are affine.

    Where a range is left, it is not entered again: a phase's peak is the highest of many moments,
    each affine, so it is convex.
    """
    found, first = [], 1
    while first <= last:
        end, slope = _range(at, first, last)
        if end == first + 1 < last:  # perhaps two moments, and no line that goes on
            further, _ = _range(at, end, last)
            if further > end + 1:
                end, slope = first, [0] * len(slope)
        origin = [value - first * step for value, step in zip(at(first), slope, strict=True)]
        found.append([first, *origin, *slope])
        first = end + 1
    return found


def _range(at: Callable[[int], list[int]], first: int, last: int) -> tuple[int, list[int]]:
    """Return the last batch size on the line through `first` and the next, and its slope."""
    start = at(first)
    if first == last:
        return last, [0] * len(start)
    slope = [b - a for a, b in zip(start, at(first + 1), strict=True)]

    def is_on_line(batch: int) -> bool:
        return at(batch) == [a + (batch - first) * s for a, s in zip(start, slope, strict=True)]

    if is_on_line(last):
        return last, slope
    low, high = first + 1, last  # `low` is on the line, `high` is not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if is_on_line(middle) else (low, middle)
    return low, slope


def phases_of(sizes: BatchSizes) -> dict[str, list[Piece]]:
    """Return the pieces of the phases before the optimizer's, which does not see the batch."""
    known: dict[int, dict[str, Units]] = {}

    def at(phase: str, batch: int) -> list[int]:
        if batch not in known:
            known[batch] = peaks(sizes.traces.at(batch, 1))
        return [known[batch][phase][category] for category in VARYING]

    phases = "forward", "loss", "backward"
    return {phase: pieces(lambda batch, phase=phase: at(phase, batch)) for phase in phases}


def standing(setting: Setting) -> dict[str, list[int]]:
    """Return what does not depend on the batch, with the setting's optimizer: FIXED, and VARYING at
    the peak of the optimizer's phase.
    """
    found = peaks(sizes_of(setting).traces.at(1, 1))["optimizer"]
    return {
        "fixed": [found[category] for category in FIXED],
        "optimizer": [found[category] for category in VARYING],
    }


def grid_point(sizes: BatchSizes, batch: int) -> list:
    """Return what the smallest card has, in MiB, and for each of CARDS a step's milliseconds and
    how far the band reaches below and above; None where the card has no hardware for the
    precision.

    On all others a step has the same work, so one trace is timed on each (a test compares
    `predict_time`).
    """
    trace = sizes.traces.at(batch, 1)
    allocator = allocator_settings(sizes.config, sizes.card)
    needed = Prediction(trace, 1, sizes.card.name, allocator).needed_bytes
    found: list = [round(needed / 2**20)]
    for name in CARDS:
        card = here.card_of(name)
        if not card.support(sizes.config.precision).ok:
            found.append(None)
            continue
        clock = Clock(card, tf32=False, is_compiled=False)
        clock.run(segments_of(trace, 1, 1), [])
        time = clock.ledger(batch * sizes.config.seq_len, card, is_small=batch == 1)
        below, above = 1 - time.low_ms / time.step_ms, time.high_ms / time.step_ms - 1
        found.append([float(f"{time.step_ms:.4g}"), round(below, 2), round(above, 2)])
    return found


def make(models: tuple[str, ...] = SWITCHES["model"], with_grid: bool = True) -> None:
    """Compute what the table lacks, and store it after each setting."""
    table = read() if TABLE.exists() else {"standing": {}, "phases": {}, "grid": {}}
    for setting in settings(models):
        key = key_of(*setting.values())
        for optimizer in SWITCHES["optimizer"]:
            name = key_of(setting["model"], setting["precision"], optimizer)
            if name not in table["standing"]:
                table["standing"][name] = standing(setting | {"optimizer": optimizer})
        is_missing = key not in table["phases"], with_grid and key not in table["grid"]
        if not any(is_missing):
            continue
        sizes = sizes_of(setting)
        if is_missing[0]:
            table["phases"][key] = phases_of(sizes)
        if is_missing[1]:
            table["grid"][key] = [grid_point(sizes, batch) for batch in GRID]
        write(table)
        print(key, flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Make the table of the exhibit `ledger`.")
    parser.add_argument("--again", action="store_true", help="all, not only what is missing")
    parser.add_argument("--models", nargs="+", default=SWITCHES["model"], help="only these")
    parser.add_argument("--without-grid", action="store_true", help="bytes only: quicker")
    options = parser.parse_args()
    if options.again:
        TABLE.unlink(missing_ok=True)
    make(tuple(options.models), not options.without_grid)
