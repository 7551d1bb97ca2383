"""Exhibits: `lab.play.number()` and so on. Each is played with in the notebook or in a page.

They compute with the same numbers as the cells; no kernel and no network are needed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from labutils.config.choices import MODELS, NO_AUTOCAST, PRECISIONS, WITH_BF16
from labutils.exhibits.exhibit import (
    Exhibit,
    described,
    looks_of,
    make_exhibit,
    names,
    page,
    table_of,
)
from labutils.exhibits.plan_data import plan as plan
from labutils.exhibits.seeds_data import seeds as seeds
from labutils.files import runs_dir, write_atomically
from labutils.memory.ledger import MIB
from labutils.plotting import CATEGORY_LOOKS, curves, steps
from labutils.prediction import allocator as rules
from labutils.prediction.arithmetic import KEPT_PER_BLOCK, arithmetic_of, n_parameters
from labutils.techniques.numerics import BF16, E4M3, E5M2, FORMATS, FP16, FP32, rounded

NUMBER_FORMATS = (*FORMATS, E4M3, E5M2)
EXCHANGED = (FP32, BF16, FP16)
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
        f"Each mantissa bit halves the error: with 7 bits 0.1 is {errors[7]:.2%} off",
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
    lines = {}
    for r in (1, 4, 16):
        lines[f"each layer keeps {r} × its input"] = {n: n + r * 24 / n for n in numbers}
    axes = "equal segments of 24 layers", "peak, in inputs of a layer"
    return make_exhibit(
        "segments",
        "Segments between checkpoints",
        "Cut the layers into segments: see what is kept, what is computed again, and the peak.",
        {"n_layer": n_layer, "ratio": ratio, "networks": networks},
        curves(lines, *axes, log2_ticks=numbers),
        "The more a layer keeps, the more segments are best: 4 or 6 at 1 × its input, 24 at 16 ×",
    )


# ---- Allocator

# Section 1 of notebook 04: (words, tensors that go, MiB of new ones). Tensors are counted from 0.
STORY = (
    ("30 tensors of 3 MiB", [], 30 * [3]),
    ("every second one deleted", [*range(0, 30, 2)], []),
    ("one of 20 MiB", [], [20]),
    ("empty_cache()", [], []),
    ("20 deleted, one of 50", [30], [50]),
)


def reserved_mib(settings: rules.Settings) -> list[float]:
    """Return MiB that are reserved after each event of the story."""
    cache, tensors, reserved = rules.CachingAllocator(settings=settings), [], []
    for words, gone, sizes in STORY:
        for number in gone:
            cache.free(tensors[number])
        tensors += [cache.allocate(size * MIB) for size in sizes]
        if words == "empty_cache()":
            cache.empty_cache()
        reserved.append(cache.reserved / MIB)
    return reserved


def allocator() -> Exhibit:
    """Return an exhibit: request and free tensors, and see segments, holes and reserved memory.

    Its rules are those of `lab.allocator.CachingAllocator`.
    """
    kinds = {"fixed segments": rules.DEFAULT, "expandable segments": rules.EXPANDABLE}
    lines = {kind: reserved_mib(settings) for kind, settings in kinds.items()}
    ends = [f"{line[-1]:g} MiB with {kind}" for kind, line in lines.items()]
    return make_exhibit(
        "allocator",
        "The caching allocator",
        "Request and free tensors: see holes, reserved memory, and when memory runs out.",
        {"story": STORY},
        steps(lines, [words for words, *_ in STORY], "reserved MiB"),
        "empty_cache() gives back nothing: a tensor lives in each segment. In the end "
        f"{ends[0]} are reserved, {ends[1]}",
    )


# ---- A step


def step(precision: str = "fp16") -> Exhibit:
    """Return an exhibit: one training step in slow motion, with the dtype of all that is alive.

    The step is predicted for the small GPT-2 on a CPU. It begins in `precision`.
    """
    runs = table_of("step")["runs"]
    lines = {name: dict(enumerate(runs[precision][name], 1)) for name in ("MiB", "MiB in 16 bits")}
    peak, in_16_bits = (max(line.values()) for line in lines.values())
    return make_exhibit(
        "step",
        "One training step, moment by moment",
        "Drag through a training step. See which tensors are alive, in which dtype, and why.",
        {"runs": runs, "precision": precision, "looks": looks_of(CATEGORY_LOOKS)},
        curves(lines, "moment of the step", "alive"),
        f"A step in {precision} has at most {in_16_bits:.1f} MiB in 16 bits, and {peak:.1f} in all",
    )


# ---- A window of micro-batches


def window() -> Exhibit:
    """Return an exhibit: scrub through the memory of n × m sequences, and weigh unequal ones.

    Bytes are those of the ledger, of a small GPT-2 on a CPU, for any number of sequences.
    """
    table = table_of("window")["step"]
    film, sizes = table["film"], (2, 4, 8, 16, 32)
    at_once = [part for part in film if part["micro_batch"] != 1]
    lines = {
        "one batch": {m: peak_mib(at_once, m) for m in sizes},
        "micro-batches of 2": {m: peak_mib(film, 2) for m in sizes},
    }
    ends = [line[32] for line in lines.values()]
    return make_exhibit(
        "window",
        "A window of micro-batches",
        "Scrub through one optimizer step: activations come and go, gradients stay.",
        {"film": film, "looks": looks_of(table["categories"])},
        curves(lines, "sequences per optimizer step", "predicted peak, MiB", log2_ticks=sizes),
        f"32 sequences take {ends[0]:.0f} MiB in one batch, {ends[1]:.0f} MiB in 16 micro-batches",
    )


def peak_mib(parts: list[dict[str, Any]], m: int) -> float:
    """Return the predicted peak of parts of the film, with m sequences in a micro-batch."""
    bytes_of = [np.array(part["moments"]).sum(axis=1) @ (1, m) for part in parts]
    return max(moments.max() for moments in bytes_of) / MIB


# ---- Real gradients


def loss_scale() -> Exhibit:
    """Return an exhibit: what FP16 makes of gradients times a scale, and a scaler that walks.

    The gradients are those of the small GPT-2 after 12 steps. The scaler walks through another
    recorded run.
    """
    gradients = table_of("loss_scale")["gradients"]
    fates = gradients["all"]["fates"]
    lines = {}
    for fate in ("zero", "subnormal"):
        lines[fate] = {power: 100 * shares[fate] for power, shares in enumerate(fates)}
    good = [k for k, shares in enumerate(fates) if shares["zero"] < 1e-3 and not shares["inf"]]
    octaves, largest = gradients["all"]["counts"], gradients["largest"]
    return make_exhibit(
        "loss_scale",
        "A loss scale, and the scaler that chooses it",
        "Drag the scale over real gradients. Then let the scaler walk, one step a click.",
        {"format": described(FP16), "octaves": octaves, "largest": largest},
        curves(lines, "loss scale: 2 to the power", "% of the gradients in FP16"),
        f"Scales from 2^{good[0]} to 2^{good[-1]} lose under 0.1 % of these gradients, none to inf",
    )


def allreduce() -> Exhibit:
    """Return an exhibit: what workers send to average gradients, and how the mean is rounded."""
    gradients = table_of("allreduce")["gradients"]["64 workers"]
    lost = {int(power): 100 * share for power, share in gradients["lost"].items()}
    data = {"formats": [described(fmt) for fmt in EXCHANGED], "gradients": gradients["values"]}
    return make_exhibit(
        "allreduce",
        "The exchange of gradients",
        "Choose workers, a model, a format, a link. See the bytes, the least time, the rounding.",
        data | {"models": {name: n_parameters(name) for name in MODELS}},
        curves({"FP16": lost}, "gradients multiplied by 2 to the power", "% sent as 0"),
        f"64 workers send {lost[0]:.1f} % of these gradients as 0 in FP16, and {lost[-10]:.0f} % "
        "if they are 1024 times smaller",
    )


# ---- Amdahl's law


def amdahl(share: float | None = None, speedup: float | None = None) -> Exhibit:
    """Return an exhibit: how fast a step is if only its matrix products get faster.

    Your own point: the `share` of products in a step (0 to 1), and the `speedup` of one product.
    Raises ValueError for a share beyond 0 to 1, a speed-up that is not positive, or one without
    the other.
    """
    cards = sorted(table_of("amdahl")["cards"].values(), key=lambda card: card["product"])
    own = None if (share, speedup) == (None, None) else {"share": share, "product": speedup}
    if own and (share is None or not 0 <= share <= 1 or speedup is None or speedup <= 0):
        raise ValueError(f"a share is 0 to 1, a speed-up positive; got {share} and {speedup}")
    lines = {
        "products": {card["product"]: card["product"] for card in cards},
        "the whole step": {card["product"]: card["step"] for card in cards},
    }
    return make_exhibit(
        "amdahl",
        "Faster products, and the whole step",
        "Choose the share of matrix products and their speed. See what it does to the step.",
        {"cards": cards, "own": own},
        curves(lines, "cards, by the speed of their products in 16 bits, ×", "speed-up, ×"),
        "{card}: products {product:.1f} × as fast, the step {step:.1f} ×".format(**cards[-1]),
    )
