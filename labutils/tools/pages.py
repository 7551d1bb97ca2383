"""An executed notebook as a page that opens anywhere: no script of its own, nothing from a network.

Formulas become MathML, which browsers draw by themselves.
"""

from __future__ import annotations

import copy
import html
import re
from pathlib import Path
from typing import Any

import nbformat
from jinja2 import pass_context
from latex2mathml.converter import convert
from nbconvert import HTMLExporter
from nbconvert.filters.markdown_mistune import IPythonRenderer, MarkdownWithMath

FOLDER = Path(__file__).resolve().parent
PRINTED = re.compile(r"(<pre>)(.*?)(</pre>)", re.S)
COLUMNS = re.compile(r"(?:^[^<\n]*[^ <\n] {2,}[^ <\n][^<\n]*\n?){2,}", re.M)  # in two lines or more
NOTEBOOK_LINK = re.compile(r"^(?![a-z]+:)(?:.*/)?([^/#]+)\.ipynb")  # not into another site


class _Renderer(IPythonRenderer):
    """Markdown → HTML with formulas as MathML and links that lead from page to page."""

    def block_math(self, body: str) -> str:
        return f"<p>{convert(body, display='block')}</p>"

    def inline_math(self, body: str) -> str:
        return convert(body)

    def link(self, text: str, url: str, title: str | None = None) -> str:
        return super().link(text, NOTEBOOK_LINK.sub(r"\1.html", url), title)


class PageExporter(HTMLExporter):
    """nbconvert's HTML exporter with the template in `page/`."""

    @property
    def extra_template_basedirs(self) -> list[str]:
        return [str(FOLDER)]

    def _template_name_default(self) -> str:
        return "page"

    @pass_context
    def markdown2html(self, context: Any, source: str) -> str:
        """Return a markdown cell as HTML."""
        attachments = context.get("cell", {}).get("attachments", {})
        return MarkdownWithMath(_Renderer(escape=False, attachments=attachments)).render(source)


def page(notebook: nbformat.NotebookNode, device: str) -> str:
    """Return a notebook's page, with its first heading and the device in its title."""
    notebook = copy.deepcopy(notebook)
    headings = re.findall(r"^# (.+)$", _markdown(notebook), flags=re.M) or ["Notebook"]
    notebook.metadata["title"] = f"{headings[0]} – {device}"
    text, _ = PageExporter().from_notebook_node(notebook)
    text = PRINTED.sub(lambda found: found[1] + _columns(found[2]) + found[3], text)
    return text.replace("<main>", f"{_contents(text)}\n<main>", 1)


def _columns(printed: str) -> str:
    """Return printed text whose columns scroll where the screen is narrow; sentences wrap."""
    return COLUMNS.sub(lambda found: f'<span class="columns">{found[0]}</span>', printed)


def _markdown(notebook: nbformat.NotebookNode) -> str:
    return "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")


def _contents(text: str) -> str:
    """Return a table of contents: the headings of sections in a page."""
    lines = ['<li><a href="index.html">All pages</a></li>']
    for name, inner in re.findall(r'<h2 id="([^"]+)">(.*?)<a class="anchor-link"', text, re.S):
        title = html.unescape(re.sub(r"<[^>]+>", "", inner))
        lines.append(f'<li><a href="#{name}">{html.escape(title)}</a></li>')
    return f'<nav class="contents" aria-label="Contents"><ol>{"".join(lines)}</ol></nav>'
