"""further/train_gpt2.py, the one script without labutils, against `labutils run`."""

import io
import itertools
import json
import math
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import get_args

import numpy as np
import pandas as pd
import pytest
import torch
from transformers import AutoTokenizer, GPT2LMHeadModel

import labutils as lab
from labutils.training.run import flops_per_token
from tests.helpers import CPU, REPO, slow, write_small_text
from tests.test_budget import code_lines

SCRIPT = REPO / "further" / "train_gpt2.py"
STEPS = {"steps": 4, "lr_warmup_steps": 1}
CHAPTERS = ["assignment", "calls", "class"]
FOLDERS = itertools.count()
OVERFLOWS = 2.0**20  # some steps of FP16 are skipped, others are not
TINY = {"model": "gpt2-nano", "seq_len": 32, "micro_batch_size": 2, "tokens_per_step": 128}


def test_each_key_of_a_config_is_the_schemas_and_used_or_refused(
    little_text, monkeypatch, tmp_path
):
    """A new key stands in the script's Config, with the type and the bounds of the schema, and the
    values that the script has code for.
    """
    schema = json.loads((REPO / "configs" / "schema.json").read_text(encoding="utf-8"))
    there = schema["properties"]
    run = run_script("fp32", TINY | STEPS, monkeypatch)
    assert [*run["KEYS"]] == [key for key in there if key != "when_cpu"]
    text, names = (
        SCRIPT.read_text(encoding="utf-8"),
        {int: "integer", float: "number", str: "string"},
    )
    for key, hint in run["KEYS"].items():
        first, *others = allowed = get_args(hint) or [hint]
        facts, default = there[key], getattr(run["Config"], key)
        assert default in allowed or not isinstance(first, str), key
        if first in (int, float):
            assert facts["type"] == names[first], key
            least, most = others
            if key != "memory_limit_gib":  # 0 only
                assert least == pytest.approx(facts.get("minimum", facts.get("exclusiveMinimum")))
                assert most == pytest.approx(facts.get("maximum", facts.get("exclusiveMaximum")))
                assert least != facts.get("exclusiveMinimum")
                assert most != facts.get("exclusiveMaximum")
        elif isinstance(first, bool):
            assert facts["type"] == "boolean", key
        elif first is not str:
            assert set(allowed) <= set(facts["enum"]), key
        is_only = len(set(allowed)) == 1 or key == "memory_limit_gib"
        assert first is str or is_only or f"config.{key}" in text, key


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """A run keeps its folder beside it; what a signal does is left as it was."""
    monkeypatch.chdir(tmp_path)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture
def little_text(monkeypatch):
    """Python's language reference cut to 3 chapters: both then read on in its library."""
    from pydoc_data import topics

    monkeypatch.setattr(topics, "topics", {name: topics.topics[name] for name in CHAPTERS})


def run_script(name, changes, monkeypatch, *flags):
    """Run the script in this process; return its variables. Both forms of `--set` are used, and a
    folder of its own, if the flags name none.
    """
    if "--out" not in flags:
        flags = *flags, "--out", f"out-{next(FOLDERS)}"
    first, *pairs = [f"{key}={value}" for key, value in changes.items()]
    pairs = ["--set", *pairs] if pairs else []
    config = name if name.endswith(".yaml") else REPO / "configs" / f"{name}_config.yaml"
    command = [SCRIPT, config, *pairs, "--set", first, *flags]
    monkeypatch.setattr(sys, "argv", list(map(str, command)))
    return runpy.run_path(str(SCRIPT))


@contextmanager
def files_of_at_most(n_bytes):
    """Let this process write no longer file: like a full disk, the system refuses the rest."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def losses_of_script(name, changes, monkeypatch):
    """Run the script in this process; return every step's loss."""
    return run_script(name, changes, monkeypatch)["losses"].tolist()


def losses_of_both(name, changes, monkeypatch, device=CPU):
    """Return every step's loss of `labutils run`, and of the script."""
    config = lab.load_config(name, **changes)
    record = lab.run_experiment(config, device=device, rerun=True, progress=False)
    assert record.outcome == "completed"
    return record.series.loss, losses_of_script(name, changes, monkeypatch)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("fp32", {}),
        ("fp16", TINY | {"init_scale": OVERFLOWS}),
        ("bf16", TINY),
        ("accumulation", {"lr_schedule": "constant"}),
        ("checkpointing", {}),
        ("checkpointing", {"gradient_checkpointing": "block", "dropout": 0.1, "seed": 1}),
        ("optimized", {"loss_chunk_tokens": 0}),
    ],
)
def test_the_script_has_the_losses_of_a_run_bit_for_bit(
    name, changes, little_text, runs, monkeypatch
):
    expected, losses = losses_of_both(name, STEPS | changes, monkeypatch)
    assert losses == expected


