"""Notebooks: executed into runs/, as pages that need no network, with an index; and a class's."""

from __future__ import annotations

import asyncio
import base64
import copy
import io
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import nbformat
import pandas as pd
from jinja2 import Environment, FileSystemLoader, pass_context
from latex2mathml.converter import convert
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbconvert import HTMLExporter
from nbconvert.filters import strip_ansi
from nbconvert.filters.markdown_mistune import IPythonRenderer, MarkdownWithMath
from PIL import Image
from tqdm import tqdm

from labutils.config.schema import ConfigError
from labutils.exercises import VERDICTS
from labutils.exhibits import play
from labutils.files import REPO_DIR, make_folder, runs_dir, write_atomically
from labutils.machine import choose_device, product_name
from labutils.training.record import RunRecord, find_runs

TEMPLATES = Environment(loader=FileSystemLoader(Path(__file__).parent / "page"), autoescape=True)
PAGE = Path(__file__).parent / "page"
STYLE = re.sub(r"\s+", " ", (PAGE / "style.css").read_text(encoding="utf-8"))
CONTENTS = f"{{{(PAGE / 'contents.js').read_text(encoding='utf-8')}}}"  # in a scope of its own
CELL_TIMEOUT_S = 1200
QUIET = ["--IPKernelApp.log_level=ERROR"]  # the kernel's warnings are not about the course
PRINTED = re.compile(r"(<pre>)(.*?)(</pre>)", re.S)
FOR_EVERYBODY = {  # what is empty is no header, and what scrolls is reached by keyboard
    "<th></th>": "<td></td>",
    '<table border="1" class="dataframe">': '<table class="dataframe" tabindex="0">',
    'hl-ipython3"><pre>': 'hl-ipython3"><pre tabindex="0">',
    "<pre><code": '<pre tabindex="0"><code',
    "<table>": '<table tabindex="0">',
    'checkbox" disabled': 'checkbox" aria-label="to do" disabled',
    "<math display": '<math tabindex="0" display',
}
LOG = re.compile(r"(?:^\S+: (?:on a |reusing run|saved |\w+ = | *\d+%\|).*\n?){2,}", re.M)
COLUMNS = re.compile(r"(?:^[^<\n]*[^ <\n] {2,}[^ <\n][^<\n]*\n?){2,}", re.M)  # in two lines or more
OTHER_FILES = {  # how files begin that are no notebooks, what they are, and what to do
    rb"[\s\xef\xbb\xbf]*<": "it is a web page; download the notebook itself",
    rb"PK": "it is a zip archive; unpack it",
    rb"\xff\xfe|\xfe\xff": "it is UTF-16 text; save it as UTF-8",
    rb"[\s\xef\xbb\xbf]*{": "it is damaged, or ends too early; save or download it again",
    rb"\s*$": "it is empty; save the notebook again",
    rb"": "Jupyter cannot open it; choose another file",
}
GUESS = re.compile(r'(\blab\.guess\(\s*"\w+",\s*f?"[^"]*")\s*\)')  # as it stands, without one
N_COVER = 4  # cells at most, before the first section
# a sentence on outputs to be cleared, of which a copy has none
CLEARING = re.compile(r"\b(?=[A-Z])(?:(?!\n\n)[^.])*?\b(?:saved outputs|[Cc]lear)\b[^.]*\.[ \n]?")
NOTEBOOK_LINK = re.compile(r"^(?![a-z]+:)(?:.*/)?([^/#]+)\.ipynb")  # not into another site


def core_notebooks() -> list[Path]:
    """Return the paths of notebooks 01 to 04, in order."""
    return sorted(REPO_DIR.glob("0*.ipynb"))


def all_notebooks() -> list[Path]:
    """Return the paths of the course's notebooks: the core, then the optional ones."""
    return [*core_notebooks(), *sorted(REPO_DIR.glob("further/*.ipynb"))]


