"""Redraw the figures of recorded runs, without training: for slides, a paper or another format."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from labutils import plotting
from labutils.files import make_folder, new_id, runs_dir
from labutils.training.records import RunRecord

# Font size in points (small text is five sixths of it), and how many times as large as in a
# notebook.
STYLES = {
    "notebook": (10.0, 1.0),
    "slides": (22.0, 2.2),
}


def draw(records: Sequence[RunRecord]) -> Iterator[tuple[str, Axes]]:
    """Yield (name, axis) of every figure these records have data for; the axes are not closed."""
    timed = [record for record in records if record.timing]
    measured = [record for record in timed if record.memory]
    if timed:
        yield "step_times", plotting.step_times(timed)
        yield "throughput", plotting.throughput(timed)
        yield "losses", plotting.losses(timed)
    if measured:
        yield "peaks", plotting.peaks(measured)
    for record in records:
        if record.memory and record.memory.timeline:
            yield f"timeline_{record.name}", plotting.timeline(record.memory)
        if record.series.loss_scale and record.config.get("precision") == "fp16":
            yield f"loss_scale_{record.name}", plotting.loss_scale(record)


def save_figures(
    records: Sequence[RunRecord],
    formats: Sequence[str] = ("png",),
    style: str = "notebook",
    folder: Path | None = None,
) -> list[Path]:
    """Write every figure in every format (svg, pdf, png, …) and return the paths.

    The folder is by default a new one in runs/. A figure says on which device it was measured.
    Raises ValueError for a format that matplotlib does not have, before anything is drawn. Raises
    KeyError for an unknown style, and OSError if the folder cannot be written.
    """
    known = Figure().canvas.get_supported_filetypes()
    if unknown := set(formats) - set(known):
        there_are = ", ".join(sorted(known))
        raise ValueError(f"no such format: {', '.join(sorted(unknown))}; there are: {there_are}")
    points, times = STYLES[style]
    folder = folder or runs_dir() / f"figures-{new_id()[0]}"
    make_folder(folder)
    devices = sorted({record.environment.get("device", "") for record in records} - {""})
    paths = []
    with plt.rc_context(
        {"font.size": points, "svg.fonttype": "none", "lines.markersize": 6 * times}
    ):
        for name, ax in draw(records):
            figure = ax.figure
            figure.set_size_inches(figure.get_size_inches() * times)
            figure.suptitle("Measured on " + "; ".join(devices), fontsize="small")
            for kind in formats:
                path = folder / f"{name}.{kind}"
                figure.savefig(path)
                paths.append(path)
            plt.close(figure)
    return paths
