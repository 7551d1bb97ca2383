"""The models of exhibits, called by node, against the answers of Python and torch."""

from __future__ import annotations

import math
from collections import Counter
from functools import reduce
from itertools import product
from operator import attrgetter

import pytest
import torch

import labutils as lab
from benchmarks.exhibit_tables import WINDOW, window_config
from labutils.config.schema import Config
from labutils.exhibits import play, seeds_data
from labutils.exhibits.exhibit import described, table_of
from labutils.prediction.allocator import DEFAULT, EXPANDABLE, MIB, CachingAllocator, Settings
from labutils.techniques.numerics import FP16
from labutils.training.noise import CANNOT_TELL, TOO_SMALL
from tests.prediction.allocator_story import story

NAME = attrgetter("name")


@pytest.mark.parametrize(
    ("name", "call", "right"),
    [
        ("amdahl", "[amdahl(0.5, 4), amdahl(0.5, Infinity), amdahl(0, 4)]", [1.6, 2, 1]),
        ("allreduce", "[sentBytes(8, 1e6, { exponent: 5, mantissa: 10 })]", [3.5e6]),
        (
            "allreduce",
            "[...exactMean([[1, 1], [1, 3]], 2), errorOf([3, 0], [3, 4])]",
            [1, 2, 0.8],
        ),
        # 4 exponent and 3 mantissa bits, with inf: bias 7; largest 1.875 · 2^7; 2^-6; 2^-9; 2^-3
        (
            "number",
            "Object.values(describe(4, 3, true)).slice(3, 8)",
            [7, 240, 2**-6, 2**-9, 0.125],
        ),
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
    """Values of all sizes, on ties, subnormal, and beyond each range; inf and NaN."""
    patterns = torch.randint(-(2**31), 2**31, (24, 500))
    patterns &= -(2 ** torch.arange(24))[:, None]  # the last bits of a mantissa are 0: ties
    values = patterns.to(torch.int32).view(torch.float32).flatten()
    function = """(short, values) => {
      const format = completed(short);
      return values.map((x) => encode(round(x, format), format));
    }"""
    bits = node("number", function, described(fmt), values.tolist())
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[fmt.dtype.itemsize]
    page = torch.tensor([int(text, 2) for text in bits]).to(integer)
    stored = values.to(fmt.dtype)
    is_nan = stored.float().isnan()
    assert torch.equal(page.view(fmt.dtype).float().isnan(), is_nan)
    assert torch.equal(page[~is_nan], stored.view(integer)[~is_nan])


def test_real_gradients_have_the_fate_that_torch_gives_them(node):
    gradients = table_of("loss_scale")["gradients"]["all"]
    function = """(octaves, format) => [...Array(31).keys()].map((power) =>
      count({ octaves, format: completed(format) }, power))"""
    pages = node("loss_scale", function, gradients["counts"], described(FP16))
    for page, shares in zip(pages, gradients["fates"], strict=True):
        assert {fate: n / sum(page.values()) for fate, n in page.items()} == shares


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
    shown = table_of("loss_scale")["gradients"]["largest"]
    edge = [65520 / 2.0**k for k in (16, 15, 14, 13)] * 10
    huge = [1e-38] * 300  # the scale grows to the end of float32
    cases = list(product((shown, edge, huge), (1.0, 2.0**16, 2.0**30), (1, 2, 5, 2000)))
    function = """(cases, format) => cases.map((one) =>
      walk(...one, completed(format)).map(({ after }) => after))"""
    pages = node("loss_scale", function, cases, described(FP16))
    for case, scales in zip(cases, pages, strict=True):
        assert scales == scales_of_torch(*case), case[1:]


def random_events(seed: int, limit: float, settings: Settings) -> tuple[list[dict], list]:
    """Return random events, and what the rules in Python leave.

    These are [bytes allocated, reserved] after each event, the addresses of what lives in the end,
    and how many times memory ran short.
    """
    cache, events, states = CachingAllocator(limit, settings), [], []
    for event, alive in story(seed, cache):
        events.append(event)
        states.append([cache.allocated, cache.reserved])
        addresses = [block.address for block in alive.values()]
    return events, [states, addresses, cache.n_retries]


@pytest.mark.parametrize("settings", [DEFAULT, EXPANDABLE], ids=["fixed", "expandable"])
@pytest.mark.parametrize("limit", [1e18, 40 * MIB, 150 * MIB])  # often none is left of 40 MiB
def test_random_events_leave_what_the_rules_leave(node, settings, limit):
    stories = [random_events(seed, limit, settings) for seed in range(60)]
    function = """(stories, limit, expandable) => stories.map(([events]) => {
      const { cache, tensors, after } = replay(events, limit, expandable);
      const states = after.map(({ allocated, reserved }) => [allocated, reserved]);
      return [states, [...tensors.values()].map(({ address }) => address), cache.retries];
    })"""
    pages = node("allocator", function, stories, limit, settings is EXPANDABLE)
    assert pages == [right for _, right in stories]


def test_its_statistics_are_those_of_python(node):
    worth = seeds_data.WORTH_TELLING  # half of it is too small to matter, however clear
    shift = torch.tensor([[0.0], [0.05], [-1.0], [worth / 2]])
    noise = torch.tensor([[0.05], [0.05], [0.05], [1e-6]])
    base = 6 + 0.2 * torch.randn(75, 4, 8)
    other = base + shift + noise * torch.randn(75, 4, 8)
    other[torch.rand(75, 4, 8) < 0.2] = math.nan  # so the numbers of pairs differ
    pairs = torch.stack([base, other], dim=2).flatten(0, 1).tolist()
    function = """(pairs, t, worth) => pairs.map((pair) => {
      const gap = difference(...pair, t);
      return [gap.mean, gap.low, gap.high, gap.n, verdict(gap, worth)];
    })"""
    pages = node("seeds", function, pairs, seeds_data.T_95, worth)
    for pair, page in zip(pairs, pages, strict=True):
        right = lab.paired_difference(*pair, worth_telling=worth)
        numbers = right.mean, right.low, right.high, right.n_pairs
        assert page[:4] == pytest.approx(list(numbers), rel=1e-9) and page[4] == right.verdict
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
      return mean;
    })"""
    answers = node("allreduce", function, text, described(fmt), cases)
    for (scale, n, order), page in zip(cases, answers, strict=True):
        right = exchanged_mean(values[:n], fmt.dtype, order, scale)
        torch.testing.assert_close(torch.tensor(page), right, rtol=0, atol=0, equal_nan=True)


def check_peaks(states: list, categories: list[str], config: Config) -> None:
    """Hold the highest of each phase's `states`, [phase, bytes by category], against the ledger."""
    for phase, right in lab.predict_memory(config, "cpu").phases.items():
        highest = max([n_bytes for name, n_bytes in states if name == phase], key=sum)
        page = Counter()
        for category, n_bytes in zip(categories, highest, strict=True):
            page[category] += n_bytes
        assert page == Counter(right), phase


@pytest.mark.parametrize("sizes", [(1, 2), (2, 5), (8, 4), (1, 7), (3, 16), (1, 128)])
def test_each_phase_of_a_window_has_the_ledgers_bytes_at_its_peak(node, sizes):
    function = "(...all) => frames(...all).map(({ phase, bytes }) => [phase, bytes])"
    states = node("window", function, table_of("window")["step"]["film"], *sizes)
    check_peaks(states, WINDOW, window_config(*sizes))


@pytest.mark.parametrize(("name", "run"), table_of("step")["runs"].items())
def test_each_phase_of_a_step_has_the_ledgers_bytes_at_its_peak(node, name, run):
    states = node("step", "(run) => alive(run).map((n, i) => [run.moments[i][0], n])", run)
    check_peaks(states, [category for category, _ in run["groups"]], lab.load_config(name))
