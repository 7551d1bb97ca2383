from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import matplotlib as mpl
import nbformat
import pytest

from tests.helpers import REPO, committed

mpl.use("Agg")
CORE = sorted(path.name for path in REPO.glob("0*.ipynb"))
FURTHER = sorted(f"further/{path.name}" for path in REPO.glob("further/*.ipynb"))
NAMES = [*CORE, *FURTHER]
LEAK = re.compile(
    r"(?<![\w.])/(?:work|root|home|tmp|opt|Users)/\w+|site-packages|ipykernel_\d+|[A-Z]:\\\\Users"
)


def read(name: str) -> nbformat.NotebookNode:
    return nbformat.reads(committed(name), as_version=4)


def code_cells(notebook) -> list[str]:
    return [cell.source for cell in notebook.cells if cell.cell_type == "code"]


def sections(notebook) -> dict[str, list[str]]:
    """Return {heading: code cells}.

    The setup is what stands before the second heading's first code cell.
    """
    found, heading = {"setup": []}, "setup"
    for cell in notebook.cells:
        if cell.cell_type == "markdown" and (
            title := re.search(r"^##? (?!#)(.+)$", cell.source, re.M)
        ):
            heading = title.group(1) if found["setup"] else "setup"
            found.setdefault(heading, [])
        elif cell.cell_type == "code":
            found[heading].append(cell.source)
    return {title: cells for title, cells in found.items() if cells}


def outputs(notebook):
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            text = output.get("text", "")
            for kind, value in output.get("data", {}).items():
                if kind.startswith("text/"):
                    text += value
            yield cell, output, text


def n_figures(notebook) -> int:
    return sum("image/png" in output.get("data", {}) for _, output, _ in outputs(notebook))


@pytest.mark.parametrize("name", NAMES)
def test_committed_outputs_are_clean(name):
    notebook = read(name)
    assert len(committed(name)) < 1_500_000
    assert not notebook.metadata.get("widgets")
    count = 0
    for cell in notebook.cells:
        if cell.cell_type == "code" and cell.source.strip():
            count += 1
            assert cell.execution_count == count
    for cell, output, text in outputs(notebook):
        assert output.output_type != "error" or "raises-exception" in cell.metadata.get("tags", [])
        assert output.get("name") != "stderr", text
        assert not LEAK.search(text), text
        assert "\r" not in text
    assert n_figures(notebook) >= (5 if name in CORE else 1)


