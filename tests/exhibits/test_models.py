"""The models of exhibits, called by node, against the answers of Python and torch."""

from __future__ import annotations

import math
import random
import statistics
from itertools import pairwise, product

import pytest
import torch

import labutils as lab
from benchmarks.exhibit_tables import counted
from labutils.exhibits import play, seeds_data, window_data
from labutils.exhibits.exhibit import described, table_of
from labutils.prediction.allocator import DEFAULT, EXPANDABLE, CachingAllocator, OutOfMemory
from labutils.techniques.numerics import FP16, FloatFormat, fp16_fate

MIB = 2**20
SCALES = range(31)


# ---- number


def values_to_store() -> torch.Tensor:
    """Return 10,000 float32 values: of all sizes, on ties, subnormal, and beyond each range."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.empty(6_000).uniform_(-160, 128, generator=generator)
    near = torch.empty(3_000).uniform_(-20, 20, generator=generator)
    ties = torch.arange(990).float() / 64
    edges = torch.tensor([0.0, 65504, 65519, 65520, 447, 448, 463, 464, 465, 480])
    values = torch.cat([2.0**sizes, 2.0**near, ties, edges])
    return values * (torch.randint(0, 2, values.shape, generator=generator) * 2 - 1)


def stored_by_torch(values: torch.Tensor, fmt: FloatFormat) -> tuple[torch.Tensor, list[str]]:
    """Return what a format stores, in float64, and the bits."""
    width = 1 + fmt.exponent_bits + fmt.mantissa_bits
    kinds = {8: torch.uint8, 16: torch.int16, 32: torch.int32}
    if fmt.dtype is None:  # TF32: to nearest, ties to even
        raw = values.view(torch.int32)
        raw = (raw + 0xFFF + ((raw >> 13) & 1)) & ~0x1FFF
        stored, raw = raw.view(torch.float32), raw >> 13
    else:
        stored = values.to(fmt.dtype)
        raw = stored.view(kinds[width])
    bits = [f"{number & (2**width - 1):0{width}b}" for number in raw.to(torch.int64).tolist()]
    return stored.double(), bits


@pytest.mark.parametrize("fmt", play.NUMBER_FORMATS, ids=lambda fmt: fmt.name)
def test_a_format_stores_what_torch_stores_bit_for_bit(node, fmt):
    values = values_to_store()
    function = """(format, values) => values.map((x) => {
      const stored = round(x, completed(format));
      return [stored, encode(stored, completed(format))];
    })"""
    pairs = node("number", function, described(fmt), values.tolist())
    for value, pair, *right in zip(values, pairs, *stored_by_torch(values, fmt), strict=True):
        if math.isnan(right[0]):
            assert math.isnan(pair[0]), value
        else:
            assert pair == [right[0].item(), right[1]], value


def test_every_division_of_bits_is_that_of_float_formats(node):
    divisions = list(product(range(2, 9), range(1, 24), (True, False)))
    facts = node("number", "(all) => all.map((one) => describe(...one))", divisions)
    for (e, m, has_inf), page in zip(divisions, facts, strict=True):
        right = FloatFormat("x", e, m, has_inf=has_inf)
        for name in ("bias", "max", "min_normal", "min_subnormal", "eps"):
            assert page[name] == getattr(right, name), (name, e, m, has_inf)
        assert page["span"] == pytest.approx(math.log2(right.max / right.min_subnormal))


# ---- loss_scale


def test_gradients_on_the_edges_have_the_right_fate(node):
    """All that lies just below, on, and just above what decides, at every scale."""
    edges = []
    for threshold in (2.0**-25, 2.0**-14 - 2.0**-25, 2.0**-14, 65504.0, 65520.0):
        for k in SCALES:
            middle = torch.tensor(threshold * 2.0**-k)
            up, down = torch.tensor(torch.inf), torch.tensor(0.0)
            edges += [middle, torch.nextafter(middle, up), -torch.nextafter(middle, down)]
    values = torch.stack([*edges, torch.tensor(0.0), torch.tensor(1e-45), torch.tensor(3e38)])
    octaves = counted(values)
    function = """(octaves, format, powers) => powers.map((power) =>
      count({ octaves, format: completed(format) }, power))"""
    counts = node("loss_scale", function, octaves, described(FP16), [*SCALES])
    for k, page in zip(SCALES, counts, strict=True):
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
  const listed = (blocks) => blocks.map((block) => [block.address, block.size]);
  return events.map(([number, bytes]) => {
    if (number === undefined) cache.emptyCache();
    else if (bytes) blocks[number] = cache.allocate(bytes);
    else if (blocks[number]) cache.free(blocks[number]);
    const { allocated, reserved, retries, small, large } = cache;
    const lists = [small.free, large.free, large.unmapped].map(listed);
    return [bytes > 0 && !blocks[number], allocated, reserved, retries, ...lists];
  });
})"""


