"""The allocator's setting: there before torch is, never over the user's own, and inherited by ranks."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from flatshift.finetune.compute.memory import (
    NAMES,
    WORKSPACES,
    core_wait_s,
    cublas_workspace_env,
    expandable_segments_env,
)

ASK = (
    "import os, sys; from unittest import mock; from flatshift import cli; "
    "names = 'PYTORCH_ALLOC_CONF', 'CUBLAS_WORKSPACE_CONFIG'; "
    "cli.run = lambda argv: print(*map(os.environ.get, names), 'torch' in sys.modules) or 0; cli.main()"
)


def test_nothing_is_said_over_the_user():
    assert expandable_segments_env({}, platform="linux") == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    assert expandable_segments_env({}, platform="win32") == expandable_segments_env({}, platform="darwin") == {}
    for name in NAMES:
        for value in ("max_split_size_mb:64", "expandable_segments:False", ""):
            assert expandable_segments_env({name: value}, platform="linux") == {}
    assert cublas_workspace_env({}) == {WORKSPACES: ":4096:8"} and cublas_workspace_env({WORKSPACES: ""}) == {}


@pytest.mark.skipif(sys.platform != "linux", reason="the setting is for Linux")
def test_the_front_door_sets_it_without_torch():
    plain = {name: value for name, value in os.environ.items() if name not in (*NAMES, WORKSPACES)}
    for more, answer in (
        ({}, "expandable_segments:True"),
        ({"PYTORCH_ALLOC_CONF": "backend:native"}, "backend:native"),
    ):
        run = subprocess.run(
            [sys.executable, "-c", ASK], env={**plain, **more}, capture_output=True, text=True, check=True
        )
        assert run.stdout.split() == [answer, ":4096:8", "False"]


SPIN = """
import os, time
os.sched_setaffinity(0, {int(os.environ["CORE"])})
from flatshift.finetune.compute.memory import core_wait_s
before, end = core_wait_s(), time.monotonic() + 1.0
while time.monotonic() < end: pass
print(core_wait_s() - before)
"""


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="Linux pins processes to cores")
def test_processes_that_share_a_core_wait_for_it() -> None:
    """Each of three on one core waits for the other two; a kernel that keeps no such count reports none."""
    if not core_wait_s():
        pytest.skip("this kernel does not count it")
    environment = {**os.environ, "CORE": str(min(os.sched_getaffinity(0)))}
    command = [sys.executable, "-c", SPIN]
    started = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    waited = [float(process.communicate()[0]) for process in started]
    assert max(waited) > 0.3
