"""One exhibit: a piece of HTML with its script and data inside, for notebooks and for pages.

Nothing is fetched, and no kernel is needed. Where scripts do not run, a still figure stands.
"""

from __future__ import annotations

import base64
import html
import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from PIL import Image

from labutils.files import runs_dir, write_atomically

FOLDER = Path(__file__).parent
PAGE = """<!DOCTYPE html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: auto; padding: 8px }}
</style>
{body}
</html>
"""


@dataclass(frozen=True)
class Exhibit:
    """An exhibit as Jupyter shows it. `say` is the sentence that belongs to it."""

    name: str
    title: str
    say: str
    html: str

    def _repr_mimebundle_(self, **_: object) -> dict[str, str]:
        return {"text/html": self.html, "text/plain": f"{self.title}. {self.say}"}

    def save(self, path: str | Path | None = None) -> Path:
        """Write a page of its own, by default `runs/exhibits/NAME.html`; return its path."""
        target = Path(path) if path else runs_dir() / "exhibits" / f"{self.name}.html"
        write_atomically(target, page(self.title, [self]).encode())
        return target


def make_exhibit(name: str, title: str, say: str, data: Any, still: Axes, alt: str) -> Exhibit:
    """Return the exhibit whose markup and script are `NAME.html` in this folder.

    `data` is what its script gets, as JSON. `still` is drawn where scripts do not run; `alt` says
    in words what it shows. The figure of `still` is closed.
    """
    markup, _, script = (FOLDER / f"{name}.html").read_text(encoding="utf-8").partition("<script>")
    script = script.removesuffix("\n").removesuffix("</script>")
    values = {"NAME": name, "MARKUP": markup, "STYLE": _read("shared.css"), "DATA": data}
    program = _read("shared.js")
    for key, value in values.items():
        program = program.replace(f'"{key}"', _literal(value), 1)
    program = program.replace("/* MOUNT */", script, 1)
    picture = f'<img alt="{html.escape(alt)}" src="data:image/png;base64,{_png(still)}">'
    body = f'<div data-exhibit="{name}"><figure style="margin: 0">{picture}</figure></div>'
    return Exhibit(name, title, say, f"{body}\n<script>{program}</script>")


def page(title: str, exhibits: list[Exhibit]) -> str:
    """Return a page with some exhibits, each with its title and its sentence."""
    parts = [f"<h1>{html.escape(title)}</h1>"] if len(exhibits) > 1 else []
    for one in exhibits:
        parts.append(f'<h2 id="{one.name}">{html.escape(one.title)}</h2>')
        parts.append(f"<p>{html.escape(one.say)}</p>\n{one.html}")
    return PAGE.format(title=html.escape(title), body="\n".join(parts))


def _read(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")


def _literal(value: Any) -> str:
    """Return JSON that can stand inside a script element."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _png(ax: Axes) -> str:
    figure = ax.figure
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=60, metadata={"Software": None})
    plt.close(figure)
    small = io.BytesIO()
    Image.open(file).convert("RGB").quantize(32).save(small, format="png", optimize=True)
    return base64.b64encode(small.getvalue()).decode()
