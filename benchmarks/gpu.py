"""Record on this machine's NVIDIA GPU what the course predicts and trains: `make gpu`.

    python -m benchmarks.gpu                      # the four parts, one after the other
    python -m benchmarks.gpu bench --limit 540    # one part, in nine minutes at most
    python -m benchmarks.gpu --take runs/gpu/*.tar.gz

| part | what it does |
|---|---|
| `ledger` | peaks of memory against the prediction; the tests marked `gpu`; a few rows of the allocator |
| `notebooks34` | notebooks 03 and 04 |
| `notebooks12` | notebooks 01 and 02 |
| `bench` | several ways to train the same tokens, eager and compiled; times of many steps |

Parts do not depend on each other. A part is a few commands, and one that fails or reaches the limit
stops no other. What is done stands in OUT/done, and is not done again by a next call; tables
grow, and none is begun anew. Each part leaves OUT/PART.tar.gz, which another machine can `--take`:
records go into labutils/reference/, and notebooks 01 to 04, as the card executed them, into
benchmarks/cards/CARD/, with pictures of 128 colours and a card.json. It says which card, driver and
torch they are from; notebooks of an archive without one are left out. If a card's notebooks are
larger together than 2.5 MiB, they are written all the same, but `--take` says so and returns 1.

Where there is no network, `make wheels` on another machine fills a folder, and `--wheels FOLDER`
takes from it what the Python at hand lacks. Only the standard library is needed here.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
REFERENCE = REPO / "labutils" / "reference"
CARDS = REPO / "benchmarks" / "cards"
NOTEBOOKS = sorted(path.name for path in REPO.glob("0*.ipynb"))
PYTHON = [sys.executable, "-m"]
# without the options that need nbval; PASSED keeps what need not be tested again
TESTS = [*PYTHON, "pytest", "-o", "addopts=", "-p", "benchmarks.gpu", "-m", "gpu", "-v"]
# two files: others may need packages that are not there
TESTS += ["--tb=short", "-p", "no:cacheprovider", "tests/test_gpu.py", "tests/test_train_gpt2.py"]
TABLE = [*PYTHON, "benchmarks.allocator_table", "{out}/reference/allocator_card.csv"]
LABS = [*PYTHON, "labutils", "labs", "--keep-going"]
BENCH = [*PYTHON, "benchmarks.bench", "--blocks", "5"]
ASK_TORCH = "import json, torch; torch.cuda.is_available() or exit(1); print(json.dumps("
ASK_TORCH += "{'card': torch.cuda.get_device_name(), 'torch': torch.__version__}))"
HAS_GPU = [sys.executable, "-c", ASK_TORCH]
ASK_DRIVER = "nvidia-smi --query-gpu=driver_version --format=csv,noheader || echo not noted"
PARTS = {  # part: {command's name: its words}
    "ledger": {
        "ledger": [*TESTS, "-k", "predicted_peak"],
        "allocator": [*TABLE, "--every", "20", "--label", "torch's CUDA allocator"],
        "snapshot": [*PYTHON, "benchmarks.snapshot_record", "{out}/reference"],
        "tests": [*TESTS, "-k", "not predicted_peak"],
    },
    "notebooks34": {"04": [*LABS, "04"], "03": [*LABS, "03"]},
    "notebooks12": {"01": [*LABS, "01"], "02": [*LABS, "02"]},
    "bench": {
        "eager": [*BENCH, "--arms", "tutorial", "corrected", "plain", "--set", "compile=off"],
        "compiled": [*BENCH, "--arms", "plain_compiled"],
        "steps": [*PYTHON, "benchmarks.step_times", "{out}/reference/card_steps.csv"],
    },
}
RUNS = {"bench": "reference/bench"}  # where a part's records go; else "runs"
RECORDS, NO_RECORDS = (".csv", ".json", ".pickle"), (".html", ".gz")
MOST_BYTES = 15 * 2**20  # of an archive, before it is compressed
MOST_MIB = 2.5  # of a card's notebooks together
PASSED = "GPU_TESTS_PASSED"  # environment: the file with the names of tests that have passed


# ---- As a plugin of pytest: tests that have passed on this card are not run again


def _passed() -> list[str]:
    path = Path(os.environ.get(PASSED, os.devnull))
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


def pytest_collection_modifyitems(items: list) -> None:
    """Leave out what has passed."""
    passed = _passed()
    items[:] = [item for item in items if item.nodeid not in passed]


def pytest_runtest_logreport(report) -> None:
    """Note what passes, at once."""
    if report.when == "call" and report.passed:
        with Path(os.environ.get(PASSED, os.devnull)).open("a", encoding="utf-8") as file:
            print(report.nodeid, file=file)


# ---- One part


def run_part(part: str, out: Path, limit_s: float, site: Path | None = None) -> bool:
    """Run a part's commands that are not done, each in what is left of `limit_s` seconds (0: no
    limit); write its archive, and return whether all are done.
    """
    begin, done = time.monotonic(), out / "done"
    for folder in ("logs", "reference", "runs"):
        (out / folder).mkdir(parents=True, exist_ok=True)
    runs = out / RUNS.get(part, "runs")
    environment = os.environ | {
        "LABUTILS_RUNS": str(runs),
        "LABUTILS_LEDGER": str(out / "reference" / "ledger_card.csv"),
        PASSED: str(out / "passed"),
    }
    paths = [str(REPO), *([str(site)] if site else []), os.environ.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    is_done = True
    for name, words in PARTS[part].items():
        entry = f"{part} {name}"
        if done.exists() and entry in done.read_text(encoding="utf-8").splitlines():
            print(f"{entry}: done before", flush=True)
            continue
        left = limit_s - (time.monotonic() - begin) if limit_s else None
        start = time.monotonic()
        log = out / "logs" / f"{part}-{name}.txt"
        print(f"{entry}: begins; its words go to {log}", flush=True)
        code = run_command([word.format(out=out) for word in words], environment, log, left)
        answer = "done" if code == 0 else "cut off" if code is None else f"failed ({code})"
        print(f"{entry}: {answer}, {time.monotonic() - start:.0f} s", flush=True)
        is_done &= code == 0
        if code == 0:
            with done.open("a", encoding="utf-8") as file:
                print(entry, file=file)
    archive(out, part)
    return is_done


def run_command(
    words: Sequence[str], environment: dict[str, str], log: Path, limit_s: float | None
) -> int | None:
    """Return a command's exit code, or None if the limit ended it and what it has started."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # `nohup … &` would have it ignored
    with log.open("ab") as file:
        process = subprocess.Popen(
            words, cwd=REPO, env=environment, stdout=file, stderr=file, start_new_session=True
        )
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGINT)  # a notebook is written as far as it came
            with suppress(subprocess.TimeoutExpired):
                process.wait(20)
            return None
        finally:
            if process.poll() is None:  # at Ctrl-C too
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def archive(out: Path, part: str) -> Path:
    """Write OUT/PART.tar.gz with logs, tables, records and notebooks, the smallest files first."""
    paths = [path for path in out.rglob("*") if path.is_file() and path.suffix not in NO_RECORDS]
    target, n_bytes = out / f"{part}.tar.gz", 0
    with tarfile.open(target, "w:gz") as file:
        for path in sorted(paths, key=lambda path: path.stat().st_size):
            if out / "site" in path.parents:
                continue
            n_bytes += path.stat().st_size
            if n_bytes > MOST_BYTES:
                print(f"left out of the archive, too large: {path}")
            else:
                file.add(path, path.relative_to(out))
    print(f"wrote {target}, {target.stat().st_size / 2**20:.1f} MiB", flush=True)
    return target


