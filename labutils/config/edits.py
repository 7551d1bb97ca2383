"""Edits of a config that change nothing on a CPU, because `when_cpu` sets the same key."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from labutils.config import reader
from labutils.config.yaml_source import Source, mapping, read_node


def edits_without_effect(path: str | os.PathLike[str]) -> list[str]:
    """Return a line for each edited value that a CPU run does not use, with both positions.

    Edited is what differs from the shipped config that the file resembles most: a config has no
    other memory of what it was copied from. Reads a config that `load_config` has accepted.
    """
    path = reader.find_config(path)
    source, values = _values(path)
    when_cpu = values.pop("when_cpu", None) or {}
    shipped = [_values(file)[1] for file in sorted(reader.CONFIGS_DIR.glob("*_config.yaml"))]
    if not shipped:
        return []
    origin = min(shipped, key=lambda other: _differences(values, other))
    lines = []
    for key, used in when_cpu.items():
        value = values.get(key, used)
        if value in (used, origin.get(key)):
            continue
        edited, overriding = source.marks[(key,)][0], source.marks[("when_cpu", key)][0]
        lines.append(
            f"{source.label}:{edited.line + 1}: `{key}: {value}` is not used on a CPU: `when_cpu` "
            f"sets {used} in line {overriding.line + 1}. Edit that line too"
        )
    return lines


def _values(path: Path) -> tuple[Source, dict[str, Any]]:
    source = Source(reader.shown(path))
    node = read_node(path, source)
    return source, mapping(node, source) if node else {}


def _differences(values: dict[str, Any], other: dict[str, Any]) -> int:
    return sum(values.get(key) != value for key, value in other.items() if key != "when_cpu")
