"""`make labs` on a new machine: which torch it asks pip for."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.helpers import REPO

# A Python that makes environments of itself and notes what pip is asked for. NO_INDEX: 1 or 0.
PYTHON = """#!/bin/sh
case "$2" in
venv) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
pip) echo "$*" >>"$NOTED"; case "$*" in *--index-url*) exit "$NO_INDEX" ;; esac ;;
esac
"""
CPU = "--index-url https://download.pytorch.org/whl/cpu torch==2.13.0"


@pytest.mark.skipif(not shutil.which("make"), reason="no make")
@pytest.mark.parametrize(
    ("gpu", "no_index", "options", "asked", "fails"),
    [
        (False, 0, [], [CPU, "-c constraints.txt"], False),
        (False, 1, [], [CPU, "-c constraints.txt"], False),  # pip takes what it finds
        (None, 0, [], [CPU, "-c constraints.txt"], False),  # a driver without a card
        (True, 0, [], ["-c constraints.txt"], False),
        (True, 0, ["TORCH=cpu"], [CPU, "-c constraints.txt"], False),
        (False, 1, ["TORCH=cu130"], [CPU.replace("cpu", "cu130")], True),  # no other will do
        (False, 0, ["TORCH=pip"], ["-c constraints.txt"], False),
    ],
)
def test_without_a_gpu_torch_is_its_cpu_build(gpu, no_index, options, asked, fails, tmp_path):
    if Path("/dev/nvidiactl").exists() and not gpu:
        pytest.skip("a GPU is here")
    says = {True: "echo GPU 0: T4", False: "echo no such command >&2", None: "echo No devices"}
    programs = {"python": PYTHON, "nvidia-smi": f"#!/bin/sh\n{says[gpu]}"}
    for name, text in programs.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    noted = tmp_path / "noted"
    environment = os.environ | {"NOTED": str(noted), "NO_INDEX": str(no_index)}
    environment["PATH"] = f"{tmp_path}:{environment['PATH']}"
    command = ["make", f"PYTHON={tmp_path}/python", f"VENV={tmp_path}/venv", *options]
    command.append(f"{tmp_path}/venv/installed")
    answer = subprocess.run(command, cwd=REPO, env=environment, capture_output=True, text=True)
    lines = noted.read_text().splitlines()
    assert len(lines) == len(asked) and all(a in b for a, b in zip(asked, lines, strict=True))
    assert bool(answer.returncode) == fails, answer.stderr
    assert ("pip takes what it finds" in answer.stdout) == bool(no_index and not fails)
    one_attempt = [line for line in lines if "--no-deps --retries 0 --timeout 10" in line]
    assert len(one_attempt) == len(asked) - (not fails)
