"""Exhibits: `lab.play.number()` and so on. Each is played with in the notebook or in a page.

They compute with the same numbers as the cells; no kernel and no network are needed.
"""

from __future__ import annotations

import math

import matplotlib.pyplot as plt
import torch

from labutils.config.reader import load_config
from labutils.exhibits import (
    allocator_data,
    amdahl_data,
    loss_scale_data,
    segments_data,
    step_data,
    window_data,
)
from labutils.exhibits.allreduce import allreduce as allreduce
from labutils.exhibits.exhibit import Exhibit, make_exhibit
from labutils.exhibits.number_data import NUMBER_FORMATS, described
from labutils.exhibits.plan_data import plan as plan
from labutils.exhibits.seeds_data import seeds as seeds
from labutils.memory.ledger import mib
from labutils.plotting import (
    bit_layout,
    curves,
    gradient_histogram,
    relative_spacing,
    steps,
    timeline,
)
from labutils.prediction.memory import predict_memory
from labutils.techniques.numerics import (
    BF16,
    FP16,
    fp16_fate,
)


def number(value: float = 0.1, number_format: str = "BF16") -> Exhibit:
    """Return an exhibit: type or drag a value, flip any bit, and see what six formats store."""
    data = {
        "value": repr(value),
        "format": number_format,
        "formats": [described(one) for one in NUMBER_FORMATS],
    }
    alt = "The bits of six number formats, one square for each: sign, exponent and mantissa."
    return make_exhibit(
        "number",
        "A number under the microscope",
        "Type a value, drag its size, or flip a bit: see what each format stores, and the error.",
        data,
        bit_layout(NUMBER_FORMATS),
        alt,
    )


def segments(n_layer: int = 24, ratio: float = 16.0) -> Exhibit:
    """Return an exhibit: cut layers into checkpointed segments, and see the peak and the work.

    A layer keeps `ratio` times its input. At first each layer is a segment.
    """
    data = {"n_layer": n_layer, "ratio": ratio, "networks": segments_data.networks()}
    lines = {}
    for r in (1, 4, 16):
        lines[f"each layer keeps {r} × its input"] = segments_data.peaks_of_equal_segments(24, r)
    axes = "equal segments of 24 layers", "peak, in inputs of a layer"
    still = curves(lines, *axes, log2_ticks=(1, 2, 3, 4, 6, 8, 12, 24))
    alt = "The peak against the number of equal segments, for layers that keep much and little."
    return make_exhibit(
        "segments",
        "Segments between checkpoints",
        "Cut the layers into segments: see what is kept, what is computed again, and the peak.",
        data,
        still,
        alt,
    )


def allocator(limit_mib: int = 200, is_expandable: bool = False) -> Exhibit:
    """Return an exhibit: request and free tensors, and see segments, holes and reserved memory.

    The card has `limit_mib`. Its rules are those of `lab.allocator.CachingAllocator`.
    """
    story = allocator_data.story()
    data = {
        "limit_mib": limit_mib,
        "expandable": is_expandable,
        "rules": allocator_data.RULES,
        "story": story,
    }
    lines = allocator_data.told(story)
    alt = "Allocated and reserved MiB after five events, for fixed and for expandable segments."
    return make_exhibit(
        "allocator",
        "The caching allocator",
        "Request and free tensors: see holes, reserved memory, and when memory runs out.",
        data,
        steps(lines, [say for say, _, _ in story], "MiB"),
        alt,
    )


def window(n_micro_batches: int = 4, micro_batch_size: int = 4) -> Exhibit:
    """Return an exhibit: scrub through the memory of n × m sequences, and weigh unequal ones.

    Bytes are those of the ledger, of a small GPT-2 on a CPU: two traces take a few seconds.
    """
    words = "Predicted by the ledger for gpt2-nano in float32 on a CPU, with sequences of "
    data = {
        "n": n_micro_batches,
        "m": micro_batch_size,
        "film": window_data.film(),
        "categories": list(window_data.GROUPS),
        "lengths": window_data.LENGTHS,
        "model": f"{words}{window_data.SEQ_LEN} tokens. The time axis is a sketch.",
    }
    ticks = (2, 4, 8, 16, 32)
    axes = "sequences per optimizer step", "predicted peak, MiB"
    still = curves(window_data.peaks(32), *axes, log2_ticks=ticks)
    alt = "The peak of one batch of m sequences grows; that of n micro-batches of two hardly does."
    return make_exhibit(
        "window",
        "A window of micro-batches",
        "Scrub through one optimizer step: activations come and go, gradients stay.",
        data,
        still,
        alt,
    )


