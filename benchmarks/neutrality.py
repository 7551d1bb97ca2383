"""Does a change leave every number alone? `python benchmarks/neutrality.py COMMIT` compares this checkout
with a commit. A second word keeps the questions that contain it: `COMMIT published`.

Both versions answer the same questions on this machine, through Python, each in a process of its
own. All shipped configs and the variants below train a few steps; they, other modules and the
published steps are predicted. Losses, ledgers and predictions must
be equal, bit for bit. Nothing is stored: losses differ from one kind of CPU to another.

A version may add keys to an answer. What one version does not know differs, with its error.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import labutils as lab

CONFIGS = ["fp32", "tf32", "fp16", "bf16", "accumulation", "checkpointing", "optimized", "xl"]
DEVICES = ["t4", "a100", "cpu"]
FEW_STEPS = {"steps": 3, "lr_warmup_steps": 1, "compile": "off"}
VARIANTS = {
    "fp32": [
        {"optimizer": "sgd", "optimizer_impl": "foreach"},
        {"optimizer": "adamw_8bit"},
        {"optimizer_in_backward": True, "max_grad_norm": 0.0},
        {"attention": "eager"},
        {"use_cache": True, "activation": "gelu_tanh", "dropout": 0.0},
        {"loss_chunk_tokens": 64, "lr_schedule": "cosine"},
    ],
    "bf16": [{"precision": "pure_bf16"}, {"precision": "16bit"}, {"loss_chunk_tokens": 64}],
    "checkpointing": [
        {"gradient_checkpointing": how} for how in ("none", "every_2", "selective", "offload")
    ],
}
MODULES = [("fp32", "t4"), ("bf16", "a100"), ("fp16", "a100"), ("bf16", "cpu")]
# autocast frees its cast weights in an order that differs each time: the timeline shows it, the
# peaks do not
UNORDERED = {"timeline"}
# of a record: all but times, versions and ids
EQUAL = dict.fromkeys(("name", "outcome", "epochs", "tokens_per_step", "corpus", "series"), True)
EQUAL["memory"] = {"phases"}
Answer = dict[str, Any]


def predicted(load: Callable[[], Any], device: str) -> Answer:
    """Return the predicted bytes and times of a config."""
    config = load()
    ledger = lab.predict_memory(config, device)
    needed = lab.needed_gib(ledger, lab.card_of(device))
    times = lab.predict_time(config, device).model_dump()
    return ledger.model_dump(exclude=UNORDERED) | times | {"needed_gib": needed}


def trained(load: Callable[[], Any]) -> Answer:
    """Train a config here; return what must be equal."""
    record = lab.run_experiment(load(), progress=False, rerun=True)
    return record.model_dump(mode="json", include=EQUAL, exclude={"series": {"step_ms"}})


def predicted_module(**where: str) -> Answer:
    """Return the predicted bytes and times of a module that is no GPT-2."""
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    step = (layer, torch.zeros(4, 32, 64), lambda model, x: model(x).float().square().mean())
    ledger = lab.predict_module(*step, torch.optim.AdamW, **where)
    times = lab.predict_module_time(*step, torch.optim.AdamW, **where, n_tokens=128)
    return ledger.model_dump(exclude=UNORDERED) | times.model_dump()


def questions() -> dict[str, Callable[[], Answer]]:
    """Return all that both versions are asked: {words: what answers}."""
    asked: dict[str, Callable[[], Answer]] = {}
    for name in CONFIGS:
        for changes in ({}, *VARIANTS.get(name, [])):
            load = partial(lab.load_config, name, **FEW_STEPS | changes)
            asked[f"run {name} {changes}"] = partial(trained, load)
            for device in DEVICES:
                load = partial(lab.load_config, name, **changes)
                asked[f"predict {name} {changes} on {device}"] = partial(predicted, load, device)
    for precision, device in MODULES:
        ask = partial(predicted_module, precision=precision, device=device)
        asked[f"module in {precision} on {device}"] = ask
    for row in lab.published().itertuples():
        load = partial(lab.config_of_row, row.config)
        asked[f"published {row.config} on {row.card}"] = partial(predicted, load, row.card)
    return asked


def collect(out: Path, word: str) -> None:
    """Write the answers of the package that PYTHONPATH names to a file."""
    answers = {}
    for text, ask in questions().items():
        if word in text:
            print(text, file=sys.stderr, flush=True)
            try:
                answers[text] = ask()
            except Exception as error:
                answers[text] = {"raised": repr(error)}
    out.write_text(json.dumps(answers, default=str), encoding="utf-8")


def answers_of(checkout: Path, folder: Path, word: str) -> dict[str, Answer]:
    """Return the answers of a checkout, computed in a process of its own."""
    out = folder / "answers.json"
    # one folder for both: this CPU's speed is measured once
    places = {"PYTHONPATH": str(checkout), "LABUTILS_RUNS": str(folder / "runs")}
    command = [sys.executable, str(Path(__file__).resolve()), "--collect", str(out), word]
    subprocess.run(command, cwd=checkout, env=os.environ | places, check=True)
    return json.loads(out.read_text(encoding="utf-8"))


def main(commit: str, word: str = "") -> int:
    """Print what differs between a commit and this checkout; return an exit code."""
    here = Path(__file__).resolve().parent.parent
    with tempfile.TemporaryDirectory() as name:
        folder, archive = Path(name), f"{name}/old.tar"
        subprocess.run(["git", "-C", str(here), "archive", "-o", archive, commit], check=True)
        shutil.unpack_archive(archive, folder / "old")
        before, after = answers_of(folder / "old", folder, word), answers_of(here, folder, word)
    n_different = 0
    for text, then in before.items():
        now = after.get(text, {})
        keys = [key for key, value in then.items() if now.get(key) != value]
        n_different += bool(keys)
        for key in keys:
            value_now = now.get(key, now.get("raised"))
            print(
                f"DIFFERS: {text}: {key}\n  {str(then[key])[:300]}\n  now: {str(value_now)[:300]}"
            )
    print(f"{len(before) - n_different} of {len(before)} answers are equal")
    return min(n_different, 1)


if __name__ == "__main__":
    if sys.argv[1] == "--collect":
        collect(Path(sys.argv[2]), sys.argv[3])
    else:
        raise SystemExit(main(*sys.argv[1:]))
