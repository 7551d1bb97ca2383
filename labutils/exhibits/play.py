"""Exhibits: `lab.play.number()` and so on. Each is played with in the notebook or in a page.

They compute with the same numbers as the cells; no kernel and no network are needed.
"""

from __future__ import annotations

from pathlib import Path

from labutils.config.choices import MODELS, NO_AUTOCAST, PRECISIONS, WITH_BF16
from labutils.exhibits.allreduce_data import allreduce as allreduce
from labutils.exhibits.exhibit import Exhibit, described, make_exhibit, names, page, table_of
from labutils.exhibits.loss_scale_data import loss_scale as loss_scale
from labutils.exhibits.plan_data import plan as plan
from labutils.exhibits.seeds_data import seeds as seeds
from labutils.exhibits.window_data import window as window
from labutils.files import runs_dir, write_atomically
from labutils.memory.ledger import CAST_WEIGHTS, MIB, OPTIMIZER
from labutils.plotting import CATEGORY_LOOKS, curves, steps
from labutils.prediction import allocator as rules
from labutils.prediction.arithmetic import KEPT_PER_BLOCK, arithmetic_of
from labutils.techniques.numerics import BF16, E4M3, E5M2, FORMATS, FP16, FP32, rounded

NUMBER_FORMATS = (*FORMATS, E4M3, E5M2)
DROPOUT_MASKS = 2  # bytes per element: the networks of `segments` have none


def save_all(path: str | Path | None = None) -> Path:
    """Write one page with all exhibits, by default `runs/exhibits.html`; return its path."""
    target = Path(path) if path else runs_dir() / "exhibits.html"
    exhibits = [globals()[name]() for name in names()]
    write_atomically(target, page("Things to play with", exhibits).encode())
    return target


def number(value: float = 0.1, number_format: str = "BF16") -> Exhibit:
    """Return an exhibit: type or drag a value, flip any bit, and see what six formats store.

    The bits of a format can also be divided otherwise between exponent and mantissa.
    """
    formats = [described(fmt) for fmt in NUMBER_FORMATS]
    errors = {}
    for fmt in (E5M2, E4M3, BF16, FP16, FP32):
        errors[fmt.mantissa_bits] = abs(rounded(0.1, fmt.dtype) / 0.1 - 1)
    ax = curves({"E5M2, E4M3, BF16, FP16, FP32": errors}, "mantissa bits", "relative error of 0.1")
    ax.set_yscale("log")
    return make_exhibit(
        "number",
        "A number under the microscope",
        "Type a value, drag its size, or flip a bit: see what each format stores, and the error.",
        {"value": repr(value), "format": number_format, "formats": formats},
        ax,
        f"0.1 is {errors[2]:.0%} off with 2 mantissa bits, {errors[7]:.2%} with 7, "
        f"{errors[10]:.3%} with 10: each bit halves the error",
    )


# ---- Segments


def keeps(precision: str) -> float:
    """Return r: how many times the bytes of its input a block of GPT-2 keeps, by hand.

    Without dropout, with fused attention and fused GELU. Its input has the dtype of the weights.
    """
    input_bytes = 4 if PRECISIONS[precision].weights == "float32" else 2
    return (KEPT_PER_BLOCK[arithmetic_of(precision)] - DROPOUT_MASKS) / input_bytes


def segments(n_layer: int = 24, ratio: float = 16.0) -> Exhibit:
    """Return an exhibit: cut layers into checkpointed segments, and see the peak and the work.

    A layer keeps `ratio` times its input. At first each layer is a segment.
    """
    networks = [{"name": "the chain of 36 layers in notebook 03", "n_layer": 36, "ratio": 1.0}]
    for precision in (NO_AUTOCAST[0], WITH_BF16.name):
        for model in MODELS.values():
            name = f"{model.name}, {precision}"
            network = {"name": name, "n_layer": model.n_layer, "ratio": keeps(precision)}
            networks.append(network)
    numbers = (1, 2, 3, 4, 6, 8, 12, 24)
    lines, fewest = {}, []
    for r in (1, 4, 16):
        peaks = {n: n + r * 24 / n for n in numbers}
        lines[f"each layer keeps {r} × its input"] = peaks
        fewest.append(min(peaks, key=peaks.get))
    axes = "equal segments of 24 layers", "peak, in inputs of a layer"
    return make_exhibit(
        "segments",
        "Segments between checkpoints",
        "Cut the layers into segments: see what is kept, what is computed again, and the peak.",
        {"n_layer": n_layer, "ratio": ratio, "networks": networks},
        curves(lines, *axes, log2_ticks=numbers),
        "The more a layer keeps, the more segments are best: of 24 layers, "
        f"{fewest[0]} if it keeps its input, {fewest[1]} at 4 times, {fewest[2]} at 16 times",
    )


# ---- Allocator

RULES = (
    "SMALLEST_BLOCK",
    "SMALL_REQUEST",
    "SMALL_SEGMENT",
    "LARGE_SEGMENT",
    "LARGE_REQUEST",
    "ROUND_LARGE",
    "ADDRESSES",
)


def allocator_rules() -> dict[str, int]:
    """Return the allocator's constants in bytes, by their names."""
    return {name.lower(): getattr(rules, name) for name in RULES}


