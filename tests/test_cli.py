"""The command line as a learner meets it: words, exit codes, tables."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys

import pytest
import torch

from labutils.config.card import CARDS
from labutils.course import cli
from labutils.course.cli import main
from labutils.course.labs import core_notebooks
from labutils.memory.ledger import at_least
from labutils.training.record import RunRecord, load_record
from tests.helpers import REPO, TINY

SMALL = [f"--set={key}={value}" for key, value in TINY.items()] + ["--set=name=fp32"]


def record(name: str, number: int) -> None:
    run_id = f"20261122-{number:012d}-0000"
    RunRecord(id=run_id, created="", name=name, environment={"device": "a CPU"}).save()


def test_run_then_runs_then_compare(runs, capsys):
    assert main(["run", "fp32", *SMALL]) == 0
    assert re.search(r"tokens/s, MFU [\d.]+ % of [\d.]+ TFLOP/s, ", capsys.readouterr().out)
    assert main(["run", "fp32", *SMALL, "--set=name=other", "--set=learning_rate=1e-3"]) == 0
    assert load_record("other").config["learning_rate"] == 1e-3
    capsys.readouterr()
    assert main(["runs"]) == 0
    listed = capsys.readouterr().out
    assert all(word in listed for word in ("fp32-", "other-", "completed", "tokens/s", "peak MiB"))
    assert main(["compare", "fp32", "other"]) == 0
    table = capsys.readouterr().out
    assert "learning rate" in table and "weight decay" not in table and table.count(" MFU ") == 2
    assert main(["compare", "fp32", "other", "--csv"]) == 0
    header, *rows = capsys.readouterr().out.splitlines()
    assert header == (
        "run,learning_rate,step_ms,speedup,tokens_per_s,peak_mib,saving_percent,loss,outcome"
    )
    assert len(rows) == 2


def test_a_command_that_cannot_be_done_exits_with_1_and_says_what_to_do(runs, capsys):
    record("mine+steps=6", 1)
    for arguments, says in {
        ("compare", "nothing"): "no run 'nothing'",
        ("compare", "mine"): "Did you mean `mine+steps=6`?",
        ("run", "bf61"): "no such file or directory; name one YAML file. Did you mean `bf16`?",
        ("check", "qqqqqq"): "There are: accumulation, bf16, ",
        ("run", "fp32", "--set=steps=0"): "`steps`",
        ("run", "fp32", *SMALL, "--set=corpus=nowhere.txt"): "no such text file",
        ("predict", "tf32", "--device", "t4"): "use fp16",
        ("advise", "fp31"): "Did you mean `fp32`?",
    }.items():
        assert main(arguments) == 1
        assert says in capsys.readouterr().err


def test_wrong_usage_exits_with_2(capsys):
    for arguments, says in {
        ("nonsense",): "nonsense",
        ("run",): "CONFIG",
        ("run", "fp32", "steps=2"): "steps=2",
        ("predict", "fp32", "--gpu-memory-gib", "nan"): "--gpu-memory-gib",
        ("predict", "fp32", "--gpu-memory-gib", "8GB"): "--gpu-memory-gib",
        ("predict", "fp32", "--device", "t44"): "Nearest in name: t4, ",
        ("predict", "fp32", "--device", ""): "no card is named ''",
        ("grade", ".", "--timeout", "0"): "--timeout",
        ("labs", "--in-place", "--student", "copies"): "excludes the other options",
    }.items():
        assert main(arguments) == 2
        assert says in capsys.readouterr().err.replace("'config'", "CONFIG")


def test_pairs_may_follow_one_set_or_each_its_own(monkeypatch):
    seen = []
    monkeypatch.setattr(cli, "app", seen.append)
    cli.main(["predict", "fp32", "--set", "steps=4", "seed=1", "--json"])
    cli.main(["predict", "fp32", "--set", "steps=4", "--set", "seed=1", "--json"])
    assert seen == 2 * [["predict", "fp32", "--set", "steps=4", "--set", "seed=1", "--json"]]


@pytest.mark.parametrize("arguments", [["--help"], ["check", "bf16"], ["predict", "--help"]])
def test_what_needs_no_torch_imports_none(arguments):
    code = (
        "import sys; from labutils.course.cli import main; code = main(sys.argv[1:])\n"
        "heavy = {'torch', 'numpy', 'pandas', 'matplotlib', 'transformers', 'rich'}\n"
        "print(code, heavy & sys.modules.keys(), file=sys.stderr)"
    )
    command = [sys.executable, "-c", code, *arguments]
    answer = subprocess.run(command, cwd=REPO, capture_output=True, text=True)
    assert answer.stderr == "0 set()\n"


def test_check_says_what_is_right_and_what_is_not(tmp_path, capsys):
    bad = tmp_path / "bad.yaml"
    bad.write_text("steps: x\n")
    assert main(["check", "fp32", str(bad)]) == 1
    printed, errors = capsys.readouterr()
    assert printed == "fp32: ok\n" and f"{bad}:1: `steps`" in errors
    assert "missing: `name`, `note`, `seed`, " in errors and "see fp32_config.yaml" in errors


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


def started(*arguments: str) -> subprocess.Popen:
    """Start a command in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "labutils", *arguments],
        cwd=REPO,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # a background shell may have ignored it
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


