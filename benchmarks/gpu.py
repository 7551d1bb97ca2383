"""Record on this machine's NVIDIA GPU what the course predicts and trains: `make gpu`.

    python -m benchmarks.gpu                      # the four parts, one after the other
    python -m benchmarks.gpu bench --limit 540    # one part, in nine minutes at most
    python -m benchmarks.gpu --take runs/gpu/records.tar.gz

| part | what it does |
|---|---|
| `ledger` | peaks of memory against the prediction; the tests marked `gpu`; a few rows of the allocator |
| `notebooks34` | notebooks 03 and 04 |
| `notebooks12` | notebooks 01 and 02 |
| `bench` | several ways to train the same tokens, eager and compiled; times of many steps |

Parts do not depend on each other. A part is a few commands, and one that fails or reaches the limit
stops no other. What is done stands in OUT/done, and is not done again by a next call; tables
grow, and none is begun anew. After each part OUT/records.tar.gz holds what there is so far, which
another machine can `--take`: records go into labutils/reference/, and notebooks 01 to 04, as the
card executed them, into benchmarks/cards/CARD/, with pictures of 128 colours and a card.json. It
says which card, driver and torch they are from; without one, notebooks are left out.

For Linux. Only the standard library is needed here.
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
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
REFERENCE = REPO / "labutils" / "reference"
CARDS = REPO / "benchmarks" / "cards"
NOTEBOOKS = sorted(path.name for path in REPO.glob("0*.ipynb"))
PYTHON = [sys.executable, "-m"]
# without the options that need nbval; two files: others may need packages that are not there
TESTS = [*PYTHON, "pytest", "-o", "addopts=", "-m", "gpu", "-v", "--tb=short"]
TESTS += ["-p", "no:cacheprovider", "tests/test_gpu.py", "tests/test_train_gpt2.py"]
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
FOLDERS = ("logs", "reference", "runs")  # of the archive
RECORDS = (".csv", ".json", ".pickle")
MOST_BYTES = 10 * 2**20  # of a file in the archive
CUT_OFF = (124, 137)  # how timeout(1) answers where a command ended at SIGINT, or had to be killed


def run_part(part: str, out: Path, limit_s: float) -> bool:
    """Run a part's commands that are not done, each in what is left of `limit_s` seconds (0: no
    limit); write the archive, and return whether all are done.
    """
    begin, done, answers = time.monotonic(), out / "done", []
    for folder in FOLDERS:
        (out / folder).mkdir(parents=True, exist_ok=True)
    done.touch()
    places = {"LABUTILS_RUNS": str(out / RUNS.get(part, "runs"))}
    places["LABUTILS_LEDGER"] = str(out / "reference" / "ledger_card.csv")
    # site: what the Makefile has installed of a folder of wheels
    paths = [str(REPO), str(out / "site"), os.environ.get("PYTHONPATH", "")]
    places["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    # `nohup … &` would have it ignored, and a notebook is written at SIGINT as far as it came
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for name, words in PARTS[part].items():
        entry, log = f"{part} {name}", out / "logs" / f"{part}-{name}.txt"
        if entry in done.read_text(encoding="utf-8").splitlines():
            print(f"{entry}: done before", flush=True)
            continue
        start = time.monotonic()
        left = max(1, limit_s - (start - begin)) if limit_s else 0  # to timeout, 0 is no limit
        print(f"{entry}: begins; its words go to {log}", flush=True)
        command = ["timeout", "--signal=INT", "--kill-after=20", str(left)]
        command += [word.format(out=out) for word in words]
        with log.open("ab") as file:
            code = subprocess.run(
                command, check=False, cwd=REPO, env=os.environ | places, stdout=file, stderr=file
            ).returncode
        answer = "done" if code == 0 else "cut off" if code in CUT_OFF else f"failed ({code})"
        print(f"{entry}: {answer}, {time.monotonic() - start:.0f} s", flush=True)
        answers.append(code == 0)
        if code == 0:
            with done.open("a", encoding="utf-8") as file:
                print(entry, file=file)
    archive(out)
    return all(answers)


def archive(out: Path) -> Path:
    """Write OUT/records.tar.gz with logs, tables, records and notebooks."""

    def is_small(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        if member.size <= MOST_BYTES:
            return member
        print(f"left out of the archive, too large: {member.name}")
        return None

    target = out / "records.tar.gz"
    with tarfile.open(target, "w:gz") as file:
        for name in ("card.json", *FOLDERS):
            file.add(out / name, name, filter=is_small)
    print(f"wrote {target}, {target.stat().st_size / 2**20:.1f} MiB", flush=True)
    return target


def take(path: Path, reference: Path = REFERENCE, cards: Path = CARDS) -> None:
    """Copy the records of an archive into labutils/reference/. Tables that are there grow."""
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
        take_notebooks(file, cards)


def with_fewer_colors(png: str) -> str:
    """Return a picture, PNG in base64, with 128 colours: half the bytes, and as good to the eye."""
    # Imported here, because on the card, and for records, the standard library is enough.
    from PIL import Image

    image = Image.open(io.BytesIO(base64.b64decode(png))).convert("RGB").quantize(128)
    image.save(file := io.BytesIO(), format="png", optimize=True)
    smaller = base64.b64encode(file.getvalue()).decode()
    return min(png, smaller, key=len)


def take_notebooks(file: tarfile.TarFile, cards: Path) -> None:
    """Copy an archive's notebooks 01 to 04 and its card.json into a folder named after the card.

    Pictures get at most 128 colours, unless that takes more bytes; all else stays as it is. A
    notebook that was cut off is taken too, and the line about it says how far it came.
    """
    names = [name for name in NOTEBOOKS if f"runs/{name}" in file.getnames()]
    facts = json.load(file.extractfile("card.json")) if "card.json" in file.getnames() else {}
    folder = cards / re.sub("[^a-z0-9]+", "-", facts.get("card", "").lower()).strip("-")
    if names and folder == cards:
        print(f"{file.name}: which card? No card.json, no notebooks taken", file=sys.stderr)
        return
    for name in names:
        notebook = json.load(file.extractfile(f"runs/{name}"))
        code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
        for data in (output.get("data", {}) for cell in code for output in cell["outputs"]):
            if "image/png" in data:
                data["image/png"] = with_fewer_colors(data["image/png"])
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "card.json").write_text(json.dumps(facts) + "\n", encoding="utf-8")
        text = json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"  # as nbformat writes it
        (folder / name).write_bytes(text.encode())
        # A cell has its number when it begins: the last may be the one that was cut off.
        n_begun = sum(cell["execution_count"] is not None for cell in code)
        mib = len(text.encode()) / 2**20
        print(f"took {folder / name}: {mib:.1f} MiB, {n_begun} of {len(code)} code cells begun")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run parts, or take an archive; return 1 if something is not done."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.gpu", description=__doc__.splitlines()[0]
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)} (all)")
    parser.add_argument("--out", type=Path, default=REPO / "runs" / "gpu")
    parser.add_argument("--limit", type=float, default=0, help="seconds for each part (none)")
    parser.add_argument("--take", type=Path, metavar="ARCHIVE")
    options = parser.parse_args(arguments)
    if unknown := [part for part in options.parts if part not in PARTS]:
        parser.error(f"no part is named {unknown[0]}; there are {', '.join(PARTS)}")
    if options.take:
        take(options.take, REFERENCE, CARDS)
        return 0
    asked = subprocess.run(HAS_GPU, check=False, stdout=subprocess.PIPE, text=True)
    if asked.returncode:
        parser.error(f"{sys.executable} has no torch that sees a CUDA GPU; see labutils doctor")
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    driver = subprocess.getoutput(ASK_DRIVER).rpartition("\n")[2]  # a line for each card
    facts = json.loads(asked.stdout) | {"driver": driver}
    (out / "card.json").write_text(json.dumps(facts) + "\n", encoding="utf-8")
    answers = [run_part(part, out, options.limit) for part in options.parts or PARTS]
    return 0 if all(answers) else 1


if __name__ == "__main__":
    raise SystemExit(main())
