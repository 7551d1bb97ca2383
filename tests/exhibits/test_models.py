"""The models of exhibits, called by node, against the answers of Python and torch."""

from __future__ import annotations

import math
import random
from collections import Counter
from contextlib import suppress
from functools import reduce
from itertools import pairwise, product
from operator import attrgetter

import pytest
import torch

import labutils as lab
from benchmarks.exhibit_tables import WINDOW, counted, window_config
from labutils.exhibits import play, seeds_data
from labutils.exhibits.exhibit import described, table_of
from labutils.prediction.allocator import (
    DEFAULT,
    EXPANDABLE,
    CachingAllocator,
    OutOfMemory,
    Settings,
)
from labutils.techniques.numerics import FP16, FloatFormat, fp16_fate

MIB = 2**20
NAME = attrgetter("name")


@pytest.mark.parametrize(
    ("name", "call", "right"),
    [
        ("amdahl", "[amdahl(0.5, 4), amdahl(0.5, Infinity), amdahl(0, 4)]", [1.6, 2, 1]),
        ("allreduce", "[sentBytes(8, 1e6, { exponent: 5, mantissa: 10 })]", [3.5e6]),
        # three segments' inputs and the first one's layers; without a kept segment, and with one
        ("segments", "Object.values(cost([4, 2, 2], 3, false)).slice(1)", [13, 3, 1, 8, 15]),
        ("segments", "Object.values(cost([2, 2, 4], 3, true)).slice(1)", [15, 15, 0, 4, 15]),
        # 2 targets and 1: each weighs 1/3; the mean of means gives each of them 1/4, and 1/2
        ("window", "Object.values(weigh([3, 2])).flat()", [2, 1, 1 / 3, 1 / 4, 1 / 2, 0.1**0.5]),
    ],
)
def test_what_one_can_compute_by_hand(node, name, call, right):
    assert node(name, f"() => {call}") == pytest.approx(right, rel=1e-12)


@pytest.mark.parametrize("fmt", [fmt for fmt in play.NUMBER_FORMATS if fmt.dtype], ids=NAME)
def test_a_format_stores_what_torch_stores_bit_for_bit(node, fmt):
    """Values of all sizes, on ties, subnormal, and beyond each range."""
    powers = torch.empty(6_000).uniform_(-160, 128, generator=torch.Generator().manual_seed(0))
    edges = torch.tensor([0.0, 65504, 65519, 65520, 447, 448, 463, 464, 465, 480])
    values = torch.cat([2.0**powers, torch.arange(990) / 64, edges])
    values[::2] *= -1
    function = """(short, values) => {
      const format = completed(short);
      return values.map((x) => encode(round(x, format), format));
    }"""
    patterns = [int(bits, 2) for bits in node("number", function, described(fmt), values.tolist())]
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[fmt.dtype.itemsize]
    page = torch.tensor(patterns).to(integer)
    stored = values.to(fmt.dtype)
    is_nan = stored.float().isnan()
    assert torch.equal(page.view(fmt.dtype).float().isnan(), is_nan)
    assert torch.equal(page[~is_nan], stored.view(integer)[~is_nan])


def test_every_division_of_bits_is_that_of_float_formats(node):
    names = ("bias", "max", "min_normal", "min_subnormal", "eps")
    divisions = list(product(range(2, 9), range(1, 24), (True, False)))
    function = "(all, names) => all.map((bits) => names.map((name) => describe(...bits)[name]))"
    for bits, page in zip(divisions, node("number", function, divisions, names), strict=True):
        exponent, mantissa, has_inf = bits
        right = FloatFormat("x", exponent, mantissa, has_inf=has_inf)
        assert tuple(page) == attrgetter(*names)(right), bits


def test_gradients_on_the_edges_have_the_right_fate(node):
    """All that lies just below, on, and just above what decides, at every scale."""
    thresholds = torch.tensor([2.0**-25, 2.0**-14 - 2.0**-25, 2.0**-14, 65504.0, 65520.0])
    on = torch.outer(thresholds, 2.0 ** -torch.arange(31)).flatten()
    below, above = on.nextafter(torch.zeros(())), on.nextafter(torch.tensor(torch.inf))
    values = torch.cat([on, -below, above, torch.tensor([1e-45, 3e38])])
    function = """(octaves, format) => [...Array(31).keys()].map((power) =>
      count({ octaves, format: completed(format) }, power))"""
    for k, page in enumerate(node("loss_scale", function, counted(values), described(FP16))):
        assert {fate: n / len(values) for fate, n in page.items()} == fp16_fate(values, 2.0**k), k


