"""`make gpu`: parts that do not stop each other, can be continued, and lose nothing."""

import base64
import io
import json
import re
import signal
import subprocess
import sys
import tarfile
import time
import zipfile
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
from PIL import Image

from benchmarks import gpu
from tests.helpers import REPO

WRITE = "import sys; open(sys.argv[1], 'a').write('row\\n')"
SLEEP = """
import sys, time
try:
    open(sys.argv[1] + ".begun", "w")
    time.sleep(1000)
except KeyboardInterrupt:
    open(sys.argv[1], "w")
"""
FACTS = {"card": "NVIDIA H100 80GB HBM3", "torch": "2.13.0+cu130"}
PNG = re.compile(r'"image/png": "([^"]+)"')
FOURTH = "04-Memory_Profiling.ipynb"
LIMIT = 7.0  # seconds, of a clock that stands still


def words(code: str, *arguments: str) -> list[str]:
    return [sys.executable, "-c", code, *arguments]


@pytest.fixture
def parts(monkeypatch):
    """Two parts: in the first one command fails, and one is done."""
    table = "{out}/reference/table.csv"
    parts = {"broken": {"fails": words("raise SystemExit(3)"), "writes": words(WRITE, table)}}
    parts["whole"] = {"writes": words(WRITE, "{out}/reference/other.csv")}
    monkeypatch.setattr(gpu, "PARTS", parts)
    monkeypatch.setattr(gpu, "HAS_GPU", words(f"print({json.dumps(FACTS)!r})"))
    return parts


def test_a_command_that_fails_stops_neither_its_part_nor_the_next(parts, tmp_path, capsys):
    assert gpu.main(["--out", str(tmp_path)]) == 1
    with pytest.raises(SystemExit):
        gpu.main(["--out", str(tmp_path), "leger"])  # it names the parts
    printed = capsys.readouterr().out
    assert "broken fails: failed (3)" in printed and "whole writes: done" in printed
    assert (tmp_path / "broken.tar.gz").exists() and (tmp_path / "whole.tar.gz").exists()


def test_without_a_gpu_nothing_is_begun(parts, tmp_path, monkeypatch, capsys):
    """Its tests would be skipped, and count as done."""
    monkeypatch.setattr(gpu, "HAS_GPU", words("raise SystemExit(1)"))
    with pytest.raises(SystemExit):
        gpu.main(["--out", str(tmp_path)])
    assert "sees a CUDA GPU" in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_a_second_call_does_what_is_not_done_and_truncates_nothing(parts, tmp_path, capsys):
    gpu.main(["--out", str(tmp_path)])
    parts["broken"]["fails"] = words(WRITE, "{out}/reference/table.csv")
    assert gpu.main(["--out", str(tmp_path), "broken"]) == 0
    assert "broken writes: done before" in capsys.readouterr().out
    assert (tmp_path / "reference" / "table.csv").read_text() == "row\nrow\n"


@pytest.mark.skipif(sys.platform == "win32", reason="make gpu is for Linux")
def test_the_limit_ends_a_command_and_what_it_wrote_is_in_the_archive(
    parts, tmp_path, monkeypatch, capsys
):
    table, wait = tmp_path / "reference" / "table.csv", subprocess.Popen.wait

    def reach_the_limit(process, timeout=None):
        """When the command has begun, however busy this machine is."""
        if timeout != LIMIT:
            return wait(process, timeout)
        while not table.with_suffix(".csv.begun").exists():
            time.sleep(0.05)
        raise subprocess.TimeoutExpired("", timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", reach_the_limit)
    monkeypatch.setattr(time, "monotonic", lambda: 0.0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in a shell's background
    parts["broken"] = {"endless": words(SLEEP, str(table))}
    assert not gpu.run_part("broken", tmp_path, limit_s=LIMIT)
    assert "broken endless: cut off" in capsys.readouterr().out
    with tarfile.open(tmp_path / "broken.tar.gz") as file:
        assert "reference/table.csv" in file.getnames()


def test_an_archive_leaves_out_what_is_too_large_and_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu, "MOST_BYTES", 1000)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "small.json").write_text("{}")
    (tmp_path / "runs" / "large.ipynb").write_text("x" * 2000)
    with tarfile.open(gpu.archive(tmp_path, "bench")) as file:
        assert file.getnames() == ["runs/small.json"]
    assert "left out of the archive, too large" in capsys.readouterr().out


def test_an_archive_is_taken_into_the_reference_and_tables_grow(tmp_path):
    out, reference = tmp_path / "out", tmp_path / "reference"
    files = {"reference/table.csv": "a,b\n1,2\n", "reference/bench/b.json": "{}"}
    files |= {"runs/bf16-1.json": "{}", "runs/01.ipynb": "{}", "logs/x.txt": "words"}
    files |= {"reference/play.js": "no record", "runs/calibration/gpu.json": "no run"}
    for name, text in files.items():
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text(text)
    reference.mkdir()
    (reference / "table.csv").write_text("a,b\n3,4\n")
    gpu.take(gpu.archive(out, "ledger"), reference)
    assert (reference / "table.csv").read_text() == "a,b\n3,4\n1,2\n"
    names = {path.relative_to(reference).as_posix() for path in reference.rglob("*.*")}
    assert names == {"table.csv", "bench/b.json", "bf16-1.json"}


def test_nothing_of_an_archive_is_written_outside_the_reference(tmp_path):
    (tmp_path / "x").touch()
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as file:
        file.add(tmp_path / "x", "reference/../evil")
    gpu.take(tmp_path / "a.tar.gz", tmp_path / "reference")
    assert not (tmp_path / "evil").exists()