def find_notebook(name: str) -> Path:
    """Return the notebook meant by a path, or by the name of a notebook of this course.

    The name may lack its ending, and a number is enough: "02". Raises OSError or ConfigError.
    """
    path = Path(name)
    if not path.is_file():
        known = {key: p for p in all_notebooks() for key in (p.stem.partition("-")[0], p.stem)}
        if path.name.removesuffix(".ipynb") not in known:
            there_are = ", ".join(p.relative_to(REPO_DIR).as_posix() for p in all_notebooks())
            raise FileNotFoundError(f"no such notebook: {name}. There are: {there_are}")
        path = known[path.name.removesuffix(".ipynb")]
    read_notebook(path)
    return path


def read_notebook(path: Path) -> nbformat.NotebookNode:
    """Return a notebook; a byte order mark before it is skipped.

    Raises OSError, and ConfigError for a file that is no notebook: it says what the file is.
    """
    content = path.read_bytes()
    try:
        notebook = nbformat.reads(content.decode("utf-8-sig"), as_version=4)
        "".join(cell.cell_type + cell.source for cell in notebook.cells)  # each has both
    except Exception as error:  # nbformat has no class of its own for JSON of another shape
        kinds = (kind for begin, kind in OTHER_FILES.items() if re.match(begin, content))
        raise ConfigError(f"{path} is not a notebook: {next(kinds)}") from error
    return notebook


def execute(path: Path, *, in_place: bool = False, keep_going: bool = False) -> bool:
    """Run a notebook in a fresh kernel, write `runs/<name>.ipynb` and `.html`, return success.

    The notebook is written even if a cell fails, or at Ctrl-C: it shows how far it came. `in_place`
    writes it back to `path` instead, if it came to its end. `keep_going` executes what follows a
    cell that fails, too.
    """
    notebook = read_notebook(path)
    for cell in notebook.cells:  # else a cell that is not reached keeps another machine's output
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    interrupt = _Interrupt()
    n_cells = sum(cell.cell_type == "code" for cell in notebook.cells)
    bar = tqdm(total=n_cells, desc=path.name, unit=" cells", file=sys.stdout, mininterval=0)
    client = NotebookClient(
        notebook,
        timeout=CELL_TIMEOUT_S,
        kernel_name="python3",
        extra_arguments=QUIET,
        allow_errors=keep_going,
        coalesce_streams=True,  # one output of each stream, without what progress bars overwrote
        record_timing=False,
        resources={"metadata": {"path": str(REPO_DIR)}},
        on_cell_executed=lambda cell, **_: bar.update(cell.cell_type == "code"),
        on_notebook_start=interrupt,
    )
    start, problem = time.perf_counter(), ""
    try:
        client.execute(env=os.environ | {"LABUTILS_NOTEBOOK": path.stem})
    except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
        problem = str(error)
    except (KeyboardInterrupt, asyncio.CancelledError):
        interrupt.has_come = True
    bar.close()
    if interrupt.has_come:
        problem = f"interrupted in {path.name}"
    elif keep_going:
        failed = [str(n) for n, cell in enumerate(notebook.cells) if _has_failed(cell)]
        problem = f"failed: cells {', '.join(failed)} of {path.name}, from 0" if failed else ""
    _shorten_errors(notebook)
    target = path if in_place and not problem else runs_dir() / path.name
    if target != path:
        where, seconds = product_name(choose_device()), time.perf_counter() - start
        notebook.metadata["executed"] = f"Executed in {seconds:.0f} s on {where}"
    write_atomically(target, (nbformat.writes(notebook) + "\n").encode())
    text = page(notebook, path.stem)
    write_atomically(runs_dir() / f"{path.stem}.html", text.encode())
    print(f"wrote {target} and {runs_dir() / path.stem}.html")
    if problem:
        print(problem if sys.stderr.isatty() else strip_ansi(problem), file=sys.stderr)
    if interrupt.has_come:
        raise KeyboardInterrupt  # the notebooks after it are not executed
    return not problem


def _has_failed(cell: nbformat.NotebookNode) -> bool:
    """Whether a cell raised that is not there to raise."""
    kinds = [output.output_type for output in cell.get("outputs", [])]
    return "error" in kinds and "raises-exception" not in cell.metadata.get("tags", [])


class _Interrupt:
    """Lets Ctrl-C cancel the task: nbclient's own handler ends in an AssertionError."""

    def __init__(self) -> None:
        self.has_come = False

    def __call__(self, **_: object) -> None:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()

        def cancel() -> None:
            self.has_come = True  # nbclient reports a cancelled task as a dead kernel
            task.cancel()

        with suppress(RuntimeError, NotImplementedError):  # Windows, or not the main thread
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.add_signal_handler(number, cancel)


