"""The state of a run on disk, from which a killed run continues as if nothing had happened."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, Literal, Protocol
from zipfile import ZipFile

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import nn

from labutils.config.reader import config_of
from labutils.config.schema import Config, ConfigError
from labutils.files import program, runs_dir, write_atomically
from labutils.machine.threads import use_recorded_threads
from labutils.memory.errors import is_out_of_memory
from labutils.training.records import RecordError, RunRecord, state_files

HEADER = "archive/run.json"  # in the zip file that torch writes
LONGEST_HEADER = 2**20  # bytes
COPIES = 3  # of the parameters in a state, at most: with AdamW's two moments


class _Part(Protocol):
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> Any: ...


class Saver:
    """Saves what decides the steps to come, and the log.

    That is: parameters, optimizer, loss scale, random numbers, and the step. The steps done are
    also the position in the data, which come in the same order in every run.
    The file, `runs/<name>-<experiment>-<repeat>-<id>.state`, is replaced as a whole every `every`
    steps (0: never). It holds its config, so that it can be continued alone.
    `planned` is the record that the run will fill. Only states of an equal experiment and repeat
    are continued; `left` are those there are.
    """

    def __init__(self, planned: RunRecord, every: int, run_id: str) -> None:
        self.steps = planned.steps_planned
        # A slow machine plans fewer steps, by a noisy probe.
        self.planned = planned = planned.model_copy(update={"steps_planned": 0})
        self.every, self.name, self.done = every, planned.name, 0
        self.experiment = f"{self.name}-{planned.experiment}-"
        self.run = f"{self.experiment}{planned.repeat}-"
        self.path = runs_dir() / f"{self.run}{run_id}.state"
        self.left = [path for path in state_files(self.name) if path.name.startswith(self.run)]
        self.source: Path | None = None  # what `find` has found, until a newer state is saved

    def find(self) -> int:
        """Look for this run's furthest state, and return its steps; 0 if there is none.

        Raises RecordError if none of this experiment's states is whole. Raises it too if those
        there are belong to other experiments.
        """
        files, damaged = state_files(self.name), []
        for path in self.left:
            try:
                step = read_header(path).step
                _read(path)
            except (RecordError, OSError) as error:
                damaged.append(error)
                continue
            if step > self.done:
                self.source, self.done = path, step
        if damaged and not self.source:
            raise damaged[0]
        for error in damaged:
            print(f"{self.name}: {error}; another state is whole")
        if files and not any(path.name.startswith(self.experiment) for path in files):
            there, here = read_header(files[-1]).planned.identity, self.planned.identity
            changes = []
            for key in here | there:
                if here.get(key) != there.get(key):
                    changes.append(f"{key} was {there.get(key)}, now {here.get(key)}")
            raise RecordError(
                f"{files[-1].name} is of another experiment: {', '.join(changes)}. "
                "Put that back, or train from the beginning without --resume"
            )
        return self.done

    @property
    def command(self) -> str:
        """What continues from the state that there is."""
        return f"{program()} run {(self.source or self.path).name}"

    def require_room(self, model: nn.Module) -> None:
        """Raise OSError if the disk has no room for the states of a model.

        There are two while the next one replaces the last.
        """
        if not self.every:
            return
        states = 1 if self.source else 2
        needed = states * COPIES * sum(p.numel() * p.element_size() for p in model.parameters())
        free = shutil.disk_usage(runs_dir()).free
        if needed > free:
            raise OSError(
                f"save_every: {self.every} needs {needed / 2**30:.1f} GiB in {runs_dir()}, "
                f"which has {free / 2**30:.1f}. Make room, let LABUTILS_RUNS name a folder "
                "elsewhere, or set save_every: 0"
            )

    def restore(self, parts: Mapping[str, _Part]) -> int:
        """Put the state that `find` has found into the parts; return the steps done.

        `parts` are those that `save` gets, `model` among them. The random generators are set too.
        Raises RecordError if the parts do not fit.
        """
        if not self.source:
            return 0
        state = _read(self.source)
        try:
            for key, part in parts.items():
                part.load_state_dict(state["parts"][key])
            torch.set_rng_state(state["random"])
            if state["random_cuda"] is not None:
                torch.cuda.set_rng_state(state["random_cuda"], _device(parts))
        except (RuntimeError, KeyError, TypeError, ValueError, AttributeError) as error:
            raise _damaged(self.source, error) from error
        return self.done

    def due(self, done: int) -> bool:
        """Whether the state after `done` steps is to be saved."""
        return self.every > 0 and done % self.every == 0

    def save(self, parts: Mapping[str, _Part], done: int) -> None:
        """Save the state after `done` steps.

        On a full disk say so, keep the older state, and go on.
        """
        on_cuda = _device(parts).type == "cuda"
        state = {
            "parts": {key: part.state_dict() for key, part in parts.items()},
            "random": torch.get_rng_state(),
            "random_cuda": torch.cuda.get_rng_state(_device(parts)) if on_cuda else None,
        }
        header = Header(step=done, steps=self.steps, planned=self.planned)

        def write(file: BinaryIO) -> None:
            torch.save(state, file)
            with ZipFile(file, "a") as archive:
                archive.writestr(HEADER, header.model_dump_json())

        try:
            write_atomically(self.path, write)
            self.done = done
            if self.source:
                with suppress(OSError):  # another user's
                    self.source.unlink(missing_ok=True)
                self.source = None
        except (OSError, RuntimeError) as error:
            # Torch's writer makes a RuntimeError of what stops it.
            if isinstance(error.__context__, KeyboardInterrupt):
                raise error.__context__ from None
            reason = str(error).splitlines()[0]
            print(f"{self.name}: state of step {done} NOT SAVED: {reason}; the run goes on")

    def finish(self) -> None:
        """Delete the states of a run that is complete, and what killed processes left of them."""
        for path in (self.path, *self.left, *runs_dir().glob(f".{self.run}*")):
            with suppress(OSError):  # another user's
                path.unlink(missing_ok=True)


class Header(BaseModel):
    """What a state is of, readable without its parameters.

    `planned` is the run's record, without results.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: Literal[2] = 2
    step: int = Field(ge=1)  # steps done
    steps: int = Field(ge=1)  # of the whole run
    planned: RunRecord

    @property
    def config(self) -> Config:
        """The run's config, as resolved for its device."""
        return config_of(self.planned.config, self.planned.name)


