"""Score the exercises of submitted notebooks.

Each notebook runs in a process of its own, with limits of time and memory.

An exercise is recognised by the check it calls, `lab.checks.NAME(…)`. The cells around it do not
matter. That cell runs, and the cells above it that define the names it uses; no others. This keeps
accidents apart, but it does not stop hostile code.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import os
import re
import subprocess
import symtable
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from labutils.checks import collect_verdicts
from labutils.files import REPO_DIR

NOT_EXERCISES = {"hint", "self_test"}
SECONDS, MEMORY_GIB = 180, 6


@dataclass(frozen=True)
class Score:
    """The result of one exercise of one submission.

    `verdict` is right, wrong, open, missing or failed; `reason` says why in words.
    """

    submission: str
    exercise: str
    verdict: str
    reason: str = ""


def code_cells(path: Path) -> list[str]:
    """Return the code cells of a notebook, lines of IPython's own (`%pip`, `!ls`) left blank.

    Raises ValueError.
    """
    try:
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(
            f"no notebook that can be read: {type(error).__name__}: {error}"
        ) from error
    return [_only_python(source) for source in sources]


def _only_python(cell: str) -> str:
    lines = cell.splitlines()
    for i, line in enumerate(lines):
        if line.lstrip().startswith(("%", "!")):
            lines[i] = ""
    return "\n".join(lines)


def exercises_of(cell: str) -> list[str]:
    """Return the checks that a cell calls; none if it is not Python."""
    calls = []
    for node in ast.walk(_parsed(cell)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = ast.unparse(node.func.value)
            if owner.endswith("checks") and node.func.attr not in NOT_EXERCISES:
                calls.append(node.func.attr)
    return calls


def _parsed(cell: str) -> ast.AST:
    with contextlib.suppress(SyntaxError, ValueError, RecursionError):
        return ast.parse(cell)
    return ast.Module([], [])


def _names(cell: str) -> tuple[set[str], set[str]]:
    """Return (names a cell defines or changes, names it uses), local names left out."""
    tree, defines, uses = _parsed(cell), set(), set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Subscript, ast.Attribute)) and isinstance(node.ctx, ast.Store):
            defines.add(re.split(r"\W", ast.unparse(node))[0])  # c of c["x"] = 1
    scopes = [symtable.symtable(cell, "cell", "exec")] if tree.body else []
    while scopes:
        scope = scopes.pop()
        is_cell = scope.get_type() == "module"
        for symbol in scope.get_symbols():
            if is_cell and (symbol.is_assigned() or symbol.is_imported()):
                defines.add(symbol.get_name())
            if symbol.is_referenced() and (is_cell or symbol.is_global()):
                uses.add(symbol.get_name())
        scopes += scope.get_children()
    return defines, uses


def needed_cells(cells: Sequence[str], at: int) -> list[str]:
    """Return cell number `at` and, in order, the cells before it that define what they use."""
    chosen, wanted = [cells[at]], _names(cells[at])[1]
    for cell in reversed(cells[:at]):
        defines, uses = _names(cell)
        if defines & wanted:
            chosen.insert(0, cell)
            wanted = (wanted - defines) | uses
    return chosen


def expected(cells: Sequence[str]) -> list[str]:
    """Return the exercises of the course's notebook that these cells share most with."""
    have = _all_exercises(cells)
    paths = [*sorted(REPO_DIR.glob("0*.ipynb")), *sorted(REPO_DIR.glob("further/*.ipynb"))]
    course = [_all_exercises(code_cells(path)) for path in paths]
    return max(course, key=lambda names: len(set(have) & set(names)))


def _all_exercises(cells: Sequence[str]) -> list[str]:
    """Return the exercises of these cells in order, each once."""
    return list(dict.fromkeys(name for cell in cells for name in exercises_of(cell)))


