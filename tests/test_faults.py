"""What goes wrong at a desk, really caused: killed processes, full disks, configs from a fuzzer."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import time
import tracemalloc

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import labutils as lab
from labutils.config.reader import load_config
from labutils.config.schema import ConfigError
from labutils.training import planned
from labutils.training.records import find_runs
from tests.helpers import REPO, committed, slow

resource = pytest.importorskip("resource")  # not on Windows

SMALL = {
    "seq_len": 32,
    "micro_batch_size": 2,
    "tokens_per_step": 64,
    "steps": 5,
    "lr_warmup_steps": 0,
}
FP32 = committed("configs/fp32_config.yaml")


# ---- a process that is killed


def train_once(folder: str, repeat: int) -> None:
    os.environ["LABUTILS_RUNS"] = folder
    lab.run_experiment(
        lab.load_config("fp32", **SMALL, name="victim"), repeat=repeat, progress=False
    )


@slow
def test_a_run_killed_at_any_moment_leaves_whole_records_only(runs):
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["labutils.experiment", "labutils.memory"])
    chance, seconds, killed = random.Random(0), 0.0, 0
    for repeat in range(52):
        start = time.monotonic()
        child = context.Process(target=train_once, args=(str(runs), repeat))
        child.start()
        child.join(None if repeat < 2 else chance.uniform(0, 1.1 * seconds))
        if repeat < 2:
            seconds = time.monotonic() - start  # the first one also starts the server
            before = {record.id: record for record in find_runs()[0]}
            assert len(before) == repeat + 1
            continue
        killed += child.is_alive()
        child.kill()
        child.join()
        records, damaged = find_runs()
        assert damaged == []
        now = {record.id: record for record in records}
        assert {key: now[key] for key in before} == before
        before = now
    assert killed > 25


# ---- a disk that is full


def _no_file_over_a_kib() -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, 1024))


def test_a_full_disk_is_noticed_before_training_and_nothing_is_left_behind(runs):
    command = [
        sys.executable,
        "-m",
        "labutils",
        "run",
        "fp32",
        *(f"--set={k}={v}" for k, v in SMALL.items()),
    ]
    answer = subprocess.run(
        command, cwd=REPO, capture_output=True, text=True, preexec_fn=_no_file_over_a_kib
    )
    assert answer.returncode == 1
    assert (
        "File too large" in answer.stderr.strip().splitlines()[-1]
        and "Traceback" not in answer.stderr
    )
    assert "step" not in answer.stdout
    assert [path for path in runs.rglob("*") if path.is_file()] == []


def test_a_disk_that_fills_up_during_training_loses_nothing(runs, monkeypatch, capsys):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(*_, **__):
        resource.setrlimit(resource.RLIMIT_FSIZE, (1024, limits[1]))
        return 1e-3

    monkeypatch.setattr(planned, "learning_rate_at", fill)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        record = lab.run_experiment(lab.load_config("fp32", **SMALL), progress=False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert len(record.series.loss) == 5 and record.reason.startswith("not saved: ")
    assert "NOT SAVED" in capsys.readouterr().out
    assert list(runs.glob("*.json")) + list(runs.glob(".*")) == []
    record.save()
    assert [r.id for r in find_runs()[0]] == [record.id]


# ---- configs from a fuzzer


VALUES = st.one_of(
    st.text(max_size=30),
    st.integers().map(str),
    st.floats().map(str),
    st.sampled_from(
        [
            "[1, 2]",
            "{a: 1}",
            "&a 1",
            "*a",
            "!!python/object/apply:os.system ['true']",
            "|",
            ">",
            "null",
            "~",
            "yes",
        ]
    ),
    st.sampled_from(
        [
            "0x10",
            "1e999",
            "-1",
            ".nan",
            "'",
            '"',
            "\t1",
            "9" * 400,
            "2001-01-01",
            "1:2",
            "@",
            "`",
            "%",
        ]
    ),
)


@st.composite
def mutated(draw) -> bytes:
    """fp32_config.yaml with some lines changed, lost, doubled, moved or made up."""
    lines = FP32.splitlines()
    for _ in range(draw(st.integers(1, 4))):
        i = draw(st.integers(0, len(lines) - 1))
        how = draw(
            st.sampled_from(
                ["value", "value", "value", "lose", "double", "move", "indent", "invent"]
            )
        )
        if how == "value":
            lines[i] = f"{lines[i].partition(':')[0]}: {draw(VALUES)}"
        elif how == "lose" and len(lines) > 1:
            del lines[i]
        elif how == "double":
            lines.insert(i, lines[i])
        elif how == "move":
            lines.append(lines.pop(i))
        elif how == "indent":
            lines[i] = draw(st.sampled_from([" ", "\t", "  - ", "---\n"])) + lines[i]
        else:
            lines.insert(i, draw(st.text(max_size=40)))
    return "\n".join(lines).encode(
        "utf-8", errors=draw(st.sampled_from(["surrogatepass", "replace"]))
    )


def _laughs(depth: int) -> bytes:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, depth)]
    return "\n".join(lines).encode()


def judged(path, content: bytes) -> None:
    """Load a file: a Config, or an error each of whose lines names the file."""
    path.write_bytes(content)
    try:
        load_config(path)
    except ConfigError as error:
        for line in str(error).splitlines():
            assert re.match(rf".*{path.name}(:\d+:\d+)?: \S", line), line


TEXTS = st.text(max_size=300).map(lambda text: text.encode("utf-8", "replace"))
FUZZ = {
    "database": None,
    "deadline": None,
    "suppress_health_check": [HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
}


@settings(max_examples=150, **FUZZ)
@given(content=st.one_of(mutated(), st.binary(max_size=300)))
def test_any_file_is_a_config_or_a_config_error(tmp_path, content):
    judged(tmp_path / "x.yaml", content)


@slow
@settings(max_examples=10_000, **FUZZ)
@given(content=st.one_of(mutated(), mutated(), st.binary(max_size=300), TEXTS))
def test_ten_thousand_files_are_configs_or_config_errors(tmp_path, content):
    judged(tmp_path / "x.yaml", content)


@pytest.mark.parametrize(
    "content",
    [
        _laughs(20),
        b"[" * 50_000,
        b"{a: " * 10_000,
        b"- " * 30_000,
        b"a: " + b"9" * 60_000,
        b"a: 1\n" * 200_000,
        FP32.replace("seed: 0", "seed: !!python/object/apply:os._exit [3]").encode(),
        FP32.encode("utf-16"),
        FP32.replace("corpus: stdlib", "corpus: /dev/zero").encode(),
        FP32.replace("corpus: stdlib", "corpus: ' '").encode(),
    ],
    ids=[
        "laughs",
        "brackets",
        "braces",
        "dashes",
        "digits",
        "huge",
        "python tag",
        "utf-16",
        "device",
        "blank path",
    ],
)
def test_hostile_files_cost_little_and_run_nothing(tmp_path, content):
    judged(tmp_path / "x.yaml", content)
    tracemalloc.start()  # slows everything down
    try:
        with contextlib.suppress(ConfigError):
            load_config(tmp_path / "x.yaml")
        assert tracemalloc.get_traced_memory()[1] < 200 * 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "content",
    [b"[" * 50_000, b"{a: " * 10_000, b"a: 1\n" * 200_000],
    ids=["brackets", "braces", "huge"],
)
def test_what_would_keep_the_yaml_reader_busy_never_reaches_it(tmp_path, monkeypatch, content):
    def read(*_):
        raise AssertionError("PyYAML was asked")

    (tmp_path / "x.yaml").write_bytes(content)
    monkeypatch.setattr(yaml, "compose_all", read)
    with pytest.raises(ConfigError):
        load_config(tmp_path / "x.yaml")


def test_the_fuzzers_files_are_of_both_kinds(tmp_path):
    """A fuzzer that never loads anything would prove nothing."""
    (tmp_path / "x.yaml").write_text(FP32)
    assert load_config(tmp_path / "x.yaml").name == "fp32"
