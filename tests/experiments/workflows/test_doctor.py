"""`flatshift doctor` sees what is wrong, says how to put it right, and needs no torch to do so."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from flatshift.experiments.workflows import doctor as module
from flatshift.experiments.workflows.doctor import diagnose, format_result
from flatshift.finetune import machine
from flatshift.finetune.compute import memory

ROOT = Path(__file__).resolve().parents[3]


def test_this_environment_is_described_without_torch() -> None:
    code = (
        "import sys, json; from flatshift.experiments.workflows.doctor import diagnose; result = diagnose();"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules; print(json.dumps(result))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    result = json.loads(done.stdout)
    assert result["ok"] is (result["problems"] == [])
    assert result["versions"]["torch"]["installed"] == importlib.metadata.version("torch")
    assert result["versions"]["torch"]["ok"]
    extras = set(importlib.metadata.metadata("flatshift").get_all("Provides-Extra"))
    assert set(result["extras"]) == extras - module._DEVELOPMENT_EXTRAS
    packages = result["extras"]["datatrove"]["packages"]
    assert packages["datatrove"] == importlib.metadata.version("datatrove")
    own = set(tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"])
    assert set(module.EXTRAS) == own - module._DEVELOPMENT_EXTRAS, "each extra of users has its description"
    assert result["shipped"]["backbones"] == ["flatshift-5m", "flatshift-encoder-3m", "flatshift-t5-3m"]
    assert result["cpu"]["cores"] >= 1 and result["memory"]["total"] > 1 << 28 and result["disk"]["free"] > 0
    assert result["devices"] is None
    assert result["cache"]["limit"] > 0 and result["cache"]["entries"] >= 0


def test_the_token_cache_is_sized(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, size in (("tokens-a", 3000), ("tokens-b", 500), ("other", 9000)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "about.json").write_bytes(b" " * size)
    monkeypatch.setenv("FLATSHIFT_CACHE", str(tmp_path))
    result = diagnose()
    assert (result["cache"]["entries"], result["cache"]["bytes"]) == (2, 3500)
    assert f"2 inputs kept, 0.0 GiB of at most 20.0 GiB, in {tmp_path}" in format_result(result)
    monkeypatch.setenv("FLATSHIFT_CACHE_GIB", "lots")
    assert any("'lots' is not a size in GiB" in problem["what"] for problem in diagnose()["problems"])


def test_deep_lists_devices_and_text_names_them() -> None:
    result = diagnose(deep=True)
    assert result["devices"]["torch"].split("+")[0] == importlib.metadata.version("torch").split("+")[0]
    text = format_result(result)
    assert "devices: cpu (" in text
    for name in result["versions"]:
        assert name in text
    json.dumps(result, allow_nan=False)


def test_core_requirements_are_those_of_pyproject() -> None:
    assert {r.name for r in module.read_requirements()} >= {"torch", "transformers", "peft", "zstandard", "datasets"}
    versions, _ = module.check_versions([], [])
    assert "zstandard" not in versions and "POT" not in versions


@pytest.mark.parametrize(
    ("wanted", "what", "fix"),
    [
        ("numpy>=99", "is outside >=99", "pip install 'numpy>=99'"),
        ("no-such-distribution-x>=1", "is not installed", "pip install 'no-such-distribution-x>=1'"),
    ],
)
def test_unmet_requirement_is_a_problem(monkeypatch: pytest.MonkeyPatch, wanted: str, what: str, fix: str) -> None:
    monkeypatch.setattr(module, "read_requirements", lambda: [Requirement(wanted)])
    result = diagnose()
    assert not result["ok"]
    (problem,) = result["problems"]
    assert what in problem["what"] and problem["fix"] == fix
    text = format_result(result)
    assert "\nNO " in text and fix in text and text.endswith("1 problem(s)")


def test_missing_extra_is_no_problem_but_says_how(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = [Requirement('no-such-distribution-x>=1; extra == "zstd"'), Requirement('numpy; extra == "hf"')]
    monkeypatch.setattr(module, "read_requirements", lambda: wanted)
    result = diagnose()
    assert result["ok"] and result["versions"] == {}
    assert not result["extras"]["zstd"]["installed"] and result["extras"]["hf"]["installed"]
    assert "missing: pip install 'flatshift[zstd]'" in format_result(result)


def test_container_limits_are_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("536870912\n")
    (tmp_path / "memory.current").write_text("536870000\n")
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    monkeypatch.setattr(module, "_CGROUP", tmp_path)
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    assert module.diagnose()["memory"] == {"total": 1 << 29, "available": 912}
    assert module.describe_cpu()["quota"] == pytest.approx(1.5)
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert module.diagnose()["memory"]["total"] > 1 << 29
    assert module.describe_cpu()["quota"] is None


def test_cpu_instructions_come_from_cpuinfo(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "cpuinfo"
    monkeypatch.setattr(machine, "Path", lambda name: file)
    monkeypatch.setattr(module, "cpu_info", machine.cpu_info.__wrapped__)
    file.write_text("processor\t: 0\nmodel name\t: Test 9000\nflags\t\t: fpu avx512_bf16 amx_bf16\n")
    found = module.describe_cpu()
    assert (found["model"], found["bf16"], found["amx"]) == ("Test 9000", True, True)
    file.write_text("model name\t: Old\nflags\t\t: fpu sse2\n")
    found = module.describe_cpu()
    assert (found["bf16"], found["amx"]) == (False, False)
