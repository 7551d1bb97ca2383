"""From a YAML file to a `Config`, with every mistake reported at once and where it stands.

Each is one line: `file:line: what is wrong. What was expected.` Values are read as text, and
pydantic gives them their types: so 1e-4 is a number, and `off` a word.
"""

from __future__ import annotations

import difflib
import hashlib
import os
import re
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from labutils.config.agreement import contradictions
from labutils.config.schema import KEYS, Config, ConfigError
from labutils.files import CONFIGS_DIR

MAX_FILE_BYTES = 64 * 1024  # a config is one screen; anything larger is some other file
CPU_PART = "when_cpu"
MANY_KEYS = 3  # that are missing: more are counted
UNSAID = ("note", "save_every")  # they change no result, so they are not in a run's name
YAML_HELP = {
    "'\\t'": "; indent with spaces, not tabs",
    "could not find expected ':'": ", with a space behind the colon",
    "mapping values are not allowed": (
        '; a space belongs behind the colon of a key, and text with a colon in "quotes"'
    ),
    "another document": "; keep one experiment per file, without `---`",
}


class YamlFile:
    """A flat YAML file: the text of each key, its line, and the mistakes found in it.

    `values` may have one mapping more, of the keys under CPU_PART. Raises ConfigError if the file
    is not YAML, or no mapping.
    """

    def __init__(self, path: Path) -> None:
        self.label = shown(path)
        self.lines: dict[tuple[str, ...], int] = {}
        self.mistakes: dict[tuple[int, str], None] = {}
        node = self._root(path)
        self.values = self._flat(node, ())

    def add(self, key: str, mistake: str, under: tuple[str, ...] = ()) -> None:
        """Note a mistake where `key` stands, looking under `under` first."""
        line = self.lines.get((*under, key)) or self.lines.get((key,), 0)
        self.mistakes[line, mistake] = None

    def raise_if_any(self) -> None:
        """Raise ConfigError with a line for each mistake, those of the whole file first."""
        if self.mistakes:
            raise ConfigError("\n".join(self._said(*mistake) for mistake in sorted(self.mistakes)))

    def _said(self, line: int, mistake: str) -> str:
        return f"{self.label}:{line}: {mistake}" if line else f"{self.label}: {mistake}"

    def _root(self, path: Path) -> yaml.MappingNode:
        mistake, line, node = "expected lines of `key: value`", 0, None
        try:
            raw = path.read_bytes() if path.stat().st_size <= MAX_FILE_BYTES else b""
            node = yaml.compose(raw.decode("utf-8-sig"), yaml.BaseLoader)
            if node is None:
                mistake = f"is empty or larger than {MAX_FILE_BYTES // 1024} KiB; copy a file of "
                mistake += f"{CONFIGS_DIR.name}/ and edit it"
        except OSError as error:
            mistake = f"{error.strerror.lower()}; name one YAML file.{_nearest_file(path)}"
        except UnicodeDecodeError as error:
            mistake = f"is not UTF-8 text (byte {error.start}); a config is a text file"
        except yaml.MarkedYAMLError as error:
            line = error.problem_mark.line + 1
            help_texts = [text for part, text in YAML_HELP.items() if part in error.problem]
            mistake = f"not YAML: {error.problem}. Expected lines of `key: value`"
            mistake += "".join(help_texts[:1])
        except (yaml.YAMLError, RecursionError) as error:
            mistake = f"not YAML: {str(error).splitlines()[0]}"
        if isinstance(node, yaml.MappingNode):
            return node
        raise ConfigError(self._said(line, mistake))

    def _flat(self, node: yaml.MappingNode, under: tuple[str, ...]) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = str(key_node.value)
            line = key_node.start_mark.line + 1
            if (*under, key) in self.lines:
                self.mistakes[line, f"`{key}` is given twice; delete one"] = None
                continue
            self.lines[*under, key] = line
            if isinstance(value_node, yaml.MappingNode) and (*under, key) == (CPU_PART,):
                values[key] = self._flat(value_node, (key,))
            else:
                is_one = isinstance(value_node, yaml.ScalarNode)
                values[key] = value_node.value if is_one else None
        return values


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


