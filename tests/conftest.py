"""Every test writes into a folder of its own, and no test reaches a network."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(scope="session")
def runs_root(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(autouse=True)
def _isolated(monkeypatch, runs_root):
    monkeypatch.setenv("LABUTILS_RUNS", str(runs_root))
    monkeypatch.setenv("MPLBACKEND", "Agg")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # a hub that refuses
    torch.manual_seed(0)


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """An empty runs folder."""
    folder = tmp_path / "runs"
    monkeypatch.setenv("LABUTILS_RUNS", str(folder))
    return folder


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))
