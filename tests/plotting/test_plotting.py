"""Figures: what is drawn is the numbers that were given, on the axis that was given."""

from __future__ import annotations

from types import SimpleNamespace

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch

import labutils as lab
from labutils import plotting
from labutils.memory.ledger import MIB
from labutils.plotting.blocks import layout

TRACE = [
    {"action": "segment_alloc", "addr": 1000, "size": 20},
    {"action": "alloc", "addr": 1000, "size": 5},
    {"action": "segment_alloc", "addr": 100, "size": 10},
    {"action": "alloc", "addr": 103, "size": 4},
    {"action": "free_requested", "addr": 1000, "size": 5},
    {"action": "free_completed", "addr": 1000, "size": 5},
    {"action": "free_completed", "addr": 7, "size": 5},  # from before the recording
]
KEPT = dict.fromkeys("abcdef", 1) | {"input of GELU": 4, "output of GELU": 4}
SEGMENTS = {"before": [[(MIB, True), (MIB, False)]], "after": [[(2 * MIB, False)]]}


def who(event):
    return f"{event['size']} bytes"


DRAWINGS = {
    "bit_layout": lambda ax: plotting.bit_layout(ax=ax),
    "relative_spacing": lambda ax: plotting.relative_spacing(ax=ax),
    "gradient_histogram": lambda ax: plotting.gradient_histogram(torch.randn(100), 2.0**10, ax),
    "reconcile": lambda ax: plotting.reconcile({"peak": {"guess": None, "other": 2.0}}, "gain", ax),
    "curves": lambda ax: plotting.curves({"it": {1: 2.0, 4: None}}, "batch", "ms", ax, (1, 4)),
    "bands": lambda ax: plotting.bands({"16": {1: [1.0, 3.0], 2: [2.0, 2.0]}}, "x", "y", ax),
    "steps": lambda ax: plotting.steps({"reserved": [1, 2]}, ["first", "second"], "MiB", ax),
    "heat_map": lambda ax: plotting.heat_map(np.array([[1.0, np.nan]]), "a", "bc", ax),
    "stacked_memory": lambda ax: plotting.stacked_memory({"fp32": {"parameters": MIB}}, ax),
    "kept_in_block": lambda ax: plotting.kept_in_block(KEPT, ax),
    "blocks": lambda ax: plotting.blocks(SEGMENTS, ax),
    "block_history": lambda ax: plotting.block_history(TRACE, who, ax),
}


@pytest.fixture(autouse=True)
def _closed():
    yield
    plt.close("all")


def words(texts) -> list[str]:
    return [text.get_text() for text in texts]


@pytest.mark.parametrize("draw", DRAWINGS.values(), ids=list(DRAWINGS))
def test_drawing_uses_the_given_axis_or_makes_one(draw):
    _, ax = plt.subplots()
    assert draw(ax) is ax and ax.has_data()
    assert len(plt.get_fignums()) == 1
    assert draw(None) is not ax


def test_values_that_are_missing_stay_empty_and_equal_ones_do_not_cover_each_other():
    assert words(DRAWINGS["heat_map"](None).texts) == ["1"]
    assert words(DRAWINGS["reconcile"](None).texts) == ["2×"]
    ax = plotting.reconcile({"peak": {"ledger": 2.0, "measured": 2.0}}, "gain")
    assert len({float(line.get_ydata()[0]) for line in ax.get_lines()[:2]}) == 2


def test_a_band_is_the_mean_with_the_spread_of_the_seeds():
    ax = DRAWINGS["bands"](None)
    assert list(ax.lines[0].get_ydata()) == [2.0, 2.0]
    box = ax.collections[0].get_paths()[0].get_extents()
    assert (box.y0, box.y1) == pytest.approx((2 - 2**0.5, 2 + 2**0.5))


def test_stacked_memory_sums_to_the_peak_and_a_guess_is_a_line_across():
    parts = {"parameters": 2**20, "gradients": 0, "optimizer state": 2**21}
    ax = plotting.stacked_memory({"fp32": parts}, marks={"your guess": 2**21, "nobody's": None})
    assert max(bar.get_x() + bar.get_width() for bar in ax.patches) == pytest.approx(3.0)
    assert [line.get_xdata()[0] for line in ax.lines] == [2.0]


def run(name: str, ms: float | None) -> SimpleNamespace:
    return SimpleNamespace(
        name=name,
        tokens_per_step=10,
        environment={"device": "a CPU"},
        timing=ms and SimpleNamespace(median_step_ms=ms, tokens_per_s=1e4 / ms),
        memory=SimpleNamespace(categories={"parameters": 2**20}),
        series=SimpleNamespace(loss=[3.0, 2.0]),
    )


def test_four_panels_leave_out_what_did_not_train():
    runs = [run("fp32", 20.0), run("bf16", 5.0), run("tf32", None)]
    (times, rates), (peaks, losses) = plotting.four_panels(runs)
    assert words(times.get_yticklabels()) == words(peaks.get_yticklabels()) == ["fp32", "bf16"]
    assert [bar.get_width() for bar in times.patches] == [20.0, 5.0]
    assert [bar.get_width() for bar in rates.patches] == [500.0, 2000.0]
    assert [list(line.get_xdata()) for line in losses.lines] == [[10, 20], [10, 20]]


@pytest.mark.parametrize("device", ["cpu", "a100"])  # a card has categories of its own
def test_timeline_shows_every_phase_and_marks_the_peak(device):
    ledger = lab.predict_memory(lab.load_config("fp32", model="gpt2-nano", seq_len=32), device)
    ax = plotting.timeline(ledger)
    peak_mib = ledger.peak_bytes / 2**20
    assert {"forward", "backward", f"{peak_mib:,.2f} MiB"} <= set(words(ax.texts))
    layers = [path.vertices[:, 1].max() for layer in ax.collections for path in layer.get_paths()]
    assert max(layers) == pytest.approx(peak_mib)


def test_a_block_lies_in_its_segment_from_its_allocation_to_its_end():
    boxes, segments = layout(TRACE, who)
    assert segments == [[0, 7, 0, 20], [2, 7, 20, 10]]
    assert boxes == {"5 bytes": [[1, 5, 0, 5]], "4 bytes": [[3, 7, 23, 4]]}
