"""Threads: one on a busy machine, chosen once, recorded, and kept by a run that is continued."""

from __future__ import annotations

import os

import psutil
import pytest
import torch

import labutils as lab
from labutils.machine import threads
from tests.helpers import CPU
from tests.training.test_resume import start, stop_at


@pytest.fixture
def machine(monkeypatch):
    """Set what other programs take of four CPUs, and give what is chosen of four threads."""
    before = torch.get_num_threads()
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(threads, "usable_cpus", lambda: 4)

    def choose(busy: float) -> tuple[int, str]:
        monkeypatch.setattr(threads, "busy_cpus", lambda: busy)
        threads.choose_threads.cache_clear()
        torch.set_num_threads(4)
        return torch.get_num_threads(), threads.choose_threads()

    yield choose
    torch.set_num_threads(before)
    threads.choose_threads.cache_clear()


def test_a_quiet_machine_keeps_its_threads(machine):
    assert machine(0.3)[1] == "" and torch.get_num_threads() == 4


@pytest.mark.parametrize("busy", [1.0, 4.0])
def test_a_busy_machine_computes_with_one_thread_and_says_so(machine, busy):
    said = machine(busy)[1]
    assert torch.get_num_threads() == 1
    assert f"{busy} of 4 CPUs" in said and "1 thread here, not 4" in said


def test_the_users_own_number_stays(machine, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert "times mean little" in machine(4.0)[1] and torch.get_num_threads() == 4


def test_it_is_chosen_once(machine, monkeypatch):
    machine(4.0)
    monkeypatch.setattr(threads, "busy_cpus", lambda: 0.0)
    threads.choose_threads()
    assert torch.get_num_threads() == 1


def test_busy_cpus_are_those_of_the_whole_machine(monkeypatch):
    monkeypatch.setattr(psutil, "cpu_percent", lambda interval: 75.0)
    assert threads.busy_cpus() == pytest.approx(0.75 * os.cpu_count())


@pytest.mark.skipif(torch.cuda.is_available(), reason="threads are of a CPU run")
def test_a_continued_run_takes_the_recorded_number(runs, monkeypatch, capsys):
    before = torch.get_num_threads()
    other = 1 if before > 1 else 2
    monkeypatch.setattr(threads, "usable_cpus", lambda: max(before, other))
    try:
        stop_at(monkeypatch, 4)
        assert start(save_every=2).environment["threads"] == str(before)
        monkeypatch.undo()
        monkeypatch.setenv("LABUTILS_RUNS", str(runs))
        monkeypatch.setattr(threads, "usable_cpus", lambda: max(before, other))
        torch.set_num_threads(other)
        continued = start(resume=True, save_every=2)
    finally:
        torch.set_num_threads(before)
    assert continued.environment["resumed"] == "after step 4"
    assert continued.environment["threads"] == str(before)
    assert f"continues with {before} thread" in capsys.readouterr().out


def test_a_number_that_this_process_may_not_use_changes_nothing(monkeypatch):
    monkeypatch.setattr(threads, "usable_cpus", lambda: 2)
    before = torch.get_num_threads()
    assert threads.use_recorded_threads("64") == "" and torch.get_num_threads() == before


def test_the_setup_line_names_the_threads_once(capsys):
    lab.setup()
    printed = capsys.readouterr().out
    if lab.setup() == CPU:
        assert printed.count("threads") == 1
