"""A CUDA device that is not there: which reason it is, told by the run, by the selection and by doctor alike."""

from __future__ import annotations

import pytest
import torch

from flatshift.experiments.workflows import doctor as doctor_module
from flatshift.finetune.compute import cuda_status
from flatshift.finetune.compute.cuda_status import CudaStatus, diagnose_cuda, missing_device_message, resolve_device
from flatshift.finetune.errors import UserError
from flatshift.selection.errors import SelectionError
from flatshift.selection.transport.solver import sinkhorn_potentials

CASES = {
    "cpu build, no driver": (
        CudaStatus("2.13.0+cpu", None, False, None, 0),
        "torch 2.13.0+cpu is a build without CUDA, and no NVIDIA driver is here; take train.device: cpu",
    ),
    "cpu build, driver": (
        CudaStatus("2.13.0+cpu", None, True, None, 0),
        "torch 2.13.0+cpu is a build without CUDA, though an NVIDIA driver is here; pip install --force-reinstall "
        "'torch==2.13.0' without the index of CPU builds or take train.device: cpu",
    ),
    "no driver": (
        CudaStatus("2.13.0", "CUDA 13.0", False, "", 0, "Found no NVIDIA driver on your system"),
        "torch 2.13.0 is built for CUDA 13.0, but no NVIDIA driver is here; install one if there is a GPU or take "
        "train.device: cpu",
    ),
    "hidden": (
        CudaStatus("2.13.0", "CUDA 13.0", True, "", 0, "No CUDA GPUs are available"),
        "CUDA_VISIBLE_DEVICES='' hides every CUDA device; unset CUDA_VISIBLE_DEVICES, or name one in it or take "
        "train.device: cpu",
    ),
    "hidden by a negative number": (
        CudaStatus("2.13.0", "CUDA 13.0", True, "-1,0", 0),
        "CUDA_VISIBLE_DEVICES='-1,0' hides every CUDA device; unset",
    ),
    "old driver": (
        CudaStatus("2.13.0", "CUDA 13.0", True, None, 0, "The NVIDIA driver on your system is too old (found 11040)."),
        "torch 2.13.0 is built for CUDA 13.0 and sees no device though a driver is here (The NVIDIA driver on your "
        "system is too old (found 11040).); look at `nvidia-smi`",
    ),
    "a device that is named and not there": (
        CudaStatus("2.13.0", "CUDA 13.0", True, "7", 0, "No CUDA GPUs are available"),
        "sees no device though a driver is here, CUDA_VISIBLE_DEVICES=7 (No CUDA GPUs are available)",
    ),
    "ROCm without a device": (
        CudaStatus("2.13.0", "ROCm 6.4", False, None, 0),
        "built for ROCm 6.4 and sees no device",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_every_reason_has_its_sentence(case):
    found, words = CASES[case]
    told = missing_device_message("cuda", found)
    assert told.startswith("cuda: ") and words in told and "\n" not in told


def test_a_number_too_high_names_those_that_are_there():
    assert missing_device_message("cuda:3", CudaStatus("2.13.0", "CUDA 13.0", True, None, 1)) == (
        "cuda:3 is not there, cuda:0 is; take one that is, or cpu"
    )
    assert "cuda:0 to cuda:1 are" in missing_device_message("cuda:3", CudaStatus("2.13.0", "CUDA 13.0", True, None, 2))
    assert diagnose_cuda(CudaStatus("2.13.0", "CUDA 13.0", True, None, 1)) is None


def test_a_run_and_a_selection_say_it(monkeypatch):
    if torch.cuda.is_available():
        pytest.skip("a CUDA device is here")
    with pytest.raises(UserError, match=r"^train\.device: cuda: torch "):
        resolve_device("cuda")
    with pytest.raises(UserError, match=r"^train\.device: cuda:5: "):
        resolve_device("cuda:5")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(cuda_status, "has_driver", lambda: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(UserError, match="CUDA_VISIBLE_DEVICES='' hides every CUDA device"):
        resolve_device("cuda")
    rows = [[0.0, 1.0], [1.0, 0.0], [1.0, 1.0]]
    with pytest.raises(SelectionError, match=r"device 'cuda': CUDA_VISIBLE_DEVICES='' hides every CUDA device; use"):
        sinkhorn_potentials(rows, rows[:2], device="cuda")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(SelectionError, match="torch is built for CUDA and sees no device"):
        sinkhorn_potentials(rows, rows[:2], device="cuda")
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(SelectionError, match="is a build without CUDA"):
        sinkhorn_potentials(rows, rows[:2], device="cuda")


@pytest.mark.parametrize(
    ("case", "group"),
    [("hidden", "problems"), ("cpu build, driver", "notes"), ("no driver", "notes"), ("cpu build, no driver", None)],
)
def test_doctor_says_the_same(monkeypatch, case, group):
    if torch.cuda.is_available():
        pytest.skip("a CUDA device is here")
    found, _ = CASES[case]
    monkeypatch.setattr(cuda_status, "probe_cuda", lambda: found)
    groups: dict[str, list[dict[str, str]]] = {"problems": [], "notes": []}
    doctor_module.list_devices(groups["problems"], groups["notes"])
    reason = diagnose_cuda(found)
    assert reason is not None
    entry = {"what": reason.problem, "fix": reason.fix}
    assert [name for name, entries in groups.items() if entry in entries] == ([group] if group else [])


def test_a_driver_is_found_by_any_of_its_traces(monkeypatch, tmp_path):
    monkeypatch.setattr(cuda_status, "_PROC", tmp_path)
    monkeypatch.setattr(cuda_status, "_LIBRARY", "libno-such-driver.so.1")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not cuda_status.has_driver()
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o755)
    assert cuda_status.has_driver()
    tool.unlink()
    (tmp_path / "driver/nvidia").mkdir(parents=True)
    (tmp_path / "driver/nvidia/version").write_text("NVRM")
    assert cuda_status.has_driver()
    monkeypatch.setattr(cuda_status, "_PROC", tmp_path / "nothing")
    monkeypatch.setattr(cuda_status, "_LIBRARY", "libc.so.6")
    assert cuda_status.has_driver()
