"""Sweeps: a grid over dotted recipe keys and seeds, resumable and idempotent, failures kept as results."""

from experiments.sweep.axes import parse_grid
from experiments.sweep.cell import Cell, Outcome, cell_of, finish_cell, run_cell
from experiments.sweep.command import sweep
from experiments.sweep.plan import plan_cells
from experiments.sweep.queue import run_cells
from experiments.sweep.table import write_table
from experiments.sweep.worker import start_worker

__all__ = [
    "Cell",
    "Outcome",
    "cell_of",
    "finish_cell",
    "parse_grid",
    "plan_cells",
    "run_cell",
    "run_cells",
    "start_worker",
    "sweep",
    "write_table",
]
