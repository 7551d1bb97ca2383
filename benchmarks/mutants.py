"""Does a test notice a small fault? `make mutants` plants N of them, drawn with a printed seed.

First all tests run once, and coverage notes which lines each one runs. Then each fault goes into a
copy of the course, where the tests that run its line are run, those named after its file first.
What survives may be a fault that changes nothing.

Not mutmut (tried: 3.8.1): it puts each function behind another, so that the tests that rewrite a
technique's source fail before a fault is there.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from coverage import CoverageData

REPO = Path(__file__).resolve().parent.parent
SOURCES = ("techniques/*", "training/*", "memory/*", "prediction/allocator", "course/exercises/*")
LEFT_OUT = "not (slow or slowest or gpu)"
ENOUGH_S = 90  # of CPU time, for the tests that run a line
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


def nodes_of(node: ast.AST, in_function: bool = False) -> Iterator[tuple[ast.AST, bool]]:
    """Yield a node and those below it that run, each with whether it stands in a function."""
    if isinstance(node, MESSAGES):
        return
    yield node, in_function
    for field, value in ast.iter_fields(node):
        is_inside = in_function or (isinstance(node, ast.FunctionDef) and field == "body")
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and field not in NOT_RUN:
                yield from nodes_of(child, is_inside)


def run(course: Path, tests: list[str], cpu_s: int, *options: str) -> int:
    """Run the tests in this folder; return pytest's exit code, or another if they take too long."""
    # Linux has both; the first ends a mutant that only waits
    command = ["timeout", str(10 * cpu_s), "prlimit", f"--cpu={cpu_s}", sys.executable]
    command += ["-m", "pytest", "-q", "-m", LEFT_OUT, "-p", "no:cacheprovider", *options, *tests]
    place = os.environ | {"PYTHONPATH": str(course), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=course, env=place, capture_output=True).returncode


def tests_of_lines(tests: list[str]) -> dict[str, dict[int, set[str]]]:
    """Run the tests without any fault; return {file: {line: the tests that run it}}."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["COVERAGE_FILE"] = f"{folder}/lines"
        if run(REPO, tests, 3600, "--cov=labutils", "--cov-context=test", "--cov-report="):
            raise SystemExit("a test fails without any fault: see make test")
        data = CoverageData(f"{folder}/lines")
        data.read()
        tests_of_line = defaultdict(dict)
        for path in data.measured_files():
            for line, contexts in data.contexts_by_lineno(path).items():
                tests = {context.rpartition("|")[0] for context in contexts if context}
                tests_of_line[path][line] = tests
    return tests_of_line


def judge(tests_of_line: dict, point: tuple[Path, int]) -> tuple[str, str, str]:
    """Plant one fault in a copy of the course and return (verdict, place, change)."""
    path, index = point
    tree = ast.parse(path.read_text(encoding="utf-8"))
    node, in_function = list(nodes_of(tree))[index]
    place, how = f"{path.relative_to(REPO)}:{node.lineno}", change(node)
    by_line = tests_of_line[str(path)]
    # what stands in no function runs at the import: every test of the file may notice it
    lines = range(node.lineno, node.end_lineno + 1) if in_function else by_line
    tests = {test for line in lines for test in by_line.get(line, [])}
    tests = sorted(tests, key=lambda test: (f"test_{path.stem}." not in test, test))
    if not tests:
        return "no test runs its line", place, how
    with tempfile.TemporaryDirectory() as folder:
        course = shutil.copytree(REPO, Path(folder, "course"), ignore=NOT_COPIED)
        fault = ast.unparse(ast.fix_missing_locations(tree))
        (course / path.relative_to(REPO)).write_text(fault, encoding="utf-8")
        code = run(course, tests, ENOUGH_S, "-x")
    return VERDICTS.get(code, f"more than {ENOUGH_S} s"), place, how


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--n", type=int, default=200)
    parser.add_argument("--seed", type=int, default=random.randrange(10_000))
    parser.add_argument("--only", default="", help="a part of the paths of the files to change")
    parser.add_argument("--tests", nargs="+", default=["tests"])
    options = parser.parse_args()
    print(f"{options.n} mutants, seed {options.seed}", flush=True)
    paths = [path for part in SOURCES for path in (REPO / "labutils").glob(f"{part}.py")]
    points = []
    for path in sorted(paths):
        if options.only in str(path):
            nodes = list(nodes_of(ast.parse(path.read_text(encoding="utf-8"))))
            points += [(path, i) for i, (node, _) in enumerate(nodes) if change(node)]
    tests_of_line = tests_of_lines(options.tests)
    drawn = random.Random(options.seed).sample(points, options.n)
    verdicts = Counter()
    with ThreadPoolExecutor(2) as pool:
        for row in pool.map(partial(judge, tests_of_line), drawn):
            print(*row, sep="  ", flush=True)
            verdicts[row[0]] += 1
    print(dict(verdicts))


if __name__ == "__main__":
    main()
