"""Make a class: notebooks as students hand them in, right, wrong, broken and dishonest.

`python -m tests.tools.grading.school FOLDER N_STUDENTS` writes one.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import nbformat

from labutils.tools.grading.names import names_of
from tests.helpers import REPO
from tests.solutions import (
    further_scaler,
    further_speed,
    notebook_01,
    notebook_02,
    notebook_03,
    notebook_04,
)

NOTEBOOKS = ("01-Mixed_Precision", "02-Gradient_Accumulation", "03-Gradient_Checkpointing")
NOTEBOOKS += ("04-Memory_Profiling",)
SOLUTIONS = {
    one.exercise: (one, module)
    for module in (
        notebook_01,
        notebook_02,
        notebook_03,
        notebook_04,
        further_scaler,
        further_speed,
    )
    for one in module.SOLUTIONS
}
KINDS = ("right", "wrong", "mixed", "open", "colab", "vscode", "renamed", "doubled", "missing")
KINDS += ("endless", "hungry", "broken_json", "broken_cell", "raises", "cheats")
CHEATS = (
    "import labutils.checks.core as core\ncore._problem = lambda judge: None\n{name} = 1",
    "lab.checks._tell(None)\n{name} = 1",
    "class Always(float):\n    def __eq__(self, other):\n        return True\n"
    "    __hash__ = None\n{name} = Always(1)",
    "from tests.solutions import notebook_01\n{name} = 1",
    "import os\n{name} = os.popen('ls ..').read()",
    "print('Right.')\n{name} = 1",
)


def source_of(answer: object, name: str, module: ModuleType) -> str | None:
    """Return cells' code that assigns an answer to a name; None if it cannot be written."""
    if not callable(answer):
        return f"{name} = {answer!r}"
    owner = getattr(answer, "__self__", None)  # of X.apply, a class
    function, suffix = (owner, f".{answer.__name__}") if isinstance(owner, type) else (answer, "")
    source = _source(function)
    if source is None:
        return None
    return f"{_needed(source, module)}{source}\n{name} = {function.__name__}{suffix}"


def _source(function: Callable) -> str | None:
    source = getattr(function, "source", None)
    with contextlib.suppress(OSError, TypeError):
        source = source or inspect.getsource(function)
    is_definition = source and source.startswith(("def ", "class "))
    return source if is_definition and function.__name__.isidentifier() else None


def _needed(source: str, module: ModuleType) -> str:
    """Return imports and helpers that a solution finds in its module."""
    lines = []
    for name in sorted(names_of(source).uses & vars(module).keys()):
        value = vars(module)[name]
        if isinstance(value, ModuleType):
            lines.append(f"import {value.__name__} as {name}\n")
        elif getattr(value, "__module__", None) == module.__name__:
            helper = _source(value) or ""
            lines.append(_needed(helper, module) + helper + "\n")
        elif hasattr(value, "__module__"):
            lines.append(f"from {value.__module__} import {name}\n")
        else:
            lines.append(f"{name} = {value!r}\n")
    return "".join(lines)


def hand_in(notebook: str, kind: str, seed: int) -> tuple[str, dict[str, str]]:
    """Return (the text of a handed-in notebook, {exercise: right or wrong, where it is sure})."""
    rng = random.Random(f"{notebook}-{kind}-{seed}")
    made = nbformat.read(REPO / f"{notebook}.ipynb", as_version=4)
    expected: dict[str, str] = {}
    for cell in made.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
            _answer(cell, kind, rng, expected)
    text = nbformat.writes(made)
    return _saved(text, kind), expected


def _answer(cell: nbformat.NotebookNode, kind: str, rng: random.Random, expected: dict) -> None:
    for line in cell.source.splitlines():
        if not line.startswith("lab.checks.") or "hint" in line or "self_test" in line:
            continue
        exercise = line.split("(")[0].removeprefix("lab.checks.")
        if exercise not in SOLUTIONS:
            continue
        name = line.rstrip(")").split(",")[-1].split("(")[-1].strip()
        solution, module = SOLUTIONS[exercise]
        wants = {"mixed": rng.choice(["right", "wrong"])}.get(kind, kind)
        answers = solution.right if wants != "wrong" else [wrong for wrong, _ in solution.wrong]
        codes = (source_of(a, name, module) for a in rng.sample(answers, len(answers)))
        code = next(filter(None, codes), None)
        if kind in ("open",) or code is None:
            return
        extra = {
            "endless": f"while True:\n    {name} = 1",
            "hungry": f"{name} = [bytearray(2**28) for _ in range(100)]",
            "raises": f"{name} = 1 / 0",
            "cheats": rng.choice(CHEATS).format(name=name),
            "broken_cell": "def (",
        }.get(kind)
        _write_answer(cell, line, code, extra, kind, rng)
        if kind in ("right", "colab", "vscode", "renamed", "doubled"):
            expected[exercise] = "right"
        return


def _write_answer(
    cell: nbformat.NotebookNode, line: str, code: str, extra: str | None, kind: str, rng
) -> None:
    if kind == "missing":
        cell.source = cell.source.replace(line, "")
    elif kind == "doubled":
        cell.source = cell.source.replace(line, f"{line}\n{code}\n{line}")
    elif extra:
        cell.source = cell.source.replace(line, f"{extra}\n{line}")
    else:
        tag = f"unused_{rng.randrange(10**6)} = 0"
        cell.source = cell.source.replace(line, f"{tag}\n{code}\n{line}")


def _saved(text: str, kind: str) -> str:
    """Return a notebook's text as another program saves it."""
    if kind == "broken_json":
        return text[: len(text) // 2]
    body = json.loads(text)
    if kind == "colab":  # one string a cell, ids and metadata of its own
        for cell in body["cells"]:
            cell["source"] = "".join(cell["source"])
            cell["metadata"] = {"id": "x1", "colab": {"base_uri": "https://localhost"}}
        body["metadata"]["colab"] = {"provenance": []}
        body["nbformat_minor"] = 0
    if kind == "vscode":
        body["metadata"]["language_info"] = {"name": "python"}
        for cell in body["cells"]:
            cell["metadata"]["vscode"] = {"languageId": "python"}
    return json.dumps(body, indent=1)


def write_class(
    folder: Path, n_students: int, tell: Callable[[str], object] = lambda name: None
) -> dict[tuple[str, str], str]:
    """Write four notebooks for each student; return {(submission, exercise): sure verdict}."""
    sure = {}
    for number in range(n_students):
        kind = KINDS[number % len(KINDS)]
        student = f"Student {number:03d}_{1000 + number}_assignsubmission_file"
        for notebook in NOTEBOOKS:
            text, expected = hand_in(notebook, kind, number)
            name = "homework (1)" if kind == "renamed" else notebook
            path = folder / student / f"{name}{number if kind == 'renamed' else ''}.ipynb"
            if kind == "renamed":
                path = path.with_name(f"{notebook[:2]} final {path.name}")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            submission = path.relative_to(folder).as_posix()
            sure |= {(submission, exercise): verdict for exercise, verdict in expected.items()}
        tell(student)
    return sure


if __name__ == "__main__":
    write_class(Path(sys.argv[1]), int(sys.argv[2]), print)
