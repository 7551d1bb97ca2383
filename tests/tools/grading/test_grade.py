from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import sys
import time

import pandas as pd
import pytest

from labutils.checks import EXERCISES
from labutils.tools.cli import main
from labutils.tools.grading import export, pages, queue
from labutils.tools.grading.grade import COLUMNS, grade_folder, read_points
from labutils.tools.grading.judge import given, judge
from labutils.tools.grading.notebook import given_of
from labutils.tools.grading.process import Limits, Outcome
from labutils.tools.grading.similar import alike
from labutils.tools.grading.submissions import Task, tasks_of
from tests.helpers import slow
from tests.tools.grading.school import KINDS, hand_in, write_class

SMI = "shown = {}\nlab.checks.nvidia_smi(3.0, 3.6, 0.5, shown)"
LEAK = "lab.checks.leak({})"
QUICK = Limits(seconds=5)


def submission(folder, name: str, *cells: str) -> None:
    body = {"nbformat": 4, "nbformat_minor": 5, "metadata": {}}
    body["cells"] = [
        {"cell_type": "code", "source": cell, "metadata": {}, "outputs": []} for cell in cells
    ]
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(json.dumps(body))


def verdicts(table, name: str) -> dict[str, str]:
    own = table[table.submission == name]
    return dict(zip(own.exercise, own.verdict, strict=True))


def test_a_folder_of_all_kinds_of_notebooks_is_scored_to_the_end(tmp_path):
    submission(
        tmp_path, "good.ipynb", "%pip list", SMI.format(4198.4), LEAK.format("'running_mean'")
    )
    submission(tmp_path, "twice.ipynb", SMI.format(1), "exit()", SMI.format(4198.4), "def (\nleak")
    (tmp_path / "damaged.ipynb").write_text("{")
    submission(tmp_path, "empty.ipynb")
    table = grade_folder(tmp_path, QUICK)
    assert list(table.columns) == COLUMNS
    missing = {"repair": "missing", "largest_batch": "missing"}
    assert verdicts(table, "good.ipynb") == {"nvidia_smi": "right", "leak": "right"} | missing
    twice = {"nvidia_smi": "right", "leak": "missing"} | missing
    assert verdicts(table, "twice.ipynb") == twice
    reasons = {(row.submission, row.exercise): row.reason for row in table.itertuples()}
    assert "the last counts" in reasons["twice.ipynb", "nvidia_smi"]
    assert reasons["twice.ipynb", "leak"] == "its cell is not Python"
    assert "no notebook that can be read" in reasons["damaged.ipynb", ""]
    assert set(table[table.submission == "empty.ipynb"].verdict) == {"missing"}


def test_a_second_run_judges_only_what_is_new_and_a_killed_one_goes_on(tmp_path):
    folder, kept = tmp_path / "in", tmp_path / "kept.jsonl"
    submission(folder, "a.ipynb", SMI.format(4198.4), LEAK.format("1 / 0"))
    counts = []

    def progress(keys):
        counts.append(len(keys))
        return lambda exercise: None

    first = grade_folder(folder, QUICK, kept, progress=progress)
    submission(folder, "late.ipynb", SMI.format(4198.4), LEAK.format("'forward'"))
    second = grade_folder(folder, QUICK, kept, progress=progress)
    assert counts == [2, 1]  # the late one's first answer is known, too
    assert verdicts(second, "a.ipynb") == verdicts(first, "a.ipynb")
    with kept.open("a") as file:
        file.write('["half a li')  # killed while it wrote
    grade_folder(folder, QUICK, kept, progress=progress)
    assert counts == [2, 1, 0]


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
def test_a_run_that_is_killed_leaves_what_it_has_judged(tmp_path):
    folder, kept = tmp_path / "in", tmp_path / "kept.jsonl"
    submission(folder, "a.ipynb", SMI.format(4198.4))
    submission(
        folder,
        "b.ipynb",
        "import time\nfor i in range(60):\n    x = time.sleep(1)",
        "lab.checks.leak(x)",
    )
    limits = Limits(seconds=60)
    run = multiprocessing.get_context("fork").Process(
        target=grade_folder, args=(folder, limits, kept), kwargs={"n_at_once": 1}
    )
    run.start()
    deadline = time.monotonic() + 60
    while not kept.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    os.kill(run.pid, signal.SIGKILL)
    run.join()
    _, values = json.loads(kept.read_text().splitlines()[0])
    assert values["verdict"] == "right"


