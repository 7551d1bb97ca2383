"""Commands on config files (check, new) and on the course (doctor, labs, bench).

Each takes the parsed options and returns an exit code. What needs torch is imported late.
"""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from labutils.config import reader
from labutils.config.edits import edits_without_effect
from labutils.config.reader import find_config, load_config, parse_overrides
from labutils.config.schema import NAME_PATTERN, Config, ConfigError
from labutils.files import program, require_room, runs_dir

if TYPE_CHECKING:
    import torch

    from labutils.prediction.calibrate_cpu import Measured


def check(options: argparse.Namespace) -> int:
    """Load each file and print whether it is right; every mistake goes to stderr."""
    code = 0
    for path in options.config:
        try:
            load_config(path)
        except ConfigError as error:
            print(error, file=sys.stderr)
            code = 1
        else:
            print(f"{path}: ok")
            for line in edits_without_effect(path):
                print(line, file=sys.stderr)
    return code


def new(options: argparse.Namespace) -> int:
    """Copy a config to configs/my_NAME.yaml, with a name of its own."""
    name = options.name.removeprefix("my_").removesuffix(".yaml")
    if not re.match(NAME_PATTERN, name):
        rule = "letters, digits and . + - _ =, at most 60"
        print(f"{name!r} is not a valid run name: {rule}", file=sys.stderr)
        return 2
    target = reader.CONFIGS_DIR / f"my_{name}.yaml"
    source = find_config(options.source)
    text = _renamed(source, load_config(source), name)
    try:
        with target.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        return _exists(target.name)
    except OSError as error:  # a checkout that one may only read
        copy = f"copy {source} into a folder of your own, then: {program()} run FILE"
        raise ConfigError(f"cannot write {target}: {error.strerror}; {copy}") from error
    run = f"{program()} run configs/{target.name}"
    print(f"wrote configs/{target.name}. Edit it, then: {run}")
    return 0


def _renamed(source: Path, config: Config, name: str) -> str:
    """Return the text of a config file under another name, with a header of its own."""
    lines = source.read_text(encoding="utf-8").splitlines()
    start = 0
    while start < len(lines) and not lines[start].startswith("name:"):
        start += 1
    if start + 1 >= len(lines) or not lines[start + 1].startswith("note:"):
        raise ConfigError(
            f"{source.name} is not laid out like the files in configs/: "
            "name, then note, one line each"
        )
    header = [
        f"# my_{name}.yaml — a copy of {source.name} to edit; git ignores it.",
        f"# Run: {program()} run configs/my_{name}.yaml",
    ]
    for line in lines[:start]:
        if "yaml-language-server" in line:  # the comment by which an editor finds the schema
            header.append(line)
    named = [f"name: {name}", f'note: "copied from {config.name}; say here what you changed"']
    return "\n".join([*header, *named, *lines[start + 2 :]]) + "\n"


def _exists(path: Path | str) -> int:
    print(f"{path} exists already; choose another name, or delete it first", file=sys.stderr)
    return 1


def doctor(options: argparse.Namespace) -> int:
    """Print what this machine is and what it can train; 1 if it has a GPU it cannot use."""
    from labutils.config.choices import PRECISIONS
    from labutils.machine.gpu import choose_device, diagnose, gpu_facts
    from labutils.machine.here import environment, support
    from labutils.tools.doctor import paragraph
    from labutils.tools.tables import terminal_width

    problem = diagnose(gpu_facts())
    device = choose_device()
    for key, value in environment(device).items():
        print(f"{key:15s} {value}")
    for name in PRECISIONS:
        answer = support(name, device)
        verdict = "yes" if answer.ok else "no"
        if answer.slow:
            verdict = "slow"
        print(f"{name:15s} {verdict:5s} {answer.reason}")
    print(f"{'runs':15s} {runs_dir()}")
    if problem:
        print(f"\nGPU NOT USED: {problem}", file=sys.stderr)
    elif device.type == "cpu":
        print("\nNo NVIDIA GPU found.")
    print(f"\n{textwrap.fill(paragraph(device, problem), min(100, terminal_width()))}")
    require_room()
    if options.calibrate:
        _calibrate(device)
    return 1 if problem else 0


def _calibrate(device: torch.device) -> None:
    """Measure this machine and print what large operations reach."""
    from labutils.prediction.calibrate import calibrate_cpu, calibrate_gpu

    print(f"\nmeasuring {device.type} operations …")
    if device.type == "cuda":
        speed = calibrate_gpu(device)
        for kind, tflops in speed.reached.items():
            print(f"{kind:15s} products {tflops:.1f} TFLOP/s")
        print(f"{'memory':15s} {speed.gb_per_s:.0f} GB/s, norms {100 * speed.rows:.0f} % of that")
        return
    rates = calibrate_cpu()
    for kind, products in rates.products.items():
        gflops = max(work / seconds for work, seconds in _points(products)) / 1e9
        print(f"{kind:15s} products up to {gflops:.0f} GFLOP/s")
    for kind, calls in rates.kinds.items():
        low, *_, high = (work / seconds / 1e9 for work, seconds in _points(calls))
        print(f"{kind:22s} {low:.1f} GB/s for small tensors, {high:.1f} for the largest")
    print(f"{'a call':22s} {1e6 * rates.call_seconds:.0f} µs besides what it computes")


def _points(measured: Measured) -> Iterator[tuple[float, float]]:
    return zip(measured.work, measured.seconds, strict=True)


def labs(options: argparse.Namespace) -> int:
    """Execute notebooks, the four or those named; or write copies for students, of all of them."""
    from labutils.pages import (
        all_notebooks,
        core_notebooks,
        execute,
        find_notebook,
        write_index,
        write_student_copy,
    )

    unnamed = all_notebooks() if options.student else core_notebooks()
    chosen = [find_notebook(name) for name in options.notebook] or unnamed
    if options.student:
        for path in chosen:
            print(f"wrote {write_student_copy(path, options.student)}, without outputs")
        return 0
    code = 0
    require_room()  # said now, and not after minutes
    for path in chosen:
        if not execute(path, in_place=options.in_place):
            code = 1
    from labutils.exhibits.everything import save_all

    if not options.notebook:
        print(f"wrote {save_all()}")
    print(f"wrote {write_index()}: it leads to all pages")
    return code


def grade(options: argparse.Namespace) -> int:
    """Run a class's notebooks."""
    from labutils.grade import grade_folder

    out = options.out or runs_dir() / "grades"
    scores = grade_folder(options.folder, out, timeout=options.timeout, jobs=options.jobs)
    print(scores["right"].to_string())
    print(f"wrote {out / 'scores.csv'} and {out / 'misconceptions.csv'}")
    return 0


def bench(options: argparse.Namespace) -> int:
    """Run the benchmark."""
    overrides = parse_overrides(options.pairs)
    from labutils.tools.bench.main import main

    return main(options, overrides)
