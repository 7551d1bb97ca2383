"""`make readme`: what the README's figure takes from elsewhere, and the figure.

First `reference/precisions_on_cards.csv`: milliseconds of a step of GPT-2 124M on three cards: one
measured for this course, two predicted, and one of these measured by others who published it.
Notebook 01 draws it beside its own runs. Then the figure is copied out of the notebook as it stands
in the working tree: it is the output of the one cell tagged `readme-figure`. The README's caption has
to name the machine that the notebook's first cell printed.
"""

import base64

import nbformat
import pandas as pd

from labutils.config.reader import load_config
from labutils.files import REFERENCE_DIR, REPO_DIR, write_atomically
from labutils.prediction.published import config_of_row, measured_on_h100, published
from labutils.prediction.time import predict_time

NOTEBOOK, TAG = "01-Mixed_Precision.ipynb", "readme-figure"
TARGET = REFERENCE_DIR / "speed_and_memory.png"
TABLE = REFERENCE_DIR / "precisions_on_cards.csv"
ON_T4 = ("fp32", "fp16", "bf16")  # the course's own configs; a T4 has no TF32
ON_H100 = ("FP32", "TF32", "FP16", "BF16")
ON_A100 = {"fp32": "K1", "tf32": "K2", "bf16": "K3"}  # rows of published.csv: one loop, one batch


def rows() -> pd.DataFrame:
    """Return milliseconds of a step of GPT-2 124M, by card and precision."""
    measured = measured_on_h100(*ON_H100).ms
    ms = [{"card": "H100", "precision": n.lower(), "measured": measured[n]} for n in ON_H100]
    for name in ON_T4:
        predicted = predict_time(load_config(name), "t4").step_ms
        ms.append({"card": "T4", "precision": name, "predicted": predicted})
    table = published().set_index("id")
    for name, row in ON_A100.items():
        predicted = predict_time(config_of_row(table.config[row]), "a100").step_ms
        ms.append({"card": "A100", "precision": name, "predicted": predicted})
        ms[-1]["published"] = table.ms[row]
    return pd.DataFrame(ms)


def figure_of(notebook: nbformat.NotebookNode) -> bytes:
    """Return the PNG of the tagged cell. Raises ValueError if there is not one cell, one figure."""
    [cell] = [cell for cell in notebook.cells if TAG in cell.metadata.get("tags", [])]
    [output] = [output for output in cell.outputs if "image/png" in output.get("data", {})]
    return base64.b64decode(output.data["image/png"])


if __name__ == "__main__":
    write_atomically(TABLE, rows().round(1).to_csv(index=False).encode())
    write_atomically(TARGET, figure_of(nbformat.read(REPO_DIR / NOTEBOOK, as_version=4)))
