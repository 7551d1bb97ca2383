"""Can a difference be told from noise? Numbers in pairs, and one rule for all notebooks."""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from labutils import machine
from labutils.config.choices import PRECISIONS
from labutils.techniques.precision import products_dtype, tf32

CANNOT_TELL = "cannot tell here"
UNKNOWN = (math.nan, math.nan, math.nan)
# Student's t for 95 % of both sides, by degrees of freedom from 1 on. Beyond the table its last
# value is used, which makes the interval a little too wide.
T_95 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)


@dataclass(frozen=True)
class PairedDifference:
    """How the second numbers of pairs differ from the first, and what can be said of it.

    `mean` with its 95 % interval from `low` to `high`: of the differences second - first, or, if
    `is_ratio`, of the ratios second / first (the mean is then the geometric one). `noise_low` and
    `noise_high` are the interval of pairs that should be equal, NaN if there were none.
    `worth_telling` is the smallest difference, or ratio above 1, that somebody would care about.
    `verdict` is "larger", "smaller" (the second's numbers) or CANNOT_TELL.
    """

    mean: float
    low: float
    high: float
    n_pairs: int
    noise_low: float
    noise_high: float
    worth_telling: float
    is_ratio: bool
    verdict: str

    def __str__(self) -> str:
        form = "{:.3g}×" if self.is_ratio else "{:+.3g}"
        low, high = form.format(self.low), form.format(self.high)
        text = f"{form.format(self.mean)} (95 % interval {low} to {high}, {self.n_pairs} pairs"
        if not math.isnan(self.noise_low):
            noise = form.format(self.noise_low), form.format(self.noise_high)
            text += f"; equal pairs {noise[0]} to {noise[1]}"
        return f"{text}): {self.verdict}"


def paired_difference(
    first: Sequence[float],
    second: Sequence[float],
    identical: Sequence[Sequence[float]] = (),
    *,
    worth_telling: float,
) -> PairedDifference:
    """Return by how much the second's numbers exceed the first's, pair by pair.

    Numbers of a pair were measured one after the other, or with the same seed. `identical` are two
    series that should not differ: the same thing measured twice, or, where a run is deterministic,
    the run and one whose weights were moved by an ulp or two. `worth_telling` is in their unit.
    A pair with a number that is not finite is left out; `n_pairs` counts the others.
    Raises ValueError if two series are not equally long, or empty.
    """
    return _paired(first, second, identical, worth_telling, is_ratio=False)


def paired_ratio(
    first: Sequence[float],
    second: Sequence[float],
    identical: Sequence[Sequence[float]] = (),
    *,
    worth_telling: float,
) -> PairedDifference:
    """Return how many times the first's numbers the second's are, pair by pair: for times, rates.

    As `paired_difference`, but of logarithms, since a machine slows a step by a factor.
    `worth_telling` is a ratio above 1. Raises ValueError also for a number that is not positive.
    """
    return _paired(first, second, identical, worth_telling, is_ratio=True)


def verdict(
    difference: tuple[float, float, float], noise: tuple[float, float, float], worth_telling: float
) -> str:
    """Return "larger", "smaller" or CANNOT_TELL for two `interval`s: the rule of notebook 01.

    The interval must leave out 0, must lie beyond the interval of pairs that should be equal, on
    either side since their order means nothing, and the mean must exceed `worth_telling`.
    """
    mean, low, high = difference
    _, noise_low, noise_high = noise
    reach = max(abs(noise_low), abs(noise_high))
    if low > reach and mean > worth_telling:
        return "larger"
    if high < -reach and -mean > worth_telling:
        return "smaller"
    return CANNOT_TELL


def interval(differences: Sequence[float]) -> tuple[float, float, float]:
    """Return (mean, low, high): the mean and its 95 % interval by Student's t.

    The interval has the true mean in 95 of 100 cases if the differences are about normal. It is
    infinite for one difference, since one number says nothing about its spread.
    """
    mean, n = statistics.fmean(differences), len(differences)
    if n == 1:
        return mean, -math.inf, math.inf
    t = T_95[min(n - 1, len(T_95)) - 1]
    half = t * statistics.stdev(differences) / n**0.5
    return mean, mean - half, mean + half


