"""The course stays small: what it may hold at most, lowered whenever something leaves.

Nodes: those of the syntax tree, without contexts and operators, so that the number is the same on
every Python from 3.11. Code lines: neither blank, nor comment, nor docstring. A number is raised
only by a commit that says why.
"""

import ast
import io
import tokenize

import pytest

from tests.helpers import REPO

AT_MOST = {  # folder: (nodes, code lines)
    "labutils": (47_399, 7_646),
    "tests": (43_603, 6_568),
}
STOREYS = {  # of labutils: (nodes, its rooms); the kit is all that is in no other
    "kit": (24_530, []),
    "engine": (11_085, ["prediction"]),
    "desk": (11_795, ["session.py", "guesses.py", "cli.py", "pages.py", "exercises", "exhibits"]),
}
WAYS_OUT = "Take something out, or raise the number here, in a commit that says why"
PAGE_LINES = 3_935  # HTML, JavaScript, CSS and templates in labutils/
WORDS = 3_461  # README, INSTRUCTORS and the package's README
FURTHER = 12  # optional notebooks
SKIPPED = (ast.expr_context, ast.operator, ast.unaryop, ast.boolop, ast.cmpop)
NO_CODE = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)


def docstring_lines(tree: ast.AST) -> set[int]:
    """Return the numbers of the lines that docstrings take."""
    lines: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(
            node
        ):
            docstring = node.body[0]
            lines.update(range(docstring.lineno, docstring.end_lineno + 1))
    return lines


def size(text: str) -> tuple[int, int]:
    """Return (nodes, code lines) of a module's text."""
    tree = ast.parse(text)
    nodes = sum(not isinstance(node, SKIPPED) for node in ast.walk(tree))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NO_CODE and token.type != tokenize.ENDMARKER:
            lines.update(range(token.start[0], token.end[0] + 1))
    return nodes, len(lines - docstring_lines(tree))


def test_a_size_counts_code_only():
    text = '"""A docstring."""\n\n# a comment\nx = [\n    1,  # one\n    -2,\n]\n'
    nodes, lines = size(text)
    assert (nodes, lines) == (
        9,
        4,
    )  # Module, Expr, its Constant; Assign, Name, List, 3 for 1 and -2


@pytest.mark.parametrize("folder", AT_MOST)
def test_code_stays_within_the_budget(folder):
    sizes = [size(path.read_text(encoding="utf-8")) for path in (REPO / folder).rglob("*.py")]
    nodes, lines = (sum(numbers) for numbers in zip(*sizes, strict=True))
    assert (nodes <= AT_MOST[folder][0], lines <= AT_MOST[folder][1]) == (True, True), (
        f"{folder}: {nodes:,} nodes and {lines:,} code lines; at most {AT_MOST[folder]}. {WAYS_OUT}"
    )


@pytest.mark.parametrize("storey", STOREYS)
def test_each_storey_stays_within_its_own(storey):
    nodes = dict.fromkeys(STOREYS, 0)
    for path in (REPO / "labutils").rglob("*.py"):
        room = path.relative_to(REPO / "labutils").parts[0]
        of = next((name for name, (_, rooms) in STOREYS.items() if room in rooms), "kit")
        nodes[of] += size(path.read_text(encoding="utf-8"))[0]
    assert nodes[storey] <= STOREYS[storey][0], f"{nodes} nodes. {WAYS_OUT}"


def test_pages_stay_within_the_budget():
    endings = {".html", ".js", ".css", ".j2"}
    paths = [path for path in (REPO / "labutils").rglob("*") if path.suffix in endings]
    n_lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)
    assert paths and n_lines <= PAGE_LINES, f"{n_lines:,} lines"


def test_documents_stay_within_the_budget():
    names = ("README.md", "labutils/README.md", "INSTRUCTORS.md")
    words = sum(len((REPO / name).read_text(encoding="utf-8").split()) for name in names)
    assert words <= WORDS, f"{words:,} words"


def test_optional_notebooks_stay_few():
    assert len(list((REPO / "further").glob("*.ipynb"))) <= FURTHER


def test_benchmarks_stay_within_the_budget():
    paths = (REPO / "benchmarks").rglob("*.py")
    lines = sum(size(path.read_text(encoding="utf-8"))[1] for path in paths)
    assert lines <= 2_058, f"{lines:,} code lines in benchmarks/"
