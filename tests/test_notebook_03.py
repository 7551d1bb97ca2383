"""What notebook 03 must not lose again, and what its pages promise."""

from __future__ import annotations

import ast
import itertools
import re

import nbformat
import pytest

from tests import test_retold_notebooks as retold
from tests.helpers import committed

NOTEBOOK = "03-Gradient_Checkpointing.ipynb"
TRAINING = ("run_experiment", "measure_step", "train(", "backward(", "alternate(")


@pytest.fixture(scope="module")
def cells() -> list[nbformat.NotebookNode]:
    return nbformat.reads(committed(NOTEBOOK), as_version=4).cells


def sections(cells) -> dict[str, list[nbformat.NotebookNode]]:
    found, title = {}, "setup"
    for cell in cells:
        heading = re.match(r"##? (.+)", cell.source) if cell.cell_type == "markdown" else None
        title = heading.group(1) if heading else title
        found.setdefault(title, []).append(cell)
    return found


def prose(cells) -> str:
    return "\n\n".join(cell.source for cell in cells if cell.cell_type == "markdown")


def code(cells) -> str:
    return "\n\n".join(cell.source for cell in cells if cell.cell_type == "code")


def missing(cells) -> list[str]:
    """Return what a notebook announces and does not have."""
    text, found = prose(cells), []
    numbers = [int(n) for n in re.findall(r"^## (\d+) · ", text, re.M)]
    if numbers != list(range(1, len(numbers) + 1)):
        found.append(f"sections {numbers}")
    for n in re.findall(r"\b[Ss]ection (\d+)", text):
        if int(n) not in numbers:
            found.append(f"section {n}")
    ordinals = ("First", "Second", "Third", "Fourth")
    cases = re.findall(rf"^\*\*({'|'.join(ordinals)}) case:", text, re.M)
    if cases != list(ordinals):
        found.append(f"cases {cases}")
    asked = re.findall(r"lab\.guess\(\s*\"(\w+)\"", code(cells))
    answered = re.findall(r"lab\.answer\(\s*\"(\w+)\"", code(cells))
    if sorted(asked) != sorted(answered) or text.count("**Guess.**") != len(asked):
        found.append(f"guesses {asked}, answers {answered}")
    exercises = [int(n) for n in re.findall(r"^\*\*Exercise (\d+)\.\*\*", text, re.M)]
    if exercises != list(range(1, len(exercises) + 1)):
        found.append(f"exercises {exercises}")
    for title, part in sections(cells).items():
        if "**Predict" in prose(part) and "**Measure" not in prose(part):
            found.append(f"a measurement in {title}")
    for cell, after in itertools.pairwise(cells):
        if "**Measure" in cell.source and cell.cell_type == after.cell_type:
            found.append(f"the code of {cell.source[:40]}")
    return found


def test_what_is_announced_is_there(cells):
    assert missing(cells) == []


@pytest.mark.parametrize(
    "start", ["## 6 · What it buys", "**Third case", "lab.answer", "price_guess", "## 3 · "]
)
def test_a_lost_cell_is_noticed(cells, start):
    lost = [i for i, cell in enumerate(cells) if cell.source.startswith(start)]
    lost = lost or [i for i, cell in enumerate(cells) if f"\n{start}" in cell.source]
    assert missing([*cells[: lost[0]], *cells[lost[0] + 1 :]])


LOST = {  # what commit 5ce2685 lost of this notebook, one part at a time
    "heading, Idea and Guess of section 6": ("## 6 · What it buys",),
    "its guess": ("buys_guess = lab.guess",),
}


def without(cells, starts) -> list[nbformat.NotebookNode]:
    """Return the cells without those that begin so; each of them must have been there."""
    left = [cell for cell in cells if not cell.source.startswith(starts)]
    assert len(left) == len(cells) - len(starts)
    return left


@pytest.mark.parametrize("starts", LOST.values(), ids=LOST)
def test_what_was_lost_once_is_noticed(cells, starts):
    assert missing(without(cells, starts))


