from __future__ import annotations

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from matplotlib.patches import Rectangle

import labutils as lab
from labutils import plotting
from labutils.memory.ledger import MemoryLedger
from labutils.plotting import runs as panels
from labutils.prediction.roofline import Roof
from labutils.prediction.time import TimeLedger
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
    "relative_spacing": lambda ax: plotting.relative_spacing(ax=ax),
    "gradient_histogram": lambda ax: plotting.gradient_histogram(torch.randn(100), 2.0**10, ax),
    "step_times": lambda ax: panels.step_times(runs(), ax),
    "throughput": lambda ax: panels.throughput(runs(), ax),
    "peaks": lambda ax: panels.peaks(runs(), ax),
    "losses": lambda ax: panels.losses(runs(), ax),
    "reconcile": lambda ax: plotting.reconcile(
        {"fp16": {"your guess": None, "product": 2.0, "step": 1.5}}, "speed", ax
    ),
    "curves": lambda ax: plotting.curves(
        {"measured": {1: 2.0, 4: None, 8: 1.0}}, "batch", "ms", ax, (1, 4, 8)
    ),
    "bands": lambda ax: plotting.bands(
        {"16": {1: [1.0, 3.0], 2: [2.0, 2.5]}}, "tokens", "nats", ax
    ),
    "bars_beside": lambda ax: plotting.bars_beside(
        {"kept": {"block": 2.0, "head": 1.0}, "parameters": {"block": 1.0}},
        {"block": 2.0},
        "predicted",
        "MiB",
        ax,
    ),
    "heat_map": lambda ax: plotting.heat_map(np.eye(2), "ab", "cd", ax),
    "strips": lambda ax: plotting.strips({"odd": [1.0, 2.0, 9.0], "even": [3.0]}, "ms", ax),
    "roofline": lambda ax: plotting.roofline(
        Roof({"float32": 1e12, "float16": 8e12}, 1e11),
        {"fp32": "float32", "fp16": "float16"},
        {"products": [(4.0, 3e11), (100.0, 5e11)]},
        ax,
    ),
}


def test_a_strip_marks_the_median_of_each_row():
    ax = plotting.strips({"odd": [1.0, 2.0, 9.0], "even": [3.0, 5.0]}, "ms")
    medians = [line.get_xdata()[0] for line in ax.lines if line.get_marker() == "|"]
    assert medians == [2.0, 4.0]
    assert words(ax.get_yticklabels()) == ["odd", "even"]
    plt.close("all")


def test_a_roofline_bends_at_the_ridge_and_stays_flat():
    ax = DRAWINGS["roofline"](None)
    roof, _, points = ax.lines
    intensity, rate = roof.get_xdata(), roof.get_ydata()
    assert rate.max() == 1000 and rate[0] == pytest.approx(100 * intensity[0])  # GFLOP/s
    assert (rate[intensity >= 10.0] == 1000).all() and (rate[intensity < 9.9] < 1000).all()
    assert list(points.get_xdata()) == [4.0, 100.0]
    assert list(points.get_ydata()) == [300.0, 500.0]
    plt.close("all")


def test_a_band_is_the_mean_with_the_spread_of_the_seeds():
    ax = plotting.bands({"16": {1: [1.0, 3.0], 2: [2.0, 2.0]}}, "tokens", "nats")
    assert list(ax.lines[0].get_ydata()) == [2.0, 2.0]
    box = ax.collections[0].get_paths()[0].get_extents()
    assert (box.y0, box.y1) == pytest.approx((2 - 2**0.5, 2 + 2**0.5))
    plt.close("all")


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
    ax = panels.step_times(runs())
    assert words(ax.get_yticklabels()) == ["fp32", "bf16"]
    assert [p.get_width() for p in ax.patches] == [10.0, 10.0]
    plt.close("all")


def test_stacked_memory_sums_to_the_peak():
    ax = panels.peaks(runs())
    assert max(p.get_x() + p.get_width() for p in ax.patches) == pytest.approx(6.0)
    plt.close("all")


def test_a_guess_is_a_line_across_the_bars_and_none_is_left_out():
    ax = plotting.stacked_memory({"fp32": PARTS}, marks={"your guess": 2**21, "nobody's": None})
    assert [line.get_xdata()[0] for line in ax.lines] == [2.0]
    assert "your guess" in words(ax.get_legend().get_texts())


def test_four_panels_has_four():
    assert plotting.four_panels(runs()).shape == (2, 2)
    plt.close("all")


def test_unsupported_runs_are_left_out_of_figures():
    ax = panels.throughput([*runs(), record("tf32", outcome="unsupported", timing=None)])
    assert "tf32" not in words(ax.get_yticklabels())
    plt.close("all")