def test_the_loss_in_chunks_agrees_to_rounding(little_text, runs, monkeypatch):
    expected, losses = losses_of_both("optimized", STEPS, monkeypatch)
    assert losses == pytest.approx(expected, rel=1e-5)


def test_a_text_of_ones_own_is_read_again_in_a_new_order(runs, tmp_path, monkeypatch, capsys):
    # more than an epoch
    changes = TINY | {"lr_warmup_steps": 1, "steps": 12, "corpus": str(write_small_text(tmp_path))}
    expected, losses = losses_of_both("fp32", changes, monkeypatch)
    assert losses == expected
    seconds = itertools.count()
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(seconds)))
    capsys.readouterr()
    losses_of_script("fp32", changes, monkeypatch)
    told = re.findall(r"step (\d+)/.* ([\d,]+) ms", capsys.readouterr().out)
    assert told == [("1", "1,000"), ("10", "111"), ("12", "500")]  # a second for 1, 9 and 2 steps


@pytest.mark.parametrize(
    ("change", "answer"),
    [
        ("stepz=99", "--set: there is no stepz; did you mean steps?"),
        ("optimizer=sgd", "optimizer: expected adamw, got 'sgd'"),
        ("lr_schedule=linear", "expected constant or cosine, got 'linear'"),
        ("name=../mine", "name: expected letters, digits"),
        ("activation=gelu", "did you mean gelu_new?"),
        ("use_cache=true", "use_cache: expected False, got 'true'"),
        ("memory_limit_gib=4", "memory_limit_gib: expected a number from 0 to 0, got '4'"),
        ("steps=0", "steps: expected a whole number from 1 to 1000000000, got '0'"),
        ("steps=8.5", "steps: expected a whole number from 1 to 1000000000, got '8.5'"),
        ("steps=4", "5 are more than the 4 steps; 0 is no warm-up"),  # as labutils says it
        ("learning_rate=six", "learning_rate: expected a number from"),
        ("dropout=nan", "dropout: expected a number from 0 to 1, got 'nan'"),
        ("weights=pretrained", "weights: pretrained are GPT-2's: no gpt2-nano"),
        ("micro_batch_size=3", "(micro_batch_size) × 1 (processes); try --set micro_batch_size=2"),
        ("corpus=nowhere.txt", "No such file or directory: 'nowhere.txt'"),
        # in the file
        ("lr_warmup_steps: | lr_warmup_stepz:", "did you mean lr_warmup_steps?"),
        ("  model: |   modle:", "when_cpu: there is no modle; did you mean model?"),
        ("seed: 0 | seed: [0, 1]", "seed: expected one value, got ['0', '1']"),
        ("seed: 0 | seed: 0\nseed : 1", "seed is given twice"),
        ("seed: 0 | seed: 0: 1", "mapping values are not allowed here"),
        ("when_cpu: | when_cpu: 3\nspare:", "`key: value`, under when_cpu too"),
        ("when_cpu: | when_cpu: [1, 2]\nspare:", "`key: value`, under when_cpu too"),
    ],
)
def test_what_the_script_cannot_do_is_refused(change, answer, tmp_path, monkeypatch, capsys):
    file, pairs = tmp_path / "my.yaml", {"max_grad_norm": 1}
    text = (REPO / "configs" / "fp32_config.yaml").read_text(encoding="utf-8")
    if "|" in change:
        text = text.replace(*change.split(" | "), 1)
    else:
        pairs = dict([change.split("=")])
    file.write_text(text, encoding="utf-8")
    with pytest.raises(SystemExit):
        run_script(str(file), pairs, monkeypatch)
    assert answer in capsys.readouterr().err


def test_a_file_says_the_same_to_the_script_as_to_labutils(tmp_path, monkeypatch, runs):
    text = (REPO / "configs" / "fp32_config.yaml").read_text(encoding="utf-8")
    for old, new in {
        "pad_vocab: false": "pad_vocab: True",
        "use_cache: false": "use_cache: no",
        "seed: 0": "seed: 1.0",
        "lr_schedule: cosine": "lr_schedule: constant",
        "when_cpu:": "when_cpu:\n  name: small\n  optimizer_in_backward: OFF\n  eval_every: 0.0",
    }.items():
        assert text.count(f"\n{old}") == 1
        text = text.replace(f"\n{old}", f"\n{new}")
    path = tmp_path / "odd.yaml"
    path.write_text(text, encoding="utf-8")
    changes = TINY | {"steps": "1.0", "lr_warmup_steps": 0, "expandable_segments": "n"}
    config = vars(run_script(str(path), changes, monkeypatch)["config"])
    expected = dict(lab.load_config(path, **changes).on("cpu"))
    # what --set overrides is part of the name there, and no key here
    assert config == {key: expected[key] for key in config} | {
        "name": "small",
        "note": config["note"],
    }
    assert config["pad_vocab"] is True and config["seed"] == 1 and config["name"] == "small"


