"""What a block keeps, along its computation; and policies in the plane of memory and time."""

from __future__ import annotations

from collections.abc import Mapping

from matplotlib.axes import Axes

from labutils.plotting.style import BLACK, BLUE, COLORS, MARKERS, ORANGE, PURPLE, new_axis


def kept_along(kept: Mapping[str, float], ax: Axes | None = None) -> Axes:
    """Draw {tensor: how many numbers of it are kept} as columns, in the order of computation.

    The first one is the block's input, which a checkpoint keeps; it has a colour of its own.
    """
    ax = new_axis(ax, 9, 3.4)
    labels = [name.replace(" ", "\n", 1) for name in kept]
    colors = [ORANGE] + [BLUE] * (len(kept) - 1)
    bars = ax.bar(range(len(kept)), list(kept.values()), color=colors, edgecolor=BLACK)
    ax.bar_label(bars, fmt="%g", padding=3)
    ax.set_xticks(range(len(kept)), labels, fontsize="small")
    ax.margins(y=0.15)
    ax.set_xlabel("tensors of one block, in the order in which they are computed")
    ax.set_ylabel("numbers kept for each\nnumber of the input")
    return ax


def pareto_front(points: Mapping[str, tuple[float, float]], tolerance: float = 0.05) -> list[str]:
    """Return the names of the points (memory, time) that no other point beats, in order.

    A point is beaten by one that is smaller and no slower, or no larger and faster by more than
    `tolerance`, a fraction: smaller differences of time are taken for noise.
    """
    front = []
    for name, (memory, ms) in points.items():
        is_beaten = False
        for other_memory, other_ms in points.values():
            smaller = other_memory < memory and other_ms <= ms
            faster = other_memory <= memory and other_ms < (1 - tolerance) * ms
            is_beaten = is_beaten or smaller or faster
        if not is_beaten:
            front.append(name)
    return front


def pareto(points: Mapping[str, tuple[float, float]], ax: Axes | None = None) -> Axes:
    """Draw {name: (peak in MiB, ms of a step)}, and a line through the Pareto front."""
    ax = new_axis(ax, 8, 4)
    for i, (name, (memory, ms)) in enumerate(points.items()):
        k = i % len(MARKERS)
        look = {"color": COLORS[k], "mec": BLACK, "ms": 9, "ls": ""}
        ax.plot(memory, ms, marker=MARKERS[k], label=name, **look)
    corners = sorted(points[name] for name in pareto_front(points))
    line = {"color": BLACK, "ls": ":", "drawstyle": "steps-post", "label": "Pareto front"}
    ax.plot([memory for memory, _ in corners], [ms for _, ms in corners], **line)
    ax.set(xlabel="peak of one step, MiB", ylabel="median step, ms")
    ax.set_ylim(0, 1.1 * max(ms for _, ms in points.values()))
    ax.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    return ax


def mark_guess(x: float, guess: float | None, ax: Axes) -> None:
    """Mark a reader's guess as a point of its own; without a guess nothing is drawn."""
    if guess is not None:
        ax.plot(x, guess, "P", color=PURPLE, mec=BLACK, ms=10, label="your guess")
        ax.legend(frameon=False)
