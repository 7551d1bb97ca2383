from __future__ import annotations

import json

import pytest

from labutils.tools import grade
from labutils.tools.cli import main
from tests.helpers import committed, slow

SETUP = "import labutils as lab\nMIB = 2**20"
SMI = "shown = {}\nlab.checks.nvidia_smi(3.0, 3.6, 0.5, shown)"
BATCH = (
    "points = {{2: 900, 6: 1700}}\nlargest = {}\nlab.checks.largest_batch(points, 4096, largest)"
)
LEAK = "lab.checks.leak({})"
REPAIR = """
import torch.nn.functional as F

def repaired(model, batches, held_out, optimizer):
    largest, losses, curve = 0, [], []
    for x, y in batches:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        largest = max(largest, model[0](x).max().item())
        optimizer.step()
        losses.append(loss.item())
    return losses, losses, largest

lab.checks.repair(repaired)
"""


def submission(folder, name: str, *cells: str) -> None:
    body = {"nbformat": 4, "nbformat_minor": 5, "metadata": {}}
    body["cells"] = [
        {"cell_type": "code", "source": cell, "metadata": {}, "outputs": []} for cell in cells
    ]
    (folder / name).write_text(json.dumps(body))


def verdicts(table, name: str) -> dict[str, str]:
    return dict(
        zip(*(table[table.submission == name][key] for key in ("exercise", "verdict")), strict=True)
    )


def test_a_folder_of_all_kinds_of_notebooks_is_scored_to_the_end(tmp_path):
    submission(
        tmp_path,
        "good.ipynb",
        SETUP,
        "%pip list",
        SMI.format(4198.4),
        LEAK.format("'running_mean'"),
        BATCH.format(17),
        REPAIR,
    )
    submission(
        tmp_path,
        "mixed.ipynb",
        BATCH.format(18),
        SETUP,
        "raise RuntimeError('not needed')",
        SMI.format(None),
    )
    submission(
        tmp_path,
        "twice.ipynb",
        SETUP,
        SMI.format(1),
        "exit()",
        SMI.format(4198.4),
        "def (",
        LEAK.format("1 / 0"),
    )
    (tmp_path / "damaged.ipynb").write_text("{")
    submission(tmp_path, "empty.ipynb")
    table = grade.grade_folder(tmp_path)
    all_four = {"nvidia_smi", "leak", "repair", "largest_batch"}
    assert verdicts(table, "good.ipynb") == dict.fromkeys(all_four, "right") | {
        "repair": "wrong"  # a function of the reader's own is tried
    }
    assert verdicts(table, "mixed.ipynb") == {
        "nvidia_smi": "open",
        "leak": "missing",
        "repair": "missing",
        "largest_batch": "failed",
    }
    assert verdicts(table, "twice.ipynb") == {
        "nvidia_smi": "right",
        "leak": "failed",
        "repair": "missing",
        "largest_batch": "missing",
    }
    reasons = {(row.submission, row.exercise): row.reason for row in table.itertuples()}
    assert "the last counts" in reasons["twice.ipynb", "nvidia_smi"]
    assert "ZeroDivisionError" in reasons["twice.ipynb", "leak"]
    assert (
        "NameError" in reasons["mixed.ipynb", "largest_batch"]
    )  # its cell stands before the set-up
    assert "no notebook that can be read" in reasons["damaged.ipynb", ""]
    assert set(table[table.submission == "empty.ipynb"].verdict) == {"missing"}


@slow
def test_what_does_not_end_or_takes_all_memory_costs_one_exercise(tmp_path):
    hog, dies = "x = [bytearray(2**28) for _ in range(100)]", "import os\nos._exit(3)"
    never = "while True:\n    pass"
    submission(
        tmp_path,
        "hog.ipynb",
        SETUP,
        SMI.format(4198.4),
        f"{hog}\n{LEAK.format(1)}",
        BATCH.format(17),
    )
    submission(
        tmp_path,
        "dies.ipynb",
        SETUP,
        f"{dies}\n{SMI.format(1)}",
        LEAK.format("'running_mean'"),
        BATCH.format(17),
    )
    table = grade.grade_folder(tmp_path, memory_gib=3)
    assert verdicts(table, "hog.ipynb") == {
        "nvidia_smi": "right",
        "leak": "failed",
        "repair": "missing",
        "largest_batch": "right",
    }
    assert verdicts(table, "dies.ipynb") == {
        "nvidia_smi": "failed",
        "leak": "right",
        "largest_batch": "right",
    }
    submission(
        tmp_path, "never.ipynb", SETUP, f"{never}\n{SMI.format(1)}", LEAK.format("'running_mean'")
    )
    scores = grade.grade(tmp_path / "never.ipynb", seconds=12)
    assert [score.verdict for score in scores] == ["failed", "right", "missing"]
    assert scores[0].reason == "not done after 12 s"


def test_a_cell_brings_what_it_needs_and_nothing_else():
    cells = ["import a", "b = 1", "c = {}", "c['x'] = b", "d = a.f(c)", "1 / 0", "print(d)"]
    assert grade.needed_cells(cells, 6) == [
        "import a",
        "b = 1",
        "c = {}",
        "c['x'] = b",
        "d = a.f(c)",
        "print(d)",
    ]


def test_the_local_names_of_a_function_bring_no_cell():
    cells = ["model = slow()", "k = 2", "def f(x):\n    model = x * k\n    return model", "f(1)"]
    assert grade.needed_cells(cells, 3) == cells[1:]
    comprehension = "print([model for model in range(k)])"
    assert grade.needed_cells([*cells[:2], comprehension], 2) == ["k = 2", comprehension]


@pytest.mark.parametrize(
    "name", ["01-Mixed_Precision", "02-Gradient_Accumulation", "04-Memory_Profiling"]
)
def test_the_courses_own_notebooks_have_their_exercises(tmp_path, name):
    (tmp_path / "x.ipynb").write_text(committed(f"{name}.ipynb"), encoding="utf-8")
    names = grade.expected(grade.code_cells(tmp_path / "x.ipynb"))
    assert len(names) >= 3 and ("leak" in names) == name.startswith("04")


def test_csv_from_the_command_line(tmp_path, capsys):
    assert main(["grade", str(tmp_path)]) == 1
    assert "no notebook in" in capsys.readouterr().err
    submission(tmp_path, "a.ipynb", SETUP, SMI.format(5))
    assert main(["grade", str(tmp_path), "--csv"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "submission,exercise,verdict,reason"
    assert lines[1].startswith("a.ipynb,nvidia_smi,wrong,")


OPTIONAL = [
    ("numerics", "lost_below"),
    ("scaler", "break_clipping"),
    ("speed", "speed_control"),
    ("accumulation", "beta2"),
]


@pytest.mark.parametrize(("name", "exercise"), OPTIONAL)
def test_an_optional_notebook_is_scored_by_its_own_exercises(tmp_path, name, exercise):
    text = committed(f"further/{name}.ipynb")
    (tmp_path / "x.ipynb").write_text(text, encoding="utf-8")
    scores = grade.grade(tmp_path / "x.ipynb")
    assert [(score.exercise, score.verdict) for score in scores] == [(exercise, "open")]
