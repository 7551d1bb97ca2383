"""Everything that only a GPU shows, in three parts: `python -m labutils bench --gpu-suite OUT`.

A part stops after less than eight minutes and is resumed by giving the command again: a step that
has ended well is not run twice. Into OUT go a log and at most two small files a part; all else
stays in a temporary folder.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from labutils.files import REPO_DIR, runs_dir, write_atomically

PART_SECONDS = 465
LEAST_SECONDS = 45  # with less time left a step is not begun
PYTHON = sys.executable
BENCH = [PYTHON, "-m", "labutils", "bench", "--blocks", "5", "--steps", "10"]
PARTS: dict[int, dict[str, list[str]]] = {
    1: {"tests": [PYTHON, "-m", "pytest", "-m", "gpu", "-v", "--tb=short", "tests"]},
    2: {
        "target": [
            *BENCH,
            "--set",
            "micro_batch_size=16",
            "--arms",
            "source",
            "trainer",
            "plain_compiled",
        ],
        "medium": [*BENCH, "--set", "model=gpt2-medium", "--arms", "plain_compiled"],
        "arms": BENCH,
        **{f"ablation {k}": [*BENCH, "--ablate", f"{k}/4"] for k in (1, 2, 3, 4)},
        **{
            f"scale {sweep}": [PYTHON, "-m", "labutils", "bench", "--scale", sweep]
            for sweep in ("batch", "length", "layers", "width", "vocabulary")
        },
    },
    3: {
        "snapshot": [
            PYTHON,
            "-c",
            "from labutils.tools.bench import gpu_suite; gpu_suite.record_snapshot()",
        ],
        **{
            stem[:2]: [PYTHON, "-m", "labutils", "labs", f"{stem}.ipynb"]
            for stem in sorted(path.stem for path in REPO_DIR.glob("0*.ipynb"))
        },
    },
}


def run_part(
    part: int, out: Path, steps: dict[str, list[str]], seconds: float = PART_SECONDS
) -> bool:
    """Run a part's steps until its time is up, collect what they left, and return whether all have
    succeeded.
    """
    work = Path(tempfile.gettempdir()) / f"labutils-gpu-suite-{part}"
    (work / "runs").mkdir(parents=True, exist_ok=True)
    environment = os.environ | {"LABUTILS_RUNS": str(work / "runs"), "PYTHONUNBUFFERED": "1"}
    environment["LABUTILS_LEDGER"] = str(out / f"{part}-ledger.csv")
    log_path, end = out / f"{part}-log.txt", time.monotonic() + seconds
    finished = {line[8:].strip() for line in _lines(log_path) if line.startswith("# done: ")}
    with log_path.open("a", encoding="utf-8") as log:
        for name, command in steps.items():
            left = end - time.monotonic()
            if name in finished or left < min(LEAST_SECONDS, seconds / 2):
                print(
                    f"part {part}, {name}: {'done before' if name in finished else 'no time left for it'}"
                )
                continue
            print(f"part {part}, {name}: {' '.join(command[1:])}", flush=True)
            print(f"\n$ {' '.join(command[1:])}", file=log, flush=True)
            if _run(command, log, environment, left):
                print(f"# done: {name}", file=log, flush=True)
                finished.add(name)
    _collect(work / "runs", out, part)
    return set(steps) <= finished


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []


def _run(command: list[str], log, environment: dict[str, str], seconds: float) -> bool:
    """Run one step in a process group of its own, and end all of it when the time is up:

    First as Ctrl-C would.
    """
    process = subprocess.Popen(
        command,
        cwd=REPO_DIR,
        stdout=log,
        stderr=subprocess.STDOUT,
        env=environment,
        start_new_session=True,
    )
    for patience, how in ((seconds, signal.SIGINT), (15, signal.SIGKILL), (15, signal.SIGKILL)):
        try:
            return process.wait(timeout=patience) == 0
        except subprocess.TimeoutExpired:
            print(f"the time is up: {how.name}", file=log, flush=True)
            os.killpg(process.pid, how)
    return False


def _collect(runs: Path, out: Path, part: int) -> None:
    """Gather records into `N-records.json`, pages, figures and snapshots into `N-files.zip`."""
    snapshots = sorted(runs.glob("snapshot*.json"))
    found = [path for path in sorted(runs.glob("*.json")) if path not in snapshots]
    records = [json.loads(path.read_text(encoding="utf-8")) for path in found]
    if records:
        write_atomically(out / f"{part}-records.json", json.dumps(records).encode())
    keep = [path for path in runs.iterdir() if path.suffix in (".html", ".png")] + snapshots
    if keep:
        with tempfile.TemporaryDirectory() as folder:
            for path in keep:
                shutil.copy(path, folder)
            shutil.make_archive(str(out / f"{part}-files"), "zip", folder)


def record_snapshot(model_name: str = "gpt2") -> Path:
    """Record one training step of GPT-2, four sequences of 512 tokens, and save it in runs/; return
    the path.
    """
    import torch

    from labutils.machine.gpu import choose_device
    from labutils.machine.here import device_name
    from labutils.memory import snapshot
    from labutils.techniques.loss import lm_loss_sum
    from labutils.workload.gpt2 import build_model, vocab_size

    where = choose_device()
    model = build_model(model_name, dropout=0.0).to(where)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    ids = torch.randint(0, vocab_size(model_name), (4, 512), device=where)

    def step() -> None:
        lm_loss_sum(model, {"input_ids": ids, "labels": ids}).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    with snapshot.record(where) as found:
        step()
    name = "".join(c if c.isalnum() else "_" for c in device_name(where))
    path = runs_dir() / f"snapshot-{model_name}-{name}.json"
    found.save(path)
    return path


def main(out: Path, part: int = 0) -> int:
    """Run all parts, or one; return an exit code."""
    import torch

    if not torch.cuda.is_available():
        print("no CUDA GPU can be used here: `python -m labutils doctor` says why", file=sys.stderr)
        return 1
    out = out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    return 0 if all([run_part(n, out, PARTS[n]) for n in ([part] if part else PARTS)]) else 1
