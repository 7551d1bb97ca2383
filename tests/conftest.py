"""Every test writes into a folder of its own, finds the course's configs but not a reader's, and
no model hub.
"""

from __future__ import annotations

import shutil

import pytest
import torch

from benchmarks.configs import shipped


@pytest.fixture(scope="session")
def runs_root(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="session")
def shipped_configs(tmp_path_factory):
    """The course's configs as they stand on disk, without a reader's own."""
    folder = tmp_path_factory.mktemp("course") / "configs"
    folder.mkdir()
    for path in shipped():
        shutil.copy(path, folder)
    return folder


@pytest.fixture(autouse=True)
def _isolated(monkeypatch, runs_root, shipped_configs):
    monkeypatch.setattr("labutils.config.reader.CONFIGS_DIR", shipped_configs)
    monkeypatch.setenv("LABUTILS_RUNS", str(runs_root))
    monkeypatch.setenv("MPLBACKEND", "Agg")
    # else a busy machine would decide how many threads a test and its child processes have
    monkeypatch.setenv("OMP_NUM_THREADS", str(torch.get_num_threads()))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # a hub that refuses
    torch.manual_seed(0)


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """An empty runs folder, and a terminal on which no table is broken."""
    folder = tmp_path / "runs"
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setenv("LABUTILS_RUNS", str(folder))
    return folder


@pytest.hookimpl(tryfirst=True)  # before pytest chooses by mark
def pytest_collection_modifyitems(items):
    for item in items:
        if {"browser", "node"} & set(getattr(item, "fixturenames", ())):
            item.add_marker("slow")
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))
