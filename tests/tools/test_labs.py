"""Copies of the course for students: they hold no solutions, and they run by themselves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import nbformat
import pytest

from labutils.tools import labs
from labutils.tools.cli import main
from tests.helpers import REPO
from tests.tools.test_cli import TINY

SOURCES = [
    "import labutils as lab; device = lab.setup()",
    "from labutils.files import runs_dir; print(runs_dir())",
    "from labutils.training.records import find_runs; print([r.name for r in find_runs()[0]])",
]


def test_a_copy_with_runs_has_the_records_no_solutions_and_passes_run_all(runs, tmp_path):
    assert main(["run", "fp32", *TINY]) == 0
    notebook = tmp_path / "quick.ipynb"
    cells = [nbformat.v4.new_code_cell(source, execution_count=1) for source in SOURCES]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), notebook)
    course = tmp_path / "course"
    assert main(["labs", "--student", str(course), "--with-runs", str(notebook)]) == 0
    assert len(list((course / "runs").glob("fp32-*.json"))) == 1
    assert not (course / "tests").exists() and not list(course.rglob("*solution*"))
    assert not list(course.glob("configs/my_*"))
    environment = {k: v for k, v in os.environ.items() if k != "LABUTILS_RUNS"}
    environment["PYTHONPATH"] = os.pathsep.join([str(course), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "labutils", "labs", "quick.ipynb"]
    done = subprocess.run(command, cwd=course, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    executed = nbformat.read(course / "runs" / "quick.ipynb", as_version=4)
    texts = [cell.outputs[0].text for cell in executed.cells if cell.outputs]
    assert texts[1] == f"{course / 'runs'}\n" and texts[2] == "['fp32']\n"
    assert "fp32" in (course / "runs" / "index.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "name", ["02", "02-Gradient_Accumulation", "02-Gradient_Accumulation.ipynb"]
)
def test_a_notebook_of_the_course_has_short_names(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # not the course's folder
    assert labs.find_notebook(name) == REPO / "02-Gradient_Accumulation.ipynb"
    assert labs.find_notebook("scaler") == REPO / "further" / "scaler.ipynb"


def test_a_wrong_name_ends_before_anything_runs_and_names_the_notebooks(runs, capsys):
    assert main(["labs", "02", "nosuch.ipynb"]) == 1
    printed, errors = capsys.readouterr()
    assert "no such notebook: nosuch.ipynb. There are: 01-" in errors
    assert "further/scaler.ipynb" in errors
    assert not printed and not runs.exists()


@pytest.mark.parametrize("content", [b"# A title\n", b"\xff\xfe", b"{}", b"[1]"])
def test_a_file_that_is_no_notebook_is_named_as_such(content, tmp_path, capsys):
    path = tmp_path / "text.md"
    path.write_bytes(content)
    for arguments in ([str(path)], ["--student", str(tmp_path / "copies"), str(path)]):
        assert main(["labs", *arguments]) == 1
        assert f"{path} is not a notebook" in capsys.readouterr().err


def test_runs_without_a_folder_for_copies_are_refused(capsys):
    assert main(["labs", "--with-runs", "02"]) == 2
    assert "--student FOLDER" in capsys.readouterr().err


def test_a_file_in_place_of_the_folder_is_named(tmp_path, capsys):
    file = tmp_path / "class"
    file.write_text("")
    assert main(["labs", "--student", str(file), "02"]) == 1
    assert "a file has that name; choose another" in capsys.readouterr().err


@pytest.mark.skipif(sys.platform == "win32", reason="no signals of this kind")
def test_ctrl_c_keeps_what_was_executed_and_begins_no_other_notebook(tmp_path):
    runs = tmp_path / "runs"
    sources = "print('as far as this')", "import time; time.sleep(99)"
    cells = [nbformat.v4.new_code_cell(source) for source in sources]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / "long.ipynb")
    process = subprocess.Popen(
        [sys.executable, "-m", "labutils", "labs", str(tmp_path / "long.ipynb"), "02"],
        cwd=REPO,
        env=os.environ | {"LABUTILS_RUNS": str(runs)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert "cell 1/2" in process.stdout.readline()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130 and err.endswith("interrupted in long.ipynb\ninterrupted\n")
    assert "02-" not in out and not list(runs.glob("02-*"))
    assert "as far as this" in (runs / "long.ipynb").read_text("utf-8")
    assert "as far as this" in (runs / "long.html").read_text("utf-8")


def test_where_nothing_can_be_written_no_notebook_runs(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LABUTILS_RUNS", str(tmp_path / "file"))
    monkeypatch.setattr(labs, "NotebookClient", None)  # it would be called
    assert main(["labs", "02"]) == 1
    assert "nothing can be written to" in capsys.readouterr().err
