"""A YAML file as one flat mapping, with the position of every key and value."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from labutils.config.schema import KEYS, ConfigError
from labutils.files import CONFIGS_DIR, program

MAX_BRACKETS = 200  # none is needed; a note may have some
MAX_FILE_BYTES = 64 * 1024  # a config is one screen; anything larger is some other file


class Loader(yaml.SafeLoader):
    """PyYAML's safe loader with YAML 1.2 numbers and booleans:

    6e-4 and 1_024 are numbers, yes is text.
    """


Loader.yaml_implicit_resolvers = {
    first: [
        (tag, regexp)
        for tag, regexp in resolvers
        if tag.rsplit(":", 1)[1] not in ("bool", "int", "float")
    ]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _tag, _pattern, _first in (
    ("bool", r"^(?:true|True|TRUE|false|False|FALSE)$", "tTfF"),
    ("int", r"^[-+]?[0-9][0-9_]*$", "-+0123456789"),
    (
        "float",
        r"^[-+]?(?:[0-9][0-9_]*\.?[0-9_]*|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?$",
        "-+0123456789.",
    ),
):
    Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(_pattern), list(_first))


def scalar(node: yaml.ScalarNode) -> Any:
    """Return a YAML scalar as int, float, bool, None or str.

    Raises ValueError if its text does not fit its tag.
    """
    kind = node.tag.rsplit(":", 1)[-1]
    if kind == "int":
        return int(node.value.replace("_", ""))
    if kind == "float":
        return float(node.value.replace("_", ""))
    if kind == "bool":
        return {"true": True, "false": False}[node.value.lower()]
    node.value.encode()  # half a surrogate pair can be written in YAML, but never saved
    return None if kind == "null" else node.value


class Source:
    """Where values stand in a file (or on the command line), and the mistakes found in it."""

    def __init__(self, label: str) -> None:
        self.label = label
        # of each key, and of its value
        self.marks: dict[tuple[str, ...], tuple[yaml.Mark, yaml.Mark]] = {}
        self.errors: dict[tuple[str, str], tuple[int, int, str]] = {}

    def add(self, mark: yaml.Mark | None, message: str, key: str = "") -> None:
        """Note a mistake; one about the same key in the same words is noted once."""
        line, column = (mark.line + 1, mark.column + 1) if mark else (1 << 30, 0)
        at = f":{line}:{column}" if mark else ""
        self.errors.setdefault((key, message), (line, column, f"{self.label}{at}: {message}"))

    def add_for(
        self, key: str, message: str, *, at_value: bool = True, under: tuple[str, ...] = ()
    ) -> None:
        """Note a mistake where `key` stands, looking under `under` first."""
        marks = self.marks.get((*under, key)) or self.marks.get((key,)) or (None, None)
        self.add(marks[at_value], message, key)

    def raise_if_any(self) -> None:
        if self.errors:
            raise ConfigError("\n".join(line for _, _, line in sorted(self.errors.values())))


def read_node(path: Path, source: Source) -> yaml.Node | None:
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        source.add(None, f"no such file.{_nearest_file(path)}")
    except IsADirectoryError:
        source.add(None, "is a folder; name one YAML file in it")
    except OSError as error:
        source.add(None, f"a folder or unreadable: {error.strerror}; name one YAML file")
    else:
        if len(raw) > MAX_FILE_BYTES:
            source.add(
                None,
                f"is larger than {MAX_FILE_BYTES // 1024} KiB; a config is one screen of `key: "
                "value` lines",
            )
        else:
            return _compose(raw, source)
    return None


def _nearest_file(path: Path) -> str:
    """Return a hint at the file, or at the short name, that is meant."""
    if path.suffix or path.parent != Path():
        names = [p.name for p in (*path.parent.glob("*.y*ml"), *CONFIGS_DIR.glob("*.yaml"))]
        return did_you_mean(path.name, names)
    return did_you_mean(path.name, short_names()) or f" There are: {', '.join(short_names())}"


def short_names() -> list[str]:
    """Return the short names of the configs there are: bf16 for configs/bf16_config.yaml."""
    stems = [path.stem for path in sorted(CONFIGS_DIR.glob("*.yaml"))]
    return [stem.removesuffix("_config").removeprefix("my_") for stem in stems]


_YAML_HELP = {
    "'\\t'": "; indent with spaces, not tabs",
    "could not find expected ':'": ", with a space behind the colon",
    "mapping values are not allowed": (
        '; a space belongs behind the colon of a key, and text with a colon in "quotes"'
    ),
}


def _compose(raw: bytes, source: Source) -> yaml.Node | None:
    try:
        text = raw.decode("utf-8-sig")
        # PyYAML takes a square of their number
        if text.count("[") + text.count("{") > MAX_BRACKETS:
            source.add(None, "has hundreds of brackets; a config is lines of `key: value`")
            return None
        documents = list(yaml.compose_all(text, Loader))
    except UnicodeDecodeError as error:
        source.add(None, f"is not UTF-8 text (byte {error.start}); a config is a text file")
    except yaml.MarkedYAMLError as error:
        help_text = next((text for part, text in _YAML_HELP.items() if part in error.problem), "")
        mark = error.context_mark if "could not find" in error.problem else error.problem_mark
        source.add(
            mark or error.problem_mark,
            f"not YAML: {error.problem}. Expected lines of `key: value`{help_text}",
        )
    except (yaml.YAMLError, RecursionError) as error:
        source.add(None, f"not YAML: {str(error).splitlines()[0]}")
    else:
        if len(documents) > 1:
            source.add(
                documents[1].start_mark,
                "a second YAML document; keep one experiment per file, without `---`",
            )
        elif not documents or documents[0].tag == "tag:yaml.org,2002:null":
            source.add(
                None,
                f"is empty; copy one of the files in configs/, or run `{program()} new NAME`",
            )
        else:
            return documents[0]
    return None


def mapping(node: yaml.Node, source: Source, prefix: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return {key: value} of a flat YAML mapping; report duplicates and everything that is not
    `key: value`.
    """
    if not isinstance(node, yaml.MappingNode):
        source.add(node.start_mark, "expected lines of `key: value`")
        return {}
    found: dict[str, Any] = {}
    for key_node, value_node in node.value:
        key = str(key_node.value) if isinstance(key_node, yaml.ScalarNode) else "?"
        if (*prefix, key) in source.marks:
            source.add(key_node.start_mark, f"`{key}` is given twice; delete one")
            continue
        source.marks[(*prefix, key)] = key_node.start_mark, value_node.start_mark
        if isinstance(value_node, yaml.ScalarNode):
            try:
                found[key] = scalar(value_node)
            except (ValueError, KeyError):
                source.add(
                    value_node.start_mark,
                    f"`{key}`: cannot read {value_node.value[:40]!r} as {value_node.tag}",
                )
        elif key == "when_cpu" and not prefix:
            found[key] = mapping(value_node, source, (key,))
        elif key in KEYS:
            source.add(
                value_node.start_mark, f"`{key}`: expected one value, not a list or a nested block"
            )
        else:
            source.add(key_node.start_mark, unknown_key(key))
    return found


def did_you_mean(word: str, choices: Iterable[str], cutoff: float = 0.6) -> str:
    """Return a question that names the choice most like a word, or nothing."""
    by_lower = {choice.lower(): choice for choice in choices}
    close = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=cutoff)
    return f" Did you mean `{by_lower[close[0]]}`?" if close else ""


def unknown_key(key: str) -> str:
    return f"unknown key `{key}`.{did_you_mean(key, [*KEYS, 'when_cpu'])}"
