"""What `import labutils as lab` offers: loaded on first use, and known to editors."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import re
import subprocess
import sys

import pytest

import labutils as lab
from tests.helpers import REPO, committed

STUB = REPO / "labutils" / "__init__.pyi"
NOTEBOOKS = [path.name for path in sorted(REPO.glob("0*.ipynb"))]
NOTEBOOKS += [f"further/{path.name}" for path in sorted(REPO.glob("further/*.ipynb"))]


def stub_places() -> dict[str, str]:
    """Return {name: where the stub says it is defined}, as dotted names."""
    imported, places = {}, {}
    for node in ast.parse(STUB.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                imported[alias.asname] = f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Assign):  # a module under another name
            places[node.targets[0].id] = imported.pop(node.value.id)
    return imported | places


def facade_places() -> dict[str, str]:
    places = {name: f"labutils.{module}" for name, module in lab._MODULES.items()}
    for name, module in lab._MODULE_OF.items():
        places[name] = f"labutils.{module}.{name}"
    return places


def code_of(notebook: str) -> str:
    cells = json.loads(committed(notebook))["cells"]
    return "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")


def test_stub_and_facade_name_the_same_things_in_the_same_places():
    assert stub_places() == facade_places()
    assert sorted(stub_places()) == lab.__all__


@pytest.mark.parametrize("name", lab.__all__)
def test_a_name_is_what_its_module_defines(name):
    place = facade_places()[name]
    if name in lab._MODULES:
        assert getattr(lab, name) is importlib.import_module(place)
        return
    module = importlib.import_module(place.rpartition(".")[0])
    value = getattr(module, name)
    assert getattr(lab, name) is value
    if inspect.isclass(value) or inspect.isfunction(value):
        assert value.__module__ == module.__name__  # an editor jumps to where it is written


def test_importing_labutils_imports_neither_torch_nor_pandas():
    code = "import sys, labutils; print({'torch', 'pandas', 'numpy'} & set(sys.modules))"
    answer = subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True)
    assert answer.stdout == "set()\n", answer.stderr


def test_an_unknown_name_is_answered_with_those_there_are():
    with pytest.raises(AttributeError, match=r"no attribute 'trian'; it has: .*\btrain\b"):
        lab.trian  # noqa: B018


@pytest.mark.parametrize("notebook", NOTEBOOKS)
def test_a_notebook_reaches_the_package_through_the_facade(notebook):
    code = code_of(notebook)
    assert "from labutils" not in code
    assert re.findall(r"import labutils.*", code) == ["import labutils as lab"]
    assert not set(re.findall(r"\blab\.(\w+)", code)) - set(lab.__all__)


def test_no_name_is_offered_in_vain():
    texts = [code_of(notebook) for notebook in NOTEBOOKS]
    texts += [path.read_text(encoding="utf-8") for path in REPO.glob("*.md")]
    tests = [path for path in REPO.glob("tests/**/*.py") if path.name != "test_facade.py"]
    texts += [path.read_text(encoding="utf-8") for path in tests]
    used = set(re.findall(r"\blab\.(\w+)", "\n".join(texts)))
    assert not set(lab.__all__) - used