def played(limit: float, is_expandable: bool, events: list[list[int]]) -> list[list]:
    """Return what `PLAY` returns, from the rules in Python."""
    cache = CachingAllocator(limit, EXPANDABLE if is_expandable else DEFAULT)
    blocks: dict[int, object] = {}
    states = []
    for event in events:
        failed = False
        if not event:
            cache.empty_cache()
        elif event[1]:
            try:
                blocks[event[0]] = cache.allocate(event[1])
            except OutOfMemory:
                failed = True
        elif event[0] in blocks:
            cache.free(blocks[event[0]])
        lists = []
        for entries in (cache.small.free, cache.large.free, cache.large.unmapped):
            lists.append([[block.address, block.size] for *_, block in entries])
        states.append([failed, cache.allocated, cache.reserved, cache.n_retries, *lists])
    return states


@pytest.mark.parametrize("is_expandable", [False, True], ids=["fixed", "expandable"])
def test_random_events_leave_what_the_rules_leave(node, is_expandable):
    rng = random.Random(is_expandable)
    limits = (1e18, 60 * MIB, 150 * MIB, 300 * MIB)
    sequences = [[limits[i % 4], is_expandable, some_events(rng)] for i in range(200)]
    n_failed = n_retried = 0
    for sequence, page in zip(sequences, node("allocator", PLAY, sequences), strict=True):
        right = played(*sequence)
        assert page == right
        n_failed += sum(state[0] for state in right)
        n_retried += right[-1][3]
    assert n_failed > 500 and n_retried > 500  # all rules were needed


# ---- amdahl, seeds, segments


def test_the_law_is_amdahls(node):
    shares, speedups = [k / 20 for k in range(21)], [2 ** (k / 4) for k in range(-24, 25)]
    function = "(shares, speeds) => shares.map((share) => speeds.map((x) => amdahl(share, x)))"
    for share, row in zip(shares, node("amdahl", function, shares, speedups), strict=True):
        assert row == pytest.approx([1 / (1 - share + share / x) for x in speedups], rel=1e-12)
    for wrong in ({"share": 1.5, "speedup": 2.0}, {"share": 0.5, "speedup": 0.0}, {"share": 0.5}):
        with pytest.raises(ValueError, match="speed-up"):
            lab.play.amdahl(**wrong)


def test_its_statistics_are_those_of_python(node):
    rng, pairs = random.Random(0), []
    little = 0.5 * seeds_data.WORTH_TELLING  # too little to tell, however clear
    kinds = [(0.0, 0.05), (0.05, 0.05), (-1.0, 0.05), (little, 1e-6)]
    for i in range(300):
        base = [rng.gauss(6, 0.2) for _ in range(rng.randint(2, 8))]
        other = [loss + rng.gauss(*kinds[i % 4]) for loss in base]
        pairs.append([base, [math.nan, *other[1:]] if i % 7 == 0 and len(base) > 3 else other])
    function = """(pairs, t, worth) => pairs.map(([base, other]) => {
      const gap = difference(base, other, t);
      return [sigma(base), gap.mean, gap.low, gap.high, gap.n, verdict(gap, worth)];
    })"""
    worth = seeds_data.WORTH_TELLING
    answers = node("seeds", function, pairs, seeds_data.T_95, worth)
    for (base, other), (sigma, *numbers, n, verdict) in zip(pairs, answers, strict=True):
        right = lab.paired_difference(base, other, worth_telling=worth)
        expected = [statistics.stdev(base), right.mean, right.low, right.high]
        assert [sigma, *numbers] == pytest.approx(expected, rel=1e-9)
        assert [n, verdict] == [right.n_pairs, right.verdict]
    assert {answer[-1] for answer in answers} == {"larger", "smaller", "cannot tell here"}


def smallest_peak(n_layer: int, ratio: float) -> float:
    """Return the smallest peak: below it the longest possible segments hold too few layers."""
    numbers = range(1, n_layer + 1)
    for peak in sorted({i + ratio * n for i in numbers for n in numbers}):
        if sum(int((peak - i) / ratio) for i in numbers if peak > i) >= n_layer:
            return peak
    raise AssertionError("one segment holds all layers")


def test_peaks_are_those_of_the_exercise(node):
    rng, cases = random.Random(0), []
    for _ in range(500):
        n_layer = rng.randrange(2, 49)
        ends = [0, *sorted(rng.sample(range(1, n_layer), rng.randrange(n_layer))), n_layer]
        lengths = [end - start for start, end in pairwise(ends)]
        cases.append([lengths, rng.randrange(1, 65) / 2])
    function = "(cases) => cases.map((one) => [cost(...one, false), best(8, one[1])])"
    for (lengths, r), (page, best) in zip(cases, node("segments", function, cases), strict=True):
        peaks = [i + r * length for i, length in enumerate(lengths, 1)]
        assert page["peak"] == max(peaks) == peaks[page["at"] - 1]
        facts = page["forward"], page["rule"], page["runsAgain"]
        assert facts == (len(lengths), len(lengths) + r * max(lengths), sum(lengths))
        assert best == smallest_peak(8, r)
    assert node("segments", "() => best(48, 1)") == smallest_peak(48, 1)


