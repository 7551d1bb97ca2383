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
from pydoc_data import topics
from typing import get_args

import numpy as np
import pandas as pd
import pytest
import torch
from transformers import AutoTokenizer, GPT2LMHeadModel

import labutils as lab
from labutils.training.run import flops_per_token
from tests.helpers import CPU, REPO, fill_hub_cache, slow, write_small_text
from tests.test_budget import code_lines

SCRIPT = REPO / "further" / "train_gpt2.py"
CHAPTERS = ["assignment", "calls", "class"]
OVERFLOWS = 2.0**20  # some steps of FP16 are skipped, others are not
STEPS = {"steps": 4, "lr_warmup_steps": 1}
TINY = {"model": "gpt2-nano", "seq_len": 32, "micro_batch_size": 2, "tokens_per_step": 128}
LONG = TINY | {"dropout": 0.1, "steps": 5, "lr_warmup_steps": 1}
LINES = "".join(f"the {i * i}th word\n" for i in range(2000))


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """A run keeps its folder beside it; what a signal does is left as it was. Python's language
    reference is cut to 3 chapters: script and labutils then read on in its library.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(topics, "topics", {name: topics.topics[name] for name in CHAPTERS})
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture
def script(monkeypatch, capsys):
    """Run the script in this process; return its variables, and what it has `printed`. Both forms
    of `--set` are used, and a folder of its own, if the flags name none.
    """
    folders = itertools.count()

    def run(changes, *flags, name="fp32"):
        if "--out" not in flags:
            flags = *flags, "--out", f"out-{next(folders)}"
        first, *pairs = [f"{key}={value}" for key, value in changes.items()]
        pairs = ["--set", *pairs] if pairs else []
        config = name if name.endswith(".yaml") else REPO / "configs" / f"{name}_config.yaml"
        command = [SCRIPT, config, *pairs, "--set", first, *flags]
        monkeypatch.setattr(sys, "argv", list(map(str, command)))
        capsys.readouterr()
        variables = runpy.run_path(str(SCRIPT))
        return variables | {"printed": capsys.readouterr().out}

    return run


@pytest.fixture
def ended(script, capsys):
    """Run the script, which ends with a status of its own; return what it says."""

    def run(*arguments, status=2, **options):
        with pytest.raises(SystemExit) as end:
            script(*arguments, **options)
        assert end.value.code == status
        return capsys.readouterr()

    return run


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


def losses_of_both(script, name, changes, device=CPU):
    """Return every step's loss of `labutils run`, and of the script."""
    config = lab.load_config(name, **changes)
    record = lab.run_experiment(config, device=device, progress=False)
    assert record.outcome == "completed"
    return record.series.loss, script(changes, name=name)["losses"].tolist()


def test_each_key_of_a_config_is_the_schemas_and_used_or_refused(script):
    """A new key stands in the script's Config, with the type and the bounds of the schema, and the
    values that the script has code for.
    """
    schema = json.loads((REPO / "configs" / "schema.json").read_text(encoding="utf-8"))
    there, text = schema["properties"], SCRIPT.read_text(encoding="utf-8")
    run = script(TINY | STEPS)
    assert [*run["KEYS"]] == [key for key in there if key != "when_cpu"]
    for key, hint in run["KEYS"].items():
        first, *others = allowed = get_args(hint) or [hint]
        facts, default = there[key], getattr(run["Config"], key)
        assert default in allowed or not isinstance(first, str), key
        is_only = len(set(allowed)) == 1 or key == "memory_limit_gib"  # 0 only
        if first in (int, float):
            assert facts["type"] == ("integer" if first is int else "number"), key
            for bound, word in zip(others, ["Minimum", "Maximum"], strict=True):
                outside = facts.get(f"exclusive{word}")
                inside = pytest.approx(facts.get(word.lower(), outside))
                assert is_only or (bound == inside and bound != outside), key
        elif isinstance(first, bool):
            assert facts["type"] == "boolean", key
        elif first is not str:
            assert set(allowed) <= set(facts["enum"]), key
        assert first is str or is_only or f"config.{key}" in text, key


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
        ("optimized", {}),
    ],
)
def test_the_script_has_the_losses_of_a_run_bit_for_bit(name, changes, script, runs):
    expected, losses = losses_of_both(script, name, STEPS | changes)
    in_chunks = name == "optimized" and not changes  # these agree to rounding
    assert losses == (pytest.approx(expected, rel=1e-5) if in_chunks else expected)


