"""The tables of arguments, against the installed versions."""

from __future__ import annotations

import pytest

pytest.importorskip("accelerate", reason="the extra `frameworks` is not installed")
pytest.importorskip("lightning", reason="the extra `frameworks` is not installed")
from labutils.training.engines import arguments
from labutils.training.engines.arguments import DECODED, OWNERS, RENAMED, decoded, renamed


def named() -> list[tuple[str, str]]:
    found = set()
    for by_line in DECODED.values():
        for by_owner in by_line.values():
            for owner, names in by_owner.items():
                found |= {(owner, name) for name in names.split()}
    return sorted(found)


@pytest.mark.parametrize(("owner", "argument"), named())
def test_a_named_argument_exists_in_the_installed_version(owner, argument):
    assert argument in arguments.parameters_of(owner)


def pairs() -> list[tuple[str, str, str]]:
    found = []
    for owner, texts in RENAMED.items():
        for text in texts:
            old, _, new = map(str.strip, text.partition(">"))
            found.append((owner, old, new))
    return found


@pytest.mark.parametrize(("owner", "old", "new"), pairs())
def test_what_is_to_be_written_instead_exists(owner, old, new):
    known = arguments.parameters_of(owner)
    assert not new or new in known
    assert old != new


def test_only_deprecated_names_are_still_taken():
    table = renamed()
    taken = table[table["older name gives"] == "still taken"]
    assert set(taken["older name"]) == {
        "gradient_checkpointing",
        "gradient_checkpointing_kwargs",
    }
    for owner, old, _ in pairs():
        if old not in set(taken["older name"]):
            with pytest.raises(TypeError):
                arguments.owner(owner)(**{old: True})


def test_a_table_has_a_row_for_each_argument_with_its_default():
    table = decoded("accumulation")
    row = table[table["argument"] == "max_grad_norm"].iloc[0]
    assert (row["of"], row["default here"]) == ("TrainingArguments", "1.0")
    assert sum(len(decoded(topic)) for topic in DECODED) >= len(named())
    for owner, _ in named():
        assert owner in OWNERS


def test_a_missing_argument_is_said_to_be_missing(monkeypatch):
    monkeypatch.setitem(DECODED, "x", {"line": {"Fabric": "precision horses"}})
    assert list(decoded("x")["default here"]) == ["None", "not an argument here"]


def test_the_notebook_is_told_what_to_install(monkeypatch):
    import sys

    from labutils.training.engines import frameworks

    monkeypatch.setitem(sys.modules, "lightning", None)
    with pytest.raises(frameworks.FrameworkMissing, match="lightning is not installed"):
        frameworks.ready()
