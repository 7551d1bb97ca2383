import pickle
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import labutils as lab
from labutils.files import REFERENCE_DIR
from labutils.memory import snapshot
from tests.helpers import CPU


def test_a_recorded_step_rises_as_far_as_the_allocator_says_and_leaves_nothing():
    model = lab.build_model(dropout=0.0, activation="gelu_tanh")
    ids = torch.randint(0, 2048, (2, 64))

    def step():
        lab.lm_loss_sum(model, {"input_ids": ids, "labels": ids}).backward()
        model.zero_grad()

    step()
    before = lab.allocated_bytes(CPU)
    with lab.peak_allocated(CPU) as peak:
        step()
    with snapshot.record() as history:
        step()
    rise = peak.n_bytes - before
    assert history.alive().sum(axis=1).max() == pytest.approx(rise, rel=0.01)
    assert sum(history.at_end().values()) == 0
    assert history.alive().min() >= 0


def test_the_line_that_allocates_is_named_and_a_leak_is_seen_at_the_end():
    kept = []
    with snapshot.record() as history:
        for _ in range(3):
            kept.append(torch.zeros(1000))
            torch.ones(500).exp()
    (line,) = history.at_end()
    assert line.endswith("kept.append(torch.zeros(1000))") and history.at_end()[line] == 3 * 4000
    assert next(iter(history.at_peak())) == line


def test_an_emulated_limit_raises_and_the_recording_is_kept():
    with pytest.raises(torch.OutOfMemoryError, match="emulated"), snapshot.record(9000) as history:
        torch.stack([torch.zeros(1000) for _ in range(10)])
    assert sum(history.at_peak().values()) == 12_000


def test_the_allocators_own_format(tmp_path):
    """As documented with torch.cuda.memory._snapshot; on a GPU a test reads a real one."""
    frames = [{"filename": __file__, "line": n, "name": "f"} for n in (1, 2)]
    rows = [
        ("free_completed", 9, 512, []),  # from before the recording
        ("segment_alloc", 0, 2**21, frames),
        ("alloc", 1, 512, frames),
        ("alloc", 2, 1024, None),
        ("free_requested", 1, 512, frames),
        ("oom",),
        ("alloc", 3, 4096, []),
        ("free_completed", 1, 512, frames),
        ("alloc", 1, 2048, frames),
    ]
    trace = [dict(zip(("action", "addr", "size", "frames"), row, strict=False)) for row in rows]
    traces = {"segments": [], "device_traces": [trace, trace[3:4]]}
    (tmp_path / "x").write_bytes(pickle.dumps(traces))
    history = snapshot.load(tmp_path / "x")
    assert history.at_end() == {"f: import pickle": 2048, snapshot.NO_LINE: 5120}
    assert history.alive().sum(axis=1).tolist() == [512, 1536, 5632, 5120, 7168]
    assert snapshot.load(tmp_path / "x", 1).at_end() == {snapshot.NO_STACKS: 1024}


PACKAGES = "/usr/lib/python3/dist-packages"


@pytest.mark.parametrize(
    ("frames", "line"),
    [
        ([(f"{Path(torch.__file__).parent}/x.py", 1, "x"), (__file__, 1, "f")], "f: import pickle"),
        ([("/lib/python3.10/a.py", 9, "x"), ("/u/net/model.py", 57, "f")], "f, net/model.py:57"),
        ([(f"{PACKAGES}/a/b.py", 1, "x"), (r"C:\u\net\model.py", 57, "f")], "f, net/model.py:57"),
        ([(f"{PACKAGES}/torch/a.py", 1, "x"), (f"{PACKAGES}/b/c.py", 2, "f")], "f, b/c.py:2"),
    ],
)
def test_a_line_is_ones_own_or_a_packages_and_one_of_another_machine_has_its_file(frames, line):
    assert snapshot.own_line(frames) == line


class RunsCode:
    def __reduce__(self):
        return print, ("code from a pickle",)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (pickle.dumps(RunsCode()), r"x is no snapshot: it asks for builtins\.print"),
        (b"version https://git-lfs.github.com/spec/v1", "x is no snapshot"),
        (b"", "x is no snapshot"),
        (pickle.dumps([1]), "x is no snapshot of"),
        (pickle.dumps({"device_traces": [[]]}), "x has no history: .*_record_memory_history"),
        (pickle.dumps({"device_traces": [[], [{"action": "oom"}]]}), "device_index=1"),
    ],
)
def test_what_is_no_history_is_said_with_its_path_and_runs_no_code(
    tmp_path, capsys, content, words
):
    (tmp_path / "x").write_bytes(content)
    with pytest.raises((pickle.UnpicklingError, ValueError), match=words):
        snapshot.load(tmp_path / "x")
    assert capsys.readouterr().out == ""


def test_gradients_count_as_allocated_although_nothing_looked_at_them():
    layer = torch.nn.Linear(1000, 500, bias=False)
    before = lab.allocated_bytes(CPU)
    layer(torch.ones(1, 1000)).sum().backward()
    assert lab.allocated_bytes(CPU) == before + 4 * 1000 * 500


def test_peak_allocated_counts_what_was_there_and_the_highest_rise():
    standing = torch.zeros(50_000)
    before = lab.allocated_bytes(CPU)
    with lab.peak_allocated(CPU) as peak:
        torch.zeros(10_000)
        torch.zeros(30_000)
    assert peak.n_bytes == before + 120_000 >= standing.nbytes + 120_000


def test_free_memory_clears_the_error_behind_the_last_one(monkeypatch):
    """That it collects garbage test_measure shows."""
    before = lab.allocated_bytes(CPU)

    def fail():
        held = torch.zeros(1000)
        raise KeyError(held.shape)

    try:
        try:
            fail()
        except KeyError as first:
            raise ValueError("second") from first
    except ValueError as error:
        monkeypatch.setattr(sys, "last_value", error, raising=False)
    lab.free_memory()
    assert lab.allocated_bytes(CPU) == before


def test_the_history_that_ships_is_slim_and_has_the_bytes_that_the_allocator_counted():
    """Requests rounded up to 512 bytes, and nothing else, are the allocator's own peak."""
    shipped = REFERENCE_DIR / "snapshot-gpt2-nano-without-a-card.pickle"
    assert shipped.stat().st_size <= 80_000
    facts = pickle.loads(shipped.read_bytes())["facts"]
    history = lab.snapshot.load(shipped)
    changes = np.array(history.events)[:, 0]
    rounded = np.sign(changes) * 512 * np.ceil(abs(changes) / 512)
    assert rounded.cumsum().max() == facts["peak, allocated bytes"]
    assert any(line.startswith("_train, bench/") for line in history.at_peak())