def _shorten_errors(notebook: nbformat.NotebookNode) -> None:
    """Leave out the frames of errors, which name folders of this machine, and widgets' state."""
    notebook.metadata.pop("widgets", None)
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            if output.output_type == "error":
                output.traceback = [f"{output.ename}: {output.evalue}"]


class _Renderer(IPythonRenderer):
    """Markdown → HTML with formulas as MathML and links that lead from page to page, or from runs/
    to another file of the course.
    """

    def block_math(self, body: str) -> str:
        return f"<p>{convert(body, display='block')}</p>"

    def inline_math(self, body: str) -> str:
        return convert(body)

    def block_html(self, html: str) -> str:
        # nbconvert's would close an answer's <details> before the answer
        return super().block_html(html) if "<img" in html else html

    def paragraph(self, text: str) -> str:
        label = re.match(r"<strong>(What you now know|Try it)", text)
        kind = (
            {"What": ' class="know"', "Try": ' class="try"'}[label[1].split()[0]] if label else ""
        )
        return f"<p{kind}>{text}</p>\n"

    def link(self, text: str, url: str, title: str | None = None) -> str:
        file = REPO_DIR / re.sub(r"^(\.\./)+", "", url)
        is_here = not re.match(r"[a-z]+:", url) and file.is_file()
        if is_here and file.suffix != ".ipynb":  # of the course, but no page
            url = Path(os.path.relpath(file, runs_dir())).as_posix()
        return super().link(text, NOTEBOOK_LINK.sub(r"\1.html", url), title)


class _PageExporter(HTMLExporter):
    """nbconvert's HTML exporter with the template in `page/`."""

    @property
    def extra_template_basedirs(self) -> list[str]:
        return [str(Path(__file__).parent)]

    def _template_name_default(self) -> str:
        return "page"

    @pass_context
    def markdown2html(self, context: Any, source: str) -> str:
        attachments = context.get("cell", {}).get("attachments", {})
        renderer = _Renderer(
            escape=False, attachments=attachments, embed_images=True, path=str(REPO_DIR)
        )
        return MarkdownWithMath(renderer).render(source)


def page(notebook: nbformat.NotebookNode, name: str = "") -> str:
    """Return a notebook's page. With the name of one of the course its neighbours are linked.

    Nothing is loaded from a network. Printed columns scroll on a narrow screen; sentences wrap. The
    log of runs is folded.
    """
    notebook = copy.deepcopy(notebook)
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            if "image/png" in output.get("data", {}):
                output.data["image/png"] = with_fewer_colors(output.data["image/png"])
    facts = facts_of(notebook)
    notebook.metadata["title"] = facts["title"]
    resources = {"executed": facts["executed"], "around": list(neighbours(name))}
    resources |= {"style": STYLE, "script": CONTENTS}
    text, _ = _PageExporter().from_notebook_node(notebook, resources)

    def printed(found: re.Match) -> str:
        inside = LOG.sub(
            folded, COLUMNS.sub(r'<span class="columns" tabindex="0">\g<0></span>', found[2])
        )
        return (found[1] + inside + found[3]).replace("<pre></pre>", "")

    sections = re.findall(r'<h2 id="([^"]+)">(.*?)<a class="anchor-link"', text, re.S)
    lines = ['<li><a href="index.html">All pages</a></li>']
    lines += [f'<li><a href="#{name}">{title}</a></li>' for name, title in sections]
    contents = f'<nav class="contents" aria-label="Contents"><ol>{"".join(lines)}</ol></nav>'
    for old, new in FOR_EVERYBODY.items():
        text = text.replace(old, new)
    return PRINTED.sub(printed, text).replace("<main>", f"{contents}\n<main>", 1)


def with_fewer_colors(png: str) -> str:
    """Return a picture, PNG in base64, with 128 colours: half the bytes, and as good to the eye."""
    image = Image.open(io.BytesIO(base64.b64decode(png))).convert("RGB").quantize(128)
    image.save(file := io.BytesIO(), format="png", optimize=True)
    smaller = base64.b64encode(file.getvalue()).decode()
    return min(png, smaller, key=len)


