"""Does a change leave every number alone? `python tests/neutrality.py COMMIT` compares it with this
checkout.

Both versions run on this machine in one call, through the command line alone: all shipped configs
and the variants below train a few steps, and are predicted for three devices. Losses, ledgers and
predictions must be equal, bit for bit. Nothing is stored: losses differ from one kind of CPU to
another.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path

CONFIGS = ["fp32", "tf32", "fp16", "bf16", "accumulation", "checkpointing", "optimized", "xl"]
DEVICES = ["t4", "a100", "cpu"]
STEPS = ["--set", "steps=3", "--set", "lr_warmup_steps=1", "--set", "compile=off"]
VARIANTS = {
    "fp32": [
        ["optimizer=sgd", "optimizer_impl=foreach"],
        ["optimizer=adamw_bf16"],
        ["optimizer=adamw_8bit"],
        ["optimizer_impl=for_loop"],
        ["optimizer_in_backward=true", "max_grad_norm=0"],
        ["attention=eager"],
        ["attention=sdpa"],
        ["attention=math"],
        ["use_cache=true", "activation=gelu_tanh", "dropout=0.0"],
        ["loss_chunk_tokens=64", "lr_schedule=cosine"],
    ],
    "bf16": [["precision=pure_bf16"], ["precision=16bit"], ["loss_chunk_tokens=64"]],
    "checkpointing": [
        [f"gradient_checkpointing={policy}"]
        for policy in ("none", "every_2", "every_3", "selective", "offload")
    ],
}
FITS = [
    ["fp32", "--device", "t4", "--gpu-memory-gib", "4"],
    ["xl", "--device", "rtx4060", "--gpu-memory-gib", "6"],
    ["fp32", "--device", "cpu", "--gpu-memory-gib", "0.05"],
]


def commands() -> list[list[str]]:
    """Return the command lines that are compared."""
    found = [
        ["predict", name, "--json", "--device", device] for device in DEVICES for name in CONFIGS
    ]
    found += [["predict", *arguments, "--json"] for arguments in FITS]
    found += [["run", name, *STEPS] for name in CONFIGS]
    for name, variants in VARIANTS.items():
        for variant in variants:
            pairs = [argument for pair in variant for argument in ("--set", pair)]
            found.append(["run", name, *STEPS, *pairs])
            found += [
                ["predict", name, "--json", "--device", device, *pairs] for device in ("t4", "cpu")
            ]
    return found


def numbers(record: dict) -> dict:
    """Return what must be equal in two records of the same run: all but times, versions and ids."""
    series = {key: values for key, values in record["series"].items() if key != "step_ms"}
    kept = ("name", "outcome", "held_out", "epochs", "tokens_per_step", "corpus")
    # autocast frees its cast weights in an order that differs each time: the timeline shows it, the
    # peaks do not
    phases = record["memory"] and record["memory"]["phases"]
    return {"series": series, "phases": phases, **{key: record[key] for key in kept}}


def answer(arguments: list[str], runs: Path) -> dict:
    """Run one command in this process, and return the numbers that it printed or recorded."""
    sys.argv = ["labutils", *arguments]
    before = set(runs.glob("*.json"))
    out = io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            runpy.run_module("labutils", run_name="__main__")
    except SystemExit as end:
        if end.code not in (0, None):
            return {"exit code": end.code, "said": out.getvalue().splitlines()[-1]}
    if arguments[0] == "predict":
        return json.loads(out.getvalue())
    (path,) = set(runs.glob("*.json")) - before
    return numbers(json.loads(path.read_text(encoding="utf-8")))


def collect(out: Path) -> None:
    """Write the answers of the package in this folder to a file."""
    runs = Path(os.environ["LABUTILS_RUNS"])
    answers = {}
    for arguments in commands():
        text = " ".join(arguments)
        print(text, flush=True)
        answers[text] = answer(arguments, runs)
    out.write_text(json.dumps(answers), encoding="utf-8")


def answers_of(checkout: Path, folder: Path) -> dict[str, dict]:
    """Return the answers of a checkout, computed in a process of its own."""
    runs = folder / "runs"
    runs.mkdir(parents=True)
    out = folder / "answers.json"
    environment = os.environ | {"PYTHONPATH": str(checkout), "LABUTILS_RUNS": str(runs)}
    command = [sys.executable, str(Path(__file__).resolve()), "--collect", str(out)]
    subprocess.run(command, cwd=checkout, env=environment, check=True, stdout=subprocess.DEVNULL)
    return json.loads(out.read_text(encoding="utf-8"))


def main(commit: str) -> int:
    """Compare this checkout with a commit; print what differs, and return an exit code."""
    here = Path(__file__).resolve().parent.parent
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        old = folder / "old"
        subprocess.run(
            ["git", "-C", str(here), "worktree", "add", "-q", "--detach", str(old), commit],
            check=True,
        )
        try:
            before = answers_of(old, folder / "before")
        finally:
            subprocess.run(
                ["git", "-C", str(here), "worktree", "remove", "--force", str(old)], check=True
            )
        after = answers_of(here, folder / "after")
    for text, then in before.items():  # keys may be added
        now = after.get(text, {})
        after[text] = {key: value for key, value in now.items() if key in then}
    different = [text for text in before if before[text] != after[text]]
    for text in different:
        print(f"DIFFERS: {text}")
        then, now = before[text], after.get(text, {})
        for key in then:
            if then[key] != now.get(key):
                print(f"  {key}: {str(then[key])[:3000]}\n  now: {str(now.get(key))[:3000]}")
    print(f"{len(before) - len(different)} of {len(before)} answers are equal to those of {commit}")
    return 1 if different else 0


if __name__ == "__main__":
    if sys.argv[1] == "--collect":
        collect(Path(sys.argv[2]))
    else:
        raise SystemExit(main(sys.argv[1]))