def test_a_long_text_of_ones_own_is_read_as_far_as_needed(runs, tmp_path, monkeypatch):
    path = tmp_path / "long.txt"
    text = "".join(f"the {i * i}th word\n" for i in range(90_000))
    path.write_text("a" * 50_000 + text, encoding="utf-8")  # a word that would take seconds
    assert path.stat().st_size > 2**20  # more than a piece
    changes = TINY | {"steps": 2, "lr_warmup_steps": 0, "corpus": str(path)}
    expected, losses = losses_of_both("fp32", changes, monkeypatch)
    assert losses == expected


def test_a_line_tells_what_a_run_records_and_held_out_losses_are_equal(
    little_text, runs, monkeypatch, capsys
):
    changes = TINY | {"steps": 8, "lr_warmup_steps": 1, "eval_every": 4, "init_scale": OVERFLOWS}
    record = lab.run_experiment(lab.load_config("fp16", **changes), device=CPU, progress=False)
    capsys.readouterr()
    run_script("fp16", changes, monkeypatch, "--peak-tflops", 1)
    lines = capsys.readouterr().out
    assert re.findall(r"step (\d+)/", lines) == ["1", "4", "8"]
    held_out = [float(loss) for loss in re.findall(r"held-out loss (.*)", lines)]
    assert held_out == [round(loss, 4) for _, loss in record.series.held_out]
    series, i = record.series, 7
    assert 0 < sum(series.skipped) < 8
    told = (
        f"step 8/8: loss {series.loss[i]:.4f}, rate {series.learning_rate[i]:.1e}, "
        f"norm {series.grad_norm[i]:.2f}, "
        f"scale {series.loss_scale[i]:g} ({sum(series.skipped)} skipped), "
    )
    assert told in lines
    costs = r"[\d,]+ ms, ([\d,]+) tokens/s, (.*)% of the peak, process [\d,]+ MiB\n"
    found = re.search(f"{re.escape(told)}{costs}", lines)
    tokens_per_s, share = (float(text.replace(",", "")) for text in found.groups())
    model = lab.build(lab.load_config("fp16", **changes), device=CPU).model
    flops = flops_per_token(model, TINY["seq_len"])
    assert share / 100 == pytest.approx(flops * tokens_per_s / 1e12, rel=0.3)


LONG = TINY | {"dropout": 0.1, "steps": 5, "lr_warmup_steps": 1}


@pytest.mark.parametrize("name", ["fp32", "fp16"])
def test_a_run_that_dies_while_it_saves_is_continued_bit_for_bit(
    name, little_text, tmp_path, monkeypatch, capsys
):
    save = torch.save

    def dies_at_the_second(state, path):
        if state["done"] == 2:
            return save(state, path)
        Path(path).write_bytes(b"half a sta")
        raise KeyboardInterrupt

    changes = LONG | {"init_scale": OVERFLOWS, "growth_interval": 1}
    whole = run_script(name, changes, monkeypatch)
    flags = "--save-every", 2, "--out", tmp_path / "out"
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(torch, "save", dies_at_the_second)
        run_script(name, changes, patch, *flags)
    capsys.readouterr()
    rest = run_script(name, changes, monkeypatch, *flags, "--resume")
    assert "step 2/" not in capsys.readouterr().out
    exactly = {"rtol": 0, "atol": 0, "equal_nan": True}
    torch.testing.assert_close(whole["series"], rest["series"], **exactly)
    left = rest["model"].state_dict()
    torch.testing.assert_close(whole["model"].state_dict(), left, **exactly)


