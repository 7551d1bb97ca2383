"""The models of exhibits, called by node, against the answers of Python and torch."""

import math
from collections import Counter
from functools import partial, reduce
from itertools import product
from operator import attrgetter

import pytest
import torch

import labutils as lab
from benchmarks import exhibit_tables as tables
from benchmarks.exhibits import EXCHANGED, NUMBER_FORMATS, described
from benchmarks.numerics import FP16
from labutils.prediction.allocator import DEFAULT, EXPANDABLE, MIB, CachingAllocator
from labutils.training.noise import CANNOT_TELL, TOO_SMALL
from tests.exhibits.conftest import stored
from tests.prediction.allocator_story import story

NAME = attrgetter("name")
near = partial(pytest.approx, rel=1e-9)


@pytest.mark.parametrize(
    ("name", "call", "right"),
    [
        ("amdahl", "[amdahl(0.5, 4), amdahl(0.5, Infinity), amdahl(0, 4)]", [1.6, 2, 1]),
        ("allreduce", "[sentBytes(8, 1e6, { exponent: 5, mantissa: 10 })]", [3.5e6]),
        ("allreduce", "[...exactMean([[1, 1], [1, 3]], 2)]", [1, 2]),
        ("allreduce", "[errorOf([3, 0], [3, 4])]", [0.8]),
        # 4 exponent and 3 mantissa bits, with inf: bias 7; largest 1.875 · 2^7; 2^-6; 2^-9; 2^-3
        (
            "number",
            "Object.values(describe(4, 3, true)).slice(3, 8)",
            [7, 240, 2**-6, 2**-9, 0.125],
        ),
        ("number", "[neighbour(1, describe(5, 10, true), 1)]", [1 + 2**-10]),
        # three segments' inputs and the first one's layers; without a kept segment, and with one
        ("segments", "Object.values(cost([4, 2, 2], 3, false)).slice(1)", [13, 3, 1, 8, 15]),
        ("segments", "Object.values(cost([2, 2, 4], 3, true)).slice(1)", [15, 15, 0, 4, 15]),
        # 2 targets and 1: each weighs 1/3; the mean of means gives each of them 1/4, and 1/2
        ("window", "Object.values(weigh([3, 2])).flat()", [2, 1, 1 / 3, 1 / 4, 1 / 2, 0.1**0.5]),
    ],
)
def test_what_one_can_compute_by_hand(node, name, call, right):
    assert node(name, f"() => {call}") == pytest.approx(right, rel=1e-12)


@pytest.mark.parametrize("fmt", [fmt for fmt in NUMBER_FORMATS if fmt.dtype], ids=NAME)
def test_a_format_stores_what_torch_stores_bit_for_bit(node, fmt):
    """Values of all sizes, on ties, subnormal, and beyond each range; inf and NaN."""
    patterns = torch.randint(-(2**31), 2**31, (24, 500))
    patterns &= -(2 ** torch.arange(24))[:, None]  # the last bits of a mantissa are 0: ties
    values = patterns.to(torch.int32).view(torch.float32).flatten()
    values = values[~values.isnan()]  # NaN has many patterns
    function = """(short, values) => {
      const format = completed(short);
      return values.map((x) => encode(round(x, format), format));
    }"""
    bits = node("number", function, described(fmt), values.tolist())
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[fmt.dtype.itemsize]
    page = torch.tensor([int(text, 2) for text in bits]).to(integer)
    assert torch.equal(page, values.to(fmt.dtype).view(integer))


def test_real_gradients_have_the_fate_that_torch_gives_them(node):
    values = tables.real_gradients()
    octaves = tables.counted(values)
    function = "(octaves, format, power) => count({ octaves, format: completed(format) }, power)"
    for power in (0, 6, 7, 19, 20, 30):
        page = node("loss_scale", function, octaves, described(FP16), power)
        fate = tables.fp16_fate(values, 2.0**power)
        assert {name: n / sum(page.values()) for name, n in page.items()} == fate
        assert tables.fp16_fate(tables.as_counted(octaves), 2.0**power) == fate
    # another CPU rounds otherwise: a few of a million gradients change their place, and those below
    # 2^-39 are what rounding has left
    data = stored("loss_scale")["data"]
    here = {e: counts for e, *counts in octaves}
    for e, *counts in data["octaves"]:
        assert e < -39 or counts == pytest.approx(here[e], rel=0.01, abs=10)
    largest = tables.TABLES["loss_scale"]["largest"]()
    assert data["largest"][:12] == pytest.approx(largest[:12], rel=1e-3)
    assert data["largest"] == pytest.approx(largest, rel=0.02)  # with each step less alike


@pytest.mark.parametrize("scale", [1.0, 2.0**16, 2.0**30])
@pytest.mark.parametrize("interval", [1, 2, 5, 2000])
def test_the_scaler_walks_as_torchs_does(node, scale, interval):
    edge = [65520 / 2.0**k for k in (16, 15, 14, 13)] * 10
    largest = [*stored("loss_scale")["data"]["largest"], *edge, *[1e-38] * 300]
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=interval)
    scaler.scale(torch.ones(1))  # makes the scale
    scales = []
    for size in largest:  # with the last ones it grows to the end of float32
        weight.grad = (torch.tensor([size]) * scaler.get_scale()).half().float()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    function = "(format, ...one) => walk(...one, completed(format)).map(({ after }) => after)"
    assert node("loss_scale", function, described(FP16), largest, scale, interval) == scales


