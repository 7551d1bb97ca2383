"""What several commands take: a config, a number, an amount; and what the Tab key offers."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from labutils.config.yaml_source import short_names
from labutils.files import runs_dir
from labutils.tools import commands

Add = Callable[[str, Callable[[argparse.Namespace], int], str], argparse.ArgumentParser]


def add_config(parser: argparse.ArgumentParser, text: str, **options: Any) -> None:
    parser.add_argument("config", help=text, **options).completer = _configs


def _configs(**_: object) -> list[str]:
    """Return what the Tab key offers for a config: short names, and YAML files here."""
    return [*short_names(), *map(str, Path().glob("*.yaml"))]


def run_names(**_: object) -> list[str]:
    """Return what the Tab key offers for a run: the names of records."""
    return sorted({path.stem.rsplit("-", 3)[0] for path in runs_dir().glob("*-*-*-*.json")})


def count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def positive(text: str, expected: str = "a number above 0") -> float:
    problem = f"{text!r} is not {expected}"
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(problem) from None
    if not 0 < value < 1e6:  # nor is "nan" or "inf"
        raise argparse.ArgumentTypeError(problem)
    return value


def gib(text: str) -> float:
    return positive(text, "an amount of memory; expected GiB, for example 8")


def share(text: str) -> tuple[int, int]:
    """Return (2, 4) for "2/4"."""
    k, _, n = text.partition("/")
    if not (k.isdecimal() and n.isdecimal() and 1 <= int(k) <= int(n)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a share; expected K/N, for example 2/4")
    return int(k), int(n)


def add_overrides(parser: argparse.ArgumentParser, text: str = "override a value") -> None:
    parser.add_argument(
        "--set", metavar="KEY=VALUE", action="append", default=[], dest="pairs", help=text
    )


def add_bench(add: Add) -> None:
    bench = add(
        "bench",
        commands.bench,
        "compare the optimized config with what a user would write instead, in turns",
    )
    bench.add_argument(
        "--quick", action="store_true", help="few steps: tests the harness, not the speed"
    )
    bench.add_argument(
        "--ablate",
        nargs="?",
        const=(1, 1),
        type=share,
        metavar="K/N",
        help="take back one of its switches in each row; K/N: the K-th of N shares of the rows",
    )
    bench.add_argument(
        "--scale",
        nargs="*",
        metavar="SWEEP",
        help="how cost grows with batch, length, layers, width and vocabulary, or some of them",
    )
    bench.add_argument(
        "--arms", nargs="+", default=[], metavar="ARM", help="beside ours, these arms only"
    )
    bench.add_argument("--blocks", type=count, default=7, help="timed blocks of each arm (7)")
    bench.add_argument("--steps", type=count, default=10, help="steps in a block (10)")
    add_overrides(bench)