def folded(log: re.Match) -> str:
    """Return lines that runs printed, folded, between the texts before and after them."""
    summary = f"{log[0].count(chr(10))} lines of the log"
    return f"</pre><details><summary>{summary}</summary><pre>{log[0]}</pre></details><pre>"


def neighbours(name: str) -> Iterator[tuple[str, str]]:
    """Yield (words, link) of the pages before and after a notebook's, in the course's order."""
    stems = [path.stem for path in all_notebooks()]
    if name in stems:
        at = stems.index(name)
        for arrow, i in (("← {}", at - 1), ("{} →", at + 1)):
            if 0 <= i < len(stems):
                words = re.sub(r"[-_]", " ", stems[i])
                yield arrow.format(words), f"{stems[i]}.html"
    else:
        yield "All pages", "index.html"


def write_index(folder: Path | None = None) -> Path:
    """Write `index.html` of a folder of pages, by default runs/; return its path.

    It leads to the notebooks of the course and to their findings, to the exhibits, and in runs/ to
    the runs, the reader's own first. All links are relative. A notebook without a page gets one
    that says how to execute it.
    """
    target = folder or runs_dir()
    pages = []
    for path in all_notebooks():
        file = target / f"{path.stem}.html"
        own = file.with_suffix(".ipynb")
        notebook = read_notebook(own if own.exists() else path)
        facts = facts_of(notebook) | {"file": file.name, "is_core": path.parent == REPO_DIR}
        is_here = own.exists() or folder is not None
        pages.append(facts if is_here else facts | {"picture": "", "headline": ""})
        if not file.exists():
            missing = TEMPLATES.get_template("missing.html.j2")
            write_atomically(file, missing.render(facts, name=path.stem, style=STYLE).encode())
    by_notebook: dict[str, list[RunRecord]] = defaultdict(list)
    for record in reversed(find_runs()[0]):
        by_notebook[record.environment.get("notebook", "")].append(record)
    text = TEMPLATES.get_template("start.html.j2").render(
        pages=pages,
        exhibits={name: getattr(play, name)() for name in play.NAMES},
        with_runs=folder is None,
        own_records=by_notebook.pop("", []),
        by_notebook=by_notebook,
        style=STYLE,
    )
    write_atomically(target / "index.html", text.encode())
    return target / "index.html"


def facts_of(notebook: nbformat.NotebookNode) -> dict[str, str]:
    """Return what the first page says of a notebook: its title, a sentence about it, how it was
    executed, and the picture of the cell tagged `cover`, whose finding is the headline.
    """
    title = re.search(r"^# (.+)$", notebook.cells[0].source, re.M)
    facts = {"title": title[1] if title else "Notebook", "picture": "", "headline": ""}
    facts |= {key: notebook.metadata.get(key, "") for key in ("about", "executed")}
    time_needed = re.search(r"\*\*Time:\*\* ([^,.(]+)", notebook.cells[0].source)
    facts["time"] = time_needed[1].strip() if time_needed else ""
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            if "cover" in cell.metadata.get("tags", []) and "image/png" in output.get("data", {}):
                facts["picture"] = f"data:image/png;base64,{output.data['image/png']}"
                alt = output.metadata.get("image/png", {}).get("alt", "")
                facts["headline"] = alt.partition(". ")[0]
    return facts


def write_exhibits(folder: Path | None = None) -> Path:
    """Write `exhibits.html`, one page with all exhibits, into a folder, by default runs/."""
    target = (folder or runs_dir()) / "exhibits.html"
    exhibits = {name: getattr(play, name)() for name in play.NAMES}
    text = TEMPLATES.get_template("exhibits.html.j2").render(
        exhibits=exhibits, style=STYLE, script=CONTENTS
    )
    write_atomically(target, text.encode())
    return target


def write_site(folder: Path) -> Path:
    """Write pages of all notebooks with the outputs that they have, and of the exhibits, into a
    folder that any static host serves; return the first page's path.

    Other files of the course to which a page links are copied beside it.
    """
    make_folder(folder)
    for path in all_notebooks():
        text = page(read_notebook(path), path.stem)
        for link in set(re.findall(r'href="(\.\./[^"]+)"', text)):
            copied = shutil.copy((runs_dir() / link).resolve(), folder)
            text = text.replace(f'"{link}"', f'"{Path(copied).name}"')
        write_atomically(folder / f"{path.stem}.html", text.encode())
    write_exhibits(folder)
    return write_index(folder)