def range(number_format: str = "FP16") -> Exhibit:  # so this file has no built-in `range`
    """Return an exhibit: choose the exponent and mantissa bits, and see range against spacing."""
    data = {"format": number_format, "formats": [described(one) for one in NUMBER_FORMATS]}
    spans = [f"{one.name} {math.log2(one.max / one.min_subnormal):.0f}" for one in (BF16, FP16)]
    reach = f"Powers of two from the smallest to the largest number: {', '.join(spans)}"
    finer = f"at 1, FP16 is {BF16.eps / FP16.eps:g} times finer"
    ax = relative_spacing()
    ax.set_title(f"{reach};\n{finer}", fontsize="medium")
    return make_exhibit(
        "range",
        "Range against precision",
        "Divide the bits between exponent and mantissa. The real formats are marks on the way.",
        data,
        ax,
        f"A line for each format: relative spacing over the size of the number. {reach}; {finer}.",
    )


def loss_scale(gradients: torch.Tensor | None = None, power: int = 0) -> Exhibit:
    """Return an exhibit: what FP16 makes of gradients times 2^`power`, and a scaler that walks.

    `gradients` are any finite numbers, by default those of the small GPT-2 after 12 steps (a run of
    seconds on the CPU, the first time). The scaler walks through another recorded run.
    """
    values = loss_scale_data.gradients() if gradients is None else gradients.detach().float()
    numbers = ("eps", "max", "min_normal", "min_subnormal")
    data = {
        "format": {name: getattr(FP16, name) for name in numbers},
        "parts": loss_scale_data.PARTS,
        "octaves": loss_scale_data.counted(values),
        "largest": loss_scale_data.largest_gradients(),
        "power": power,
        "first": 24,
        "intervals": [2, 5, 10, 2000],
        "interval": 5,
    }
    lost = f"{100 * fp16_fate(values, 2.0**power)['zero']:.3g} % of them become 0 in FP16"
    ax = gradient_histogram(values, 2.0**power)
    ax.set_title(f"Real gradients, times {2**power:g}: {lost}", pad=18)
    return make_exhibit(
        "loss_scale",
        "A loss scale, and the scaler that chooses it",
        "Drag the scale over real gradients. Then let the scaler walk, one step a click.",
        data,
        ax,
        f"A histogram of real gradients, times {2**power:g}, over powers of two: {lost}.",
    )


def step(precision: str | None = None) -> Exhibit:
    """Return an exhibit: one training step in slow motion, with the dtype of all that is alive.

    The step is predicted for the small GPT-2 on a CPU (seconds, the first time). `precision` is
    where it begins, by default the one that needs a loss scale.
    """
    found = step_data.data()
    scaled = [name for name, run in found["runs"].items() if run["scaler"]]
    chosen = precision or scaled[0]
    ledger = predict_memory(load_config(chosen), "cpu")
    peak = f"the peak, {mib(ledger.peak_bytes):.1f} MiB, is in the {ledger.peak_phase} phase"
    ax = timeline(ledger, plt.subplots(figsize=(6.5, 2.4), layout="constrained")[1])
    ax.set_title(f"One step in {chosen}: {peak}", pad=14)
    return make_exhibit(
        "step",
        "One training step, moment by moment",
        "Drag through a training step. See which tensors are alive, in which dtype, and why.",
        found | {"precision": chosen},
        ax,
        f"Bytes that are alive from left to right through one step in {chosen}: {peak}.",
    )


def amdahl(
    share: float | None = None, speedup: float | None = None, measured: float | None = None
) -> Exhibit:
    """Return an exhibit: how fast a step is if only its matrix products get faster.

    Your own point: the `share` of products in a step (0 to 1), the `speedup` of one product, and,
    if you have it, the `measured` speed-up of the whole step. Raises ValueError for a share beyond
    0 to 1, a speed-up that is not positive, or only one of the two.
    """
    cards = amdahl_data.cards()
    data = {"cards": cards, "share": cards[0]["share"], "speedup": cards[0]["product"]}
    if (share, speedup, measured) != (None, None, None):
        if share is None or speedup is None:
            raise ValueError("give both numbers: the share of products, and their speed-up")
        own = {"step": measured, "amdahl": amdahl_data.amdahl(share, speedup)}
        data |= {"share": share, "speedup": speedup, "own": own}
    powers = [2.0**k for k in (0, 1, 2, 3, 4, 5, 6)]
    lines = {}
    for part in (0.5, 0.75, 0.9):
        lines[f"products are {part:.0%}"] = {r: amdahl_data.amdahl(part, r) for r in powers}
    ax = curves(lines, "speed of one product, ×", "speed of the step, ×", log2_ticks=powers)
    claim = (
        f"64 times faster products make a step at most {lines['products are 90%'][64]:.1f}× fast"
    )
    ax.set_title(claim)
    return make_exhibit(
        "amdahl",
        "Faster products, and the whole step",
        "Choose the share of matrix products and their speed. See what it does to the step.",
        data,
        ax,
        f"Speed of the step over the speed of one product, for shares of 50, 75 and 90 %. {claim}.",
    )
