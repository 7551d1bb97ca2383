"""Which code decides a run's numbers: an older record is not reused once it has changed."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent
DECIDES_NOTHING = "labutils.prediction"  # warns before a run and advises after it


@lru_cache
def code_version(start: str = "experiment.py") -> str:
    """Return a hash of the modules that decide a run's numbers: those behind `training/start`."""
    digest = hashlib.sha256()
    for path in sorted(modules_behind(PACKAGE / "training" / start)):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def modules_behind(path: Path) -> set[Path]:
    """Return a module's file with those of all modules of the package that it imports, directly or
    not.
    """
    found: set[Path] = set()
    to_read = [path]
    while to_read:
        one = to_read.pop()
        if one not in found:
            found.add(one)
            to_read += imported_files(one)
    return found


def imported_files(path: Path) -> Iterator[Path]:
    """Yield the files of the package that a module imports by itself."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.ImportFrom) or not str(node.module).startswith("labutils"):
            continue
        if node.module.startswith(DECIDES_NOTHING):
            continue
        folder = PACKAGE.joinpath(*node.module.split(".")[1:])
        candidates = [
            folder.with_suffix(".py"),
            *(folder / f"{alias.name}.py" for alias in node.names),
        ]
        yield from (file for file in candidates if file.is_file())
