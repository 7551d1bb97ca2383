"""What `doctor` says in one paragraph: what will run here, how long it will take, what to add."""

from __future__ import annotations

import csv
import shutil
from importlib.util import find_spec

import torch

from labutils.config.choices import PRECISIONS
from labutils.files import REFERENCE_DIR
from labutils.machine.here import matmul_rate, product_name, support

# Recorded where one thread of a named machine multiplies at `gflops`: see INSTRUCTORS.md.
TIMES = REFERENCE_DIR / "notebook_seconds.csv"
PROBE = 256  # rows and columns of the product that is timed here
CORE = 4  # notebooks, the first rows of the table
EXTRAS = {
    "jupyterlab": 'JupyterLab, to open the notebooks: pip install -c constraints.txt -e ".[lab]"',
    "nbconvert": "what `labs` executes notebooks with: pip install -c constraints.txt -e "
    '".[notebook]"',
    "lightning": 'the notebook on frameworks: pip install -c constraints.txt -e ".[frameworks]"',
    "pytest": 'the tests: pip install -c constraints.txt -e ".[test]"',
    "argcomplete": 'the Tab key: pip install -c constraints.txt -e ".[completion]"',
}


def paragraph(device: torch.device, problem: str) -> str:
    """Return what a person should know of this machine before a lesson.

    `problem` is why a GPU that is here cannot be used, if there is one.
    """
    parts = [_what_runs(device), _how_long(device)]
    if problem:
        parts.append("A GPU is here and cannot be used: the reason stands above.")
    parts.append(_what_to_add())
    return " ".join(part for part in parts if part)


def _what_runs(device: torch.device) -> str:
    """Name the device, its size of experiments, and its precisions."""
    fast, slow, never = [], [], []
    for name in PRECISIONS:
        answer = support(name, device)
        kind = never if not answer.ok else slow if answer.slow else fast
        kind.append(name)
    text = f"All notebooks run here, on the {product_name(device)}."
    if device.type == "cpu":
        text += " Experiments train a small GPT-2, because no GPU is used."
    text += f" At full speed: {', '.join(fast)}."
    if slow:
        text += f" Slow, and so with fewer steps: {', '.join(slow)}."
    if never:
        text += f" Not on this device: {', '.join(never)}."
    return text


def _how_long(device: torch.device) -> str:
    """Estimate the time of each notebook from recorded times and the speed of a product here."""
    if device.type == "cuda":
        return "No notebook has been timed on a GPU yet."
    with TIMES.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    rate = matmul_rate(torch.float32, device, PROBE, repeats=10) / torch.get_num_threads() / 1e9
    seconds = [float(row["seconds"]) * float(row["gflops"]) / rate for row in rows]
    core, optional = seconds[:CORE], seconds[CORE:]
    times = [f"{number:02d}: {_rounded(one)}" for number, one in enumerate(core, 1)]
    text = f"Run All should take roughly this long with one thread: {', '.join(times)}; each of "
    text += f"the {len(optional)} optional notebooks {_rounded(min(optional))} to "
    text += f"{_rounded(max(optional))}. These are times of another machine, scaled by the speed "
    text += "of one product here; other programs that compute make them longer."
    if support("bf16", device).slow:
        text += " Add some minutes to 01: 16 bits are slow on this CPU."
    return text


def _rounded(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{10 * round(seconds / 10):d} s"


def _what_to_add() -> str:
    """Name what is not installed and what it would add."""
    missing = [text for module, text in EXTRAS.items() if find_spec(module) is None]
    if not (shutil.which("chromium") and shutil.which("chromedriver")):
        missing.append("tests of the exhibits: a Chromium browser with its driver")
    if not shutil.which("c++"):
        missing.append("`compile`: a C++ compiler")
    if not missing:
        return "Nothing is missing."
    return f"Not installed, and needed only for this: {'; '.join(missing)}."