def test_what_ran_out_of_time_is_judged_again_on_demand_only(tmp_path):
    kept = queue.Kept(tmp_path / "kept.jsonl")
    kept.add("slow", Outcome("failed", "time", is_final=False))
    kept.add("done", Outcome("right", share=1.0))
    assert set(queue.Kept(kept.path).outcomes) == {"slow", "done"}
    assert set(queue.Kept(kept.path, retry=True).outcomes) == {"done"}


def test_many_at_once_judge_as_one_by_one_does(tmp_path):
    for number, kind in enumerate(("wrong", "right", "mixed")):
        text, _ = hand_in("01-Mixed_Precision", kind, number)
        (tmp_path / f"{kind}.ipynb").write_text(text)
    tasks = [task for path in tmp_path.glob("*.ipynb") for task in tasks_of(path, tmp_path)]
    kept = queue.Kept(None)
    queue.judge_all(tasks, QUICK, kept, n_at_once=3)
    for task in tasks:
        course = given_of(task.exercise)
        alone = judge(task.exercise, task.answer, course, given(course), QUICK)
        assert kept.outcomes[task.key] == alone


@slow
def test_a_class_gets_the_verdicts_that_are_sure(tmp_path):
    sure = write_class(tmp_path, len(KINDS))
    table = grade_folder(tmp_path, QUICK)
    found = {(row.submission, row.exercise): row.verdict for row in table.itertuples()}
    assert {place: found[place] for place in sure} == sure and len(sure) > 50
    kinds = {place: KINDS[int(place[0].split("_")[0].split()[1])] for place in found}
    for row in table.itertuples():
        if kinds[row.submission, row.exercise] == "cheats":
            assert "look at this: " in row.reason or pd.isna(row.points)
    endless = {verdict for place, verdict in found.items() if kinds[place] == "endless"}
    assert endless == {"failed"}
    assert not [
        place for place, kind in kinds.items() if kind == "wrong" and found[place] == "right"
    ]


def test_what_a_net_caught_costs_no_point_before_a_person_has_looked(tmp_path):
    submission(tmp_path, "a.ipynb", "import gc\ngc.collect()", SMI.format(4198.4))
    submission(tmp_path, "b.ipynb", "import gc\nseen = gc.get_objects()", LEAK.format("seen"))
    table = grade_folder(tmp_path, QUICK).set_index(["submission", "exercise"])
    honest = table.loc["a.ipynb", "nvidia_smi"]
    assert honest.verdict == "right" and honest.points == honest.of
    assert "look at this: it imports" in honest.reason
    caught = table.loc["b.ipynb", "leak"]
    assert caught.verdict == "tampered" and pd.isna(caught.points)
    scores = export.by_student(table.reset_index()).set_index("student").points
    assert scores["a"] > 0 and pd.isna(scores["b"])


def test_points_come_from_a_file_whose_mistakes_are_named(tmp_path):
    assert set(read_points()) == set(EXERCISES)
    file = tmp_path / "points.yaml"
    for text, problem in (
        ("leek: 1", "no exercise 'leek'"),
        ("leak: many", "points are a number"),
        ("leak", "are missing"),
        ("leak: [", "points.yaml"),
    ):
        file.write_text(text)
        with pytest.raises(ValueError, match=problem):
            read_points(file)
    submission(tmp_path, "a.ipynb", SMI.format(4198.4), LEAK.format("'running_mean'"))
    table = grade_folder(tmp_path, QUICK, points={"nvidia_smi": 5, "leak": 0})
    assert list(table[table.verdict == "right"].points) == [5]
    assert "leak" not in set(table.exercise)


def table_of(*rows) -> pd.DataFrame:
    return pd.DataFrame(rows, columns=COLUMNS)


CLASS = table_of(
    ["Ada_7_assignsubmission_file/04.ipynb", "leak", "right", "", 1.0, 1.0, "Ada"],
    [
        "Ada_7_assignsubmission_file/04.ipynb",
        "repair",
        "wrong",
        "rises by 3.5 KiB",
        0.0,
        3.0,
        "Ada",
    ],
    ["bo_8_9_04.ipynb", "leak", "wrong", "a <peak>", 0.0, 1.0, "bo"],
    ["bo_8_9_04.ipynb", "repair", "wrong", "rises by 12 KiB", 1.5, 3.0, "bo"],
)


