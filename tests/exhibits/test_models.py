"""The models of exhibits, called by node, against the answers of Python and torch."""

from __future__ import annotations

import math
import random
from functools import reduce
from itertools import pairwise, product
from operator import attrgetter

import pytest
import torch

import labutils as lab
from benchmarks.exhibit_tables import counted, fp16_fate
from labutils.exhibits import play, seeds_data, window_data
from labutils.exhibits.exhibit import described, table_of
from labutils.prediction.allocator import DEFAULT, EXPANDABLE, CachingAllocator, OutOfMemory
from labutils.techniques.numerics import FP16, FloatFormat

MIB = 2**20
NAME = attrgetter("name")


# ---- number


def values_to_store() -> torch.Tensor:
    """Return 7,000 float32 values: of all sizes, on ties, subnormal, and beyond each range."""
    powers = torch.empty(6_000).uniform_(-160, 128, generator=torch.Generator().manual_seed(0))
    edges = torch.tensor([0.0, 65504, 65519, 65520, 447, 448, 463, 464, 465, 480])
    values = torch.cat([2.0**powers, torch.arange(990) / 64, edges])
    values[::2] *= -1
    return values


@pytest.mark.parametrize("fmt", [one for one in play.NUMBER_FORMATS if one.dtype], ids=NAME)
def test_a_format_stores_what_torch_stores_bit_for_bit(node, fmt):
    function = """(format, values) => values.map((x) => {
      const stored = round(x, completed(format));
      return [stored, encode(stored, completed(format))];
    })"""
    values = values_to_store()
    stored = values.to(fmt.dtype)
    width = 1 + fmt.exponent_bits + fmt.mantissa_bits
    raw = stored.view({8: torch.uint8, 16: torch.int16, 32: torch.int32}[width])
    pairs = node("number", function, described(fmt), values.tolist())
    for value, page, number, pattern in zip(values, pairs, stored, raw.tolist(), strict=True):
        bits = f"{pattern & (2**width - 1):0{width}b}"
        if math.isnan(number):
            assert math.isnan(page[0]), value
        else:
            assert page == [number.item(), bits], value


def test_every_division_of_bits_is_that_of_float_formats(node):
    divisions = list(product(range(2, 9), range(1, 24), (True, False)))
    facts = node("number", "(all) => all.map((one) => describe(...one))", divisions)
    for (e, m, has_inf), page in zip(divisions, facts, strict=True):
        right = FloatFormat("x", e, m, has_inf=has_inf)
        for name in ("bias", "max", "min_normal", "min_subnormal"):
            assert page[name] == getattr(right, name), (name, e, m, has_inf)
        assert page["eps"] == right.spacing(1.0)
        assert page["span"] == pytest.approx(math.log2(right.max / right.min_subnormal))


# ---- loss_scale


def test_gradients_on_the_edges_have_the_right_fate(node):
    """All that lies just below, on, and just above what decides, at every scale."""
    thresholds = torch.tensor([2.0**-25, 2.0**-14 - 2.0**-25, 2.0**-14, 65504.0, 65520.0])
    on = torch.outer(thresholds, 2.0 ** -torch.arange(31)).flatten()
    below, above = on.nextafter(torch.zeros(())), on.nextafter(torch.tensor(torch.inf))
    values = torch.cat([on, -below, above, torch.tensor([0.0, 1e-45, 3e38])])
    function = """(octaves, format) => [...Array(31).keys()].map((power) =>
      count({ octaves, format: completed(format) }, power))"""
    for k, page in enumerate(node("loss_scale", function, counted(values), described(FP16))):
        shares = {fate: n / values.count_nonzero().item() for fate, n in page.items()}
        assert shares == fp16_fate(values, 2.0**k), k


def walked_by_torch(largest: list[float], scale: float, interval: int) -> list[list]:
    """Return [scale after it, was it skipped] of each step, by torch's own GradScaler."""
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    taken: list[int] = []
    optimizer.register_step_post_hook(lambda *_: taken.append(1))
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=interval)
    scaler.scale(torch.ones(1))  # makes the scale
    steps = []
    for size in largest:
        n_taken = len(taken)
        weight.grad = (torch.tensor([size]) * scaler.get_scale()).half().float()
        scaler.step(optimizer)
        scaler.update()
        steps.append([scaler.get_scale(), len(taken) == n_taken])
    return steps


def test_the_scaler_walks_as_torchs_does(node):
    powers = torch.empty(100).uniform_(-12, 2, generator=torch.Generator().manual_seed(0))
    edge = [65520 / 2.0**k for k in (16, 15, 14, 13)] * 10
    huge = [1e-38] * 300  # the scale grows to the end of float32
    starts = [2.0**k for k in (0, 10, 16, 24, 30)]
    cases = list(product(((2.0**powers).tolist(), edge, huge), starts, (1, 2, 5, 2000)))
    function = """(cases, format) => cases.map((one) =>
      walk(...one, completed(format)).map(({ after, skipped }) => [after, skipped]))"""
    for case, steps in zip(
        cases, node("loss_scale", function, cases, described(FP16)), strict=True
    ):
        assert steps == walked_by_torch(*case), case[1:]


