"""Any file is a config or a config error, whatever somebody or a fuzzer has written into it."""

from __future__ import annotations

import re

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from labutils.config.reader import load_config
from labutils.config.schema import ConfigError
from tests.helpers import committed

FP32 = committed("configs/fp32_config.yaml")
HOSTILE = """[1, 2]|{a: 1}|&a 1|*a|!!python/object/apply:os.system ['true']|>|null|~|yes|0x10|1e999
-1|.nan|'|"|\t1|2001-01-01|1:2|@|`|%"""
VALUES = st.text(max_size=30) | st.sampled_from(re.split("[|\n]", HOSTILE))
LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{f'*a{i - 1}, ' * 9}]\n" for i in range(1, 20)
)


@st.composite
def edited(draw) -> bytes:
    """fp32_config.yaml with some lines changed, lost, doubled, indented or made up."""
    lines = FP32.splitlines()
    for i in draw(st.lists(st.integers(0, len(lines) - 1), min_size=1, max_size=4)):
        value = f"{lines[i].partition(':')[0]}: {draw(VALUES)}"
        edits = [value, value, value, "", f"{lines[i]}\n{lines[i]}", f"\t{lines[i]}", "  - 1"]
        lines[i] = draw(st.sampled_from(edits))
    return "\n".join(lines).encode("utf-8", "surrogatepass")


@settings(
    max_examples=150,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(content=edited() | st.binary(max_size=300))
@example(LAUGHS.encode())
@example(b"[" * 50_000)
@example(b"{a: " * 10_000)
@example(FP32.encode("utf-16"))
@example(FP32.replace("corpus: stdlib", "corpus: /dev/zero").encode())
@example(FP32.replace("corpus: stdlib", r'corpus: "a\0b"').encode())
def test_any_file_is_a_config_or_a_config_error(tmp_path, content):
    path = tmp_path / "x.yaml"
    path.write_bytes(content)
    try:
        load_config(path)
    except ConfigError as error:
        for line in str(error).splitlines():
            assert re.match(rf".*{path.name}(:\d+)?: \S", line), line
