"""What every notebook keeps: clean outputs, sections that stand alone, guesses that are answered.

Its cells themselves are run by nbval, with the rules of `notebook_rules.py`.
"""

import ast
import inspect
import os
import re
import shutil
import subprocess
import sys
import tomllib
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import nbformat
import pytest
from nbclient import NotebookClient
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

import labutils as lab
from tests.helpers import REPO, code_of, read_notebook, slow, slowest

CORE = sorted(path.name for path in REPO.glob("0*.ipynb"))
FURTHER = sorted(f"further/{path.name}" for path in REPO.glob("further/*.ipynb"))
DOCUMENTS = ["README.md", "INSTRUCTORS.md", "labutils/README.md"]
EACH = pytest.mark.parametrize("name", [*CORE, *FURTHER])
LEAK = re.compile(
    r"(?<![\w.])/(?:work|root|home|tmp|opt|Users)/\w+|site-packages|ipykernel_\d+|[A-Z]:\\\\Users"
)
# What one machine measured: 1.26×, needs × 8.2, 2.03 times, 12 ms, 900 tokens/s; not a 16 × 2.
MEASURED = re.compile(
    r"\d×(?! ?\d)|(?<!\d )(?<!million )× ?\d|\d\.\d+\s+times\b|\d (?:ms|µs)\b|"
    r"\d tokens(?:/s|\s+per\s+second)\b"
)
GUESS = re.compile(r'lab\.guess\(\s*"(\w+)",\s*(f?"[^"]*")\s*\)')
CHECKED, RAISES = "nbval-check-output", ["raises-exception"]


def cells(name: str, kind: str) -> list[nbformat.NotebookNode]:
    return [cell for cell in read_notebook(name).cells if cell.cell_type == kind]


def sections(name: str) -> dict[str, list[str]]:
    """Return {heading: code cells}; `setup` stands before the second heading's first code cell."""
    parts, heading = {"setup": []}, "setup"
    for cell in read_notebook(name).cells:
        title = re.match(r"##? (.+)", cell.source) if cell.cell_type == "markdown" else None
        if title:
            heading = title.group(1) if parts["setup"] else "setup"
        elif cell.cell_type == "code":
            parts.setdefault(heading, []).append(cell.source)
    return parts


# ---- outputs


@EACH
def test_saved_outputs_are_clean(name):
    notebook = read_notebook(name)
    assert (REPO / name).stat().st_size < 1_500_000
    assert not notebook.metadata.get("widgets")
    for count, cell in enumerate(cells(name, "code"), start=1):
        assert cell.execution_count == count
        may_raise = RAISES[0] in cell.metadata.get("tags", [])
        for output in cell.outputs:
            assert output.output_type != "error" or may_raise
            assert output.get("name") != "stderr"
            data = output.get("data", {}).items()
            text = output.get("text", "") + "".join(it for kind, it in data if kind[:4] == "text")
            assert not LEAK.search(text) and "\r" not in text, text
            assert "not recorded yet" not in text and "not installed" not in text


@EACH
def test_each_figure_stands_alone_in_its_cell_and_is_described_below(name):
    for cell, following in pairwise(read_notebook(name).cells):
        figures = [it for it in cell.get("outputs", []) if "image/png" in it.get("data", {})]
        assert len(figures) <= 1
        is_told = following.cell_type == "markdown" and "figure" in following.source
        for figure in figures:  # `lab.setup()` writes the latter
            assert is_told or figure.metadata.get("image/png", {}).get("alt"), cell.source


@EACH
def test_cells_are_compared_where_their_output_is_the_same_everywhere(name):
    compared = [c for c in cells(name, "code") if CHECKED in c.metadata.get("tags", [])]
    assert all(cell.outputs for cell in compared)
    assert len(compared) >= (10 if name in CORE else 0)


# ---- sources


@EACH
def test_headings_begin_their_cells_and_sections_that_are_named_exist(name):
    sources = [cell.source for cell in cells(name, "markdown")]
    for source in sources:
        headings = re.findall(r"^#+ ", source, re.M)
        assert len(headings) <= 1 and (not headings or source.startswith("#")), source
    text = "\n".join(sources)
    numbers = [int(number) for number in re.findall(r"^## (\d+) ·", text, re.M)]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    there = set(re.findall(r"^## (\w+) ·", text, re.M))
    assert set(re.findall(r"[Ss]ection (\d+|[A-Z])\b", text)) <= there


