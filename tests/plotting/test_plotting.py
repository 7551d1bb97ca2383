"""Figures: what is drawn is the numbers that were given, on the axis that was given."""

import os
from itertools import pairwise
from types import SimpleNamespace

import matplotlib.pyplot as plt
import nbformat
import pandas as pd
import pytest
from nbclient import NotebookClient

import labutils as lab
from labutils import plotting
from labutils.memory.ledger import MIB
from labutils.plotting.blocks import layout

TRACE = [
    {"action": action, "addr": address, "size": size}
    for action, address, size in (
        ("segment_alloc", 1000, 20),
        ("alloc", 1000, 5),
        ("segment_alloc", 100, 10),
        ("alloc", 103, 4),
        ("free_requested", 1000, 5),
        ("free_completed", 1000, 5),
        ("free_completed", 7, 5),  # from before the recording
        ("alloc", 7, 5),  # the same, in a segment below those recorded, and between them
        ("alloc", 500, 5),
    )
]


def who(event):
    return f"{event['size']} bytes"


DRAWN = {  # a function: its arguments before the axis
    "curves": ({"it": {1: 2.0, 4: None}}, "batch", "ms"),
    "bands": ({"16": {1: [1.0, 3.0], 2: [2.0, 2.0]}}, "x", "y"),
    "stacked_memory": ({"fp32": {"parameters": MIB, "gradients": 0, "optimizer state": 2 * MIB}},),
    "blocks": ({"before": [[(MIB, True), (MIB, False)]], "after": [[(2 * MIB, False)]]},),
    "block_history": (TRACE, who),
}


@pytest.fixture(autouse=True)
def _closed():
    yield
    plt.close("all")


def drawn(name, **options):
    return getattr(plotting, name)(*DRAWN[name], **options)


def words(texts) -> list[str]:
    return [text.get_text() for text in texts]


@pytest.mark.parametrize("name", DRAWN)
def test_drawing_uses_the_given_axis_or_makes_one(name):
    _, ax = plt.subplots()
    assert drawn(name, ax=ax) is ax and ax.has_data()
    assert len(plt.get_fignums()) == 1
    assert drawn(name) is not ax


def test_no_name_stands_where_a_mark_crosses_it():
    bars = {"a step": {"parameters": 100 * MIB, "activations": 100 * MIB}}
    texts = plotting.stacked_memory(bars, marks={"card": 50 * MIB}).texts
    assert {25, 150} < {text.get_position()[0] for text in texts}  # both beside the mark


def test_a_band_is_the_mean_with_the_spread_of_the_seeds():
    ax = drawn("bands")
    assert list(ax.lines[0].get_ydata()) == [2.0, 2.0]
    box = ax.collections[0].get_paths()[0].get_extents()
    assert (box.y0, box.y1) == pytest.approx((2 - 2**0.5, 2 + 2**0.5))


def test_stacked_memory_sums_to_the_peak_and_a_guess_is_a_line_across():
    ax = drawn("stacked_memory", marks={"your guess": 2 * MIB, "nobody's": None})
    assert [(bar.get_x(), bar.get_width()) for bar in ax.patches] == [(0, 1), (1, 2)]
    assert [line.get_xdata()[0] for line in ax.lines] == [2.0]


def run(name: str, ms: float | None) -> SimpleNamespace:
    return SimpleNamespace(
        name=name,
        tokens_per_step=10,
        environment={"device": "a CPU"},
        timing=ms and SimpleNamespace(median_step_ms=ms, tokens_per_s=1e4 / ms),
        memory=SimpleNamespace(categories={"parameters": MIB}),
        series=SimpleNamespace(loss=[3.0, 2.0]),
    )


def test_speed_and_memory_stand_beside_the_claim_without_what_did_not_train():
    runs = [run("fp32", 20.0), run("bf16", 5.0), run("tf32", None)]
    columns = ["card", "precision", "measured", "predicted", "published"]
    rows = [("H100", "fp32", 8.0, None, None), ("H100", "tf32", 4.0, None, None)]
    rows += [("T4", "fp32", None, 4.0, 3.0), ("T4", "fp16", None, 2.0, 1.0)]
    speeds, peaks = plotting.speed_and_memory(runs, pd.DataFrame(rows, columns=columns))
    assert words(peaks.get_yticklabels()) == ["fp32", "bf16"]
    claim, *bars = speeds.patches
    assert (claim.get_x(), claim.get_width()) == (2, 1)
    assert [1 + bar.get_width() for bar in bars] == [4, 2, 2]
    are_pale = [min(bar.get_facecolor()) > 0.8 for bar in bars]
    assert are_pale == [False, False, True]  # the T4 is predicted
    mark, one = speeds.lines
    assert list(mark.get_xdata()) == [3, 3] and list(one.get_xdata()) == [1, 1]
    headlines = {"This machine: measured", "H100: measured", "T4: predicted, published (black)"}
    assert headlines <= {*words(speeds.texts)}
    assert peaks.lines[0].get_xdata()[0] == 0.5  # half of what the first takes