# ---- allocator


def some_events(rng: random.Random) -> list[list[int]]:
    """Return 150 events: [number, bytes] requests, [number, 0] frees, [] empties the cache."""
    sizes = (1, 512, 513, 300_000, MIB, MIB + 1, 3 * MIB, 10 * MIB - 1, 10 * MIB, 50 * MIB)
    events, alive = [], []
    for number in range(150):
        choice = rng.random()
        if choice < 0.04:
            events.append([])
        elif choice < 0.45 and alive:
            events.append([alive.pop(rng.randrange(len(alive))), 0])
        else:
            n_bytes = rng.choice([*sizes, rng.randrange(1, 2 * MIB), rng.randrange(1, 30 * MIB)])
            events.append([number, n_bytes])
            alive.append(number)
    return events


PLAY = """(sequences) => sequences.map(([limit, expandable, events]) => {
  const cache = new Allocator(limit, expandable);
  const blocks = {};
  return events.map(([number, bytes]) => {
    if (number === undefined) cache.emptyCache();
    else if (bytes) blocks[number] = cache.allocate(bytes);
    else if (blocks[number]) cache.free(blocks[number]);
    const { allocated, reserved, retries } = cache;
    return [bytes ? (blocks[number]?.address ?? -1) : null, allocated, reserved, retries];
  });
})"""


def played(limit: float, is_expandable: bool, events: list[list[int]]) -> list[list]:
    """Return what `PLAY` returns, from the rules in Python; the address is -1 without memory."""
    cache = CachingAllocator(limit, EXPANDABLE if is_expandable else DEFAULT)
    blocks: dict[int, object] = {}
    states = []
    for event in events:
        address = None
        if not event:
            cache.empty_cache()
        elif event[1]:
            try:
                blocks[event[0]] = cache.allocate(event[1])
                address = blocks[event[0]].address
            except OutOfMemory:
                address = -1
        elif event[0] in blocks:
            cache.free(blocks[event[0]])
        states.append([address, cache.allocated, cache.reserved, cache.n_retries])
    return states


@pytest.mark.parametrize("is_expandable", [False, True], ids=["fixed", "expandable"])
def test_random_events_leave_what_the_rules_leave(node, is_expandable):
    rng = random.Random(is_expandable)
    limits = (1e18, 60 * MIB, 150 * MIB, 300 * MIB)
    sequences = [[limits[i % 4], is_expandable, some_events(rng)] for i in range(200)]
    right = [played(*sequence) for sequence in sequences]
    assert node("allocator", PLAY, sequences) == right
    addresses = [state[0] for states in right for state in states]
    assert addresses.count(-1) > 500 and sum(states[-1][3] for states in right) > 500  # all rules


# ---- amdahl, seeds, segments


def test_the_law_is_amdahls(node):
    pairs = [(k / 20, 2 ** (j / 4)) for k in range(21) for j in range(-24, 25)]
    right = [1 / (1 - share + share / speedup) for share, speedup in pairs]
    pages = node("amdahl", "(pairs) => pairs.map((pair) => amdahl(...pair))", pairs)
    assert pages == pytest.approx(right, rel=1e-12)
    for wrong in ({"share": 1.5, "speedup": 2.0}, {"share": 0.5, "speedup": 0.0}, {"share": 0.5}):
        with pytest.raises(ValueError, match="speed-up"):
            lab.play.amdahl(**wrong)


def test_its_statistics_are_those_of_python(node):
    rng, pairs = random.Random(0), []
    worth = seeds_data.WORTH_TELLING  # half of it is too little to tell, however clear
    for i in range(300):
        shift, noise = [(0.0, 0.05), (0.05, 0.05), (-1.0, 0.05), (0.5 * worth, 1e-6)][i % 4]
        base = [rng.gauss(6, 0.2) for _ in range(3 + i % 6)]
        pairs.append([base, [loss + rng.gauss(shift, noise) for loss in base]])
        if i % 7 == 0:
            pairs[i][1][0] = math.nan
    function = """(pairs, t, worth) => pairs.map((pair) => {
      const gap = difference(...pair, t);
      return [gap.mean, gap.low, gap.high, gap.n, verdict(gap, worth)];
    })"""
    verdicts = set()
    for pair, page in zip(
        pairs, node("seeds", function, pairs, seeds_data.T_95, worth), strict=True
    ):
        right = lab.paired_difference(*pair, worth_telling=worth)
        assert page[:3] == pytest.approx([right.mean, right.low, right.high], rel=1e-9)
        assert page[3:] == [right.n_pairs, right.verdict]
        verdicts.add(right.verdict)
    assert verdicts == {"larger", "smaller", "cannot tell here"}


