"""`make readme`: copy the README's figure out of notebook 01, as it stands in the working tree.

It is the output of the one cell tagged `readme-figure`. The README's caption has to name the
machine that the notebook's first cell printed.
"""

import base64

import nbformat

from labutils.files import REFERENCE_DIR, REPO_DIR, write_atomically

NOTEBOOK, TAG = "01-Mixed_Precision.ipynb", "readme-figure"
TARGET = REFERENCE_DIR / "four_panels_cpu.png"


def figure_of(notebook: nbformat.NotebookNode) -> bytes:
    """Return the PNG of the tagged cell. Raises ValueError if there is not one cell, one figure."""
    [cell] = [cell for cell in notebook.cells if TAG in cell.metadata.get("tags", [])]
    [output] = [output for output in cell.outputs if "image/png" in output.get("data", {})]
    return base64.b64decode(output.data["image/png"])


if __name__ == "__main__":
    write_atomically(TARGET, figure_of(nbformat.read(REPO_DIR / NOTEBOOK, as_version=4)))
