"""Sweeps: a grid over dotted recipe keys and seeds, resumable and idempotent, failures kept as results."""

from experiments.studies.sweep.axes import parse_grid
from experiments.studies.sweep.command import sweep
from experiments.studies.sweep.plan import plan_cells
from experiments.studies.sweep.table import write_table

__all__ = ["parse_grid", "plan_cells", "sweep", "write_table"]
