"""Records and formats → matplotlib axes.

Each function takes and returns an axis; none shows or saves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, NullFormatter

from labutils.memory.ledger import MIB, MemoryLedger
from labutils.memory.snapshot import Snapshot
from labutils.techniques.float_formats import FORMATS, FP16, FloatFormat
from labutils.training.compare import grouped
from labutils.training.records import RunRecord

# Okabe and Ito's palette: told apart by colour-blind readers; markers and line styles differ as
# well.
BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
YELLOW, BLUE, VERMILION, PURPLE = "#F0E442", "#0072B2", "#D55E00", "#CC79A7"
COLORS = (BLUE, ORANGE, GREEN, VERMILION, PURPLE, SKY, BLACK, YELLOW)
STYLES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)), "-")
MARKERS = "osD^vPX*"
LOG_TICKS = (
    1,
    1.2,
    1.5,
    2,
    3,
    4,
    5,
    6,
    7,
    8,
    9,
)  # of a decade, where little more than one factor is drawn
CATEGORY_LOOKS = {  # colour and hatch of each memory category
    "parameters": (BLUE, ""),
    "gradients": (ORANGE, "//"),
    "optimizer state": (GREEN, ".."),
    "activations and temporaries": (SKY, "\\\\"),
    "activations": (SKY, "--"),
    "cast weights": (YELLOW, ""),
    "logits and loss": (PURPLE, "xx"),
    "temporaries": (VERMILION, "oo"),
    "library workspaces": (BLACK, ".."),
    "rounding up": ("#999999", ""),
    "holes": ("#dddddd", "xx"),  # reserved, and of no use to any tensor
}


def _axis(ax: Axes | None, width: float = 7, height: float = 3.2) -> Axes:
    ax = ax if ax is not None else plt.subplots(figsize=(width, height), layout="constrained")[1]
    ax.spines[["top", "right"]].set_visible(False)
    return ax


def bit_layout(formats: Sequence[FloatFormat] = FORMATS, ax: Axes | None = None) -> Axes:
    """Draw one square per bit: sign, exponent, mantissa."""
    ax = _axis(ax, 8, 0.55 * len(formats) + 0.9)
    for row, f in enumerate(formats):
        start = 0
        for part, n_bits, color in (
            ("sign", 1, BLACK),
            ("exponent", f.exponent_bits, ORANGE),
            ("mantissa", f.mantissa_bits, SKY),
        ):
            for i in range(n_bits):
                label = part if row == i == 0 else None
                ax.barh(row, 0.92, left=start + i, color=color, edgecolor="white", label=label)
            if n_bits > 1:
                ax.text(start + n_bits / 2, row, str(n_bits), ha="center", va="center", color=BLACK)
            start += n_bits
    ax.set_yticks(range(len(formats)), [f.name for f in formats])
    ax.invert_yaxis()
    ax.set_xlabel("bit")
    ax.legend(ncols=3, loc="lower right", frameon=False)
    return ax


def ranges(formats: Sequence[FloatFormat] = FORMATS, ax: Axes | None = None) -> Axes:
    """Draw the positive numbers each format reaches on a log axis; subnormal ones hatched."""
    ax = _axis(ax, 8, 0.5 * len(formats) + 1.1)
    for row, f in enumerate(formats):
        low, normal, high = (np.log2(v) for v in (f.min_subnormal, f.min_normal, f.max))
        ax.barh(
            row, high - normal, left=normal, color=BLUE, height=0.6, label=None if row else "normal"
        )
        ax.barh(
            row,
            normal - low,
            left=low,
            color=SKY,
            hatch="//",
            edgecolor="white",
            height=0.6,
            label=None if row else "subnormal (fewer bits)",
        )
    ax.set_yticks(range(len(formats)), [f.name for f in formats])
    ax.invert_yaxis()
    ax.axvline(0, color=BLACK, lw=0.8, ls=":")
    ax.set_xlabel("positive numbers, powers of two (0 is the number 1)")
    ax.legend(loc="lower right", frameon=False)
    return ax


def relative_spacing(formats: Sequence[FloatFormat] = FORMATS, ax: Axes | None = None) -> Axes:
    """Draw the distance to the next number, relative to the number: precision against range."""
    ax = _axis(ax)
    for i, f in enumerate(formats):
        exponents = np.arange(np.log2(f.min_subnormal), np.log2(f.max))
        spacing = [f.spacing(2.0**e) / 2.0**e for e in exponents]
        # two lines coincide in part: the later, narrower one leaves the earlier visible
        ax.plot(exponents, np.log2(spacing), color=COLORS[i], ls=STYLES[i], lw=5 - i, label=f.name)
    ax.set_xlabel("number, powers of two")
    ax.set_ylabel("relative spacing, powers of two")
    ax.legend(frameon=False, loc="center right", bbox_to_anchor=(1, 0.35))
    return ax


def gradient_histogram(gradients: torch.Tensor, scale: float = 1.0, ax: Axes | None = None) -> Axes:
    """Draw the magnitudes of real gradients, times `scale`, over what FP16 can hold."""
    ax = _axis(ax)
    magnitudes = gradients.detach().flatten().double().abs().cpu().numpy() * scale
    exponents = np.log2(magnitudes[magnitudes > 0])
    ax.hist(exponents, bins=np.arange(-60, 21), color=BLUE)
    zero, normal, high = (
        np.log2(FP16.min_subnormal) - 1,
        np.log2(FP16.min_normal),
        np.log2(FP16.max),
    )
    top = ax.get_ylim()[1]
    for left, right, color, text in (
        (-60, zero, VERMILION, "becomes 0"),
        (zero, normal, YELLOW, "subnormal"),
        (normal, high, "white", "normal"),
        (high, 20, VERMILION, "inf"),
    ):
        ax.axvspan(left, right, color=color, alpha=0.25, lw=0)
        ax.text((left + right) / 2, top * 1.01, text, ha="center", va="bottom", fontsize="small")
    ax.set_xlim(-60, 20)
    ax.set_xlabel(f"|gradient| × {scale:g}, powers of two")
    ax.set_ylabel("how many")
    return ax


def _look(name: str, position: int) -> int:
    """Return the index of a run's colour, marker and line style:

    A precision keeps its own in every figure.
    """
    known = ("fp32", "tf32", "fp16", "bf16")
    return known.index(name) if name in known else 4 + position % 4


def _trained(records: Sequence[RunRecord]) -> dict[str, list[RunRecord]]:
    return grouped([record for record in records if record.timing])


def _bars(ax: Axes, labels: Sequence[str], values: Sequence[float], what: str) -> Axes:
    bars = ax.barh(
        range(len(labels)),
        values,
        color=[COLORS[_look(label, i)] for i, label in enumerate(labels)],
    )
    ax.bar_label(bars, [f"{v:,.3g}" if v < 1000 else f"{v:,.0f}" for v in values], padding=3)
    ax.set_yticks(range(len(labels)), labels)
    ax.invert_yaxis()
    ax.margins(x=0.18)
    ax.set_xlabel(what)
    return ax


def step_times(records: Sequence[RunRecord], ax: Axes | None = None) -> Axes:
    """Draw the median time of an optimizer step, in ms; repeated runs share a bar."""
    groups = _trained(records)
    medians = [
        float(np.median([r.timing.median_step_ms for r in runs])) for runs in groups.values()
    ]
    return _bars(_axis(ax), list(groups), medians, "median optimizer step, ms")


def throughput(records: Sequence[RunRecord], ax: Axes | None = None) -> Axes:
    """Draw tokens per second."""
    groups = _trained(records)
    medians = [
        float(np.median([r.timing.median_step_ms for r in runs])) for runs in groups.values()
    ]
    rates = [
        1000 * runs[0].tokens_per_step / ms
        for runs, ms in zip(groups.values(), medians, strict=True)
    ]
    return _bars(_axis(ax), list(groups), rates, "tokens per second")


def stacked_memory(peaks: Mapping[str, Mapping[str, float]], ax: Axes | None = None) -> Axes:
    """Draw {label: {category:

    Bytes}} as stacked bars, in MiB. A category without bytes is left out.
    """
    ax = _axis(ax, 8, 0.45 * len(peaks) + 1.9)
    for row, parts in enumerate(peaks.values()):
        left = 0.0
        for category, n_bytes in ((c, n) for c, n in parts.items() if n):
            color, hatch = CATEGORY_LOOKS.get(category, (PURPLE, "xx"))
            ax.barh(
                row,
                n_bytes / MIB,
                left=left,
                color=color,
                hatch=hatch,
                edgecolor="white",
                label=category,
            )
            left += n_bytes / MIB
        ax.text(left, row, f" {left:,.1f}", va="center")
    ax.set_yticks(range(len(peaks)), list(peaks))
    ax.invert_yaxis()
    ax.margins(x=0.14)
    ax.set_xlabel("bytes allocated at the peak, MiB")
    handles = dict(zip(*reversed(ax.get_legend_handles_labels()), strict=True))
    ax.legend(
        handles.values(),
        handles,
        loc="upper center",
        bbox_to_anchor=(0.5, -0.25),
        ncols=3,
        frameon=False,
    )
    return ax


def timeline(ledger: MemoryLedger, ax: Axes | None = None) -> Axes:
    """Draw what is alive in one step from left to right, stacked by category; phases are named, the
    peak is marked.
    """
    ax = _axis(ax, 9, 3.4)
    points = np.array([point for _, segment in ledger.timeline for point in segment], dtype=float)
    at, by_category = points[:, 0] - points[0, 0], points[:, 1:].T / MIB
    shown = [
        (name, row) for name, row in zip(ledger.categories, by_category, strict=True) if row.any()
    ]
    layers = ax.stackplot(at, [row for _, row in shown], labels=[name for name, _ in shown])
    for layer, (name, _) in zip(layers, shown, strict=True):
        color, hatch = CATEGORY_LOOKS[name]
        layer.set(facecolor=color, hatch=hatch, edgecolor="white", linewidth=0)
    totals = by_category.sum(axis=0)
    top = (
        ledger.peak_bytes / MIB
    )  # on CUDA between two looks at the allocator, so above what is drawn
    ax.plot(at[totals.argmax()], top, "v", color=BLACK, ms=8)
    ax.annotate(
        f"{top:,.1f} MiB", (at[totals.argmax()], top), xytext=(6, 4), textcoords="offset points"
    )
    for phase, segment in ledger.timeline:
        start, end = (segment[i][0] - points[0, 0] for i in (0, -1))
        ax.axvline(start, color=BLACK, lw=0.8, ls=":")
        if end - start > 0.03 * at[-1]:
            ax.text(
                (start + end) / 2, 1.14 * top, phase, ha="center", va="center", fontsize="small"
            )
    ax.set(xlim=(0, at[-1]), ylim=(0, 1.22 * top), xticks=[], ylabel="MiB allocated")
    ax.set_xlabel(f"one step from left to right: {ledger.method}")
    ax.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    return ax


def snapshot(found: Snapshot, ax: Axes | None = None, n_lines: int = 7) -> Axes:
    """Draw a memory history from left to right, stacked by the line that allocated; small ones are
    summed up.
    """
    ax = _axis(ax, 10, 4.6)
    alive = found.alive() / MIB  # (events, lines)
    order = np.argsort(-alive.max(axis=0), kind="stable") if alive.size else []
    shown = [
        (found.lines[i].lstrip("_"), alive[:, i]) for i in order[:n_lines]
    ]  # matplotlib hides labels with _
    if len(order) > n_lines:
        shown.append(("all other lines", alive[:, order[n_lines:]].sum(axis=1)))
    layers = ax.stackplot(
        np.arange(len(alive)), [row for _, row in shown], labels=[line[:70] for line, _ in shown]
    )
    for i, layer in enumerate(layers):
        layer.set(
            facecolor=COLORS[i % len(COLORS)],
            hatch=("", "//", "..", "xx")[i % 4],
            edgecolor="white",
            linewidth=0,
        )
    ax.set(xlim=(0, max(1, len(alive) - 1)), ylim=(0, None), ylabel="MiB allocated since the start")
    ax.set_xlabel(f"allocations and frees, in order: {found.method}")
    ax.legend(
        frameon=False,
        loc="upper center",
        bbox_to_anchor=(0.5, -0.2),
        prop={"family": "monospace", "size": "small"},
    )
    return ax


def peaks(records: Sequence[RunRecord], ax: Axes | None = None) -> Axes:
    """Draw the measured peak of each run by category."""
    found = {
        name: runs[0].memory.categories
        for name, runs in _trained(records).items()
        if runs[0].memory
    }
    return stacked_memory(found, ax)


def losses(records: Sequence[RunRecord], ax: Axes | None = None) -> Axes:
    """Draw the training loss against tokens seen, which is the only fair axis for unequal runs."""
    ax = _axis(ax)
    for i, (name, runs) in enumerate(_trained(records).items()):
        series = runs[0].series.loss
        tokens = np.arange(1, len(series) + 1) * runs[0].tokens_per_step
        every = max(1, len(series) // 8)
        k = _look(name, i)
        ax.plot(
            tokens,
            series,
            color=COLORS[k],
            ls=STYLES[k],
            marker=MARKERS[k],
            markevery=every,
            ms=4,
            label=name,
        )
    ax.set_xlabel("tokens trained on")
    ax.set_ylabel("training loss, nats per token")
    ax.legend(frameon=False)
    return ax


def four_panels(records: Sequence[RunRecord]) -> np.ndarray:
    """Draw step time, tokens/s, peak by category and loss; return the 2×2 axes."""
    figure, axes = plt.subplots(2, 2, figsize=(11, 6.4), layout="constrained")
    step_times(records, axes[0, 0])
    throughput(records, axes[0, 1])
    peaks(records, axes[1, 0])
    losses(records, axes[1, 1])
    devices = {r.environment["device"] for r in records if r.timing}
    figure.suptitle("Measured on " + "; ".join(sorted(devices)), fontsize="medium")
    return axes


def loss_scale(record: RunRecord, ax: Axes | None = None) -> Axes:
    """Draw the loss scale of each step; a cross marks a skipped step."""
    ax = _axis(ax)
    steps = np.arange(1, len(record.series.loss_scale) + 1)
    scale, skipped = np.array(record.series.loss_scale), np.array(record.series.skipped)
    ax.step(steps, scale, where="mid", color=BLUE, label="loss scale used")
    ax.plot(
        steps[skipped],
        scale[skipped],
        "X",
        color=VERMILION,
        ms=9,
        ls="",
        label="overflow: step skipped",
    )
    ax.set_yscale("log", base=2)
    ax.set_xlabel("optimizer step")
    ax.set_ylabel("loss scale")
    ax.legend(frameon=False)
    return ax


def reconcile(
    rows: Mapping[str, Mapping[str, float | None]],
    what: str,
    ax: Axes | None = None,
    unit: str = "×",
) -> Axes:
    """Draw {row: {guess, prediction, measurement, …:

    Value}} as points on a log axis, 1 marked; None is left out.
    """
    ax = _axis(ax, 7, 0.6 * len(rows) + 1.4)
    kinds = list(dict.fromkeys(kind for values in rows.values() for kind in values))
    for i, kind in enumerate(kinds):
        points = [
            (float(values[kind]), y)
            for y, values in enumerate(rows.values())
            if values.get(kind) is not None
        ]
        for x, y in points:  # alternately above and below, so that close points stay readable
            ax.annotate(
                f"{x:,.0f}{unit}" if x >= 1000 else f"{x:.3g}{unit}",
                (x, y),
                xytext=(0, -17 if i % 2 else 8),
                textcoords="offset points",
                ha="center",
            )
        if points:
            ax.plot(*zip(*points, strict=True), MARKERS[i], color=COLORS[i], ms=9, label=kind)
    ax.axvline(1, color=BLACK, lw=0.8, ls=":")
    ax.set_xscale("log")
    low, high = ax.get_xlim()
    subs = (1,) if high > 100 * low else (1, 2, 5) if high > 4 * low else LOG_TICKS
    ax.xaxis.set_major_locator(
        LogLocator(subs=subs, numticks=5 if len(subs) == 1 else None)
    )  # wide labels: few
    ax.xaxis.set_major_formatter("{x:g}")
    ax.xaxis.set_minor_formatter(NullFormatter())
    ax.set_yticks(range(len(rows)), list(rows))
    ax.set_ylim(len(rows) - 0.5, -0.6)
    ax.margins(x=0.1)
    ax.set_xlabel(what)
    if kinds and rows:
        ax.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    return ax


def curves(
    lines: Mapping[str, Mapping[float, float | None]],
    xlabel: str,
    ylabel: str,
    ax: Axes | None = None,
    log2_ticks: Sequence[float] = (),
) -> Axes:
    """Draw {label: {x: y}} as lines told apart by colour, marker and style; a y of None leaves a
    gap.

    With `log2_ticks` the x axis is logarithmic and labelled there.
    """
    ax = _axis(ax)
    for i, (label, points) in enumerate(lines.items()):
        k = i % len(COLORS)
        y = [np.nan if value is None else value for value in points.values()]
        every = max(1, len(y) // 12)
        ax.plot(
            list(points),
            y,
            color=COLORS[k],
            ls=STYLES[k],
            marker=MARKERS[k],
            markevery=every,
            ms=6,
            label=label,
        )
    ax.set_xlabel(xlabel)
    ax.set_ylabel(ylabel)
    if log2_ticks:
        ax.set_xscale("log", base=2)
        ax.set_xticks(log2_ticks, [f"{tick:g}" for tick in log2_ticks])
    if lines:
        ax.legend(frameon=False)
    return ax


def rates(by_name: Mapping[str, Mapping[int, float]], ax: Axes | None = None) -> Axes:
    """Draw {name: {n: GFLOP/s of an n×n product}} on log axes."""
    ax = _axis(ax)
    for i, (name, by_size) in enumerate(by_name.items()):
        k = _look(name, i)
        ax.plot(
            *zip(*by_size.items(), strict=True),
            marker=MARKERS[k],
            ls=STYLES[k],
            color=COLORS[k],
            label=name,
        )
    sizes = sorted({n for by_size in by_name.values() for n in by_size})
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_xticks(sizes, sizes)
    ax.set_xlabel("n of an n×n product")
    ax.set_ylabel("GFLOP/s")
    ax.legend(frameon=False)
    return ax


def heat_map(
    values: np.ndarray,
    rows: Sequence[object],
    columns: Sequence[object],
    ax: Axes | None = None,
    fmt: str = "{:.0f}",
) -> Axes:
    """Draw a small table of numbers, `(len(rows), len(columns))`, shaded by value and with the
    values written in.

    A NaN leaves its field empty.
    """
    ax = _axis(ax, 5.5, 3.2)
    image = ax.imshow(values, cmap="cividis", aspect="auto")
    middle = (np.nanmin(values) + np.nanmax(values)) / 2
    for i, j in np.argwhere(~np.isnan(values)):
        value = values[i, j]
        color = BLACK if value > middle else "white"
        ax.text(j, i, fmt.format(value), ha="center", va="center", color=color)
    ax.set_xticks(range(len(columns)), columns)
    ax.set_yticks(range(len(rows)), rows)
    ax.figure.colorbar(image, ax=ax)
    return ax
