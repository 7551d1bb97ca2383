"""`make configs`: write the comments of configs/*.yaml, and schema.json, from the keys' rows.

Values stay as they are, and so does what stands under `when_cpu`.
"""

import json
import re
from pathlib import Path

import yaml

from labutils.config.choices import PRECISIONS
from labutils.config.schema import KEYS, Config
from labutils.files import CONFIGS_DIR, write_atomically


def shipped(folder: Path = CONFIGS_DIR) -> list[Path]:
    """Return the paths of the course's own configs; a reader's are `my_*.yaml`."""
    return sorted({*folder.glob("*_config.yaml")} - {*folder.glob("my_*")})


def commented(text: str, baseline: str) -> str:
    """Return a config's text with its comments; [*] marks what differs from the baseline."""
    values, usual = yaml.load(text, yaml.BaseLoader), yaml.load(baseline, yaml.BaseLoader)
    if values["name"] in PRECISIONS:  # these files say what differs between precisions
        usual |= dict.fromkeys(("name", "note", "precision"))
    lines = []
    for line in text.splitlines():
        match = re.fullmatch(r"(\w+):(.*?)(?: +#.*)?", line)
        if match and match[1] in Config.model_fields:
            key, value = match[1], match[2].strip()
            is_usual = key == "when_cpu" or values[key] == usual.get(key)
            about = "" if key in ("name", "note") else Config.model_fields[key].description
            comment = about if is_usual else f"[*] {about}".strip()
            line = f"{key}: {value}".rstrip().ljust(24) + f" # {comment}"
        lines.append(line.removesuffix(" # ").rstrip() + "\n")
    return "".join(lines)


def json_schema() -> dict:
    """Return the JSON schema of a config file, for editors that complete and check keys as you
    type.
    """
    schema = Config.model_json_schema()
    properties = schema["properties"]
    del properties["overrides"]
    smaller = {key: properties[key] for key in KEYS}
    about = properties["when_cpu"]["description"]
    when_cpu = {"type": "object", "description": about, "properties": smaller}
    properties["when_cpu"] = when_cpu | {"additionalProperties": False}
    return schema


if __name__ == "__main__":
    usual = (CONFIGS_DIR / "fp32_config.yaml").read_text(encoding="utf-8")
    for path in shipped():
        write_atomically(path, commented(path.read_text(encoding="utf-8"), usual).encode())
    text = json.dumps(json_schema(), indent=2, ensure_ascii=False) + "\n"
    write_atomically(CONFIGS_DIR / "schema.json", text.encode())
