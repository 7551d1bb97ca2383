"""`make gpu`: parts that do not stop each other, can be continued, and lose nothing."""

import base64
import io
import json
import os
import re
import shutil
import sys
import tarfile
from importlib.util import find_spec

import pytest
from PIL import Image

from benchmarks import gpu
from tests.helpers import REPO

WRITE = "import sys; open(sys.argv[1], 'a').write('row\\n')"
SLEEP = """
import sys, time
try:
    time.sleep(1000)
except KeyboardInterrupt:
    open(sys.argv[1], "w")
"""
FACTS = {"card": "NVIDIA H100 80GB HBM3", "torch": "2.13.0+cu130"}
PNG = re.compile(r'"image/png": "([^"]+)"')
FOURTH = "04-Memory_Profiling.ipynb"


def words(code: str, *arguments: str) -> list[str]:
    return [sys.executable, "-c", code, *arguments]


@pytest.fixture
def parts(monkeypatch):
    """Two parts: in the first one command fails, and one is done."""
    if not shutil.which("timeout"):
        pytest.skip("make gpu is for Linux")
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
    with tarfile.open(tmp_path / "records.tar.gz") as file:
        assert {"reference/table.csv", "reference/other.csv"} < set(file.getnames())


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


def test_the_limit_ends_a_command_and_what_it_wrote_is_in_the_archive(parts, tmp_path, capsys):
    parts["broken"] = {"endless": words(SLEEP, "{out}/reference/table.csv")}
    assert gpu.main(["--out", str(tmp_path), "broken", "--limit", "5"]) == 1
    assert "broken endless: cut off" in capsys.readouterr().out
    with tarfile.open(tmp_path / "records.tar.gz") as file:
        assert "reference/table.csv" in file.getnames()


def archive_of(out, files):
    """Return the archive of a folder with some files: {name: text}."""
    for name, text in ({"card.json": "{}", "logs/x.txt": "", "runs/x": "", **files}).items():
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text(text)
    return gpu.archive(out)


def test_an_archive_is_taken_into_the_reference_and_tables_grow(tmp_path, monkeypatch, capsys):
    files = {"reference/table.csv": "a,b\n1,2\n", "reference/bench/b.json": "{}"}
    files |= {"runs/bf16-1.json": "{}", "runs/01.ipynb": "{}", "reference/large.csv": "x" * 2000}
    files |= {"reference/play.js": "no record", "runs/calibration/gpu.json": "no run"}
    monkeypatch.setattr(gpu, "MOST_BYTES", 1000)
    reference = tmp_path / "reference"
    reference.mkdir()
    (reference / "table.csv").write_text("a,b\n3,4\n")
    gpu.take(archive_of(tmp_path / "out", files), reference)
    assert "left out of the archive, too large: reference/large.csv" in capsys.readouterr().out
    assert (reference / "table.csv").read_text() == "a,b\n3,4\n1,2\n"
    names = {path.relative_to(reference).as_posix() for path in reference.rglob("*.*")}
    assert names == {"table.csv", "bench/b.json", "bf16-1.json"}


def test_nothing_of_an_archive_is_written_outside_the_reference(tmp_path):
    (tmp_path / "x").touch()
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as file:
        file.add(tmp_path / "x", "reference/../evil")
    gpu.take(tmp_path / "a.tar.gz", tmp_path / "reference")
    assert not (tmp_path / "evil").exists()


def test_an_archive_says_which_card_driver_and_torch_it_is_from(parts, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    smi = tmp_path / "nvidia-smi"
    for does, driver in (("exit 1", "not noted"), ("echo 580.1; echo 580.1", "580.1")):
        smi.write_text(f"#!/bin/sh\n{does}")
        smi.chmod(0o755)
        gpu.main(["--out", str(tmp_path), "whole"])
        with tarfile.open(tmp_path / "records.tar.gz") as file:
            assert json.load(file.extractfile("card.json")) == FACTS | {"driver": driver}


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
    gpu.take(tmp_path / "a", tmp_path / "in" / "reference", tmp_path / "in" / "cards")
    folder = tmp_path / "in" / "cards" / "nvidia-h100-80gb-hbm3"
    written = {path for path in tmp_path.rglob("*") if path.is_file()} - {tmp_path / "a"}
    assert written == {folder / "card.json", folder / FOURTH}
    assert json.loads((folder / "card.json").read_text()) == {"card": card}
    assert len(re.findall(r"took .*, 7 of \d+ code cells begun", capsys.readouterr().out)) == 1
    after = (folder / FOURTH).read_text(encoding="utf-8")
    for png in PNG.findall(after):
        image = Image.open(io.BytesIO(base64.b64decode(png))).convert("RGB")
        assert len(image.getcolors(2**24)) <= 128
    assert PNG.sub("", after) == PNG.sub("", before)  # alternative texts too


def test_of_an_archive_that_names_no_card_only_records_are_taken(tmp_path, capsys):
    archive_of_card(tmp_path / "a", card="", names=(f"runs/{FOURTH}", "reference/b.json"))
    gpu.take(tmp_path / "a", tmp_path / "reference", tmp_path / "cards")
    assert (tmp_path / "reference" / "b.json").exists() and not (tmp_path / "cards").exists()
    assert "no notebooks taken" in capsys.readouterr().err


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