def write_student_copy(path: Path, folder: Path) -> Path:
    """Write a notebook without outputs and without solutions into a folder; return the copy's path.

    A guess then comes before its result, and `...` stands where it is written. Cells tagged
    `solution` are left out, and so is how to clear outputs. A notebook of the
    course keeps its place below the folder, so that links lead from copy to copy, and those to
    pictures and other files back into the course. Raises OSError if the copy is there already.
    """
    notebook = read_notebook(path)
    notebook.cells = [c for c in notebook.cells if "solution" not in c.metadata.get("tags", [])]
    source, place = path.resolve(), Path(path.name)
    if source.is_relative_to(REPO_DIR):
        place = source.relative_to(REPO_DIR)
    make_folder(folder)
    target = folder / place
    if target.exists():
        raise FileExistsError(f"{target} exists already; choose another folder")

    def from_copy(link: re.Match) -> str:
        file = source.parent / link[1]
        if file.suffix == ".ipynb" or not file.is_file():
            return link[0]
        return f"]({Path(os.path.relpath(file, target.resolve().parent)).as_posix()})"

    for number, cell in enumerate(notebook.cells):
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
            cell.source = GUESS.sub(r"\1, ...)", cell.source)
        else:
            cell.source = re.sub(r"\]\(([^()#:]+)\)", from_copy, cell.source)
            if number < N_COVER:
                cell.source = CLEARING.sub("", cell.source)
    write_atomically(target, (nbformat.writes(notebook) + "\n").encode())
    return target


# ---- A class

CALL = re.compile(r"\bexercises\.(?!hint|self_test)(\w+)\(")
LOOK = "look at this: "
SLOW = "slow"  # the tag of cells that train for long, and that no exercise needs
# how names begin that nobody hands in: hidden files, what macOS packs, and ours
NOT_WORK = (".", "__MACOSX", "scores.csv", "misconceptions.csv")


def grade_folder(folder: Path, out: Path, timeout: float = 120) -> pd.DataFrame:
    """Run the notebooks below a folder; return a row for each student, a column for each exercise.

    Writes this table as `scores.csv`, with the number of right answers, and `misconceptions.csv`:
    how many students had which; both after each student, so that Ctrl-C loses none. A verdict is
    what the notebook said when it ran here. It proves nothing about who wrote it. A student is a
    folder below `folder`, or a file in it; hidden ones are left out. The column `notebook` says who
    has none, and whose cannot be read.
    Raises FileNotFoundError if nobody has a notebook.
    """
    course = [_exercises(read_notebook(path)) for path in core_notebooks()]
    whose: dict[str, list[Path]] = {}
    for path in sorted(folder.rglob("*")):
        parts = path.relative_to(folder).parts
        top = folder / parts[0]
        if top.resolve() == out.resolve() or any(part.startswith(NOT_WORK) for part in parts):
            continue
        notebooks = whose.setdefault(top.name if top.is_dir() else top.stem, [])
        notebooks += [path] if path.suffix.lower() == ".ipynb" else []
    if not any(whose.values()):
        raise FileNotFoundError(f"no notebook is below {folder}; if archives are, unpack them")
    make_folder(out)
    rows: dict[str, dict[str, str]] = {}
    for student, paths in tqdm(whose.items(), "students", file=sys.stdout, mininterval=1):
        row = rows[student] = {} if paths else {"notebook": f"{LOOK}no notebook"}
        for path in paths:
            try:
                verdicts = verdicts_of(path, timeout)
            except Exception as error:  # whatever is odd in it costs no other student
                reason = str(error).removeprefix(f"{path} is not a notebook: ")
                row["notebook"] = f"{LOOK}cannot be read: {reason}"
                continue
            of_course = max(course, key=lambda names: len(names.keys() & verdicts.keys()))
            if of_course.keys() & verdicts.keys():
                verdicts = dict.fromkeys(of_course, f"{LOOK}its check was not called") | verdicts
            is_right = {name for name, verdict in row.items() if verdict == "right"}
            row |= {name: verdicts[name] for name in verdicts if name not in is_right}
        if not row:
            row["notebook"] = f"{LOOK}no check is called; optional notebooks judge themselves"
        scores = _write_scores(rows, course, out)
    return scores


