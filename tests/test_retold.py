"""The rules of a core notebook: short cells, one heading a cell, guesses that are answered."""

from __future__ import annotations

import re

import nbformat
import pytest

from labutils.tools.cli import main
from tests.helpers import committed

RETOLD = ["01-Mixed_Precision.ipynb", "02-Gradient_Accumulation.ipynb"]
CHECKED = "nbval-check-output"
FURTHER = "Going further"  # what follows this heading is not core
MOST_LINES, MOST_COLUMNS, MOST_WORDS = 15, 100, 4000
GUESSED = re.compile(r"lab\.guess\(\s*\"(\w+)\"")
ANSWERED = re.compile(r"lab\.answer\(\s*\"(\w+)\"")


def cells_of(name: str) -> list[nbformat.NotebookNode]:
    return nbformat.reads(committed(name), as_version=4).cells


def core_of(name: str) -> list[nbformat.NotebookNode]:
    found = []
    for cell in cells_of(name):
        if cell.cell_type == "markdown" and re.match(rf"#+ {FURTHER}", cell.source):
            break
        found.append(cell)
    return found


def code_of(cells: list[nbformat.NotebookNode]) -> str:
    return "\n".join(cell.source for cell in cells if cell.cell_type == "code")


@pytest.mark.parametrize("name", RETOLD)
def test_a_core_cell_is_one_idea(name):
    for cell in core_of(name):
        if cell.cell_type == "code":
            lines = cell.source.splitlines()
            assert len(lines) <= MOST_LINES, cell.source
            assert max(map(len, lines), default=0) <= MOST_COLUMNS, cell.source


@pytest.mark.parametrize("name", RETOLD)
def test_a_heading_begins_its_cell_and_numbers_have_no_gap(name):
    numbers = []
    for cell in cells_of(name):
        if cell.cell_type != "markdown":
            continue
        headings = re.findall(r"^#+ .*$", cell.source, re.M)
        assert len(headings) <= 1, headings
        if headings:
            assert cell.source.startswith(headings[0])
            number = re.match(r"## (\d+) ·", headings[0])
            numbers += [int(number[1])] if number else []
    assert numbers == list(range(1, len(numbers) + 1))


@pytest.mark.parametrize("name", RETOLD)
def test_every_section_that_is_named_exists(name):
    text = "\n".join(cell.source for cell in cells_of(name) if cell.cell_type == "markdown")
    there = set(re.findall(r"^## (\w+) ·", text, re.M))
    named = set(re.findall(r"(?<!notebook \d\d, )\bsection (\d+|[A-Z])\b", text))
    assert named <= there, named - there


@pytest.mark.parametrize("name", RETOLD)
def test_every_guess_has_its_cell_and_its_answer(name):
    code = code_of(core_of(name))
    guessed, answered = GUESSED.findall(code), ANSWERED.findall(code)
    assert 4 <= len(guessed) <= 8
    assert len(set(guessed)) == len(guessed)
    assert set(guessed) == set(answered)
    for key in guessed:  # before its answer
        assert code.index(f'"{key}"') < code.index("lab.answer(", code.index(f'"{key}"'))
    assert "lab.scores()" in code
    loose = re.findall(r"^guess_\w+ = None", code, re.M)
    assert not loose, loose


@pytest.mark.parametrize("name", RETOLD)
def test_checked_cells_are_marked_by_a_tag(name):
    checked = 0
    for cell in cells_of(name):
        assert "NBVAL_CHECK_OUTPUT" not in cell.source
        checked += CHECKED in cell.metadata.get("tags", [])
    assert checked >= 10


@pytest.mark.parametrize("name", RETOLD)
def test_core_prose_is_read_in_one_sitting(name):
    words = 0
    for cell in core_of(name):
        if cell.cell_type == "markdown" and not cell.source.startswith("### Sources"):
            lines = [line for line in cell.source.splitlines() if line[:1] not in "#|"]
            words += len(" ".join(lines).split())
            assert not re.fullmatch(r"\*\*\w+\.\*\*", cell.source.strip()), cell.source
    assert words <= MOST_WORDS


@pytest.mark.parametrize("name", RETOLD)
def test_nothing_is_promised_for_later_and_figures_have_claims(name):
    for cell in cells_of(name):
        for output in cell.get("outputs", []):
            text = output.get("text", "")
            assert "not recorded yet" not in text and "not installed" not in text


def test_a_class_gets_copies_without_outputs(tmp_path, capsys):
    assert main(["labs", "--student", str(tmp_path)]) == 0
    copies = sorted(tmp_path.glob("0*.ipynb"))
    assert len(copies) == 4
    for copy in copies:
        cells = nbformat.read(copy, as_version=4).cells
        assert all(not cell.outputs for cell in cells if cell.cell_type == "code")
        assert [cell.source for cell in cells] == [cell.source for cell in cells_of(copy.name)]
    assert main(["labs", "--student", str(tmp_path)]) == 1
    assert "exists already" in capsys.readouterr().err
