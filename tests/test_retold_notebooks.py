"""What a notebook that has been retold keeps: short cells, guesses that are answered, own names."""

from __future__ import annotations

import ast
import re

import nbformat
import pytest
from nbclient import NotebookClient

from labutils.tools.cli import main
from tests.helpers import REPO, committed, slowest

RETOLD = [
    "01-Mixed_Precision.ipynb",
    "02-Gradient_Accumulation.ipynb",
    "03-Gradient_Checkpointing.ipynb",
    "04-Memory_Profiling.ipynb",
]
FURTHER = sorted(f"further/{path.name}" for path in REPO.glob("further/*.ipynb"))
WITH_FURTHER = [*RETOLD, *FURTHER]
GUESS = re.compile(r'lab\.guess\(\s*"(\w+)",\s*(f?"[^"]*")\s*\)')
CHECKED = "nbval-check-output"


def cells(name: str) -> list[nbformat.NotebookNode]:
    return nbformat.reads(committed(name), as_version=4).cells


def code(name: str) -> list[str]:
    return [cell.source for cell in cells(name) if cell.cell_type == "code"]


def core(name: str) -> list[nbformat.NotebookNode]:
    found = cells(name)
    ends = [i for i, cell in enumerate(found) if cell.source.startswith("# Going further")]
    return found[: ends[0]] if ends else found


@pytest.mark.parametrize("name", WITH_FURTHER)
def test_code_cells_have_few_lines_of_a_hundred_columns(name):
    most = 20 if name.startswith("further/") else 15
    for source in code(name):
        lines = source.splitlines()
        assert len(lines) <= most, lines[0]
        assert max(map(len, lines)) <= 100, lines[0]


@pytest.mark.parametrize("name", WITH_FURTHER)
def test_a_heading_begins_its_cell_and_is_the_only_one(name):
    for cell in cells(name):
        if cell.cell_type == "markdown":
            headings = re.findall(r"^#+ ", cell.source, re.M)
            assert len(headings) <= 1, cell.source
            assert not headings or cell.source.startswith("#"), cell.source


@pytest.mark.parametrize("name", RETOLD)
def test_the_core_is_read_in_one_sitting(name):
    words = 0
    for cell in core(name):
        if cell.cell_type == "markdown" and not cell.source.startswith("### Sources"):
            lines = [line for line in cell.source.splitlines() if line[:1] not in "#|"]
            words += len(" ".join(lines).split())
            assert not re.fullmatch(r"\*\*\w+\.\*\*", cell.source.strip()), cell.source
    assert words <= 4000


@pytest.mark.parametrize("name", WITH_FURTHER)
def test_section_numbers_have_no_gap(name):
    text = "\n".join(cell.source for cell in cells(name) if cell.cell_type == "markdown")
    numbers = [int(number) for number in re.findall(r"^## (\d+) ·", text, re.M)]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    assert numbers[0] in (0, 1)


@pytest.mark.parametrize("name", WITH_FURTHER)
def test_nothing_is_promised_for_later(name):
    for cell in cells(name):
        for output in cell.get("outputs", []):
            text = output.get("text", "")
            assert "not recorded yet" not in text and "not installed" not in text


def test_a_class_gets_copies_without_outputs(tmp_path, capsys):
    assert main(["labs", "--student", str(tmp_path)]) == 0
    originals = {
        path.relative_to(REPO): path
        for path in [*REPO.glob("0*.ipynb"), *REPO.glob("further/*.ipynb")]
    }
    assert {path.relative_to(tmp_path) for path in tmp_path.rglob("*.ipynb")} == originals.keys()
    for name, original in originals.items():
        copied = nbformat.read(tmp_path / name, as_version=4).cells
        assert all(not cell.outputs for cell in copied if cell.cell_type == "code")
        sources = [cell.source for cell in nbformat.read(original, as_version=4).cells]
        assert [cell.source for cell in copied] == sources
    assert main(["labs", "--student", str(tmp_path)]) == 1
    assert "exists already" in capsys.readouterr().err