def take(path: Path, reference: Path = REFERENCE, cards: Path = CARDS) -> bool:
    """Copy the records of an archive into labutils/reference/. Tables that are there grow.

    Notebooks go elsewhere; return what `take_notebooks` says of them.
    """
    n_taken = 0
    with tarfile.open(path) as file:
        for member in file:
            name = Path(member.name)
            is_run = name.parts[:-1] == ("runs",) and name.suffix == ".json"
            is_record = name.parts[:1] == ("reference",) and name.suffix in RECORDS
            if not member.isfile() or not (is_run or is_record) or ".." in name.parts:
                continue
            content = file.extractfile(member).read()
            target = reference.joinpath(*name.parts[1:])
            target.parent.mkdir(parents=True, exist_ok=True)
            if target.suffix == ".csv" and target.exists():
                lines = target.read_bytes().splitlines() + content.splitlines()
                content = b"\n".join(dict.fromkeys(lines)) + b"\n"
            target.write_bytes(content)
            n_taken += 1
            print(f"took {target}")
        print(f"{n_taken} records of {path}")
        return take_notebooks(file, cards)


def with_fewer_colors(png: str) -> str:
    """Return a picture, PNG in base64, with 128 colours: half the bytes, and as good to the eye."""
    # Imported here, because on the card, and for records, the standard library is enough.
    from PIL import Image

    image = Image.open(io.BytesIO(base64.b64decode(png))).convert("RGB").quantize(128)
    image.save(file := io.BytesIO(), format="png", optimize=True)
    smaller = base64.b64encode(file.getvalue()).decode()
    return min(png, smaller, key=len)


