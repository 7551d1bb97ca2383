"""A reader's guesses: taken before the result, scored at the end of the notebook.

They live as long as the kernel. Nothing is printed until there is a guess, but in a student's copy,
whose guesses are `...` until the reader writes one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from types import EllipsisType

import pandas as pd

from labutils.training.noise import CANNOT_TELL, TOO_SMALL, PairedDifference

RIGHT_WITHIN = 0.2  # of the result: the models behind the guesses are not better
BY_HAND_WITHIN = 0.05  # of the prediction: who works it out by hand may round


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
    effect: PairedDifference | None = field(default=None, repr=False)  # `measured` is its mean

    @property
    def middle(self) -> float | None:
        """The number, or the middle of the range; None without a guess."""
        if self.value is not None:
            return self.value
        if self.low is None:
            return None
        return (self.low + self.high) / 2

    @property
    def made(self) -> str:
        """When the guess was made, "before" or "after the result"; "" without a guess."""
        if self.middle is None:
            return ""
        return "before" if self.was_early else "after the result"

    @property
    def score(self) -> str:
        """The score: "yes", "no", "as by hand" or CANNOT_TELL; "" without a guess or a result.

        A number is right within a fifth of the result, a range if the result lies in it. A guess is
        as by hand if it is what the notebook predicts and this missed. Where the result is too
        small to matter, a guess is right if it is too small as well. What cannot be told from noise
        has no score.
        """
        if self.middle is None or self.measured is None:
            return ""
        if self.effect and self.effect.verdict == CANNOT_TELL:
            return CANNOT_TELL
        is_right = self._is_near(self.measured, RIGHT_WITHIN)
        if self.effect and self.effect.verdict == TOO_SMALL:
            is_range = self.low is not None
            ends = (self.low, self.high) if is_range else (self.value,)
            is_right = all(map(self.effect.is_too_small, ends)) or (is_range and is_right)
        if is_right:
            return "yes"
        is_by_hand = self.predicted is not None and self._is_near(self.predicted, BY_HAND_WITHIN)
        return "as by hand" if is_by_hand else "no"

    def _is_near(self, number: float, tolerance: float) -> bool:
        if self.low is not None:
            return self.low <= number <= self.high
        return abs(self.value - number) <= tolerance * abs(number)


class GuessError(ValueError):
    """A guess that is no number and no range. A notebook shows its message alone."""

    def _render_traceback_(self) -> list[str]:  # IPython asks for it
        return [str(self)]


_guesses: dict[str, Guess] = {}


def guess(
    name: str,
    what: str,
    value: float | EllipsisType | None = None,
    *more: object,
    low: float | None = None,
    high: float | None = None,
) -> None:
    """Note a guess, a number or a range `low=…, high=…`, and say so. Without either do nothing.

    `what` says in words, with its unit, what is guessed. A guess that comes after the result is
    noted too, and `scores` says so; one that was there before it stays. Of a `value` that is still
    `...`, as in a student's copy, it says where to write. Raises GuessError for what is not a
    number or not a range, and for anything in `more`: 1,5 with a decimal comma is two arguments.
    """
    made = _guesses.setdefault(name, Guess(name, what))  # what is refused has a result all the same
    if value is ... and low is None and high is None:
        print(f"no guess yet: write a number in place of the three dots ({what})")
        return
    given = (None if value is ... else value, low, high)
    for number in given:
        # float() would take True and "16", and a later cell could not format them
        if number is not None and (isinstance(number, bool | str) or not _is_finite(number)):
            raise GuessError(f"{name}: a guess is a number, or low=… and high=…; got {number!r}")
    if more or (given[0] is not None and (low is not None or high is not None)):
        raise GuessError(f"{name}: give one number (1.5, not 1,5), or low=… and high=…")
    if (low is None) != (high is None):
        raise GuessError(f"{name}: a range needs both ends, low=… and high=…")
    if low is not None and low > high:
        raise GuessError(f"{name}: low is {low}, which is above high, {high}")
    has_result = made.measured is not None or made.predicted is not None
    # Run All runs this cell again: an equal guess is no new one, and stays as early as it is.
    if (made.value, made.low, made.high) != given:
        if has_result and made.made == "before":
            print(f"the result is there: your guess of before stays, {_shown(made)} ({what})")
            return
        made.was_early = not has_result
    made.what, made.value, made.low, made.high = what, *given
    if made.middle is not None:
        late = "" if made.was_early else ", after the result"
        print(f"noted{late}: {_shown(made)} ({what})")


def guessed(name: str) -> float | None:
    """Return the number that was guessed, or the middle of the range; None without a guess."""
    return _guesses[name].middle if name in _guesses else None


def _is_finite(number: object) -> bool:
    try:
        return abs(float(number)) < float("inf")  # False of NaN, too
    except (TypeError, ValueError):
        return False


def answer(
    name: str, measured: float | PairedDifference | None, predicted: float | None = None
) -> None:
    """Note the result of what was guessed, and print one line if there is a guess.

    What was measured in pairs knows whether it can be told from noise; then its mean is the
    result. None stands for what this device cannot measure. Raises ValueError for an unknown name.
    """
    if name not in _guesses:
        raise ValueError(f"{name!r} was never guessed; there are: {', '.join(_guesses) or 'none'}")
    made = _guesses[name]
    made.effect = measured if isinstance(measured, PairedDifference) else None
    number = made.effect.mean if made.effect else measured
    made.measured = None if number is None else float(number)
    made.predicted = None if predicted is None else float(predicted)
    if made.middle is None:
        return
    late = "" if made.was_early else " (made after the result)"
    if made.measured is not None:
        result = _cell(made.measured)
        print(f"your guess{late}: {_shown(made)}; result: {result:g}: {_verdict(made)}")
    elif made.predicted is not None:  # a prediction is no result: no verdict, no score
        print(f"your guess{late}: {_shown(made)}; no result here, predicted: {made.predicted:.4g}")


def _verdict(made: Guess) -> str:
    if made.score == CANNOT_TELL:
        return f"{CANNOT_TELL}, so it has no score"
    if made.score == "yes":
        return "right"
    if made.score == "as by hand":
        return f"as by hand, {made.predicted:.4g}, and this missed the result"
    if made.effect and made.effect.verdict == TOO_SMALL:
        return f"not right, since the result is {TOO_SMALL}"
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

    Numbers have four significant digits, large ones no decimals. A field is empty where there is
    no number.
    """
    rows = []
    for made in _guesses.values():
        rows.append(
            {
                "what": made.what,
                "your guess": _shown(made),
                "predicted": _cell(made.predicted),
                "measured": _cell(made.measured),
                "guess / measured": _cell(_ratio(made.middle, made.measured)),
                "predicted / measured": _cell(_ratio(made.predicted, made.measured)),
                "right": made.score,
                "made": made.made,
            }
        )
    # object: in a column of floats pandas would show the empty fields as NaN
    return pd.DataFrame(rows, dtype=object).set_index("what") if rows else pd.DataFrame()


def _ratio(a: float | None, b: float | None) -> float | None:
    return None if a is None or not b else a / b


def _cell(value: float | None) -> float | str:
    if value is None:
        return ""
    return round(value) if 1e4 <= abs(value) < math.inf else float(f"{value:.4g}")
