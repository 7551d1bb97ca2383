"""One exhibit: a piece of HTML with its script and data inside, for notebooks and for pages.

Nothing is fetched, and no kernel is needed. Where scripts do not run, a still figure stands.
`NAME.js` is an exhibit: its model as plain functions, and `mount`, which shows it.
"""

from __future__ import annotations

import base64
import html
import io
import json
import re
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from labutils import plotting
from labutils.techniques.numerics import FloatFormat, rounded

FOLDER = Path(__file__).parent
SHARED = "shared"
COLORS = ("BLUE", "GREEN", "ORANGE", "PURPLE", "SKY", "VERMILION", "YELLOW")  # a page's --blue, …
# Of a script: what joins modules, comments on lines of their own, and indentation.
LEFT_OUT = re.compile(r"^import [^;]*;\n|^export |^ *//.*\n|^ +", re.MULTILINE)
PAGE = """<!DOCTYPE html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>
  html {{ background: Canvas; color: CanvasText }}
  body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: auto; padding: 8px }}
</style>
<main>
{body}
</main>
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


def make_exhibit(
    name: str, title: str, say: str, data: dict[str, Any], still: Axes, finding: str
) -> Exhibit:
    """Return the exhibit whose script is `NAME.js` in this folder.

    `data` is what its script gets, as JSON. `still` is drawn where scripts do not run; `finding`,
    its title, says in words what it shows. The figure of `still` is closed.
    """
    still.set_title(textwrap.fill(finding, 72), fontsize="medium")
    picture = f'<img alt="{html.escape(finding)}" src="data:image/webp;base64,{_picture(still)}">'
    body = f'<div data-exhibit="{name}"><figure style="margin: 0">{picture}</figure></div>'
    begin = ", ".join([_literal(name), "mount", _literal(data), _literal(style())])
    script = f'(() => {{\n"use strict";\n{program(name)}start({begin});\n}})();'
    return Exhibit(name, title, say, f"{body}\n<script>{script}</script>")


def program(name: str) -> str:
    """Return what all exhibits share and `NAME.js`, as one script without modules."""
    return LEFT_OUT.sub("", _read(f"{SHARED}.js") + _read(f"{name}.js"))


def style() -> str:
    """Return the style sheet of all exhibits, with the colours of our figures."""
    colors = "".join(f"--{color.lower()}:{getattr(plotting, color)};" for color in COLORS)
    return f"[data-exhibit]{{{colors}}}" + re.sub(r"\s+", " ", _read(f"{SHARED}.css"))


@cache
def names() -> list[str]:
    """Return the names of all exhibits."""
    return sorted(path.stem for path in FOLDER.glob("*.js") if path.stem != SHARED)


@cache
def table_of(name: str) -> Any:
    """Return the table `NAME.json`, which `make exhibits` computes."""
    return json.loads(_read(f"{name}.json"))


def looks_of(categories: Iterable[str]) -> list[list[str]]:
    """Return [name, colour, hatch] of categories of memory, as in our figures."""
    return [[name, *plotting.CATEGORY_LOOKS[name]] for name in categories]


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


def page(title: str, exhibits: list[Exhibit]) -> str:
    """Return a page with some exhibits, each with its title and its sentence."""
    parts = [f"<h1>{html.escape(title)}</h1>"]
    for exhibit in exhibits:
        if exhibit.title != title:
            parts.append(f"<h2>{html.escape(exhibit.title)}</h2>")
        parts.append(f"<p>{html.escape(exhibit.say)}</p>\n{exhibit.html}")
    return PAGE.format(title=html.escape(title), body="\n".join(parts))


def _read(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")


def _literal(value: Any) -> str:
    """Return a value as a script reads it: JSON, with NaN for a number that is none."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _picture(ax: Axes) -> str:
    file = io.BytesIO()
    ax.figure.savefig(file, format="webp", dpi=64, pil_kwargs={"quality": 50})
    plt.close(ax.figure)
    return base64.b64encode(file.getvalue()).decode()