def _write_scores(
    rows: dict[str, dict[str, str]], course: list[dict[str, None]], out: Path
) -> pd.DataFrame:
    """Write the tables of some students; return the first, its columns in the course's order."""
    scores = pd.DataFrame.from_dict(rows, orient="index", dtype=object).rename_axis("student")
    columns = {name: None for names in ({"notebook": None}, *course, scores) for name in names}
    scores = scores[[name for name in columns if name in scores]]
    wrong = scores.melt(var_name="exercise", value_name="misconception").dropna()
    wrong = wrong[wrong.misconception.str.startswith("wrong: ")]
    wrong.misconception = wrong.misconception.str.removeprefix("wrong: ")
    scores.insert(0, "right", (scores == "right").sum(axis=1))
    scores.to_csv(out / "scores.csv")
    wrong.value_counts().rename("students").to_csv(out / "misconceptions.csv")
    return scores


def _exercises(notebook: nbformat.NotebookNode) -> dict[str, None]:
    """Return the names of the exercises that a notebook checks, in order."""
    code = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    return dict.fromkeys(CALL.findall("\n".join(code)))


def verdicts_of(path: Path, timeout: float) -> dict[str, str]:
    """Run a notebook without its slow cells; return {exercise: "right", "wrong: …", "open" or
    "look at this: …"}.

    A cell that takes longer than `timeout` seconds, or that ends its kernel, is left out and the
    notebook runs once more, so that one answer does not cost the others. A notebook that nowhere
    names the exercises is not run. Raises as `read_notebook` does.
    """
    notebook = read_notebook(path)
    if not any("exercises" in cell.source for cell in notebook.cells):
        return {}
    reasons: dict[int, str] = {}
    for _ in range(1 + len(notebook.cells)):
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            stopped = _run(notebook, Path(folder), timeout)
            written = Path(folder, "verdicts")
            said = written.read_text(encoding="utf-8", errors="replace") if written.exists() else ""
        if not stopped:
            break
        number, reasons[number] = stopped
        notebook.cells[number].metadata["tags"] = [SLOW]
    verdicts = {}
    for number, cell in enumerate(notebook.cells):
        for output in cell.get("outputs", []):
            if output.output_type == "error":
                reasons.setdefault(number, f"raised {output.ename}: {output.evalue}")
        if number in reasons:
            reason = f"{LOOK}its cell {reasons[number]}"
            verdicts |= dict.fromkeys(CALL.findall(cell.source), reason)
    for line in said.splitlines():
        with suppress(ValueError, KeyError, TypeError):  # a line that no exercise wrote
            verdict = json.loads(line)
            verdicts[str(verdict["exercise"])] = str(verdict["verdict"])
    return verdicts


def _run(notebook: nbformat.NotebookNode, folder: Path, timeout: float) -> tuple[int, str] | None:
    """Run a notebook; return (number, why) of a cell that stopped it, or None."""
    numbers, interrupt = [0], _Interrupt()
    client = NotebookClient(
        notebook,
        timeout=timeout,
        allow_errors=True,
        extra_arguments=QUIET,
        kernel_name="python3",
        skip_cells_with_tag=SLOW,
        record_timing=False,
        resources={"metadata": {"path": str(folder)}},
        on_notebook_start=interrupt,
        on_cell_start=lambda cell_index, **_: numbers.append(cell_index),
        shutdown_kernel="immediate",  # a busy one, asked to end, prints errors
    )
    own = {"LABUTILS_RUNS": str(folder / "runs"), VERDICTS: str(folder / "verdicts")}
    try:
        client.execute(env=os.environ | own | {"MPLBACKEND": "Agg"})
    except CellTimeoutError:
        return numbers[-1], f"took more than {timeout:g} s"
    except (DeadKernelError, asyncio.CancelledError):
        if interrupt.has_come:
            raise KeyboardInterrupt from None
        return numbers[-1], "ended the kernel"
    return None