def test_losses_are_drawn_against_tokens():
    slow, fast = run("fp32", 20.0), run("bf16", 5.0)
    fast.series.loss = [x + 1 for x in slow.series.loss] + [3.0]  # a step more
    above, below = plotting.losses([slow, fast])
    assert [list(line.get_xdata()) for line in above.lines] == [[10, 20], [10, 20, 30]]
    assert [list(line.get_ydata()) for line in below.lines] == [[0, 0], [1, 1]]
    assert below.get_ylabel() == "nats above fp32"


def test_timeline_shows_every_phase_and_marks_the_peak():
    ledger = lab.predict_memory(lab.load_config("fp32"), "cpu")
    ax = plotting.timeline(ledger)
    said = {*words(ax.texts), *words(ax.get_legend().get_texts())}  # a name is here or there
    assert {"forward", "backward", "gradients", f"{ledger.peak_mib:,.1f} MiB"} <= said
    tops = [layer.get_paths()[0].vertices[:, 1].max() for layer in ax.collections]
    assert max(tops) == pytest.approx(ledger.peak_mib)
    names = [text.get_window_extent() for text in ax.texts if text.get_text() in ledger.categories]
    lines = [line.get_window_extent().x0 for line in ax.lines[1:]]  # where a phase begins
    assert names and not any(box.x0 < x < box.x1 for box in names for x in lines)


def test_a_block_lies_in_its_segment_from_its_allocation_to_its_end():
    boxes, segments = layout(TRACE, who)
    assert segments == [[0, 9, 0, 20], [2, 9, 20, 10]]
    assert boxes == {"5 bytes": [[1, 5, 0, 5]], "4 bytes": [[3, 9, 23, 4]]}


def test_names_at_the_ends_of_lines_do_not_cover_each_other():
    lines = {name: {1: 1.0, 2: 2 + i / 100} for i, name in enumerate("abcd")}
    ax = plotting.curves(lines, "x", "y")
    ax.set_ylim(0, 10)  # set later, as cells do
    ax.figure.draw_without_rendering()
    names = {t.get_text(): t.get_window_extent() for t in ax.texts if t.get_text() in "abcd"}
    assert sorted(names, key=lambda name: names[name].y0) == list("abcd")
    assert all(low.y1 <= high.y0 for low, high in pairwise(names[name] for name in "abcd"))
    assert names["a"].y0 < ax.transData.transform((2, 2))[1] < names["d"].y1
    few, many = ({"predicted": dict.fromkeys(range(n), 1.0)} for n in (3, 9))
    markers = [plotting.curves(lines, "x", "y").lines[0].get_marker() for lines in (few, many)]
    assert markers == ["o", ""]  # few points are points


def test_groups_have_a_headline_and_a_category_without_room_is_in_the_key():
    parts = {"parameters": 90 * MIB, "gradients": MIB, "temporaries": MIB / 1000}
    labels = "none: forward", "none: loss", "block: loss"
    ax = plotting.stacked_memory(dict.fromkeys(labels, parts))
    assert words(ax.get_yticklabels()) == ["forward", "loss", "loss"]
    assert {"none", "block", "parameters"} <= set(words(ax.texts))
    assert words(ax.get_legend().get_texts()) == ["gradients"]
    alone = plotting.stacked_memory({"all": {"parameters": MIB}})
    assert alone.get_legend() is None and "parameters" in words(alone.texts)


def test_a_figure_in_jupyter_says_what_it_shows(tmp_path):
    code = """import labutils as lab
from matplotlib import pyplot as plt
for _ in range(2):
    lab.setup()
lab.plotting.curves({"a": {1: 2.0}}, "batch", "ms").set_title("It grows")
plt.show()"""
    path = tmp_path / "figure.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)]), path)
    client = NotebookClient(nbformat.read(path, 4), kernel_name="python3")
    inline = {"MPLBACKEND": "module://matplotlib_inline.backend_inline"}
    [cell] = client.execute(env=os.environ | inline).cells
    [figure] = [o for o in cell.outputs if "image/png" in o.get("data", {})]
    said = figure.metadata["image/png"]["alt"]
    assert said == "It grows. From left to right: batch. Upwards: ms"
