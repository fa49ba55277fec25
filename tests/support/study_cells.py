"""Cheap stand-ins for the cells of a study, in a process that a worker can spawn."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.studies.selection_quality.cells import write_result


@dataclass(frozen=True)
class StandIn:
    """A cell that is `ok`, `slow`, or ends its worker (`die`, `die once`)."""

    key: str
    behaves: str
    kind: str = "trial"

    @property
    def label(self) -> str:
        return f"{self.behaves} {self.key}"


def run_stand_in(directory: Path, cell: StandIn, threads: int, *, died: str | None = None) -> None:
    """A `RunCell` that does what its cell says."""

    def measure() -> dict:
        seen = directory / f"seen-{cell.key}"
        with seen.open("a") as file:
            file.write("x")
        if cell.behaves == "die" or (cell.behaves == "die once" and len(seen.read_text()) == 1):
            os.kill(os.getpid(), signal.SIGKILL)
        if cell.behaves == "slow":
            time.sleep(0.5)
        return {"figure": len(cell.behaves)}

    write_result(directory, cell.key, {"kind": cell.kind}, measure, {"figure": None}, died=died)
