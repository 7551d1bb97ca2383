"""`make readme`: what the README's figure takes from elsewhere, and the figure.

First `reference/precisions_on_cards.csv`: milliseconds of a step of GPT-2 124M on two cards, predicted
for each precision, and measured by others where they published it. Notebook 01 draws it beside its own
runs. Then the figure is copied out of the notebook as it stands in the working tree: it is the output
of the one cell tagged `readme-figure`. The README's caption has to name the machine that the notebook's
first cell printed.
"""

import base64

import nbformat
import pandas as pd

from labutils.config.reader import load_config
from labutils.files import REFERENCE_DIR, REPO_DIR, write_atomically
from labutils.prediction.published import config_of_row, published
from labutils.prediction.time import predict_time

NOTEBOOK, TAG = "01-Mixed_Precision.ipynb", "readme-figure"
TARGET = REFERENCE_DIR / "four_panels_cpu.png"
TABLE = REFERENCE_DIR / "precisions_on_cards.csv"
ON_T4 = ("fp32", "fp16", "bf16")  # the course's own configs; a T4 has no TF32
ON_A100 = {"fp32": "K1", "tf32": "K2", "bf16": "K3"}  # rows of published.csv: one loop, one batch


def rows() -> list[tuple[str, str, float]]:
    """Return (device, precision, milliseconds of a step) of GPT-2 124M."""
    table = published().set_index("id")
    ms = [("T4, predicted", name, predict_time(load_config(name), "t4").step_ms) for name in ON_T4]
    for name, row in ON_A100.items():
        config = config_of_row(table.config[row])
        ms.append(("A100, predicted", name, predict_time(config, "a100").step_ms))
    ms += [("A100, published", name, table.ms[row]) for name, row in ON_A100.items()]
    return ms


def figure_of(notebook: nbformat.NotebookNode) -> bytes:
    """Return the PNG of the tagged cell. Raises ValueError if there is not one cell, one figure."""
    [cell] = [cell for cell in notebook.cells if TAG in cell.metadata.get("tags", [])]
    [output] = [output for output in cell.outputs if "image/png" in output.get("data", {})]
    return base64.b64decode(output.data["image/png"])


if __name__ == "__main__":
    table = pd.DataFrame(rows(), columns=["device", "precision", "ms"])
    write_atomically(TABLE, table.round(1).to_csv(index=False).encode())
    write_atomically(TARGET, figure_of(nbformat.read(REPO_DIR / NOTEBOOK, as_version=4)))
