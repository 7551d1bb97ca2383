"""The command `grade`: scores, files for learning platforms, pages."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from labutils.files import make_folder, runs_dir


def grade(options: argparse.Namespace) -> int:
    """Judge a folder of submissions, write tables and pages, and print the table or a summary."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # answers are judged on the CPU, in forks
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import torch

    from labutils.tools.grading.grade import POINTS, grade_folder, read_points
    from labutils.tools.grading.process import Limits
    from labutils.tools.grading.similar import alike
    from labutils.tools.grading.submissions import tasks_in

    torch.set_num_threads(1)
    if not options.folder.is_dir():
        print(f"no folder {options.folder}", file=sys.stderr)
        return 1
    out = options.out or runs_dir() / "grades" / options.folder.resolve().name
    try:
        make_folder(out)
        table = grade_folder(
            options.folder,
            Limits(options.seconds, options.memory_gib),
            kept=out / "verdicts.jsonl",
            points=read_points(options.points or POINTS),
            n_at_once=options.at_once,
            with_capstone=not options.no_capstone,
            retry=options.retry,
            progress=_progress,
        )
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    _write(table, alike(tasks_in(options.folder)), out, options.folder.resolve().name)
    if options.csv:
        print(table.to_csv(index=False), end="")
        return 0
    print(table.verdict.value_counts().to_string(header=False))
    print(f"wrote {out}: scores.csv, moodle.csv, canvas.csv, report.html, students/")
    return 0


def _progress(keys: Sequence[str]) -> Callable[[str], object]:
    from tqdm import tqdm

    seconds = 0.1 if sys.stderr.isatty() else 30  # a log is no place for a moving bar
    bar = tqdm(
        total=len(keys),
        desc="answers judged",
        file=sys.stderr,
        disable=not keys,
        mininterval=seconds,
    )

    def tell(exercise: str) -> None:
        bar.set_postfix_str(exercise, refresh=False)
        bar.update()
        if bar.n >= bar.total:
            bar.close()

    return tell


def _write(table, pairs, out: Path, assignment: str) -> None:
    from labutils.tools.grading import export, pages

    table.to_csv(out / "scores.csv", index=False)
    export.moodle(table).to_csv(out / "moodle.csv", index=False)
    export.canvas(table, assignment).to_csv(out / "canvas.csv", index=False)
    pages.write_report(table, pairs, out / "report.html")
    pages.write_student_pages(table, out / "students")
