"""Any file is a config or a config error, whatever somebody or a fuzzer has written into it."""

from __future__ import annotations

import contextlib
import re
import tracemalloc

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from labutils.config.reader import load_config
from labutils.config.schema import ConfigError
from tests.helpers import committed

FP32 = committed("configs/fp32_config.yaml")


HOSTILE = """[1, 2]|{a: 1}|&a 1|*a|!!python/object/apply:os.system ['true']|>|null|~|yes|0x10|1e999
-1|.nan|'|"|\t1|2001-01-01|1:2|@|`|%"""
VALUES = st.one_of(
    st.text(max_size=30),
    st.integers().map(str),
    st.floats().map(str),
    st.sampled_from(HOSTILE.replace("\n", "|").split("|")),
)


@st.composite
def edited(draw) -> bytes:
    """fp32_config.yaml with some lines changed, lost, doubled, indented or made up."""
    lines = FP32.splitlines()
    for i in draw(st.lists(st.integers(0, len(lines) - 1), min_size=1, max_size=4)):
        line = lines[i]
        value = f"{line.partition(':')[0]}: {draw(VALUES)}"
        edits = [value, value, value, "", f"{line}\n{line}", f"\t{line}", f"  - {line}"]
        lines[i] = draw(st.one_of(st.sampled_from(edits), st.text(max_size=40)))
    return "\n".join(lines).encode("utf-8", "surrogatepass")


def _laughs(depth: int) -> bytes:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, depth)]
    return "\n".join(lines).encode()


def judged(path, content: bytes) -> None:
    """Load a file: a Config, or an error each of whose lines names the file."""
    path.write_bytes(content)
    try:
        load_config(path)
    except ConfigError as error:
        for line in str(error).splitlines():
            assert re.match(rf".*{path.name}(:\d+)?: \S", line), line


FUZZ = {
    "database": None,
    "deadline": None,
    "suppress_health_check": [HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
}


@settings(max_examples=150, **FUZZ)
@given(content=st.one_of(edited(), st.binary(max_size=300)))
def test_any_file_is_a_config_or_a_config_error(tmp_path, content):
    judged(tmp_path / "x.yaml", content)


@pytest.mark.parametrize(
    "content",
    [
        _laughs(20),
        b"[" * 50_000,
        b"{a: " * 10_000,
        b"- " * 30_000,
        b"a: " + b"9" * 60_000,
        b"a: 1\n" * 200_000,
        FP32.replace("seed: 0", "seed: !!python/object/apply:os._exit [3]").encode(),
        FP32.encode("utf-16"),
        FP32.replace("corpus: stdlib", "corpus: /dev/zero").encode(),
        FP32.replace("corpus: stdlib", "corpus: ' '").encode(),
    ],
    ids=[
        "laughs",
        "brackets",
        "braces",
        "dashes",
        "digits",
        "huge",
        "python tag",
        "utf-16",
        "device",
        "blank path",
    ],
)
def test_hostile_files_cost_little_and_run_nothing(tmp_path, content):
    judged(tmp_path / "x.yaml", content)
    tracemalloc.start()  # slows everything down
    try:
        with contextlib.suppress(ConfigError):
            load_config(tmp_path / "x.yaml")
        assert tracemalloc.get_traced_memory()[1] < 200 * 2**20
    finally:
        tracemalloc.stop()
