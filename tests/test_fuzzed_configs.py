"""Any file is a config or a config error, whatever somebody or a fuzzer has written into it."""

from __future__ import annotations

import re

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from labutils.config.reader import load_config
from labutils.config.schema import ConfigError
from tests.helpers import committed

FP32 = committed("configs/fp32_config.yaml")
LINES = [line for line in FP32.splitlines() if ":" in line]
HOSTILE = """[1, 2]|{a: 1}|&a 1|*a|!!python/object/apply:os.system ['true']|>|null|~|yes|0x10|1e999
-1|.nan|'|"|\t1|2001-01-01|1:2|@|`|%"""
# The last ones add a key that is there already, a line with a tab, and one of a list.
MORE_LINES = ["1\nsteps: 2", "1\n\tsteps: 2", "1\n  - 1"]
VALUES = st.text(max_size=30) | st.sampled_from([*re.split("[|\n]", HOSTILE), *MORE_LINES])
EDITS = st.dictionaries(st.sampled_from(LINES), VALUES, min_size=1, max_size=4)
LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{f'*a{i - 1}, ' * 9}]\n" for i in range(1, 20)
)


def edited(edits: dict[str, str]) -> bytes:
    """Return fp32_config.yaml with other values in some lines."""
    text = FP32
    for line, value in edits.items():
        text = text.replace(line, f"{line.partition(':')[0]}: {value}", 1)
    return text.encode("utf-8", "surrogatepass")


@settings(
    max_examples=150,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(content=EDITS.map(edited) | st.binary(max_size=300))
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
