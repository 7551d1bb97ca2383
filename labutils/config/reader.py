"""From a YAML file to a `Config`, with every mistake reported at once and where it stands.

Each is one line: `file:line:column: what is wrong. What was expected.`
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from labutils.config.schema import Config, ConfigError, contradictions
from labutils.config.yaml_source import (
    Loader,
    Source,
    did_you_mean,
    mapping,
    read_node,
    scalar,
    unknown_key,
)
from labutils.files import CONFIGS_DIR

MANY_KEYS = 3  # more that are missing share a line


def _expected(key: str, error: Mapping[str, Any]) -> str:
    """Return pydantic's complaint about one value in the reader's words."""
    value, kind = error["input"], error["type"]
    shown = f"{value!r}"[:60]
    if kind == "literal_error":
        choices = [str(c) for c in Config.model_fields[key].annotation.__args__]
        hint = did_you_mean(str(value), choices)
        return f"`{key}`: {shown} is not one of {', '.join(choices)}.{hint}"
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


def _validate(values: dict[str, Any], source: Source, under: tuple[str, ...] = ()) -> None:
    """Report every mistake in a config's `values`; their positions are looked up under `under`
    first.
    """
    errors = _field_errors(values)
    for key, error in errors:
        if error["type"] == "extra_forbidden":
            source.add_for(key, unknown_key(key), at_value=False, under=under)
        elif error["type"] != "missing":
            source.add_for(key, _expected(key, error), under=under)
    _report_missing([key for key, error in errors if error["type"] == "missing"], source)
    bad = {key for key, _ in errors}
    where = " (on a CPU, with what `when_cpu` sets)" if under else ""
    for key, text in contradictions({k: v for k, v in values.items() if k not in bad}):
        if (key, f"`{key}`: {text}") not in source.errors:  # else the main part has it already
            source.add_for(key, f"`{key}`: {text}{where}", under=under)


def _report_missing(keys: list[str], source: Source) -> None:
    """Report missing keys, in one line if there are many; not those that are there misspelt."""
    reported = " ".join(message for _, message in source.errors)
    keys = [key for key in keys if (key,) not in source.marks and f"mean `{key}`" not in reported]
    if len(keys) <= MANY_KEYS:
        for key in keys:
            message = f"missing key `{key}`; a config is complete (see configs/fp32_config.yaml)"
            source.add(None, message, key)
        return
    names = ", ".join(f"`{key}`" for key in keys[:MANY_KEYS])
    source.add(
        None,
        f"{len(keys)} keys are missing, such as {names}; a config is complete "
        "(see configs/fp32_config.yaml: copy that file and edit it)",
    )


def parse_overrides(pairs: Iterable[str]) -> dict[str, Any]:
    """Return {key: value} for `key=value` texts, each value read as the YAML file would read it.

    Raises ConfigError for a text without `=`, or a value that is not one YAML scalar.
    """
    source, values = Source("--set"), {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        try:
            node = yaml.compose(text, Loader)
            if (
                not equals
                or not isinstance(node, yaml.ScalarNode)
                or node.end_mark.index != len(text.rstrip())
            ):
                raise ValueError(pair)
            values[key.strip()] = scalar(node)
        except (yaml.YAMLError, ValueError, KeyError, RecursionError):
            source.add(None, f"{pair!r}: expected key=value with one value, as in --set steps=20")
    source.raise_if_any()
    return values


def config_of(values: Mapping[str, Any], source: str) -> Config:
    """Return the config that a record or a saved state holds; `source` names it in errors.

    Keys that are newer than it get their defaults: see `Config.defaults`. Raises ConfigError with a
    line for each value that this version of the course does not know.
    """
    try:
        return Config.model_validate(dict(values))
    except ValidationError as problem:
        lines = []
        for error in problem.errors():
            key = str(error["loc"][0])
            message = f"`{key}`: {error['msg']}, as another version of the course wrote it"
            lines.append(f"{source}: {message}")
        raise ConfigError("\n".join(lines)) from None


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

    `path` may be a short name ("bf16" is configs/bf16_config.yaml). The main part and `when_cpu`
    are both checked. With overrides and no `name` among them, name and note tell what was
    overridden, so that no two experiments share a name. Raises ConfigError with one
    `file:line:column` line for each mistake.
    """
    path = find_config(path)
    source = Source(shown(path))
    node = read_node(path, source)
    source.raise_if_any()
    values = mapping(node, source)
    when_cpu = values.pop("when_cpu", None)
    if when_cpu is not None and not isinstance(when_cpu, dict):
        source.add_for("when_cpu", "`when_cpu`: expected indented lines of `key: value`")
    when_cpu = when_cpu if isinstance(when_cpu, dict) else {}
    for key in {"when_cpu", "name"} & set(when_cpu):
        source.add_for(
            key, f"`{key}` cannot stand under `when_cpu`", at_value=False, under=("when_cpu",)
        )
    if values.pop("overrides", source) is not source:
        source.add_for("overrides", unknown_key("overrides"), at_value=False)
    for part, under in ((values, ()), (when_cpu, ("when_cpu",))):
        _resolve_corpus(part, path.parent, source, under)
    _validate(values, source)
    _validate(values | when_cpu, source, ("when_cpu",))
    source.raise_if_any()
    if not overrides:
        return Config.model_validate(values | {"when_cpu": when_cpu})
    with_gpu, on_cpu = Source("override"), Source("override")
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
    values: dict[str, Any], base: Path, source: Source, under: tuple[str, ...] = ()
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


def shown(path: Path) -> str:
    """Return a path as errors name it: from the course's folder, if it lies there."""
    try:
        return path.resolve().relative_to(CONFIGS_DIR.parent).as_posix()
    except ValueError:
        return str(path)