def take_notebooks(file: tarfile.TarFile, cards: Path) -> bool:
    """Copy an archive's notebooks 01 to 04 and its card.json into a folder named after the card.

    Pictures get at most 128 colours, unless that takes more bytes; all else stays as it is. A
    notebook that was cut off is taken too, and the line about it says how far it came. Return False
    if those in the folder are together too large.
    """
    names = [name for name in NOTEBOOKS if f"runs/{name}" in file.getnames()]
    facts = json.load(file.extractfile("card.json")) if "card.json" in file.getnames() else {}
    folder = cards / re.sub("[^a-z0-9]+", "-", facts.get("card", "").lower()).strip("-")
    if names and folder == cards:
        print(f"{file.name}: which card? No card.json, no notebooks taken", file=sys.stderr)
        return True
    for name in names:
        notebook = json.load(file.extractfile(f"runs/{name}"))
        code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
        for data in (output.get("data", {}) for cell in code for output in cell["outputs"]):
            if "image/png" in data:
                data["image/png"] = with_fewer_colors(data["image/png"])
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "card.json").write_text(json.dumps(facts) + "\n", encoding="utf-8")
        text = json.dumps(notebook, indent=1, ensure_ascii=False)  # as nbformat writes it
        (folder / name).write_bytes((text + "\n").encode())
        # A cell has its number when it begins: the last may be the one that was cut off.
        n_begun = sum(cell["execution_count"] is not None for cell in code)
        print(f"took {folder / name}: {n_begun} of {len(code)} code cells begun")
    mib = {path.name: path.stat().st_size / 2**20 for path in sorted(folder.glob("*.ipynb"))}
    if sum(mib.values()) <= MOST_MIB:
        return True
    sizes = ", ".join(f"{name} {size:.2f}" for name, size in mib.items())
    print(f"{folder}: together more than {MOST_MIB} MiB: {sizes}", file=sys.stderr)
    return False


def install_missing(wheels: Path, site: Path) -> None:
    """Install those wheels of a folder into `site` whose packages this Python lacks."""
    missing = []
    for wheel in sorted(wheels.glob("*.whl")):
        try:
            version(wheel.name.split("-")[0])
        except PackageNotFoundError:
            missing.append(str(wheel))
    if missing:
        options = ["--quiet", "--no-index", "--no-deps", "--upgrade", "--target", str(site)]
        subprocess.run([*PYTHON, "pip", "install", *options, *missing], check=True)
    print(f"{len(missing)} packages of {wheels} were missing here")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run parts, or take their archives; return 1 if something is not done."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.gpu", description=__doc__.splitlines()[0]
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)} (all)")
    parser.add_argument("--out", type=Path, default=REPO / "runs" / "gpu")
    parser.add_argument("--limit", type=float, default=0, help="seconds for each part (none)")
    parser.add_argument("--wheels", type=Path, help="a folder of wheels, of which some are missing")
    parser.add_argument("--take", type=Path, nargs="+", metavar="ARCHIVE")
    options = parser.parse_args(arguments)
    if unknown := [part for part in options.parts if part not in PARTS]:
        parser.error(f"no part is named {unknown[0]}; there are {', '.join(PARTS)}")
    if options.take:
        # The newest last, since each holds all that OUT held: in an older one a notebook may be cut
        # off that is whole in a newer one. Bytes 4 to 7 of a gzip file say when it was written.
        archives = sorted(options.take, key=lambda path: path.read_bytes()[7:3:-1])
        return 0 if all([take(path, REFERENCE, CARDS) for path in archives]) else 1
    asked = subprocess.run(HAS_GPU, check=False, stdout=subprocess.PIPE, text=True)
    if asked.returncode:
        parser.error(f"{sys.executable} has no torch that sees a CUDA GPU; see labutils doctor")
    out, site = options.out.resolve(), None
    out.mkdir(parents=True, exist_ok=True)
    driver = subprocess.getoutput(ASK_DRIVER).rpartition("\n")[2]  # a line for each card
    facts = json.loads(asked.stdout) | {"driver": driver}
    (out / "card.json").write_text(json.dumps(facts) + "\n", encoding="utf-8")
    if options.wheels:
        if not options.wheels.is_dir():
            parser.error(f"there is no folder {options.wheels}; make wheels fills one")
        site = out / "site"
        install_missing(options.wheels, site)
    answers = [run_part(part, out, options.limit, site) for part in options.parts or PARTS]
    return 0 if all(answers) else 1


if __name__ == "__main__":
    raise SystemExit(main())