# ---- allreduce


def exchanged_mean(values: torch.Tensor, dtype: torch.dtype, order: str, scale: float):
    """Return the workers' mean gradient as DDP's hooks compute it, float32.

    `values` are float32, `(n_workers, n)`. They are multiplied by `scale`, rounded to `dtype`,
    divided by the number of workers (against overflow) and added. Then `scale` is taken out.
    """
    n = len(values)
    parts = (values * scale).to(dtype).div_(n)
    while order == "tree" and len(parts) > 1:  # neighbours are added, then their sums
        parts = parts[0::2] + parts[1::2]
    if order == "tree":
        return parts[0].float() / scale
    sums = []
    for c, chunk in enumerate(parts.tensor_split(n, dim=1)):  # part c begins at worker c
        total = chunk[c]
        for hop in range(1, n):
            total = total + chunk[(c + hop) % n]
        sums.append(total)
    return torch.cat(sums).float() / scale


@pytest.mark.parametrize("fmt", play.EXCHANGED, ids=lambda fmt: fmt.name)
def test_the_page_sums_as_torch_does_bit_for_bit(node, fmt):
    text = table_of("allreduce")["gradients"]["64 workers"]["values"]
    values = torch.tensor(node("allreduce", "unpacked", text))
    scales = [1.0, 2.0**-13, 2.0**-16, 2.0**15, 2.0**20]
    cases = list(product(scales, (1, 2, 4, 8, 16, 32, 64), ("ring", "tree")))
    function = """(text, format, cases) => cases.map(([scale, n, order]) => {
      const values = unpacked(text);
      const complete = completed(format);
      const mean = exchange(cast(values, complete, scale), n, complete, order, scale);
      return [mean, errorOf(mean, values, n), sentBytes(n, 1e6, format)];
    })"""
    answers = node("allreduce", function, text, described(fmt), cases)
    extremes = set()
    for (scale, n, order), (page, error, n_bytes) in zip(cases, answers, strict=True):
        right = exchanged_mean(values[:n], fmt.dtype, order, scale)
        mean = torch.tensor(page, dtype=torch.float64)
        assert torch.equal(mean.nan_to_num(7, 8, 9), right.double().nan_to_num(7, 8, 9)), n
        extremes |= {bool((right == 0).any()), bool(right.isinf().any())}
        if mean.isfinite().all():
            judge = values[:n].double().mean(0)
            wrong = ((mean - judge).norm() / judge.norm()).item()
            assert error == pytest.approx(wrong, rel=1e-9, abs=1e-15)
        assert n_bytes == pytest.approx(2 * (n - 1) / n * 1e6 * fmt.dtype.itemsize)
    assert fmt is not FP16 or extremes == {False, True}  # some are lost, and some overflow


# ---- window, step


def weights_by_torch(lengths: list[int]) -> tuple[list[float], list[float], float]:
    """Return the weights of a token, right and by the mean of means, and the gradient's error.

    The loss of a token of micro-batch i is the i-th weight, so mean gradients are unrelated.
    """
    w = torch.zeros(len(lengths), dtype=torch.float64, requires_grad=True)
    losses = [w[i].expand(length - 1) for i, length in enumerate(lengths)]
    n_targets = sum(map(len, losses))
    (right,) = torch.autograd.grad(sum(loss.sum() for loss in losses) / n_targets, w)
    (wrong,) = torch.autograd.grad(sum(loss.mean() for loss in losses) / len(losses), w)
    counts = torch.tensor([len(loss) for loss in losses])
    error = lab.compare_gradients(wrong, right).error
    return (right / counts).tolist(), (wrong / counts).tolist(), error


def test_weights_and_error_are_those_of_torchs_gradients(node):
    rng = random.Random(0)
    cases = [[rng.randrange(2, 65) for _ in range(4)] for _ in range(100)]
    for lengths, page in zip(cases, node("window", "(all) => all.map(weigh)", cases), strict=True):
        right, wrong, error = weights_by_torch(lengths)
        assert [page["right"]] * 4 == pytest.approx(right, rel=1e-12)
        assert page["wrong"] == pytest.approx(wrong, rel=1e-12)
        assert page["error"] == pytest.approx(error, rel=1e-9, abs=1e-12)


def test_each_phase_of_a_window_has_the_ledgers_bytes_at_its_peak(node):
    sizes = [(1, 2), (2, 2), (2, 5), (8, 4), (1, 7), (3, 16), (1, 128)]
    function = "(film, sizes) => sizes.map(([n, m]) => frames(film, n, m))"
    for (n, m), frames in zip(
        sizes, node("window", function, window_data.film(), sizes), strict=True
    ):
        ledger = lab.predict_memory(window_data.window_config(n, m), "cpu")
        for phase, by_category in ledger.phases.items():
            of_phase = [frame["bytes"] for frame in frames if frame["phase"] == phase]
            right = [by_category.get(category, 0) for category in window_data.CATEGORIES]
            assert max(of_phase, key=sum) == right, phase


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
