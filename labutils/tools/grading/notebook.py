"""Read a submitted notebook, and cut out the statements that an answer needs.

An exercise is recognised by the check it calls, `lab.checks.NAME(…)`. Of the cells only those
statements count that define what the answer uses; training and drawing are left out.
"""

from __future__ import annotations

import ast
import functools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from labutils.files import REPO_DIR
from labutils.tools.grading.names import names_of, parsed

NOT_EXERCISES = {"hint", "self_test"}
PYTHON_MAGICS = ("%%time", "%%capture", "%%timeit", "%%python")


@dataclass(frozen=True)
class Call:
    """A check that a cell calls, with the number of the cell and of its statement, from 0."""

    exercise: str
    cell: int
    statement: int
    node: ast.Call


@dataclass(frozen=True)
class Cut:
    """The source that computes an answer, and the expression of the answer itself.

    `cells` are the numbers of the cells from which the statements come.
    """

    source: str
    expression: str
    cells: tuple[int, ...] = ()


def code_cells(path: Path) -> list[str]:
    """Return the code cells of a notebook as Python; lines of IPython's own do nothing.

    Raises ValueError.
    """
    try:
        cells = json.loads(path.read_text(encoding="utf-8-sig"))["cells"]
        sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(
            f"no notebook that can be read: {type(error).__name__}: {error}"
        ) from error
    return [as_python(source) for source in sources]


@functools.lru_cache(maxsize=4096)
def as_python(cell: str) -> str:
    """Return a cell without what only IPython understands; unchanged if it is Python."""
    if is_python(cell):
        return cell
    from IPython.core.inputtransformer2 import TransformerManager

    first, _, rest = cell.partition("\n")
    if first.startswith(PYTHON_MAGICS):
        return as_python(rest)
    return TransformerManager().transform_cell(cell)


def is_python(cell: str) -> bool:
    """Return whether a cell can be parsed."""
    return bool(parsed(cell).body) or not cell.strip()


def calls_in(cells: Sequence[str]) -> Iterator[Call]:
    """Yield the checks that the cells call, in order."""
    for number, cell in enumerate(cells):
        for name, at, node in _checks_in(cell):
            yield Call(name, number, at, node)


@functools.lru_cache(maxsize=16384)  # a class hands in the same cells many times
def _checks_in(cell: str) -> tuple[tuple[str, int, ast.Call], ...]:
    found = []
    for at, statement in enumerate(parsed(cell).body):
        for node in ast.walk(statement):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                owner, name = ast.unparse(node.func.value), node.func.attr
                is_check = owner.endswith("checks") and not name.startswith("_")
                if is_check and name not in NOT_EXERCISES:
                    found.append((name, at, node))
    return tuple(found)


def exercises_of(cells: Sequence[str]) -> list[str]:
    """Return the exercises of these cells in order, each once."""
    return list(dict.fromkeys(call.exercise for call in calls_in(cells)))


@functools.cache
def course() -> dict[Path, list[str]]:
    """Return {path: code cells} of the course's own notebooks."""
    paths = [*sorted(REPO_DIR.glob("0*.ipynb")), *sorted(REPO_DIR.glob("further/*.ipynb"))]
    return {path: code_cells(path) for path in paths}


def expected(cells: Sequence[str]) -> list[str]:
    """Return the exercises of the course's notebook that these cells share most with."""
    have = set(exercises_of(cells))

    def shared(own: list[str]) -> tuple[int, int]:
        return len(have & set(exercises_of(own))), len(set(cells) & set(own))

    return exercises_of(max(course().values(), key=shared))


def own_call(exercise: str) -> tuple[list[str], Call]:
    """Return the cells of the course's notebook that has an exercise, and the call in it.

    Raises KeyError.
    """
    for cells in course().values():
        for call in calls_in(cells):
            if call.exercise == exercise:
                return cells, call
    raise KeyError(exercise)


def given_of(exercise: str) -> Cut:
    """Return what computes the arguments that the course gives to a check, as a list."""
    cells, call = own_call(exercise)
    return cut(cells, call, ast.List(call.node.args[:-1], ast.Load()))


def answer_of(cells: Sequence[str], call: Call, parameter: str) -> Cut:
    """Return what computes a submission's answer; `parameter` is the check's last one."""
    for keyword in call.node.keywords:
        if keyword.arg == parameter:
            return cut(cells, call, keyword.value)
    arguments = ast.List(call.node.args, ast.Load())
    last = ast.Subscript(arguments, ast.Constant(-1), ast.Load())
    is_plain = call.node.args and not isinstance(call.node.args[-1], ast.Starred)
    return cut(cells, call, call.node.args[-1] if is_plain else last)


def cut(cells: Sequence[str], call: Call, expression: ast.expr) -> Cut:
    """Return the statements above a call that define what an expression uses."""
    places = [(i, one) for i in range(call.cell) for one in statements(cells[i])]
    places += [(call.cell, one) for one in statements(cells[call.cell])[: call.statement]]
    before = [statement for _, statement in places]
    text = ast.unparse(ast.fix_missing_locations(expression))
    # a body looks its names up when it runs, so they may be defined below it: once more, with them
    late: set[str] = set()
    while True:
        chosen, found = _needed(before, names_of(text).uses | late)
        if found <= late:
            source = "\n".join(before[i].source for i in chosen)
            return Cut(source, text, tuple(sorted({places[i][0] for i in chosen})))
        late |= found


@dataclass(frozen=True)
class Statement:
    """A statement of a cell. `replaces` says whether nothing older of the names it sets is left."""

    source: str
    imports: frozenset[str]
    replaces: bool


@functools.lru_cache(maxsize=16384)
def statements(cell: str) -> tuple[Statement, ...]:
    """Return the statements of a cell."""
    simple = (ast.Assign, ast.AnnAssign, ast.Import, ast.ImportFrom)
    return tuple(
        Statement(ast.unparse(one), _imported(one), isinstance(one, simple))
        for one in parsed(cell).body
    )


def _needed(before: Sequence[Statement], wanted: set[str]) -> tuple[list[int], set[str]]:
    """Return the numbers of the statements that define `wanted`, and what their bodies look up."""
    chosen: list[int] = []
    late: set[str] = set()
    modules = frozenset().union(*(statement.imports for statement in before))
    for i in reversed(range(len(before))):
        names = names_of(before[i].source)
        changed = (names.changes - modules) & wanted
        if not (names.defines & wanted or changed):
            continue
        chosen.insert(0, i)
        if before[i].replaces:
            wanted = wanted - names.defines
        wanted = wanted | names.uses
        late |= names.late
    return chosen, late


def _imported(statement: ast.stmt) -> frozenset[str]:
    imports = [
        node for node in ast.walk(statement) if isinstance(node, (ast.Import, ast.ImportFrom))
    ]
    names = [alias.asname or alias.name for one in imports for alias in one.names]
    return frozenset(name.split(".")[0] for name in names)
