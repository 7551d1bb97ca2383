"""A memory history as one page of HTML: open it in a browser, with no network and no kernel."""

from __future__ import annotations

import html
import json
import os
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from labutils.files import REFERENCE_DIR, runs_dir, write_atomically
from labutils.memory import allocator_history
from labutils.memory.allocator_history import Block
from labutils.memory.ledger import mib
from labutils.memory.snapshot import UNREADABLE, Snapshot, load

TEMPLATE = Path(__file__).with_suffix(".html")
SHIPPED = REFERENCE_DIR / "snapshot-gpt2-nano-without-a-card.pickle"
MOST_BLOCKS = 2000  # drawn one by one; smaller ones are drawn as one grey area
MOST_LINES = 7  # with a colour of their own, where blocks have no kind
OTHER_LINES = "other lines"
IN_TABLE = 15
TORCHS = ("(torch/", "at::", "torch::")  # what frames of PyTorch have in them


@dataclass(frozen=True)
class History:
    """What a page shows: blocks, facts to print, and the segments at the end, where known."""

    blocks: list[Block]
    n_events: int
    facts: dict[str, str]
    segments: list[list[tuple[int, bool]]]

    def peak(self) -> tuple[int, int]:
        """Return (event, bytes) of the highest instant; (0, 0) of an empty history."""
        changes = [0] * (self.n_events + 1)
        for block in self.blocks:
            changes[block.start] += block.n_bytes
            changes[block.end] -= block.n_bytes
        alive = list(accumulate(changes))
        highest = max(alive)
        return alive.index(highest), highest


def history(source: Snapshot | str | os.PathLike[str]) -> History:
    """Return the blocks of a snapshot, or of a file: torch's pickle, or JSON of ours.

    A pickle may hold plain data only, and none of its code runs.
    Raises ValueError for a file that cannot be read.
    """
    if isinstance(source, Snapshot):
        return _of_lines(source)
    path = Path(source)
    if path.read_bytes()[:1] == b"{":
        return _of_lines(load(path))
    try:
        raw = allocator_history.read(path)
        blocks, n_events = allocator_history.blocks(raw)
        facts = {str(key): str(value) for key, value in raw.get("facts", {}).items()}
        return History(blocks, n_events, facts, allocator_history.segments(raw))
    except UNREADABLE as error:
        raise ValueError(
            f"{path.name} is no snapshot that can be read: {type(error).__name__}: {error}"
        ) from error


def _of_lines(found: Snapshot) -> History:
    """Return a history whose kinds are the lines that have most bytes at the peak."""
    kinds = dict.fromkeys(list(found.at_peak())[:MOST_LINES])
    alive: dict[int, tuple[int, int, str]] = {}
    blocks = []
    for i, (key, n_bytes, line) in enumerate(found.events):
        if n_bytes > 0:
            alive[key] = i, n_bytes, found.lines[line]
        else:
            blocks.append((i, *alive.pop(key)))
    blocks += [(len(found.events), *one) for one in alive.values()]
    made = []
    for end, start, n_bytes, line in blocks:
        made.append(Block(start, end, n_bytes, line if line in kinds else OTHER_LINES, (line,)))
    made.sort(key=lambda block: block.start)
    facts = {"recorded by": found.method, "not shown": "what was there before the recording"}
    return History(made, len(found.events), facts, [])


def snapshot_page(
    source: Snapshot | str | os.PathLike[str] | None = None, name: str = "snapshot"
) -> Path:
    """Write a page that shows a memory history into runs/, print where, and return its path.

    `source` is a `Snapshot`, or a file that `torch.cuda.memory._dump_snapshot` or `Snapshot.save`
    wrote; without one it is the history that ships with the course. The page needs no network.
    Raises ValueError for a file that cannot be read, OSError if runs/ cannot be written.
    """
    path = runs_dir() / f"{name}.html"
    write_atomically(path, page(history(SHIPPED if source is None else source)).encode())
    print(f"open {path.parent.name}/{path.name} in a browser")
    return path


def snapshot_kinds(
    source: Snapshot | str | os.PathLike[str] | None = None,
) -> tuple[dict[str, int], int]:
    """Return ({kind of block: bytes at the peak}, number of blocks then) of a memory history.

    `source` as for `snapshot_page`, whose errors are raised.
    """
    found = history(SHIPPED if source is None else source)
    event, _ = found.peak()
    alive = [block for block in found.blocks if block.start <= event < block.end]
    sums = dict.fromkeys(_kinds(found.blocks), 0)
    for block in alive:
        sums[block.kind] += block.n_bytes
    return sums, len(alive)