def test_the_files_for_learning_platforms_have_their_columns():
    moodle = export.moodle(CLASS)
    needed = {"Identifier", "Grade", "Last modified (grade)"}
    assert needed <= set(moodle.columns)
    assert list(moodle.Identifier) == ["Participant 7", "Participant 8"]
    assert list(moodle.Grade) == [1.0, 1.5] and list(moodle["Maximum Grade"]) == [4.0, 4.0]
    canvas = export.canvas(CLASS, "Lab 4")
    assert list(canvas.columns) == [*export.CANVAS_COLUMNS, "Lab 4"]
    assert canvas.Student[0] == "Points Possible" and canvas["Lab 4"][0] == 4.0
    assert list(canvas["Lab 4"][1:]) == [1.0, 1.5] and list(canvas.ID[1:]) == ["7", "8"]


def test_misconceptions_that_differ_in_a_number_are_one():
    found = pages.misconceptions(CLASS)
    assert found["repair"].to_dict() == {"rises by … KiB": 2}
    assert found["leak"].to_dict() == {"right": 1, "a <peak>": 1}


def test_the_pages_say_what_the_table_says(tmp_path):
    pages.write_report(CLASS, [], tmp_path / "report.html")
    report = (tmp_path / "report.html").read_text()
    assert "2 × rises by … KiB." in report and "a &lt;peak&gt;" in report
    assert "http" not in report.replace("data:image", "")
    pages.write_student_pages(CLASS, tmp_path / "students")
    page = (tmp_path / "students" / "Ada.html").read_text()
    assert "1 of 4 points" in page and "rises by 3.5 KiB" in page
    assert EXERCISES["repair"].hints[0].split("?")[0] in page.replace("&#39;", "'")
    assert "bo" not in {word.strip(".,") for word in page.split()}


def test_copied_texts_are_listed_and_short_or_own_ones_are_not():
    long = " ".join(f"value_{i} = compute(value_{i}, {i})" for i in range(20))
    other = " ".join(f"mine_{i} = other(mine_{i}) + {i * i}" for i in range(20))
    texts = {"a": long, "b": long + " # mine", "c": other, "d": "x = 3", "e": "x = 3"}
    tasks = [Task("n.ipynb", student, "repair", text=text) for student, text in texts.items()]
    (pair,) = alike(tasks)
    assert {pair.one, pair.other} == {"a", "b"} and pair.share > 0.9


def test_the_command_writes_all_files_and_prints_csv(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("LABUTILS_RUNS", str(tmp_path / "runs"))
    folder = tmp_path / "class"
    folder.mkdir()
    assert main(["grade", str(folder)]) == 1
    assert "no notebook in" in capsys.readouterr().err
    submission(folder, "a.ipynb", SMI.format(5))
    assert main(["grade", str(folder), "--csv"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == ",".join(COLUMNS)
    assert lines[1].startswith("a.ipynb,nvidia_smi,wrong,")
    out = tmp_path / "runs" / "grades" / "class"
    names = {"scores.csv", "moodle.csv", "canvas.csv", "report.html", "verdicts.jsonl"}
    assert names <= {path.name for path in out.iterdir()}
    assert (out / "students" / "a.html").exists()
    points = tmp_path / "points.yaml"
    points.write_text("leek: 2")
    assert main(["grade", str(folder), "--points", str(points)]) == 1
    assert "leek" in capsys.readouterr().err
    shutil.rmtree(folder)
    assert main(["grade", str(folder)]) == 1


def test_a_capstone_is_judged_by_its_file(tmp_path):
    from tests.helpers import REPO

    solution = REPO / "tests" / "solutions" / "capstone_autocast.yaml"
    (tmp_path / "ada").mkdir()
    shutil.copy(solution, tmp_path / "ada" / "capstone.yaml")
    submission(tmp_path, "ada/capstone.ipynb", "lab.checks.capstone(trial)")
    submission(tmp_path, "bo/capstone.ipynb", "lab.checks.capstone(trial)")
    (tmp_path / "bo2").mkdir()
    (tmp_path / "bo2" / "my_capstone.yaml").write_text("precision: fp23\n")
    table = grade_folder(tmp_path, QUICK)
    rows = {row.student: row for row in table.itertuples()}
    assert rows["bo"].verdict == "missing"
    assert rows["bo2"].verdict == "wrong" and "fp23" in rows["bo2"].reason
    assert rows["ada"].verdict in ("right", "wrong")