def read_header(path: Path) -> Header:
    """Return what a state is of.

    Raises OSError, or RecordError if it is damaged, no state, or renamed.
    """
    try:
        with ZipFile(path) as archive:
            if archive.getinfo(HEADER).file_size > LONGEST_HEADER:
                raise ValueError("its header is too long")
            header = Header.model_validate_json(archive.read(HEADER))
        run = header.planned
        if not path.name.startswith(f"{run.name}-{run.experiment}-{run.repeat}-"):
            raise ValueError("renamed: it is another run's")
        if header.config.name != run.name:
            raise ValueError("its config is another run's")
    except OSError:
        raise
    except Exception as error:  # whatever a damaged zip file makes of its reader
        raise _damaged(path, error) from error
    return header


def take_threads_of_state(name: str) -> None:
    """Set torch's threads to those with which the newest unfinished run of a name began.

    Another number would add in another order: the run's numbers would not be the same.
    """
    for path in state_files(name)[-1:]:
        with suppress(RecordError, OSError):  # the run that reads it all says so
            said = use_recorded_threads(read_header(path).planned.environment.get("threads", ""))
            if said:
                print(f"{name}: {said}")


def _device(parts: Mapping[str, Any]) -> torch.device:
    return next(parts["model"].parameters()).device


def _read(path: Path) -> dict[str, Any]:
    try:
        with ZipFile(path) as archive:
            if broken := archive.testzip():  # torch does not look at the checksums it has written
                raise ValueError(f"wrong checksum of {broken}")
        # weights_only: no code in a file runs.
        return torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # whatever a damaged pickle makes of torch's reader
        raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> Exception:
    """Return the error that says so; too little memory is another cause, and stays itself."""
    if is_out_of_memory(error):
        return error
    if isinstance(error, ConfigError):
        return RecordError(f"{path.name} cannot be continued: {error}")
    reason = (str(error).strip().splitlines() or [""])[0]
    cause = f"{type(error).__name__}: {reason[:100]}"
    return RecordError(f"{path.name} is damaged, or no saved state ({cause}); delete it")