@pytest.mark.skipif(sys.platform == "win32", reason="make gpu is for Linux")
def test_an_archive_says_which_card_driver_and_torch_it_is_from(parts, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    for driver in ("not noted", "580.1"):
        gpu.main(["--out", str(tmp_path), "whole"])
        with tarfile.open(tmp_path / "whole.tar.gz") as file:
            assert json.load(file.extractfile("card.json")) == FACTS | {"driver": driver}
        (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho 580.1\necho 580.1")  # of two cards
        (tmp_path / "nvidia-smi").chmod(0o755)


def archive_of_card(path, n_begun=99, card=FACTS["card"], names=(f"runs/{FOURTH}",)):
    """Write an archive with notebook 04, executed as far as a cell; return the notebook's text."""
    notebook = json.loads((REPO / FOURTH).read_text(encoding="utf-8"))
    for cell in [cell for cell in notebook["cells"] if cell["cell_type"] == "code"][n_begun:]:
        cell["execution_count"] = None
    text = json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"
    texts = dict.fromkeys(names, text) | ({"card.json": json.dumps({"card": card})} if card else {})
    with tarfile.open(path, "w:gz") as file:
        for name, content in texts.items():
            member = tarfile.TarInfo(name)
            member.size = len(content.encode())
            file.addfile(member, io.BytesIO(content.encode()))
    return text


def test_of_a_cards_notebook_only_pictures_change_and_no_other_file_is_written(tmp_path, capsys):
    names = [f"{folder}/{FOURTH}" for folder in ("runs", "..", "/runs", "runs/../..", "site/runs")]
    names, card = [*names, "runs/mine.ipynb"], f"../../{FACTS['card']}"
    before = archive_of_card(tmp_path / "a", n_begun=7, card=card, names=names)
    assert gpu.take(tmp_path / "a", tmp_path / "in" / "reference", tmp_path / "in" / "cards")
    folder = tmp_path / "in" / "cards" / "nvidia-h100-80gb-hbm3"
    written = {path for path in tmp_path.rglob("*") if path.is_file()} - {tmp_path / "a"}
    assert written == {folder / "card.json", folder / FOURTH}
    assert json.loads((folder / "card.json").read_text()) == {"card": card}
    assert len(re.findall(r"took .*: 7 of \d+ code cells begun", capsys.readouterr().out)) == 1
    after = (folder / FOURTH).read_text(encoding="utf-8")
    for png in PNG.findall(after):
        image = Image.open(io.BytesIO(base64.b64decode(png))).convert("RGB")
        assert len(image.getcolors(2**24)) <= 128
    assert PNG.sub("", after) == PNG.sub("", before)  # alternative texts too


def test_the_newest_comes_last_and_what_is_too_large_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu, "CARDS", tmp_path / "cards")
    for name, second, n_begun in (("a", 2e9, 7), ("b", 1e9, 6)):
        monkeypatch.setattr(time, "time", lambda second=second: second)
        archive_of_card(tmp_path / name, n_begun)
    arguments = ["--take", str(tmp_path / "a"), str(tmp_path / "b")]
    assert gpu.main(arguments) == 0
    assert f"{FOURTH}: 7 of " in capsys.readouterr().out.splitlines()[-1]
    monkeypatch.setattr(gpu, "MOST_MIB", 0.01)
    assert gpu.main(arguments) == 1
    assert f"more than 0.01 MiB: {FOURTH} 0." in capsys.readouterr().err


def test_of_an_archive_that_names_no_card_only_records_are_taken(tmp_path, capsys):
    archive_of_card(tmp_path / "a", card="", names=(f"runs/{FOURTH}", "reference/b.json"))
    assert gpu.take(tmp_path / "a", tmp_path / "reference", tmp_path / "cards")
    assert (tmp_path / "reference" / "b.json").exists() and not (tmp_path / "cards").exists()
    assert "no notebooks taken" in capsys.readouterr().err


def test_of_a_folder_of_wheels_only_what_is_missing_is_installed(tmp_path):
    (tmp_path / "torch-1.0-py3-none-any.whl").touch()
    with zipfile.ZipFile(tmp_path / "surely_not_here-1.0-py3-none-any.whl", "w") as wheel:
        info = "surely_not_here-1.0.dist-info"
        wheel.writestr("surely_not_here.py", "")
        wheel.writestr(f"{info}/METADATA", "Name: surely_not_here\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    gpu.install_missing(tmp_path, tmp_path / "site")
    assert [path.name for path in (tmp_path / "site").glob("*.py")] == ["surely_not_here.py"]


def test_what_has_passed_is_not_tested_again(tmp_path, monkeypatch):
    monkeypatch.setenv(gpu.PASSED, str(tmp_path / "passed"))
    first, second = (SimpleNamespace(nodeid=name) for name in ("test_gpu.py::test_a[x y]", "b"))
    gpu.pytest_runtest_logreport(SimpleNamespace(nodeid=first.nodeid, when="call", passed=True))
    items = [first, second]
    gpu.pytest_collection_modifyitems(items)
    assert items == [second]


def test_every_part_calls_what_there_is():
    """Modules, notebooks, options: a part is run on a card, where a wrong word would cost it."""
    for command in (command for part in gpu.PARTS.values() for command in part.values()):
        assert find_spec(command[2])
    files = {word for word in gpu.TESTS if word.startswith("tests/")}
    assert files == {
        path.relative_to(REPO).as_posix()
        for path in REPO.glob("tests/**/test_*.py")
        if re.search(r"mark\.gpu$", path.read_text(encoding="utf-8"), re.M)
    }
    labs = [c[-1] for part in gpu.PARTS.values() for c in part.values() if "labs" in c]
    assert sorted(labs) == ["01", "02", "03", "04"]
