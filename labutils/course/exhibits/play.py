"""Exhibits: `lab.play.number()` and so on. Each is played with in the notebook or in a page.

`NAME.json`, which `make exhibits` writes, holds an exhibit's words, its data, and a still picture
for where scripts do not run. `NAME.js` is its model as plain functions, and `mount`, which shows
it. Nothing is computed here, nothing is fetched, and no kernel is needed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from inspect import Parameter, Signature
from operator import methodcaller
from pathlib import Path
from typing import Any

from labutils.files import write_atomically

FOLDER = Path(__file__).parent
NAMES = sorted(path.stem for path in FOLDER.glob("*.json"))
EITHER = Parameter.POSITIONAL_OR_KEYWORD
# Of a script: what joins modules, comments on lines of their own, and indentation.
LEFT_OUT = re.compile(r"^import [^;]*;\n|^export |^ *//.*\n|^ +", re.MULTILINE)
RULE = re.compile(r"^(\.play [^{}@]*)\{[^}]*\}\n", re.MULTILINE)  # of the style
CLASS = re.compile(r"\.(?!play)([a-z-]+)")  # .play is the box of every exhibit


@dataclass(frozen=True)
class Exhibit:
    """An exhibit as Jupyter shows it. `say` is the sentence that belongs to it."""

    title: str
    say: str
    html: str

    def _repr_mimebundle_(self, **_: object) -> dict[str, str]:
        return {"text/html": self.html, "text/plain": f"{self.title}. {self.say}"}


def __getattr__(name: str) -> Any:
    if name not in NAMES:
        raise AttributeError(f"there is no exhibit {name!r}; there are: {', '.join(NAMES)}")
    return player(name)


def __dir__() -> list[str]:
    return NAMES


def player(name: str) -> Any:
    """Return the function that shows an exhibit; its arguments and words are those of NAME.json."""
    table = json.loads(read(f"{name}.json"))
    defaults = table["start"]
    signature = Signature([Parameter(key, EITHER, default=defaults[key]) for key in defaults])

    def play(*values: Any, **named: Any) -> Exhibit:
        try:
            start = defaults | signature.bind(*values, **named).arguments
        except TypeError as error:
            raise TypeError(f"{name}: {error}; its arguments are {signature}") from None
        for key, allowed in table["choices"].items():
            if start[key] not in allowed:
                raise ValueError(f"{key}: {start[key]!r} is not one of {allowed}")
        # `choices` cannot say that two numbers belong together
        if name == "amdahl" and start != defaults:
            check_own_point(**start)
        return Exhibit(table["title"], table["say"], html_of(name, table, start))

    play.__name__ = play.__qualname__ = name
    play.__doc__ = table["help"]
    play.__signature__ = signature  # type: ignore[attr-defined]
    return play


def check_own_point(share: float | None, speedup: float | None) -> None:
    """Raise ValueError for a share beyond 0 to 1, a speed-up that is not positive, or only one."""
    if share is None or speedup is None or not (0 <= share <= 1 and speedup > 0):
        allowed = "both, a share of 0 to 1 and a positive speed-up"
        raise ValueError(f"your own point is {allowed}; got {share} and {speedup}")


def html_of(name: str, table: dict, start: dict) -> str:
    """Return an exhibit that begins with `start`, as HTML.

    Its still picture shows what `table["finding"]` says, whatever `start` is: no other is stored.
    """
    finding, still = table["finding"], table["still"]
    data = literal(table["data"] | {"start": start, "say": table["say"]})
    script = script_of(name)

    # Each exhibit carries its own copy, so only the rules whose classes its script names.
    def needed(rule: re.Match[str]) -> str:
        return rule[0] if all(each in script for each in CLASS.findall(rule[1])) else ""

    rules = RULE.sub(needed, read("shared.css"))
    # A colon before a blank belongs to a declaration; one without, as in :hover, to a selector.
    style = literal(re.sub(r"/\*.*?\*/|\s*([{};,]|(?<=[a-z]):(?= ))\s*", r"\1", rules))
    return f"""<div class="play" data-exhibit="{name}">
<figure style="margin: 0"><img alt="{finding}" src="{still}"></figure>
</div>
<script>(() => {{
"use strict";
{script}start("{name}", mount, {data}, {style});
}})();</script>"""


def script_of(name: str) -> str:
    """Return the script of an exhibit, after those that it imports."""
    own = (FOLDER / f"{name}.js").read_text(encoding="utf-8")
    return "".join(map(read, [*re.findall(r'from "\./(\w+\.js)"', own), f"{name}.js"]))


def literal(value: Any) -> str:
    """Return a value as a script reads it. Numbers of NumPy and torch become those of Python."""
    item = methodcaller("item")
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=item)
    return text.replace("<", "\\u003c")  # "</script>" inside a text would end the script


def read(file: str) -> str:
    """Return the text of a file in this folder, without what only its readers need."""
    return LEFT_OUT.sub("", (FOLDER / file).read_text(encoding="utf-8"))


PAGE = """<!DOCTYPE html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Things to play with</title>
<link rel="icon" href="data:,">
<style>
:root {{ color-scheme: light dark }}
body {{ max-width: 60rem; margin: 0 auto; padding: 1.5rem 1.25rem 4rem;
  background: #fff; color: #1f2933;
  font: 17px/1.6 -apple-system, "Segoe UI", Roboto, "Noto Sans", "Liberation Sans", sans-serif }}
@media (prefers-color-scheme: dark) {{ body {{ background: #12161b; color: #e4e8ec }} }}
h1, h2 {{ line-height: 1.15; letter-spacing: -0.01em }}
h2 {{ margin-top: 4rem }}
</style>
<main>
<h1>Things to play with</h1>
<p>Each of them is part of a notebook, and works without one.{home}</p>
{parts}
</main>
</html>
"""


def write_page(folder: Path, names: Iterable[str] = NAMES, home: str = "") -> Path:
    """Write `exhibits.html`, one page with all exhibits, into a folder; return its path.

    `names` gives their order, `home` a link to what the page belongs to.
    """
    shown = {name: player(name)() for name in names}
    parts = [f'<h2 id="{name}">{it.title}</h2>\n{it.html}' for name, it in shown.items()]
    target = folder / "exhibits.html"
    write_atomically(target, PAGE.format(parts="\n".join(parts), home=home).encode())
    return target