def page(found: History) -> str:
    """Return the page of a history as HTML, its data and script inside."""
    event, n_bytes = found.peak()
    title = (
        f"Memory history: {mib(n_bytes):,.2f} MiB at the peak, event {event} of {found.n_events}"
    )
    # "</" would end the script in which the data stands
    data = json.dumps(_data(found), separators=(",", ":")).replace("</", "<\\/")
    facts = [f"<dt>{_safe(key)}</dt><dd>{_safe(text)}</dd>" for key, text in found.facts.items()]
    parts = {
        "TITLE": _safe(title),
        "FACTS": "".join(facts),
        "ROWS": _rows(found, event),
        "SEGMENTS": _segments(found.segments),
        "DATA": data,
    }
    template = TEMPLATE.read_text(encoding="utf-8")
    return re.sub(r"@([A-Z]+)@", lambda found: parts[found[1]], template)


def _data(found: History) -> dict[str, Any]:
    by_size = sorted(found.blocks, key=lambda block: -block.n_bytes)
    limit = by_size[MOST_BLOCKS].n_bytes if len(by_size) > MOST_BLOCKS else -1
    kinds = _kinds(found.blocks)
    frames: dict[tuple[str, ...], int] = {}
    drawn, changes, n_small = [], defaultdict(int), 0
    for block in found.blocks:
        if block.n_bytes > limit:
            place = frames.setdefault(block.frames, len(frames))
            kind = kinds.index(block.kind)
            drawn.append([block.start, block.end, block.n_bytes, kind, place])
        else:
            n_small += 1
            changes[block.start] += block.n_bytes
            changes[block.end] -= block.n_bytes
    return {
        "nEvents": found.n_events,
        "kinds": kinds,
        "frames": list(frames),
        "blocks": drawn,
        "small": sorted(changes.items()),
        "nSmall": n_small,
    }


def _kinds(blocks: Sequence[Block]) -> list[str]:
    """Return the kinds that occur: those of the allocator in their order, or lines by bytes."""
    sums: dict[str, int] = defaultdict(int)
    for block in blocks:
        sums[block.kind] += block.n_bytes
    known = [kind for kind in allocator_history.KINDS if kind in sums]
    others = sorted(sums.keys() - set(known), key=lambda kind: (kind == OTHER_LINES, -sums[kind]))
    return known + others


def _rows(found: History, event: int) -> str:
    alive = [block for block in found.blocks if block.start <= event < block.end]
    alive.sort(key=lambda block: -block.n_bytes)
    rows = []
    for block in alive[:IN_TABLE]:
        cells = f"{mib(block.n_bytes):,.3f}", block.kind, _line(block.frames)
        rows.append("<tr><td>" + "</td><td>".join(map(_safe, cells)) + "</td></tr>")
    rest = alive[IN_TABLE:]
    if rest:
        left = sum(block.n_bytes for block in rest)
        rows.append(f"<tr><td>{mib(left):,.3f}</td><td colspan=2>{len(rest)} others</td></tr>")
    return "".join(rows)


def _line(frames: Sequence[str]) -> str:
    """Return the innermost frame that is not PyTorch's own; failing that, the node of autograd."""
    own = [frame for frame in frames if not any(name in frame for name in TORCHS)]
    nodes = [frame for frame in frames if "Backward" in frame]
    return (own or nodes or list(frames) or ["not recorded"])[0]


def _segments(segments: Sequence[Sequence[tuple[int, bool]]]) -> str:
    if not segments:
        return ""
    sizes = [sum(size for size, _ in parts) for parts in segments]
    reserved, largest = sum(sizes), max(sizes)
    text = [
        f"<h2>The segments at the end: {mib(reserved):,.1f} MiB reserved</h2>",
        "<p>Each bar is a segment, all to one scale. Filled parts hold tensors; hatched parts are "
        "free. Sizes of blocks are what was asked for; the allocator rounds them up to 512.</p>",
    ]
    for total, parts in sorted(zip(sizes, segments, strict=True), key=lambda pair: -pair[0]):
        width = f"width:{max(1, 100 * total / largest):.1f}%"
        text.append(f'<div class="segment" style="{width}" title="{mib(total):,.1f} MiB">')
        for size, is_alive in parts:
            tag = "b" if is_alive else "s"
            text.append(f'<{tag} style="flex:{size} 0 0"></{tag}>')
        text.append("</div>")
    return "".join(text)


def _safe(text: object) -> str:
    return html.escape(str(text))
