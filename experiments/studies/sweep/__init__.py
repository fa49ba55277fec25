"""Sweeps: a grid over dotted recipe keys and seeds, resumable and idempotent, with failures kept as results."""

from flatshift.experiments.studies.sweep.axes import parse_grid
from flatshift.experiments.studies.sweep.command import sweep
from flatshift.experiments.studies.sweep.table import write_table

__all__ = ["parse_grid", "sweep", "write_table"]
