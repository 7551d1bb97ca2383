from __future__ import annotations

import json
import os
import struct
import sys
from pathlib import Path

import pytest

from labutils.tools.grading import judge, process
from labutils.tools.grading.notebook import Cut, given_of
from labutils.tools.grading.plain import MOST_ITEMS, plain, unpacked
from labutils.tools.grading.process import Limits
from labutils.tools.grading.tampering import TamperingError, suspicious_lines
from tests.helpers import REPO
from tests.solutions import notebook_01
from tests.tools.grading.school import source_of

SOLUTIONS = REPO / "tests" / "solutions"
SHORT = Limits(seconds=3, memory_gib=3, closed=(SOLUTIONS,))
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="the limits are Linux's")


def judged(exercise: str, source: str, expression: str = "x", limits: Limits = SHORT):
    course = given_of(exercise)
    return judge.judge(exercise, Cut(source, expression), course, judge.given(course), limits)


def test_values_and_functions_get_their_verdicts():
    assert judged("leak", "x = 'running_mean'").verdict == "right"
    assert judged("leak", "x = None").verdict == "open"
    found = judged("leak", "x = 'augment'")
    assert found.verdict == "wrong" and "a peak is no leak" in found.reason
    right = source_of(notebook_01.amp_step, "x", notebook_01)
    assert judged("amp_step", right).verdict == "right"
    no_update = source_of(notebook_01.changed((notebook_01.UPDATE, "")), "x", notebook_01)
    found = judged("amp_step", no_update)
    assert found.verdict == "wrong" and "who updates it?" in found.reason
    assert found.share == pytest.approx(1 / 3)  # the first of three steps passes


def test_what_is_given_comes_from_the_course_and_not_from_the_submission():
    easier = "logs = {'A': 'xx', 'B': 'x.', 'C': '..'}\nx = ('A', 'B')"
    assert judged("scaler_log", easier).verdict == "wrong"


def test_an_answer_that_raises_or_dies_costs_only_itself():
    assert "ZeroDivisionError" in judged("leak", "x = 1 / 0").reason
    assert "SystemExit" in judged("leak", "exit(3)").reason
    died = judged("leak", "import os\nos._exit(3)")
    assert died.verdict == "failed" and "exit code 3" in died.reason


@on_linux
def test_the_row_says_when_time_or_memory_and_not_the_answer_was_the_reason(monkeypatch):
    with monkeypatch.context() as patient:
        patient.setattr(process, "WAIT_FACTOR", 100)  # a busy machine gives little of a second
        endless = judged("leak", "while True:\n    x = 1", limits=Limits(seconds=1))
    assert endless.verdict == "failed" and not endless.is_final
    assert "processor time" in endless.reason
    asleep = judged("leak", "import time\ntime.sleep(600)\nx = 1", limits=Limits(seconds=0.5))
    assert "on the clock" in asleep.reason and not asleep.is_final
    hungry = judged("leak", "x = bytearray(4 * 2**30)")
    assert "GiB of memory" in hungry.reason and not hungry.is_final


@on_linux
def test_what_the_judge_has_open_is_closed_to_a_submission(tmp_path):
    with (tmp_path / "verdicts").open("w") as file:
        os.set_inheritable(file.fileno(), True)
        found = judged("leak", f"import os\nos.write({file.fileno()}, b'right')\nx = 1")
    assert "Bad file descriptor" in found.reason
    assert (tmp_path / "verdicts").read_text() == ""


@on_linux
def test_half_a_message_does_not_hold_the_judge_up():
    writes = "import os, time\nfor fd in range(3, 20):\n    try:\n"
    writes += "        os.write(fd, bytes([0, 0, 0, 9]))\n    except OSError:\n        pass\n"
    found = judged("leak", f"{writes}time.sleep(600)\nx = 1", limits=Limits(seconds=0.5))
    assert found.verdict == "failed"


@on_linux
def test_a_verdict_that_the_submission_sends_itself_is_tampering():
    sent = json.dumps(["0" * 16, "outcome", ["right", "", 1.0, True]]).encode()
    message = struct.pack("!i", len(sent)) + sent
    writes = f"import os\nfor fd in range(3, {process.MOST_FILES}):\n    try:\n"
    writes += f"        os.write(fd, {message!r})\n    except OSError:\n        pass\n"
    found = judged("leak", f"{writes}os._exit(0)")
    assert found.verdict == "tampered" and "a verdict of its own" in found.reason


