"""Write the pages of a class: one for each student, one report for the instructor."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import jinja2
import matplotlib.pyplot as plt
import pandas as pd

from labutils.checks import EXERCISES
from labutils.files import write_atomically
from labutils.plotting.style import BLUE, GREEN, new_axis
from labutils.tools.grading.similar import Pair

HERE = jinja2.FileSystemLoader(Path(__file__).parent)
TEMPLATES = jinja2.Environment(loader=HERE, autoescape=True, trim_blocks=True)
MOST_REASONS = 6  # in a figure


@dataclass(frozen=True)
class Figure:
    """What a class answered to one exercise: a picture, and the same as text."""

    exercise: str
    picture: str
    counts: dict[str, int]


def file_name(student: str) -> str:
    """Return the name of a student's page."""
    return re.sub(r"[^\w.-]+", "_", student) + ".html"


def misconceptions(table: pd.DataFrame) -> dict[str, pd.Series]:
    """Return {exercise: how many answers got each verdict or reason, most frequent first}.

    Reasons that differ in their numbers only count as one.
    """
    found = {}
    for exercise, own in table[table.exercise != ""].groupby("exercise", sort=False):
        found[exercise] = own.apply(_kind, axis=1).value_counts()
    return found


def _kind(row: pd.Series) -> str:
    if row.verdict != "wrong":
        return row.verdict
    return re.sub(r"\d[\d.,e+-]*\d|\d", "…", row.reason)


def write_report(table: pd.DataFrame, alike: Sequence[Pair], path: Path) -> None:
    """Write the report on a class: its misconceptions, and texts that are alike."""
    figures = list(_figures(table))
    judged = table.dropna(subset="points")
    to_look_at = (table.verdict == "tampered") | table.reason.str.contains("look at this: ")
    text = TEMPLATES.get_template("report.html").render(
        figures=figures,
        alike=alike,
        n_students=table.student.nunique(),
        mean=judged.points.sum() / max(judged.of.sum(), 1e-9),
        to_look_at=table[to_look_at].to_dict("records"),
        unjudged=table[table.verdict == "failed"].to_dict("records"),
    )
    write_atomically(path, text.encode())


def _figures(table: pd.DataFrame) -> Iterator[Figure]:
    for exercise, counts in misconceptions(table).items():
        yield Figure(exercise, _picture(counts), counts.to_dict())


def _picture(counts: pd.Series) -> str:
    """Return a bar for each of the most frequent verdicts and reasons, as a picture's address."""
    shown = counts.head(MOST_REASONS)[::-1]
    labels = [text if len(text) < 70 else f"{text[:67]}…" for text in shown.index]
    ax = new_axis(None, 8, 0.6 + 0.35 * len(shown))
    colours = [GREEN if label == "right" else BLUE for label in shown.index]
    bars = ax.barh(range(len(shown)), shown.to_numpy(), color=colours)
    ax.bar_label(bars, padding=3)
    ax.set_yticks(range(len(shown)), labels, fontsize=8)
    ax.set_xlabel("answers")
    figure = ax.figure
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=80)
    plt.close(figure)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def write_student_pages(table: pd.DataFrame, folder: Path) -> None:
    """Write a page for each student: verdicts, reasons, and a hint for what is not right yet."""
    template = TEMPLATES.get_template("student.html")
    for student, own in table.groupby("student"):
        rows = [{**row, "hint": _hint(row)} for row in own.to_dict("records")]
        text = template.render(student=student, rows=rows, points=own.points.sum(), of=own.of.sum())
        write_atomically(folder / file_name(str(student)), text.encode())


def _hint(row: dict) -> str:
    if row["verdict"] in ("right", "tampered") or row["exercise"] not in EXERCISES:
        return ""
    return EXERCISES[row["exercise"]].hints[0]
