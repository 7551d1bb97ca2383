"""The state of a run on disk, from which a killed run continues as if nothing had happened."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol
from zipfile import ZipFile

import torch
from torch import nn

from labutils import out_of_memory
from labutils.config import Config, config_of
from labutils.records import RecordError, RunRecord, runs_dir, state_files, write_atomically

STATE_VERSION = 2
COPIES = 3  # of the parameters in a state, at most: with AdamW's two moments


class _Part(Protocol):
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> Any: ...


class Saver:
    """Saves what decides the steps to come: parameters, optimizer, loss scale, random numbers, the step; and the log.

    The file, `runs/<name>-<experiment>-<repeat>-<id>.state`, is replaced as a whole every `every` steps (0: never); the
    steps done are also the position in the data, which come in the same order in every run. `planned` is the record
    that the run will fill: only states of an equal experiment and repeat are continued (`left` are those there are).
    They are read with `weights_only`: no code in a file runs. Each holds its config, so that it can be continued alone.
    """

    def __init__(self, planned: RunRecord, every: int, run_id: str) -> None:
        self.planned = planned.model_copy(update={"steps_planned": 0})  # a slow machine plans fewer, by a noisy probe
        self.every, self.name, self.done = every, planned.name, 0
        self.experiment = f"{self.name}-{self.planned.experiment}-"
        self.run = f"{self.experiment}{planned.repeat}-"
        self.path = runs_dir() / f"{self.run}{run_id}.state"
        self.left = [path for path in state_files(self.name) if path.name.startswith(self.run)]

    def find(self) -> int:
        """Look for this run's furthest state, which the next will replace, and return its steps; 0 if there is none.

        Raises RecordError if none of this experiment's is whole, or if those there are belong to other experiments.
        """
        files, damaged = state_files(self.name), []
        for path in self.left:
            try:
                step = _read(path)["step"]
            except RecordError as error:
                damaged.append(error)
                continue
            if step > self.done:
                self.path, self.done = path, step
        if damaged and not self.done:
            raise damaged[0]
        for error in damaged:
            print(f"{self.name}: {error}; another state is whole")
        if files and not any(path.name.startswith(self.experiment) for path in files):
            there, here = planned(files[-1])[0].identity, self.planned.identity
            unequal = [key for key in here | there if here.get(key) != there.get(key)]
            raise RecordError(
                f"{files[-1].name} is of another experiment: "
                + ", ".join(f"{key} was {there.get(key)}, now {here.get(key)}" for key in unequal)
                + ". Put that back, or train from the beginning without --resume"
            )
        return self.done

    @property
    def command(self) -> str:
        """What continues from the state that there is."""
        return f"python -m labutils run {self.path.name}"

    def require_room(self, model: nn.Module) -> None:
        """Raise OSError if the disk has no room for two states of a model, the last and the next (if there is none)."""
        if not self.every:
            return
        states = 1 if self.done else 2
        needed = states * COPIES * sum(p.numel() * p.element_size() for p in model.parameters())
        free = shutil.disk_usage(runs_dir()).free
        if needed > free:
            raise OSError(
                f"save_every: {self.every} needs {needed / 2**30:.1f} GiB in {runs_dir()}, which has "
                f"{free / 2**30:.1f}. Make room, let LABUTILS_RUNS name a folder elsewhere, or set save_every: 0"
            )

    def restore(self, parts: Mapping[str, _Part]) -> int:
        """Put the state that `find` has found into the parts and the random generators; return the steps done.

        `parts` are those that `save` gets, `model` among them. Raises RecordError if they do not fit.
        """
        if not self.done:
            return 0
        state = _read(self.path)
        try:
            for key, part in parts.items():
                part.load_state_dict(state["parts"][key])
            torch.set_rng_state(state["random"])
            if state["random_cuda"] is not None:
                torch.cuda.set_rng_state(state["random_cuda"], _device(parts))
        except (RuntimeError, KeyError, TypeError, ValueError, AttributeError) as error:
            raise _damaged(self.path, error) from error
        return state["step"]

    def due(self, done: int) -> bool:
        """Whether the state after `done` steps is to be saved."""
        return self.every > 0 and done % self.every == 0

    def save(self, parts: Mapping[str, _Part], done: int) -> None:
        """Save the state after `done` steps. On a full disk say so, keep the older state, and go on."""
        on_cuda = _device(parts).type == "cuda"
        state = {
            "version": STATE_VERSION,
            "step": done,
            "planned": self.planned.model_dump_json(),
            "parts": {key: part.state_dict() for key, part in parts.items()},
            "random": torch.get_rng_state(),
            "random_cuda": torch.cuda.get_rng_state(_device(parts)) if on_cuda else None,
        }
        try:
            write_atomically(self.path, lambda file: torch.save(state, file))
            self.done = done
        except (OSError, RuntimeError) as error:  # torch's writer makes a RuntimeError of what stops it
            if isinstance(error.__context__, KeyboardInterrupt):
                raise error.__context__ from None
            print(f"{self.name}: state of step {done} NOT SAVED: {str(error).splitlines()[0]}; the run goes on")

    def finish(self) -> None:
        """Delete the run's states, which nobody needs once it is complete, and what killed processes left of them."""
        for path in (self.path, *self.left, *runs_dir().glob(f".{self.run}*")):
            with suppress(OSError):  # another user's
                path.unlink(missing_ok=True)


def planned(path: Path) -> tuple[RunRecord, int]:
    """Return what a state's run was to be, as a record without results, and the steps done; reads no parameters.

    Raises RecordError if the file is damaged, no state, or was given the name of another run.
    """
    state = _read(path, with_tensors=False)
    return state["planned"], state["step"]


def config_in(path: Path) -> tuple[Config, int]:
    """Return a state's config, as resolved for its device, and its repeat. Raises RecordError, as `planned` does."""
    if not path.is_file():
        raise RecordError(f"no state {path.name} in {path.parent}; `python -m labutils runs` lists what is unfinished")
    state = _read(path, with_tensors=False)
    return state["config"], state["planned"].repeat


def _device(parts: Mapping[str, Any]) -> torch.device:
    return next(parts["model"].parameters()).device


def _read(path: Path, *, with_tensors: bool = True) -> dict[str, Any]:
    try:
        with ZipFile(path) as file:
            if with_tensors and (broken := file.testzip()):  # torch does not look at the checksums it has written
                raise ValueError(f"wrong checksum of {broken}")
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=not with_tensors)
        if state["version"] != STATE_VERSION or not isinstance(state["step"], int):
            raise ValueError(f"version {state['version']!r}, expected {STATE_VERSION}")
        state["planned"] = record = RunRecord.model_validate_json(state["planned"])
        state["config"] = config_of(record.config, path.name)
        if not path.name.startswith(f"{record.name}-{record.experiment}-{record.repeat}-"):
            raise ValueError("renamed: it is another run's")
    except OSError:
        raise
    except Exception as error:  # whatever a damaged zip file or pickle makes of torch's readers
        raise _damaged(path, error) from error
    return state


def _damaged(path: Path, error: Exception) -> Exception:
    """Return the error that says so; or the error itself if it has another cause, too little memory."""
    if out_of_memory.recognised(error):
        return error
    reason = (str(error).strip().splitlines() or [""])[0]
    return RecordError(f"{path.name} is damaged, or no saved state ({type(error).__name__}: {reason[:100]}); delete it")
