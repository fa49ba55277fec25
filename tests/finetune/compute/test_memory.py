"""The allocator's setting: there before torch is, never over the user's own, and inherited by ranks."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from flatshift.finetune.compute.memory import NAMES, WORKSPACES, cublas_workspace_env, expandable_segments_env

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
