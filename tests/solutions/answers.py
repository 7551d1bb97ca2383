"""What the solutions of each notebook consist of."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Solution:
    """One exercise: what the notebook gives to its check, right answers, and wrong ones.

    Each wrong answer comes with words of the verdict that it must get.
    """

    exercise: str
    given: tuple = ()
    right: list[Any] = field(default_factory=list)
    wrong: list[tuple[Any, str]] = field(default_factory=list)


def broken(function: Callable, *changes: tuple[str, str]) -> Callable:
    """Return a function or a class whose source lines are replaced: each (old, new) in turn."""
    source = inspect.getsource(function)
    for old, new in changes:
        assert old in source, old
        source = source.replace(old, new)
    namespace = dict(vars(sys.modules[function.__module__]))
    exec(source, namespace)
    changed = namespace[function.__name__]
    changed.source = source  # inspect finds none
    return changed
