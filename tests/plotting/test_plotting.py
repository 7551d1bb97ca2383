from __future__ import annotations

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch

import labutils as lab
from labutils import plotting
from labutils.memory.ledger import MemoryLedger
from labutils.training.records import Series
from tests.training.test_records import record

PARTS = {
    "parameters": 2**20,
    "gradients": 0,
    "optimizer state": 2**21,
    "activations and temporaries": 3 * 2**20,
}


def runs():
    memory = MemoryLedger(phases={"backward": PARTS}, method="test")
    series = Series(
        loss=[3.0, 2.0, 1.0],
        loss_scale=[4.0, 2.0, 2.0],
        skipped=[True, False, False],
        step_ms=[1.0] * 3,
    )
    return [record(name, memory=memory, series=series) for name in ("fp32", "fp32", "bf16")]


DRAWINGS = {
    "bit_layout": lambda ax: plotting.bit_layout(ax=ax),
    "ranges": lambda ax: plotting.ranges(ax=ax),
    "relative_spacing": lambda ax: plotting.relative_spacing(ax=ax),
    "gradient_histogram": lambda ax: plotting.gradient_histogram(torch.randn(100), 2.0**10, ax),
    "step_times": lambda ax: plotting.step_times(runs(), ax),
    "throughput": lambda ax: plotting.throughput(runs(), ax),
    "peaks": lambda ax: plotting.peaks(runs(), ax),
    "losses": lambda ax: plotting.losses(runs(), ax),
    "loss_scale": lambda ax: plotting.loss_scale(runs()[0], ax),
    "reconcile": lambda ax: plotting.reconcile(
        {"fp16": {"your guess": None, "product": 2.0, "step": 1.5}}, "speed", ax
    ),
    "curves": lambda ax: plotting.curves(
        {"measured": {1: 2.0, 4: None, 8: 1.0}}, "batch", "ms", ax, (1, 4, 8)
    ),
    "rates": lambda ax: plotting.rates({"fp32": {64: 1.0, 128: 2.0}, "bf16": {64: 1.0}}, ax),
    "heat_map": lambda ax: plotting.heat_map(np.eye(2), "ab", "cd", ax),
}


def words(texts) -> list[str]:
    return [text.get_text() for text in texts]


@pytest.mark.parametrize("name", DRAWINGS)
def test_drawing_uses_and_returns_the_given_axis(name):
    figure, ax = plt.subplots()
    assert DRAWINGS[name](ax) is ax
    assert ax.has_data()
    assert ax.get_xlabel() or name == "heat_map"
    assert plt.get_fignums() == [figure.number]
    plt.close("all")


@pytest.mark.parametrize("name", DRAWINGS)
def test_drawing_makes_an_axis_if_none_is_given(name):
    assert DRAWINGS[name](None).has_data()
    plt.close("all")


def test_a_field_without_a_number_stays_empty():
    ax = plotting.heat_map(np.array([[1.0, np.nan], [2.0, 3.0]]), "ab", "cd")
    assert words(ax.texts) == ["1", "2", "3"]
    plt.close("all")


def test_repeated_runs_share_a_bar_and_bars_show_the_numbers():
    ax = plotting.step_times(runs())
    assert words(ax.get_yticklabels()) == ["fp32", "bf16"]
    assert [p.get_width() for p in ax.patches] == [10.0, 10.0]
    plt.close("all")


def test_stacked_memory_sums_to_the_peak():
    ax = plotting.peaks(runs())
    assert max(p.get_x() + p.get_width() for p in ax.patches) == pytest.approx(6.0)
    plt.close("all")


def test_four_panels_has_four():
    assert plotting.four_panels(runs()).shape == (2, 2)
    plt.close("all")


def test_unsupported_runs_are_left_out_of_figures():
    ax = plotting.throughput([*runs(), record("tf32", outcome="unsupported", timing=None)])
    assert "tf32" not in words(ax.get_yticklabels())
    plt.close("all")


@pytest.mark.parametrize("device", ["cpu", "a100"])  # a card has categories of its own
def test_timeline_shows_every_phase_and_marks_the_peak(device):
    ledger = lab.predict_memory(lab.load_config("fp32", model="gpt2-nano", seq_len=32), device)
    ax = plotting.timeline(ledger)
    peak_mib = ledger.peak_bytes / 2**20
    assert {"forward", "backward", f"{peak_mib:,.1f} MiB"} <= set(words(ax.texts))
    highest = 0.0
    for layer in ax.collections:
        for path in layer.get_paths():
            highest = max(highest, path.vertices[:, 1].max())
    assert highest == pytest.approx(peak_mib)
    plt.close("all")


def test_points_that_others_beat_are_not_on_the_front():
    points = {"small": (1.0, 9.0), "fast": (3.0, 2.0), "beaten": (3.5, 2.5), "noise": (3.0, 2.05)}
    assert plotting.pareto_front(points) == ["small", "fast", "noise"]
    assert plotting.pareto_front(points, tolerance=0.0) == ["small", "fast"]
    ax = plotting.pareto(points)
    assert words(ax.get_legend().get_texts()) == [*points, "Pareto front"]
    plt.close("all")


def test_equal_values_of_a_row_stand_on_lines_of_their_own():
    ax = plotting.reconcile({"peak": {"ledger": 2.0, "measured": 2.0}}, "gain")
    heights = {float(line.get_ydata()[0]) for line in ax.get_lines()[:2]}
    assert len(heights) == 2
    plt.close("all")


def test_a_guess_is_marked_only_if_there_is_one():
    ax = plotting.curves({"measured": {1: 2.0}}, "batch", "ms")
    plotting.mark_guess(1, None, ax)
    assert len(ax.get_lines()) == 1
    plotting.mark_guess(1, 3.0, ax)
    assert words(ax.get_legend().get_texts()) == ["measured", "your guess"]
    plt.close("all")


def test_a_block_has_a_column_for_each_tensor():
    ax = plotting.kept_along({"input of norm 1": 1, "input of GELU": 4})
    assert [patch.get_height() for patch in ax.patches] == [1, 4]
    plt.close("all")
