"""Does a change leave every number alone? `python tests/neutrality.py COMMIT` compares this checkout
with a commit. A second word keeps the questions that contain it: `COMMIT published`.

Both versions answer the same questions on this machine, through Python, each in a process of its
own. All shipped configs and the variants below train a few steps; they, other modules, LLaMAs that
are too large to build, and the published steps are predicted. Losses, ledgers and predictions must
be equal, bit for bit. Nothing is stored: losses differ from one kind of CPU to another.

A version may add keys to an answer. A variant, or a function, that one version does not know is
listed and not compared.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

CONFIGS = ["fp32", "tf32", "fp16", "bf16", "accumulation", "checkpointing", "optimized", "xl"]
DEVICES = ["t4", "a100", "cpu"]
FEW_STEPS = {"steps": 3, "lr_warmup_steps": 1, "compile": "off"}
VARIANTS = {
    "fp32": [
        {"optimizer": "sgd", "optimizer_impl": "foreach"},
        {"optimizer": "adamw_bf16"},
        {"optimizer": "adamw_8bit"},
        {"optimizer_in_backward": True, "max_grad_norm": 0.0},
        {"attention": "eager"},
        {"use_cache": True, "activation": "gelu_tanh", "dropout": 0.0},
        {"loss_chunk_tokens": 64, "lr_schedule": "cosine"},
    ],
    "bf16": [{"precision": "pure_bf16"}, {"precision": "16bit"}, {"loss_chunk_tokens": 64}],
    "checkpointing": [
        {"gradient_checkpointing": "none"},
        {"gradient_checkpointing": "every_2"},
        {"gradient_checkpointing": "every_2"},
        {"gradient_checkpointing": "selective"},
        {"gradient_checkpointing": "offload"},
    ],
}
FITS = [("fp32", "t4", 4.0), ("xl", "rtx4060", 6.0), ("fp32", "cpu", 0.05)]
LLAMAS = [
    ("1.1B", {"precision": "bf16", "checkpointing": False}),
    ("7B", {"precision": "pure_bf16", "optimizer": "adamw_8bit"}),
    ("13B", {"precision": "bf16", "frozen": "lora", "micro_batch_size": 4}),
    ("70B", {"precision": "bf16", "frozen": "qlora", "device": "h100"}),
]
# Errors by which a version says that it does not know a value, or a function.
UNKNOWN = ("ConfigError", "AttributeError", "ImportError", "ModuleNotFoundError")

Answer = dict[str, Any]
Question = tuple[str, Callable[[], Answer]]


def predicted(name: str, device: str, changes: dict[str, Any]) -> Answer:
    """Return the predicted bytes and times of a config."""
    import labutils as lab

    config = lab.load_config(name, **changes)
    ledger = lab.predict_memory(config, device)
    needed = lab.needed_gib(ledger, lab.card_of(device))
    time = lab.predict_time(config, device)
    return ledger.model_dump() | time.model_dump() | {"needed_gib": needed}


def fitted(name: str, device: str, budget_gib: float) -> Answer:
    """Return the changes with which a config fits a budget, and what they come to."""
    import labutils as lab

    plan = lab.fit(lab.load_config(name), budget_gib, device)
    kept = "changes", "needed_gib", "step_ms", "time_cost", "costs"
    return {"fits": plan.fits(budget_gib)} | {key: getattr(plan, key) for key in kept}


def trained(name: str, changes: dict[str, Any]) -> Answer:
    """Train a config here; return what must be equal: all but times, versions and ids."""
    import labutils as lab

    config = lab.load_config(name, **FEW_STEPS | changes)
    record = lab.run_experiment(config, progress=False).model_dump(mode="json")
    series = {key: values for key, values in record["series"].items() if key != "step_ms"}
    # records of version 2 have these losses beside the series
    record["held_out"] = series.pop("held_out", record.get("held_out"))
    kept = ("name", "outcome", "held_out", "epochs", "tokens_per_step", "corpus")
    # autocast frees its cast weights in an order that differs each time: the timeline shows it, the
    # peaks do not
    phases = record["memory"] and record["memory"]["phases"]
    return {"series": series, "phases": phases, **{key: record[key] for key in kept}}


def predicted_module(kind: str, precision: str, device: str) -> Answer:
    """Return the predicted bytes and times of a module that is no GPT-2."""
    import torch
    from torch import nn

    import labutils as lab

    if kind == "mlp":
        model = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Dropout(), nn.Linear(1024, 8))
        batch = torch.zeros(512, 256)
    else:
        model = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
        batch = torch.zeros(4, 32, 64)
    step = (model, batch, lambda model, x: model(x).float().square().mean(), torch.optim.AdamW)
    ledger = lab.predict_module(*step, precision=precision, device=device)
    time = lab.predict_module_time(*step, precision=precision, device=device, n_tokens=128)
    return ledger.model_dump() | time.model_dump()


def predicted_llama(shape: str, how: dict[str, Any]) -> Answer:
    """Return the predicted bytes of a model that is too large to build."""
    import labutils as lab

    return lab.predict_large(shape, **how).model_dump()


def predicted_row(number: int) -> Answer:
    """Return the predicted time of a published step."""
    import labutils as lab

    row = lab.published().iloc[number]
    return lab.predict_time(lab.config_of_row(row.config), row.card).model_dump()


def questions() -> Iterator[Question]:
    """Yield all that both versions are asked, each with its name."""
    for name in CONFIGS:
        for changes in ({}, *VARIANTS.get(name, [])):
            words = " ".join([name, *(f"{key}={value}" for key, value in changes.items())])
            for device in ("t4", "cpu") if changes else DEVICES:
                text = f"predict {words} on {device}"
                yield text, lambda n=name, d=device, c=changes: predicted(n, d, c)
            yield f"run {words}", lambda n=name, c=changes: trained(n, c)
    for name, device, gib in FITS:
        yield f"fit {name} on {device} in {gib} GiB", lambda a=(name, device, gib): fitted(*a)
    for kind in ("mlp", "encoder"):
        for how in (("fp32", "t4"), ("bf16", "a100"), ("fp16", "a100"), ("bf16", "cpu")):
            text = f"module {kind} {how[0]} on {how[1]}"
            yield text, lambda k=kind, h=how: predicted_module(k, *h)
    for shape, how in LLAMAS:
        yield f"llama {shape} {how}", lambda s=shape, h=how: predicted_llama(s, h)
    for number in range(47):
        yield f"published row {number}", lambda n=number: predicted_row(n)


def collect(out: Path, word: str) -> None:
    """Write the answers of the package in this folder to a file."""
    answers = {}
    for text, ask in questions():
        if word not in text:
            continue
        print(text, file=sys.stderr, flush=True)
        try:
            answers[text] = ask()
        except Exception as error:
            answers[text] = {"raised": type(error).__name__, "message": str(error)}
    out.write_text(json.dumps(answers, default=str), encoding="utf-8")


def answers_of(checkout: Path, folder: Path, word: str) -> dict[str, Answer]:
    """Return the answers of a checkout, computed in a process of its own."""
    out = folder / "answers.json"
    places = {"PYTHONPATH": str(checkout), "LABUTILS_RUNS": str(folder / "runs")}
    command = [sys.executable, str(Path(__file__).resolve()), "--collect", str(out), word]
    subprocess.run(command, cwd=checkout, env=os.environ | places, check=True)
    return json.loads(out.read_text(encoding="utf-8"))


def compare(before: dict[str, Answer], after: dict[str, Answer]) -> int:
    """Print what differs, and what one version does not know; return the number that differ."""
    keys, n_different, n_unknown = Counter(), 0, 0
    for text, then in before.items():
        now = after[text]
        raised = {then.get("raised"), now.get("raised")}
        if len(raised) == 2 and raised & set(UNKNOWN):
            n_unknown += 1
            message = then.get("message") or now.get("message")
            print(f"only one version knows: {text}\n  {message[:200]}")
            continue
        different = [key for key in then if key != "message" and then[key] != now.get(key)]
        n_different += bool(different)
        keys.update(different)
        for key in different:
            print(f"DIFFERS: {text}: {key}")
            print(f"  {str(then[key])[:300]}\n  now: {str(now.get(key))[:300]}")
    n_equal = len(before) - n_different - n_unknown
    print(f"{n_equal} of {len(before)} answers are equal, {n_unknown} only one version knows")
    if keys:
        print("what differs: " + ", ".join(f"{key} ({n})" for key, n in keys.most_common()))
    return n_different


def main(commit: str, word: str = "") -> int:
    """Compare this checkout with a commit, and return an exit code."""
    here = Path(__file__).resolve().parent.parent
    git = ["git", "-C", str(here), "worktree"]
    with tempfile.TemporaryDirectory() as name:
        old, before, after = Path(name, "old"), Path(name, "before"), Path(name, "after")
        for folder in (before, after):
            (folder / "runs").mkdir(parents=True)
        subprocess.run([*git, "add", "-q", "--detach", str(old), commit], check=True)
        try:
            then = answers_of(old, before, word)
        finally:
            subprocess.run([*git, "remove", "--force", str(old)], check=True)
        # this CPU is measured once, so that both predict its times from the same numbers
        if (before / "runs/calibration").exists():
            shutil.copytree(before / "runs/calibration", after / "runs/calibration")
        return min(compare(then, answers_of(here, after, word)), 1)


if __name__ == "__main__":
    if sys.argv[1] == "--collect":
        collect(Path(sys.argv[2]), sys.argv[3])
    else:
        raise SystemExit(main(*sys.argv[1:]))
