"""The commands of `python -m labutils bench`."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from typing import Any

import torch

from labutils.config.reader import load_config
from labutils.config.resolve import resolve
from labutils.config.schema import Config, ConfigError
from labutils.files import commit, new_id, runs_dir, write_atomically
from labutils.machine import here
from labutils.machine.gpu import choose_device
from labutils.machine.here import device_name, environment
from labutils.prediction.memory import needed_gib, predict_memory
from labutils.prediction.time import predict_time
from labutils.tools.bench import scale
from labutils.tools.bench.arms import COMPETITORS, LOOP_ABLATIONS, OURS
from labutils.tools.bench.compare import run, save, table
from labutils.tools.bench.process import Row

QUICK = {"warmup": 2, "blocks": 2, "steps": 4}
# What the optimized config switches on, taken back one at a time; then what it leaves off.
ABLATIONS: dict[str, dict[str, Any]] = {
    "fp32 products": {"precision": "fp32"},
    "tf32 products": {"precision": "tf32"},
    "attention as transformers calls it": {"attention": "sdpa"},
    "eager attention": {"attention": "eager"},
    "gelu_new": {"activation": "gelu_new"},
    "use_cache": {"use_cache": True},
    "dropout 0.1": {"dropout": 0.1},
    "AdamW foreach": {"optimizer_impl": "foreach"},
    "AdamW for_loop": {"optimizer_impl": "for_loop"},
    "vocabulary not padded": {"pad_vocab": False},
    "whole loss": {"loss_chunk_tokens": 0},
    "loss in chunks of 2048": {"loss_chunk_tokens": 2048},
    "eager": {"compile": "off"},
    "compile: default": {"compile": "default"},
    "compile: reduce-overhead": {"compile": "reduce-overhead"},
    "compile: max-autotune": {"compile": "max-autotune"},
}


def main(options: Namespace, overrides: dict[str, Any]) -> int:
    """Compare the arms, or the switches of the optimized config, or sizes; return an exit code."""
    device = choose_device()
    if options.scale is not None:
        name = overrides.get("precision", "bf16" if device.type == "cuda" else "fp32")
        return _scale(device, name, options.scale, options.quick)
    config = benchmark_config(device, overrides)
    if options.ablate:
        what, rows = "ablation", ablation_rows(config, device, options.ablate)
    else:
        what, rows = "arms", arm_rows(config, options.arms)
    how = {"warmup": 10, "blocks": options.blocks, "steps": options.steps}
    if options.quick:
        what, how = f"{what}-quick", QUICK
    tokens = f"{config.micro_batch_size} × {config.seq_len} tokens a step"
    print(f"{device_name(device)}: {config.model}, {tokens}, {config.precision}; {how}")
    all_completed = run(rows, **how)
    for row in rows:
        if row.arm == OURS.name and row.facts:
            row.facts["predicted_tokens_per_s"] = predict_time(row.config, device).tokens_per_s
    print(table(rows).to_string())
    if device.type == "cuda":
        print("Where CUDA graphs replay, the peak leaves out their pool: see the reserved bytes.")
    path = save(rows, what)
    print(f"saved {path.name} and its figure in {path.parent}")
    return 0 if all_completed else 1


def _scale(device: torch.device, name: str, names: Sequence[str], quick: bool) -> int:
    """Measure how cost grows; print, save, return an exit code."""
    known = scale.sweeps(device)
    if unknown := set(names) - set(known):
        raise ConfigError(_unknown("--scale: no such sweep", unknown, known))
    chosen = {sweep: known[sweep] for sweep in known if not names or sweep in names}
    if quick:
        chosen = {sweep: chosen[sweep][:2] for sweep in list(chosen)[:2]}
    points = scale.run(device, name, chosen)
    print(scale.table(points).to_string())
    run_id, created = new_id()
    path = runs_dir() / f"bench-scale{'-quick' if quick else ''}-{run_id}.json"
    facts = {
        "what": "scale",
        "created": created,
        "commit": commit(),
        "precision": name,
        "environment": environment(device),
        "points": list(map(asdict, points)),
    }
    write_atomically(path, json.dumps(facts, indent=1).encode())
    title = f"GPT-2, {name}, eager; measured on {device_name(device)}"
    scale.figure(points, title, path.with_suffix(".png"))
    print(f"saved {path.name} and its figure in {path.parent}")
    return 0


def _unknown(problem: str, unknown: Iterable[str], known: Iterable[str]) -> str:
    return f"bench {problem}: {', '.join(sorted(unknown))}; there are: {', '.join(known)}"


def benchmark_config(device: torch.device, overrides: dict[str, Any]) -> Config:
    """Return the optimized config as it runs here, compiled.

    A step has one micro-batch, and the learning rate is constant.
    """
    values: dict[str, Any] = {"name": "optimized", "lr_schedule": "constant", "lr_warmup_steps": 0}
    values |= {"compile": "reduce-overhead"} if device.type == "cpu" else {"seq_len": 1024}
    values |= overrides
    own = load_config("optimized").on(device.type)
    seq_len = values.get("seq_len", own.seq_len)
    size = values.get("micro_batch_size", own.micro_batch_size)
    if device.type == "cuda" and "micro_batch_size" not in overrides:
        size = _batch_that_fits(values.get("model", own.model), seq_len)
    values |= {"micro_batch_size": size, "tokens_per_step": size * seq_len}
    config = load_config("optimized", **values).on(device.type)
    if config.precision == "pure_bf16":
        raise ConfigError(
            "bench: the other arms keep float32 weights; precision: bf16 compares like with like"
        )
    return resolve(config, here.card(device)).config


def _batch_that_fits(model: str, seq_len: int) -> int:
    """Return the largest of 16, 8, … sequences with which all processes fit the free memory.

    They live side by side. Counted are three of the hungriest kind (Hugging Face's defaults in
    FP32) and 13 lean ones, as in an ablation.
    """
    free_gib = here.card_of(here.THIS).memory_gib
    for size in (16, 8, 4, 2):
        shape = {"model": model, "seq_len": seq_len, "micro_batch_size": size}
        shape["tokens_per_step"] = size * seq_len
        hungry = load_config("fp32", **shape, use_cache=True, optimizer_impl="foreach")
        hungry_gib = needed_gib(predict_memory(hungry, "this", keep_outputs=True))
        lean_gib = needed_gib(predict_memory(load_config("optimized", **shape), "this"))
        if 3 * hungry_gib + 13 * lean_gib <= free_gib:
            return size
    return 1


def arm_rows(config: Config, chosen: Sequence[str] = ()) -> list[Row]:
    """Return a row for each arm, or for those chosen, and the course's own as the last.

    Raises ConfigError for an arm that does not exist.
    """
    rows = []
    for arm in COMPETITORS:
        row = Row(arm.title, arm.name, config)
        if arm.needs and not find_spec(arm.needs):
            row.failed = f"needs {arm.needs}: pip install -e '.[bench]'"
        rows.append(row)
    if config.compile != "off":
        eager = config.model_copy(update={"compile": "off"})
        rows.append(Row(f"{OURS.title}, eager", OURS.name, eager))
    last = Row(f"{OURS.title}, compile {config.compile}", OURS.name, config)
    if not chosen:
        return [*rows, last]
    known = dict.fromkeys(row.arm for row in [*rows, last])
    if unknown := set(chosen) - known.keys():
        raise ConfigError(_unknown("--arms: no such arm", unknown, known))
    return [*(row for row in rows if row.arm in chosen), last]


def ablation_rows(
    config: Config, device: torch.device, share: tuple[int, int] = (1, 1)
) -> list[Row]:
    """Return a row for each switch that differs from the config; the config itself is the last.

    A row that this device cannot run says why. `share=(k, n)` returns the k-th of n shares of the
    rows. What `labutils.train` does for copies has no switch: two arms undo it.
    """
    rows = []
    for name, changes in ABLATIONS.items():
        if all(getattr(config, key) == value for key, value in changes.items()):
            continue
        row = Row(name, OURS.name, config.model_copy(update=changes))
        answer = here.support(row.config.precision, device)
        if not answer.ok:
            row.failed = answer.reason
        rows.append(row)
    for arm in LOOP_ABLATIONS:
        row = Row(arm.title, arm.name, config)
        if device.type != "cuda":
            row.failed = "only a GPU has copies to pin and steps to wait for"
        rows.append(row)
    k, n = share
    return [*rows[k - 1 :: n], Row(OURS.title, OURS.name, config)]
