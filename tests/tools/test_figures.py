from __future__ import annotations

import itertools

import matplotlib as mpl
import matplotlib.pyplot as plt
import pytest
from matplotlib.text import Text

import labutils as lab
from labutils.tools import figures
from labutils.tools.cli import main

mpl.use("Agg")
SMALL = {
    "seq_len": 32,
    "micro_batch_size": 2,
    "tokens_per_step": 64,
    "steps": 6,
    "lr_warmup_steps": 1,
}


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LABUTILS_RUNS", str(tmp_path_factory.mktemp("runs")))
        yield lab.run_experiment(lab.load_config("fp32", **SMALL, name="mine"), progress=False)


def test_every_figure_in_every_format_and_nothing_left_open(record, runs):
    before = plt.get_fignums()
    paths = figures.save_figures([record], ("svg", "pdf"))
    drawn = ("step_times", "throughput", "losses", "peaks", "timeline_mine")
    names = itertools.product(drawn, (".svg", ".pdf"))
    assert sorted(path.name for path in paths) == sorted(map("".join, names))
    for path in paths:
        assert path.stat().st_size > 2000 and path.parent.parent == runs
    assert record.environment["device"] in paths[0].with_suffix(".svg").read_text()
    assert plt.get_fignums() == before
    assert figures.save_figures([record])[0].parent != paths[0].parent  # nothing is overwritten


def test_text_on_slides_is_large(record):
    with plt.rc_context({"font.size": figures.STYLES["slides"][0]}):
        for name, ax in figures.draw([record]):
            sizes = [text.get_fontsize() for text in ax.figure.findobj(Text) if text.get_text()]
            assert min(sizes) >= 18, name
            plt.close(ax.figure)


def test_from_the_command_line(record, runs, tmp_path, capsys):
    record.save()
    folder = str(tmp_path / "x")
    command = ["figures", "mine", "--format", "png,svg", "--style", "slides", "--to", folder]
    assert main(command) == 0
    assert (tmp_path / "x" / "losses.svg").exists() and "losses.svg" in capsys.readouterr().out
    (tmp_path / "file").write_text("")
    assert main(["figures", "mine", "--to", str(tmp_path / "file")]) == 1
    assert "a file has that name; choose another" in capsys.readouterr().err
    assert main(["figures", "mine", "--format", "docx"]) == 1
    assert "no such format: docx; there are: " in capsys.readouterr().err
    assert main(["figures", "other"]) == 1
    (tmp_path / "file").write_text("")
    assert main(["figures", "mine", "--to", str(tmp_path / "file")]) == 1
