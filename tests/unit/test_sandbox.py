"""Programs of a model: right ones pass, hostile ones are contained."""

from __future__ import annotations

import os
import socket

import pytest

from benchmarks.hostile_programs import HOSTILE
from flatshift.finetune.errors import UserError
from flatshift.finetune.evaluate import sandbox
from flatshift.finetune.evaluate.sandbox import ResourceLimits, check_sandbox_available, run_program, run_programs
from flatshift.finetune.evaluate.text_metrics import pass_at_k


def _contained() -> bool:
    try:
        check_sandbox_available()
    except UserError:
        return False
    return True


needs_namespaces = pytest.mark.skipif(not _contained(), reason="this system gives no namespaces")
QUICK = (
    "ends early with success", "never ends", "takes all memory", "forks without end", "deletes the user's file",
    "makes mounts writable again", "calls this machine", "ends its parent", "leaves a process behind",
)  # fmt: skip
SHORT = ResourceLimits(seconds=1.0)


@needs_namespaces
def test_right_programs_pass_and_wrong_ones_fail():
    good = "import random, typing, math, heapq, re\ndef f(x):\n    return x + 1\nassert f(1) == 2"
    kept = "open('own', 'w').write('x')\nassert open('own').read() == 'x'"
    wrong = ["assert 1 == 2", "def f(:", "import nothing_of_the_kind", "1 / 0"]
    assert run_programs([good, kept, *wrong], SHORT, workers=2) == ["passed", "passed", *["failed"] * 4]


@needs_namespaces
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in HOSTILE]
)
def test_hostile_programs_are_contained(name, tmp_path):
    tmp_path.chmod(0o777)
    (tmp_path / "kept").write_text("kept")
    (tmp_path / "kept").chmod(0o666)
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.01)
        program = HOSTILE[name].format(outside=tmp_path, port=server.getsockname()[1], parent=os.getpid())
        assert run_program(program, SHORT) != "passed"
        with pytest.raises(TimeoutError):
            server.accept()
    assert (tmp_path / "kept").read_text() == "kept" and [p.name for p in tmp_path.iterdir()] == ["kept"]


def test_nothing_is_run_where_it_cannot_be_contained(monkeypatch):
    monkeypatch.setattr(sandbox, "run_program", lambda code, limits=None: "failed")
    with pytest.raises(UserError, match="no namespaces"):
        check_sandbox_available()


def test_pass_at_k_is_unbiased():
    # the mean over all ways to draw k of n samples, by hand
    assert pass_at_k(5, 2, 1) == pytest.approx(2 / 5)
    assert pass_at_k(5, 2, 2) == pytest.approx(1 - 3 / 10)
    assert pass_at_k(5, 0, 3) == 0.0 and pass_at_k(5, 3, 3) == 1.0
    with pytest.raises(ValueError, match="pass@6 of 5"):
        pass_at_k(5, 1, 6)
