"""The README's figure is that of notebook 01, and its caption names the machine that made it."""

import re

from benchmarks import block_picture
from benchmarks.readme_figure import NOTEBOOK, TARGET, figure_of
from tests.helpers import REPO, code_of, read_notebook


def test_the_block_has_the_squares_that_notebook_03_counts():
    assert block_picture.TARGET.read_text(encoding="utf-8") == block_picture.picture(), (
        "make readme"
    )
    exec(code_of("03-Gradient_Checkpointing.ipynb")["c006"], names := {})
    squares = [n for tensors in block_picture.HALVES for _, n, _ in tensors]
    assert squares == list(names["KEPT"].values())


def test_the_figure_is_the_notebooks_own_and_the_caption_names_its_machine():
    notebook = read_notebook(NOTEBOOK)
    assert TARGET.read_bytes() == figure_of(notebook), "make readme"
    readme = (REPO / "README.md").read_text(encoding="utf-8")
    caption = readme.partition(TARGET.name)[2].split("\n\n")[1]
    printed = [
        output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", [])
    ]
    assert re.search(r"^device (.+?) \(", "\n".join(printed), re.M)[1] in caption