@pytest.mark.parametrize("settings", [DEFAULT, EXPANDABLE], ids=["fixed", "expandable"])
@pytest.mark.parametrize("limit", [1e18, 40 * MIB, 150 * MIB])  # often none is left of 40 MiB
def test_random_events_leave_what_the_rules_leave(node, settings, limit):
    """Bytes allocated and reserved after each event; then addresses, and how often memory ran short."""
    stories, right = [], []
    for seed in range(60):
        cache, events, states = CachingAllocator(limit, settings), [], []
        for event, alive in story(seed, cache):
            events.append(event)
            states.append([cache.allocated, cache.reserved])
            addresses = [block.address for block in alive.values()]
        stories.append(events)
        right.append([states, addresses, cache.n_retries])
    function = """(stories, limit, expandable) => stories.map((events) => {
      const { cache, tensors, after } = replay(events, limit, expandable);
      const states = after.map(({ allocated, reserved }) => [allocated, reserved]);
      return [states, [...tensors.values()].map(({ address }) => address), cache.retries];
    })"""
    assert node("allocator", function, stories, limit, settings is EXPANDABLE) == right


def test_its_statistics_are_those_of_python(node):
    data = stored("seeds")["data"]
    worth = data["worth_telling"]  # half of it is too small to matter, however clear
    shift = torch.tensor([0.0, 0.05, -1.0, worth / 2]).repeat(75)[:, None]
    noise = torch.tensor([0.05, 0.05, 0.05, 1e-6]).repeat(75)[:, None]
    base = torch.randn(300, 8)
    other = base + shift + noise * torch.randn(300, 8)
    other[torch.rand(300, 8) < 0.2] = math.nan  # so the numbers of pairs differ
    pairs = torch.stack([base, other], dim=1).tolist()
    function = """(pairs, t, worth) => pairs.map((pair) => {
      const gap = difference(...pair, t);
      return [gap.mean, gap.low, gap.high, gap.n, verdict(gap, worth)];
    })"""
    pages = node("seeds", function, pairs, data["t"], worth)
    for pair, page in zip(pairs, pages, strict=True):
        right = lab.paired_difference(*pair, worth_telling=worth)
        numbers = right.mean, right.low, right.high, right.n_pairs
        assert page == [*map(near, numbers), right.verdict]
    assert {page[4] for page in pages} == {"larger", "smaller", TOO_SMALL, CANNOT_TELL}


def test_the_best_placement_has_the_smallest_peak_of_all(node):
    function = """(ratios) => ratios.map((ratio) => {
      const peaks = [...Array(128).keys()].map((mask) => {
        const ends = [1, 2, 3, 4, 5, 6, 7].filter((end) => mask & (2 ** (end - 1)));
        return cost(lengthsOf([...ends, 8]), ratio, false).peak;
      });
      return [best(8, ratio), Math.min(...peaks)];
    })"""
    for page, smallest in node("segments", function, [0.5, 1, 1.5, 4, 9, 16]):
        assert page == smallest


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


@pytest.mark.parametrize("fmt", EXCHANGED, ids=NAME)
def test_the_page_sums_as_torch_does_bit_for_bit(node, fmt):
    """At these scales FP16 loses some elements, and some overflow."""
    text = stored("allreduce")["data"]["gradients"]
    values = torch.tensor(node("allreduce", "unpacked", text))
    scales = [1.0, 2.0**-13, 2.0**-16, 2.0**15, 2.0**20]
    cases = list(product(scales, (1, 2, 8, 64), ("ring", "tree")))
    function = """(text, format, cases) => cases.map(([scale, n, order]) => {
      const [values, complete] = [unpacked(text), completed(format)];
      return exchange(cast(values, complete, scale), n, complete, order, scale);
    })"""
    answers = node("allreduce", function, text, described(fmt), cases)
    for (scale, n, order), page in zip(cases, answers, strict=True):
        right = exchanged_mean(values[:n], fmt.dtype, order, scale)
        torch.testing.assert_close(torch.tensor(page), right, rtol=0, atol=0, equal_nan=True)


STEPS = stored("step")["data"]["runs"]
SIZES = [(1, 2), (2, 5), (8, 4), (1, 7), (3, 16), (1, 128)]  # micro-batches, sequences in each
FRAMES = "(...all) => frames(...all).map(({ phase, bytes }) => [phase, bytes])"
ALIVE = "(run) => alive(run).map((n, i) => [run.moments[i][0], n])"


@pytest.mark.parametrize("case", [*SIZES, *STEPS], ids=str)
def test_each_phase_has_the_ledgers_bytes_at_its_peak(node, case):
    if case in STEPS:
        config, states = lab.load_config(case), node("step", ALIVE, STEPS[case])
        categories = [category for category, _ in STEPS[case]["groups"]]
    else:
        config, categories = tables.window_config(*case), tables.WINDOW
        states = node("window", FRAMES, stored("window")["data"]["film"], *case)
    for phase, right in lab.predict_memory(config, "cpu").phases.items():
        page = Counter()
        highest = max([n_bytes for name, n_bytes in states if name == phase], key=sum)
        for category, n_bytes in zip(categories, highest, strict=True):
            page[category] += n_bytes
        assert page == Counter(right), phase
