"""The command line as a learner meets it: hints, tables that fit, the Tab key, an orderly stop."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pandas as pd
import pytest
import torch

from labutils.config import reader
from labutils.config.edits import edits_without_effect
from labutils.tools.cli import main
from labutils.tools.tables import fitted
from labutils.training.records import RunRecord, load_record
from labutils.training.saved_state import read_header
from tests.helpers import REPO
from tests.tools.test_cli import TINY

DEVICE = "AMD EPYC of a long name (1 threads, AVX512)"


def record(name: str, number: int, **facts) -> None:
    environment = {"device": facts.pop("device", DEVICE)}
    run_id = f"20261122-{number:012d}-0000"
    values = {"id": run_id, "created": "", "name": name, "environment": environment}
    RunRecord(**values, series={"loss": [7.0, 6.0]}, note="a note of words " * 3, **facts).save()


@pytest.fixture
def edited(tmp_path):
    """Return a function that gives the path of an edited copy of the shipped bf16 config."""

    def edit(*changes: tuple[str, str]):
        text = (reader.CONFIGS_DIR / "bf16_config.yaml").read_text(encoding="utf-8")
        for before, after in changes:
            assert before in text
            text = text.replace(before, after, 1)
        path = tmp_path / "mine.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return edit


def test_an_edit_that_when_cpu_overrides_is_named_with_both_lines(edited, capsys):
    path = edited(("\nsteps: 60 ", "\nsteps: 40 "))
    assert main(["check", str(path)]) == 0
    lines = path.read_text(encoding="utf-8").splitlines()
    mine = next(k for k, line in enumerate(lines, 1) if line.startswith("steps:"))
    theirs = next(k for k, line in enumerate(lines, 1) if line.startswith("  steps:"))
    said = capsys.readouterr().err
    assert f":{mine}: `steps: 40` is not used on a CPU" in said
    assert f"sets 60 in line {theirs}." in said and len(said.splitlines()) == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU does not use when_cpu")
def test_a_run_says_so_too(edited, runs, capsys):
    path = edited(("\nlearning_rate: 6e-4 ", "\nlearning_rate: 3e-4 "))
    main(["run", str(path), *TINY, "--set", "precision=fp32"])
    assert "`learning_rate: 0.0003` is not used on a CPU" in capsys.readouterr().out


def test_edits_that_count_and_shipped_files_are_not_named(edited):
    both = ("\nsteps: 60 ", "\nsteps: 40 "), ("\n  steps: 60", "\n  steps: 40")
    assert edits_without_effect(edited(*both)) == []
    for path in reader.CONFIGS_DIR.glob("*_config.yaml"):
        assert edits_without_effect(path) == []


@pytest.mark.parametrize("command", [["run", "bf61"], ["new", "m", "--from", "bf61"]])
def test_a_mistyped_short_name_gets_a_suggestion(command, capsys):
    assert main(command) == 1
    assert "bf61: no such file. Did you mean `bf16`?" in capsys.readouterr().err


def test_a_name_like_no_other_gets_the_list(capsys):
    assert main(["check", "qqqqqq"]) == 1
    assert "There are: accumulation, bf16, " in capsys.readouterr().err


def test_a_mistyped_run_gets_a_suggestion(runs, capsys):
    record("mine+steps=6", 1)
    record("baseline", 2)
    assert main(["compare", "mine"]) == 1
    assert "Did you mean `mine+steps=6`?" in capsys.readouterr().err
    assert main(["compare", "basline"]) == 1
    assert "Did you mean `baseline`?" in capsys.readouterr().err


def test_many_missing_keys_are_one_line_and_a_typo_is_reported_once(tmp_path, edited, capsys):
    few = tmp_path / "few.yaml"
    few.write_text("name: few\nseed: 0\n")
    assert main(["check", str(few)]) == 1
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1 and "keys are missing, such as" in said[0]
    assert main(["check", str(edited(("\nsteps: 60 ", "\nstpes: 60 ")))]) == 1
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1 and "Did you mean `steps`?" in said[0]


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_runs_fit_the_terminal(runs, capsys, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    for k in range(3):
        record("checkpoint_every_2", k)
    assert main(["runs"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= columns
    assert lines[0] == f"device: {DEVICE}"  # once, not in each row
    assert sum("checkpoint_every_2-" in line for line in lines) == 3


def test_runs_are_limited_and_filtered(runs, capsys):
    for k in range(25):
        record("one" if k else "other", k)
    assert main(["runs"]) == 0
    out = capsys.readouterr().out
    assert out.count("one-2026") == 20 and "5 older runs: --limit 0" in out
    assert main(["runs", "--limit", "0"]) == 0
    assert capsys.readouterr().out.count("-20261122-") == 25
    assert main(["runs", "the", "--limit", "3"]) == 0
    assert capsys.readouterr().out.count("-20261122-") == 1
    assert main(["runs", "nothing"]) == 0
    assert "There are: other, one" in capsys.readouterr().out


def test_a_table_loses_spare_columns_first_and_then_breaks_long_texts():
    table = pd.DataFrame({"n": ["1,000", "–"], "note": ["x" * 30] * 2, "why": ["a b " * 15, ""]})
    table.index = pd.Index(["first", "second"], name="run")
    assert len(fitted(table, 1000).splitlines()) == 3
    text = fitted(table, 50, spare=["note"])
    assert max(map(len, text.splitlines())) <= 50 and "x" not in text
    assert text.endswith("not shown in 50 columns: note")
    assert text.count("a b") == 15  # nothing is cut off
    assert "first   1,000  a b" in text and "second      –" in text
    both = fitted(table, 101, spare=["n", "note"])
    assert both.endswith("not shown in 101 columns: n")  # the first is enough


def test_a_long_name_is_broken_after_an_underscore_and_keeps_it():
    table = pd.DataFrame({"run": ["gradient_checkpointing_every_2"]}, index=[1])
    lines = [line.removeprefix("1").strip() for line in fitted(table, 20).splitlines()[1:]]
    assert lines == ["gradient_", "checkpointing_", "every_2"]


def test_a_change_without_its_flag_gets_the_hint(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["run", "fp32", "steps=2"])
    said = capsys.readouterr().err
    assert "unrecognized arguments: steps=2; --set KEY=VALUE changes a key" in said
    with pytest.raises(SystemExit, match="2"):
        main(["run", "fp32", "--quickly"])
    assert "--set" not in capsys.readouterr().err.splitlines()[-1]


def test_no_command_lists_all_with_a_line_each(capsys):
    assert main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    for name in ("run", "runs", "compare", "predict", "check", "doctor", "labs", "grade"):
        assert any(line.split()[:1] == [name] and len(line.split()) > 3 for line in lines), name


@pytest.mark.skipif(os.name == "nt", reason="bash")
@pytest.mark.parametrize(
    ("typed", "offered"),
    [("labutils doc", "doctor"), ("labutils run bf", "bf16"), ("labutils compare min", "mine")],
)
def test_the_tab_key_completes_commands_configs_and_runs(runs, typed, offered):
    pytest.importorskip("argcomplete")
    record("mine", 1)
    code = "import sys; sys.argv[0] = 'labutils'; from labutils.tools.cli import main; main()"
    environment = os.environ | {
        "_ARGCOMPLETE": "1",
        "_ARGCOMPLETE_STDOUT_FILENAME": str(runs / "offered"),
        "_ARGCOMPLETE_IFS": "\n",
        "COMP_LINE": typed,
        "COMP_POINT": str(len(typed)),
    }
    subprocess.run([sys.executable, "-c", code], cwd=REPO, env=environment, check=True)
    assert offered in (runs / "offered").read_text().split()


@pytest.mark.skipif(os.name == "nt", reason="POSIX signals")
def test_a_stop_keeps_the_state_of_the_last_step(runs):
    sizes = [*TINY, "--set", "steps=3000", "--set", "save_every=1000000"]
    process = subprocess.Popen(
        [sys.executable, "-m", "labutils", "run", "fp32", *sizes],
        cwd=REPO,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    printed = ""
    while "loss " not in printed:
        printed += (character := process.stdout.read(1))
        assert character
    process.send_signal(signal.SIGINT)
    rest, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and "stops after this step" in errors
    (state,) = runs.glob("*.state")
    done = len(load_record("fp32").series.loss)
    assert read_header(state).step == done > 0
    assert f"the state after step {done} is saved; continue with: " in rest
