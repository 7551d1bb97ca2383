"""Copies of the course for students: they hold no solutions, and they run by themselves."""

from __future__ import annotations

import os
import subprocess
import sys

import nbformat

from labutils.tools.cli import main
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