@pytest.mark.parametrize("device", ["cpu", "a100"])  # a card has categories of its own
def test_timeline_shows_every_phase_and_marks_the_peak(device):
    ledger = lab.predict_memory(lab.load_config("fp32", model="gpt2-nano", seq_len=32), device)
    ax = plotting.timeline(ledger)
    peak_mib = ledger.peak_bytes / 2**20
    assert {"forward", "backward", f"{peak_mib:,.2f} MiB"} <= set(words(ax.texts))
    highest = 0.0
    for layer in ax.collections:
        for path in layer.get_paths():
            highest = max(highest, path.vertices[:, 1].max())
    assert highest == pytest.approx(peak_mib)
    plt.close("all")


def ledger(step_ms, band, **shares):
    names = ("matrix products", "attention", "memory-bound operations", "launches")
    return TimeLedger(
        step_ms=step_ms,
        low_ms=step_ms * (1 - band),
        high_ms=step_ms * (1 + band),
        tokens_per_s=1.0,
        shares={name: shares.get(name.split()[0], 0.0) for name in names},
        launch_bound=False,
        phases_ms={},
        operations={},
        method="predicted for a card",
        why_band="",
    )


def test_a_predicted_step_is_drawn_with_its_shares_its_band_and_what_was_published():
    ledgers = {
        "slow": ledger(1000, 0.2, matrix=0.5, launches=0.5),
        "fast": ledger(10, 0.5, matrix=1),
    }
    ax = plotting.predicted_times(ledgers, {"slow": 900, "elsewhere": 1})
    _, right = ax.figure.axes
    shares = [(bar.get_x(), bar.get_width()) for bar in right.patches]
    assert shares == [(0, 50), (50, 0), (50, 0), (50, 50), (0, 100), (100, 0), (100, 0), (100, 0)]
    assert right.get_xscale() == "linear" and ax.get_xscale() == "log"
    named = [text.get_text() for text in right.get_legend().texts]
    assert named == ["matrix products", "launches"]
    bands = [line.get_xdata() for line in ax.lines if line.get_marker() == "None"]
    assert [list(band) for band in bands] == [
        [pytest.approx(800), pytest.approx(1200)],
        [pytest.approx(5), pytest.approx(15)],
    ]
    predicted, points = [line for line in ax.lines if line.get_marker() in "oD"]
    assert list(predicted.get_xdata()) == [1000, 10] and list(predicted.get_ydata()) == [0, 1]
    assert points.get_label() == "published" and list(points.get_xdata()) == [900]
    assert -0.5 < points.get_ydata()[0] < 0  # above its own row, below the row before
    plt.close("all")


def test_predicted_steps_are_drawn_on_a_given_pair_of_axes():
    _, pair = plt.subplots(1, 2)
    assert plotting.predicted_times({"one": ledger(10, 0.5, matrix=1)}, ax=pair) is pair[0]
    plt.close("all")


def test_steps_have_a_tick_for_each_event():
    ax = plotting.steps({"reserved": [1, 2], "allocated": [1, 1]}, ["first", "second"], "MiB")
    assert words(ax.get_xticklabels()) == ["first", "second"]
    assert [list(line.get_ydata()) for line in ax.lines] == [[1, 2], [1, 1]]
    plt.close("all")


def test_a_guess_that_was_not_made_is_not_drawn():
    _, ax = plt.subplots()
    plotting.guess_line(ax, None)
    assert not ax.lines
    plotting.guess_line(ax, 3.0)
    assert ax.lines[0].get_xdata()[0] == 3.0
    plt.close("all")


def test_the_front_joins_the_points_that_it_names():
    points = {"small": (1.0, 1.4), "fast": (3.0, 1.0), "beaten": (3.5, 1.2)}
    ax = plotting.pareto(points, ["fast", "small"])
    assert words(ax.get_legend().get_texts()) == [*points, "Pareto front"]
    assert list(ax.get_lines()[-1].get_xdata()) == [1.0, 3.0]
    plt.close("all")


def test_equal_values_of_a_row_stand_on_lines_of_their_own():
    ax = plotting.reconcile({"peak": {"ledger": 2.0, "measured": 2.0}}, "gain")
    heights = {float(line.get_ydata()[0]) for line in ax.get_lines()[:2]}
    assert len(heights) == 2
    plt.close("all")


def test_a_block_is_drawn_with_a_square_for_each_number_kept():
    kept = dict.fromkeys("abcdef", 1) | {"input of GELU": 4, "output of GELU": 4}
    ax = plotting.kept_in_block(kept)
    squares = [patch for patch in ax.patches if isinstance(patch, Rectangle)]
    assert len(squares) == sum(kept.values())
    assert len({square.get_facecolor() for square in squares[1:]}) == 1
    assert squares[0].get_facecolor() != squares[1].get_facecolor()
    assert {"4: input\nof GELU", "GELU", "attention", "+"} <= set(words(ax.texts))
    with pytest.raises(ValueError, match="not 2"):
        plotting.kept_in_block({"a": 1, "b": 1})
    plt.close("all")


def test_numbers_of_a_reconciliation_hide_the_line_behind_them():
    ax = plotting.reconcile({"peak": {"predicted": 0.9, "measured": 1.0}}, "gain")
    assert [text.get_bbox_patch().get_facecolor() for text in ax.texts] == [(1, 1, 1, 1)] * 2
    plt.close("all")
