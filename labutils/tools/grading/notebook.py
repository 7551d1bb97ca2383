"""Read a submitted notebook, and cut out the statements that an answer needs.

An exercise is recognised by the check it calls, `lab.checks.NAME(…)`. Of the cells only those
statements count that define what the answer uses; training and drawing are left out.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import json
import re
import symtable
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from labutils.files import REPO_DIR

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


@functools.lru_cache(maxsize=4096)
def parsed(cell: str) -> ast.Module:
    """Return a cell's tree; an empty one if it is not Python."""
    with contextlib.suppress(SyntaxError, ValueError, RecursionError, MemoryError):
        return ast.parse(cell)
    return ast.Module([], [])


def calls_in(cells: Sequence[str]) -> Iterator[Call]:
    """Yield the checks that the cells call, in order."""
    for number, cell in enumerate(cells):
        for at, statement in enumerate(parsed(cell).body):
            for node in ast.walk(statement):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                    owner = ast.unparse(node.func.value)
                    name = node.func.attr
                    is_check = owner.endswith("checks") and not name.startswith("_")
                    if is_check and name not in NOT_EXERCISES:
                        yield Call(name, number, at, node)


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
    places = [(i, one) for i in range(call.cell) for one in parsed(cells[i]).body]
    places += [(call.cell, one) for one in parsed(cells[call.cell]).body[: call.statement]]
    before = [statement for _, statement in places]
    text = ast.unparse(ast.fix_missing_locations(expression))
    # a body looks its names up when it runs, so they may be defined below it: once more, with them
    late: set[str] = set()
    while True:
        chosen, found = _needed(before, names_of(text).uses | late)
        if found <= late:
            source = "\n".join(ast.unparse(before[i]) for i in chosen)
            return Cut(source, text, tuple(sorted({places[i][0] for i in chosen})))
        late |= found


def _needed(statements: Sequence[ast.stmt], wanted: set[str]) -> tuple[list[int], set[str]]:
    """Return the numbers of the statements that define `wanted`, and what their bodies look up."""
    chosen: list[int] = []
    late: set[str] = set()
    modules = {name for one in statements for name in _imported(one)}
    for i in reversed(range(len(statements))):
        names = names_of(ast.unparse(statements[i]))
        changed = (names.changes - modules) & wanted
        if not (names.defines & wanted or changed):
            continue
        chosen.insert(0, i)
        if isinstance(statements[i], (ast.Assign, ast.AnnAssign, ast.Import, ast.ImportFrom)):
            wanted = wanted - names.defines
        wanted = wanted | names.uses
        late |= names.late
    return chosen, late


def _imported(statement: ast.stmt) -> set[str]:
    imports = [
        node for node in ast.walk(statement) if isinstance(node, (ast.Import, ast.ImportFrom))
    ]
    names = [alias.asname or alias.name for one in imports for alias in one.names]
    return {name.split(".")[0] for name in names}


@dataclass(frozen=True)
class Names:
    """What a statement does with names, those local to a function left out.

    `changes` are objects of which it sets a part or calls a method, `late` what bodies look up.
    """

    defines: set[str]
    changes: set[str]
    uses: set[str]
    late: set[str]


@functools.lru_cache(maxsize=16384)
def names_of(source: str) -> Names:
    """Return what the names in a statement or an expression are there for."""
    tree, names = parsed(source), Names(set(), set(), set(), set())
    for node in ast.walk(tree):
        if isinstance(node, (ast.Subscript, ast.Attribute)) and isinstance(node.ctx, ast.Store):
            names.changes.add(re.split(r"\W", ast.unparse(node))[0])  # c of c["x"] = 1
    for statement in tree.body:
        is_call = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call)
        if is_call and isinstance(statement.value.func, ast.Attribute):
            names.changes.add(re.split(r"\W", ast.unparse(statement.value.func))[0])
    scopes = [symtable.symtable(source, "cell", "exec")] if tree.body else []
    while scopes:
        scope = scopes.pop()
        is_cell = scope.get_type() == "module"
        for symbol in scope.get_symbols():
            if is_cell and (symbol.is_assigned() or symbol.is_imported()):
                names.defines.add(symbol.get_name())
            if symbol.is_referenced() and (is_cell or symbol.is_global()):
                names.uses.add(symbol.get_name())
                if scope.get_type() == "function":
                    names.late.add(symbol.get_name())
        scopes += scope.get_children()
    return names