def _paired(
    first: Sequence[float],
    second: Sequence[float],
    identical: Sequence[Sequence[float]],
    worth_telling: float,
    is_ratio: bool,
) -> PairedDifference:
    differences = _differences(first, second, is_ratio)
    difference = interval(differences) if differences else UNKNOWN
    equal_pairs = _differences(*identical, is_ratio) if identical else []
    noise = interval(equal_pairs) if equal_pairs else UNKNOWN
    rule = verdict(
        difference,
        noise if equal_pairs else (0.0, 0.0, 0.0),
        math.log(worth_telling) if is_ratio else worth_telling,
    )
    numbers = [*difference, *noise[1:]]
    if is_ratio:
        numbers = [math.exp(number) for number in numbers]
    mean, low, high, noise_low, noise_high = numbers
    return PairedDifference(
        mean, low, high, len(differences), noise_low, noise_high, worth_telling, is_ratio, rule
    )


def _differences(first: Sequence[float], second: Sequence[float], is_ratio: bool) -> list[float]:
    if not first or len(first) != len(second):
        raise ValueError(f"pairs need equally many numbers; got {len(first)} and {len(second)}")
    if is_ratio and min(*first, *second) <= 0:
        raise ValueError("a ratio needs positive numbers")
    differences = []
    for a, b in zip(first, second, strict=True):
        if math.isfinite(a) and math.isfinite(b):
            differences.append(math.log(b / a) if is_ratio else b - a)
    return differences


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
    device the end is awaited. The numbers of a round are pairs for `paired_ratio`. Raises
    ValueError if there is no round, or no pass.
    """
    if rounds < 1 or passes < 1:
        raise ValueError(f"at least one round of one pass is timed; got {rounds} of {passes}")
    times: dict[str, list[float]] = {name: [] for name in variants}
    names, shuffled = list(variants), random.Random(0)
    for number in range(rounds * passes + 1):
        shuffled.shuffle(names)
        for name in names:
            milliseconds = _timed_ms(variants[name], device)
            if number:
                times[name].append(milliseconds)
    for name, series in times.items():
        starts = range(0, len(series), passes)
        times[name] = [min(series[start : start + passes]) for start in starts]
    return times


def _timed_ms(variant: Callable[[], object], device: torch.device) -> float:
    _wait(device)
    start = time.perf_counter()
    variant()
    _wait(device)
    return (time.perf_counter() - start) * 1000


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


FASTER_PRODUCT = 1.1  # a product that is 10 % faster makes a step a few percent faster


def product_speeds(
    precisions: Sequence[str], device: torch.device, n: int = 0, rounds: int = 5
) -> dict[str, PairedDifference]:
    """Return {precision: the speed of a product, × float32's}; "larger" is faster.

    The product is n×n by n×n: 4096 on CUDA and 256 on a CPU, if `n` is 0. Each round measures
    float32 twice and the others, in a shuffled order: the two of float32 are the equal pair. A
    precision that the device lacks is left out.
    """
    n = n or (4096 if device.type == "cuda" else 256)
    usable = [name for name in precisions if machine.support(name, device).ok]
    rates: dict[str, list[float]] = {name: [] for name in ("base", "again", *usable)}
    names, shuffled = list(rates), random.Random(0)
    for _ in range(rounds):
        shuffled.shuffle(names)
        for name in names:
            row = PRECISIONS[name if name in usable else "fp32"]
            with tf32(row.tf32):
                rates[name].append(machine.matmul_rate(products_dtype(row.name), device, n))
    equal_pair = (rates["base"], rates["again"])
    speeds = {}
    for name in usable:
        speeds[name] = paired_ratio(
            rates["base"], rates[name], equal_pair, worth_telling=FASTER_PRODUCT
        )
    return speeds
