"""Write scores as the files that learning platforms take.

Moodle: the grading worksheet of an assignment. Its import asks for the columns Identifier, Grade
and Last modified (grade): mod/assign/feedback/offline/importgradeslib.php of moodle/moodle. Canvas:
the columns of its gradebook
(https://teaching.resources.osu.edu/toolsets/carmencanvas/, "Import CSV file").
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from labutils.tools.grading.submissions import student_of

CANVAS_COLUMNS = ["Student", "ID", "SIS User ID", "SIS Login ID", "Section"]


def by_student(table: pd.DataFrame) -> pd.DataFrame:
    """Return a row for each student: points, of how many, and the reasons as feedback.

    Points are NaN, an empty cell in a file, where a person still has to look at an answer.
    """
    rows = []
    for student, own in table.groupby("student", sort=True):
        lines = [
            f"{row.exercise or row.submission}: {row.verdict}. {row.reason}".strip()
            for row in own.itertuples()
        ]
        number = student_of(Path(own.submission.iloc[0]), Path())[1]
        rows.append((student, number, own.points.sum(skipna=False), own.of.sum(), "\n".join(lines)))
    return pd.DataFrame(rows, columns=["student", "number", "points", "of", "feedback"])


def moodle(table: pd.DataFrame) -> pd.DataFrame:
    """Return the scores as Moodle's grading worksheet.

    The numbers of the participants come from the folders of its "Download all submissions".
    """
    scores = by_student(table)
    return pd.DataFrame(
        {
            "Identifier": [f"Participant {number}" if number else "" for number in scores.number],
            "Full name": scores.student,
            "Grade": scores.points,
            "Maximum Grade": scores.of.max(),
            "Last modified (grade)": "-",
            "Feedback comments": scores.feedback,
        }
    )


def canvas(table: pd.DataFrame, assignment: str) -> pd.DataFrame:
    """Return the scores as a gradebook that Canvas imports, with the row of possible points."""
    scores = by_student(table)
    possible = ["Points Possible", *[""] * (len(CANVAS_COLUMNS) - 1), scores.of.max()]
    rows = [[one.student, one.number, "", "", "", one.points] for one in scores.itertuples()]
    return pd.DataFrame([possible, *rows], columns=[*CANVAS_COLUMNS, assignment])
