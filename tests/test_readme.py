"""The README's figure is that of notebook 01, its caption names the machine that made it, and its
numbers of a card are those of the file.
"""

import re

import pandas as pd
import pytest

import labutils as lab
from benchmarks import card_tables
from benchmarks.readme_figure import NOTEBOOK, TARGET, figure_of
from labutils.files import REFERENCE_DIR
from tests.helpers import REPO, code_of, read_notebook, slow


def test_the_block_has_the_squares_that_notebook_03_counts():
    """03 carries the picture as a PNG, twice as large: on Colab there are no files beside it."""
    *before, _ = re.split(r">(\d+) · ", (REFERENCE_DIR / "block.svg").read_text(encoding="utf-8"))
    exec(code_of("03-Gradient_Checkpointing.ipynb")["c006"], names := {})
    squares = [part.count('class="square"') for part in before[::2]]
    assert squares == [int(n) for n in before[1::2]] == list(names["KEPT"].values())


def test_the_figure_is_the_notebooks_own_and_the_caption_names_its_machine():
    notebook = read_notebook(NOTEBOOK)
    assert TARGET.read_bytes() == figure_of(notebook), "make readme"
    readme = (REPO / "README.md").read_text(encoding="utf-8")
    caption = readme.partition(TARGET.name)[2].split("\n\n")[1]
    printed = [
        output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", [])
    ]
    assert re.search(r"^device (.+?) \(", "\n".join(printed), re.M)[1] in caption


def test_what_an_h100_measured_is_what_its_file_says():
    table = lab.measured_on_h100()
    rows = pd.read_csv(card_tables.STEPS, comment="#")
    for name, step in table.iterrows():
        keys = card_tables.BATCH | card_tables.DATA["steps"][name]
        [row] = [row for row in rows.itertuples() if card_tables.full(row.config) == keys]
        assert step.ms == pytest.approx(row.ms, abs=0.051)
        assert step["GB"] == pytest.approx(row.allocated_bytes / 1e9, abs=0.0051)
        assert step["tokens/s"] == pytest.approx(16_384_000 / row.ms, abs=0.51)
    readme, sheet = (path.read_text("utf-8") for path in (card_tables.README, card_tables.SHEET))
    assert card_tables.readme_table(table) in readme, "make readme"
    head, *_ = card_tables.STEPS.read_text(encoding="utf-8").splitlines()
    card, _, torch, date = head.removeprefix("# ").split(", ")
    assert f"{card}, {torch}, {date}" in sheet
    for row in card_tables.DATA["techniques"]:
        if row["after"] in table.index:
            before, after = table.loc[row["before"]], table.loc[row["after"]]
            changes = " | ".join(card_tables.change(before, after, unit) for unit in ("GB", "ms"))
            assert f" | {changes} | " in sheet, "make readme"
    assert lab.measured_on_h100("TF32").index == ["TF32"]


@slow
def test_what_is_predicted_beside_it_is_todays_prediction():
    now = card_tables.steps()
    pd.testing.assert_frame_equal(
        lab.measured_on_h100(), now.dropna().astype({"tokens/s": int}), rtol=1e-3
    )
    text = card_tables.SHEET.read_text(encoding="utf-8")
    assert card_tables.sheet(now) in text, "make readme"
