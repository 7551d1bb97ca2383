"""From a YAML file to a `Config` or a card, with every mistake at once and where it stands.

Each is one line: `file:line: what is wrong, what was expected`. Values are read as text, and
pydantic gives them their types: so 1e-4 is a number, and `off` a word.
"""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from labutils.config.card import CARDS, COLUMNS, N_NEEDED, Card, card_of_row
from labutils.config.schema import (
    CPU_PART,
    MISTAKES_SHOWN,
    Config,
    ConfigError,
    combined,
    did_you_mean,
    located_corpus,
)
from labutils.files import CONFIGS_DIR

IN_CPU_PART = "when_cpu."
EXPECTED = 'Expected lines of `key: value`, indented with spaces; text with a colon in "quotes"'


# ---- Files


def find_config(name: str | os.PathLike[str]) -> Path:
    """Return the file meant by a path, by "bf16" (configs/bf16_config.yaml) or by "mine"
    (configs/my_mine.yaml).
    """
    path = Path(name)
    in_configs = [f"{name}_config.yaml", f"my_{name}.yaml", f"{name}.yaml", name]
    paths = [path, CONFIGS_DIR.parent / path, *(CONFIGS_DIR / file for file in in_configs)]
    return next((candidate for candidate in paths if candidate.is_file()), path)


def short_names() -> list[str]:
    """Return the short names of the configs there are: bf16 for configs/bf16_config.yaml."""
    stems = [path.stem for path in sorted(CONFIGS_DIR.glob("*.yaml"))]
    return [stem.removesuffix("_config").removeprefix("my_") for stem in stems]


