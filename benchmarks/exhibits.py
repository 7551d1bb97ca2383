"""Makes the exhibits of labutils: `python -m benchmarks.exhibits [--again]`.

Each function here returns what `NAME.json` holds, and the axis of its still picture:

title, say: what stands above the exhibit. finding: what the still shows, in words.
start: the arguments of `lab.play.NAME`, with what they are if nobody says otherwise.
choices: the values that an argument may have. help: what the arguments mean.
data: what the script gets, beside `start`. Parts that take time come from TABLES.

Parts of TABLES that are stored already are kept, so it can be stopped and continued.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import textwrap
from collections.abc import Callable, Iterable
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch
import yaml
from matplotlib.axes import Axes

from benchmarks import exhibit_tables as tables
from benchmarks import numerics
from benchmarks.numerics import FP16, FP32, FloatFormat, rounded
from labutils.config.card import CARDS, CONTEXT_GIB
from labutils.config.choices import MODELS, NO_AUTOCAST, PRECISIONS, WITH_BF16
from labutils.course.exhibits.play import FOLDER
from labutils.files import write_atomically
from labutils.memory.ledger import MIB
from labutils.plotting import CATEGORIES, curves
from labutils.plotting.style import use_style
from labutils.prediction import allocator as rules
from labutils.prediction.arithmetic import KEPT_PER_BLOCK, arithmetic_of, n_parameters
from labutils.prediction.time import (
    CALL_SECONDS,
    EAGER_BAND,
    LAUNCH_BOUND,
    SLOW_CALL_SECONDS,
    WIDE_BAND,
)
from labutils.training.noise import T_95
from labutils.training.record import read_record

Made = tuple[dict[str, Any], Axes]


def described(number_format: FloatFormat) -> dict[str, Any]:
    """Return what a page computes a format's numbers from.

    `saturates` says whether torch stores the largest number for what lies beyond it.
    """
    dtype, largest = number_format.dtype, number_format.max
    return {
        "name": number_format.name,
        "exponent": number_format.exponent_bits,
        "mantissa": number_format.mantissa_bits,
        "has_inf": number_format.has_inf,
        "saturates": dtype is not None and rounded(2 * largest, dtype) == largest,
    }


def looks_of(categories: Iterable[str]) -> list[list[str]]:
    """Return [name, colour, hatch] of categories of memory, as in our figures."""
    return [[name, CATEGORIES[name], ""] for name in categories]


NUMBER_FORMATS = (*numerics.FORMATS, numerics.E4M3, numerics.E5M2)


def number() -> Made:
    errors = {}
    for fmt in (numerics.E5M2, numerics.E4M3, numerics.BF16, FP16, FP32):
        errors[fmt.mantissa_bits] = abs(rounded(0.1, fmt.dtype) / 0.1 - 1)
    ax = curves({"E5M2, E4M3, BF16, FP16, FP32": errors}, "mantissa bits", "relative error of 0.1")
    ax.set_yscale("log")
    return {
        "title": "A number under the microscope",
        "say": "Type a value, or flip a bit: what does each format make of it?",
        "finding": f"Each mantissa bit halves the error: with 7 bits 0.1 is {errors[7]:.2%} off",
        "start": {"value": 0.1, "number_format": "BF16"},
        "choices": {"number_format": [fmt.name for fmt in NUMBER_FORMATS]},
        "data": {"formats": [described(fmt) for fmt in NUMBER_FORMATS]},
    }, ax


# ---- Segments

DROPOUT_MASKS = 2  # bytes per element: the networks of `segments` have none


def keeps(precision: str) -> float:
    """Return r: how many times the bytes of its input a block of GPT-2 keeps, by hand.

    Without dropout, with fused attention and fused GELU. Its input has the dtype of the weights.
    """
    input_bytes = 4 if PRECISIONS[precision].weights == "float32" else 2
    return (KEPT_PER_BLOCK[arithmetic_of(precision)] - DROPOUT_MASKS) / input_bytes


def segments() -> Made:
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
    return {
        "title": "Segments between checkpoints",
        "say": "Cut the layers into segments. Which cuts have the smallest peak?",
        "finding": "The more a layer keeps, the more segments are best: 4 or 6 at 1 × its input, "
        "24 at 16 ×",
        "start": {"n_layer": 24, "ratio": 16.0},
        "help": ["A layer keeps `ratio` times its input. At first each layer is a segment."],
        "data": {"networks": networks},
    }, curves(lines, *axes, log2_ticks=numbers)


# ---- Allocator

# Notebook 04's story, section 2: (words, tensors that go, MiB of new ones). Tensors are counted from 0.
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


def allocator() -> Made:
    kinds = {"fixed segments": rules.DEFAULT, "expandable segments": rules.EXPANDABLE}
    lines = {kind: dict(enumerate(reserved_mib(settings))) for kind, settings in kinds.items()}
    ax = curves(lines, "", "reserved MiB")
    ax.set_xticks(range(len(STORY)), [textwrap.fill(words, 14) for words, *_ in STORY])
    ax.set_ylim(0)
    ends = [f"{line[len(STORY) - 1]:g} MiB with {kind}" for kind, line in lines.items()]
    return {
        "title": "The caching allocator",
        "say": "Why did 20 MiB not fit into 55 free ones? Free tensors, and request again.",
        "finding": "empty_cache() gives back nothing: a tensor lives in each segment. In the end "
        f"{ends[0]} are reserved, {ends[1]}",
        "help": ["Its rules are those of `lab.allocator.CachingAllocator`."],
        "data": {"story": STORY},
    }, ax


def step(runs: dict[str, dict]) -> Made:
    shown = runs["fp16"]
    lines = {name: dict(enumerate(shown[name], 1)) for name in ("MiB", "MiB in 16 bits")}
    peak, in_16_bits = (max(line.values()) for line in lines.values())
    return {
        "title": "One training step, moment by moment",
        "say": "Press play. What is alive at the peak, in which dtype, and why?",
        "finding": f"A step in fp16 has at most {in_16_bits:.1f} MiB in 16 bits, and {peak:.1f} "
        "in all",
        "start": {"precision": "fp16"},
        "choices": {"precision": list(runs)},
        "help": ["The step is predicted for the small GPT-2 on a CPU."],
        "data": {"looks": looks_of(CATEGORIES)},
    }, curves(lines, "moment of the step", "alive")


def peak_mib(parts: list[dict[str, Any]], m: int) -> float:
    """Return the predicted peak of parts of the film, with m sequences in a micro-batch."""
    bytes_of = [np.array(part["moments"]).sum(axis=1) @ (1, m) for part in parts]
    return max(moments.max() for moments in bytes_of) / MIB


def window(film: list[dict[str, Any]]) -> Made:
    sizes = (2, 4, 8, 16, 32)
    at_once = [part for part in film if part["micro_batch"] != 1]
    lines = {
        "one batch": {m: peak_mib(at_once, m) for m in sizes},
        "micro-batches of 2": {2: peak_mib(at_once, 2)} | {m: peak_mib(film, 2) for m in sizes[1:]},
    }
    ends = [line[32] for line in lines.values()]
    return {
        "title": "A window of micro-batches",
        "say": "Press play. Which bytes come and go, and which stay?",
        "finding": f"32 sequences take {ends[0]:.0f} MiB in one batch, {ends[1]:.0f} MiB in 16 "
        "micro-batches",
        "help": ["Bytes are those of the ledger, of a small GPT-2 on a CPU."],
        "data": {"looks": looks_of(tables.WINDOW)},
    }, curves(lines, "sequences per optimizer step", "predicted peak, MiB")


def loss_scale(octaves: list[list[int]], largest: list[float]) -> Made:
    values = tables.as_counted(octaves)
    fates = [tables.fp16_fate(values, 2.0**power) for power in range(31)]
    lines = {}
    for fate in ("zero", "subnormal"):
        lines[fate] = {power: 100 * shares[fate] for power, shares in enumerate(fates)}
    limit = max(power for power, shares in enumerate(fates) if not shares["inf"])
    return {
        "title": "A loss scale, and the scaler that chooses it",
        "say": "Drag the scale. At which one are the fewest gradients 0, and none inf?",
        "finding": f"Without a scale FP16 stores 0 for {100 * fates[0]['zero']:.0f} % of these "
        f"gradients; at 2^{limit}, the last scale without inf, for {100 * fates[limit]['zero']:.1f} %",
        "help": [
            "The gradients are those that query, key and value pass back after 12 steps of the "
            "small GPT-2, and the largest one of a weight.",
            "The scaler walks through the same run.",
        ],
        "data": {"format": described(FP16)},
    }, curves(lines, "loss scale: 2 to the power", "% of the gradients in FP16")


EXCHANGED = (FP32, numerics.BF16, FP16)


def allreduce(gradients: str) -> Made:
    values = torch.frombuffer(bytearray(base64.b64decode(gradients)), dtype=torch.float32)
    powers = range(-24, 1)
    lost = {k: 100 * tables.fp16_fate(values, 2.0**k / 64)["zero"] for k in powers}
    return {
        "title": "The exchange of gradients",
        "say": "Add workers: how does the error of their mean gradient grow in 16 bits?",
        "finding": f"64 workers send {lost[0]:.1f} % of these gradients as 0 in FP16, and "
        f"{lost[-10]:.0f} % if they are 1024 times smaller",
        "data": {
            "formats": [described(fmt) for fmt in EXCHANGED],
            "models": {name: n_parameters(name) for name in MODELS},
        },
    }, curves({"FP16": lost}, "gradients multiplied by 2 to the power", "% sent as 0")


def amdahl(cards: list[dict[str, Any]]) -> Made:
    lines = {
        "matmuls": {card["product"]: card["product"] for card in cards},
        "the whole step": {card["product"]: card["step"] for card in cards},
    }
    finding = "{card}: matmuls {product:.1f} × as fast, the step {step:.1f} ×"
    return {
        "title": "Faster matmuls, and the whole step",
        "say": "Make the matmuls faster. Where does the step stop getting faster?",
        "finding": finding.format(**cards[-1]),
        "start": {"share": None, "speedup": None},
        "help": [
            "Your own point: the share of matmuls in a step, 0 to 1, and the speed-up of a matmul."
        ],
        "data": {},
    }, curves(lines, "cards, by the speed of their matmuls in 16 bits, ×", "speed-up, ×")


# ---- Seeds

# Nats per token: half a per cent of the perplexity. At the small rate one step of FP32 gains more.
WORTH_TELLING = 0.005
KINDS = {"pure": "pure", "sr": "stochastic rounding"}  # parts of an arm's name, as words


def words_of(arm: str) -> str:
    return " ".join(KINDS.get(part, part.upper()) for part in arm.split("_"))


def runs_of(rows: pd.DataFrame, name: str) -> dict[str, list[list[float]]]:
    """Return {"rate arm": a number for each seed and step}; a loss that is not finite is NaN."""
    runs = {}
    for (rate, arm), table in rows.groupby(["rate", "arm"]):
        wide = table.pivot(index="seed", columns="step", values=name)
        runs[f"{rate} {arm}"] = wide.to_numpy().tolist()
    return runs


def seeds() -> Made:
    rows = read_record("stability")
    facts = rows.attrs
    losses = rows[rows.rate == "small"].groupby(["arm", "step"]).loss.mean().unstack("arm")
    above = losses.pure_bf16 - losses.fp32
    lines = {"pure BF16": dict(above), "BF16 autocast": dict(losses.bf16 - losses.fp32)}
    return {
        "title": "One run says little: precisions over seeds",
        "say": "Choose two precisions. With how few seeds can you still tell them apart?",
        "finding": f"Pure BF16 falls {above.iloc[-1]:.3f} behind FP32 and further with each step; "
        "BF16 autocast does not",
        "help": ["The runs are those of the record `stability`."],
        "data": {
            "arms": {arm: words_of(arm) for arm in rows.arm.unique()},
            "rates": [text.rsplit(" ", 1) for text in facts["rates"].partition(";")[0].split(", ")],
            "steps": rows.step.unique().tolist(),
            "t": T_95,
            "worth_telling": WORTH_TELLING,
            "loss": runs_of(rows, "loss"),
            "skipped": runs_of(rows[rows.arm.isin(rows[rows.skipped > 0].arm)], "skipped"),
            "made": f"{facts['device']}, torch {facts['torch']}, {facts['created'][:10]}",
        },
    }, curves(lines, "steps at the small rate", "loss above FP32, mean of the seeds")


# ---- Plan


def plan(phases: dict[str, dict], update: dict[str, dict]) -> Made:
    begin = {switch: values[0] for switch, values in tables.SWITCHES.items()}
    begin |= {"precision": WITH_BF16.name, "seq_len": 1024}
    named = tables.experiment(begin | {"name": "plan", "note": "from the exhibit plan"})
    config = []
    for key, value in named.model_dump().items():
        config.append(yaml.safe_dump({key: value}, sort_keys=False).rstrip())
    lines = {}
    milliseconds = phases[tables.key_of(begin, tables.SHAPE)]["ms"]
    for card, row in zip(tables.TIMED, milliseconds, strict=True):
        if row:
            lines[card] = dict(zip(tables.POINTS, row, strict=True))
    points, fastest = tables.POINTS, lines[tables.TIMED[-1]]
    ax = curves(lines, "sequences", "ms before the update, predicted", log2_ticks=points)
    ax.set_yscale("log")
    return {
        "title": "Plan a training step",
        "say": "Does your plan fit your card? Choose a model, then drag the micro-batch.",
        "finding": f"{begin['model']} in {begin['precision']}, {begin['seq_len']} tokens: on an "
        f"{tables.TIMED[-1]} one sequence takes {fastest[1]:.0f} ms, and one of {points[-1]} "
        f"together {fastest[points[-1]] / points[-1]:.1f} ms",
        "start": {"micro_batch_size": 4, **begin},
        "choices": tables.SWITCHES,
        "data": {
            "switches": tables.SWITCHES,
            "shape": tables.SHAPE,
            "standing": tables.STANDING,
            "points": points,
            "phase_names": tables.PHASES,
            "looks": looks_of((*tables.FIXED, *tables.VARYING)),
            "n_fixed": len(tables.FIXED),
            "timed": tables.TIMED,
            "launch_bound": LAUNCH_BOUND,
            "slow_host": round(SLOW_CALL_SECONDS / CALL_SECONDS, 2),
            "bands": {"eager": EAGER_BAND, "wide": WIDE_BAND},
            "cards": [[name, card.memory_gib] for name, card in CARDS.items()],
            "context_gib": CONTEXT_GIB,
            "changed": tables.CHANGED,
            "config": config,
        },
    }, ax


MAKERS = (number, step, window, segments, allocator, loss_scale, allreduce, amdahl, seeds, plan)
EXHIBITS: dict[str, Callable[..., Made]] = {maker.__name__: maker for maker in MAKERS}


# ---- Files


def made(name: str, stored: dict[str, Any]) -> Made:
    """Return what an exhibit's file holds without its still, and the axis of that.

    `stored` has the parts of TABLES; they are among its data.
    """
    parts = {part: stored[part] for part in tables.TABLES.get(name, {})}
    exhibit, ax = EXHIBITS[name](**parts)
    exhibit = {"start": {}, "choices": {}} | exhibit
    lines = [exhibit["say"], *exhibit.get("help", [])]
    lines += [f"{key}: {', '.join(map(str, values))}" for key, values in exhibit["choices"].items()]
    exhibit["help"] = "\n\n".join(lines)
    return exhibit | {"data": parts | exhibit["data"]}, ax


def complete(stored: dict, parts: dict[str, Any], keep: Callable[[], None]) -> None:
    """Compute the parts of TABLES that are not stored yet, and `keep` them after each one."""
    for key, part in parts.items():
        if isinstance(part, dict):
            complete(stored.setdefault(key, {}), part, keep)
        elif key not in stored:
            stored[key] = part()
            keep()
            print(key, flush=True)


def picture(ax: Axes, title: str) -> str:
    """Return a figure under its title as a data URI, and close it."""
    ax.set_title(textwrap.fill(title, 72))
    file = io.BytesIO()
    ax.figure.savefig(file, format="webp", dpi=72, pil_kwargs={"quality": 35})
    plt.close(ax.figure)
    return f"data:image/webp;base64,{base64.b64encode(file.getvalue()).decode()}"


def text_of(value: Any, depth: int = 3) -> str:
    """Return JSON with a line for each entry of an object, down to some depth."""
    if not depth or not value or not isinstance(value, dict):
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    lines = [f"{json.dumps(key)}:{text_of(entry, depth - 1)}" for key, entry in value.items()]
    return "{\n" + ",\n".join(lines) + "\n}"


def make(name: str, again: bool) -> None:
    """Write `NAME.json`, with the parts of TABLES that it has, or with all of them made again."""
    path = FOLDER / f"{name}.json"
    file = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    stored = {} if again else file.get("data", {})

    def keep() -> None:
        write_atomically(path, f"{text_of(file)}\n".encode())

    file["data"] = stored
    complete(stored, tables.TABLES.get(name, {}), keep)
    file, ax = made(name, stored)
    file["still"] = picture(ax, file["finding"])
    keep()


if __name__ == "__main__":
    parser = argparse.ArgumentParser("python -m benchmarks.exhibits", description=__doc__)
    parser.add_argument("--again", action="store_true", help="all, not only what is missing")
    arguments = parser.parse_args()
    use_style()
    for name in EXHIBITS:
        make(name, arguments.again)
