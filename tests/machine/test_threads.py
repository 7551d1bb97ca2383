"""Threads: one on a busy machine, and chosen once."""

from __future__ import annotations

import os

import psutil
import pytest
import torch

from labutils import machine


@pytest.fixture
def choose(monkeypatch):
    """Return a function that sets what other programs take of four CPUs, and chooses."""
    before = torch.get_num_threads()
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(machine, "usable_cpus", lambda: 4)

    def _choose(busy: float) -> str:
        monkeypatch.setattr(machine, "busy_cpus", lambda: busy)
        return machine.choose_threads()

    machine.choose_threads.cache_clear()
    torch.set_num_threads(4)
    yield _choose
    torch.set_num_threads(before)
    machine.choose_threads.cache_clear()


def test_a_quiet_machine_keeps_its_threads(choose):
    assert choose(0.3) == "" and torch.get_num_threads() == 4


def test_a_busy_machine_computes_with_one_thread_and_says_so_once(choose):
    sentence = choose(1.0)
    assert "1.0 of 4 CPUs" in sentence and "1 thread here, not 4" in sentence
    assert choose(0.0) == sentence and torch.get_num_threads() == 1


def test_the_users_own_number_stays(choose, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert "times mean little" in choose(4.0) and torch.get_num_threads() == 4


def test_busy_cpus_are_those_of_the_whole_machine(monkeypatch):
    monkeypatch.setattr(psutil, "cpu_percent", lambda interval: 75.0)
    assert machine.busy_cpus() == pytest.approx(0.75 * os.cpu_count())
