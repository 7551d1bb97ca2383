"""What the solutions of a notebook consist of."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from tests.helpers import REPO, code_of

Change = tuple[str, str]  # old text, new text


@dataclass(frozen=True)
class Solution:
    """One exercise: what the notebook gives to its check, right answers, and wrong ones.

    A wrong answer is {words of its verdict: the answer}, a broken one {words: changes of the first
    right answer's source}. So each misconception stands here once.
    """

    given: Sequence[Any] = ()
    right: list[Any] = field(default_factory=list)
    wrong: dict[str, Any] = field(default_factory=dict)
    broken: dict[str, list[Change]] = field(default_factory=dict)

    def right_answers(self) -> list[Any]:
        """Return the right answers; a list may be a tuple."""
        return self.right + [tuple(answer) for answer in self.right if isinstance(answer, list)]

    def wrong_answers(self) -> dict[str, Any]:
        changed = {words: broken(self.right[0], *changes) for words, changes in self.broken.items()}
        return self.wrong | changed


def _read_values() -> dict[str, Solution]:
    path = REPO / "tests" / "solutions" / "values.yaml"
    rows = yaml.safe_load(path.read_text(encoding="utf-8"))
    return {name: Solution(**row) for name, row in rows.items()}


VALUES = _read_values()


def names_of(notebook: str, *cells: str, **names: Any) -> dict[str, Any]:
    """Return the names that cells of an optional notebook define, with those that they need."""
    sources = code_of(f"further/{notebook}.ipynb")
    for cell in cells:
        exec(sources[cell], names)
    return names


def broken(function: Callable, *changes: Change) -> Callable:
    """Return a function or a class whose source is changed: each (old, new) in turn."""
    source = inspect.getsource(function)
    for old, new in changes:
        assert old in source, old
        source = source.replace(old, new)
    namespace = dict(vars(sys.modules[function.__module__]))
    exec(source, namespace)
    return namespace[function.__name__]