def test_peaks_are_those_of_the_exercise_and_the_best_is_the_smallest(node):
    cuts = [[0, *[i for i in range(1, 9) if i == 8 or mask >> i & 1]] for mask in range(0, 256, 2)]
    placements = [[end - start for start, end in pairwise(ends)] for ends in cuts]
    function = "(all, r) => [all.map((lengths) => cost(lengths, r, false)), best(8, r)]"
    for r in (0.5, 1, 1.5, 4, 9, 16):
        pages, best = node("segments", function, placements, r)
        for lengths, page in zip(placements, pages, strict=True):
            peaks = [i + r * length for i, length in enumerate(lengths, 1)]
            assert page["peak"] == max(peaks) == peaks[page["at"] - 1]
            facts = page["forward"], page["rule"], page["runsAgain"]
            assert facts == (len(lengths), len(lengths) + r * max(lengths), 8)
        assert best == min(page["peak"] for page in pages)


# ---- allreduce


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
      return [mean, errorOf(mean, values, n), sentBytes(n, 1e6, format)];
    })"""
    answers = node("allreduce", function, text, described(fmt), cases)
    for (scale, n, order), (page, error, n_bytes) in zip(cases, answers, strict=True):
        right = exchanged_mean(values[:n], fmt.dtype, order, scale)
        torch.testing.assert_close(torch.tensor(page), right, rtol=0, atol=0, equal_nan=True)
        if right.isfinite().all():
            difference = lab.compare_gradients(right.double(), values[:n].double().mean(0))
            assert error == pytest.approx(difference.error, rel=1e-9, abs=1e-15)
        assert n_bytes == pytest.approx(2 * (n - 1) / n * 1e6 * fmt.dtype.itemsize)


# ---- window, step


def test_weights_and_error_are_those_of_torchs_gradients(node):
    """The loss of a token of micro-batch i is the i-th weight, so mean gradients are unrelated."""
    cases = [[46, 42, 38, 34], [64, 8, 32, 4], [2, 3, 64, 5], [40, 40, 40, 40]]
    for lengths, page in zip(cases, node("window", "(all) => all.map(weigh)", cases), strict=True):
        w = torch.zeros(4, dtype=torch.float64, requires_grad=True)
        losses = [w[i].expand(length - 1) for i, length in enumerate(lengths)]
        (right,) = torch.autograd.grad(torch.cat(losses).mean(), w)
        (wrong,) = torch.autograd.grad(sum(loss.mean() for loss in losses) / 4, w)
        targets = torch.tensor(page["targets"])
        assert [page["right"]] * 4 == pytest.approx((right / targets).tolist(), rel=1e-12)
        assert page["wrong"] == pytest.approx((wrong / targets).tolist(), rel=1e-12)
        assert page["error"] == pytest.approx(lab.compare_gradients(wrong, right).error, abs=1e-12)


def test_each_phase_of_a_window_has_the_ledgers_bytes_at_its_peak(node):
    sizes = [(1, 2), (2, 2), (2, 5), (8, 4), (1, 7), (3, 16), (1, 128)]
    function = "(film, sizes) => sizes.map(([n, m]) => frames(film, n, m))"
    for (n, m), frames in zip(
        sizes, node("window", function, window_data.film(), sizes), strict=True
    ):
        ledger = lab.predict_memory(window_data.window_config(n, m), "cpu")
        for phase, by_category in ledger.phases.items():
            of_phase = [frame["bytes"] for frame in frames if frame["phase"] == phase]
            right = [by_category[category] for category in window_data.SHOWN]
            assert max(of_phase, key=sum) == right and sum(right) == sum(by_category.values()), (
                phase
            )


def test_the_peaks_of_a_step_are_those_of_the_memory_ledger(node):
    for name, run in table_of("step")["runs"].items():
        moments = node("step", "(run) => alive(run)", run)
        ledger = lab.predict_memory(lab.load_config(name), "cpu")
        for phase in ("forward", "loss", "backward"):
            of_phase = [
                now for now, row in zip(moments, run["moments"], strict=True) if row[0] == phase
            ]
            groups = dict.fromkeys(ledger.categories, 0)
            for (category, _), n_bytes in zip(run["groups"], max(of_phase, key=sum), strict=True):
                groups[category] += n_bytes
            # the ledger's step meets a few scalars of the one before
            right = {category: ledger.phases[phase][category] for category in groups}
            assert groups == pytest.approx(right, abs=64), (name, phase)
