"""The command line as a learner meets it: words, exit codes, tables that fit, the Tab key."""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import subprocess
import sys

import pandas as pd
import pytest
import torch

from labutils import cli
from labutils.cli import main
from labutils.config import reader
from labutils.config.edits import edits_without_effect
from labutils.files import REFERENCE_DIR
from labutils.training.records import RunRecord, load_record
from tests.helpers import REPO, committed

DEVICE = "AMD EPYC of a long name (1 threads, AVX512)"
SIZES = {"steps": 3, "seq_len": 16, "micro_batch_size": 2, "tokens_per_step": 32}
TINY = [f"--set={key}={value}" for key, value in SIZES.items()]
TINY += ["--set=lr_warmup_steps=0", "--set=name=fp32"]


def record(name: str, number: int, **facts) -> None:
    environment = {"device": facts.pop("device", DEVICE)}
    run_id = f"20261122-{number:012d}-0000"
    values = {"id": run_id, "created": "", "name": name, "environment": environment}
    RunRecord(**values, series={"loss": [7.0, 6.0]}, note="a note of words " * 3, **facts).save()


def test_run_then_runs_then_compare(runs, capsys):
    assert main(["run", "fp32", *TINY]) == 0
    assert re.search(r"tokens/s, MFU [\d.]+ % of [\d.]+ TFLOP/s, ", capsys.readouterr().out)
    assert json.loads(next(runs.glob("fp32-*.json")).read_text())["config"]["steps"] == 3
    assert main(["run", "fp32", *TINY, "--set=name=other", "--set=learning_rate=1e-3"]) == 0
    capsys.readouterr()
    assert main(["runs"]) == 0
    listed = capsys.readouterr().out
    assert all(word in listed for word in ("fp32-", "other-", "completed", "tokens/s", "peak MiB"))
    assert main(["compare", "fp32", "other"]) == 0
    table = capsys.readouterr().out
    assert "learning rate" in table and "speedup" in table and "weight decay" not in table
    assert table.count(" MFU ") == 2
    assert main(["compare", "fp32", "other", "--csv"]) == 0
    header, *rows = capsys.readouterr().out.splitlines()
    assert header == (
        "run,learning_rate,step_ms,speedup,tokens_per_s,peak_mib,saving_percent,loss,verdict"
    )
    assert len(rows) == 2


def test_repeats_share_a_row_and_runs_of_one_experiment_have_their_ids(runs, capsys):
    assert main(["run", "fp32", *TINY, "--repeat", "2"]) == 0
    assert main(["run", "fp32", *TINY, "--set=name=other"]) == 0
    ids = [path.stem.removeprefix("fp32-") for path in runs.glob("fp32-*.json")]
    capsys.readouterr()
    assert main(["compare", "fp32", "other"]) == 0
    assert "repeat within" in capsys.readouterr().out
    assert main(["compare", *ids]) == 0
    table = capsys.readouterr().out
    assert len(ids) == 2 and all(f"fp32-{run_id}" in table for run_id in ids)


def test_a_command_that_cannot_be_done_exits_with_1_and_says_what_to_do(runs, capsys):
    record("mine+steps=6", 1)
    for arguments, says in {
        ("compare", "nothing"): "no run 'nothing'",
        ("compare", "mine"): "Did you mean `mine+steps=6`?",
        ("run", "bf61"): "bf61: no such file. Did you mean `bf16`?",
        ("check", "qqqqqq"): "There are: accumulation, bf16, ",
        ("run", "fp32", "--set=steps=0"): "`steps`",
        ("run", "fp32", *TINY, "--set=corpus=nowhere.txt"): "no such file",
        ("predict", "tf32", "--device", "t4"): "use fp16",
    }.items():
        assert main(arguments) == 1
        assert says in capsys.readouterr().err


def test_wrong_usage_exits_with_2(capsys):
    for arguments, says in {
        ("nonsense",): "nonsense",
        ("run",): "CONFIG",
        ("run", "fp32", "steps=2"): "steps=2",
        ("run", "fp32", "--repeat", "0"): "--repeat",
        ("predict", "fp32", "--gpu-memory-gib", "nan"): "--gpu-memory-gib",
        ("predict", "fp32", "--gpu-memory-gib", "8GB"): "--gpu-memory-gib",
        ("predict", "fp32", "--device", "t44"): "rtx5090",
        ("grade", ".", "--jobs", "0"): "--jobs",
    }.items():
        assert main(arguments) == 2
        assert says in capsys.readouterr().err.replace("'config'", "CONFIG")


