"""Clusters on this machine: Ray's of two nodes, and a stand-in for Slurm."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import stand_in_slurm

ROOT = Path(__file__).resolve().parents[4]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Address of a cluster of two nodes of one CPU each."""
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("PYTHONPATH", str(ROOT))
        node: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 80 << 20, "memory": 4 << 30}
        cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
        cluster.add_node(**node)
        yield cluster.address
        cluster.shutdown()


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder of a stand-in for Slurm whose commands are on the path."""
    pytest.importorskip("submitit")
    folder = tmp_path / "slurm"
    folder.mkdir()
    for name, value in stand_in_slurm.install(folder).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return folder