def test_a_text_of_ones_own_is_read_again_in_a_new_order(script, runs, tmp_path, monkeypatch):
    # more than an epoch
    changes = TINY | {"lr_warmup_steps": 1, "steps": 12, "corpus": str(write_small_text(tmp_path))}
    expected, losses = losses_of_both(script, "fp32", changes)
    assert losses == expected
    seconds = itertools.count()
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(seconds)))
    told = re.findall(r"step (\d+)/.* ([\d,]+) ms", script(changes)["printed"])
    assert told == [("1", "1,000"), ("10", "111"), ("12", "500")]  # a second for 1, 9 and 2 steps


@pytest.mark.parametrize(
    ("change", "answer"),
    [
        ("stepz=99", "--set: there is no stepz; did you mean steps?"),
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
        ("when_cpu: | when_cpu: [1, 2]\nspare:", "`key: value`, under when_cpu too"),
    ],
)
def test_what_the_script_cannot_do_is_refused(change, answer, ended):
    pairs = {"max_grad_norm": 1}
    text = (REPO / "configs" / "fp32_config.yaml").read_text(encoding="utf-8")
    if "|" in change:
        text = text.replace(*change.split(" | "), 1)
    else:
        pairs = dict([change.split("=")])
    Path("my.yaml").write_text(text, encoding="utf-8")
    assert answer in ended(pairs, name="my.yaml").err


def test_a_file_says_the_same_to_the_script_as_to_labutils(script, tmp_path, runs):
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
    config = vars(script(changes, name=str(path))["config"])
    expected = dict(lab.load_config(path, **changes).on("cpu"))
    # what --set overrides is part of the name there, and no key here
    own = {"name": "small", "note": config["note"]}
    assert config == {key: expected[key] for key in config} | own
    assert config["pad_vocab"] is True and config["seed"] == 1 and config["name"] == "small"


def test_a_long_text_of_ones_own_is_read_as_far_as_needed(script, runs, tmp_path):
    path = tmp_path / "long.txt"
    text = "".join(f"the {i * i}th word\n" for i in range(90_000))
    path.write_text("a" * 50_000 + text, encoding="utf-8")  # a word that would take seconds
    assert path.stat().st_size > 2**20  # more than a piece
    changes = TINY | {"steps": 2, "lr_warmup_steps": 0, "corpus": str(path)}
    expected, losses = losses_of_both(script, "fp32", changes)
    assert losses == expected


def test_a_line_tells_what_a_run_records_and_held_out_losses_are_equal(script, runs):
    changes = TINY | {"steps": 8, "lr_warmup_steps": 1, "eval_every": 4}
    changes |= {"init_scale": OVERFLOWS, "growth_interval": 2}
    record = lab.run_experiment(lab.load_config("fp16", **changes), device=CPU, progress=False)
    lines = script(changes, "--peak-tflops", 0.001, name="fp16")["printed"]
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
    assert share / 100 == pytest.approx(flops * tokens_per_s / 1e9, rel=0.05)


def test_a_run_is_neither_overwritten_nor_mixed_with_another(script, ended, tmp_path):
    changes = LONG | {"steps": 2}

    def refused(changes, *flags):
        return ended(changes, "--out", "out", *flags).err

    began = script(changes, "--out", "out", "--resume")["printed"]
    assert "has no state: from the beginning" in began
    assert "has a run already; --resume continues it" in refused(changes)
    another = ended(changes | {"seed": 1, "steps": 1}, "--out", "out", "--resume")
    assert "a run whose seed was 0, now it is 1" in another.err
    assert "this changes" not in another.out
    other_text = {"corpus": write_small_text(tmp_path)}
    assert "a run whose corpus was" in refused(changes | other_text, "--resume")
    state = Path("out/state.pt")
    whole = state.read_bytes()
    half = len(whole) // 2  # among the weights
    for damaged in (whole[:half] + b"\xff" * 9 + whole[half + 9 :], whole[:half], b"half a sta"):
        state.write_bytes(damaged)
        assert "cannot be read; delete it" in refused(changes, "--resume")
    state.unlink()  # what is left is no run of this script's
    assert "has no state to resume from" in refused(changes, "--resume")
    assert "File exists" in refused(changes, "--out", write_small_text(tmp_path))
    assert "--save-every: expected 0" in refused(changes, "--save-every", -1)
    assert "--by-block says how to compile" in refused(changes, "--by-block")