def speaks_of_one_machine(markdown: str) -> bool:
    """Tell whether a *Reconcile* cell has such a number outside a list and a table with a source.

    A list gives outcomes with their causes; a sentence must be true of whatever the cells print.
    """
    rows = ("- ", "  ", "|") if "](http" in markdown else ("- ", "  ")
    prose = [line for line in markdown.splitlines() if not line.startswith(rows)]
    return "**Reconcile" in markdown and bool(MEASURED.search("\n".join(prose)))


def test_no_explanation_speaks_of_one_machine():
    for text in ("takes 1.26× as long", "needs × 8.2", "2.03 times", "12 ms", "900 tokens/s"):
        assert speaks_of_one_machine(f"**Reconcile.** So:\n{text}")
    sources = [cell.source for name in (*CORE, *FURTHER) for cell in cells(name, "markdown")]
    assert not [source for source in sources if speaks_of_one_machine(source)]


@EACH
def test_no_cell_hides_what_a_call_returns_or_changes_a_config_without_a_check(name):
    for source in code_of(name).values():
        assert not re.search(r";\s*$|^_ = |^\w+ = lab\.(guess|answer)\(", source, re.M), source
        assert "model_copy" not in source  # it checks nothing; Config.changed does


@pytest.mark.parametrize("path", [*CORE, *FURTHER, *DOCUMENTS])
def test_relative_links_lead_to_files(path):
    text = (REPO / path).read_text(encoding="utf-8")
    if path.endswith(".ipynb"):
        text = "\n".join(cell.source for cell in cells(path, "markdown"))
    for link in re.findall(r"\]\((?!http|attachment:)([^)#]+)", text):
        assert (REPO / path).parent.joinpath(link).exists(), link


@EACH
def test_setup_plus_one_section_needs_no_other_section(name):
    parts = sections(name)
    setup = parts.pop("setup")
    assert parts
    undefined = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F821", "-"]
    for title, sources in parts.items():
        program = "\n\n".join([*setup, *sources])
        answer = subprocess.run(undefined, input=program, capture_output=True, encoding="utf-8")
        assert answer.returncode == 0, (title, answer.stdout)


@EACH
def test_setup_cell_alone_in_an_empty_folder_ends_with_the_command_that_helps(name, tmp_path):
    setup = sections(name)["setup"][0]  # definitions that sections share may follow
    assert len(setup.splitlines()) <= 12
    # labutils tells torch's C++ code what to log, and torch reads that once
    assert "import labutils" in setup.partition("import torch")[0]
    hide = "import sys\nsys.modules['labutils'] = None\n"
    command = [sys.executable, "-c", hide + setup]
    answer = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert answer.returncode == 1
    [folder] = re.findall(r"%pip install -e (\S+)$", answer.stderr.splitlines()[-1])
    assert (REPO / name).parent.joinpath(folder).resolve() == REPO  # a kernel's own folder
    # constraints would bring a torch that Colab's driver may not run
    assert (
        "On Colab (ADDRESS: the course's):\n!git clone ADDRESS lab\n%cd lab\n%pip install -e .\n"
        in answer.stderr
    )


@EACH
def test_colab_opens_a_notebook_with_a_gpu_and_shows_its_pictures(name):
    """A notebook that is opened there has neither a GPU by default, nor the files beside it."""
    metadata = read_notebook(name).metadata
    assert (metadata.accelerator, metadata.colab) == ("GPU", {"gpuType": "T4"})
    for cell in cells(name, "markdown"):
        for picture in re.findall(r"!\[[^\]]*\]\(attachment:([^)]+)\)", cell.source):
            # JupyterLab shows no other kind of file that is attached
            assert cell.attachments[picture]["image/png"]
        assert not re.search(r"!\[[^\]]*\]\((?!attachment:)", cell.source)


