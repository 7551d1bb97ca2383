"""Can a difference be told from noise? Numbers in pairs, and one rule for all notebooks.

Taught in can_you_tell, section 1.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from labutils import machine
from labutils.config.choices import PRECISIONS
from labutils.techniques.precision import products_dtype, tf32

CANNOT_TELL, TOO_SMALL = "cannot tell here", "too small to matter"
# Student's t for 95 % of both sides, by degrees of freedom from 1 on. Beyond the table its last
# value is used, which makes the interval a little too wide.
T_95 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)


# What is said of a ratio above 1, of one below, and of one far from 1; without a ratio, of a sign.
WORDS = {
    "": ("more", "less", ""),
    "time": ("slower", "less time", "as long"),
    "speed": ("", "", "as fast"),  # always so: 25 % more time is 20 % less speed
    "size": ("larger", "smaller", "as large"),
}


@dataclass(frozen=True)
class PairedDifference:
    """How the second numbers of pairs differ from the first, and what can be said of it.

    `mean` has a 95 % interval from `low` to `high`. They are of the differences second - first, in
    `unit`, or, where `of` is "time", "speed" or "size", of the ratios second / first, whose mean is
    the geometric one. `noise` is the interval of pairs that should be equal, if there were any.
    `verdict` is "larger" or "smaller", said of the second's numbers, TOO_SMALL or CANNOT_TELL.
    """

    mean: float
    low: float
    high: float
    n_pairs: int
    noise: tuple[float, float] | None
    verdict: str
    worth_telling: float
    of: str = ""
    unit: str = ""

    def __str__(self) -> str:
        word, less, as_much = WORDS[self.of]
        is_told = self.verdict in ("larger", "smaller")
        is_far = not 2 / 3 < self.mean < 1.5 or self.high > 3
        is_times = bool(as_much) and (not word or is_far)
        unit = "" if is_times or not self.unit else f" {self.unit}"
        numbers = (self.mean, self.low, self.high, *(self.noise or ()))
        mean, low, high, *noise = (self._shown(number, is_times) for number in numbers)
        pairs = f"{self.n_pairs} pairs"
        if noise and not is_told:
            pairs += f"; equal pairs {noise[0]} to {noise[1]}{unit}"
        if is_told and not is_times:
            if self.verdict == "smaller":
                word, low, high = less, high, low  # without signs the ends change places
            mean, low, high = (number.lstrip("+-") for number in (mean, low, high))
            return f"{mean}{unit} {word} ({low} to {high}{unit}, {pairs})"
        mean = f"{mean} times {as_much}" if is_times else f"{mean}{unit}"
        return f"{'' if is_told else self.verdict + ', '}{mean} ({low} to {high}{unit}, {pairs})"

    def _shown(self, number: float, is_times: bool) -> str:
        if is_times:
            return f"{number:.3g}"
        if not self.of:
            return f"{round(number, 12) + 0.0:+.3g}"  # neither a rounding error nor -0
        percent, more = round(100 * (number - 1), 9) + 0.0, int(self.high - self.low < 0.01)
        return f"{percent:+.{more}f}" if abs(percent) >= 10 else f"{percent:+.{2 + more}g}"

    def is_too_small(self, number: float) -> bool:
        """Return whether a difference, or a ratio, of this size would be too small to matter."""
        if self.of:
            return 1 / self.worth_telling < number < self.worth_telling
        return abs(number) < self.worth_telling


def paired_difference(
    first: Sequence[float],
    second: Sequence[float],
    identical: Sequence[Sequence[float]] = (),
    *,
    worth_telling: float,
    unit: str = "",
) -> PairedDifference:
    """Return by how much the second's numbers exceed the first's, pair by pair, in `unit`.

    Numbers of a pair were measured one after the other, or with the same seed. `identical` are two
    series that should not differ: the same thing measured twice, or, where a run is deterministic,
    the run and one whose weights were moved by an ulp or two. `worth_telling` is the smallest
    difference that somebody would care about.
    A pair with a number that is not finite is left out; `n_pairs` counts the others.
    Raises ValueError if two series are not equally long.
    """
    n_pairs, mean, low, high = interval(first, second)
    noise = interval(*identical)[2:] if identical else None
    # The rule of notebook 01. The whole interval is smaller than what matters; or it lies beyond
    # that of pairs that should be equal, on either side since their order means nothing.
    reach = max(map(abs, noise or (0.0,)))
    verdict = CANNOT_TELL
    if -worth_telling < low and high < worth_telling:
        verdict = TOO_SMALL
    elif low > reach:
        verdict = "larger"
    elif high < -reach:
        verdict = "smaller"
    return PairedDifference(mean, low, high, n_pairs, noise, verdict, worth_telling, unit=unit)


def paired_ratio(
    first: Sequence[float],
    second: Sequence[float],
    identical: Sequence[Sequence[float]] = (),
    *,
    worth_telling: float,
    of: str = "time",
) -> PairedDifference:
    """Return how many times the first's numbers the second's are, pair by pair.

    As `paired_difference`, but of logarithms, since a machine slows a step by a factor. `of` is
    what the numbers are, so that words fit: "time", "speed" or "size". `worth_telling` is a ratio
    above 1. Raises ValueError also for a number that is not positive.
    """
    logs = [list(map(math.log, series)) for series in (first, second, *identical)]
    of_logs = paired_difference(*logs[:2], logs[2:], worth_telling=math.log(worth_telling))
    mean, low, high = map(math.exp, (of_logs.mean, of_logs.low, of_logs.high))
    noise = of_logs.noise and tuple(map(math.exp, of_logs.noise))
    return PairedDifference(
        mean, low, high, of_logs.n_pairs, noise, of_logs.verdict, worth_telling, of, unit="%"
    )


def interval(first: Sequence[float], second: Sequence[float]) -> tuple[int, float, float, float]:
    """Return (n, mean, low, high) of second - first: the mean and its 95 % interval by Student's t.

    In 95 of 100 cases the interval has the mean of what this machine does in this minute, if the
    differences are about normal; an hour later the machine may do something else. It is infinite
    below two differences, since one number says nothing about its spread.
    """
    differences = [b - a for a, b in zip(first, second, strict=True)]
    differences = [difference for difference in differences if math.isfinite(difference)]
    n = len(differences)
    mean = statistics.fmean(differences) if n else math.nan
    if n < 2:
        return n, mean, -math.inf, math.inf
    half = student_t(n) * statistics.stdev(differences) / n**0.5
    return n, mean, mean - half, mean + half


def student_t(n_pairs: int) -> float:
    """Return Student's t for 95 % on both sides, of the mean of two or more differences.

    Raises ValueError for fewer than two.
    """
    if n_pairs < 2:
        raise ValueError(f"an interval needs two pairs or more; there are {n_pairs}")
    return T_95[min(n_pairs - 1, len(T_95)) - 1]


# ---- Numbers in pairs


def alternate(
    variants: Mapping[str, Callable[[], object]],
    rounds: int,
    device: torch.device,
    passes: int = 1,
) -> dict[str, list[float]]:
    """Return {name: the milliseconds of each round}, after one pass that does not count.

    A pass runs every variant once, in a shuffled order, the same in each call: no variant always
    follows the same one, and none runs twice in a row more often than the others. A round keeps the
    fastest of its passes, since what disturbs a machine makes it slower, never faster. On a CUDA
    device the end is awaited. The numbers of a round are pairs for `paired_ratio`.
    """
    timers = {name: partial(_timed_ms, call, device) for name, call in variants.items()}
    times = _in_turns(timers, 1 + rounds * passes)
    for name, series in times.items():
        times[name] = np.reshape(series[1:], (rounds, passes)).min(axis=1).tolist()
    return times


def _in_turns(calls: Mapping[str, Callable[[], float]], times: int) -> dict[str, list[float]]:
    """Return {name: what its calls give}; each is called so many times, in a shuffled order."""
    numbers: dict[str, list[float]] = {name: [] for name in calls}
    names, shuffled = list(calls), random.Random(0)
    with machine.late_bar("timing", total=times * len(names)) as bar:
        for _ in range(times):
            shuffled.shuffle(names)
            for name in names:
                numbers[name].append(calls[name]())
                bar.update()
    return numbers


def _timed_ms(call: Callable[[], object], device: torch.device) -> float:
    wait = torch.cuda.synchronize if device.type == "cuda" else int  # int() does nothing
    wait()
    start = time.perf_counter()
    call()
    wait()
    return (time.perf_counter() - start) * 1000


FASTER_PRODUCT = 1.1  # a product that is 10 % faster makes a step a few percent faster


def product_speeds(
    precisions: Sequence[str], device: torch.device, rounds: int = 5
) -> dict[str, PairedDifference]:
    """Return {precision: the speed of a product, × float32's}; "larger" is faster.

    The product is n×n by n×n: 4096 on CUDA and 256 on a CPU. Each round measures float32 twice and
    the others, in a shuffled order: the two of float32 are the equal pair. A precision that the
    device lacks is left out.
    """
    n = 4096 if device.type == "cuda" else 256
    usable = [name for name in precisions if machine.support(name, device).ok]
    measured = {"base": "fp32", "again": "fp32"} | dict(zip(usable, usable, strict=True))
    calls = {key: partial(_product_rate, name, device, n) for key, name in measured.items()}
    rates, speeds = _in_turns(calls, rounds), {}
    identical = rates["base"], rates["again"]
    for name in usable:
        speeds[name] = paired_ratio(
            rates["base"], rates[name], identical, worth_telling=FASTER_PRODUCT, of="speed"
        )
    return speeds


def _product_rate(precision: str, device: torch.device, n: int) -> float:
    with tf32(PRECISIONS[precision].tf32):
        return machine.matmul_rate(products_dtype(precision), device, n)
