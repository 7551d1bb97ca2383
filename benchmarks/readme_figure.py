"""`make readme`: copy the README's figure out of notebook 01, as it stands in the working tree.

The figure is the output of the one cell tagged `readme-figure`. The machine is what the notebook's
first cell printed; the README's caption has to name it.
"""

from __future__ import annotations

import base64
import re

import nbformat

from labutils.files import REFERENCE_DIR, REPO_DIR, write_atomically

NOTEBOOK = "01-Mixed_Precision.ipynb"
TAG = "readme-figure"
TARGET = REFERENCE_DIR / "four_panels_cpu.png"


def figure_of(notebook: nbformat.NotebookNode) -> bytes:
    """Return the PNG of the tagged cell. Raises ValueError if no cell, or several, are tagged."""
    tagged = [cell for cell in notebook.cells if TAG in cell.metadata.get("tags", [])]
    if len(tagged) != 1:
        raise ValueError(f"{len(tagged)} cells of {NOTEBOOK} are tagged {TAG}; one should be")
    for output in tagged[0].outputs:
        if "image/png" in output.get("data", {}):
            return base64.b64decode(output.data["image/png"])
    raise ValueError(f"the cell of {NOTEBOOK} that is tagged {TAG} shows no figure")


def device_of(notebook: nbformat.NotebookNode) -> str:
    """Return the device's name as `lab.setup()` printed it."""
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            if match := re.match(r"device (.+?), torch", output.get("text", "")):
                return match[1]
    raise ValueError(f"no cell of {NOTEBOOK} has printed its device")


if __name__ == "__main__":
    executed = nbformat.read(REPO_DIR / NOTEBOOK, as_version=4)
    write_atomically(TARGET, figure_of(executed))
    print(f"wrote {TARGET}; its caption in README.md names: {device_of(executed)}")