def scales_of_torch(largest: list[float], scale: float, interval: int) -> list[float]:
    """Return the scale after each step, by torch's own GradScaler."""
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=interval)
    scaler.scale(torch.ones(1))  # makes the scale
    scales = []
    for size in largest:
        weight.grad = (torch.tensor([size]) * scaler.get_scale()).half().float()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


def test_the_scaler_walks_as_torchs_does(node):
    powers = torch.empty(100).uniform_(-12, 2, generator=torch.Generator().manual_seed(0))
    edge = [65520 / 2.0**k for k in (16, 15, 14, 13)] * 10
    huge = [1e-38] * 300  # the scale grows to the end of float32
    starts = [2.0**k for k in (0, 10, 16, 24, 30)]
    cases = list(product(((2.0**powers).tolist(), edge, huge), starts, (1, 2, 5, 2000)))
    function = """(cases, format) => cases.map((one) =>
      walk(...one, completed(format)).map(({ after }) => after))"""
    pages = node("loss_scale", function, cases, described(FP16))
    for case, scales in zip(cases, pages, strict=True):
        assert scales == scales_of_torch(*case), case[1:]


def random_events(seed: int, limit: float, settings: Settings) -> tuple[list[dict], list]:
    """Return 150 events, and what the rules in Python leave.

    These are [bytes allocated, reserved] after each event, the addresses of what lives in the end,
    and how many times memory ran short.
    """
    dice, cache = random.Random(seed), CachingAllocator(limit, settings)
    sizes = (1, 512, 513, 300_000, MIB, MIB + 1, 3 * MIB, 10 * MIB - 1, 10 * MIB, 50 * MIB)
    events, states, alive = [], [], {}
    for number in range(150):
        choice = dice.random()
        if choice < 0.04:
            events.append({"empty": True})
            cache.empty_cache()
        elif choice < 0.45 and alive:
            gone = dice.choice(list(alive))
            events.append({"free": [gone]})
            cache.free(alive.pop(gone))
        else:
            n_bytes = dice.choice([*sizes, dice.randrange(1, 2 * MIB), dice.randrange(1, 30 * MIB)])
            events.append({"new": [[number, n_bytes]]})
            with suppress(OutOfMemory):
                alive[number] = cache.allocate(n_bytes)
        states.append([cache.allocated, cache.reserved])
    return events, [states, [block.address for block in alive.values()], cache.n_retries]


@pytest.mark.parametrize("settings", [DEFAULT, EXPANDABLE], ids=["fixed", "expandable"])
def test_random_events_leave_what_the_rules_leave(node, settings):
    limits = [(1e18, 60 * MIB, 150 * MIB, 300 * MIB)[seed % 4] for seed in range(200)]
    stories = [random_events(seed, limit, settings) for seed, limit in enumerate(limits)]
    function = """(stories, limits, expandable) => stories.map(([events], i) => {
      const { cache, tensors, after } = replay(events, limits[i], expandable);
      const states = after.map(({ allocated, reserved }) => [allocated, reserved]);
      return [states, [...tensors.values()].map(({ address }) => address), cache.retries];
    })"""
    pages = node("allocator", function, stories, limits, settings is EXPANDABLE)
    assert pages == [right for _, right in stories]
    assert sum(n_retries for _, _, n_retries in pages) > 500  # memory ran short


def test_its_statistics_are_those_of_python(node):
    dice, pairs = random.Random(0), []
    worth = seeds_data.WORTH_TELLING  # half of it is too little to tell, however clear
    for i in range(300):
        shift, noise = [(0.0, 0.05), (0.05, 0.05), (-1.0, 0.05), (0.5 * worth, 1e-6)][i % 4]
        base = [dice.gauss(6, 0.2) for _ in range(3 + i % 6)]
        pairs.append([base, [loss + dice.gauss(shift, noise) for loss in base]])
        if i % 7 == 0:
            pairs[i][1][0] = math.nan
    function = """(pairs, t, worth) => pairs.map((pair) => {
      const gap = difference(...pair, t);
      return [gap.mean, gap.low, gap.high, gap.n, verdict(gap, worth)];
    })"""
    pages = node("seeds", function, pairs, seeds_data.T_95, worth)
    for pair, page in zip(pairs, pages, strict=True):
        right = lab.paired_difference(*pair, worth_telling=worth)
        assert page[:3] == pytest.approx([right.mean, right.low, right.high], rel=1e-9)
        assert page[3:] == [right.n_pairs, right.verdict]
    assert {page[4] for page in pages} == {"larger", "smaller", "cannot tell here"}