@pytest.mark.parametrize("name", WITH_FURTHER)
def test_sections_that_are_named_exist(name):
    text = "\n".join(cell.source for cell in cells(name))
    there = set(re.findall(r"^## (\w+) ·", text, re.M))
    assert set(re.findall(r"[Ss]ection (\d+|[A-Z])\b", text)) <= there


@pytest.mark.parametrize("name", RETOLD)
def test_ten_cells_are_checked_by_their_tag(name):
    tagged = [cell for cell in cells(name) if CHECKED in cell.metadata.get("tags", [])]
    assert len(tagged) >= (2 if name.startswith("further/") else 10)
    assert not any("NBVAL" in source for source in code(name))


@pytest.mark.parametrize("name", WITH_FURTHER)
def test_few_guesses_each_before_its_answer(name):
    text = "\n".join(code(name))
    guesses = [match.group(1) for match in GUESS.finditer(text)]
    fewest = 2 if name.startswith("further/") else 5
    assert fewest <= len(guesses) == len(set(guesses)) <= 7
    for guess in guesses:
        asked = re.search(rf'lab\.guess\(\s*"{guess}"', text).start()
        assert asked < text.index(f'lab.answer("{guess}"')
    assert text.count("lab.guess(") == text.count("lab.answer(") == len(guesses)
    assert "lab.scores()" in text


def results(name: str) -> list[str]:
    """Return the code of the section *Results*."""
    found, is_inside = [], False
    for cell in cells(name):
        if cell.cell_type == "markdown" and re.match(r"##? ", cell.source):
            is_inside = "Results" in cell.source.splitlines()[0]
        elif cell.cell_type == "code" and is_inside:
            found.append(cell.source)
    return found


@pytest.mark.parametrize("name", WITH_FURTHER)
def test_results_never_train(name):
    assert results(name)
    assert not re.search(r"\brun_|\btrain\(|\bmeasure", "\n".join(results(name)))


def names_of(source: str) -> tuple[set[str], set[str]]:
    """Return (names that a cell assigns, names that it takes from elsewhere)."""
    assigns, reads, arguments = set(), set(), set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Name):
            (reads if isinstance(node.ctx, ast.Load) else assigns).add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            assigns.add(node.name)
        elif isinstance(node, ast.arg):
            arguments.add(node.arg)
        elif isinstance(node, ast.alias):
            arguments.add(node.asname or node.name.partition(".")[0])
    return assigns, reads - assigns - arguments


def shared_names(sources: list[str]) -> dict[str, int]:
    """Return {name that some cell takes from others: how many cells assign it}, if several do."""
    assigned = [names_of(source)[0] for source in sources]
    taken: set[str] = set()
    for source in sources:
        taken |= names_of(source)[1]
    counts = {name: sum(name in names for names in assigned) for name in taken}
    return {name: n for name, n in counts.items() if n > 1}


@pytest.mark.parametrize("name", WITH_FURTHER)
def test_a_name_that_cells_share_is_assigned_by_one_cell(name):
    """So a cell that is run again finds what it found the first time."""
    names = shared_names(code(name))
    if name == "further/large_models.ipynb":
        names.pop("RUNS", None)  # its next cell changes the runs where BF16 or memory is missing
    assert names == {}


def test_a_name_with_two_makers_is_noticed():
    assert shared_names(["x = 1", "x = 2", "print(x)", "y = 1", "print(y)"]) == {"x": 2}


@slowest
@pytest.mark.parametrize("name", WITH_FURTHER)
def test_a_guess_after_run_all_works_and_each_cell_of_its_section_runs_again(runs, name):
    notebook = nbformat.read(REPO / name, as_version=4)
    section, again = [], []
    for cell in notebook.cells:
        if cell.source.startswith("## "):
            section = []
        if cell.cell_type == "code":
            filled = GUESS.sub(r'lab.guess("\1", \2, low=1, high=3)', cell.source)
            section.append(filled)
            if any("lab.guess" in source for source in section):
                again.append(nbformat.v4.new_code_cell(filled, metadata=cell.metadata))  # its tags
    scores = nbformat.v4.new_code_cell("print(list(lab.scores()['made']))")
    notebook.cells += [*again, scores]
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(REPO)}}).execute()
    made = ast.literal_eval(scores.outputs[0].text)
    assert set(made) == {"after the result"}
