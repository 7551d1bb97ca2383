"""Write the comments of the YAML files, and schema.json, from the rows: `make configs`.

Values stay as they are. A key that a file lacks is added with its default.
"""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from labutils.config.choices import PRECISIONS
from labutils.config.schema import KEYS, Config, schema_text
from labutils.config.yaml_source import Loader
from labutils.files import CONFIGS_DIR, write_atomically

BASELINE = "fp32_config.yaml"
MARK = "[*]"  # of a line that differs from the baseline
COLUMN = 25  # where comments begin, if the value leaves room
LINE = re.compile(r"^(?P<indent> *)(?P<key>\w+):(?P<value>.*?)(?P<comment>\s+#.*)?$")
# In the files that are named after a precision: what they differ in.
BETWEEN_PRECISIONS = "name", "note", "precision"
WITHOUT_COMMENT = "name", "note"


def main(folder: Path = CONFIGS_DIR) -> None:
    """Rewrite the shipped configs of a folder, and its schema."""
    baseline = (folder / BASELINE).read_text(encoding="utf-8")
    for path in sorted(folder.glob("*_config.yaml")):
        text = path.read_text(encoding="utf-8")
        write_atomically(path, commented(text, baseline).encode())
    write_atomically(folder / "schema.json", schema_text().encode())


def commented(text: str, baseline: str) -> str:
    """Return a config's text with its comments as the rows have them."""
    unmarked = values_of(with_missing_keys(baseline))
    if values_of(text).get("name") in PRECISIONS:
        for key in BETWEEN_PRECISIONS:
            del unmarked[key]
    lines = with_missing_keys(text).splitlines()
    return "\n".join(with_comment(line, unmarked) for line in lines) + "\n"


def with_missing_keys(text: str) -> str:
    """Return a config's text with a line for each key that has a default and is not there."""
    there = values_of(text)
    added = []
    for key in KEYS:
        field = Config.model_fields[key]
        if key not in there and not field.is_required():
            added.append(f"{key}: {yaml.safe_dump(field.default).splitlines()[0]}")
    main_part, when_cpu, rest = text.partition("\nwhen_cpu:")
    return main_part + "".join(f"{line}\n" for line in added) + when_cpu + rest


def values_of(text: str) -> dict[str, str]:
    """Return {key: value as it is written}; a key under `when_cpu` begins with two spaces."""
    found = {}
    for line in text.splitlines():
        match = LINE.match(line)
        if match and not line.startswith("#"):
            found[match["indent"] + match["key"]] = match["value"].strip()
    return found


def with_comment(line: str, baseline: dict[str, str]) -> str:
    """Return a line of a config with its comment; other lines as they are."""
    match = LINE.match(line)
    if line.startswith("#") or not match:
        return line
    key, value = match["key"], match["value"].strip()
    place = match["indent"] + key
    same = place in baseline and yaml_value(baseline[place]) == yaml_value(value)
    is_marked = key != "when_cpu" and not same
    words = [MARK] if is_marked else []
    if match["indent"]:  # what is said there is the file's own
        own = (match["comment"] or "").replace(MARK, "").strip(" #")
        words += [own] if own else []
    elif key not in WITHOUT_COMMENT:
        words.append(Config.model_fields[key].description)
    start = f"{match['indent']}{key}: {value}".rstrip()
    if not words:
        return start
    return f"{start.ljust(COLUMN - 1)} # {' '.join(words)}"


def yaml_value(text: str) -> object:
    """Return the value that a text has in a config: 1e-4 and 0.0001 are equal."""
    return yaml.load(text, Loader)


if __name__ == "__main__":
    main()
