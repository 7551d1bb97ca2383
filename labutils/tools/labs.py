"""Execute the notebooks as `make labs` does: outputs and HTML pages go to runs/.

The committed files stay as they are.
"""

from __future__ import annotations

import asyncio
import re
import shutil
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbconvert.filters import strip_ansi

from labutils.config.schema import ConfigError
from labutils.files import CONFIGS_DIR, REPO_DIR, make_folder, runs_dir, write_atomically
from labutils.machine.gpu import choose_device
from labutils.machine.here import product_name
from labutils.tools.pages import page
from labutils.training.records import find_runs

CELL_TIMEOUT_S = 1200
COURSE_FILES = "README.md", "LICENSE", "Makefile", "pyproject.toml", "constraints.txt"
QUIET = ["--IPKernelApp.log_level=ERROR"]  # the kernel's warnings are not about the course


def core_notebooks() -> list[Path]:
    """Return the four notebooks of this course, in the order in which they are run."""
    return sorted(REPO_DIR.glob("0*.ipynb"))


def all_notebooks() -> list[Path]:
    """Return the four notebooks, then the optional ones."""
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
    """Return a notebook. Raises OSError, and ConfigError for a file that is no notebook."""
    try:
        return nbformat.read(path, as_version=4)
    except (ValueError, AttributeError, nbformat.ValidationError) as error:  # JSON may be a list
        raise ConfigError(f"{path} is not a notebook; its name should end in .ipynb") from error


def execute(path: Path, *, in_place: bool = False) -> bool:
    """Run a notebook in a fresh kernel, write `runs/<name>.ipynb` and `.html`, return success.

    The notebook is written even if a cell fails, or at Ctrl-C: it shows how far it came. `in_place`
    writes it back to `path` instead, if it came to its end.
    """
    notebook = read_notebook(path)
    interrupted = False

    def take_signals(**_: object) -> None:
        """Let Ctrl-C end the task: nbclient's own handler ends in an AssertionError."""
        loop, task = asyncio.get_running_loop(), asyncio.current_task()

        def end() -> None:
            nonlocal interrupted
            interrupted = True
            task.cancel()

        with suppress(RuntimeError):  # Windows has no such handlers, nor a thread beside the main
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.add_signal_handler(number, end)

    total = sum(cell.cell_type == "code" for cell in notebook.cells)
    done = 0

    def report(cell: nbformat.NotebookNode, cell_index: int, **_: object) -> None:
        nonlocal done
        if cell.cell_type == "code":
            done += 1
            line = f"{path.name}: cell {done}/{total}"
            if sys.stdout.isatty():
                print(f"\r{line}", end="", flush=True)
            else:  # in a file: one line for each cell
                print(f"{line}, {time.perf_counter() - start:.0f} s", flush=True)

    client = NotebookClient(
        notebook,
        timeout=CELL_TIMEOUT_S,
        kernel_name="python3",
        extra_arguments=QUIET,
        resources={"metadata": {"path": str(REPO_DIR)}},
        on_cell_executed=report,
        on_notebook_start=take_signals,
    )
    start, problem = time.perf_counter(), ""
    try:
        client.execute()
    except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
        problem = str(error)
    except (KeyboardInterrupt, asyncio.CancelledError):
        interrupted = True
    if interrupted:
        problem = f"interrupted in {path.name}"
    over = "\r" if sys.stdout.isatty() else ""
    print(f"{over}{path.name}: {done}/{total} cells, {time.perf_counter() - start:.0f} s")
    tidy(notebook)
    target = path if in_place and not problem else runs_dir() / path.name
    write_atomically(target, (nbformat.writes(notebook) + "\n").encode())
    text = page(notebook, product_name(choose_device()))
    write_atomically(runs_dir() / f"{path.stem}.html", text.encode())
    print(f"wrote {target} and {runs_dir() / path.stem}.html")
    if problem:
        print(problem if sys.stderr.isatty() else strip_ansi(problem), file=sys.stderr)
    if interrupted:
        raise KeyboardInterrupt  # the notebooks after it are not executed
    return not problem


def tidy(notebook: nbformat.NotebookNode) -> None:
    """Make outputs fit to be committed.

    Fold what carriage returns overwrote and join split streams; drop times, widget state and the
    frames of errors.
    """
    notebook.metadata.pop("widgets", None)
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        joined: list[nbformat.NotebookNode] = []
        for output in cell.get("outputs", []):
            if output.output_type == "stream" and joined and joined[-1].get("name") == output.name:
                joined[-1].text += output.text
            else:
                joined.append(output)
        for output in joined:
            if output.output_type == "error":  # the frames name folders of this machine
                output.traceback = [f"{output.ename}: {output.evalue}"]
            if output.output_type == "stream":
                output.text = re.sub(r"[^\n]*\r(?!\n)", "", output.text)
        if cell.cell_type == "code":
            cell.outputs = joined


def write_student_copy(path: Path, folder: Path) -> Path:
    """Write a notebook without outputs into a folder, and return the copy's path.

    A guess then comes before its result. A notebook of the course keeps its place below the
    folder, so that links lead from copy to copy. Raises OSError if the copy is there already.
    """
    notebook = read_notebook(path)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    source, parts = path.resolve(), (path.name,)
    if source.is_relative_to(REPO_DIR):
        parts = source.relative_to(REPO_DIR).parts
    make_folder(folder)
    target = folder.joinpath(*parts)
    if target.exists():
        raise FileExistsError(f"{target} exists already; choose another folder")
    write_atomically(target, (nbformat.writes(notebook) + "\n").encode())
    return target


def write_course(folder: Path) -> int:
    """Write what notebooks need beside them, and the records in runs/; return how many those are.

    The folder then runs by itself: figures of records are there before anything is trained. Tests
    and solutions are not copied.
    """
    for name in COURSE_FILES:
        if (REPO_DIR / name).exists():
            shutil.copy(REPO_DIR / name, folder / name)
    package = Path(__file__).resolve().parent.parent
    shutil.copytree(package, folder / package.name, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "configs").mkdir()
    for path in [*CONFIGS_DIR.glob("*_config.yaml"), CONFIGS_DIR / "schema.json"]:
        shutil.copy(path, folder / "configs" / path.name)
    (folder / "runs").mkdir()
    records = find_runs()[0]
    for record in records:
        name = f"{record.name}-{record.id}.json"
        shutil.copy(runs_dir() / name, folder / "runs" / name)
    return len(records)
