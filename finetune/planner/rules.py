"""Compatibility rules between recipe settings and meshes: one table, enforced here and printed in the docs.

A rule is checked before a process is spawned and before a weight is read; constraints of the model itself (heads that
divide, plans, stages) are checked on its skeleton. Imports nothing heavy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from flatshift.regularizers.config import (
    ASAM,
    BAR,
    GGPO,
    MGPO,
    MSAM,
    SAM,
    BiLora,
    LoraSAM,
    NEFTune,
    Plain,
    RegularizerConfig,
)

from ..config import FACTOR_OPTIMIZERS, Adapter, Mesh, Optimizer, Train
from ..errors import UserError
from ..tasks import list_unsupported_axes

if TYPE_CHECKING:
    from ..tasks import Task


@dataclass(frozen=True)
class RuleSettings:
    """Parts of a recipe that the rules depend on."""

    mesh: Mesh
    train: Train
    adapter: Adapter
    task: Task
    optimizer: Optimizer = field(default_factory=Optimizer)
    regularizer: RegularizerConfig = field(default_factory=Plain)

    @classmethod
    def of(cls, recipe: Any) -> RuleSettings:
        """Extract from a recipe, whose blocks have these names."""
        return cls(*(getattr(recipe, each.name) for each in fields(cls)))


@dataclass(frozen=True)
class CompatibilityRule:
    """One rule: `setting` requires `other` or is incompatible with it; `broken` tests for a violation."""

    setting: str
    kind: str
    """Relation to `other`: "requires" or "incompatible with"."""
    other: str
    why: str
    fix: str
    broken: Callable[[RuleSettings], bool]


_BESIDE_WEIGHTS = ("default", "orthogonal", "eva")  # values of `adapter.init` that leave the frozen weights unchanged
REQUIRES, INCOMPATIBLE = "requires", "incompatible with"
_Row = tuple[str, str, str, str, str, Callable[[RuleSettings], bool]]
"""Fields of a `CompatibilityRule`."""


def _task_rules() -> Iterator[_Row]:
    """Yield the rules of tasks about mesh axes: one for each axis and reason."""
    for axis, why, kinds in list_unsupported_axes():

        def broken(s: RuleSettings, axis: str = axis, why: str = why) -> bool:
            return getattr(s.mesh, axis) > 1 and s.task.no_axes.get(axis) == why

        yield f"mesh.{axis} > 1", INCOMPATIBLE, f"task.kind: {kinds}", why, "use mesh.dp", broken


_ROWS: tuple[_Row, ...] = (
    ("train.batch_size", REQUIRES, "a multiple of mesh.replicate × mesh.dp",
     "every data rank takes as many rows of a micro-batch", "round it up",
     lambda s: s.train.batch_size % (s.mesh.replicate * s.mesh.dp) != 0),
    ("mesh.ep", REQUIRES, "mesh.dp, a multiple of it", "the ranks that share experts are some of dp's",
     "set mesh.dp to a multiple of mesh.ep", lambda s: s.mesh.dp % s.mesh.ep != 0),
    ("mesh.ep > 1", INCOMPATIBLE, "mesh.tp > 1", "experts are divided along one of the two",
     "leave one of them at 1", lambda s: s.mesh.ep > 1 and s.mesh.tp > 1),
    ("mesh.ep > 1", INCOMPATIBLE, "train.quantization or mesh.offload",
     "the exchange of tokens has been compared with one process without them",
     "leave those out, or mesh.ep at 1", lambda s: s.mesh.ep > 1
     and (s.train.quantization is not None or s.mesh.offload)),
    ("mesh.zero: 1 or 2", REQUIRES, "mesh.dp or mesh.cp > 1", "there is nothing to shard on one rank",
     "leave mesh.zero at 3 or set mesh.dp", lambda s: s.mesh.zero != 3 and s.mesh.dp * s.mesh.cp == 1),
    ("mesh.zero: 1 or 2", INCOMPATIBLE, "mesh.adapters: replicate", "these stages shard nothing but adapters",
     "set mesh.adapters: shard", lambda s: s.mesh.zero != 3 and s.mesh.adapters == "replicate"),
    ("mesh.zero: 2", INCOMPATIBLE, "mesh.pp > 1", "a pipeline reduces gradients once a step",
     "set mesh.zero: 1", lambda s: s.mesh.zero == 2 and s.mesh.pp > 1),
    ("mesh.adapters: replicate", REQUIRES, "mesh.dp or mesh.cp > 1", "without shards adapters are whole anyway",
     "leave it at shard", lambda s: s.mesh.adapters == "replicate" and s.mesh.dp * s.mesh.cp == 1),
    ("mesh.reshard: false", REQUIRES, "mesh.dp or mesh.cp > 1", "nothing is gathered on one rank",
     "leave it at true", lambda s: s.mesh.reshard is False and s.mesh.dp * s.mesh.cp == 1),
    ("mesh.offload", REQUIRES, "mesh.dp or mesh.cp > 1 and a CUDA device", "it moves FSDP2's shards to host memory",
     "leave it off", lambda s: s.mesh.offload and (s.mesh.dp * s.mesh.cp == 1 or s.train.device == "cpu")),
    ("mesh.offload", REQUIRES, "mesh.zero: 3", "the other stages shard no weights", "set mesh.zero: 3",
     lambda s: s.mesh.offload and s.mesh.zero != 3),
    ("train.device: cuda:N", REQUIRES, "one rank", "each rank takes the device of its own number",
     "set train.device: cuda", lambda s: s.train.device.startswith("cuda:") and s.mesh.size > 1),
    ("mesh.sequence_parallel", REQUIRES, "mesh.tp > 1", "it splits tokens among tensor-parallel ranks",
     "leave it off or set mesh.tp", lambda s: s.mesh.sequence_parallel and s.mesh.tp == 1),
    ("mesh.schedule, mesh.virtual, mesh.microbatches", REQUIRES, "mesh.pp > 1", "they describe a pipeline",
     "leave them out or set mesh.pp",
     lambda s: s.mesh.pp == 1
     and (s.mesh.schedule != "1f1b" or s.mesh.virtual is not None or s.mesh.microbatches is not None)),
    ("mesh.microbatches", REQUIRES, "as many rows on a data rank", "a piece of a micro-batch holds at least one row",
     "lower it or raise train.batch_size",
     lambda s: (s.mesh.microbatches or 1) > max(s.train.batch_size // (s.mesh.replicate * s.mesh.dp), 1)),
    ("mesh.virtual > 1", REQUIRES, "mesh.schedule: interleaved, zero-bubble or zbv",
     "gpipe and 1f1b hold one stage a rank", "set mesh.schedule: interleaved",
     lambda s: (s.mesh.virtual or 1) > 1 and s.mesh.schedule in ("gpipe", "1f1b")),
    ("mesh.schedule: zbv", REQUIRES, "mesh.virtual: 2", "its stages form a V", "leave mesh.virtual out",
     lambda s: s.mesh.schedule == "zbv" and s.mesh.virtual not in (None, 2)),
    *_task_rules(),
    ("adapter.init other than default", REQUIRES, "one rank", "it decomposes whole weights or inputs",
     "set adapter.init: default", lambda s: s.adapter.init != "default" and s.mesh.size > 1),
    ("adapter.under", REQUIRES, "one rank", "the adapter beneath is folded into whole weights",
     "merge it into the backbone first", lambda s: s.adapter.under is not None and s.mesh.size > 1),
    ("task.loss: dpo, ipo or kto", INCOMPATIBLE, "adapter.init that changes frozen weights (all but default, "
     "orthogonal and eva), adapter.under and adapter.bias",
     "the reference is the backbone as it came, with the adapter off", "leave those out, or merge into the backbone",
     lambda s: s.task.has_reference
     and (s.adapter.init not in _BESIDE_WEIGHTS or (s.adapter.under, s.adapter.bias) != (None, None))),
    ("task.loss: kto", REQUIRES, "two examples per step", "its drift is seen in answers to other prompts",
     "raise train.batch_size or train.accumulate",
     lambda s: s.task.is_unpaired and s.train.batch_size * s.train.accumulate < 2),
    ("adapter.soft_tokens", REQUIRES, "one rank", "they are before the tokens of every row", "train LoRA on a mesh",
     lambda s: s.adapter.soft_tokens is not None and s.mesh.size > 1),
    ("adapter.soft_tokens", REQUIRES, "task.pack: false", "samples in one row would share them",
     "set task.pack: false", lambda s: s.adapter.soft_tokens is not None and s.task.pack),
    ("adapter.soft_tokens", REQUIRES, "task.kind: language-model or completion",
     "they come before a text that a decoder continues", "train LoRA for other tasks",
     lambda s: s.adapter.soft_tokens is not None and not s.task.traits.takes_soft_tokens),
    ("adapter.soft_tokens", INCOMPATIBLE, "task.score: generate", "rows behind them are evaluated by likelihood",
     "take perplexity or rank",
     lambda s: s.adapter.soft_tokens is not None and s.task.score == "generate"),
    ("adapter.soft_tokens", INCOMPATIBLE, "optimizer.lora_plus", "there are no factors to speed up", "leave it out",
     lambda s: s.adapter.soft_tokens is not None and s.optimizer.lora_plus is not None),
    ("adapter.projector", INCOMPATIBLE, "train.quantization", "features before packed weights have not been tested",
     "leave one of them out", lambda s: s.adapter.projector is not None and s.train.quantization is not None),
    ("adapter.bias, adapter.train_whole", REQUIRES, "one rank", "only the factors of adapters are cut",
     "leave them out",
     lambda s: s.mesh.size > 1 and (s.adapter.bias, s.adapter.train_whole) != (None, None)),
    ("train.adapter_precision: bf16", REQUIRES, "train.precision: bf16", "a float32 layer cannot take bf16 factors",
     "set train.precision: bf16 (auto may come to fp32), or leave train.adapter_precision out",
     lambda s: s.train.adapter_precision == "bf16" and s.train.precision != "bf16"),
    ("train.precision: fp16", INCOMPATIBLE, "train.device: cpu", "a CPU has no fast fp16 products",
     "take auto, fp32 or bf16", lambda s: s.train.precision == "fp16" and s.train.device == "cpu"),
    ("train.tf32", REQUIRES, "train.precision: fp32", "it rounds the inputs of float32 products",
     "set train.precision: fp32, or leave train.tf32 off", lambda s: s.train.tf32 and s.train.precision != "fp32"),
    ("train.tf32", REQUIRES, "a CUDA device", "no other has such products", "leave it off",
     lambda s: s.train.tf32 and s.train.device == "cpu"),
    ("train.backbone_precision: bf16", REQUIRES, "train.precision: fp32",
     "elsewhere weights are kept in the narrow type anyway", "set train.precision: fp32, or leave it at auto",
     lambda s: s.train.backbone_precision == "bf16" and s.train.precision != "fp32"),
    ("train.backbone_precision: bf16", REQUIRES, "one rank, and no train.quantization",
     "shards and packed weights have layers of their own", "use mesh.dp, which divides the weights, or leave it out",
     lambda s: s.train.backbone_precision == "bf16" and (s.mesh.size > 1 or s.train.quantization is not None)),
    ("train.quantization: int8", INCOMPATIBLE, "mesh.tp > 1 or mesh.pp > 1", "each rank has all 8-bit layers",
     "set train.quantization: nf4, or use mesh.replicate",
     lambda s: s.train.quantization == "int8" and s.mesh.tp * s.mesh.pp > 1),
    ("train.quantization: nf4-double", INCOMPATIBLE, "mesh.tp > 1", "blocks of 256 scales cross the borders of ranks",
     "set train.quantization: nf4", lambda s: s.train.quantization == "nf4-double" and s.mesh.tp > 1),
    ("train.quantization: int8", INCOMPATIBLE, "sharded weights (mesh.dp or mesh.cp > 1 at mesh.zero: 3)",
     "bitsandbytes computes with a whole copy of its own", "set train.quantization: nf4, mesh.zero: 1, or use "
     "mesh.replicate",
     lambda s: s.train.quantization == "int8" and s.mesh.dp * s.mesh.cp > 1 and s.mesh.zero == 3),
    ("train.quantization", INCOMPATIBLE, "adapter.init: pissa, olora, corda or lora-ga, and adapter.under",
     "packed weights cannot be changed", "leave adapter.init at default",
     lambda s: s.train.quantization is not None
     and (s.adapter.init in ("pissa", "olora", "corda", "lora-ga") or s.adapter.under is not None)),
    ("adapter.init: loftq", REQUIRES, "train.quantization: nf4 or nf4-double",
     "it makes up for what 4-bit weights lose", "set train.quantization: nf4",
     lambda s: s.adapter.init == "loftq" and s.train.quantization not in ("nf4", "nf4-double")),
    ("optimizer.kind: adamw-8bit, paged-adamw, paged-adamw-8bit or gauss-newton", REQUIRES, "one rank",
     "whole tensors are needed in one place", "set optimizer.kind: adamw",
     lambda s: s.optimizer.kind not in ("adamw", *FACTOR_OPTIMIZERS) and s.mesh.size > 1),
    ("optimizer.kind: riemannian or lora-muon", INCOMPATIBLE, "mesh.tp > 1",
     "a step of one factor needs all of the other, and tp divides them", "use mesh.dp, mesh.replicate or mesh.pp",
     lambda s: s.optimizer.kind in FACTOR_OPTIMIZERS and s.mesh.tp > 1),
    ("optimizer.kind: riemannian or lora-muon", INCOMPATIBLE, "mesh.offload",
     "the step gathers factors on the device", "leave it off, or set optimizer.kind: adamw",
     lambda s: s.optimizer.kind in FACTOR_OPTIMIZERS and s.mesh.offload),
    ("optimizer.kind: riemannian or lora-muon", INCOMPATIBLE, "adapter.experts",
     "one tensor holds the factors of many experts", "set optimizer.kind: adamw",
     lambda s: s.optimizer.kind in FACTOR_OPTIMIZERS and s.adapter.experts is not None),
    ("optimizer.kind: riemannian or lora-muon", INCOMPATIBLE, "adapter.soft_tokens", "there are no factors",
     "set optimizer.kind: adamw",
     lambda s: s.optimizer.kind in FACTOR_OPTIMIZERS and s.adapter.soft_tokens is not None),
    ("train.quantization", INCOMPATIBLE, "mesh.offload", "the scales of packed weights stay on the device",
     "leave it off", lambda s: s.train.quantization is not None and s.mesh.offload),
    ("mesh.offload", REQUIRES, "regularizer.kind: plain",
     "the others compute on the device with adapters that are in host memory",
     "leave it off, or set regularizer.kind: plain",
     lambda s: s.mesh.offload and not isinstance(s.regularizer, Plain)),
    ("regularizer.kind: sam", INCOMPATIBLE, "mesh.tp > 1 or mesh.pp > 1", "it needs whole layers in every process",
     "use mesh.replicate, or regularizer.kind: lora-sam",
     lambda s: isinstance(s.regularizer, SAM) and s.mesh.tp * s.mesh.pp > 1),
    ("regularizer.kind: sam", INCOMPATIBLE, "sharded weights (mesh.dp or mesh.cp > 1 at mesh.zero: 3)",
     "each process holds a gradient as large as the layers, which sharding is to avoid",
     "use mesh.replicate, or regularizer.kind: lora-sam",
     lambda s: isinstance(s.regularizer, SAM) and s.mesh.dp * s.mesh.cp > 1 and s.mesh.zero == 3),
    ("regularizer.kind: bi-lora", INCOMPATIBLE, "mesh.tp > 1 or mesh.pp > 1",
     "its second adapter needs whole layers in every process", "use mesh.dp or mesh.replicate",
     lambda s: isinstance(s.regularizer, BiLora) and s.mesh.tp * s.mesh.pp > 1),
    ("regularizer.kind: neftune", INCOMPATIBLE, "mesh.pp > 1 or mesh.cp > 1",
     "its noise is drawn for whole rows of a micro-batch", "use mesh.dp, mesh.replicate or mesh.tp",
     lambda s: isinstance(s.regularizer, NEFTune) and s.mesh.pp * s.mesh.cp > 1),
    ("task.num_beams > 1", INCOMPATIBLE, "mesh.pp > 1", "a pipeline decodes greedily",
     "leave it out, and evaluate with beams in one process", lambda s: s.mesh.pp > 1 and (s.task.num_beams or 1) > 1),
    ("regularizer.kind: bar", INCOMPATIBLE, "optimizer.fixed: [a]", "it scales both factors", "leave one of them out",
     lambda s: isinstance(s.regularizer, BAR) and "a" in (s.optimizer.fixed or ())),
    ("train.adapter_precision: bf16", INCOMPATIBLE,
     "regularizer.kind: lora-sam, asam, msam, bar, or mgpo with form: text",
     "their small steps of the factors are rounded away", "leave train.adapter_precision out",
     lambda s: s.train.adapter_precision == "bf16" and (isinstance(s.regularizer, (LoraSAM, ASAM, MSAM, BAR))
     or (isinstance(s.regularizer, MGPO) and s.regularizer.form == "text"))),
    ("regularizer.scope: microbatch or sample", INCOMPATIBLE, "mesh.pp > 1",
     "a pipeline has several micro-batches in flight at once", "set regularizer.scope: step",
     lambda s: isinstance(s.regularizer, GGPO) and s.regularizer.scope != "step" and s.mesh.pp > 1),
)  # fmt: skip
RULES = tuple(CompatibilityRule(*row) for row in _ROWS)


def broken_rule(*settings: RuleSettings) -> CompatibilityRule | None:
    """Return the first rule that all of `settings` break; None if there is none."""
    return next((rule for rule in RULES if all(map(rule.broken, settings))), None)


def check_settings(*settings: RuleSettings) -> None:
    """Raise UserError for the first rule that all of `settings` break, with what, why and the nearest valid setting."""
    rule = broken_rule(*settings)
    if rule is not None:
        verb = "needs" if rule.kind == REQUIRES else "does not go with"
        raise UserError(f"{rule.setting} {verb} {rule.other}: {rule.why}; {rule.fix}")
