"""Does a test notice a small fault? `make mutants` plants N of them, drawn with a printed seed.

First all tests run once and tell which functions each one calls (pytest loads this file for that).
Then each fault goes into a copy of the course, where the tests that call its function run: those
named after its file first, then the fastest. What survives may be a fault that changes nothing.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parent.parent
SOURCES = ("techniques/*", "training/*", "memory/*", "prediction/allocator", "exercises/*")
LEFT_OUT = "not (browser or processes or slow or slowest or gpu)"
ENOUGH_S = 90  # of CPU time, for the tests that call a function
VERDICTS = {0: "survived", 1: "killed", 2: "killed", 4: "killed"}  # by pytest's exit code
SWAPPED = {
    ast.Lt: ast.LtE,
    ast.Gt: ast.GtE,
    ast.Eq: ast.NotEq,
    ast.Is: ast.IsNot,
    ast.In: ast.NotIn,
    ast.Add: ast.Sub,
    ast.Mult: ast.Div,
    ast.FloorDiv: ast.Mult,
    ast.And: ast.Or,
}
SWAPPED |= {after: before for before, after in SWAPPED.items()}
MESSAGES = ast.Raise | ast.JoinedStr
NOT_COPIED = shutil.ignore_patterns(".venv", "runs", "*cache*", ".git", "node_modules")
NOT_RUN = ("annotation", "returns", "decorator_list")
called: dict[str, tuple[float, list[str]]] = {}  # {test that passes: (seconds, functions)}


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item):
    functions: set[str] = set()
    start, failed = time.monotonic(), item.session.testsfailed

    def note(frame, *_):
        _, is_ours, module = frame.f_code.co_filename.partition("/labutils/")
        if is_ours:
            functions.update((module, f"{module}:{frame.f_code.co_name}"))

    sys.settrace(note)
    yield
    sys.settrace(None)
    if item.session.testsfailed == failed:
        called[item.nodeid] = time.monotonic() - start, sorted(functions)


def pytest_sessionfinish():
    Path(os.environ["MUTANTS_MAP"]).write_text(json.dumps(called), encoding="utf-8")


def change(node: ast.AST) -> str:
    """Change a node in place and say how; "" where there is nothing to change."""
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
    return ""


def nodes_of(node: ast.AST, function: str = "") -> Iterator[tuple[ast.AST, str]]:
    """Yield a node and those below it that run, each with the name of the function around it."""
    if isinstance(node, MESSAGES):
        return
    yield node, function
    function = node.name if isinstance(node, ast.FunctionDef) else function
    for field, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and field not in NOT_RUN:
                yield from nodes_of(child, function)


def run(course: Path, tests: list[str], cpu_s: int, *options: str) -> int:
    """Run the tests in this folder; return pytest's exit code, or another if they take too long."""
    limit = partial(resource.setrlimit, resource.RLIMIT_CPU, (cpu_s, cpu_s))
    command = ["timeout", "3600", sys.executable, "-m", "pytest", "-q", "-m", LEFT_OUT]
    command += ["-p", "no:cacheprovider", *options, *tests]
    place = os.environ | {"PYTHONPATH": str(course), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, cwd=course, env=place, capture_output=True, preexec_fn=limit)
    return ended.returncode


def functions_of(tests: list[str]) -> dict[str, list[tuple[float, str]]]:
    """Run the tests without any fault; return {function or module: [(seconds, test), ...]}."""
    tests_of = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["MUTANTS_MAP"] = f"{folder}/map"
        run(REPO, tests, 3600, "-p", "tests.mutants")
        rows = json.loads(Path(folder, "map").read_text(encoding="utf-8"))
    for test, (seconds, functions) in rows.items():
        for function in functions:
            tests_of[function].append((seconds, test))
    return tests_of


def judge(tests_of: dict, point: tuple[Path, int]) -> tuple[str, str, str]:
    """Plant one fault in a copy of the course and return (verdict, place, change)."""
    path, index = point
    tree = ast.parse(path.read_text(encoding="utf-8"))
    node, function = list(nodes_of(tree))[index]
    place, how = f"{path.relative_to(REPO)}:{node.lineno}", change(node)
    module = path.relative_to(REPO / "labutils").as_posix()
    tests = tests_of[f"{module}:{function}" if function else module]
    tests = sorted(tests, key=lambda row: (f"test_{path.stem}." not in row[1], row))
    if not tests:
        return "no test calls it", place, how
    with tempfile.TemporaryDirectory() as folder:
        course = shutil.copytree(REPO, Path(folder, "course"), ignore=NOT_COPIED)
        fault = ast.unparse(ast.fix_missing_locations(tree))
        (course / path.relative_to(REPO)).write_text(fault, encoding="utf-8")
        code = run(course, [test for _, test in tests], ENOUGH_S, "-x")
    return VERDICTS.get(code, f"more than {ENOUGH_S} s"), place, how


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--n", type=int, default=200)
    parser.add_argument("--seed", type=int, default=random.randrange(10_000))
    parser.add_argument("--only", default="", help="a part of the paths of the files to change")
    parser.add_argument("--tests", nargs="+", default=["tests"])
    options = parser.parse_args()
    print(f"{options.n} mutants, seed {options.seed}", flush=True)
    points = []
    for part in SOURCES:
        for path in sorted((REPO / "labutils").glob(f"{part}.py")):
            nodes = list(nodes_of(ast.parse(path.read_text(encoding="utf-8"))))
            points += [(path, i) for i, (node, _) in enumerate(nodes) if change(node)]
    points = [point for point in points if options.only in point[0].as_posix()]
    tests_of = functions_of(options.tests)
    if not tests_of:
        raise SystemExit("no test passes")
    drawn = random.Random(options.seed).sample(points, options.n)
    verdicts = Counter()
    with ThreadPoolExecutor(2) as pool:
        for row in pool.map(partial(judge, tests_of), drawn):
            print(*row, sep="  ", flush=True)
            verdicts[row[0]] += 1
    print(dict(verdicts))


if __name__ == "__main__":
    main()
