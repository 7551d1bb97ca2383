"""The cards that times and bytes can be predicted for: the rows of `cards.csv`."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from labutils.config.card import Card, Gpu, Speed
from labutils.config.choices import Rows

TABLE = Path(__file__).with_suffix(".csv")
KINDS = ("float32", "TF32", "float16", "bfloat16")  # of products
MOST_THREADS = {(7, 5): 1024, (8, 6): 1536, (8, 9): 1536, (12, 0): 1536}  # else 2048
N_NEEDED = 6  # columns that have a number for each card


def card_of_row(row: Mapping[str, str]) -> Card:
    """Return the card of a row: texts by column. It is uncalibrated if nothing was measured on it.

    What is empty, or not there, is not known: of most columns `Speed` has a usual number.
    """
    major, _, minor = row["compute_capability"].partition(".")
    capability = int(major), int(minor or 0)
    known = {column: text for column, text in row.items() if text and column != "name"}
    numbers = {column: float(text) for column, text in known.items()}
    tflops, reached = {}, {}
    for kind in KINDS:
        for rates, column in ((tflops, f"{kind}_tflops"), (reached, f"reached_{kind}")):
            if column.lower() in numbers:
                rates[kind] = numbers[column.lower()]
    usual = Speed(tflops, numbers["bandwidth_gb_s"], reached)
    forward, backward = usual.flash
    speed = replace(
        usual,
        elements=numbers.get("elements_share", usual.elements),
        rows=numbers.get("rows_share", usual.rows),
        flash=(numbers.get("flash_forward", forward), numbers.get("flash_backward", backward)),
        unaligned=numbers.get("unaligned", usual.unaligned),
    )
    threads = MOST_THREADS.get(capability, 2048)
    gpu = Gpu(capability, int(numbers["multiprocessors"]), threads, bf16="bfloat16" in tflops)
    return Card(row["name"], numbers["memory_gib"], gpu, speed=speed)


_LINES = TABLE.read_text(encoding="utf-8").splitlines()
_ROWS = csv.DictReader(line for line in _LINES if not line.startswith("#"))
COLUMNS = _ROWS.fieldnames
CARDS = Rows("cards", *(card_of_row(row) for row in _ROWS))
