"""Files of a run: the folder `runs/`, atomic writes, ids, the course's commit."""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
import subprocess
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

PACKAGE_DIR = Path(__file__).resolve().parent
REPO_DIR = PACKAGE_DIR.parent
CONFIGS_DIR = REPO_DIR / "configs"
REFERENCE_DIR = PACKAGE_DIR / "reference"
# These train nothing: what changes in them makes no recorded run another.
NO_TRAINING = {"plotting", "prediction", "course"}


def runs_dir() -> Path:
    """Return the folder of generated files: `runs/` beside the notebooks, or LABUTILS_RUNS."""
    return Path(os.environ.get("LABUTILS_RUNS") or REPO_DIR / "runs").expanduser().resolve()


def program() -> str:
    """Return what the course's commands begin with: `labutils` where the shell finds it."""
    return "labutils" if shutil.which("labutils") else "python -m labutils"


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file so that a reader sees all of it or none, creating its folder. Raises OSError.

    A process killed meanwhile leaves a hidden file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # In the same folder, since a file moves in one step only within its file system. The name is
    # cut: most take 255 bytes.
    temporary = path.with_name(f".{path.name[:100]}-{secrets.token_hex(4)}")
    try:
        temporary.write_bytes(content)
        temporary.replace(path)
    except BaseException:  # Ctrl-C, too
        temporary.unlink(missing_ok=True)
        raise


def make_folder(path: Path) -> None:
    """Create a folder and those above it. Raises OSError, with advice if a file is in the way."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise NotADirectoryError(
            f"cannot make the folder {path}: a file has that name; choose another "
            "(LABUTILS_RUNS names the folder of runs)"
        ) from error


def new_id() -> tuple[str, str]:
    """Return (id, time of creation): sorted ids are in order of time, and no two are equal."""
    now = datetime.now(UTC)
    # random digits: two processes may ask in the same microsecond
    return f"{now:%Y%m%d-%H%M%S%f}-{secrets.token_hex(2)}", now.isoformat(timespec="seconds")


@cache
def code_version(package: Path = PACKAGE_DIR) -> str:
    """Return a hash of the files that train: once they change, no older record is reused."""
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):  # a folder's own order differs between machines
        if path.relative_to(package).parts[0] not in NO_TRAINING:
            digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def commit() -> str:
    """Return the git commit of the course, with + if files have changed since; "unknown" outside a
    git checkout.
    """
    command = [
        "git",
        "-C",
        str(REPO_DIR),
        "describe",
        "--always",
        "--abbrev=12",
        "--dirty=+",
        "--exclude=*",  # no tag: always the hash
    ]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return answer.stdout.strip() or "unknown"