@pytest.mark.parametrize(("most", "lost"), [(0, "tokenizer.json"), (100, "tokens.bin")])
def test_a_text_that_does_not_fit_the_disk_is_one_line(most, lost, ended):
    with files_of_at_most(most * 1000):
        said = ended(LONG | {"steps": 500}, "--out", "out").out
    assert re.search(rf"out/{lost} NOT SAVED, with .* MiB of disk free", said)
    assert not list(Path("out").glob("*.part"))


def test_a_full_disk_does_not_end_a_run(script, ended):
    changes, flags = LONG | {"lr_schedule": "constant"}, ("--save-every", 2, "--out", "out")
    script(changes | {"steps": 2}, *flags)
    state = Path("out/state.pt").read_bytes()
    with files_of_at_most(1_000_000):
        lines = ended(changes, *flags, "--resume", status=1).out
    assert lines.count("out/state.pt NOT SAVED") == 2 and lines.count("out/model NOT SAVED") == 1
    assert "step 5/5: loss" in lines and "from_pretrained" not in lines
    assert Path("out/state.pt").read_bytes() == state and not list(Path("out").glob("*.part"))
    assert GPT2LMHeadModel.from_pretrained("out/model")
    with files_of_at_most(0):
        lines = ended(changes, *flags, "--resume", status=1).out
    assert "log.jsonl NOT SAVED: File too large" in lines


@pytest.mark.parametrize(("name", "number"), [("fp32", signal.SIGINT), ("fp16", signal.SIGTERM)])
def test_a_run_that_is_stopped_keeps_all_and_is_continued_bit_for_bit(
    name, number, script, ended, monkeypatch
):
    changes = LONG | {"steps": 12, "eval_every": 6, "init_scale": OVERFLOWS, "growth_interval": 1}
    whole = script(changes, "--out", "whole", name=name)
    clip, calls = torch.nn.utils.clip_grad_norm_, itertools.count(1)

    def stops_the_third(*arguments):
        if next(calls) == 3:
            os.kill(os.getpid(), number)
        return clip(*arguments)

    monkeypatch.setattr("torch.nn.utils.clip_grad_norm_", stops_the_third)
    lines = ended(changes, "--out", "out", name=name, status=128 + number).out.splitlines()
    assert lines[-1] == "stopped after step 3 of 12; the same command with --resume continues"
    assert GPT2LMHeadModel.from_pretrained("out/model")
    # what a run leaves that dies while it saves, or logs a step after its state
    Path("out/state.part").write_bytes(b"half a sta")
    with Path("out/log.jsonl").open("a") as file:
        file.write('{"step": 4, "loss": 1}\n{"step": 4, "lo')
    rest = script(changes, "--out", "out", "--resume", name=name)
    assert "step 4/" in rest["printed"]  # the first of those it does
    exactly = {"rtol": 0, "atol": 0, "equal_nan": True}
    torch.testing.assert_close(rest["series"], whole["series"], **exactly)
    weights, expected = rest["model"].state_dict(), whole["model"].state_dict()
    torch.testing.assert_close(weights, expected, **exactly)
    log, costs = logged("out"), ["ms", "tokens_per_s", "process_mib"]
    pd.testing.assert_frame_equal(log.drop(columns=costs), logged("whole").drop(columns=costs))
    assert log["step"].tolist() == [1, 2, 3, 4, 5, 6, 6, 7, 8, 9, 10, 11, 12, 12]
    assert log["loss"].dropna().tolist() == whole["losses"].tolist()
    assert log["held_out_loss"].dropna().index.tolist() == [6, 13]


def logged(folder):
    """Return what a run has logged. Raises ValueError where it is no strict JSON."""
    lines = Path(folder, "log.jsonl").read_text().splitlines()
    return pd.DataFrame([json.loads(line, parse_constant=int) for line in lines])


def test_a_line_of_the_log_says_what_a_step_gave(script):
    run = script(LONG | {"init_scale": OVERFLOWS}, "--out", "out", name="fp16")
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


