from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest

from labutils.config import reader as config_module
from labutils.config.reader import CONFIGS_DIR, load_config
from labutils.tools.cli import main
from labutils.training.records import load_record
from tests.helpers import REPO, committed

TINY = [
    "--set",
    "name=fp32",
    "--set",
    "steps=3",
    "--set",
    "seq_len=16",
    "--set",
    "micro_batch_size=2",
    "--set",
    "tokens_per_step=32",
]
TINY += ["--set", "lr_warmup_steps=0"]


def test_run_then_runs_then_compare(runs, capsys):
    assert main(["run", "fp32", *TINY]) == 0
    assert main(["run", "fp32", *TINY, "--set", "name=other", "--set", "learning_rate=1e-3"]) == 0
    capsys.readouterr()
    assert main(["runs"]) == 0
    listed = capsys.readouterr().out
    assert all(word in listed for word in ("fp32-", "other-", "completed", "tokens/s", "peak MiB"))
    assert main(["compare", "fp32", "other"]) == 0
    table = capsys.readouterr().out
    assert "learning_rate" in table and "speedup" in table and "weight_decay" not in table
    assert main(["compare", "fp32", "other", "--csv"]) == 0
    header, *rows = capsys.readouterr().out.splitlines()
    assert header.startswith("run,learning_rate,step_ms") and len(rows) == 2


def test_two_runs_of_one_name_are_told_apart(runs, capsys):
    for _ in range(2):
        assert main(["run", "fp32", *TINY, "--rerun"]) == 0
    ids = [path.stem.removeprefix("fp32-") for path in runs.glob("fp32-*.json")]
    capsys.readouterr()
    assert main(["compare", *ids]) == 0
    assert all(run_id in capsys.readouterr().out for run_id in ids[:1])


def test_repeats_share_a_row_and_give_the_spread(runs, capsys):
    assert main(["run", "fp32", *TINY, "--repeat", "2"]) == 0
    assert main(["run", "fp32", *TINY, "--set", "name=other"]) == 0
    assert len(list(runs.glob("fp32-*.json"))) == 2
    capsys.readouterr()
    assert main(["compare", "fp32", "other"]) == 0
    table = capsys.readouterr().out
    assert table.count("fp32") == 1 and "repeat within" in table


def test_unknown_run_and_config_fail_with_a_message(runs, capsys):
    assert main(["compare", "nothing"]) == 1
    assert "no run 'nothing'" in capsys.readouterr().err
    assert main(["run", "fp33"]) == 1
    assert "no such file" in capsys.readouterr().err
    assert main(["run", "fp32", "--set", "steps=0"]) == 1
    assert "`steps`" in capsys.readouterr().err


def test_unsupported_precision_fails_with_the_reason(runs, capsys):
    pytest.importorskip("torch")
    import torch

    if torch.cuda.is_available():
        pytest.skip("this device may have TF32")
    assert main(["run", "tf32"]) == 1
    assert "use fp32" in capsys.readouterr().err


def test_unusable_corpus_fails_with_the_reason(runs, capsys):
    assert main(["run", "fp32", *TINY, "--set", "corpus=nowhere.txt"]) == 1
    assert "no such file" in capsys.readouterr().err


def test_check_names_every_bad_file(tmp_path, capsys):
    bad = tmp_path / "bad.yaml"
    bad.write_text("steps: x\n")
    assert main(["check", "fp32", str(bad)]) == 1
    captured = capsys.readouterr()
    assert "fp32: ok" in captured.out
    assert f"{bad}:1:8: `steps`" in captured.err


def test_check_imports_no_heavy_library():
    code = (
        "import sys; from labutils.tools.cli import main; assert main(['check', 'bf16']) == 0\n"
        "print({'torch', 'numpy', 'pandas', 'matplotlib', 'transformers'} & sys.modules.keys())"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code], cwd=REPO, check=True, capture_output=True, text=True
    )
    assert answer.stdout.splitlines() == ["bf16: ok", "set()"]


