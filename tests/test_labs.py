"""Copies of the course for students: they hold no solutions, and they run by themselves."""

from __future__ import annotations

import re
import sys

import nbformat
import pytest

from labutils.course import labs
from labutils.course.cli import main
from tests.helpers import REPO, interrupted
from tests.test_grade import write


def test_a_student_copy_has_no_outputs_and_no_solutions(tmp_path, capsys):
    solution = nbformat.v4.new_code_cell("answer = 42")
    solution.metadata["tags"] = ["solution"]
    question = nbformat.v4.new_code_cell("print('?')", execution_count=1)
    question.outputs = [nbformat.v4.new_output("stream", text="?")]
    notebook = tmp_path / "quick.ipynb"
    (tmp_path / "two.svg").touch()
    text = nbformat.v4.new_markdown_cell("![of two\nlines](two.svg), [on](quick.ipynb), [](a.b#c)")
    nbformat.write(nbformat.v4.new_notebook(cells=[question, solution, text]), notebook)
    assert main(["labs", "--student", str(tmp_path / "course"), str(notebook)]) == 0
    cell, text = nbformat.read(tmp_path / "course" / "quick.ipynb", as_version=4).cells
    assert text.source == "![of two\nlines](../two.svg), [on](quick.ipynb), [](a.b#c)"
    assert cell.source == "print('?')" and not cell.outputs and cell.execution_count is None
    assert main(["labs", "--student", str(tmp_path / "course"), str(notebook)]) == 1
    assert "exists already; choose another folder" in capsys.readouterr().err


@pytest.mark.parametrize("path", labs.all_notebooks(), ids=lambda path: path.stem)
def test_a_copy_says_where_to_guess_and_nothing_of_outputs(path, tmp_path):
    copy = nbformat.read(labs.write_student_copy(path, tmp_path), as_version=4)
    code = "\n".join(cell.source for cell in copy.cells if cell.cell_type == "code")
    assert code.count("lab.guess(") == code.count(", ...)") > 0
    texts = [cell.source for cell in copy.cells if cell.cell_type == "markdown"]
    assert not re.search(r"saved outputs|[Cc]lear (the|them)", " ".join(texts[0].split()))


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("02", "02-Gradient_Accumulation.ipynb"),
        ("02-Gradient_Accumulation", "02-Gradient_Accumulation.ipynb"),
        ("scaler.ipynb", "further/scaler.ipynb"),
    ],
)
def test_a_notebook_of_the_course_has_short_names(name, path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # not the course's folder
    assert labs.find_notebook(name) == REPO / path


def test_a_wrong_name_ends_before_anything_runs_and_names_the_notebooks(runs, capsys):
    assert main(["labs", "02", "nosuch.ipynb"]) == 1
    printed, errors = capsys.readouterr()
    assert "no such notebook: nosuch.ipynb. There are: 01-" in errors
    assert "further/scaler.ipynb" in errors
    assert not printed and not runs.exists()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"\xff\xfe", "it is UTF-16 text; save it as UTF-8"),
        (b"{}", "it is damaged, or ends too early"),
        (
            b'{"nbformat": 4, "nbformat_minor": 4, "metadata": {}, "cells": [{"metadata": {}}]}',
            "it is damaged",
        ),
        (b'{"nbformat": 4, "nbformat_minor": "x", "metadata": {}, "cells": []}', "it is damaged"),
        (b"\xef\xbb\xbf\n<html>", "it is a web page; download the notebook itself"),
        (b"PK\3\4", "it is a zip archive; unpack it"),
        (b"\n", "it is empty"),
        (b"# Text", "Jupyter cannot open it; choose another file"),
    ],
)
def test_a_file_that_is_no_notebook_is_named_as_such(content, reason, tmp_path, capsys):
    path = tmp_path / "lab.ipynb"
    path.write_bytes(content)
    for arguments in ([str(path)], ["--student", str(tmp_path / "copies"), str(path)]):
        assert main(["labs", *arguments]) == 1
        assert f"{path} is not a notebook: {reason}" in capsys.readouterr().err


@pytest.mark.skipif(sys.platform == "win32", reason="no signals of this kind")
def test_ctrl_c_keeps_what_was_executed_and_begins_no_other_notebook(runs, tmp_path):
    write(tmp_path / "long.ipynb", ["print('as far as this')", "import time; time.sleep(99)"])
    # 1/2: of the progress bar
    out, err, code = interrupted(" 1/2 ", "labs", str(tmp_path / "long.ipynb"), "02")
    assert code == 130 and err.endswith("interrupted in long.ipynb\n")
    assert "02-" not in out and not list(runs.glob("02-*"))
    assert "as far as this" in (runs / "long.ipynb").read_text("utf-8")


@pytest.mark.parametrize("keep_going", [False, True])
def test_what_follows_a_cell_that_fails_is_executed_if_asked_for(
    keep_going, runs, tmp_path, capsys
):
    path = tmp_path / "fails.ipynb"
    cells = [nbformat.v4.new_code_cell(source) for source in ("1 / 0", "1 / 0", "print('after')")]
    cells[1].metadata["tags"] = ["raises-exception"]
    # of another machine: it is gone where the cell is not reached
    cells[2].outputs = [nbformat.v4.new_output("stream", text="on another machine")]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
    assert main(["labs", str(path), *(["--keep-going"] if keep_going else [])]) == 1
    last = nbformat.read(runs / "fails.ipynb", as_version=4).cells[-1]
    assert [output.text for output in last.outputs] == ["after\n"] * keep_going
    assert ("failed: cells 0 of fails.ipynb" in capsys.readouterr().err) == keep_going


def test_a_progress_bar_is_kept_as_it_ended(runs, tmp_path):
    path = tmp_path / "bar.ipynb"
    source = "import sys\nfor n in (0, 50, 100): print(f'\\r{n} %', end='', flush=True)\nprint()"
    write(path, [source, "{}['gone']"])
    assert not labs.execute(path)
    bar, error = nbformat.read(runs / "bar.ipynb", as_version=4).cells
    assert [output.text for output in bar.outputs] == ["100 %\n"]
    assert error.outputs[0].traceback == ["KeyError: 'gone'"]  # no frames, no folders
    assert "execution" not in bar.metadata