@pytest.mark.parametrize(
    ("content", "answer"),
    [
        (LINES.replace("w", "ü").encode("latin-1"), "own.txt is not UTF-8 (byte 0xfc); save it as"),
        (LINES.encode("utf-16"), "own.txt is UTF-16; save it as UTF-8 text"),
        (LINES.encode("utf-16-le"), "own.txt is not text (it has NUL characters)"),
        (b"", "own.txt is empty"),
        (b"a few words\n", "tokens: too few for 2 sequences of 32"),
    ],
)
def test_a_text_that_cannot_be_read_is_one_line(content, answer, ended):
    Path("own.txt").write_bytes(content)
    assert answer in ended(TINY | STEPS | {"corpus": "own.txt"}).err


def test_ends_of_lines_and_a_byte_order_mark_are_no_part_of_a_text(script):
    losses = set()
    for content in (LINES, LINES.replace("\n", "\r\n"), "\ufeff" + LINES):
        Path("own.txt").write_bytes(content.encode())
        run = script(TINY | STEPS | {"corpus": "own.txt"})
        losses.add(tuple(run["losses"].tolist()))
    assert len(losses) == 1


def test_a_text_is_encoded_once(script, ended):
    Path("own.txt").write_text(LINES * 5)
    changes, flags = TINY | STEPS | {"corpus": "own.txt"}, ("--out", "out", "--resume")
    run = script(changes, *flags)
    ids = run["tokenizer"].encode(LINES * 5).ids  # more than is needed: no end
    assert np.fromfile("out/tokens.bin", np.uint16).tolist() == ids
    Path("own.txt").unlink()
    again = script(changes | {"steps": 6}, *flags)
    assert torch.equal(again["losses"][:4], run["losses"])
    longer = changes | {"steps": 7}, *flags
    Path("out/tokens.bin").write_bytes(bytes(9000))
    assert "is not what this run has read; delete it" in ended(*longer).err
    Path("out/tokenizer.json").write_text("{")
    assert "out/tokenizer.json cannot be read; delete it" in ended(*longer).err
    Path("out/tokenizer.json").unlink()  # then both are made again
    assert "No such file" in ended(*longer).err


