"""Tables that fit the terminal they are printed in."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Sequence

import pandas as pd

WIDE = 1000  # columns, where output goes into a file or another program
NARROWEST = 9  # of a column whose text is broken into lines
GAP = "  "


def terminal_width() -> int:
    """Return the columns of the terminal: COLUMNS if it is set, WIDE if there is no terminal."""
    return shutil.get_terminal_size((WIDE, 24)).columns


def fitted(table: pd.DataFrame, width: int, spare: Sequence[str] = ()) -> str:
    """Return a table with its index as text that is at most `width` columns wide, if it can be.

    First the columns in `spare` are left out, in this order, and the last line says so. Then the
    widest texts are broken into several lines.
    """
    left_out = []
    for name in spare:
        if name in table and _needed(_texts(table)) > width:
            table = table.drop(columns=name)
            left_out.append(name)
    rows = _texts(table)
    lines = _lines(rows, _widths(rows, width))
    if left_out:
        lines.append(f"not shown in {width} columns: {', '.join(left_out)}")
    return "\n".join(lines)


def _texts(table: pd.DataFrame) -> list[list[str]]:
    """Return the heading and each row as texts; the index is the first column."""
    rows = [[table.index.name or "", *map(str, table.columns)]]
    for label, values in zip(table.index, table.itertuples(index=False), strict=True):
        rows.append([str(label), *map(str, values)])
    return rows


def _needed(rows: list[list[str]]) -> int:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return sum(widths) + len(GAP) * (len(widths) - 1)


def _widths(rows: list[list[str]], width: int) -> list[int]:
    """Return the width of each column; the widest give way until the row fits."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    while sum(widths) + len(GAP) * (len(widths) - 1) > width and max(widths) > NARROWEST:
        widths[widths.index(max(widths))] -= 1
    return widths


def _lines(rows: list[list[str]], widths: list[int]) -> list[str]:
    """Return the rows as lines; columns of numbers are aligned to the right, words to the left."""
    aligned = []
    for column in zip(*rows, strict=True):
        aligned.append(str.rjust if all(map(_is_number, column[1:])) else str.ljust)
    lines = []
    for row in rows:
        cells = [_broken(text, w) for text, w in zip(row, widths, strict=True)]
        for k in range(max(map(len, cells))):
            line = []
            for cell, align, width in zip(cells, aligned, widths, strict=True):
                line.append(align(cell[k] if k < len(cell) else "", width))
            lines.append(GAP.join(line).rstrip())
    return lines


def _broken(text: str, width: int) -> list[str]:
    """Return a text as lines, broken at blanks and hyphens; a longer word after underscores."""
    if len(text) <= width:
        return [text]
    if max(map(len, text.replace("-", "- ").split())) > width:
        text = text.replace("_", "_ ")
    return [line.replace("_ ", "_") for line in textwrap.wrap(text, width)]


def _is_number(text: str) -> bool:
    return text in ("", "–") or text.replace(",", "").lstrip("+-").replace(".", "", 1).isdigit()
