"""What several commands take: a config, a number, an amount; and what the Tab key offers."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from labutils.config.yaml_source import short_names
from labutils.files import runs_dir

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


def add_overrides(parser: argparse.ArgumentParser, text: str = "override a value") -> None:
    parser.add_argument(
        "--set", metavar="KEY=VALUE", action="append", default=[], dest="pairs", help=text
    )
