"""The course stays small: what it may hold at most, lowered whenever something leaves.

Code lines: neither blank, nor comment, nor docstring, so that a reason at its line costs nothing. A
number is raised only by a commit that says which answer of a reader's it keeps.
"""

import ast
import io
import re
import tokenize

import nbformat
import pytest

from tests.helpers import REPO

STOREYS = {"labutils/prediction": "engine", "labutils/course": "desk"}
AT_MOST = {  # code lines, and of pages other lines, and words
    "kit": 3_919,  # of labutils, what is in no other storey
    "engine": 2_134,  # labutils/prediction
    "desk": 1_829,  # labutils/course
    "tests": 7_215,
    "benchmarks": 2_138,
    "docs": 160,  # the site
    "pages": 3_745,  # lines of HTML, JavaScript, CSS and templates in labutils/ and docs/
    "words": 3_802,  # README, INSTRUCTORS and the package's README
}
WAYS_OUT = "Take something out, or raise the number here, in a commit that says why"
MINUTES = {  # of a reader, without exercises
    "01-Mixed_Precision": 84,
    "02-Gradient_Accumulation": 84,
    "03-Gradient_Checkpointing": 84,
    "04-Memory_Profiling": 84,
    "adapters": 50,
    "can_you_tell": 51,
    "capstone": 39,
    "eight_bits": 50,
    "frameworks": 50,
    "large_models": 60,
    "packing": 40,
    "rounding": 49,
    "scaler": 50,
    "sharding": 60,
    "where_time_goes": 67,
}
PAGES = {".html", ".js", ".css", ".j2"}


def code_lines(text: str) -> int:
    """Return how many lines of a module's text are code."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type != tokenize.COMMENT and token.string.strip():
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):  # docstrings
        if isinstance(node, ast.Expr) and isinstance(getattr(node.value, "value", None), str):
            lines.difference_update(range(node.lineno, node.end_lineno + 1))
    return len(lines)


def test_comments_and_docstrings_are_free():
    text = '"""A docstring."""\n\n# a comment\nx = [\n    1,  # one\n    -2,\n]\n'
    assert code_lines(text) == 4


def test_each_part_stays_within_its_budget():
    n = dict.fromkeys(AT_MOST, 0)
    for folder in ("labutils", "tests", "benchmarks", "docs"):
        for path in (REPO / folder).rglob("*.*"):
            room = f"{folder}/{path.relative_to(REPO).parts[1]}"
            storey = STOREYS.get(room, "kit" if folder == "labutils" else folder)
            if path.suffix == ".py" and "node_modules" not in path.parts:
                n[storey] += code_lines(path.read_text(encoding="utf-8"))
            elif path.suffix in PAGES and folder in ("labutils", "docs"):
                n["pages"] += len(path.read_text(encoding="utf-8").splitlines())
    for name in ("README.md", "labutils/README.md", "INSTRUCTORS.md"):
        n["words"] += len((REPO / name).read_text(encoding="utf-8").split())
    over = {part: size for part, size in n.items() if not 0 < size <= AT_MOST[part]}
    assert not over, f"{over}. {WAYS_OUT}"


def minutes_of(notebook: nbformat.NotebookNode) -> float:
    """Return the minutes that a reader takes for a notebook as it is saved, without exercises.

    Text at 200 words a minute; 6 seconds for a line of code; 3 for a printed line or a row of a
    table, of at most 20 in a cell; 20 for a figure; 90 for a guess. Exercises, Try it, exhibits and
    quizzes are not counted: cells that begin with these words, or call lab.exercises or lab.play.
    """
    extra = re.compile(r"\s*(#+\s*|\*\*)?(Exercise|Try it|Answers?\b|Can you answer)", re.I)
    seconds = 0.0
    for cell in notebook.cells:
        text = cell.source
        if cell.cell_type == "markdown" and not extra.match(text):
            seconds += 60 / 200 * len(text.split())
        if cell.cell_type != "code" or "lab.exercises." in text or "lab.play." in text:
            continue
        seconds += 6 * sum(bool(line.strip()) for line in text.splitlines())
        seconds += 90 * text.count("lab.guess(")
        n_rows = 0
        for output in cell.outputs:
            data = output.get("data", {})
            n_rows += len(output.get("text", "").splitlines())
            n_rows += data.get("text/html", "").count("<tr")
            seconds += 20 * ("image/png" in data)
        seconds += 3 * min(20, n_rows)
    return seconds / 60


def test_the_minutes_of_a_reader_are_counted():
    new = nbformat.v4
    printed = new.new_output("stream", text="a\n" * 40)
    figure = new.new_output("display_data", data={"image/png": "", "text/plain": ""})
    table = new.new_output("display_data", data={"text/html": "<tr><tr>", "text/plain": ""})
    cells = [
        new.new_markdown_cell("word " * 400),  # 2 minutes
        new.new_markdown_cell("### Exercise 1\n" + "word " * 400),
        new.new_code_cell("x = 1\n\n" * 10, outputs=[printed, figure]),  # 1, 1 and 1/3
        new.new_code_cell('lab.guess("x", 3)', outputs=[table]),  # 1.5, 0.1 and 0.1
        new.new_code_cell("lab.exercises.x(1)", outputs=[printed]),
    ]
    assert minutes_of(new.new_notebook(cells=cells)) == pytest.approx(2 + 2 + 1 / 3 + 1.7)


def test_a_sitting_stays_a_sitting():
    paths = [*REPO.glob("0*.ipynb"), *REPO.glob("further/*.ipynb")]
    minutes = {path.stem: minutes_of(nbformat.read(path, as_version=4)) for path in paths}
    over = {name: round(n, 1) for name, n in minutes.items() if round(n) > MINUTES.get(name, 0)}
    assert len(paths) <= len(MINUTES) and not over, f"minutes {over}. {WAYS_OUT}"
