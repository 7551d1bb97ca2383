"""List answers of different students that are nearly the same text. Nothing is judged by it."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from dataclasses import dataclass

from labutils.tools.grading.submissions import Task

N_WORDS = 6  # in a row
SHORTEST = 60  # words: below it answers are alike without being copied
MOST_PAIRS = 200
ALIKE = 0.9  # of the runs of words in either of the two


@dataclass(frozen=True)
class Pair:
    """Two students whose texts for an exercise share so large a part, from 0 to 1."""

    exercise: str
    one: str
    other: str
    share: float


def alike(tasks: Iterable[Task]) -> list[Pair]:
    """Return the pairs of students with nearly the same text, the most alike first.

    Names and comments count. No more than MOST_PAIRS are returned.
    """
    texts: dict[str, dict[str, frozenset]] = {}
    for task in tasks:
        runs = runs_of_words(task.text)
        if runs:
            texts.setdefault(task.exercise, {})[task.student] = runs
    pairs = []
    for exercise, of_student in texts.items():
        for (one, first), (other, second) in itertools.combinations(of_student.items(), 2):
            share = len(first & second) / len(first | second)
            if share >= ALIKE:
                pairs.append(Pair(exercise, one, other, round(share, 3)))
    return sorted(pairs, key=lambda pair: -pair.share)[:MOST_PAIRS]


def runs_of_words(text: str) -> frozenset[tuple[str, ...]]:
    """Return all runs of `N_WORDS` words and signs of a text; none of a short one."""
    words = re.findall(r"\w+|[^\w\s]", text)
    if len(words) < SHORTEST:
        return frozenset()
    return frozenset(zip(*(words[i:] for i in range(N_WORDS)), strict=False))
