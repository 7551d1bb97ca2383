"""One page with all exhibits, to give to a class."""

from __future__ import annotations

from pathlib import Path

from labutils.exhibits import play
from labutils.exhibits.exhibit import FOLDER, page
from labutils.files import runs_dir, write_atomically


def save_all(path: str | Path | None = None) -> Path:
    """Write one page with all exhibits, by default `runs/exhibits.html`; return its path."""
    made = []
    for name, maker in vars(play).items():
        if (FOLDER / f"{name}.html").exists():
            made.append(maker())
    target = Path(path) if path else runs_dir() / "exhibits.html"
    text = page("Things to play with", made)
    write_atomically(target, text.encode())
    return target
