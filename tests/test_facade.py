"""What `import labutils as lab` offers: loaded on first use, and known to editors."""

from __future__ import annotations

import ast
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


def code_of(notebook: str) -> str:
    cells = json.loads(committed(notebook))["cells"]
    return "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")


def test_every_name_of_the_stub_exists_and_is_re_exported_to_editors():
    assert all(hasattr(lab, name) for name in lab.__all__)
    for node in ast.parse(STUB.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom):
            assert all(alias.name == alias.asname for alias in node.names)


def test_importing_labutils_imports_neither_torch_nor_pandas():
    code = "import sys, labutils; print({'torch', 'pandas', 'numpy'} & set(sys.modules))"
    answer = subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True)
    assert answer.stdout == "set()\n", answer.stderr


@pytest.mark.parametrize("notebook", NOTEBOOKS)
def test_a_notebook_reaches_the_package_through_the_facade(notebook):
    code = code_of(notebook)
    assert "from labutils" not in code
    assert set(re.findall(r"import labutils.*", code)) == {"import labutils as lab"}
    assert not set(re.findall(r"\blab\.([a-zA-Z]\w*)", code)) - set(lab.__all__)
    for module, name in set(re.findall(r"\blab\.([a-z_]+)\.(\w+)", code)):
        owner = getattr(lab, module)
        assert not inspect.ismodule(owner) or hasattr(owner, name), f"lab.{module}.{name}"


def test_no_name_is_offered_in_vain():
    texts = [code_of(notebook) for notebook in NOTEBOOKS]
    texts += [path.read_text(encoding="utf-8") for path in REPO.glob("*.md")]
    tests = [path for path in REPO.glob("tests/**/*.py") if path.name != "test_facade.py"]
    texts += [path.read_text(encoding="utf-8") for path in tests]
    used = set(re.findall(r"\blab\.(\w+)", "\n".join(texts)))
    assert not set(lab.__all__) - used