def test_a_run_is_neither_overwritten_nor_mixed_with_another(
    little_text, tmp_path, monkeypatch, capsys
):
    flags = "--save-every", 2, "--out", tmp_path / "out"
    changes = LONG | {"steps": 2}
    run_script("fp32", changes, monkeypatch, *flags, "--resume")  # of nothing: from the beginning
    assert "has no state: from the beginning" in capsys.readouterr().out

    def refused(changes, *more):
        with pytest.raises(SystemExit):
            run_script("fp32", changes, monkeypatch, *flags, *more)
        return capsys.readouterr().err

    assert "has a run already; --resume continues it" in refused(changes)
    assert "a run whose seed was 0, now it is 1" in refused(changes | {"seed": 1}, "--resume")
    other_text = {"corpus": write_small_text(tmp_path)}
    assert "a run whose corpus was" in refused(changes | other_text, "--resume")
    assert "more than 2" not in refused(changes | {"seed": 1, "steps": 1}, "--resume")
    assert not capsys.readouterr().out.count("this changes")
    state = tmp_path / "out" / "state.pt"
    whole = state.read_bytes()
    for damaged in (whole[:9000] + b"\xff" * 9 + whole[9009:], whole[: len(whole) // 2]):
        state.write_bytes(damaged)
        assert "cannot be read; delete it" in refused(changes, "--resume")
    state.write_bytes(b"half a sta")
    assert "cannot be read; delete it" in refused(changes, "--resume")
    state.unlink()  # what is left is no run of this script's
    assert "has no state to resume from" in refused(changes, "--resume")
    (tmp_path / "file").write_text("")
    assert "File exists" in refused(changes, "--out", tmp_path / "file")
    assert "--save-every: expected 0" in refused(changes, "--save-every", -1)
    assert "--by-block says how to compile" in refused(changes, "--by-block")


@pytest.mark.parametrize(("most", "lost"), [(0, "tokenizer.json"), (100, "tokens.bin")])
def test_a_text_that_does_not_fit_the_disk_is_one_line(
    most, lost, little_text, tmp_path, monkeypatch, capsys
):
    with files_of_at_most(most * 1000), pytest.raises(SystemExit):
        run_script("fp32", LONG | {"steps": 500}, monkeypatch, "--out", "out")
    assert re.search(rf"out/{lost} NOT SAVED, with .* MiB of disk free", capsys.readouterr().out)
    assert not list((tmp_path / "out").glob("*.part"))


def test_a_full_disk_does_not_end_a_run(little_text, tmp_path, monkeypatch, capsys):
    flags = "--save-every", 2, "--out", "out"
    run_script("fp32", LONG | {"steps": 2, "lr_schedule": "constant"}, monkeypatch, *flags)
    state = (tmp_path / "out" / "state.pt").read_bytes()
    capsys.readouterr()
    with files_of_at_most(1_000_000), pytest.raises(SystemExit) as ended:
        changes = LONG | {"lr_schedule": "constant"}
        run_script("fp32", changes, monkeypatch, *flags, "--resume")
    lines = capsys.readouterr().out
    assert ended.value.code == 1 and "from_pretrained" not in lines
    assert lines.count("out/state.pt NOT SAVED") == 2 and lines.count("out/model NOT SAVED") == 1
    assert "step 5/5: loss" in lines and not list((tmp_path / "out").glob("*.part"))
    assert (tmp_path / "out" / "state.pt").read_bytes() == state
    assert GPT2LMHeadModel.from_pretrained("out/model")
    capsys.readouterr()
    with files_of_at_most(0), pytest.raises(SystemExit):
        run_script("fp32", changes, monkeypatch, *flags, "--resume")
    assert "log.jsonl NOT SAVED: File too large" in capsys.readouterr().out


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_is_stopped_keeps_all_and_is_continued_bit_for_bit(
    number, little_text, tmp_path, monkeypatch, capsys
):
    changes = LONG | {"steps": 12, "eval_every": 6}
    whole = run_script("fp32", changes, monkeypatch, "--out", "whole")
    clip, calls = torch.nn.utils.clip_grad_norm_, itertools.count(1)

    def stops_the_third(*arguments):
        if next(calls) == 3:
            os.kill(os.getpid(), number)
        return clip(*arguments)

    with monkeypatch.context() as patch, pytest.raises(SystemExit) as ended:
        patch.setattr("torch.nn.utils.clip_grad_norm_", stops_the_third)
        run_script("fp32", changes, patch, "--out", "out")
    assert ended.value.code == 128 + number
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "stopped after step 3 of 12; the same command with --resume continues"
    assert GPT2LMHeadModel.from_pretrained("out/model")
    with (tmp_path / "out" / "log.jsonl").open("a") as file:  # what a step leaves after a state
        file.write('{"step": 4, "loss": 1}\n{"step": 4, "lo')
    rest = run_script("fp32", changes, monkeypatch, "--out", "out", "--resume")
    assert torch.equal(rest["series"], whole["series"])
    torch.testing.assert_close(
        rest["model"].state_dict(), whole["model"].state_dict(), rtol=0, atol=0
    )
    log, costs = logged("out"), ["ms", "tokens_per_s", "process_mib"]
    pd.testing.assert_frame_equal(log.drop(columns=costs), logged("whole").drop(columns=costs))
    assert log["step"].tolist() == [1, 2, 3, 4, 5, 6, 6, 7, 8, 9, 10, 11, 12, 12]
    assert log["loss"].dropna().tolist() == whole["losses"].tolist()
    assert log["held_out_loss"].dropna().index.tolist() == [6, 13]


def logged(folder):
    """Return what a run has logged. Raises ValueError where it is no strict JSON."""
    lines = Path(folder, "log.jsonl").read_text().splitlines()
    return pd.DataFrame([json.loads(line, parse_constant=int) for line in lines])


def test_a_line_of_the_log_says_what_a_step_gave(little_text, tmp_path, monkeypatch):
    changes = LONG | {"init_scale": OVERFLOWS}
    run = run_script("fp16", changes, monkeypatch, "--out", "out")
    log = logged("out")
    assert log["held_out_loss"].iloc[5] == pytest.approx(run["held_out_loss"]())
    log = log.iloc[:5]
    skipped = log["skipped"].tolist()
    assert skipped == run["skips"].tolist() and 0 < sum(skipped) < 5
    assert log["grad_norm"].isna().tolist() == [bool(skip) for skip in skipped]
    assert log["loss_scale"].tolist() == run["scales"].tolist()
    assert log["learning_rate"].tolist() == [run["rate_of"](i) for i in range(5)]
    n_tokens = log["tokens_per_s"] * log["ms"] / 1000
    assert n_tokens.tolist() == pytest.approx([LONG["tokens_per_step"]] * 5)
    assert log["process_mib"].min() > 50


LINES = "".join(f"the {i * i}th word\n" for i in range(2000))


@pytest.mark.parametrize(
    ("content", "answer"),
    [
        (
            LINES.replace("w", "ü").encode("latin-1"),
            "own.txt is not UTF-8 (byte 0xfc); save it as UTF-8 text",
        ),
        (LINES.encode("utf-16"), "own.txt is UTF-16; save it as UTF-8 text"),
        (LINES.encode("utf-16-le"), "own.txt is not text (it has NUL characters)"),
        (b"", "own.txt is empty"),
        (b"a few words\n", "tokens: too few for 2 sequences of 32"),
    ],
)
def test_a_text_that_cannot_be_read_is_one_line(content, answer, tmp_path, monkeypatch, capsys):
    (tmp_path / "own.txt").write_bytes(content)
    with pytest.raises(SystemExit):
        run_script("fp32", TINY | STEPS | {"corpus": "own.txt"}, monkeypatch)
    assert answer in capsys.readouterr().err


def test_ends_of_lines_and_a_byte_order_mark_are_no_part_of_a_text(tmp_path, monkeypatch):
    losses = set()
    for content in (LINES, LINES.replace("\n", "\r\n"), "\ufeff" + LINES):
        Path("own.txt").write_bytes(content.encode())
        changes = TINY | STEPS | {"corpus": "own.txt"}
        losses.add(tuple(losses_of_script("fp32", changes, monkeypatch)))
    assert len(losses) == 1


def test_a_text_is_encoded_once(tmp_path, monkeypatch, capsys):
    Path("own.txt").write_text(LINES * 5)
    changes = TINY | STEPS | {"corpus": "own.txt"}
    run = run_script("fp32", changes, monkeypatch, "--out", "out")
    ids = run["tokenizer"].encode(LINES * 5).ids  # more than is needed: no end
    assert np.fromfile("out/tokens.bin", np.uint16).tolist() == ids
    Path("own.txt").unlink()
    again = run_script("fp32", changes | {"steps": 6}, monkeypatch, "--out", "out", "--resume")
    assert torch.equal(again["losses"][:4], run["losses"])
    Path("out/tokens.bin").write_bytes(bytes(9000))
    with pytest.raises(SystemExit):
        run_script("fp32", changes | {"steps": 7}, monkeypatch, "--out", "out", "--resume")
    assert "is not what this run has read; delete it" in capsys.readouterr().err
    Path("out/tokenizer.json").write_text("{")
    with pytest.raises(SystemExit):
        run_script("fp32", changes | {"steps": 7}, monkeypatch, "--out", "out", "--resume")
    assert "out/tokenizer.json cannot be read; delete it" in capsys.readouterr().err
    Path("out/tokenizer.json").unlink()  # then both are made again
    with pytest.raises(SystemExit):
        run_script("fp32", changes | {"steps": 7}, monkeypatch, "--out", "out", "--resume")
    assert "No such file" in capsys.readouterr().err


def test_what_cannot_be_told_costs_no_training(little_text, monkeypatch):
    class Closed(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stdout", Closed())
    run_script("fp32", STEPS | TINY | {"max_grad_norm": 0}, monkeypatch, "--out", "out")
    assert GPT2LMHeadModel.from_pretrained("out/model")
    assert "grad_norm" not in logged("out")
    run_script("fp32", STEPS | TINY | {"max_grad_norm": 0}, monkeypatch, "--out", "out", "--resume")
    assert logged("out")["step"].tolist() == [1, 2, 3, 4, 4]


@slow
def test_ten_megabytes_of_text_take_seconds_and_little_memory(tmp_path):
    library = sorted(Path(os.__file__).parent.rglob("*.py"))
    text = "".join(path.read_text(encoding="utf-8", errors="replace") for path in library)
    Path("own.txt").write_text(text[:10_000_000].replace("\0", ""), encoding="utf-8")

    def peak_and_seconds(corpus, steps):
        command = [sys.executable, SCRIPT, "--out", f"{steps}", "--set"]
        command += [f"corpus={corpus}", f"steps={steps}", "lr_warmup_steps=0"]
        start = time.monotonic()
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            line = next(line for line in process.stdout if line.startswith("step 1/"))
            seconds = time.monotonic() - start
            process.kill()
        return int(re.search(r"process ([\d,]+) MiB", line)[1].replace(",", "")), seconds

    (alone, _), (whole, seconds) = (
        peak_and_seconds("stdlib", 1),
        peak_and_seconds("own.txt", 200000),
    )
    assert Path("200000/tokens.bin").stat().st_size > 6_000_000
    assert seconds < 30 and whole < alone + 300  # 8 and 140 here; 89 and 1,400 in one piece


@slow
def test_one_block_is_compiled_for_all(little_text, monkeypatch):
    changes = TINY | STEPS | {"dropout": 0}  # compiled code draws other numbers
    eager = losses_of_script("fp32", changes, monkeypatch)
    graphs = []
    for flags in ([], ["--by-block"]):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        run = run_script("fp32", changes | {"compile": "default"}, monkeypatch, *flags)
        assert run["losses"].tolist() == pytest.approx(eager, rel=1e-4)
        graphs.append(torch._dynamo.utils.counters["stats"]["calls_captured"])
    whole, of_a_block = graphs
    assert 0 < of_a_block < whole / 3  # of four blocks


@pytest.mark.parametrize("name", ["fp32", "optimized"])  # its vocabulary is padded
def test_the_model_that_is_left_is_one_of_transformers(
    name, little_text, tmp_path, monkeypatch, capsys
):
    run = run_script(name, LONG, monkeypatch, "--save-every", 5, "--out", tmp_path / "out")
    lines = capsys.readouterr().out
    model = GPT2LMHeadModel.from_pretrained(tmp_path / "out" / "model")
    assert model.config.use_cache
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out" / "model")
    ids = run["held_out"]
    with torch.no_grad():
        loss = model(input_ids=ids, labels=ids).loss.item()
    assert loss == pytest.approx(float(re.findall(r"held-out loss (.*)", lines)[-1]), abs=1e-3)
    assert f"it reads: {tokenizer.decode(ids[0, :16])}\n" in lines
    with torch.no_grad():
        here = run["model"].eval()
        logits = here.lm_head(here.hidden(ids))
        torch.testing.assert_close(model(input_ids=ids).logits, logits)
    assert model.config.n_positions == TINY["seq_len"]  # others were not trained
    assert tokenizer.model_max_length == TINY["seq_len"]
    assert tokenizer.pad_token_id == model.config.pad_token_id == tokenizer.eos_token_id
    assert (
        tokenizer(["A class is", "A"], padding=True)["input_ids"][1][-1] == tokenizer.pad_token_id
    )
    assert len(tokenizer(lines.split("it writes: ")[1])["input_ids"]) > 20
    with pytest.raises(SystemExit) as ended:  # the folder says what model it is
        run_script(
            "fp16",
            {"model": "gpt2"},
            monkeypatch,
            "--out",
            tmp_path / "out",
            "--sample",
            "A class is",
        )
    assert ended.value.code is None
    written = capsys.readouterr().out
    assert written.startswith("A class is") and len(tokenizer(written)["input_ids"]) > 20
    with pytest.raises(SystemExit):
        run_script("fp32", TINY, monkeypatch, "--out", tmp_path, "--sample", "A class is")
    assert f"{tmp_path} has no model of this script's" in capsys.readouterr().err
    assert model.generation_config.max_length == TINY["seq_len"]
    (tmp_path / "out" / "model" / "tokenizer.json").unlink()
    with pytest.raises(SystemExit):
        run_script("fp32", TINY, monkeypatch, "--out", tmp_path / "out", "--sample", "A class is")
    assert "out/model is damaged" in capsys.readouterr().err


@slow
def test_gpt2s_own_weights_are_taken_from_the_cache(runs, tmp_path, monkeypatch, capsys):
    changes = {"weights": "pretrained", "model": "gpt2", "seq_len": 32, "micro_batch_size": 1}
    changes |= {"tokens_per_step": 32, "steps": 2, "lr_warmup_steps": 0, "dropout": 0.0}
    monkeypatch.setattr(torch, "save", lambda state, path: path.touch())  # 1.5 GB, in vain here
    hub = tmp_path / "hub"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(hub))
    with pytest.raises(SystemExit):
        run_script("fp32", changes, monkeypatch)
    assert "openai-community/gpt2 is not in the cache" in capsys.readouterr().err
    folder = hub / "models--openai-community--gpt2" / "snapshots" / "abc"
    (hub / "models--openai-community--gpt2" / "refs").mkdir(parents=True)
    (hub / "models--openai-community--gpt2" / "refs" / "main").write_text("abc")
    model = lab.build_model("gpt2", seed=5)
    model.save_pretrained(folder)
    lab.load_corpus().tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer.json").rename(tmp_path / "later")  # a cache may have a part
    with pytest.raises(SystemExit):
        run_script("fp32", changes, monkeypatch)
    assert "is not in the cache" in capsys.readouterr().err
    (tmp_path / "later").rename(folder / "tokenizer.json")
    out = tmp_path / "out"
    run = run_script("fp32", changes, monkeypatch, "--out", out)
    assert GPT2LMHeadModel.from_pretrained(out / "model").config.n_positions == 1024
    ids = run["held_out"][:1]
    with torch.no_grad():
        expected = lab.lm_loss_sum(model.eval(), {"input_ids": ids, "labels": ids})
    own = run["GPT2"]()
    own.load_state_dict(run["read_weights"](run["cached"]["model.safetensors"]))
    assert own.eval()(ids).item() == expected.item()
    # a text of one's own is GPT-2's tokens, for random weights too
    changes |= {"weights": "random", "corpus": write_small_text(tmp_path)}
    run = run_script("fp32", changes, monkeypatch)
    assert run["tokenizer"].to_str() == lab.load_corpus().tokenizer.to_str()


def test_a_run_goes_on_with_more_steps_and_other_micro_batches(
    little_text, tmp_path, monkeypatch, capsys
):
    changes = LONG | {"lr_schedule": "constant", "dropout": 0.0}
    flags = "--save-every", 5, "--out", tmp_path / "out"
    run_script("fp32", changes, monkeypatch, *flags)
    capsys.readouterr()
    more = run_script("fp32", changes | {"steps": 9}, monkeypatch, *flags, "--resume")
    lines = capsys.readouterr().out
    assert "steps was 5, now it is 9: this changes" in lines and "continues after step 5" in lines
    larger = {"steps": 12, "micro_batch_size": 4}  # equal tokens, so equal sequences, a step
    again = run_script("fp32", changes | larger, monkeypatch, *flags, "--resume")
    lines = capsys.readouterr().out
    assert "micro_batch_size was 2, now it is 4: this changes the order of sums" in lines
    whole = run_script("fp32", changes | {"steps": 12}, monkeypatch)  # the text is as long
    assert torch.equal(whole["losses"][:9], more["losses"])
    torch.testing.assert_close(again["losses"], whole["losses"], rtol=1e-4, atol=0)
    with pytest.raises(SystemExit):
        run_script("fp32", changes, monkeypatch, *flags, "--resume")
    assert "has a run of 12 steps already, more than 5" in capsys.readouterr().err


@pytest.mark.parametrize("change", [{"gradient_checkpointing": "block"}, {"loss_chunk_tokens": 16}])
def test_what_is_computed_again_is_not_kept(change, little_text, monkeypatch):
    def kept(**changes):
        n_bytes = []

        def note(tensor):
            n_bytes.append(tensor.nbytes)
            return tensor

        changes |= TINY | {"steps": 1, "lr_warmup_steps": 0}
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            run_script("fp32", changes, monkeypatch)
        return sum(n_bytes)

    assert kept(**change) < 0.85 * kept()


def test_weights_of_a_state_that_are_nan_are_not_left(little_text, tmp_path, monkeypatch, capsys):
    flags, changes = ("--save-every", 5, "--out", tmp_path / "out"), LONG | {"steps": 5}
    run_script("fp32", changes, monkeypatch, *flags)
    state = torch.load(tmp_path / "out" / "state.pt")
    state["model"]["transformer.ln_f.weight"][0] = math.nan
    torch.save(state, tmp_path / "out" / "state.pt")
    model = tmp_path / "out" / "model" / "model.safetensors"
    before = model.read_bytes()
    with pytest.raises(SystemExit):
        run_script("fp32", changes, monkeypatch, *flags, "--resume")
    assert "inf or NaN" in capsys.readouterr().err and model.read_bytes() == before
    del state["series"]
    torch.save(state, tmp_path / "out" / "state.pt")
    with pytest.raises(SystemExit):
        run_script("fp32", changes, monkeypatch, *flags, "--resume")
    assert "cannot be read; delete it" in capsys.readouterr().err


def test_weights_that_are_nan_are_not_kept(little_text, tmp_path, monkeypatch, capsys):
    changes = TINY | {"steps": 60, "learning_rate": 10, "weight_decay": 1, "lr_warmup_steps": 0}
    flags = "--save-every", 1, "--out", tmp_path / "out"
    with pytest.raises(SystemExit):
        run_script("fp32", changes | {"lr_schedule": "constant"}, monkeypatch, *flags)
    assert "lower learning_rate" in capsys.readouterr().err
    last_good = torch.load(tmp_path / "out" / "state.pt")
    assert all(weights.isfinite().all() for weights in last_good["model"].values())


def test_the_script_is_short_and_needs_no_labutils(tmp_path):
    text = SCRIPT.read_text(encoding="utf-8")
    # 450 was hoped for; that nothing is lost, a text of any size and --sample are 149 of them
    assert code_lines(text) <= 737
    packages = set(re.findall(r"^ *(?:import|from) (\w+)", text, re.M)) - sys.stdlib_module_names
    assert packages == {
        "torch",
        "yaml",
        "tokenizers",
        "numpy",
        "huggingface_hub",
        "safetensors",
    }
    home = tmp_path / "home"
    home.mkdir()
    shutil.copy(SCRIPT, home)
    command = [sys.executable, SCRIPT.name, "--set", "steps=2", "lr_warmup_steps=0"]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    answer = subprocess.run(
        command, cwd=home, env=environment, capture_output=True, text=True, check=True
    )
    assert answer.stderr == ""
    assert "held-out loss" in answer.stdout
    assert {path.name for path in home.iterdir()} == {SCRIPT.name, "runs"}
    kept = {path.name for path in (home / "runs" / "gpt2").iterdir()}
    assert kept == {"state.pt", "log.jsonl", "model", "tokenizer.json", "tokens.bin"}


LATE_DISK = """
import runpy, sys, torch
save = torch.save
def save_early(state, *rest, **options):
    if isinstance(state, dict) and state["done"] > 4:
        raise OSError("full")
    save(state, *rest, **options)
torch.save = save_early
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@slow
def test_two_processes_train_like_one(tmp_path):
    full_after_4 = tmp_path / "late_disk.py"
    full_after_4.write_text(LATE_DISK)

    def together(n, out, *more, script=(SCRIPT,)):
        changes = LONG | {"tokens_per_step": 512, "steps": 6, "eval_every": 3, "dropout": 0}
        pairs = [f"{key}={value}" for key, value in changes.items()]
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc_per_node={n}", *script, REPO / "configs" / "fp32_config.yaml"]
        command += ["--save-every", 4, "--out", tmp_path / out, "--set", *pairs, *more]
        answer = subprocess.run(
            list(map(str, command)),
            env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
            capture_output=True,
            text=True,
        )
        assert bool(answer.returncode) == (len(script) > 1), answer.stderr
        state = torch.load(tmp_path / out / "state.pt")
        model = GPT2LMHeadModel.from_pretrained(tmp_path / out / "model")
        held_out = [float(loss) for loss in re.findall(r"held-out loss (.*)", answer.stdout)]
        assert answer.stdout.count("step 6/6: loss") == 1  # one process speaks
        if n == 2:  # dropout is not that of the other process
            assert not torch.equal(state["random"][0][0], state["random"][1][0])
        return state["series"], held_out, dict(model.named_parameters())

    series, held_out, weights = together(1, "one")
    series_of_two, held_out_of_two, weights_of_two = together(2, "two")
    torch.testing.assert_close(series_of_two, series, rtol=1e-5, atol=1e-5)
    assert held_out_of_two == pytest.approx(held_out, abs=2e-4) and len(held_out) == 2
    torch.testing.assert_close(weights_of_two, weights, rtol=1e-4, atol=1e-5)
    # each with dropout of its own; continued from step 4 bit for bit
    _, _, weights = together(2, "dropout", "dropout=0.1", script=[full_after_4, SCRIPT])
    _, _, again = together(2, "dropout", "dropout=0.1", "--resume")
    torch.testing.assert_close(weights, again, rtol=0, atol=0)


@slow
@pytest.mark.parametrize(
    ("pairs", "reason"),
    [
        ([], "try --set micro_batch_size=2"),  # 4 × 128 tokens a step
        (["micro_batch_size=2", "corpus=latin.txt"], "is not UTF-8"),  # in the first process alone
        (["micro_batch_size=2", "name=there"], "has a run already"),
    ],
)
def test_a_start_that_torchrun_is_refused_is_one_line(pairs, reason, tmp_path):
    (tmp_path / "latin.txt").write_bytes("é".encode("latin-1"))
    (tmp_path / "runs" / "there" / "model").mkdir(parents=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command += [str(SCRIPT), "--set", "steps=9", *pairs]
    answer = subprocess.run(  # it waits for all that may write: no process is left behind
        command,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=100,
    )
    said = [line for line in answer.stderr.splitlines() if "OMP_NUM_THREADS" not in line]
    told = [line for line in said if not set(line.split()[-1:]) & {"*" * 41}]
    assert answer.returncode and reason in told[-1], answer.stderr
    assert len(told) == 1, answer.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["fp32", "tf32", "fp16", "bf16"])
def test_the_script_has_the_losses_of_a_run_on_a_gpu(name, runs, monkeypatch):
    cuda = torch.device("cuda")
    if not lab.support(name, cuda).ok:
        pytest.skip(lab.support(name, cuda).reason)
    expected, losses = losses_of_both(name, TINY | STEPS, monkeypatch, cuda)
    assert losses == pytest.approx(expected, rel=2e-3)  # some kernels add up in no fixed order
