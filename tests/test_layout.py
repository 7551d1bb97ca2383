"""The house: which folder may import which, which file may ask the allocator, how wide lines are."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.helpers import REPO

PACKAGE = REPO / "labutils"
FILES = sorted(PACKAGE.rglob("*.py"))
# Each imports from itself and from those before it.
FLOORS = [
    "files",
    "config",
    "machine",
    "techniques",
    "workload",
    "memory",
    "exercises",
    "prediction",
    "training",
    "plotting",
    "exhibits",
    "session",
    "guesses",
    "pages",
    "grade",
    "cli",
]
# Side by side: they are tracked, trained and predicted without each other.
STRANGERS = {"prediction": "training", "training": "prediction", "plotting": "prediction"}
ON_REQUEST = ("__init__.py", "__main__.py")  # the facade loads on first use
MAY_IMPORT_LATE = ("cli.py",)  # the command line, which must answer at once


def floor_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path) -> list[tuple[ast.AST, str, bool]]:
    """Return (statement, module of ours, whether it stands in a function) for each import of the
    package's own.
    """
    tree = ast.parse(path.read_text(encoding="utf-8"))
    inside = set()
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            inside |= {id(node) for node in ast.walk(function)}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] == "labutils":
            names = (
                [node.module]
                if node.module != "labutils"
                else [f"labutils.{a.name}" for a in node.names]
            )
            found += [(node, name, id(node) in inside) for name in names]
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_file_imports_from_its_own_floor_and_those_below(path):
    if path.name in ON_REQUEST and path.parent == PACKAGE:
        return
    own = floor_of(path)
    for node, module, _ in imports(path):
        floor = module.split(".")[1]
        assert floor in FLOORS, f"{path.name}:{node.lineno} imports {module}, which is on no floor"
        assert FLOORS.index(floor) <= FLOORS.index(own), (
            f"{path.name}:{node.lineno} imports upwards: {module}"
        )
        assert floor != STRANGERS.get(own), f"{path.name}:{node.lineno} imports {module}"


def test_techniques_import_torch_and_the_choices_only():
    for path in (PACKAGE / "techniques").glob("*.py"):
        modules = {module for _, module, _ in imports(path)}
        assert modules <= {"labutils.config.choices"}, f"{path.name} imports {modules}"


def test_configs_need_no_torch():
    for path in (PACKAGE / "config").glob("*.py"):
        assert "import torch" not in path.read_text(encoding="utf-8"), path


def test_nothing_is_imported_inside_a_function():
    late = {
        f"{path.relative_to(PACKAGE)}:{node.lineno}"
        for path in FILES
        for node, _, is_inside in imports(path)
        if is_inside and str(path.relative_to(PACKAGE)) not in MAY_IMPORT_LATE
    }
    assert not late


def annotations_only(path: Path) -> set[str]:
    """Return the modules of ours that a file imports for its annotations, which are not run."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            found |= {child.module for child in ast.walk(node) if isinstance(child, ast.ImportFrom)}
    return found


def test_no_circle():
    """With no late imports a circle would fail at once; this names it."""
    below: dict[str, set[str]] = {}
    modules = {
        ".".join(("labutils", *p.relative_to(PACKAGE).with_suffix("").parts)): p for p in FILES
    }
    for name, path in modules.items():
        below[name] = set()
        for node, module, _ in imports(path):
            with_names = {f"{module}.{alias.name}" for alias in node.names}
            below[name] |= (with_names | {module}) & modules.keys()
        below[name] -= annotations_only(path)
    while free := [name for name, needed in below.items() if not needed]:
        below = {name: needed - set(free) for name, needed in below.items() if name not in free}
    assert not below, f"these import each other: {sorted(below)}"


ALLOCATOR = (
    "memory_allocated",
    "memory_reserved",
    "reset_peak_memory_stats",
    "memory_stats",
    "empty_cache",
)


def calls_of(names: tuple[str, ...]) -> set[str]:
    found = set()
    for path in FILES:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        asked = [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
        if any("torch.cuda." in text and text.endswith(names) for text in asked):
            found.add(str(path.relative_to(PACKAGE)))
    return found


def test_only_the_memory_floor_asks_the_allocator():
    allowed = ("memory/", "machine.py")
    assert not [path for path in calls_of(ALLOCATOR) if not path.startswith(allowed)]


def test_lines_are_at_most_100_columns():
    wide = [
        f"{path.relative_to(PACKAGE)}:{i}"
        for path in FILES
        for i, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if len(line) > 100
    ]
    assert not wide, f"{len(wide)} lines, the first: {wide[:5]}"
