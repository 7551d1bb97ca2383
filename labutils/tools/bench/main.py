"""The commands of `python -m labutils bench`."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from importlib.util import find_spec
from typing import Any

import torch

from labutils.config.reader import load_config
from labutils.config.schema import Config, ConfigError
from labutils.files import commit, new_id, runs_dir, write_atomically
from labutils.machine.gpu import choose_device
from labutils.machine.here import device_name, environment
from labutils.prediction.memory import needed_gib, predict_memory
from labutils.techniques import precision
from labutils.tools.bench import scale
from labutils.tools.bench.compare import Row, run, save, table

QUICK = {"warmup": 2, "blocks": 2, "steps": 4}
NAMES = {
    "source": "the source's loop, as written",
    "corrected": "the same, corrected",
    "trainer": "Hugging Face Trainer",
    "plain": "plain GPT, bare loop",
    "plain_compiled": "plain GPT, bare loop, compiled",
    "ours_bare": "our model, bare loop",
}
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


def main(options: Any, overrides: dict[str, Any]) -> int:
    """Compare the arms, or with `--ablate` the switches of the optimized config; print, save,
    return an exit code.
    """
    where = choose_device()
    if options.scale is not None:
        name = overrides.get("precision", "bf16" if where.type == "cuda" else "fp32")
        return _scale(where, name, options.scale, options.quick)
    config = benchmark_config(where, overrides)
    rows = (
        ablation_rows(config, where, options.ablate)
        if options.ablate
        else arm_rows(config, options.arms)
    )
    how = (
        QUICK if options.quick else {"warmup": 10, "blocks": options.blocks, "steps": options.steps}
    )
    shape = f"{config.model}, {config.micro_batch_size} × {config.seq_len} tokens a step, {config.precision}"
    print(f"{device_name(where)}: {shape}; {how}")
    left_out = [row for row in rows if row.failed]
    run(rows, **how)
    print(table(rows).to_string())
    if where.type == "cuda":
        print(
            "where CUDA graphs replay, the peak is blind to what lives in their pool: see the reserved bytes there"
        )
    what = "ablation" if options.ablate else "arms"
    path = save(rows, f"{what}-quick" if options.quick else what)
    print(f"saved {path.name} and its figure in {path.parent}")
    return 0 if all(row.facts for row in rows if row not in left_out) else 1


def _scale(where: torch.device, name: str, names: Sequence[str], quick: bool) -> int:
    """Measure how cost grows; print, save, return an exit code."""
    chosen = scale.sweeps(where)
    if unknown := set(names) - set(chosen):
        raise ConfigError(
            f"bench --scale: no such sweep: {', '.join(sorted(unknown))}; there are: {', '.join(chosen)}"
        )
    chosen = {sweep: shapes for sweep, shapes in chosen.items() if not names or sweep in names}
    points = scale.run(
        where, name, {k: v[:2] for k, v in list(chosen.items())[:2]} if quick else chosen
    )
    print(scale.table(points).to_string())
    run_id, created = new_id()
    path = runs_dir() / f"bench-scale{'-quick' if quick else ''}-{run_id}.json"
    facts = {"what": "scale", "created": created, "commit": commit(), "precision": name}
    facts |= {"environment": environment(where), "points": [asdict(point) for point in points]}
    write_atomically(path, json.dumps(facts, indent=1).encode())
    scale.figure(
        points, f"GPT-2, {name}, eager; measured on {device_name(where)}", path.with_suffix(".png")
    )
    print(f"saved {path.name} and its figure in {path.parent}")
    return 0


def benchmark_config(where: torch.device, overrides: dict[str, Any]) -> Config:
    """Return the optimized config as it runs here:

    One micro-batch a step, a constant rate, compiled.
    """
    values: dict[str, Any] = {"name": "optimized", "lr_schedule": "constant", "lr_warmup_steps": 0}
    values |= {"compile": "reduce-overhead"} if where.type == "cpu" else {"seq_len": 1024}
    values |= overrides
    own = load_config("optimized").on(where.type)
    seq_len, size = (
        values.get("seq_len", own.seq_len),
        values.get("micro_batch_size", own.micro_batch_size),
    )
    if where.type == "cuda" and "micro_batch_size" not in overrides:
        size = _batch_that_fits(values.get("model", own.model), seq_len)
    values |= {"micro_batch_size": size, "tokens_per_step": size * seq_len}
    config = load_config("optimized", **values).on(where.type)
    if config.precision == "pure_bf16":
        raise ConfigError(
            "bench: the other arms keep float32 weights; precision: bf16 compares like with like"
        )
    has_bf16 = precision.support("bf16", where).ok
    return config.model_copy(
        update={"precision": precision.without_choice(config.precision, has_bf16)}
    )


def _batch_that_fits(model: str, seq_len: int) -> int:
    """Return the largest of 16, 8, … sequences with which all processes fit the free memory: they
    live side by side.

    Counted are three of the hungriest kind (Hugging Face's defaults in FP32) and 13 lean ones, as
    in an ablation.
    """
    free_gib = torch.cuda.mem_get_info()[0] / 2**30
    for size in (16, 8, 4, 2):
        shape = {
            "model": model,
            "seq_len": seq_len,
            "micro_batch_size": size,
            "tokens_per_step": size * seq_len,
        }
        hungry = load_config("fp32", **shape, use_cache=True, optimizer_impl="foreach")
        lean = load_config("optimized", **shape)
        asked = 3 * needed_gib(predict_memory(hungry, "this", keep_outputs=True)) + 13 * needed_gib(
            predict_memory(lean, "this")
        )
        if asked <= free_gib:
            return size
    return 1


def arm_rows(config: Config, chosen: Sequence[str] = ()) -> list[Row]:
    """Return a row for each arm, the course's own last; the Trainer needs accelerate."""
    rows = [Row(name, arm, config) for arm, name in NAMES.items()]
    if not find_spec("accelerate"):
        next(
            row for row in rows if row.arm == "trainer"
        ).failed = "needs accelerate: pip install -e '.[bench]'"
    if config.compile != "off":
        rows.append(
            Row("optimized config, eager", "ours", config.model_copy(update={"compile": "off"}))
        )
    rows.append(Row(f"optimized config, compile {config.compile}", "ours", config))
    unknown = set(chosen) - {row.arm for row in rows}
    if unknown:
        print(
            f"no such arm: {', '.join(sorted(unknown))}; there are: {', '.join([*NAMES, 'ours'])}",
            file=sys.stderr,
        )
    return [row for row in rows[:-1] if not chosen or row.arm in chosen] + rows[-1:]


def ablation_rows(
    config: Config, where: torch.device, share: tuple[int, int] = (1, 1)
) -> list[Row]:
    """Return one row for each switch that differs from the config and that this device has; the
    config itself last.

    `share=(k, n)`: the k-th of n shares of these rows. What `labutils.train` does for the copies has no switch: two
    arms undo it.
    """
    rows = []
    for name, changes in ABLATIONS.items():
        if all(getattr(config, key) == value for key, value in changes.items()):
            continue
        row = Row(name, "ours", config.model_copy(update=changes))
        answer = precision.support(row.config.precision, where)
        row.failed = answer.reason if not answer.ok else ""
        rows.append(row)
    for name, arm in (
        ("CPU and GPU wait each step", "ours_waiting"),
        ("copies not pinned", "ours_unpinned"),
    ):
        rows.append(
            Row(
                name,
                arm,
                config,
                failed="" if where.type == "cuda" else "a CPU copies and waits for nothing",
            )
        )
    k, n = share
    return [*rows[k - 1 :: n], Row("optimized config", "ours", config)]
