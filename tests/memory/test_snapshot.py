import gc
import pickle
import sys
import weakref
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
    assert len(kept) == 3
    (line,) = history.at_end()
    assert line.endswith("kept.append(torch.zeros(1000))") and history.at_end()[line] == 3 * 4000
    assert next(iter(history.at_peak())) == line


def test_an_emulated_limit_raises_and_the_recording_is_kept():
    with (
        pytest.raises(torch.OutOfMemoryError, match="emulated"),
        snapshot.record(limit_bytes=10_000) as history,
    ):
        kept = [torch.zeros(1000) for _ in range(10)]
        assert kept
    assert sum(history.at_peak().values()) == 12_000


class RunsCode:
    def __reduce__(self):
        return print, ("code from a pickle",)


def test_a_pickle_that_asks_for_code_is_refused_before_it_runs(tmp_path, capsys):
    (tmp_path / "x").write_bytes(pickle.dumps(RunsCode()))
    with pytest.raises(pickle.UnpicklingError, match=r"asks for builtins\.print"):
        snapshot.load(tmp_path / "x")
    assert capsys.readouterr().out == ""


def test_the_allocators_own_format(tmp_path):
    """As documented with torch.cuda.memory._snapshot; on a GPU a test reads a real one."""
    frames = [
        {"filename": f"{Path(torch.__file__).parent}/x.py", "line": 1, "name": "x"},
        {"filename": __file__, "line": 1, "name": "f"},
    ]
    rows = [
        ("free_completed", 9, 512, []),  # from before the recording
        ("segment_alloc", 0, 2**21, frames),
        ("alloc", 1, 512, frames),
        ("alloc", 2, 1024, []),
        ("free_requested", 1, 512, frames),
        ("alloc", 3, 4096, []),
        ("free_completed", 1, 512, frames),
        ("alloc", 1, 2048, frames),
    ]
    trace = [dict(zip(("action", "addr", "size", "frames"), row, strict=True)) for row in rows]
    trace.insert(5, {"action": "oom", "device_free": 0, "size": 2**30})
    (tmp_path / "s.pickle").write_bytes(pickle.dumps({"segments": [], "device_traces": [trace]}))
    history = snapshot.load(tmp_path / "s.pickle")
    own = "f: import gc"
    assert history.at_end() == {own: 2048, snapshot.NO_LINE: 5120}
    assert history.alive().sum(axis=1).tolist() == [512, 1536, 5632, 5120, 7168]


def dumped(path: Path, *traces: object) -> Path:
    path.write_bytes(pickle.dumps({"device_traces": list(traces)}))
    return path


def test_places_of_another_machine_have_their_files_and_packages_are_passed_over(tmp_path):
    lib = "/elsewhere/lib/python3.10"
    stacks = [
        [(f"{lib}/contextlib.py", 79, "inner"), ("/elsewhere/net/model.py", 57, "forward")],
        [(f"{lib}/site-packages/einops/x.py", 1, "x"), ("C:\\u\\loss\\model.py", 57, "forward")],
        [(f"{lib}/site-packages/torch/a.py", 1, "a"), (f"{lib}/site-packages/b/c.py", 2, "d")],
    ]
    trace = []
    for i, stack in enumerate(stacks):
        frames = [dict(zip(("filename", "line", "name"), row, strict=True)) for row in stack]
        trace.append({"action": "alloc", "addr": i, "size": 2 * i + 2, "frames": frames})
    history = snapshot.load(dumped(tmp_path / "x", trace))
    assert history.at_end() == {
        "d, b/c.py:2": 6,
        "forward, loss/model.py:57": 4,
        "forward, net/model.py:57": 2,
    }
    without = [{"action": "alloc", "addr": 1, "size": 2, "frames": None}]
    assert snapshot.load(dumped(tmp_path / "y", without)).at_end() == {snapshot.NO_STACKS: 2}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"version https://git-lfs.github.com/spec/v1", "x is no snapshot"),
        (b"", "x is no snapshot"),
        (pickle.dumps([1]), "x is no snapshot of"),
        (pickle.dumps({"device_traces": [[]]}), "x has no history: .*_record_memory_history"),
        (pickle.dumps({"device_traces": [[], [{"action": "oom"}]]}), "device_index=1"),
    ],
)
def test_what_is_no_history_is_said_with_its_path(tmp_path, content, words):
    (tmp_path / "x").write_bytes(content)
    with pytest.raises((pickle.UnpicklingError, ValueError), match=words):
        snapshot.load(tmp_path / "x")


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
    assert peak.n_bytes == before + 120_000
    assert len(standing) == 50_000


def test_free_memory_collects_cycles_and_clears_the_error_behind_the_last_one(monkeypatch):
    lab.free_memory()
    before = lab.allocated_bytes(CPU)
    holder = {"tensor": torch.zeros(1000)}
    holder["self"] = holder
    died = []
    weakref.finalize(holder["tensor"], died.append, True)
    del holder

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
    gc.disable()
    try:
        lab.free_memory()
        assert died
    finally:
        gc.enable()
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
