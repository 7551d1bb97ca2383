"""Can a difference be told from noise? Two variants, run in pairs, and a pair that is identical."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

FEWEST_PAIRS = 5
CANNOT_TELL = "cannot tell here"


@dataclass(frozen=True)
class PairedDifference:
    """Differences `second - first` of pairs: their median, smallest and largest.

    `noise` is the largest difference, either way, between runs that are identical; None if there
    were none. `verdict` is "larger", "smaller" (the second's numbers) or CANNOT_TELL.
    """

    median: float
    low: float
    high: float
    noise: float | None
    n_pairs: int

    @property
    def verdict(self) -> str:
        """Whether five pairs or more differ the same way, by more than the noise if known."""
        agree = self.low > 0 or self.high < 0
        if self.n_pairs < FEWEST_PAIRS or not agree or abs(self.median) <= (self.noise or 0.0):
            return CANNOT_TELL
        return "larger" if self.median > 0 else "smaller"

    def __str__(self) -> str:
        spread = f"{self.low:+.3g} to {self.high:+.3g} in {self.n_pairs} pairs"
        if self.noise is not None:
            spread += f"; noise {self.noise:.3g}"
        return f"{self.median:+.3g} ({spread}): {self.verdict}"


def paired_difference(
    first: Sequence[float], second: Sequence[float], identical: Sequence[Sequence[float]] = ()
) -> PairedDifference:
    """Return how the second's numbers differ from the first's, pair by pair.

    Numbers of a pair were measured one after the other, or with the same seed. `identical` are two
    series that should not differ: their largest difference is the noise.
    Raises ValueError if the series are not equally long, or empty.
    """
    if not first or len(first) != len(second):
        raise ValueError(f"pairs need equally many numbers; got {len(first)} and {len(second)}")
    differences = [b - a for a, b in zip(first, second, strict=True)]
    noise = None
    if identical:
        noise = max(abs(b - a) for a, b in zip(*identical, strict=True))
    median = statistics.median(differences)
    return PairedDifference(median, min(differences), max(differences), noise, len(differences))