def _score(cells: Sequence[str], exercise: str) -> tuple[str, str]:
    """Run one exercise in this process and return (verdict, reason)."""
    places = [i for i, cell in enumerate(cells) if exercise in exercises_of(cell)]
    if not places:
        return "missing", _why_missing(cells, exercise)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    try:
        with (
            collect_verdicts() as verdicts,
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            for cell in needed_cells(cells, places[-1]):
                verdicts.clear()
                exec(compile(cell, "submission", "exec"), namespace)
    except BaseException as error:  # whatever it raises, SystemExit too, is its own failure
        return "failed", f"{type(error).__name__}: {error}"[:200]
    if not verdicts:
        return "failed", "the check was not reached"
    twice = f"called in {len(places)} cells; the last counts" if len(places) > 1 else ""
    if verdicts[-1].is_open:
        return "open", twice
    return ("wrong", verdicts[-1].problem) if verdicts[-1].problem else ("right", twice)


def _why_missing(cells: Sequence[str], exercise: str) -> str:
    for cell in cells:
        if exercise in cell and not exercises_of(cell):
            return "its cell is not Python"
    return f"no cell calls checks.{exercise}"


def _limit(memory_gib: float) -> None:
    import resource

    size = int(memory_gib * 2**30)
    resource.setrlimit(resource.RLIMIT_DATA, (size, size))


def grade(path: Path, seconds: float = SECONDS, memory_gib: float = MEMORY_GIB) -> list[Score]:
    """Return a score for each exercise of a submitted notebook; nothing it contains raises.

    `seconds` is for the whole notebook. Memory is limited on Linux only. A process that dies costs
    the exercise it died in; the next one starts in a new process.
    """
    try:
        left = expected(code_cells(path))
    except ValueError as error:
        return [Score(path.name, "", "failed", str(error))]
    scores: list[Score] = []
    with tempfile.TemporaryDirectory() as folder:
        while left:
            output, reason = _run(path, left, folder, seconds, memory_gib)
            for line in output.splitlines():
                with contextlib.suppress(ValueError, TypeError):
                    scores.append(Score(path.name, *json.loads(line)))
            done = {score.exercise for score in scores}
            left = left[len(done & set(left)) :]
            if left:
                scores.append(Score(path.name, left.pop(0), "failed", reason))
    return scores


def _run(
    path: Path, exercises: Sequence[str], folder: str, seconds: float, memory_gib: float
) -> tuple[str, str]:
    """Score exercises in a new process. Return its output, and why it ended."""
    environment = os.environ | {
        "LABUTILS_RUNS": folder,
        "MPLBACKEND": "Agg",
        "PYTHONPATH": str(REPO_DIR),
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "labutils.tools.grade", str(path.resolve()), *exercises],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        preexec_fn=(lambda: _limit(memory_gib)) if sys.platform == "linux" else None,
        text=True,
        encoding="utf-8",
        errors="replace",
    )
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
        return output, f"not done after {seconds:g} s"
    return output, f"its process ended with exit code {process.returncode}"


def grade_folder(folder: Path, seconds: float = SECONDS, memory_gib: float = MEMORY_GIB):
    """Return a pandas table of the scores of every notebook in a folder, with a progress bar.

    Raises ValueError.
    """
    import pandas as pd
    from tqdm import tqdm

    notebooks = sorted(folder.glob("**/*.ipynb"))
    paths = [path for path in notebooks if ".ipynb_checkpoints" not in path.parts]
    if not paths:
        raise ValueError(f"no notebook in {folder}")
    scores: list[Score] = []
    for path in tqdm(paths, desc="grading", file=sys.stderr):
        scores += grade(path, seconds, memory_gib)
    return pd.DataFrame(map(asdict, scores))


def _main(path: str, *exercises: str) -> None:
    # What a submission prints goes elsewhere; the scores keep the real standard output.
    channel = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    cells = code_cells(Path(path))
    for exercise in exercises:
        print(json.dumps([exercise, *_score(cells, exercise)]), file=channel, flush=True)


if __name__ == "__main__":
    _main(*sys.argv[1:])
