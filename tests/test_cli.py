"""The command line as a learner meets it: words, exit codes, tables."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from operator import itemgetter

import pytest
import torch

from labutils.config.card import CARDS
from labutils.course import cli
from labutils.course.cli import main
from labutils.course.labs import core_notebooks
from labutils.memory.ledger import at_least
from labutils.training.record import RunRecord, load_record
from tests.helpers import REPO, TINY, interrupted

SMALL = " ".join(["--set name=fp32", *(f"{key}={value}" for key, value in TINY.items())])


@pytest.fixture
def said(capsys):
    """Give a command, which succeeds; return what it prints."""

    def _said(words: str) -> str:
        capsys.readouterr()
        assert main(words.split()) == 0
        return capsys.readouterr().out

    return _said


def record(name: str, number: int) -> None:
    run_id = f"20261122-{number:012d}-0000"
    RunRecord(id=run_id, created="", name=name, environment={"device": "a CPU"}).save()


def test_run_then_runs_then_compare(runs, said):
    printed = said(f"run fp32 {SMALL}")
    assert re.search(r"tokens/s, MFU [\d.]+ % of [\d.]+ TFLOP/s, ", printed)
    said(f"run fp32 {SMALL} name=other learning_rate=1e-3")
    assert load_record("other").config["learning_rate"] == 1e-3
    listed = said("runs")
    assert all(word in listed for word in ("fp32-", "other-", "completed", "tokens/s", "peak MiB"))
    table = said("compare fp32 other")
    assert "learning rate" in table and "weight decay" not in table and table.count(" MFU ") == 2
    header, *rows = said("compare fp32 other --csv").splitlines()
    assert len(rows) == 2 and header == (
        "run,learning_rate,step_ms,speedup,tokens_per_s,peak_mib,saving_percent,loss,outcome"
    )


@pytest.mark.parametrize(
    ("code", "command", "says"),
    [
        (1, "compare nothing", "no run 'nothing'"),
        (1, "compare mine", "Did you mean `mine+steps=6`?"),
        (1, "run bf61", "no such file or directory; name one YAML file. Did you mean `bf16`?"),
        (1, "check qqqqqq", "There are: accumulation, bf16, "),
        (1, "run fp32 --set=steps=0", "`steps`"),
        (1, "run fp32 --set=corpus=nowhere.txt", "no such text file"),
        (1, "predict tf32 --device t4", "use fp16"),
        (1, "advise fp31", "Did you mean `fp32`?"),
        (2, "nonsense", "nonsense"),
        (2, "run", "CONFIG"),
        (2, "run fp32 steps=2", "steps=2"),
        (2, "predict fp32 --gpu-memory-gib nan", "--gpu-memory-gib"),
        (2, "predict fp32 --gpu-memory-gib 8GB", "--gpu-memory-gib"),
        (2, "predict fp32 --device t44", "Nearest in name: t4, "),
        (2, "predict fp32 --device=", "no card is named ''"),
        (2, "predict fp16 --device t4 --card mine.yaml", "exclude each other"),
        (2, "grade . --timeout 0", "--timeout"),
        (2, "labs --in-place --student copies", "excludes the other options"),
    ],
)
def test_what_cannot_be_done_exits_with_1_and_wrong_usage_with_2(code, command, says, runs, capsys):
    record("mine+steps=6", 1)
    assert main(command.split()) == code
    assert says in capsys.readouterr().err.replace("'config'", "CONFIG")


def test_pairs_may_follow_one_set_or_each_its_own():
    one, each = "--set steps=4 seed=1 --json", "--set steps=4 --set seed=1 --json"
    assert cli.one_each(one.split()) == cli.one_each(each.split()) == each.split()


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


def test_runs_are_limited_and_filtered(runs, said):
    for k in range(25):
        record("one" if k else "other", k)
    for command, n_rows, says in (
        ("runs", 20, "5 older runs: --limit 0"),
        ("runs --limit 0", 25, ""),
        ("runs the --limit 3", 1, ""),
        ("runs nothing", 0, "There are: other, one"),
    ):
        listed = said(command)
        assert listed.count("-20261122-") == n_rows and says in listed


@pytest.mark.skipif(os.name == "nt", reason="POSIX signals")
def test_ctrl_c_ends_with_130_and_a_record(runs):
    # the progress bar has a loss after some steps
    rest, errors, code = interrupted("loss ", *f"run fp32 {SMALL} steps=3000".split())
    assert code == 130 and "Traceback" not in errors
    record = load_record("fp32")
    done = len(record.series.loss)
    assert record.outcome == "interrupted" and done > 0
    assert f"interrupted: after {done} of 3000 steps: stopped" in rest


def test_several_processes_are_sent_to_the_script_that_shares_a_step(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["run", "fp32"]) == 2
    assert "torchrun further/train_gpt2.py" in capsys.readouterr().err


def test_runs_folder_that_is_a_file_is_a_clear_error(tmp_path, monkeypatch, capsys):
    blocked = tmp_path / "blocked"
    blocked.write_text("")
    monkeypatch.setenv("LABUTILS_RUNS", str(blocked))
    for command in (f"run fp32 {SMALL}", "doctor", "runs"):
        assert main(command.split()) == 1
        error = capsys.readouterr().err
        assert str(blocked) in error and "LABUTILS_RUNS names" in error


def test_all_commands_are_listed_and_doctor_times_the_notebooks(said, capsys):
    listed = said("")
    for name in ("run", "runs", "compare", "predict", "advise", "check", "doctor", "labs", "grade"):
        assert len(re.findall(rf"^ +{name} +[A-Z]", listed, re.M)) == 1
    assert main(["doctor"]) in (0, 1)
    printed = capsys.readouterr().out
    assert all(word in printed for word in ("device", "torch", "fp16", "bf16", "tf32", "runs"))
    if not torch.cuda.is_available():
        assert all(re.search(rf"{path.stem} \d", printed) for path in core_notebooks())


# ---- Predicted


SLOW = r"bf16 is slow on t4: .*\. "


@pytest.mark.parametrize(
    ("card", "asked", "faster", "before"),
    [("a100", "fp32", "bf16", ""), ("t4", "fp32", "fp16", ""), ("t4", "bf16", "fp16", SLOW)],
)
def test_a_question_ends_with_what_faster_16_bits_would_do(said, card, asked, faster, before):
    """What a card emulates is slow, too."""
    shape = "--set model=gpt2-nano micro_batch_size=8 seq_len=512 tokens_per_step=4096"
    plain, fast = (
        json.loads(said(f"predict {name} --device {card} {shape} --json"))
        for name in (asked, faster)
    )
    gain = rf"{fast['step_ms']:.1f} ms, {plain['step_ms'] / fast['step_ms']:.1f} times as fast"
    needed = rf"a card needs {at_least(fast['needed_bytes'])} GiB \(predicted\)"
    says = rf"{before}With precision={faster} a step would take {gain}, and {needed}"
    assert re.fullmatch(says, plain["note"]) and not fast["note"]
    printed = said(f"predict {asked} --device {card} {shape}")
    assert printed.splitlines()[-1] == plain["note"]


def test_16_bits_are_no_advice_where_they_do_not_fit(said):
    printed = said("predict fp32 --gpu-memory-gib=3")
    needed = re.search(r"as well a step .* needs ([\d.]+) GiB, too much \(predicted\)", printed)[1]
    pairs = re.search(r"that is: (--set .*)", printed)[1]
    printed = said(f"predict fp32 {pairs} precision=bf16 --gpu-memory-gib=3")
    assert "does NOT fit 3.0 GiB" in printed and f"a card needs {needed} GiB" in printed
    printed = said("predict fp32 --gpu-memory-gib=0.6")
    assert "No change makes it fit" in printed and "as well" not in printed


def test_the_cards_are_listed_by_memory(said):
    rows = [line.split() for line in said("predict --cards").splitlines()]
    listed = [(name, float(gib)) for name, gib, _ in rows]
    assert dict(listed) == {name: round(card.memory_gib, 1) for name, card in CARDS.items()}
    assert listed == sorted(listed, key=itemgetter(1))


def test_a_fit_with_little_to_spare_says_so(said):
    question = "predict bf16 --set model=gpt2-nano"
    needed = json.loads(said(f"{question} --json"))["needed_gib"]
    for budget, words in (needed / 0.96, ", with 0.0 GiB to spare: a desktop"), (needed / 0.9, ""):
        assert f"fits {budget} GiB{words}" in said(f"{question} --gpu-memory-gib={budget}")
    for needs, words in (76.5, "3.5 GiB to spare"), (75.9, ""), (81, ""):
        assert cli._spare(needs, 80) == words


NANO = "predict fp32 --set model=gpt2-nano activation=gelu_tanh"


def test_what_a_card_needs_is_one_number_and_the_sum_of_its_parts(said):
    answer = json.loads(said(f"{NANO} --gpu-memory-gib 8 --json"))
    assert answer["peak_bytes"] == sum(answer["categories"].values())
    assert answer["peak_bytes"] <= answer["reserved_bytes"] < answer["needed_bytes"]
    assert answer["fits"] and answer["needed_gib"] * 2**30 == answer["needed_bytes"]
    printed = said(f"{NANO} seq_len=256 --gpu-memory-gib=0.61")  # 0.6116 are needed
    assert "does NOT fit 0.61 GiB\n" in printed and "; a card needs 0.62 GiB, or " in printed
    assert printed.count("0.62 GiB") == 1
    printed = said(f"{NANO} expandable_segments=true")
    assert re.search(r"; a card needs [.0-9]+ GiB \(0.5 for CUDA", printed)
    printed = said(f"{NANO} --device=cpu --gpu-memory-gib=1")
    peak, needed = (re.search(w + " ([.0-9]+) MiB", printed)[1] for w in ("peak", "it needs"))
    assert float(needed) == pytest.approx(1.1 * float(peak), abs=0.1)


def test_a_verdict_then_the_time_then_what_would_fit(said):
    parts = ["does NOT fit 0.6 GiB", "of one optimizer", "It fits in", r"predicted\) if you change"]
    parts += ["micro_batch_size=2: more micro-batches", "that is: --set "]
    assert re.search(".*".join(parts), said(f"{NANO} --gpu-memory-gib 0.6"), re.DOTALL)
    # the limit leaves the context out
    assert "memory_limit_gib, 0.6 GiB" in said(f"{NANO} memory_limit_gib=0.1 --device t4")
    assert "\nfits t4, 14.6 GiB\n" in said(f"{NANO} memory_limit_gib=20 --device t4")


def test_advice_names_its_device_and_hears_each_option(said):
    """On a card without BF16, of little memory: as `predict` would say."""
    options = "--set model=gpt2-nano seq_len=64 --device t4 --gpu-memory-gib 0.55 --json"
    answer = json.loads(said(f"advise fp32 {options}"))
    assert (answer["device"], answer["budget_gib"]) == ("t4", 0.55)
    by_name = {row["change"]: row for row in answer["changes"]}
    assert "precision=fp16" in by_name and "precision=bf16" not in by_name
    for row in answer["changes"]:
        assert row["fits"] == ((row["needs GiB"] or 1) <= 0.55)