def test_no_command_lists_all_with_a_line_each(capsys):
    assert main([]) == main(["--help"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line[:5] != "Usage"]
    for name in ("run", "runs", "compare", "predict", "check", "doctor", "labs", "grade"):
        assert sum(line.split()[:1] == [name] and len(line.split()) > 3 for line in lines) == 2
    assert max(map(len, lines)) <= 80 and not any(line.endswith("...") for line in lines)


@pytest.mark.parametrize("arguments", [["--help"], ["check", "bf16"], ["predict", "--help"]])
def test_what_needs_no_torch_answers_at_once(arguments):
    code = (
        "import sys, time; from labutils.cli import main; code = main(sys.argv[1:])\n"
        "heavy = {'torch', 'numpy', 'pandas', 'matplotlib', 'transformers', 'rich'}\n"
        "print(code, heavy & sys.modules.keys(), time.process_time(), sep=';', file=sys.stderr)"
    )
    command = [sys.executable, "-c", code, *arguments]
    seconds = []
    for _ in range(3):  # the least busy one counts
        answer = subprocess.run(command, cwd=REPO, capture_output=True, text=True)
        exit_code, imported, used = answer.stderr.split(";")
        assert (exit_code, imported) == ("0", "set()")
        seconds.append(float(used))
    assert min(seconds) < 0.5  # of the processor


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


def test_check_names_every_mistake_once(tmp_path, edited, capsys):
    bad, few = tmp_path / "bad.yaml", tmp_path / "few.yaml"
    bad.write_text("steps: x\n")
    few.write_text("name: few\nseed: 0\n")
    assert main(["check", "fp32", str(bad)]) == 1
    captured = capsys.readouterr()
    assert "fp32: ok" in captured.out and f"{bad}:1:8: `steps`" in captured.err
    assert main(["check", str(few)]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert "keys are missing, such as" in line and "copy that file and edit it" in line
    assert main(["check", str(edited(("\nsteps: 60 ", "\nstpes: 60 ")))]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert "Did you mean `steps`?" in line


def test_an_edit_that_when_cpu_overrides_is_named_with_both_lines(edited, capsys):
    path = edited(("\nsteps: 60 ", "\nsteps: 40 "))
    assert main(["check", str(path)]) == 0
    lines = path.read_text(encoding="utf-8").splitlines()
    mine = next(k for k, line in enumerate(lines, 1) if line.startswith("steps:"))
    theirs = next(k for k, line in enumerate(lines, 1) if line.startswith("  steps:"))
    [line] = capsys.readouterr().err.splitlines()
    assert f":{mine}: `steps: 40` is not used on a CPU" in line
    assert f"sets 60 in line {theirs}." in line
    both = ("\nsteps: 60 ", "\nsteps: 40 "), ("\n  steps: 60", "\n  steps: 40")
    assert edits_without_effect(edited(*both)) == []
    for shipped in reader.CONFIGS_DIR.glob("*_config.yaml"):
        assert edits_without_effect(shipped) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU does not use when_cpu")
def test_a_run_says_so_too(edited, runs, capsys):
    path = edited(("\nlearning_rate: 6e-4 ", "\nlearning_rate: 3e-4 "))
    main(["run", str(path), *TINY, "--set=precision=fp32"])
    assert "`learning_rate: 0.0003` is not used on a CPU" in capsys.readouterr().out


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


def test_a_table_loses_spare_columns_first_and_then_breaks_long_texts(capsys, monkeypatch):
    table = pd.DataFrame({"n": ["1,000", "–"], "note": ["[x]" * 10] * 2, "why": ["a b " * 15, ""]})
    table.index = pd.Index(["first", "second"], name="run")
    for columns, n_lines in ((1000, 3), (50, 5)):
        monkeypatch.setenv("COLUMNS", str(columns))
        cli._print_table(table)
        text = capsys.readouterr().out
        assert text.count("a b") == 15  # nothing is cut off
        assert ("[x]" in text) == (columns == 1000)
        assert len(text.splitlines()) >= n_lines and max(map(len, text.splitlines())) <= columns
    assert text.endswith("not shown in 50 columns: note\n")


def test_runs_are_limited_and_filtered(runs, capsys):
    for k in range(25):
        record("one" if k else "other", k)
    for arguments, n_rows, says in (
        (["runs"], 20, "5 older runs: --limit 0"),
        (["runs", "--limit", "0"], 25, ""),
        (["runs", "the", "--limit", "3"], 1, ""),
        (["runs", "nothing"], 0, "There are: other, one"),
    ):
        assert main(arguments) == 0
        listed = capsys.readouterr().out
        assert listed.count("-20261122-") == n_rows and says in listed


def test_predict_has_these_facts(capsys):
    assert main(["predict", "fp32", "--device", "cpu", "--gpu-memory-gib", "0.05", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert set(facts) == {
        *("peak_bytes", "peak_phase", "categories", "phases", "method", "device", "note"),
        *("fits", "needed_gib", "budget_gib", "reserved_bytes", "reserved_expandable_bytes"),
        *("needed_bytes", "needed_expandable_bytes", "step_ms", "low_ms", "high_ms", "shares"),
        *("tokens_per_s", "launch_bound", "phases_ms", "operations", "fit"),
    }
    assert facts["fits"] is False
    assert set(facts["fit"]) == {
        *("fits", "changes", "costs", "step_ms", "time_cost", "needed_gib"),
    }


def test_doctor_describes_this_machine_and_times_every_notebook(capsys):
    assert main(["doctor"]) in (0, 1)
    printed = capsys.readouterr().out
    assert all(word in printed for word in ("device", "torch", "fp16", "bf16", "tf32", "runs"))
    core = sorted(path.stem for path in REPO.glob("0*.ipynb"))
    optional = sorted(path.stem for path in (REPO / "further").glob("*.ipynb"))
    with (REFERENCE_DIR / "notebook_seconds.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["notebook"] for row in rows] == [*core, *optional]
    found = re.findall(r"^\| (\S+) \| (\d+) \|$", committed("INSTRUCTORS.md"), re.M)
    assert found == [(row["notebook"], row["seconds"]) for row in rows[: len(core)]]
    if not torch.cuda.is_available():
        assert all(re.search(rf"{row['notebook']} \d", printed) for row in rows)


@pytest.mark.skipif(os.name == "nt", reason="bash")
@pytest.mark.parametrize(
    ("typed", "offered"),
    [("labutils doc", "doctor"), ("labutils run bf", "bf16"), ("labutils compare min", "mine")],
)
def test_the_tab_key_completes_commands_configs_and_runs(runs, typed, offered):
    record("mine", 1)
    environment = os.environ | {
        "_LABUTILS_COMPLETE": "complete_bash",
        "COMP_WORDS": typed,
        "COMP_CWORD": str(len(typed.split()) - 1),
    }
    code = "import sys; sys.argv[0] = 'labutils'; from labutils.cli import main; main()"
    command = [sys.executable, "-c", code]
    answer = subprocess.run(command, cwd=REPO, env=environment, capture_output=True, text=True)
    assert offered in answer.stdout.split()


@pytest.mark.skipif(os.name == "nt", reason="POSIX signals")
@pytest.mark.parametrize("stop", ["SIGINT", "SIGTERM"])
def test_a_stop_ends_with_130_a_record_and_the_state_of_its_last_step(runs, stop):
    sizes = [*TINY, "--set=steps=3000", "--set=save_every=1000000"]
    process = subprocess.Popen(
        [sys.executable, "-m", "labutils", "run", "fp32", *sizes],
        cwd=REPO,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # a background shell may have ignored it
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    printed = ""
    while "loss " not in printed:  # the progress bar after some steps
        printed += (character := process.stdout.read(1))
        assert character, process.stderr.read()
    process.send_signal(signal.Signals[stop])
    rest, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in errors
    done = len(load_record("fp32").series.loss)
    (state,) = runs.glob("*.state")
    assert torch.load(state, weights_only=True)["done"] == done > 0
    assert load_record("fp32").outcome == "interrupted"
    assert f"the state after step {done} is saved; the same command with --resume" in rest


def test_output_into_a_closed_pipe_is_no_error(runs):
    command = f"{sys.executable} -m labutils doctor | head -1"
    answer = subprocess.run(["bash", "-c", command], cwd=REPO, capture_output=True, text=True)
    assert answer.stdout.startswith("device")
    assert answer.stderr == ""


def test_runs_folder_that_is_a_file_is_a_clear_error(tmp_path, monkeypatch, capsys):
    blocked = tmp_path / "blocked"
    blocked.write_text("")
    monkeypatch.setenv("LABUTILS_RUNS", str(blocked))
    for command in (["run", "fp32", *TINY], ["doctor"], ["runs"]):
        assert main(command) == 1
        error = capsys.readouterr().err
        assert str(blocked) in error and "LABUTILS_RUNS names" in error