EMPTY_CACHE = "empty_cache()"
# Section 1 of notebook 04: (words, tensors that go, MiB of new ones). Tensors are counted from 0.
STORY = (
    ("30 tensors of 3 MiB", [], 30 * [3]),
    ("every second one deleted", [*range(0, 30, 2)], []),
    ("one of 20 MiB", [], [20]),
    (EMPTY_CACHE, [], []),
    ("20 deleted, one of 50", [30], [50]),
)


def reserved_mib(settings: rules.Settings) -> list[float]:
    """Return MiB that are reserved after each event of the story."""
    cache, tensors, reserved = rules.CachingAllocator(settings=settings), [], []
    for words, gone, sizes in STORY:
        for number in gone:
            cache.free(tensors[number])
        tensors += [cache.allocate(size * MIB) for size in sizes]
        if words == EMPTY_CACHE:
            cache.empty_cache()
        reserved.append(cache.reserved / MIB)
    return reserved


def allocator(limit_mib: int = 200, is_expandable: bool = False) -> Exhibit:
    """Return an exhibit: request and free tensors, and see segments, holes and reserved memory.

    The card has `limit_mib`. Its rules are those of `lab.allocator.CachingAllocator`.
    """
    fixed, expandable = reserved_mib(rules.DEFAULT), reserved_mib(rules.EXPANDABLE)
    lines = {"reserved, fixed": fixed, "reserved, expandable": expandable}
    data = {"limit_mib": limit_mib, "expandable": is_expandable}
    data["rules"] = allocator_rules()
    return make_exhibit(
        "allocator",
        "The caching allocator",
        "Request and free tensors: see holes, reserved memory, and when memory runs out.",
        data | {"story": STORY, "empty_cache": EMPTY_CACHE},
        steps(lines, [words for words, *_ in STORY], "MiB"),
        f"empty_cache() gives back {fixed[2] - fixed[3]:g} MiB of fixed segments, and "
        f"{expandable[2] - expandable[3]:g} MiB of expandable ones",
    )


# ---- A step


def step(precision: str = "fp16") -> Exhibit:
    """Return an exhibit: one training step in slow motion, with the dtype of all that is alive.

    The step is predicted for the small GPT-2 on a CPU. It begins in `precision`.
    """
    runs = table_of("step")["runs"]
    groups = runs[precision]["groups"]
    now = [0] * len(groups)
    in_16_bits, together = {}, {}
    for i, (*_, changes) in enumerate(runs[precision]["moments"], start=1):
        for group, more in zip(changes[::2], changes[1::2], strict=True):
            now[group] += more
        halves = [n for n, (_, dtype) in zip(now, groups, strict=True) if dtype.endswith("16")]
        in_16_bits[i], together[i] = sum(halves) / MIB, sum(now) / MIB
    peak = max(together, key=together.get)
    data = {"runs": runs, "precision": precision, "copies": CAST_WEIGHTS}
    data["names"] = {CAST_WEIGHTS: "16-bit copies of weights", OPTIMIZER: "moments of AdamW"}
    return make_exhibit(
        "step",
        "One training step, moment by moment",
        "Drag through a training step. See which tensors are alive, in which dtype, and why.",
        data | {"colours": {name: colour for name, (colour, _) in CATEGORY_LOOKS.items()}},
        curves({"all": together, "in 16 bits": in_16_bits}, "moment of the step", "MiB alive"),
        f"At the peak of a step in {precision}, {in_16_bits[peak]:.1f} of {together[peak]:.1f} MiB "
        f"are in 16 bits; at most {max(in_16_bits.values()):.1f} MiB ever are",
    )


# ---- Amdahl's law


def amdahl(
    share: float | None = None, speedup: float | None = None, measured: float | None = None
) -> Exhibit:
    """Return an exhibit: how fast a step is if only its matrix products get faster.

    Your own point: the `share` of products in a step (0 to 1), the `speedup` of one product, and,
    if you have it, the `measured` speed-up of the whole step. Raises ValueError for a share beyond
    0 to 1, a speed-up that is not positive, or only one of the two.
    """
    cards = [*table_of("amdahl")["cards"].values()]
    data = {"cards": cards, "share": cards[0]["share"], "product": cards[0]["product"]}
    if (share, speedup, measured) != (None, None, None):
        if share is None or not 0 <= share <= 1 or speedup is None or speedup <= 0:
            raise ValueError(f"a share is 0 to 1, a speed-up positive; got {share} and {speedup}")
        own = {"share": share, "product": speedup, "step": measured}
        data |= {"share": share, "product": speedup, "own": own}
    lines: dict[str, dict[float, float]] = {"predicted, whole step": {}, "Amdahl's law": {}}
    for card in sorted(cards, key=lambda card: card["product"]):
        rest = 1 - card["share"]
        lines["predicted, whole step"][card["product"]] = card["step"]
        lines["Amdahl's law"][card["product"]] = 1 / (rest + card["share"] / card["product"])
    most = max(cards, key=lambda card: card["product"])
    return make_exhibit(
        "amdahl",
        "Faster products, and the whole step",
        "Choose the share of matrix products and their speed. See what it does to the step.",
        data,
        curves(lines, "speed of one product, ×: a point for each card", "speed of the step, ×"),
        f"{most['card']}: products {most['product']:.1f} times as fast make the step "
        f"{most['step']:.1f} times as fast",
    )
