"""The history that ships, and the page that shows one: its data, its script, what it never loads."""

from __future__ import annotations

import json
import pickle
import re
import shutil
import subprocess

import pytest
import torch

import labutils as lab
from labutils.memory import allocator_history
from labutils.memory.snapshot import NO_LINE
from labutils.memory.snapshot_page import SHIPPED, history, page
from tests.helpers import CPU

NODE = shutil.which("node")


def data_of(text: str) -> dict:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)
    return json.loads(found[1])


def script_of(text: str) -> str:
    return text.rpartition("<script>")[2].partition("</script>")[0]


def alive(blocks, n_events: int, rounded_to: int = 1) -> list[int]:
    changes = [0] * (n_events + 1)
    for start, end, n_bytes, *_ in blocks:
        n_bytes = -(-n_bytes // rounded_to) * rounded_to
        changes[start] += n_bytes
        changes[end] -= n_bytes
    return [sum(changes[: i + 1]) for i in range(n_events)]


@pytest.fixture(scope="module")
def shipped() -> str:
    return page(history(SHIPPED))


def test_the_page_of_the_shipped_history_has_the_bytes_that_the_allocator_counted(shipped):
    """Requests rounded up to 512 bytes, and nothing else, are the allocator's own peak."""
    data, raw = data_of(shipped), allocator_history.read(SHIPPED)
    peak = raw["facts"]["peak, allocated bytes"]
    assert max(alive(data["blocks"], data["nEvents"], rounded_to=512)) == peak
    assert data["small"] == []  # every block is drawn


def test_the_page_and_the_snapshot_agree_on_the_peak(shipped):
    data, by_line = data_of(shipped), lab.snapshot.load(SHIPPED).at_peak()
    most = max(alive(data["blocks"], data["nEvents"]))
    assert most == sum(by_line.values())
    assert f"{lab.mib(most):,.2f} MiB at the peak" in shipped
    assert NO_LINE in by_line and any(line.startswith("_train, line") for line in by_line)


def test_the_table_without_script_adds_up_to_the_peak(shipped):
    rows = re.findall(r"<tr><td>([\d.,]+)</td>", shipped)
    most = max(alive(data_of(shipped)["blocks"], data_of(shipped)["nEvents"]))
    assert sum(float(row.replace(",", "")) for row in rows) == pytest.approx(
        lab.mib(most), abs=0.01
    )


def test_the_shipped_history_says_how_it_was_recorded_and_names_no_machine(shipped):
    content = SHIPPED.read_bytes()
    assert len(content) < 300_000
    assert not re.search(rb"site-packages|/(?:home|root|tmp|work|usr)/", content)
    assert "no card" in shipped and "2.13" in shipped
    kinds = data_of(shipped)["kinds"]
    assert kinds == list(allocator_history.KINDS[:5])


def test_the_page_asks_for_nothing_and_is_small(shipped):
    assert "http" not in shipped.replace("http-equiv", "")
    assert not re.search(r"src=|href=|@import|url\(|fetch\(|import\(", shipped)
    assert "default-src 'none'" in shipped
    assert not re.search(r"@[A-Z]+@", shipped)
    assert len(shipped) < 100_000


def test_the_segments_are_shown_with_their_free_parts(shipped):
    raw = allocator_history.read(SHIPPED)
    reserved = sum(segment["total_size"] for segment in raw["segments"])
    assert f"{lab.mib(reserved):,.1f} MiB reserved" in shipped
    assert shipped.count('class="segment"') == len(raw["segments"])


@pytest.mark.skipif(not NODE, reason="needs node")
def test_the_script_stacks_blocks_without_a_hole_and_finds_them(shipped, tmp_path):
    data = data_of(shipped)
    (tmp_path / "page.js").write_text(script_of(shipped), encoding="utf-8")
    (tmp_path / "data.json").write_text(json.dumps(data), encoding="utf-8")
    program = """
    const { layout, totals, blockAt, belowAt, neighbour } = require("./page.js");
    const d = require("./data.json"), corners = layout(d.blocks, d.nEvents);
    const total = totals(d.blocks, d.small, d.nEvents), peak = total.indexOf(Math.max(...total));
    const living = d.blocks.map((b, i) => i).filter(
      i => d.blocks[i][0] <= peak && peak < d.blocks[i][1]);
    const spans = living.map(i => [belowAt(corners[i], peak), d.blocks[i][2]]);
    const hits = living.map(i => blockAt(d.blocks, corners, peak, belowAt(corners[i], peak)));
    const second = neighbour(d.blocks, corners, living[0], peak, 1);
    console.log(JSON.stringify({ most: total[peak], spans, isHit: hits.join() === living.join(),
      goesBack: neighbour(d.blocks, corners, second, peak, -1) === living[0] }));
    """
    answer = subprocess.run(
        [NODE, "-e", program], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    found = json.loads(answer.stdout)
    assert found["most"] == max(alive(data["blocks"], data["nEvents"]))
    top = 0
    for below, n_bytes in sorted(found["spans"]):
        assert below == top
        top += n_bytes
    assert top == found["most"]
    assert found["isHit"] and found["goesBack"]


def test_kinds_add_up_to_the_peak_and_are_those_of_the_page(shipped):
    kinds, n_blocks = lab.snapshot_kinds()
    data = data_of(shipped)
    assert sum(kinds.values()) == max(alive(data["blocks"], data["nEvents"]))
    assert list(kinds) == data["kinds"]
    assert n_blocks == len(re.findall("<tr><td>", shipped)) - 1 + int(
        re.search(r">(\d+) others<", shipped)[1]
    )


FRAME = {"filename": "/home/anna/train.py", "line": 3, "name": "<b>step</b></script>"}


def written(tmp_path, trace: list[dict], **more) -> str:
    raw = {"segments": [], "device_traces": [trace]} | more
    path = tmp_path / "s.pickle"
    path.write_bytes(pickle.dumps(raw))
    return str(path)


def test_what_was_there_before_the_recording_is_drawn(tmp_path):
    trace = [
        {"action": "free_completed", "addr": 9, "size": 512, "frames": []},
        {"action": "alloc", "addr": 1, "size": 1024, "frames": [FRAME]},
    ]
    standing = {"address": 5, "size": 2048, "state": "active_allocated", "frames": []}
    segment = {"device": 0, "total_size": 2048, "blocks": [standing]}
    found = history(written(tmp_path, trace, segments=[segment]))
    assert [(b.start, b.end, b.n_bytes) for b in found.blocks] == [
        *[(0, 0, 512), (0, 2, 2048), (1, 2, 1024)]
    ]
    assert found.peak() == (1, 3072)
    assert [block.kind for block in found.blocks[:2]] == 2 * [allocator_history.BEFORE]


def test_names_in_a_foreign_file_stay_text(tmp_path):
    trace = [{"action": "alloc", "addr": 1, "size": 1024, "frames": [FRAME]}]
    text = page(history(written(tmp_path, trace, facts={"note": "<i>@DATA@"})))
    assert "<b>step" not in text.partition('id="data"')[0] and "<i>@" not in text
    assert text.count("</script>") == 2  # the page's own
    assert data_of(text)["frames"] == [["<b>step</b></script> (train.py:3)"]]


def test_kinds_follow_the_frames():
    def kind(*names, file="??"):
        frames = [{"filename": file, "line": 1, "name": name} for name in names]
        raw = {"device_traces": [[{"action": "alloc", "addr": 1, "size": 8, "frames": frames}]]}
        return allocator_history.blocks(raw | {"segments": []})[0][0].kind

    generated = "torch::autograd::generated::"
    assert kind("at::cuda::getNewWorkspace()", f"{generated}MmBackward0::apply(x)") == (
        "library workspaces"
    )
    assert kind("at::_ops::mm::call(x)", f"{generated}MmBackward0::apply(x)") == "backward"
    assert kind("torch::autograd::Engine::evaluate_function(x)") == "backward"
    assert kind("torch::autograd::VariableType::addmm(x)") == "forward and others"
    assert kind("step", file="/x/site-packages/torch/optim/adam.py") == "optimizer"
    assert kind("to", file="/x/site-packages/torch/nn/modules/module.py") == "parameters"


def test_a_snapshot_of_a_cpu_has_its_lines_as_kinds():
    with lab.snapshot.record(CPU) as found:
        kept = [torch.zeros(1000) for _ in range(3)]
        torch.ones(500).exp()
    data = data_of(page(history(found)))
    assert len(kept) == 3
    assert max(alive(data["blocks"], data["nEvents"])) == found.alive().sum(axis=1).max()
    assert "torch.zeros(1000)" in data["kinds"][0]


def test_many_blocks_become_one_area_and_no_byte_is_lost(tmp_path, monkeypatch):
    monkeypatch.setattr("labutils.memory.snapshot_page.MOST_BLOCKS", 3)
    trace = [{"action": "alloc", "addr": i, "size": 100 + i, "frames": []} for i in range(8)]
    data = data_of(page(history(written(tmp_path, trace))))
    assert len(data["blocks"]) == 3 and data["nSmall"] == 5
    small = sum(change for event, change in data["small"] if event < data["nEvents"])
    assert sum(block[2] for block in data["blocks"]) + small == sum(range(100, 108))


def test_the_page_is_written_and_its_path_printed(runs, capsys):
    path = lab.snapshot_page()
    assert path.parent == runs and path.name == "snapshot.html"
    assert "/snapshot.html in a browser" in capsys.readouterr().out


def test_a_file_that_is_no_history_is_refused(tmp_path):
    (tmp_path / "x").write_bytes(pickle.dumps([1]))
    with pytest.raises(ValueError, match="x is no snapshot that can be read"):
        history(tmp_path / "x")


def test_a_saved_slim_history_reads_like_the_whole_one():
    python = {"filename": "/x/site-packages/torch/optim/adam.py", "line": 5, "name": "step"}
    cpp = {"filename": "??", "line": 0, "name": "torch::unwind::unwind()"}
    entries = [{"action": "alloc", "addr": i, "size": 8, "frames": [cpp, python]} for i in (1, 2)]
    raw = {"device_traces": [entries], "segments": []}
    slim = allocator_history.slim(raw)
    assert allocator_history.blocks(slim) == allocator_history.blocks(raw)
    frames = [entry["frames"] for entry in slim["device_traces"][0]]
    assert frames[0] is frames[1]
    assert frames[0] == [{"name": "step", "filename": "torch/optim/adam.py", "line": 5}]
