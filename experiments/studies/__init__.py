"""Studies: cells trained as by `flatshift train`, one queue, one kind of result; sweeps and comparisons are plans."""

from flatshift.experiments.studies.cell import Cell, Result, cell_of, finish_cell, run_cell
from flatshift.experiments.studies.queue import run_cells, start_worker

__all__ = ["Cell", "Result", "cell_of", "finish_cell", "run_cell", "run_cells", "start_worker"]
