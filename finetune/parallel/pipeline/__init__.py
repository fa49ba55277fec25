"""Pipeline parallelism: the blocks of a model over several ranks, torch's schedules, HF's own forward on every stage.

plan.py       schedules: which rank has which stages, how many pieces, the bubble
absent.py     what stands where a stage lacks a module
cut.py        cost, split, check, and the cut of a (meta) model into one stage
pieces.py     micro-batches → pieces of one shape
stage.py      one stage as the schedules call it
passing.py    forward passes without gradients
runner.py     one update over the stages
standin.py    what evaluation calls like the whole model
"""

from .cut import OtherStageBlock, check_pipeline, cut, cut_parts, split, stage_costs, tied_sources
from .pipeline_plan import bubble, schedules
from .runner import PipelineRunner
from .stage import StageModules

__all__ = [
    "OtherStageBlock",
    "PipelineRunner",
    "StageModules",
    "bubble",
    "check_pipeline",
    "cut",
    "cut_parts",
    "schedules",
    "split",
    "stage_costs",
    "tied_sources",
]