def did_you_mean(word: str, choices: Iterable[str], cutoff: float = 0.6) -> str:
    """Return a question that names the choice most like a word, or nothing."""
    by_lower = {choice.lower(): choice for choice in choices}
    close = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=cutoff)
    return f" Did you mean `{by_lower[close[0]]}`?" if close else ""


# ---- Values


@lru_cache(maxsize=4)
def _adapters(model: type[BaseModel]) -> dict[str, TypeAdapter]:
    """Return what reads the value of each key that a file may have."""
    finite = ConfigDict(allow_inf_nan=False)
    fields = {key: model.model_fields[key] for key in model.model_fields if key not in NOT_IN_FILES}
    return {
        key: TypeAdapter(Annotated[field.annotation, field], config=finite)
        for key, field in fields.items()
    }


NOT_IN_FILES = (CPU_PART, "overrides")  # fields of Config that are no keys


def typed(
    model: type[BaseModel], values: Mapping[str, Any], add: Callable[[str, str], None]
) -> dict[str, Any]:
    """Return the values with their types; call `add(key, mistake)` for each that is wrong."""
    adapters, good = _adapters(model), {}
    for key, value in values.items():
        if key not in adapters:
            add(key, f"unknown key `{key}`.{did_you_mean(key, [*adapters, CPU_PART])}")
            continue
        try:
            good[key] = adapters[key].validate_python(value)
        except ValidationError as error:
            add(key, f"`{key}`{_expected(error.errors()[0], model.model_fields[key])}")
    return good


def _expected(error: Mapping[str, Any], field: Any) -> str:
    """Return pydantic's complaint about one value in the reader's words."""
    value, kind = error["input"], error["type"]
    shown_value = f"{value!r}"[:60]
    if value is None:
        return ": expected one value, not a list or a nested block"
    if value == "":
        return " has no value"
    if kind == "literal_error":
        choices = [str(choice) for choice in field.annotation.__args__]
        hint = did_you_mean(str(value), choices)
        return f": {shown_value} is not one of {', '.join(choices)}.{hint}"
    expected = error["msg"].partition(", ")[0].removeprefix("Input should be ")
    named = {
        "a valid integer": "a whole number",
        "Unable to parse input string as an integer": "a whole number",
        "a valid boolean": "true or false",
    }
    if kind == "string_pattern_mismatch":
        named[expected] = field.description
    return f": expected {named.get(expected, expected)}, got {shown_value}"


def _absolute_corpus(values: dict[str, Any], base: Path) -> str:
    """Make a corpus path absolute, relative to `base`; return what is wrong with it, or ""."""
    corpus = str(values.get("corpus", ""))
    if corpus in ("", "stdlib"):
        return ""
    try:
        path = (base / Path(corpus).expanduser()).resolve()
        exists = path.is_file()
    except (OSError, ValueError, RuntimeError):  # a NUL byte, an unknown user's home
        path, exists = base / "?", False
    values["corpus"] = str(path)
    return "" if exists else f"`corpus`: no such file: {corpus!r}"


