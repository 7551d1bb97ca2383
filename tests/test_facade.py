"""What `import labutils as lab` offers is there, and known to editors."""

from __future__ import annotations

import ast

import labutils as lab
from tests.helpers import REPO

STUB = REPO / "labutils" / "__init__.pyi"


def test_every_name_of_the_stub_exists_and_is_re_exported_to_editors():
    assert all(hasattr(lab, name) for name in lab.__all__)
    for node in ast.parse(STUB.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom):
            assert all(alias.name == alias.asname for alias in node.names)
