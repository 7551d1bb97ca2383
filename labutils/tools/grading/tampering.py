"""Notice a submission that does something else than answering.

Three nets, none of them alone: what the source says (`suspicious`), what the process does
(`watch`: an audit hook, which cannot be taken away again), and what has become of the checks
(`Originals`). An answer that is a value is plain data (`plain`) and is judged in a process in
which the submission never ran. An answer that is a function must run beside its judge; there the
nets make cheating visible, and a determined attacker in Python can still find a hole.
"""

from __future__ import annotations

import ast
import builtins
import functools
import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType, ModuleType

from labutils.files import REPO_DIR
from labutils.tools.grading.names import parsed
from labutils.tools.grading.notebook import course

SUBMISSION = "<submission>"
# Attributes through which a function reaches what does not belong to it.
INNER = {
    *("f_back", "f_locals", "f_globals", "f_builtins", "tb_frame", "gi_frame", "cr_frame"),
    *("__globals__", "__closure__", "__code__", "__subclasses__", "__builtins__", "cell_contents"),
}
HIDDEN_MODULES = re.compile(r"labutils\.checks\.\w|labutils\.tools|^tests\b|^(gc|ctypes|inspect)$")
VERDICT = re.compile(r"\s*(Right\b|\W*\w+\W+right\b)")
# Audit events of what no exercise asks for: https://docs.python.org/3/library/audit_events.html
FORBIDDEN = ("os.system", "os.exec", "os.posix_spawn", "os.fork", "os.kill", "subprocess.Popen")
FORBIDDEN += ("socket.", "ctypes.", "gc.get_", "shutil.", "os.remove", "os.rename", "pty.")
LOOKS_INSIDE = ("sys._getframe", "sys._current_frames", "gc.get_objects", "gc.get_referrers")


class TamperingError(Exception):
    """A submission does something else than answering; the message says what and where."""


# ---- what the source says


def suspicious(cells: Sequence[str]) -> Iterator[tuple[int, str]]:
    """Yield (cell, what it does and in which line) of cells that are not the course's own."""
    own = {cell for its_cells in course().values() for cell in its_cells}
    for number, cell in enumerate(cells):
        if cell not in own:
            for what in suspicious_lines(cell):
                yield number, what


@functools.lru_cache(maxsize=4096)
def suspicious_lines(cell: str) -> tuple[str, ...]:
    """Return what is suspicious in a cell, in words that end with the line."""
    lines, found = cell.splitlines(), []
    for node in ast.walk(parsed(cell)):
        what = _suspicion(node)
        if what:
            found.append(f"{what}: {lines[node.lineno - 1].strip()[:100]}")
    return tuple(found)


def _suspicion(node: ast.AST) -> str | None:
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        names = [alias.name for alias in node.names]
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{name}" for name in names] + [str(node.module)]
        if any(HIDDEN_MODULES.search(name) for name in names):
            return "it imports what is not meant for an answer"
    elif isinstance(node, ast.Attribute):
        text = ast.unparse(node)
        if isinstance(node.ctx, (ast.Store, ast.Del)) and re.match(
            r"(lab|labutils|builtins)\.", text
        ):
            return "it changes the package"
        if re.search(r"\bchecks\.(_|core|collect|EXERCISES)", text):
            return "it reaches into the checks"
        if node.attr in INNER:
            return "it looks inside other functions"
    elif isinstance(node, ast.Call):
        name = ast.unparse(node.func)
        if name == "setattr" and node.args and re.match(r"lab", ast.unparse(node.args[0])):
            return "it changes the package"
        if name == "print" and any(_is_verdict(argument) for argument in node.args):
            return "it prints a verdict"
    return None


def _is_verdict(node: ast.expr) -> bool:
    is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
    return is_text and bool(VERDICT.match(node.value))


# ---- what the process does


def watch(closed: Sequence[Path], tell: Callable[[str], None]) -> None:
    """From now on, tell of what no answer needs, and end the process.

    `closed` are folders that must not be read: the other submissions and the solutions.
    """
    closed_names = tuple(f"{folder.resolve()}{os.sep}" for folder in closed)
    getframe, realpath, exit_now = sys._getframe, os.path.realpath, os._exit  # names can change
    is_busy = False  # looking at a frame is an event itself

    def hook(event: str, arguments: tuple) -> None:
        nonlocal is_busy
        if is_busy:
            return
        is_busy = True
        what = None
        if event == "open":
            path = arguments[0]
            if isinstance(path, str) and realpath(path).startswith(closed_names):
                what = "it reads what belongs to others"
        elif event in LOOKS_INSIDE:
            what = f"it calls {event}" if getframe(1).f_code.co_filename == SUBMISSION else None
        elif event.startswith(FORBIDDEN) and _is_direct(getframe(1)):
            what = f"it calls {event}"
        if what:
            tell(f"{what}: {_line_of(getframe(1))}")
            exit_now(1)
        is_busy = False

    sys.addaudithook(hook)


def _is_direct(frame: FrameType | None) -> bool:
    """Return whether the submission asked for it, and not the package for it."""
    package = str(REPO_DIR / "labutils")
    while frame is not None:
        name = frame.f_code.co_filename
        if name == SUBMISSION or name.startswith(package):
            return name == SUBMISSION
        frame = frame.f_back
    return False


def _line_of(frame: FrameType | None) -> str:
    while frame is not None and frame.f_code.co_filename != SUBMISSION:
        frame = frame.f_back
    if frame is None:
        return "line unknown"
    source = frame.f_globals.get("__source__", "").splitlines()
    at = frame.f_lineno - 1
    return source[at].strip()[:100] if at < len(source) else f"line {at + 1}"


# ---- what has become of the checks


class Originals:
    """What the names of the checks, of torch and of Python meant before a submission ran."""

    def __init__(self) -> None:
        import torch
        from torch.nn import functional

        checks = [module for name, module in sys.modules.items() if _is_check(name)]
        owners = [
            *checks,
            builtins,
            math,
            torch,
            torch.nn,
            functional,
            torch.nn.utils,
            torch.linalg,
        ]
        owners += [torch.Tensor, torch.nn.Module, torch.optim.Optimizer, torch.amp.GradScaler]
        owners += [torch.autograd, torch.autograd.Function, torch.nn.Linear]
        self.meant = [(owner, dict(vars(owner)), self._inner(owner)) for owner in owners]

    def _inner(self, owner: ModuleType | type) -> dict[str, tuple]:
        """Return what is inside the functions of a check's module, by name."""
        if not _is_check(getattr(owner, "__name__", "")):
            return {}
        inner = {}
        for name, value in vars(owner).items():
            if hasattr(value, "__code__"):
                cells = [cell.cell_contents for cell in value.__closure__ or ()]
                codes = [getattr(cell, "__code__", None) for cell in cells]
                inner[name] = (value.__code__, value.__defaults__, *cells, *codes)
        return inner

    def changed(self) -> str | None:
        """Return the name of something that is no longer what it was; None if all is."""
        for owner, before, inner in self.meant:
            now = vars(owner)
            for name, value in before.items():
                if now.get(name) is not value and name not in ("__builtins__", "_"):
                    return f"{owner.__name__}.{name}"
            after = self._inner(owner)
            for name, parts in inner.items():
                if any(one is not other for one, other in zip(parts, after[name], strict=True)):
                    return f"{owner.__name__}.{name}"
        return None


def _is_check(name: str) -> bool:
    return name == "labutils.checks" or name.startswith("labutils.checks.")