# ---- Configs


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
    overridden, so that no two experiments share a name. Raises ConfigError with one `file:line`
    line for each mistake.
    """
    path = find_config(path)
    file = YamlFile(path)
    when_cpu = file.values.pop(CPU_PART, {})
    if not isinstance(when_cpu, dict):
        file.add(CPU_PART, f"`{CPU_PART}`: expected indented lines of `key: value`")
        when_cpu = {}
    parts = {(): file.values, (CPU_PART,): when_cpu}
    for under, values in parts.items():
        if mistake := _absolute_corpus(values, path.parent):
            file.add("corpus", mistake, under)
        parts[under] = typed(Config, values, lambda key, text, at=under: file.add(key, text, at))
    if "name" in when_cpu:
        file.add("name", f"`name` cannot stand under `{CPU_PART}`", (CPU_PART,))
    if missing := [f"`{key}`" for key in KEYS if (key,) not in file.lines]:
        names = ", ".join(missing[:MANY_KEYS])
        more = f" and {len(missing) - MANY_KEYS} more" if len(missing) > MANY_KEYS else ""
        file.add("", f"missing: {names}{more}; a config is complete (see fp32_config.yaml)")
    values, when_cpu = parts.values()
    for_gpu = dict(contradictions(values))
    for key, text in for_gpu.items():
        file.add(key, f"`{key}`: {text}")
    for key, text in contradictions(values | when_cpu):
        if text != for_gpu.get(key):
            file.add(key, f"`{key}`: {text} (on a CPU, with what `when_cpu` sets)", (CPU_PART,))
    file.raise_if_any()
    return _overridden(Config(**values, when_cpu=when_cpu), overrides)


def _overridden(config: Config, overrides: dict[str, Any]) -> Config:
    """Return the config with other values. Raises ConfigError if they fit no device."""
    mistakes: list[str] = []
    if mistake := _absolute_corpus(overrides, Path.cwd()):
        mistakes.append(mistake)
    values = typed(Config, overrides, lambda key, text: mistakes.append(text))
    if mistakes:
        raise ConfigError("\n".join(f"override: {mistake}" for mistake in mistakes))
    if not values:
        return config
    instead_of = {key: getattr(config, key) for key in values}
    named = _named(config.name, values) | values
    config = config.model_copy(update=named | {"overrides": instead_of})
    try:
        config.on("cuda")
    except ConfigError as with_gpu:
        try:
            config.on("cpu")  # what fits one of the two devices is judged when it runs
        except ConfigError:
            raise with_gpu from None
    return config


def _named(name: str, overrides: Mapping[str, Any]) -> dict[str, str]:
    """Return a name and a note that tell what was overridden, if a result depends on it."""
    changes = []
    for key, value in overrides.items():
        word = Path(value).name if isinstance(value, str) else f"{value}"
        safe_word = re.sub(r"[^\w.-]", "_", word)
        if key not in UNSAID:
            changes.append(f"{key}={safe_word}")
    if not changes:
        return {}
    long = "+".join([name, *changes])
    short = f"{name}+{hashlib.sha256(long.encode()).hexdigest()[:6]}"
    return {
        "name": long if len(long) <= 60 else short,
        "note": f"{name} with {', '.join(changes)}",
    }


def parse_overrides(pairs: Iterable[str]) -> dict[str, str]:
    """Return {key: text} for `key=value` texts. Raises ConfigError for a text without `=`."""
    values, mistakes = {}, []
    for pair in pairs:
        key, equals, text = pair.partition("=")
        values[key.strip()] = text.strip()
        if not equals:
            mistakes.append(f"--set: {pair!r}: expected key=value, as in --set steps=20")
    if mistakes:
        raise ConfigError("\n".join(mistakes))
    return values


def config_of(values: Mapping[str, Any], source: str) -> Config:
    """Return the config that a record holds; `source` names it in errors.

    Raises ConfigError with a line for each value that this version of the course does not know.
    """
    mistakes: list[str] = []
    keys = {key: value for key, value in values.items() if key not in NOT_IN_FILES}
    known = typed(Config, keys, lambda key, text: mistakes.append(f"{source}: {text}"))
    if mistakes:
        raise ConfigError("\n".join(mistakes))
    return Config(**known)


def shown(path: Path) -> str:
    """Return a path as errors name it: from the course's folder, if it lies there."""
    try:
        return path.resolve().relative_to(CONFIGS_DIR.parent).as_posix()
    except ValueError:
        return str(path)
