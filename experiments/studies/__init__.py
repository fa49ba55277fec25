"""Studies: cells trained as by `flatshift train`, one queue, one kind of result; sweeps and comparisons are plans."""

from flatshift.experiments.studies.cell import Cell, CellResult, finish_cell, make_cell, run_cell
from flatshift.experiments.studies.executors.local import init_worker
from flatshift.experiments.studies.queue import run_cells

__all__ = ["Cell", "CellResult", "finish_cell", "init_worker", "make_cell", "run_cell", "run_cells"]
