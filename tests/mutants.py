"""Does a test notice a small fault? `make mutants` plants N of them, drawn with a printed seed.

First all tests run once and tell which functions each one calls (pytest loads this file for that).
Then each fault goes into a copy of the course, where the tests run that call its function. What
survives may be a fault that changes nothing.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import queue
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parent.parent
SOURCES = ("techniques/*", "training/*", "memory/*", "prediction/allocator", "exercises/*")
LEFT_OUT = "not (browser or processes or slow or slowest or gpu)"
ENOUGH_S = 45  # of tests that call a function; those named after its file come first
SWAPPED = {
    ast.Lt: ast.LtE,
    ast.Gt: ast.GtE,
    ast.Eq: ast.NotEq,
    ast.Is: ast.IsNot,
    ast.In: ast.NotIn,
}
SWAPPED |= {ast.Add: ast.Sub, ast.Mult: ast.Div, ast.FloorDiv: ast.Mult, ast.And: ast.Or}
SWAPPED |= {after: before for before, after in SWAPPED.items()}
called: dict[str, tuple[float, list[str]]] = {}  # {test: (seconds, functions)}
failed: set[str] = set()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item):
    functions: set[str] = set()
    start = time.monotonic()

    def note(frame, *_):
        if "/labutils/" in frame.f_code.co_filename:
            module = frame.f_code.co_filename.partition("/labutils/")[2]
            functions.add(f"{module}:{frame.f_code.co_firstlineno}")

    sys.settrace(note)
    yield
    sys.settrace(None)
    called[item.nodeid] = time.monotonic() - start, sorted(functions)


def pytest_runtest_logreport(report):
    if report.failed:  # without any fault
        failed.add(report.nodeid)


def pytest_sessionfinish():
    for test in failed:
        called.pop(test, None)
    Path(os.environ["MUTANTS_MAP"]).write_text(json.dumps(called), encoding="utf-8")


def change(node: ast.AST) -> str | None:
    """Change a node in place and say how, or return None where there is nothing to change."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPPED:
        node.ops[0] = SWAPPED[type(node.ops[0])]()
        return "another comparison"
    if isinstance(node, ast.BinOp | ast.BoolOp | ast.AugAssign) and type(node.op) in SWAPPED:
        node.op = SWAPPED[type(node.op)]()
        return "another operator"
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        node.value = not node.value if isinstance(node.value, bool) else node.value + 1
        return "another constant"
    if isinstance(node, ast.If | ast.IfExp | ast.While):
        node.test = ast.UnaryOp(ast.Not(), node.test)
        return "the opposite condition"
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        node.value = ast.Constant(None)
        return "a call is lost"
    if isinstance(node, ast.Call) and node.keywords:
        return f"the argument {node.keywords.pop().arg} is lost"
    return None


def nodes_of(tree: ast.Module) -> list[ast.AST]:
    """Return all nodes but those of messages, annotations and decorators, in a fixed order."""
    words: set[ast.AST] = set()
    for node in ast.walk(tree):
        parts = [getattr(node, "annotation", None), getattr(node, "returns", None)]
        parts += getattr(node, "decorator_list", [])
        parts += [node] if isinstance(node, ast.Raise | ast.JoinedStr) else []
        for part in filter(None, parts):
            words |= set(ast.walk(part))
    return [node for node in ast.walk(tree) if node not in words]


def mutant(path: Path, index: int) -> tuple[str, int, str | None, str]:
    """Return (text with node `index` changed, its line, the change, the function around it)."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    node, module = nodes_of(tree)[index], path.relative_to(REPO / "labutils").as_posix()
    around = module  # all functions of a file, if it stands in none
    for function in ast.walk(tree):  # the innermost comes last
        if isinstance(function, ast.FunctionDef) and node in ast.walk(function):
            first = [function, *function.decorator_list]
            around = f"{module}:{min(line.lineno for line in first)}"
    line = getattr(node, "lineno", 0)
    how = change(node)
    return ast.unparse(ast.fix_missing_locations(tree)), line, how, around


def run(course: Path, tests: list[str], limit_s: float, *options: str) -> bool:
    """Return whether all tests pass in this copy, in time."""
    command = ["timeout", "-k", "1", str(int(limit_s)), sys.executable, "-m", "pytest", "-q"]
    command += ["-p", "no:cacheprovider", "-m", LEFT_OUT, *options, *tests]
    place = {"PYTHONPATH": str(course), "OMP_NUM_THREADS": "1", "MUTANTS_MAP": str(course / "map")}
    answer = subprocess.run(command, cwd=course, env=os.environ | place, capture_output=True)
    return answer.returncode == 0


def judge(point: tuple[Path, int], courses: queue.Queue, tests_of: dict) -> tuple[str, ...]:
    """Plant one fault in a free copy and return (verdict, place, change).

    The fastest tests that call its function come first.
    """
    path, index = point
    text, line, how, around = mutant(path, index)
    place = f"{path.relative_to(REPO)}:{line}"
    named = f"test_{path.stem}."
    chosen, seconds = [], 0.0
    for cost, test in sorted(tests_of[around], key=lambda test: (named not in test[1], test)):
        if seconds + cost <= ENOUGH_S or not chosen:
            chosen.append(test)
            seconds += cost
    if not chosen:
        return "no test calls it", place, how
    course = courses.get()
    copy = course / path.relative_to(REPO)
    copy.write_text(text, encoding="utf-8")
    survived = run(course, chosen, 3 * seconds + 30, "-x")
    shutil.copy2(path, copy)
    courses.put(course)
    return "survived" if survived else "killed", place, how


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--n", type=int, default=200)
    parser.add_argument("--seed", type=int, default=random.randrange(10_000))
    parser.add_argument("--only", default="", help="a part of the paths of the files to change")
    parser.add_argument("--tests", nargs="+", default=["tests"])
    options = parser.parse_args()
    print(f"{options.n} mutants, seed {options.seed}", flush=True)
    files = [path for part in SOURCES for path in sorted((REPO / "labutils").glob(f"{part}.py"))]
    points = []
    for path in [path for path in files if options.only in str(path.relative_to(REPO))]:
        nodes = nodes_of(ast.parse(path.read_text(encoding="utf-8")))
        points += [(path, index) for index, node in enumerate(nodes) if change(node)]
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        courses: queue.Queue[Path] = queue.Queue()
        for name in ("first", "second"):
            course = Path(folder) / name
            shutil.copytree(
                REPO, course, ignore=shutil.ignore_patterns(".venv", "runs", "*cache*", ".git")
            )
            courses.put(course)
        run(course, options.tests, 3600, "-p", "tests.mutants")
        tests_of = defaultdict(list)
        for test, (seconds, functions) in json.loads((course / "map").read_text()).items():
            for place in {*functions, *(name.partition(":")[0] for name in functions)}:
                tests_of[place].append((seconds, test))
        drawn = random.Random(options.seed).sample(points, options.n)
        verdicts = []
        with ThreadPoolExecutor(2) as pool:
            for row in pool.map(lambda point: judge(point, courses, tests_of), drawn):
                print(*row, sep="  ", flush=True)
                verdicts.append(row[0])
    print(dict(Counter(verdicts)))


if __name__ == "__main__":
    main()