CHEATS = {
    "class Always:\n    def __eq__(self, other):\n        return True\nx = Always()": "class of its own",
    "class Three(float):\n    pass\nx = Three(3)": "class of its own",
    f"x = open('{SOLUTIONS / 'notebook_01.py'}').read()": "belongs to others",
    "import subprocess\nx = subprocess.run(['ls'])": "subprocess",
    "import socket\nx = socket.socket().connect(('127.0.0.1', 9))": "socket",
    "import gc\nx = gc.get_objects()": "gc.get_objects",
    "import sys\nx = sys._getframe(1)": "_getframe",
}


@pytest.mark.parametrize("source", CHEATS)
def test_a_value_that_is_no_answer_is_tampering(source):
    found = judged("leak", source)
    assert found.verdict == "tampered" and CHEATS[source] in found.reason
    assert found.share == 0


PATCHES = (
    "import labutils.checks.core as core\ncore._problem = lambda judge: None",
    "import labutils.checks.core as core\ncore._tell.__code__ = (lambda verdict: None).__code__",
    "import torch\ntorch.equal = lambda *_: True",
    "import torch\ntorch.Tensor.norm = lambda *_: 1",
    "import builtins\nbuiltins.abs = lambda x: 0",
    "from labutils.checks import mixed_precision\nmixed_precision.clipped = None",
)


@pytest.mark.parametrize("when", ["before", "inside"])
@pytest.mark.parametrize("patch", PATCHES)
def test_a_function_that_changes_the_check_or_torch_is_tampering(patch, when):
    inside = "".join(f"    {line}\n" for line in patch.splitlines())
    source = {
        "before": f"{patch}\ndef x(*inputs):\n    pass\n",
        "inside": f"def x(*inputs):\n{inside}",
    }[when]
    found = judged("amp_step", source)
    assert found.verdict == "tampered" and "it changes" in found.reason


SUSPICIOUS = {
    "lab.checks._report(1)": "reaches into",
    "lab.checks.leak = print": "changes the package",
    "setattr(lab.checks, 'leak', print)": "changes the package",
    "from tests.solutions import notebook_01": "imports",
    "import labutils.checks.core": "imports",
    "print('Right.')": "prints a verdict",
    "f.__globals__['x'] = 1": "looks inside",
    "error.__traceback__.tb_frame.f_back": "looks inside",
}


@pytest.mark.parametrize("line", SUSPICIOUS)
def test_the_source_tells_on_a_submission_with_the_line(line):
    (what, *_) = suspicious_lines(f"x = 1\n{line}")
    assert SUSPICIOUS[line] in what and what.endswith(line)


def test_ordinary_cells_are_not_suspicious():
    from labutils.tools.grading.notebook import course

    ordinary = "print('right answer?', x)\nx.y = 3\nmodel.train = None\nimport torch, inspection"
    assert suspicious_lines(ordinary) == ()
    found = [
        what for cells in course().values() for cell in cells for what in suspicious_lines(cell)
    ]
    assert found == []


@pytest.mark.parametrize(
    "value",
    [3, 2.5, True, None, "x", (1, [2.0, {"a": (1,)}]), {1, 2}, {"n": 1}, 1j, float("inf")],
)
def test_plain_values_arrive_as_they_were(value):
    assert unpacked(plain(value)) == value


def test_arrays_arrive_as_lists_and_what_is_too_large_does_not():
    import numpy as np
    import torch

    assert unpacked(plain(torch.tensor([1.5, 2]))) == [1.5, 2.0]
    assert unpacked(plain(np.float32(0.5))) == 0.5
    with pytest.raises(TypeError, match="parts"):
        plain([0] * (MOST_ITEMS + 1))
    with pytest.raises(TypeError, match="not a plain value"):
        plain(Path())

    Mine = type("Mine", (int,), {"__module__": "__main__"})
    with pytest.raises(TamperingError):
        plain([Mine(3)])
