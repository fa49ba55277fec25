"""Pipeline parallelism: the blocks of a model over several ranks, torch's schedules, HF's own forward on every stage.

cut.py               cost, split, checks, and the cut of a (meta) model into one stage
stage.py             placeholders for modules of other stages, and one stage as the schedules call it
stage_transport.py   forward passes without gradients, and the stand-in that evaluation calls
runner.py            micro-batches → pieces of one shape, and one step over the stages
"""

from ..pipeline_plan import bubble_fraction, schedule_descriptions
from .cut import build_rank_stages, check_pipeline, cut_to_stage, split_blocks, stage_costs, tied_source_names
from .runner import PipelineRunner
from .stage import OtherStageBlock, StageModules

__all__ = [
    "OtherStageBlock",
    "PipelineRunner",
    "StageModules",
    "bubble_fraction",
    "build_rank_stages",
    "check_pipeline",
    "cut_to_stage",
    "schedule_descriptions",
    "split_blocks",
    "stage_costs",
    "tied_source_names",
]
