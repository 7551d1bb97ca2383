"""What the solutions of a notebook consist of."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import yaml
from torch.utils.checkpoint import checkpoint

import labutils as lab
from tests.helpers import code_of

Change = tuple[str, str]  # old text, new text


@dataclass(frozen=True)
class Solution:
    """One exercise: what the notebook gives to its check, right answers, and wrong ones.

    Given are arguments, or the names that a check reads which is a cell of an optional notebook.
    A wrong answer is {words of its verdict: the answer}, a broken one {words: changes of the first
    right answer's source}. So each misconception stands here once.
    """

    given: Any = ()
    right: list[Any] = field(default_factory=list)
    wrong: dict[str, Any] = field(default_factory=dict)
    broken: dict[str, list[Change]] = field(default_factory=dict)

    def right_answers(self) -> list[Any]:
        """Return the right answers; a list may be a tuple."""
        return self.right + [tuple(answer) for answer in self.right if isinstance(answer, list)]

    def wrong_answers(self) -> dict[str, Any]:
        changed = {words: broken(self.right[0], *changes) for words, changes in self.broken.items()}
        return self.wrong | changed


ROWS = yaml.safe_load(Path(__file__).with_name("values.yaml").read_text(encoding="utf-8"))
VALUES = {name: Solution(**row) for name, row in ROWS.items()}


def names_of(notebook: str, cells: str, **names: Any) -> dict[str, Any]:
    """Return the names that cells of an optional notebook define, with those that they need."""
    sources = code_of(f"further/{notebook}.ipynb")
    for cell in cells.split():
        exec(sources[cell], names)
    return names


def given(notebook: str, name: str, *changes: Change) -> Callable:
    """Return a function that a notebook defines, its source changed."""
    [source] = [source for source in code_of(notebook).values() if f"def {name}(" in source]
    source = re.search(rf"^def {name}\(.*\n(?:    .*\n|\n)+", source + "\n", re.M).group()
    return _defined(
        name, source, changes, {"lab": lab, "torch": torch, "F": F, "checkpoint": checkpoint}
    )


def broken(function: Callable, *changes: Change) -> Callable:
    """Return a function whose source is changed: each (old, new) in turn.

    Of the `apply` of a torch.autograd.Function it is the source of its class.
    """
    owner = getattr(function, "__self__", function)
    names = dict(vars(sys.modules[owner.__module__]))
    changed = _defined(owner.__name__, inspect.getsource(owner), changes, names)
    return changed if owner is function else changed.apply


def _defined(name: str, source: str, changes: Sequence[Change], names: dict[str, Any]) -> Any:
    for old, new in changes:
        assert old in source, old
        source = source.replace(old, new)
    exec(source, names)
    return names[name]