@pytest.mark.skipif(os.name == "nt", reason="POSIX signals")
def test_ctrl_c_ends_with_130_and_a_record(runs):
    process = started("run", "fp32", *SMALL, "--set=steps=3000")
    printed = ""
    while "loss " not in printed:  # the progress bar after some steps
        printed += (character := process.stdout.read(1))
        assert character, process.stderr.read()
    process.send_signal(signal.SIGINT)
    rest, errors = process.communicate(timeout=600)
    assert process.returncode == 130 and "Traceback" not in errors
    record = load_record("fp32")
    done = len(record.series.loss)
    assert record.outcome == "interrupted" and done > 0
    assert f"interrupted: after {done} of 3000 steps: stopped" in rest


def test_several_processes_are_sent_to_the_script_that_shares_a_step(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["run", "fp32", *SMALL]) == 2
    assert "torchrun further/train_gpt2.py" in capsys.readouterr().err


def test_runs_folder_that_is_a_file_is_a_clear_error(tmp_path, monkeypatch, capsys):
    blocked = tmp_path / "blocked"
    blocked.write_text("")
    monkeypatch.setenv("LABUTILS_RUNS", str(blocked))
    for command in (["run", "fp32", *SMALL], ["doctor"], ["runs"]):
        assert main(command) == 1
        error = capsys.readouterr().err
        assert str(blocked) in error and "LABUTILS_RUNS names" in error


def test_all_commands_are_listed_and_doctor_times_the_notebooks(capsys):
    assert main([]) == 0
    listed = capsys.readouterr().out
    for name in ("run", "runs", "compare", "predict", "advise", "check", "doctor", "labs", "grade"):
        assert len(re.findall(rf"^ +{name} +[A-Z]", listed, re.M)) == 1
    assert main(["doctor"]) in (0, 1)
    printed = capsys.readouterr().out
    assert all(word in printed for word in ("device", "torch", "fp16", "bf16", "tf32", "runs"))
    if not torch.cuda.is_available():
        assert all(re.search(rf"{path.stem} \d", printed) for path in core_notebooks())


def test_what_a_card_emulates_is_slow_and_has_a_faster_way(capsys):
    assert main(["predict", "bf16", "--device", "t4", *SMALL]) == 0
    said = capsys.readouterr().out.splitlines()[-1]
    assert re.search(r"^bf16 is slow on t4: .* With precision=fp16 .* \d\.\d times as fast", said)


@pytest.mark.parametrize(("card", "precision"), [("a100", "bf16"), ("t4", "fp16")])
def test_a_question_in_fp32_ends_with_what_16_bits_would_do(capsys, card, precision):
    shape = [
        "--set",
        "model=gpt2-nano",
        "micro_batch_size=8",
        "seq_len=512",
        "tokens_per_step=4096",
    ]
    answers = {}
    for asked in ("fp32", precision):
        assert main(["predict", asked, "--device", card, *shape, "--json"]) == 0
        answers[asked] = json.loads(capsys.readouterr().out)
    plain, fast = answers.values()
    times = plain["step_ms"] / fast["step_ms"]
    assert plain["note"].startswith(f"With precision={precision} a step would take")
    assert f" {fast['step_ms']:.1f} ms, {times:.1f} times as fast" in plain["note"]
    assert f"needs {at_least(fast['needed_bytes'])} GiB (predicted)" in plain["note"]
    assert not fast["note"] and main(["predict", "fp32", "--device", card, *shape]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == plain["note"]


def test_16_bits_are_no_advice_where_they_do_not_fit(capsys):
    question = ["predict", "fp32", "--device=a100"]
    assert main([*question, "--gpu-memory-gib=3"]) == 0
    printed = capsys.readouterr().out
    needed = re.search(r"as well a step .* needs ([\d.]+) GiB, too much \(predicted\)", printed)[1]
    line = re.search(r"that is: --set (.*)", printed)[1]
    pairs = ["--set", *line.split(), "precision=bf16"]
    assert main([*question, *pairs, "--gpu-memory-gib=3"]) == 0
    printed = capsys.readouterr().out
    assert "does NOT fit 3.0 GiB" in printed and f"a card needs {needed} GiB" in printed
    assert main([*question, "--gpu-memory-gib=0.6"]) == 0
    printed = capsys.readouterr().out
    assert "No change makes it fit" in printed and "as well" not in printed


def test_the_cards_are_listed_by_memory(capsys):
    assert main(["predict", "--cards"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert {name: float(gib) for name, gib, _ in rows} == {
        name: round(card.memory_gib, 1) for name, card in CARDS.items()
    }
    assert [float(row[1]) for row in rows] == sorted(float(row[1]) for row in rows)


def test_a_fit_with_little_to_spare_says_so(capsys):
    question = ["predict", "bf16", "--set=model=gpt2-nano"]
    assert main([*question, "--json"]) == 0
    needed = json.loads(capsys.readouterr().out)["needed_gib"]
    for budget, words in (needed / 0.96, ", with 0.0 GiB to spare: a desktop"), (needed / 0.9, ""):
        assert main([*question, f"--gpu-memory-gib={budget}"]) == 0
        assert f"fits {budget} GiB{words}" in capsys.readouterr().out
    for needs, words in (76.5, "3.5 GiB to spare"), (75.9, ""), (81, ""):
        assert cli._spare(needs, 80) == words