@pytest.mark.parametrize("name", NAMES)
def test_code_cells_are_short(name):
    lengths = sorted(len(source.splitlines()) for source in code_cells(read(name)))
    assert lengths[-1] <= 40
    assert lengths[len(lengths) // 2] <= 10
    setup = sections(read(name))["setup"]
    assert len(setup) == 1
    assert len(setup[0].splitlines()) <= 10


@pytest.mark.parametrize("name", NAMES)
def test_figures_are_described_and_ideas_are_short(name):
    notebook = read(name)
    for cell, following in zip(notebook.cells, [*notebook.cells[1:], None], strict=True):
        if cell.cell_type == "markdown":
            for idea in re.findall(r"\*\*Idea\.\*\*(.*?)(?:\n\n|\Z)", cell.source, re.S):
                assert len(idea.split()) <= 80, idea
        elif any("image/png" in output.get("data", {}) for output in cell.outputs):
            assert sum("image/png" in output.get("data", {}) for output in cell.outputs) == 1
            assert following.cell_type == "markdown"
    described = 0
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            described += cell.source.count("figure ")
    assert described >= n_figures(notebook)


def undefined_names(programs: dict[str, list[str]], folder: Path) -> dict[str, list[str]]:
    """Return ruff's complaints about names that a program's cells use and do not define.

    One call of ruff judges all programs, each written to a file; those without complaints are left
    out.
    """
    titles = {}
    for i, (title, cells) in enumerate(programs.items()):
        path = folder / f"{i}.py"
        path.write_text("\n\n".join(cells), encoding="utf-8")
        titles[path.name] = title
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F821"]
    command += ["--output-format", "json", str(folder)]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    found: dict[str, list[str]] = {}
    for complaint in json.loads(answer.stdout):
        found.setdefault(titles[Path(complaint["filename"]).name], []).append(complaint["message"])
    return found


@pytest.mark.parametrize("name", NAMES)
def test_setup_plus_one_section_needs_no_other_section(name, tmp_path):
    parts = sections(read(name))
    setup = parts.pop("setup")
    assert parts
    programs = {title: [*setup, *cells] for title, cells in parts.items()}
    assert undefined_names(programs, tmp_path) == {}


def test_a_name_of_another_section_is_noticed(tmp_path):
    cells = ["import torch", "def f():\n    return blocks[0]"]
    found = undefined_names({"good": ["import torch"], "bad": cells}, tmp_path)
    assert found == {"bad": ["Undefined name `blocks`"]}


@pytest.mark.parametrize("name", NAMES)
def test_setup_cell_alone_in_an_empty_folder_ends_with_the_command_that_helps(name, tmp_path):
    setup = sections(read(name))["setup"][0]
    hide = "import sys\nsys.modules['labutils'] = None\n"
    answer = subprocess.run(
        [sys.executable, "-c", hide + setup], cwd=tmp_path, capture_output=True, text=True
    )
    assert answer.returncode == 1
    [folder] = re.findall(r"%pip install -e (\S+)$", answer.stderr.splitlines()[-1])
    assert (REPO / name).parent.joinpath(folder).resolve() == REPO  # a kernel's own folder


@pytest.mark.parametrize("name", NAMES)
def test_labutils_is_imported_before_torch(name):
    """It tells torch's C++ code what to log, and torch reads that once.

    Otherwise torch writes out of memory to stderr.
    """
    first = sections(read(name))["setup"][0]
    before_torch, _, _ = first.partition("import torch")
    assert "import labutils" in before_torch


# ---- the rules that make nbval strict


PYTEST = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", "pyproject.toml"]


def run_pytest(folder, cells: list[tuple[str, list[str]]]) -> subprocess.CompletedProcess:
    notebook = nbformat.v4.new_notebook(
        metadata={"kernelspec": {"name": "python3", "display_name": "x"}}
    )
    for source, tags in cells:
        notebook.cells.append(nbformat.v4.new_code_cell(source, metadata={"tags": tags}))
    nbformat.write(notebook, folder / "x.ipynb")
    command = [*PYTEST, "-rs", str(folder / "x.ipynb")]
    return subprocess.run(command, cwd=REPO, capture_output=True, text=True)


def test_a_notebook_stops_at_its_first_failure(tmp_path):
    answer = run_pytest(tmp_path, [("x = 1", []), ("1 / 0", []), ("x", []), ("x", [])])
    assert answer.returncode == 1
    assert "1 failed, 1 passed, 2 skipped" in answer.stdout


def test_a_cell_that_should_have_raised_fails(tmp_path):
    answer = run_pytest(tmp_path, [("1 / 0", ["raises-exception"]), ("1", ["raises-exception"])])
    assert answer.returncode == 1
    assert "1 failed, 1 passed" in answer.stdout
    assert "raised nothing" in answer.stdout


@pytest.mark.parametrize(
    "cell",
    [("# NBVAL_CHECK_OUTPUT\nprint(1)", []), ("print(1)", ["nbval-check-output"])],
    ids=["comment", "tag"],
)
def test_checked_output_that_differs_fails(cell, tmp_path):
    path = tmp_path / "x.ipynb"
    run_pytest(tmp_path, [cell])
    notebook = json.loads(path.read_text())
    notebook["cells"][0]["outputs"] = [{"output_type": "stream", "name": "stdout", "text": ["2\n"]}]
    notebook["cells"][0]["execution_count"] = 1
    path.write_text(json.dumps(notebook))
    assert subprocess.run([*PYTEST, str(path)], cwd=REPO, capture_output=True).returncode == 1
