"""Everything that only a GPU shows, in three parts: `python -m labutils bench --gpu-suite OUT`.

Each part ends within eight minutes, whatever state it is in then, and writes at most three small files into OUT. A part
whose `N-done.txt` is there is not run again, so the command can be given once or in pieces (`--part N`).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from labutils.records import REPO_DIR, write_atomically

PART_SECONDS = 465
PYTHON = sys.executable
LABUTILS = [PYTHON, "-m", "labutils"]
FEW = ["--blocks", "5", "--steps", "10"]
PARTS: dict[int, list[list[str]]] = {
    1: [[PYTHON, "-m", "pytest", "-m", "gpu", "-q", "-rs", "tests"]],
    2: [
        [*LABUTILS, "bench", *FEW, "--set", "micro_batch_size=16", "--arms", "source", "trainer", "plain_compiled"],
        [*LABUTILS, "bench", *FEW, "--set", "model=gpt2-medium", "--arms", "plain_compiled"],
        [*LABUTILS, "bench", *FEW],
        [*LABUTILS, "bench", "--ablate", *FEW],
        [*LABUTILS, "bench", "--scale"],
    ],
    3: [[*LABUTILS, "labs"]],
}


def run_part(part: int, out: Path, commands: list[list[str]], seconds: float = PART_SECONDS) -> bool:
    """Run a part's commands until its time is up, collect what they left, and return whether all succeeded."""
    runs, done = out / f"work-{part}" / "runs", out / f"{part}-done.txt"
    if done.exists():
        print(f"part {part}: done before; delete {done.name} to run it again")
        return True
    runs.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {"LABUTILS_RUNS": str(runs), "PYTHONUNBUFFERED": "1"}
    end, codes = time.monotonic() + seconds, []
    with (out / f"{part}-log.txt").open("a", encoding="utf-8") as log:
        for command in commands:
            print(f"part {part}: {' '.join(command[1:])}", flush=True)
            print(f"\n$ {' '.join(command[1:])}", file=log, flush=True)
            left = end - time.monotonic()
            try:
                finished = subprocess.run(
                    command, cwd=REPO_DIR, stdout=log, stderr=subprocess.STDOUT, env=environment, timeout=max(1.0, left)
                )
                codes.append(finished.returncode)
            except subprocess.TimeoutExpired:
                print("stopped: this part's time is up", file=log)
                codes.append(124)
    _collect(runs, out, part)
    if not any(codes):
        write_atomically(done, b"")
    print(f"part {part}: exit codes {codes}; see {part}-log.txt")
    return not any(codes)


def _collect(runs: Path, out: Path, part: int) -> None:
    """Gather records into `N-records.json`, notebooks and figures into `N-files.zip`, the ledger beside the tests."""
    records = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(runs.glob("*.json"))]
    if records:
        write_atomically(out / f"{part}-records.json", json.dumps(records).encode())
    keep = [path for path in runs.glob("*") if path.suffix in (".html", ".png", ".csv")]
    keep += runs.parent.glob("*.csv")
    if keep:
        folder = out / f"work-{part}" / "files"
        folder.mkdir(exist_ok=True)
        for path in keep:
            shutil.copy(path, folder)
        shutil.make_archive(str(out / f"{part}-files"), "zip", folder)


def main(out: Path, part: int = 0) -> int:
    """Run all parts, or one; return an exit code."""
    import torch

    if not torch.cuda.is_available():
        print("no CUDA GPU can be used here: `python -m labutils doctor` says why", file=sys.stderr)
        return 1
    out.mkdir(parents=True, exist_ok=True)
    chosen = [part] if part else list(PARTS)
    return 0 if all([run_part(n, out, PARTS[n]) for n in chosen]) else 1