def peak(lengths: list[int], ratio: float) -> float:
    """Return the peak of some segments, as in the exercise of notebook 03."""
    return max(i + ratio * length for i, length in enumerate(lengths, 1))


def test_the_best_placement_has_the_smallest_peak_of_all(node):
    cuts = [[0, *[i for i in range(1, 9) if i == 8 or mask >> i & 1]] for mask in range(0, 256, 2)]
    placements = [[end - start for start, end in pairwise(ends)] for ends in cuts]
    function = "(all, r) => [best(8, r), all.map((lengths) => cost(lengths, r, false).peak)]"
    for ratio in (0.5, 1, 1.5, 4, 9, 16):
        best, peaks = node("segments", function, placements, ratio)
        assert peaks == [peak(lengths, ratio) for lengths in placements]
        assert best == min(peaks)


def exchanged_mean(values: torch.Tensor, dtype: torch.dtype, order: str, scale: float):
    """Return the workers' mean gradient as DDP's hooks compute it, float32.

    `values` are float32, `(n_workers, n)`. They are multiplied by `scale`, rounded to `dtype`,
    divided by the number of workers (against overflow) and added. Then `scale` is taken out.
    """
    n = len(values)
    parts = (values * scale).to(dtype).div_(n)
    if order == "ring":  # part c of n begins at worker c
        chunks = parts.tensor_split(n, dim=1)
        parts = torch.cat([chunk.roll(-c, 0) for c, chunk in enumerate(chunks)], dim=1)
        return reduce(torch.add, parts).float() / scale
    while len(parts) > 1:  # neighbours are added, then their sums
        parts = parts[0::2] + parts[1::2]
    return parts[0].float() / scale


@pytest.mark.parametrize("fmt", play.EXCHANGED, ids=NAME)
def test_the_page_sums_as_torch_does_bit_for_bit(node, fmt):
    """At these scales FP16 loses some elements, and some overflow."""
    text = table_of("allreduce")["gradients"]["64 workers"]["values"]
    values = torch.tensor(node("allreduce", "unpacked", text))
    scales = [1.0, 2.0**-13, 2.0**-16, 2.0**15, 2.0**20]
    cases = list(product(scales, (1, 2, 8, 64), ("ring", "tree")))
    function = """(text, format, cases) => cases.map(([scale, n, order]) => {
      const [values, complete] = [unpacked(text), completed(format)];
      const mean = exchange(cast(values, complete, scale), n, complete, order, scale);
      return [mean, errorOf(mean, values, n)];
    })"""
    answers = node("allreduce", function, text, described(fmt), cases)
    for (scale, n, order), (page, error) in zip(cases, answers, strict=True):
        right = exchanged_mean(values[:n], fmt.dtype, order, scale)
        torch.testing.assert_close(torch.tensor(page), right, rtol=0, atol=0, equal_nan=True)
        if right.isfinite().all():
            difference = lab.compare_gradients(right.double(), values[:n].double().mean(0))
            assert error == pytest.approx(difference.error, rel=1e-9, abs=1e-15)


def test_each_phase_of_a_window_has_the_ledgers_bytes_at_its_peak(node):
    film = table_of("window")["step"]["film"]
    for n, m in [(1, 2), (2, 2), (2, 5), (8, 4), (1, 7), (3, 16), (1, 128)]:
        frames = node("window", "frames", film, n, m)
        for phase, right in lab.predict_memory(window_config(n, m), "cpu").phases.items():
            of_phase = [frame["bytes"] for frame in frames if frame["phase"] == phase]
            page = dict(zip(WINDOW, max(of_phase, key=sum), strict=True))
            assert Counter(page) == Counter(right), (n, m, phase)


def test_each_phase_of_a_step_has_the_ledgers_bytes_at_its_peak(node):
    for name, run in table_of("step")["runs"].items():
        states = list(zip(run["moments"], node("step", "alive", run), strict=True))
        for phase, right in lab.predict_memory(lab.load_config(name), "cpu").phases.items():
            of_phase = [alive for moment, alive in states if moment[0] == phase]
            page = Counter()
            for (category, _), n_bytes in zip(run["groups"], max(of_phase, key=sum), strict=True):
                page[category] += n_bytes
            assert page == Counter(right), (name, phase)


def test_a_point_beyond_amdahls_law_is_refused():
    for wrong in ({"share": 1.5, "speedup": 2.0}, {"share": 0.5, "speedup": 0.0}, {"share": 0.5}):
        with pytest.raises(ValueError, match="speed-up"):
            lab.play.amdahl(**wrong)
