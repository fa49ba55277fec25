"""A finished run that a test has changed, with a record of what it holds now."""

from __future__ import annotations

from pathlib import Path

from flatshift.experiments.workflows.run_parts import compute_run_checksums
from flatshift.finetune.atomic import write_json
from flatshift.finetune.digests import DONE, FILES


def record_anew(run: Path) -> None:
    """Write the done.json that `run` would have, had it ended with the files that lie in it."""
    write_json(run / DONE, {FILES: compute_run_checksums(run)})