def test_the_lost_sentence_of_the_third_case_is_noticed(cells):
    copied = [nbformat.from_dict(cell) for cell in cells]
    (cell,) = [cell for cell in copied if "**Third case" in cell.source]
    before, _, after = cell.source.partition("**Third case")
    cell.source = before + "**" + after.partition("\n\n")[2]
    assert missing(copied) == ["cases ['First', 'Second', 'Fourth']"]


def test_the_rules_of_retold_notebooks_notice_the_lost_section_too(cells, monkeypatch):
    def shown(left) -> None:
        text = nbformat.writes(nbformat.v4.new_notebook(cells=left))
        monkeypatch.setattr(retold, "committed", lambda name: text)

    rules = {
        "## 6 · What it buys": retold.test_section_numbers_have_no_gap,
        "buys_guess = lab.guess": retold.test_few_guesses_each_before_its_answer,
    }
    for start, rule in rules.items():
        shown(cells)
        rule(NOTEBOOK)
        shown(without(cells, (start,)))
        with pytest.raises(AssertionError):
            rule(NOTEBOOK)


def test_five_or_six_guesses_each_before_its_answer(cells):
    names = re.findall(r"lab\.(guess|answer)\(\s*\"(\w+)\"", code(cells))
    asked = [name for call, name in names if call == "guess"]
    assert 5 <= len(asked) <= 6
    for name in asked:
        assert names.index(("guess", name)) < names.index(("answer", name))


def test_cells_are_short_and_a_heading_begins_its_cell(cells):
    for cell in cells:
        if cell.cell_type == "code":
            assert len(cell.source.splitlines()) <= 15, cell.source
            assert max(map(len, cell.source.splitlines())) <= 100
        else:
            headings = re.findall(r"^#+ ", cell.source, re.M)
            assert len(headings) <= 1
            assert not headings or cell.source.startswith("#")
            assert len(cell.source.split()) > 2, "a word is no paragraph"


def test_at_least_ten_cells_are_compared(cells):
    compared = [c for c in cells if "nbval-check-output" in c.metadata.get("tags", [])]
    assert len(compared) >= 10
    assert all(cell.outputs for cell in compared)


def test_every_figure_has_a_title_and_a_description(cells):
    for cell, after in zip(cells, [*cells[1:], None], strict=True):
        if cell.cell_type == "code" and "plt.show()" in cell.source:
            assert re.search(r"\b(set_title|suptitle)\(f", cell.source)
            assert after.source.startswith("*The figure shows")


def test_each_section_ends_with_what_you_now_know(cells):
    for title, part in sections(cells).items():
        if code(part) and not title.startswith("03"):
            assert "**What you now know.**" in part[-1].source, title


def test_results_train_nothing(cells):
    results = next(part for title, part in sections(cells).items() if title.startswith("7 · "))
    assert not [word for word in TRAINING if word in code(results)]


def assigned(source: str) -> set[str]:
    """Return the names that a cell sets for later cells; loop variables are not meant for them."""
    found = set()
    for node in ast.parse(source).body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        for target in targets:
            found |= {one.id for one in ast.walk(target) if isinstance(one, ast.Name)}
    return found - {"ax"}


def test_no_section_overwrites_a_name_of_another(cells):
    """So filling in a guess after Run All and running any one cell again gives the same result."""
    owner: dict[str, str] = {}
    for title, part in sections(cells).items():
        for cell in part:
            if cell.cell_type == "code":
                for name in assigned(cell.source):
                    assert owner.setdefault(name, title) == title, name


def test_no_sentence_is_long(cells):
    for cell in cells:
        if cell.cell_type != "markdown":
            continue
        text = "" if cell.source.startswith("### Sources") else cell.source
        for paragraph in re.split(r"\n\s*\n|\n[-|] ?", text):
            for sentence in re.split(r"(?<=[.?!:;])\*{0,2}\s+", paragraph):
                assert len(sentence.split()) <= 25, sentence


def test_nothing_is_promised(cells):
    printed = " ".join(o.get("text", "") for c in cells for o in c.get("outputs", []))
    assert "not recorded" not in printed and "Guess(" not in str(cells)
