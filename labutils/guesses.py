"""A reader's guesses: taken before the result, scored at the end of the notebook.

They live as long as the kernel. Nothing is printed until there is a guess.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pandas as pd


@dataclass
class Guess:
    """One guess: a number, or a range from `low` to `high`. All are None if none was made.

    `was_early` says whether it was made before the result was there, or a prediction in its place.
    """

    name: str
    what: str
    value: float | None = None
    low: float | None = None
    high: float | None = None
    was_early: bool = True
    predicted: float | None = field(default=None, repr=False)
    measured: float | None = field(default=None, repr=False)

    def __bool__(self) -> bool:
        return self.middle is not None

    @property
    def middle(self) -> float | None:
        """The number, or the middle of the range."""
        if self.value is not None:
            return self.value
        if self.low is None:
            return None
        return (self.low + self.high) / 2

    @property
    def is_right(self) -> bool | None:
        """Whether the result lies in the range, a tenth around a number. None: not to be said."""
        if not self or self.measured is None:
            return None
        if self.low is not None:
            return self.low <= self.measured <= self.high
        return abs(self.value - self.measured) <= 0.1 * abs(self.measured)


_guesses: dict[str, Guess] = {}


def guess(
    name: str,
    what: str,
    value: float | None = None,
    *more: object,
    low: float | None = None,
    high: float | None = None,
) -> Guess:
    """Take a guess: a number, or a range `low=…, high=…`. Without either the cell does nothing.

    `what` says in words, with its unit, what is guessed. A guess that comes after the result is
    taken too, and `scores` says so. Raises ValueError for what is not a number or not a range, and
    for `more` than a number: what a decimal comma makes of it.
    """
    given = (value, low, high)
    for number in given:
        if number is not None and (isinstance(number, bool | str) or not _is_finite(number)):
            raise ValueError(f"{name}: a guess is a number, or low=… and high=…; got {number!r}")
    if more or (value is not None and (low is not None or high is not None)):
        raise ValueError(f"{name}: give one number (1.5, not 1,5), or low=… and high=…")
    if (low is None) != (high is None):
        raise ValueError(f"{name}: a range needs both ends, low=… and high=…")
    if low is not None and low > high:
        raise ValueError(f"{name}: low is {low}, which is above high, {high}")
    before = _guesses.get(name)
    made = Guess(name, what, value, low, high)
    if before is not None:
        made.predicted, made.measured = before.predicted, before.measured
        is_same = (before.value, before.low, before.high) == given
        is_open = before.measured is None and before.predicted is None
        made.was_early = before.was_early if is_same and before else is_open
    _guesses[name] = made
    return made


def _is_finite(number: object) -> bool:
    try:
        return abs(float(number)) < float("inf")
    except (TypeError, ValueError):
        return False


def answer(name: str, measured: float | None, predicted: float | None = None) -> Guess:
    """Note the result of what was guessed, and print one line if there is a guess.

    None stands for what this device cannot measure. Raises ValueError for an unknown name.
    """
    if name not in _guesses:
        raise ValueError(f"{name!r} was never guessed; there are: {', '.join(_guesses) or 'none'}")
    made = _guesses[name]
    made.measured = None if measured is None else float(measured)
    made.predicted = None if predicted is None else float(predicted)
    if made and made.measured is not None:
        late = "" if made.was_early else " (made after the result)"
        print(f"your guess{late}: {_shown(made)}; measured: {made.measured:.4g}: {_verdict(made)}")
    elif made and made.predicted is not None:  # a prediction is no result: no verdict, no score
        print(f"your guess: {_shown(made)}; predicted, not measured here: {made.predicted:.4g}")
    return made


def _verdict(made: Guess) -> str:
    if made.is_right:
        return "right"
    if made.measured == 0:
        return "not right"
    return f"{made.middle / made.measured:.2g} times the result"


def _shown(made: Guess) -> str:
    if made.value is not None:
        return f"{made.value:g}"
    if made.low is None:
        return ""
    return f"{made.low:g} to {made.high:g}"


def scores() -> pd.DataFrame:
    """Return a table: each guess, the prediction beside it, the result, and how near both came.

    Numbers have four significant digits. A field is empty where there is no number.
    """
    rows = []
    for made in _guesses.values():
        is_right = made.is_right
        rows.append(
            {
                "what": made.what,
                "your guess": _shown(made),
                "predicted": _cell(made.predicted),
                "measured": _cell(made.measured),
                "guess / measured": _cell(_ratio(made.middle, made.measured)),
                "predicted / measured": _cell(_ratio(made.predicted, made.measured)),
                "right": "" if is_right is None else ("yes" if is_right else "no"),
                "made": "" if not made else ("before" if made.was_early else "after the result"),
            }
        )
    # object: in a column of floats pandas would show the empty fields as NaN
    return pd.DataFrame(rows, dtype=object).set_index("what") if rows else pd.DataFrame()


def _ratio(a: float | None, b: float | None) -> float | None:
    return None if a is None or not b else a / b


def _cell(value: float | None) -> float | str:
    return "" if value is None else float(f"{value:.4g}")
