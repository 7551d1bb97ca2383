"""Every test writes into a folder of its own, finds the course's configs but not a reader's, and
no model hub.
"""

import gc
import shutil

import pytest
import torch

import labutils as lab
from benchmarks.configs import shipped
from labutils.course import session


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
    """An empty runs folder, a terminal on which no table is broken, and memory for each run."""
    folder = tmp_path / "runs"
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setenv("LABUTILS_RUNS", str(folder))
    monkeypatch.setattr(session, "require_host_memory", lambda config: None)
    return folder


def pytest_collection_finish():
    """Keep what is imported out of the garbage collections, of which each run does several."""
    lab.build_model(n_layer=1)
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)  # before pytest chooses by mark
def pytest_collection_modifyitems(items):
    for item in items:
        if {"browser", "node"} & set(getattr(item, "fixturenames", ())):
            item.add_marker("slow")
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))