def test_colab_has_a_torch_and_a_python_that_the_course_takes():
    readme = (REPO / "README.md").read_text(encoding="utf-8")
    there = re.search(r"Colab's\s+\(in \w+ 20\d\d Python (\d+\.\d+), torch (\d+\.\d+)\)", readme)
    project = tomllib.loads((REPO / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert there[1] in SpecifierSet(project["requires-python"])
    [torch] = [one for one in map(Requirement, project["dependencies"]) if one.name == "torch"]
    assert there[2] in torch.specifier


@pytest.mark.parametrize("is_slow", [True, False])
@pytest.mark.parametrize("kind", ["cuda", "cpu"])
@pytest.mark.parametrize("name", [CORE[0], CORE[3], "further/where_time_goes.ipynb"])
def test_a_card_that_emulates_bf16_is_given_fp16(name, kind, is_slow):
    """On a CPU without fast BF16 FP16 is no faster, so there it is BF16."""
    [source] = [text for text in code_of(name).values() if re.search("^sixteen = ", text, re.M)]
    chosen = re.findall(r"^(?:bf16_is_emulated|slow|sixteen)\b.* = .*", source, re.M)
    names = {"device": SimpleNamespace(type=kind), "slow": is_slow, "ROWS": []}
    names["lab"] = SimpleNamespace(support=lambda *_: SimpleNamespace(slow=is_slow))
    exec("\n".join(chosen), names)
    assert names["sixteen"] == ("fp16" if is_slow and kind == "cuda" else "bf16")


def test_each_technique_says_where_it_is_taught():
    rooms = ("techniques", "memory", "training")
    paths = [path for room in rooms for path in (REPO / "labutils" / room).glob("[a-z]*.py")]
    assert paths
    for path in paths:
        [(notebook, number)] = re.findall(
            r"^Taught in (\w+), section (\d+)\.$", path.read_text(encoding="utf-8"), re.M
        )
        [name] = [one for one in (*CORE, *FURTHER) if re.search(rf"(^|/){notebook}[-.]", one)]
        assert any(cell.source.startswith(f"## {number} ·") for cell in cells(name, "markdown"))


@EACH
def test_a_notebook_reaches_the_package_through_the_facade(name):
    text = "\n".join(code_of(name).values())
    assert "from labutils" not in text
    assert set(re.findall(r"import labutils.*", text)) == {"import labutils as lab"}
    assert not set(re.findall(r"\blab\.([a-zA-Z]\w*)", text)) - set(lab.__all__)
    for module, attribute in set(re.findall(r"\blab\.([a-z_]+)\.(\w+)", text)):
        owner = getattr(lab, module)
        assert hasattr(owner, attribute) or not inspect.ismodule(owner), (module, attribute)


def test_every_name_of_the_facade_exists_and_is_re_exported_to_editors():
    assert all(hasattr(lab, name) for name in lab.__all__)
    stub = (REPO / "labutils" / "__init__.pyi").read_text(encoding="utf-8")
    for node in ast.parse(stub).body:
        if isinstance(node, ast.ImportFrom):
            assert all(alias.name == alias.asname for alias in node.names)


@EACH
def test_each_guess_stands_before_its_answer(name):
    text = "\n".join(code_of(name).values())
    asked = {match.group(1): match.start() for match in GUESS.finditer(text)}
    for guess, position in asked.items():
        assert position < text.index(f'lab.answer("{guess}"')
    assert text.count("lab.guess(") == text.count("lab.answer(") == len(asked) >= 2
    assert "lab.scores()" in text


# ---- the rules that make nbval strict


def nbval(folder: Path, *flags: str, cells: list[nbformat.NotebookNode]) -> str:
    """Return what pytest says of a notebook with these cells."""
    kernel = {"kernelspec": {"name": "python3", "display_name": "x"}}
    notebook = nbformat.v4.new_notebook(cells=cells, metadata=kernel)
    nbformat.write(notebook, folder / "own.ipynb")
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", *flags]
    command += ["-c", str(REPO / "pyproject.toml"), "own.ipynb"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True).stdout


def test_a_missing_error_is_noticed_and_a_failure_ends_a_notebook(tmp_path):
    sources = {"1 / 0": RAISES, "x = 1": RAISES, "x": []}
    new = partial(nbformat.v4.new_code_cell, execution_count=1)
    cells = [new(source, metadata={"tags": tags}) for source, tags in sources.items()]
    said = nbval(tmp_path, cells=cells)
    assert re.findall(r"::Cell \d ([A-Z]+) ", said) == ["PASSED", "FAILED", "SKIPPED"], said


@pytest.mark.parametrize(("flags", "outcome"), [([], "1 passed"), (["--nbval"], "1 failed")])
def test_nbval_compares_every_cell_where_it_is_asked_to(flags, outcome, tmp_path):
    cell = nbformat.v4.new_code_cell("2", execution_count=1)
    cell.outputs = [nbformat.v4.new_output("execute_result", {"text/plain": "1"})]
    said = nbval(tmp_path, *flags, cells=[cell])
    assert outcome in said, said


# ---- where memory is short, cells are run again, and paths are odd


SHORT = "import labutils.machine as machine; machine.free_host_bytes = lambda: {mib} * 2**20"
HELD = """
import torch, labutils, matplotlib.pyplot as _plt
_plt.close("all")
print(labutils.allocated_bytes(torch.device("cpu")))
"""


def execute(notebook: nbformat.NotebookNode) -> None:
    """Run all cells; one that raises, and is not there to raise, ends with its error."""
    NotebookClient(notebook, resources={"metadata": {"path": str(REPO)}}).execute()


@slowest
@pytest.mark.parametrize("mib", [45, 5], ids=["less than the files ask for", "for nothing"])
@pytest.mark.parametrize("name", CORE)
def test_a_notebook_runs_to_its_end_where_memory_is_short(runs, name, mib):
    """On a GPU it is the card's free memory that counts; the same code decides by it."""
    if mib == 5 and name.startswith("02"):
        pytest.skip("its runs are about learning: without training there is nothing to draw")
    notebook = nbformat.read(REPO / name, as_version=4)
    notebook.cells.insert(0, nbformat.v4.new_code_cell(SHORT.format(mib=mib)))
    execute(notebook)


@slowest
@EACH
def test_a_notebook_run_again_takes_guesses_and_holds_no_more_memory(runs, name):
    """Each cell runs twice, then all run again, with every guess filled in."""
    first, second = nbformat.v4.new_code_cell(HELD), nbformat.v4.new_code_cell(HELD)
    scores = nbformat.v4.new_code_cell("print(list(lab.scores()['made']))")
    notebook, filled = read_notebook(name), cells(name, "code")
    twice = [cell for cell in cells(name, "code") for _ in range(2)]
    for cell in filled:
        cell.source = GUESS.sub(r'lab.guess("\1", \2, low=1, high=3)', cell.source)
    notebook.cells = [*twice, first, *filled, second, scores]
    execute(notebook)
    assert int(second.outputs[0].text) <= 1.01 * int(first.outputs[0].text) + 2**20
    made = ast.literal_eval(scores.outputs[0].text)
    if "capstone" in name:  # nothing answers its last guess but the reader's own config
        assert made.pop() == "before"
    assert set(made) == {"after the result"}


@slow
def test_odd_paths_and_no_home_folder_work(tmp_path):
    course = tmp_path / "mit Leerzeichen" / "课程"
    shutil.copytree(REPO / "labutils", course / "labutils")
    shutil.copytree(REPO / "configs", course / "configs")
    (course / "文本.txt").write_text(
        "Ein Text über vieles: 一二三四五。\n" * 3000, encoding="utf-8"
    )
    cells_of_01 = nbformat.read(REPO / CORE[0], as_version=4).cells[:6]
    nbformat.write(nbformat.v4.new_notebook(cells=cells_of_01), course / "01 课.ipynb")
    ours = ("LABUTILS", "IPYTHON", "JUPYTER", "MPL")
    environment = {key: value for key, value in os.environ.items() if not key.startswith(ours)}
    environment |= {"HOME": "/dev/null/home", "PYTHONPATH": str(course)}
    small = ["--set=steps=3", "--set=lr_warmup_steps=0", "--set=name=名", "--set=corpus=文本.txt"]
    for arguments in (["run", "fp32", *small], ["labs", "01 课.ipynb"]):
        command = [sys.executable, "-m", "labutils", *arguments]
        answer = subprocess.run(
            command, cwd=course, env=environment, capture_output=True, text=True
        )
        assert answer.returncode == 0, answer.stderr
    assert list((course / "runs").glob("名-*.json")) and (course / "runs/01 课.ipynb").exists()
