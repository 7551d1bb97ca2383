"""What a piece of source does with names."""

from __future__ import annotations

import ast
import contextlib
import functools
import re
import symtable
from dataclasses import dataclass


@functools.lru_cache(maxsize=4096)
def parsed(cell: str) -> ast.Module:
    """Return a cell's tree; an empty one if it is not Python."""
    with contextlib.suppress(SyntaxError, ValueError, RecursionError, MemoryError):
        return ast.parse(cell)
    return ast.Module([], [])


@dataclass(frozen=True)
class Names:
    """What a statement does with names, those local to a function left out.

    `changes` are objects of which it sets a part or calls a method, `late` what bodies look up.
    """

    defines: set[str]
    changes: set[str]
    uses: set[str]
    late: set[str]


@functools.lru_cache(maxsize=16384)
def names_of(source: str) -> Names:
    """Return what the names in a statement or an expression are there for."""
    tree, names = parsed(source), Names(set(), set(), set(), set())
    for node in ast.walk(tree):
        if isinstance(node, (ast.Subscript, ast.Attribute)) and isinstance(node.ctx, ast.Store):
            names.changes.add(re.split(r"\W", ast.unparse(node))[0])  # c of c["x"] = 1
    for statement in tree.body:
        is_call = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call)
        if is_call and isinstance(statement.value.func, ast.Attribute):
            names.changes.add(re.split(r"\W", ast.unparse(statement.value.func))[0])
    scopes = [symtable.symtable(source, "cell", "exec")] if tree.body else []
    while scopes:
        scope = scopes.pop()
        is_cell = scope.get_type() == "module"
        for symbol in scope.get_symbols():
            if is_cell and (symbol.is_assigned() or symbol.is_imported()):
                names.defines.add(symbol.get_name())
            if symbol.is_referenced() and (is_cell or symbol.is_global()):
                names.uses.add(symbol.get_name())
                if scope.get_type() == "function":
                    names.late.add(symbol.get_name())
        scopes += scope.get_children()
    return names