def test_what_cannot_be_told_costs_no_training(script, monkeypatch):
    class Closed(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stdout", Closed())
    command = STEPS | TINY | {"max_grad_norm": 0}, "--out", "out"
    script(*command)
    assert GPT2LMHeadModel.from_pretrained("out/model")
    assert "grad_norm" not in logged("out")
    script(*command, "--resume")
    assert logged("out")["step"].tolist() == [1, 2, 3, 4, 4]


@slow
def test_ten_megabytes_of_text_take_seconds_and_little_memory():
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

    alone, _ = peak_and_seconds("stdlib", 1)
    whole, seconds = peak_and_seconds("own.txt", 200000)
    assert Path("200000/tokens.bin").stat().st_size > 6_000_000
    assert seconds < 30 and whole < alone + 300  # 8 and 140 here; 89 and 1,400 in one piece


@slow
def test_one_block_is_compiled_for_all(script):
    changes = TINY | STEPS | {"dropout": 0}  # compiled code draws other numbers
    eager, graphs = script(changes)["losses"].tolist(), []
    for flags in ([], ["--by-block"]):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        run = script(changes | {"compile": "default"}, *flags)
        assert run["losses"].tolist() == pytest.approx(eager, rel=1e-4)
        graphs.append(torch._dynamo.utils.counters["stats"]["calls_captured"])
    whole, of_a_block = graphs
    assert 0 < of_a_block < whole / 3  # of four blocks


@pytest.mark.parametrize("name", ["fp32", "optimized"])  # its vocabulary is padded
def test_the_model_that_is_left_is_one_of_transformers(name, script, ended):
    run = script(LONG, "--out", "out", name=name)
    lines, ids = run["printed"], run["held_out"]
    model = GPT2LMHeadModel.from_pretrained("out/model")
    tokenizer = AutoTokenizer.from_pretrained("out/model")
    here = run["model"].eval()
    with torch.no_grad():
        there = model(input_ids=ids, labels=ids)
        torch.testing.assert_close(there.logits, here.lm_head(here.hidden(ids)))
    told = float(re.findall(r"held-out loss (.*)", lines)[-1])
    assert there.loss.item() == pytest.approx(told, abs=1e-3)
    assert f"it reads: {tokenizer.decode(ids[0, :16])}\n" in lines
    assert len(tokenizer(lines.split("it writes: ")[1])["input_ids"]) > 20
    assert model.config.use_cache
    # other positions were not trained
    lengths = model.config.n_positions, model.generation_config.max_length
    assert {*lengths, tokenizer.model_max_length} == {TINY["seq_len"]}
    assert tokenizer.pad_token_id == model.config.pad_token_id == tokenizer.eos_token_id
    padded = tokenizer(["A class is", "A"], padding=True)["input_ids"]
    assert padded[1][-1] == tokenizer.pad_token_id

    # the folder says what model it is
    sample = {"model": "gpt2"}, "--sample", "A class is", "--out"
    written = ended(*sample, "out", name="fp16", status=None).out
    assert written.startswith("A class is") and len(tokenizer(written)["input_ids"]) > 20
    assert "elsewhere has no model of this script's" in ended(*sample, "elsewhere").err
    Path("out/model/tokenizer.json").unlink()
    assert "out/model is damaged" in ended(*sample, "out").err


@slow
def test_gpt2s_own_weights_are_taken_from_the_cache(script, ended, runs, tmp_path, monkeypatch):
    changes = {"weights": "pretrained", "model": "gpt2", "seq_len": 32, "micro_batch_size": 1}
    changes |= {"tokens_per_step": 32, "steps": 2, "lr_warmup_steps": 0, "dropout": 0.0}
    monkeypatch.setattr(torch, "save", lambda state, path: path.touch())  # 1.5 GB, in vain here
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    assert "openai-community/gpt2 is not in the cache" in ended(changes).err
    model = fill_hub_cache(tmp_path, "gpt2")
    [kept] = (tmp_path / "hub").rglob("tokenizer.json")
    kept.rename("later")  # a cache may have a part
    assert "is not in the cache" in ended(changes).err
    Path("later").rename(kept)
    run = script(changes, "--out", "out")
    assert GPT2LMHeadModel.from_pretrained("out/model").config.n_positions == 1024
    ids = run["held_out"][:1]
    with torch.no_grad():
        expected = lab.lm_loss_sum(model.eval(), {"input_ids": ids, "labels": ids})
    own = run["GPT2"]()
    own.load_state_dict(run["read_weights"](run["cached"]["model.safetensors"]))
    assert own.eval()(ids).item() == expected.item()
    # a text of one's own is GPT-2's tokens, for random weights too
    run = script(changes | {"weights": "random", "corpus": write_small_text(tmp_path)})
    assert run["tokenizer"].to_str() == lab.load_corpus().tokenizer.to_str()


def test_a_run_goes_on_with_more_steps_and_other_micro_batches(script, ended):
    changes, flags = LONG | {"lr_schedule": "constant", "dropout": 0.0}, ("--out", "out")
    script(changes, *flags)
    more = script(changes | {"steps": 9}, *flags, "--resume")
    assert "steps was 5, now it is 9: this changes" in more["printed"]
    assert "continues after step 5" in more["printed"]
    larger = {"steps": 12, "micro_batch_size": 4}  # equal tokens, so equal sequences, a step
    again = script(changes | larger, *flags, "--resume")
    said = "micro_batch_size was 2, now it is 4: this changes the order of sums"
    assert said in again["printed"]
    whole = script(changes | {"steps": 12})  # the text is as long
    assert torch.equal(whole["losses"][:9], more["losses"])
    torch.testing.assert_close(again["losses"], whole["losses"], rtol=1e-4, atol=0)
    assert "has a run of 12 steps already, more than 5" in ended(changes, *flags, "--resume").err


@pytest.mark.parametrize("change", [{"gradient_checkpointing": "block"}, {"loss_chunk_tokens": 16}])
def test_what_is_computed_again_is_not_kept(change, script):
    def kept(**changes):
        n_bytes = []

        def note(tensor):
            n_bytes.append(tensor.nbytes)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            script(changes | TINY | {"steps": 1, "lr_warmup_steps": 0})
        return sum(n_bytes)

    assert kept(**change) < 0.85 * kept()


def test_weights_of_a_state_that_are_nan_are_not_left(script, ended):
    script(LONG, "--out", "out")
    state, model = torch.load("out/state.pt"), Path("out/model/model.safetensors")
    before = model.read_bytes()
    state["model"]["transformer.ln_f.weight"][0] = math.nan
    torch.save(state, "out/state.pt")
    assert "inf or NaN" in ended(LONG, "--out", "out", "--resume").err
    assert model.read_bytes() == before
    del state["series"]
    torch.save(state, "out/state.pt")
    assert "cannot be read; delete it" in ended(LONG, "--out", "out", "--resume").err


def test_weights_that_are_nan_are_not_kept(ended):
    changes = TINY | {"steps": 60, "learning_rate": 10, "weight_decay": 1, "lr_warmup_steps": 0}
    changes["lr_schedule"] = "constant"
    assert "lower learning_rate" in ended(changes, "--save-every", 1, "--out", "out").err
    last_good = torch.load("out/state.pt")
    assert all(weights.isfinite().all() for weights in last_good["model"].values())


def test_the_script_is_short_and_needs_no_labutils(tmp_path):
    text = SCRIPT.read_text(encoding="utf-8")
    # 450 was hoped for; that nothing is lost, a text of any size and --sample are 149 of them
    assert code_lines(text) <= 737
    packages = set(re.findall(r"^ *(?:import|from) (\w+)", text, re.M)) - sys.stdlib_module_names
    libraries = {"torch", "yaml", "tokenizers", "numpy", "huggingface_hub", "safetensors"}
    assert packages == libraries
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


def torchrun(n, *arguments):
    """Run the script in n processes on the CPU; return what came of it."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc_per_node={n}", SCRIPT, *arguments]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    options = {"capture_output": True, "text": True, "timeout": 200}
    # it waits for all that may write: no process is left behind
    return subprocess.run(list(map(str, command)), env=environment, **options)


@slow
def test_two_processes_train_like_one():
    def together(n, out, *more):
        changes = LONG | {"tokens_per_step": 512, "steps": 6, "eval_every": 3, "dropout": 0}
        pairs = [f"{key}={value}" for key, value in changes.items()]
        config = REPO / "configs" / "fp32_config.yaml"
        answer = torchrun(n, config, "--out", out, "--set", *pairs, "lr_schedule=constant", *more)
        assert answer.returncode == 0, answer.stderr
        state = torch.load(Path(out, "state.pt"))
        model = GPT2LMHeadModel.from_pretrained(Path(out, "model"))
        held_out = [float(loss) for loss in re.findall(r"held-out loss (.*)", answer.stdout)]
        done = state["done"]
        assert answer.stdout.count(f"step {done}/{done}: loss") == 1  # one process speaks
        if n == 2:  # dropout is not that of the other process
            assert not torch.equal(state["random"][0][0], state["random"][1][0])
        return state["series"], held_out, dict(model.named_parameters())

    series, held_out, weights = together(1, "one")
    series_of_two, held_out_of_two, weights_of_two = together(2, "two")
    torch.testing.assert_close(series_of_two, series, rtol=1e-5, atol=1e-5)
    assert held_out_of_two == pytest.approx(held_out, abs=2e-4) and len(held_out) == 2
    torch.testing.assert_close(weights_of_two, weights, rtol=1e-4, atol=1e-5)
    # each with dropout of its own; continued from step 4 bit for bit
    _, _, weights = together(2, "whole", "dropout=0.1")
    together(2, "parts", "dropout=0.1", "steps=4")
    _, _, again = together(2, "parts", "dropout=0.1", "--resume")
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
def test_a_start_that_torchrun_is_refused_is_one_line(pairs, reason):
    Path("latin.txt").write_bytes("é".encode("latin-1"))
    Path("runs/there/model").mkdir(parents=True)
    answer = torchrun(2, "--set", "steps=9", *pairs)
    said = [line for line in answer.stderr.splitlines() if "OMP_NUM_THREADS" not in line]
    told = [line for line in said if not set(line.split()[-1:]) & {"*" * 41}]
    assert answer.returncode and reason in told[-1], answer.stderr
    assert len(told) == 1, answer.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["fp32", "tf32", "fp16", "bf16"])
def test_the_script_has_the_losses_of_a_run_on_a_gpu(name, script, runs):
    cuda = torch.device("cuda")
    if not lab.support(name, cuda).ok:
        pytest.skip(lab.support(name, cuda).reason)
    expected, losses = losses_of_both(script, name, TINY | STEPS, cuda)
    assert losses == pytest.approx(expected, rel=2e-3)  # some kernels add up in no fixed order
