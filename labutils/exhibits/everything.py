"""One page with all exhibits, to give to a class."""

from __future__ import annotations

from pathlib import Path

from labutils.exhibits import play
from labutils.exhibits.exhibit import FOLDER, page
from labutils.exhibits.ledger_switches import SWITCHES
from labutils.files import runs_dir, write_atomically

WITH_MORE = {"ledger": {"models": SWITCHES["model"]}}  # there is room for it on a page


def save_all(path: str | Path | None = None) -> Path:
    """Write one page with all exhibits, by default `runs/exhibits.html`; return its path."""
    made = []
    for name, maker in vars(play).items():
        if (FOLDER / f"{name}.html").exists():
            made.append(maker(**WITH_MORE.get(name, {})))
    target = Path(path) if path else runs_dir() / "exhibits.html"
    text = page("Things to play with", made)
    write_atomically(target, text.encode())
    return target
