"""The paragraph of `doctor`: what runs here, how long it takes, what is missing."""

from __future__ import annotations

import csv
import re

import pytest
import torch

from labutils.config.card import Support
from labutils.tools import doctor
from tests.helpers import CPU, REPO, committed


@pytest.fixture
def machine(monkeypatch):
    """Set the speed of a product, in GFLOP/s of one thread, and which precisions are slow."""

    def of(gflops: float, slow: str = "") -> str:
        rate = gflops * 1e9 * torch.get_num_threads()
        monkeypatch.setattr(doctor, "matmul_rate", lambda *_, **__: rate)
        answers = {"tf32": Support(False, False, "no"), slow: Support(True, True, "")}
        answer = lambda name, _: answers.get(name, Support(True, False, ""))  # noqa: E731
        monkeypatch.setattr(doctor, "support", answer)
        return doctor.paragraph(CPU, "")

    return of


def minutes(text: str) -> list[float]:
    found = re.findall(r"0\d: (\d+) (min|s)", text)
    return [float(n) * (1 if unit == "min" else 1 / 60) for n, unit in found]


def test_a_machine_half_as_fast_takes_twice_as_long(machine):
    fast, slow = minutes(machine(20)), minutes(machine(10))
    assert len(fast) == 4
    assert [b / a for a, b in zip(fast, slow, strict=True)] == pytest.approx([2] * 4, rel=0.1)


def test_it_says_what_runs_slowly_and_what_not_at_all(machine):
    text = machine(100, slow="bf16")
    assert (
        "fewer steps: bf16." in text
        and "Not on this device: tf32." in text
        and "Add some minutes to 01" in text
    )
    assert "fewer steps" not in machine(100)


def test_it_names_what_is_missing(machine, monkeypatch):
    monkeypatch.setattr(doctor, "find_spec", lambda name: None if name == "jupyterlab" else name)
    monkeypatch.setattr(doctor.shutil, "which", lambda name: name)
    text = machine(100)
    assert (
        "JupyterLab" in text
        and "frameworks" not in text
        and "Tab key" not in text
        and "C++" not in text
    )
    monkeypatch.setattr(doctor, "find_spec", lambda name: None if name == "lightning" else name)
    assert 'the notebook on frameworks: pip install -c constraints.txt -e ".[frameworks]"' in (
        machine(100)
    )
    monkeypatch.setattr(doctor, "find_spec", lambda name: name)
    assert machine(100).endswith("Nothing is missing.")


def test_the_recorded_times_are_of_notebooks_that_exist():
    with doctor.TIMES.open(encoding="utf-8", newline="") as file:
        names = [row["notebook"] for row in csv.DictReader(file)]
    core = sorted(path.stem for path in REPO.glob("0*.ipynb"))
    assert names[: doctor.CORE] == core
    optional = sorted(path.stem for path in (REPO / "further").glob("*.ipynb"))
    assert names[doctor.CORE :] == optional


def test_the_instructors_table_has_the_recorded_times():
    with doctor.TIMES.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    found = re.findall(r"^\| (\S+) \| (\d+) \|$", committed("INSTRUCTORS.md"), re.M)
    assert found == [(row["notebook"], row["seconds"]) for row in rows]


def test_the_optional_ones_are_summed_up(machine):
    [(n, low, high)] = re.findall(r"the (\d+) optional notebooks (.+?) to (.+?)\.", machine(102))
    assert int(n) == len(list((REPO / "further").glob("*.ipynb"))) and low != high