def test_new_copies_a_config_and_never_overwrites(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "configs"
    folder.mkdir()
    (folder / "bf16_config.yaml").write_text(
        committed("configs/bf16_config.yaml"), encoding="utf-8"
    )
    monkeypatch.setattr(config_module, "CONFIGS_DIR", folder)
    monkeypatch.chdir(tmp_path)
    assert main(["new", "mine", "--from", "configs/bf16_config.yaml"]) == 0
    made = folder / "my_mine.yaml"
    assert load_config(made).name == "mine"
    assert load_config(made).precision == "bf16"
    assert "weight_decay: 0.1        #" in made.read_text(encoding="utf-8")
    made.write_text("edited")
    assert main(["new", "mine", "--from", "configs/bf16_config.yaml"]) == 1
    assert made.read_text() == "edited"
    assert main(["new", "bad name", "--from", "configs/bf16_config.yaml"]) == 2
    assert sorted(p.name for p in folder.iterdir()) == ["bf16_config.yaml", "my_mine.yaml"]


def test_new_says_what_to_do_where_configs_cannot_be_written(tmp_path, monkeypatch, capsys):
    (tmp_path / "configs").write_text("a file where the folder should be")
    monkeypatch.setattr(config_module, "CONFIGS_DIR", tmp_path / "configs")
    assert main(["new", "mine", "--from", str(REPO / "configs" / "bf16_config.yaml")]) == 1
    said = capsys.readouterr().err
    assert "cannot write" in said and "my_mine.yaml: Not a directory" in said
    assert "into a folder of your own, then:" in said


def test_doctor_describes_this_machine(capsys):
    assert main(["doctor"]) in (0, 1)
    printed = capsys.readouterr().out
    assert all(word in printed for word in ("device", "torch", "fp16", "bf16", "tf32"))


def test_wrong_usage_exits_with_2_and_help_with_0(capsys):
    for arguments, code in (
        (["nonsense"], 2),
        (["run"], 2),
        (["--help"], 0),
        (["run", "--help"], 0),
    ):
        with pytest.raises(SystemExit) as exit_info:
            main(arguments)
        assert exit_info.value.code == code


def test_wrong_numbers_are_refused_in_words(capsys):
    for arguments, message in (
        (["run", "fp32", "--repeat", "0"], "'0' is not a whole number above 0"),
        (["predict", "fp32", "--gpu-memory-gib", "nan"], "'nan' is not an amount of memory"),
        (["predict", "fp32", "--gpu-memory-gib", "8GB"], "'8GB' is not an amount of memory"),
        (["grade", ".", "--timeout", "-3"], "'-3' is not a number above 0"),
        (["grade", ".", "--jobs", "0"], "'0' is not a whole number above 0"),
        (["bench", "--ablate", "3/2"], "'3/2' is not a share"),
    ):
        with pytest.raises(SystemExit) as exit_info:
            main(arguments)
        assert exit_info.value.code == 2
        assert message in capsys.readouterr().err


def test_a_config_laid_out_otherwise_is_not_copied(tmp_path, capsys):
    odd = tmp_path / "odd.yaml"
    lines = committed("configs/fp32_config.yaml").splitlines()
    odd.write_text("\n".join(sorted(lines, key=lambda line: line.startswith("note:"))))
    assert main(["new", "mine", "--from", str(odd)]) == 1
    assert "is not laid out like the files in configs/" in capsys.readouterr().err


@pytest.mark.skipif(os.name == "nt", reason="POSIX signals")
@pytest.mark.parametrize("stop", ["SIGINT", "SIGTERM"])
def test_ctrl_c_ends_a_run_with_130_and_a_partial_record(runs, stop):
    config_file = str(CONFIGS_DIR / "fp32_config.yaml")
    command = [sys.executable, "-m", "labutils", "run", config_file, *TINY, "--set", "steps=3000"]
    process = subprocess.Popen(
        command,
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
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    record = load_record("fp32")
    assert record.outcome == "interrupted"
    assert len(record.series.loss) > 0
    assert "Traceback" not in errors


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


def test_records_are_json_that_other_tools_read(runs):
    assert main(["run", "fp32", *TINY]) == 0
    path = next(runs.glob("fp32-*.json"))
    assert json.loads(path.read_text())["config"]["steps"] == 3
