"""`runs/index.html`: one page that leads to the notebooks' pages, the exhibits and the runs.

All links are relative, so the folder can be put anywhere: a web server, a stick, an attachment.
"""

from __future__ import annotations

import html
import re
from pathlib import Path

from labutils.files import runs_dir, write_atomically
from labutils.training.records import RunRecord, find_runs

PAGE = """<!DOCTYPE html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>Training optimisation on one GPU</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: auto; padding: 8px }}
.wide {{ overflow-x: auto }}
table {{ border-collapse: collapse; font-size: 14px; white-space: nowrap }}
th, td {{ padding: 2px 10px 2px 0; text-align: left; border-bottom: 1px solid #8886 }}
td.number, th.number {{ text-align: right; font-variant-numeric: tabular-nums }}
</style>
<h1>Training optimisation on one GPU</h1>
<p>What this machine computed. Nothing here needs a network.</p>
<h2>Notebooks</h2>
{notebooks}
{exhibits}
<h2>Runs</h2>
{runs}
</html>
"""
MISSING = """<!DOCTYPE html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{name}: not executed here</title>
<p>The notebook {name} has not been executed here.
<code>labutils labs {name}</code> executes it.</p>
<p><a href="index.html">All pages</a></p>
</html>
"""
EXHIBITS = """<h2>Exhibits</h2>
<p><a href="exhibits.html">Things to play with</a>, all on one page.</p>"""
LINK = re.compile(r'href="([\w-]+)\.html"')
TITLE = re.compile(r"<title>(.*?)</title>", re.S)
COLUMNS = ("run", "device", "ended", "steps")
NUMBERS = ("tokens/s", "peak MiB", "loss")


def write_site() -> Path:
    """Write `index.html` over all pages and runs in runs/; return its path.

    A page that others link to, of a notebook that was not executed, then says so.
    """
    folder = runs_dir()
    text = PAGE.format(
        notebooks=_list(_notebook_pages(folder)),
        exhibits=EXHIBITS if (folder / "exhibits.html").exists() else "",
        runs=_table(find_runs()[0]),
    )
    write_atomically(folder / "index.html", text.encode())
    for page in _notebook_pages(folder):
        for name in LINK.findall(page.read_text(encoding="utf-8")):
            if not (folder / f"{name}.html").exists():
                write_atomically(folder / f"{name}.html", MISSING.format(name=name).encode())
    return folder / "index.html"


def _notebook_pages(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.glob("*.html")) if path.with_suffix(".ipynb").exists()]


def _list(pages: list[Path]) -> str:
    lines = []
    for path in pages:
        if found := TITLE.search(path.read_text(encoding="utf-8")):
            lines.append(f'<li><a href="{html.escape(path.name)}">{found[1].strip()}</a></li>')
    return f"<ul>{''.join(lines)}</ul>" if lines else "<p>No notebook has been executed yet.</p>"


def _table(records: list[RunRecord]) -> str:
    if not records:
        return "<p>No runs are recorded yet.</p>"
    head = [f"<th>{name}</th>" for name in COLUMNS]
    head += [f'<th class="number">{name}</th>' for name in NUMBERS]
    rows = [f"<tr>{''.join(head)}</tr>"]
    rows += [_row(record) for record in reversed(records)]
    return f'<div class="wide" tabindex="0"><table>{"".join(rows)}</table></div>'


def _row(record: RunRecord) -> str:
    file = html.escape(f"{record.name}-{record.id}.json")
    device = html.escape(record.environment.get("device", ""))
    cells = [f'<td><a href="{file}">{html.escape(record.name)}</a></td><td>{device}</td>']
    cells.append(f"<td>{record.outcome}</td><td>{len(record.series.loss)}</td>")
    speed = f"{record.timing.tokens_per_s:,.0f}" if record.timing else "–"
    peak = f"{record.memory.peak_bytes / 2**20:,.1f}" if record.memory else "–"
    loss = f"{record.series.loss[-1]:.4f}" if record.series.loss else "–"
    cells += [f'<td class="number">{value}</td>' for value in (speed, peak, loss)]
    return f"<tr>{''.join(cells)}</tr>"