class YamlFile:
    """A flat YAML file: the text of each key, its line, and the mistakes found in the file.

    `texts` is {key: text}; it may have one block, under CPU_PART. Any other block stands there as
    {}, a list as []. `lines` is {key: line}, where a key of the block begins with "when_cpu.".
    `mistakes` are (line, text), with line 0 for those of the whole file. Raises ConfigError for a
    file that is not YAML.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.lines, self.mistakes = path, {}, set()
        try:
            # Nodes, not values: they have lines, and a key that is given twice is there twice.
            # And "-sig": without the mark that editors of Windows put first.
            root = yaml.compose(path.read_text(encoding="utf-8-sig"), yaml.BaseLoader)
            if not isinstance(root, yaml.MappingNode):
                raise ValueError(EXPECTED)
            self.texts = self._texts(root)
        except OSError as error:
            if path.is_dir():
                problem = "is a folder; name one of its YAML files, or a short name such as bf16"
                raise ConfigError(f"{path}: {problem}") from None
            names = [*short_names(), *(file.name for file in path.parent.glob("*.y*ml"))]
            hint = did_you_mean(path.name, names) or f" There are: {', '.join(names)}"
            reason = f"{error.strerror.lower()}; name one YAML file.{hint}"
            raise ConfigError(f"{path}: {reason}") from None
        except yaml.MarkedYAMLError as error:
            ended = "end of stream" in error.problem  # what is open there began further up
            line = (error.context_mark if ended else error.problem_mark).line + 1
            raise ConfigError(f"{path}:{line}: not YAML: {error.problem}. {EXPECTED}") from None
        # Not UTF-8 text, say; or 50,000 brackets, into which yaml goes by recursion.
        except (ValueError, yaml.YAMLError, RecursionError) as error:
            raise ConfigError(f"{path}: not YAML: {str(error).splitlines()[0]}") from None

    def _texts(self, block: yaml.MappingNode, under: str = "") -> dict[str, Any]:
        texts = {}
        for key_node, node in block.value:
            key, line = str(key_node.value), key_node.start_mark.line + 1
            if key in texts:
                self.mistakes.add((line, f"`{key}` is given twice; delete one"))
            elif under and key == CPU_PART:
                problem = (
                    f"`{key}` stands inside `{key}`; delete this line, and indent its block less"
                )
                self.mistakes.add((line, problem))
            elif isinstance(node, yaml.MappingNode):
                texts[key] = self._texts(node, IN_CPU_PART) if under + key == CPU_PART else {}
            else:
                texts[key] = node.value if isinstance(node, yaml.ScalarNode) else []
            self.lines.setdefault(under + key, line)  # of two the first, whose text is taken
        return texts

    def add(self, key: str, mistake: str, under: str = "") -> None:
        """Note a mistake where `key` stands, looking under `under` first; else of the whole."""
        line = self.lines.get(under + key) or self.lines.get(key, 0)
        self.mistakes.add((line, mistake))

    def raise_if_any(self) -> None:
        """Raise ConfigError with a line for each mistake, those of the whole file first."""
        lines = []
        for line, mistake in sorted(self.mistakes):
            lines.append(f"{self.path}:{line}: {mistake}" if line else f"{self.path}: {mistake}")
        n_more = len(lines) - MISTAKES_SHOWN
        if n_more > 0:
            lines[MISTAKES_SHOWN:] = [f"{self.path}: … and {n_more:,} more"]
        if lines:
            raise ConfigError("\n".join(lines))


# ---- Configs


def load_config(path: str | os.PathLike[str], /, **overrides: Any) -> Config:
    """Read, check and return the experiment in a YAML file; keyword arguments override its values.

    `path` may be a short name ("bf16" is configs/bf16_config.yaml). The values of a GPU run and
    those of a CPU run, with `when_cpu`, are both checked; with overrides it is enough that one of
    them fits. Without a `name` among the overrides, name and note tell what was overridden, so that
    no two experiments share a name. Raises ConfigError with one `file:line` line for each mistake.
    """
    file = YamlFile(find_config(path))
    values, folder = file.texts, file.path.parent
    when_cpu = values.pop(CPU_PART) if isinstance(values.get(CPU_PART), dict) else {}
    # an override's path is relative to where it is typed, not to the file
    for part, base in ((values, folder), (when_cpu, folder), (overrides, Path.cwd())):
        for key, text in located_corpus(part, base).items():
            file.add(key, text)

    config, mistakes, mistakes_on_cpu = combined(values, when_cpu, overrides)
    words = ", ".join(f"{key}={value}" for key, value in overrides.items())
    for key, text in mistakes.items():
        if key in overrides:
            file.add("", f"override: {text}")
        else:  # the line is right, perhaps, but for what was overridden
            file.add(key, f"{text} (with {words})" if overrides else text)
    for key, text in mistakes_on_cpu.items():
        if text != mistakes.get(key):  # else it is told, and `when_cpu` has no part in it
            file.add(key, f"{text} (on a CPU, with what `when_cpu` sets)", IN_CPU_PART)
    file.raise_if_any()
    return config


ABOVE_0 = r"(?=.*[1-9])\d*\.?\d+"
SIZE = r"(\d+) ?gi?b"
NEAR = 0.15  # a card of 16 GB has 14.6 GiB for torch, say


def _plain(name: str) -> str:
    return re.sub(r"nvidia|geforce|tesla|rtx|gpu|generation|gb|sxm\d|hbm\d|[\W_]", "", name.lower())


def card_named(name: str) -> Card:
    """Return the card of `cards.csv` with a name, written as in shops too: "RTX 3060 12GB".

    Raises ValueError for any other name. It tells the three most similar ones, where all stand, and
    how to describe a card.
    """
    # With its size, as a100-40 is called, and without: 12GB stands on the box of an rtx3060.
    wanted = _plain(name), _plain(re.sub(SIZE, "", name.lower()))
    size = re.search(SIZE, name.lower())
    for card in CARDS.values():
        gib = float(size[1]) if size else card.memory_gib
        if _plain(card.name) in wanted and abs(card.memory_gib / gib - 1) < NEAR:
            return card
    word = re.sub(rf"{SIZE}|\W", "", name.lower())
    nearest = difflib.get_close_matches(word, CARDS, n=3, cutoff=0)
    raise ValueError(
        f"no card is named {name!r}. Nearest in name: {', '.join(nearest)}; all {len(CARDS)}: "
        "`labutils predict --cards`. Or describe yours in a YAML file: --card FILE, or "
        "lab.load_card(FILE) in Python"
    )


MOST = {"capability": 20, "tflops": 5_000}  # by a column's last word: beyond it a unit slipped


def load_card(path: str | os.PathLike[str]) -> Card:
    """Return the card that a YAML file describes, with the columns of `cards.csv` as keys.

    The first six are needed. Without `float16_tflops` a prediction in 16 bits assumes a rate, and
    its `why_band` says so.
    Raises ConfigError with a line `file:line: …` for each mistake.
    """
    if not Path(path).is_file():
        problem = "no such file; a card is a YAML file of its datasheet (see config/cards.csv)"
        raise ConfigError(f"{path}: {problem}. A card's name goes after --device")
    file = YamlFile(Path(path))
    for key, text in file.texts.items():
        if key not in COLUMNS:
            hint = did_you_mean(key, COLUMNS) if len(file.mistakes) < MISTAKES_SHOWN else ""
            file.add(key, f"unknown key `{key}`.{hint}")
        elif not text or (key != "name" and not re.fullmatch(ABOVE_0, str(text))):
            expected = "a name" if key == "name" else "a number above 0, such as 8.9"
            file.add(key, f"`{key}`: expected {expected}, got {text!r}")
        elif key != "name" and float(text) > MOST.get(key.rpartition("_")[2], math.inf):
            file.add(
                key, f"`{key}`: {text} is more than any card has; such as 8.6, or 19.2 TFLOP/s"
            )
    for key in COLUMNS[:N_NEEDED]:
        if key not in file.texts:
            file.add("", f"missing: `{key}`")
    file.raise_if_any()
    return card_of_row(file.texts)


def parse_overrides(pairs: Iterable[str]) -> dict[str, str]:
    """Return {key: text} for `key=value` texts. Raises ConfigError for a text without `=`."""
    values = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals:
            raise ConfigError(f"--set: {pair!r}: expected key=value, as in --set steps=20")
        values[key.strip()] = text.strip()
    return values
