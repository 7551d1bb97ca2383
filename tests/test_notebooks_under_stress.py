"""The notebooks where memory is short, cells run again and again, and paths are odd."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import nbformat
import pytest
from nbclient import NotebookClient

from labutils.training.records import find_runs
from tests.helpers import REPO, slowest

NAMES = sorted(path.name for path in REPO.glob("0*.ipynb"))
SHORT = "import labutils.machine.here as here; here.free_host_bytes = lambda: {mib} * 2**20"
COUNT = """
import gc, torch, labutils, matplotlib.pyplot as _plt
from IPython import get_ipython
_plt.close("all")
print(labutils.allocated_bytes(torch.device("cpu")))
"""


def kernel(notebook) -> NotebookClient:
    return NotebookClient(
        notebook,
        timeout=600,
        kernel_name="python3",
        resources={"metadata": {"path": str(REPO)}},
        allow_errors=True,
    )


def failures(notebook) -> list[str]:
    """Return the errors of cells that are not there to raise one."""
    found = []
    for cell in notebook.cells:
        if "raises-exception" in cell.metadata.get("tags", []):
            continue
        for output in cell.get("outputs", []):
            if output.output_type == "error":
                problem = f"{output.ename}: {output.evalue[:200]}"
                found.append(f"{cell.source[:60]!r}: {problem}")
    return found


@slowest
@pytest.mark.parametrize("mib", [45, 5], ids=["less than the files ask for", "for nothing"])
@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_runs_to_its_end_where_memory_is_short(runs, name, mib):
    """On a GPU it is the card's free memory that counts; the same code decides by it."""
    if mib == 5 and name.startswith("02"):
        pytest.skip("its runs are about learning: without training there is nothing to draw")
    notebook = nbformat.read(REPO / name, as_version=4)
    notebook.cells.insert(0, nbformat.v4.new_code_cell(SHORT.format(mib=mib)))
    kernel(notebook).execute()
    assert failures(notebook) == []
    for record in find_runs()[0]:
        assert record.memory is None or record.memory.peak_bytes < mib * 2**20


@slowest
@pytest.mark.parametrize("name", NAMES)
def test_each_cell_twice_and_then_all_again_gives_no_error_and_holds_no_more_memory(runs, name):
    notebook = nbformat.read(REPO / name, as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    twice = []
    for cell in cells:
        twice += [nbformat.from_dict(cell), nbformat.from_dict(cell)]
    first, second = nbformat.v4.new_code_cell(COUNT), nbformat.v4.new_code_cell(COUNT)
    notebook.cells = [*twice, first, *map(nbformat.from_dict, cells), second]
    kernel(notebook).execute()
    assert failures(notebook) == []
    held_bytes = int(first.outputs[0].text)
    assert int(second.outputs[0].text) <= 1.01 * held_bytes + 2**20


@slowest
def test_odd_paths_and_no_home_folder_work(tmp_path):
    course = tmp_path / "mit Leerzeichen" / "课程"
    shutil.copytree(
        REPO / "labutils", course / "labutils", ignore=shutil.ignore_patterns("__pycache__")
    )
    shutil.copytree(REPO / "configs", course / "configs")
    text = course / "文本 eins.txt"
    text.write_text("Ein Text über vieles: 一二三四五。\n" * 3000, encoding="utf-8")
    notebook = nbformat.read(REPO / "01-Mixed_Precision.ipynb", as_version=4)
    notebook.cells = notebook.cells[:6]
    nbformat.write(notebook, course / "01 课.ipynb")
    ours = ("LABUTILS", "IPYTHON", "JUPYTER", "MPL")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
    environment |= {"HOME": "/dev/null/home", "PYTHONPATH": str(course)}

    def labutils(*arguments: str) -> subprocess.CompletedProcess:
        command = [sys.executable, "-m", "labutils", *arguments]
        return subprocess.run(command, cwd=course, env=environment, capture_output=True, text=True)

    small = [
        "--set=steps=3",
        "--set=lr_warmup_steps=0",
        "--set=name=名",
        f"--set=corpus={text.name}",
    ]
    for arguments in (["run", "fp32", *small], ["figures", "名"], ["labs", "01 课.ipynb"]):
        answer = labutils(*arguments)
        assert answer.returncode == 0, answer.stderr
    runs = course / "runs"
    made = [path.relative_to(runs).as_posix() for path in runs.rglob("*")]
    assert any(name.startswith("名-") and name.endswith(".json") for name in made)
    assert {"01 课.html", "01 课.ipynb"} <= set(made)
