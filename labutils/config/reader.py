"""From a YAML file to a `Config`, with every mistake reported at once and where it stands.

Each is one line: `file:line:column: what is wrong. What was expected.`
"""

from __future__ import annotations

import difflib
import hashlib
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from labutils.config.schema import KEYS, Config, ConfigError, _contradictions
from labutils.files import REPO_DIR

CONFIGS_DIR = REPO_DIR / "configs"
MAX_BRACKETS = 200  # none is needed; a note may have some
MAX_FILE_BYTES = 64 * 1024  # a config is one screen; anything larger is some other file


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader with YAML 1.2 numbers and booleans:

    6e-4 and 1_024 are numbers, yes is text.
    """


_Loader.yaml_implicit_resolvers = {
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
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(_pattern), list(_first))


def _scalar(node: yaml.ScalarNode) -> Any:
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


class _Source:
    """Where values stand in one file (or on the command line), and the mistakes found in it so far."""

    def __init__(self, label: str) -> None:
        self.label = label
        self.marks: dict[
            tuple[str, ...], tuple[yaml.Mark, yaml.Mark]
        ] = {}  # of each key, and of its value
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


def _read(path: Path, source: _Source) -> yaml.Node | None:
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        names = [p.name for p in (*path.parent.glob("*.y*ml"), *CONFIGS_DIR.glob("*.yaml"))]
        source.add(None, f"no such file.{_did_you_mean(path.name, names)}")
    except IsADirectoryError:
        source.add(None, "is a folder; name one YAML file in it")
    except OSError as error:
        source.add(None, f"a folder or unreadable: {error.strerror}; name one YAML file")
    else:
        if len(raw) > MAX_FILE_BYTES:
            source.add(
                None,
                f"is larger than {MAX_FILE_BYTES // 1024} KiB; a config is one screen of `key: value` lines",
            )
        else:
            return _compose(raw, source)
    return None


_YAML_HELP = {
    "'\\t'": "; indent with spaces, not tabs",
    "could not find expected ':'": ", with a space behind the colon",
    "mapping values are not allowed": '; a space belongs behind the colon of a key, and text with a colon in "quotes"',
}


def _compose(raw: bytes, source: _Source) -> yaml.Node | None:
    try:
        text = raw.decode("utf-8-sig")
        if (
            text.count("[") + text.count("{") > MAX_BRACKETS
        ):  # PyYAML takes a square of their number
            source.add(None, "has hundreds of brackets; a config is lines of `key: value`")
            return None
        documents = list(yaml.compose_all(text, _Loader))
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
                "is empty; copy one of the files in configs/, or run `python -m labutils new NAME`",
            )
        else:
            return documents[0]
    return None


def _mapping(node: yaml.Node, source: _Source, prefix: tuple[str, ...] = ()) -> dict[str, Any]:
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
                found[key] = _scalar(value_node)
            except (ValueError, KeyError):
                source.add(
                    value_node.start_mark,
                    f"`{key}`: cannot read {value_node.value[:40]!r} as {value_node.tag}",
                )
        elif key == "when_cpu" and not prefix:
            found[key] = _mapping(value_node, source, (key,))
        elif key in KEYS:
            source.add(
                value_node.start_mark, f"`{key}`: expected one value, not a list or a nested block"
            )
        else:
            source.add(key_node.start_mark, _unknown(key))
    return found


def _did_you_mean(word: str, choices: Iterable[str]) -> str:
    by_lower = {choice.lower(): choice for choice in choices}
    close = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=0.6)
    return f" Did you mean `{by_lower[close[0]]}`?" if close else ""


def _expected(key: str, error: Mapping[str, Any]) -> str:
    """Return pydantic's complaint about one value in the reader's words."""
    value, kind = error["input"], error["type"]
    shown = f"{value!r}"[:60]
    if kind == "literal_error":
        choices = [str(c) for c in Config.model_fields[key].annotation.__args__]
        return f"`{key}`: {shown} is not one of {', '.join(choices)}.{_did_you_mean(str(value), choices)}"
    expected = error["msg"].replace("Input should be ", "expected ").replace("a valid ", "a ")
    if kind == "bool_type":
        expected = "expected true or false"
    elif kind == "int_type":
        expected = "expected a whole number"
        if isinstance(value, float) and value.is_integer():
            expected += f"; write {int(value)}"
    elif kind == "string_pattern_mismatch":
        expected = f"expected {Config.model_fields[key].description}"
    if value is None:
        return f"`{key}` has no value"
    return f"`{key}`: {expected}, got {shown}"


def _field_errors(values: dict[str, Any]) -> list[tuple[str, Any]]:
    """Return (key, pydantic's error) for each value that is wrong by itself, missing or unknown."""
    try:
        Config.model_validate(values)
    except ValidationError as problem:
        return [(str(error["loc"][0]), error) for error in problem.errors()]
    return []


def _validate(values: dict[str, Any], source: _Source, under: tuple[str, ...] = ()) -> None:
    """Report every mistake in a config's `values`; their positions are looked up under `under`
    first.
    """
    errors = _field_errors(values)
    for key, error in errors:
        if error["type"] == "extra_forbidden":
            source.add_for(key, _unknown(key), at_value=False, under=under)
        elif error["type"] != "missing":
            source.add_for(key, _expected(key, error), under=under)
        elif (key,) not in source.marks:
            source.add(
                None,
                f"missing key `{key}`; a config is complete (see configs/fp32_config.yaml)",
                key,
            )
    bad = {key for key, _ in errors}
    where = " (on a CPU, with what `when_cpu` sets)" if under else ""
    for key, text in _contradictions({k: v for k, v in values.items() if k not in bad}):
        if (key, f"`{key}`: {text}") not in source.errors:  # else the main part has it already
            source.add_for(key, f"`{key}`: {text}{where}", under=under)


def _unknown(key: str) -> str:
    return f"unknown key `{key}`.{_did_you_mean(key, [*KEYS, 'when_cpu'])}"


def parse_overrides(pairs: Iterable[str]) -> dict[str, Any]:
    """Return {key: value} for `key=value` texts, each value read as the YAML file would read it.

    Raises ConfigError for a text without `=`, or a value that is not one YAML scalar.
    """
    source, values = _Source("--set"), {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        try:
            node = yaml.compose(text, _Loader)
            if (
                not equals
                or not isinstance(node, yaml.ScalarNode)
                or node.end_mark.index != len(text.rstrip())
            ):
                raise ValueError(pair)
            values[key.strip()] = _scalar(node)
        except (yaml.YAMLError, ValueError, KeyError, RecursionError):
            source.add(None, f"{pair!r}: expected key=value with one value, as in --set steps=20")
    source.raise_if_any()
    return values


def find_config(name: str | os.PathLike[str]) -> Path:
    """Return the file meant by a path, by "bf16" (configs/bf16_config.yaml) or by "mine"
    (configs/my_mine.yaml).
    """
    path = Path(name)
    named = [
        CONFIGS_DIR / f"{name}_config.yaml",
        CONFIGS_DIR / f"my_{name}.yaml",
        CONFIGS_DIR / f"{name}.yaml",
    ]
    from_root = [CONFIGS_DIR.parent / path, CONFIGS_DIR / path]
    candidates = [*named, path] if path.parent == Path() and not path.suffix else [path, *from_root]
    return next((p for p in candidates if p.is_file()), path)


def load_config(path: str | os.PathLike[str], /, **overrides: Any) -> Config:
    """Read, check and return the experiment in a YAML file; keyword arguments override its values.

    `path` may be a short name ("bf16" is configs/bf16_config.yaml). The main part and `when_cpu` are both checked.
    With overrides and no `name` among them, name and note tell what was overridden, so that no two
    experiments share a name. Raises ConfigError with one `file:line:column` line for each mistake.
    """
    path = find_config(path)
    source = _Source(_shown(path))
    node = _read(path, source)
    source.raise_if_any()
    values = _mapping(node, source)
    when_cpu = values.pop("when_cpu", None)
    if when_cpu is not None and not isinstance(when_cpu, dict):
        source.add_for("when_cpu", "`when_cpu`: expected indented lines of `key: value`")
    when_cpu = when_cpu if isinstance(when_cpu, dict) else {}
    for key in {"when_cpu", "name"} & set(when_cpu):
        source.add_for(
            key, f"`{key}` cannot stand under `when_cpu`", at_value=False, under=("when_cpu",)
        )
    if values.pop("overrides", source) is not source:
        source.add_for("overrides", _unknown("overrides"), at_value=False)
    for part, under in ((values, ()), (when_cpu, ("when_cpu",))):
        _resolve_corpus(part, path.parent, source, under)
    _validate(values, source)
    _validate(values | when_cpu, source, ("when_cpu",))
    source.raise_if_any()
    if not overrides:
        return Config.model_validate(values | {"when_cpu": when_cpu})
    with_gpu, on_cpu = _Source("override"), _Source("override")
    for key in {"when_cpu", "overrides"} & set(overrides):
        with_gpu.add(None, f"`{key}` cannot be overridden; override the keys in it")
    _resolve_corpus(overrides, Path.cwd(), with_gpu)
    with_gpu.raise_if_any()
    _validate(values | overrides, with_gpu)
    _validate(values | when_cpu | overrides, on_cpu, ("when_cpu",))
    if with_gpu.errors and (on_cpu.errors or _field_errors(values | overrides)):
        with_gpu.raise_if_any()  # what fits one of the two devices is judged when it runs, by `on`
    unsaid = ("note", "save_every")  # they change no result
    said = {
        key: f"{key}={_in_a_name(value)}" for key, value in overrides.items() if key not in unsaid
    }
    texts = {}
    if "name" not in overrides and said:
        name = "+".join([values["name"], *said.values()])
        short = hashlib.sha256(name.encode()).hexdigest()[:6]
        texts["name"] = name if len(name) <= 60 else f"{values['name']}+{short}"
    if "note" not in overrides and said:
        texts["note"] = f"{values['name']} with " + ", ".join(
            text for key, text in said.items() if key != "name"
        )
    instead_of = {key: values.get(key, Config.model_fields[key].default) for key in overrides}
    return Config.model_validate(
        values | texts | overrides | {"when_cpu": when_cpu, "overrides": instead_of}
    )


def _in_a_name(value: Any) -> str:
    return re.sub(r"[^\w.-]", "_", Path(value).name if isinstance(value, str) else f"{value}")


def _resolve_corpus(
    values: dict[str, Any], base: Path, source: _Source, under: tuple[str, ...] = ()
) -> None:
    """Make a corpus path absolute, relative to `base`; report one that does not exist."""
    corpus = values.get("corpus")
    if isinstance(corpus, str) and corpus not in ("", "stdlib"):
        try:
            path = (base / Path(corpus).expanduser()).resolve()
            found = path.is_file()
        except (OSError, ValueError, RuntimeError):  # a NUL byte, an unknown user's home
            path, found = base / "?", False
        if not found:
            source.add_for("corpus", f"`corpus`: no such file: {corpus!r}", under=under)
        values["corpus"] = str(path)


def _shown(path: Path) -> str:
    try:
        return path.resolve().relative_to(CONFIGS_DIR.parent).as_posix()
    except ValueError:
        return str(path)
