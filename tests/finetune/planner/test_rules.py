"""Every rule about a mesh is broken by a recipe that breaks it, and by nothing that obeys it."""

from __future__ import annotations

import dataclasses

import pytest

from flatshift.finetune.config import Adapter, Mesh, Optimizer, Projector, Train
from flatshift.finetune.errors import UserError
from flatshift.finetune.planner.rules import REQUIRES, RULES, RuleSettings, check_settings
from flatshift.finetune.tasks import Classify, Completion, LanguageModel, MaskedLM, Preference, Regress, Seq2Seq
from flatshift.regularizers.config import BAR, GGPO, MGPO, SAM, BiLora, NEFTune, Plain

# (setting, other side) of a rule → what breaks it and nothing before it; what obeys it, as near to that as can be
CASES: dict[tuple[str, str], tuple[dict, dict]] = {
    ("optimizer.kind: adamw-8bit, paged-adamw, paged-adamw-8bit or gauss-newton", "one rank"): (
        {"kind": "adamw-8bit", "replicate": 2},
        {"kind": "adamw-8bit"},
    ),
    ("optimizer.kind: riemannian or lora-muon", "mesh.tp > 1"): (
        {"kind": "riemannian", "tp": 2},
        {"kind": "riemannian", "dp": 2},
    ),
    ("optimizer.kind: riemannian or lora-muon", "mesh.offload"): (
        {"kind": "lora-muon", "offload": True, "dp": 2, "device": "cuda"},
        {"kind": "lora-muon", "dp": 2, "pp": 2, "device": "cuda"},
    ),
    ("optimizer.kind: riemannian or lora-muon", "adapter.experts"): (
        {"kind": "lora-muon", "experts": 2},
        {"kind": "lora-muon", "replicate": 2},
    ),
    ("optimizer.kind: riemannian or lora-muon", "adapter.soft_tokens"): (
        {"kind": "riemannian", "soft_tokens": 4, "task": LanguageModel(pack=False)},
        {"kind": "riemannian", "adapters": "replicate", "dp": 2},
    ),
    ("train.batch_size", "a multiple of mesh.replicate × mesh.dp"): (
        {"replicate": 2, "dp": 2, "batch_size": 6},
        {"replicate": 2, "dp": 2, "batch_size": 8},
    ),
    ("mesh.ep", "mesh.dp, a multiple of it"): ({"ep": 3, "dp": 4}, {"ep": 2, "dp": 4}),
    ("mesh.ep > 1", "mesh.tp > 1"): ({"ep": 2, "dp": 2, "tp": 2}, {"ep": 2, "dp": 2, "cp": 2}),
    ("mesh.ep > 1", "train.quantization or mesh.offload"): (
        {"ep": 2, "dp": 2, "offload": True, "device": "cuda"},
        {"ep": 2, "dp": 2},
    ),
    ("mesh.zero: 1 or 2", "mesh.dp or mesh.cp > 1"): ({"zero": 1, "replicate": 2}, {"zero": 1, "dp": 2}),
    ("mesh.zero: 1 or 2", "mesh.adapters: replicate"): (
        {"zero": 2, "dp": 2, "adapters": "replicate"},
        {"zero": 3, "dp": 2, "adapters": "replicate"},
    ),
    ("mesh.zero: 2", "mesh.pp > 1"): ({"zero": 2, "dp": 2, "pp": 2}, {"zero": 1, "dp": 2, "pp": 2}),
    ("mesh.adapters: replicate", "mesh.dp or mesh.cp > 1"): (
        {"adapters": "replicate", "tp": 2},
        {"adapters": "shard", "tp": 2},
    ),
    ("mesh.reshard: false", "mesh.dp or mesh.cp > 1"): (
        {"reshard": False, "pp": 2},
        {"reshard": False, "pp": 2, "dp": 2},
    ),
    ("mesh.offload", "mesh.dp or mesh.cp > 1 and a CUDA device"): (
        {"offload": True, "dp": 2, "device": "cpu"},
        {"offload": True, "dp": 2, "device": "cuda"},
    ),
    ("mesh.offload", "mesh.zero: 3"): ({"offload": True, "dp": 2, "zero": 1}, {"offload": True, "dp": 2}),
    ("train.device: cuda:N", "one rank"): ({"device": "cuda:1", "tp": 2}, {"device": "cuda:1"}),
    ("mesh.sequence_parallel", "mesh.tp > 1"): (
        {"sequence_parallel": True, "dp": 2},
        {"sequence_parallel": True, "tp": 2},
    ),
    ("mesh.schedule, mesh.virtual, mesh.microbatches", "mesh.pp > 1"): (
        {"schedule": "gpipe", "dp": 2},
        {"schedule": "gpipe", "pp": 2},
    ),
    ("mesh.microbatches", "as many rows on a data rank"): (
        {"microbatches": 5, "pp": 2, "dp": 4, "batch_size": 16},
        {"microbatches": 4, "pp": 2, "dp": 4, "batch_size": 16},
    ),
    ("mesh.virtual > 1", "mesh.schedule: interleaved, zero-bubble or zbv"): (
        {"virtual": 2, "pp": 2},
        {"virtual": 2, "pp": 2, "schedule": "interleaved"},
    ),
    ("mesh.schedule: zbv", "mesh.virtual: 2"): (
        {"virtual": 3, "pp": 2, "schedule": "zbv"},
        {"virtual": 3, "pp": 2, "schedule": "zero-bubble"},
    ),
    ("mesh.cp > 1", "task.kind: classify or regress"): ({"cp": 2, "task": Classify()}, {"cp": 2}),
    ("mesh.cp > 1", "task.kind: masked-lm"): (
        {"cp": 2, "task": MaskedLM()},
        {"tp": 2, "pp": 2, "task": MaskedLM()},
    ),
    ("mesh.pp > 1", "task.kind: classify with multi or regress"): (
        {"pp": 2, "task": Regress()},
        {"pp": 2, "task": Classify()},
    ),
    ("mesh.cp > 1", "task.kind: seq2seq"): ({"cp": 2, "task": Seq2Seq()}, {"dp": 2, "task": Seq2Seq()}),
    ("train.adapter_precision: bf16", "train.precision: bf16"): (
        {"adapter_precision": "bf16"},
        {"adapter_precision": "bf16", "precision": "bf16"},
    ),
    ("train.adapter_precision: bf16", "regularizer.kind: lora-sam, asam, msam, bar, or mgpo with form: text"): (
        {"adapter_precision": "bf16", "precision": "bf16", "regularizer": MGPO()},
        {"adapter_precision": "bf16", "precision": "bf16", "regularizer": MGPO(form="code")},
    ),
    ("train.precision: fp16", "train.device: cpu"): (
        {"precision": "fp16", "device": "cpu"},
        {"precision": "fp16", "device": "cuda"},
    ),
    ("train.tf32", "train.precision: fp32"): ({"tf32": True}, {"tf32": True, "precision": "fp32"}),
    ("train.tf32", "a CUDA device"): (
        {"tf32": True, "precision": "fp32", "device": "cpu"},
        {"tf32": True, "precision": "fp32", "device": "cuda"},
    ),
    ("train.backbone_precision: bf16", "train.precision: fp32"): (
        {"backbone_precision": "bf16", "precision": "bf16"},
        {"backbone_precision": "bf16", "precision": "fp32"},
    ),
    ("train.backbone_precision: bf16", "one rank, and no train.quantization"): (
        {"backbone_precision": "bf16", "precision": "fp32", "dp": 2},
        {"precision": "fp32", "dp": 2},
    ),
    ("adapter.init other than default", "one rank"): ({"init": "pissa", "replicate": 2}, {"init": "pissa"}),
    ("adapter.init: loftq", "train.quantization: nf4 or nf4-double"): (
        {"init": "loftq", "quantization": "int8"},
        {"init": "loftq", "quantization": "nf4-double"},
    ),
    ("adapter.under", "one rank"): ({"under": "runs/first", "tp": 2}, {"under": "runs/first"}),
    ("adapter.bias, adapter.train_whole", "one rank"): ({"bias": "all", "dp": 2}, {"experts": 2, "dp": 2}),
    **{
        (f"mesh.{axis} > 1", "task.kind: preference"): (
            {axis: 2, "task": Preference()},
            {"dp": 2, "tp": 2, "task": Preference()},
        )
        for axis in ("pp", "cp")
    },
    (
        "task.loss: dpo, ipo or kto",
        "adapter.init that changes frozen weights (all but default, orthogonal and eva), adapter.under and "
        "adapter.bias",
    ): ({"init": "pissa", "task": Preference()}, {"init": "pissa", "task": Preference(loss="simpo")}),
    ("task.loss: kto", "two examples per step"): (
        {"batch_size": 1, "task": Preference(loss="kto")},
        {"batch_size": 1, "accumulate": 2, "task": Preference(loss="kto")},
    ),
    ("adapter.soft_tokens", "one rank"): (
        {"soft_tokens": 4, "dp": 2, "task": LanguageModel(pack=False)},
        {"soft_tokens": 4, "task": LanguageModel(pack=False)},
    ),
    ("adapter.soft_tokens", "task.pack: false"): (
        {"soft_tokens": 4},
        {"soft_tokens": 4, "task": LanguageModel(pack=False)},
    ),
    ("adapter.soft_tokens", "task.kind: language-model or completion"): (
        {"soft_tokens": 4, "task": Classify()},
        {"soft_tokens": 4, "task": Completion(pack=False)},
    ),
    ("adapter.soft_tokens", "task.score: generate"): (
        {"soft_tokens": 4, "task": Completion(pack=False, score="generate")},
        {"soft_tokens": 4, "task": Completion(pack=False, score="rank")},
    ),
    ("adapter.soft_tokens", "optimizer.lora_plus"): (
        {"soft_tokens": 4, "lora_plus": 16.0, "task": LanguageModel(pack=False)},
        {"lora_plus": 16.0},
    ),
    ("adapter.projector", "train.quantization"): (
        {"soft_tokens": 1, "projector": Projector(), "quantization": "nf4", "task": LanguageModel(pack=False)},
        {"soft_tokens": 1, "projector": Projector(), "task": LanguageModel(pack=False)},
    ),
    ("train.quantization: int8", "mesh.tp > 1 or mesh.pp > 1"): (
        {"quantization": "int8", "pp": 2},
        {"quantization": "nf4", "tp": 2, "pp": 2},
    ),
    ("train.quantization: nf4-double", "mesh.tp > 1"): (
        {"quantization": "nf4-double", "tp": 2},
        {"quantization": "nf4-double", "pp": 2},
    ),
    ("train.quantization: int8", "sharded weights (mesh.dp or mesh.cp > 1 at mesh.zero: 3)"): (
        {"quantization": "int8", "dp": 2},
        {"quantization": "int8", "dp": 2, "zero": 2},
    ),
    ("train.quantization", "adapter.init: pissa, olora, corda or lora-ga, and adapter.under"): (
        {"quantization": "nf4", "init": "pissa"},
        {"quantization": "nf4", "init": "default"},
    ),
    ("train.quantization", "mesh.offload"): (
        {"quantization": "nf4", "offload": True, "dp": 2, "device": "cuda"},
        {"quantization": "nf4", "dp": 2, "device": "cuda"},
    ),
    ("mesh.offload", "regularizer.kind: plain"): (
        {"offload": True, "dp": 2, "device": "cuda", "regularizer": GGPO()},
        {"dp": 2, "device": "cuda", "regularizer": GGPO()},
    ),
    ("regularizer.kind: sam", "mesh.tp > 1 or mesh.pp > 1"): (
        {"regularizer": SAM(), "tp": 2},
        {"regularizer": SAM(), "replicate": 2},
    ),
    ("regularizer.kind: sam", "sharded weights (mesh.dp or mesh.cp > 1 at mesh.zero: 3)"): (
        {"regularizer": SAM(), "cp": 2},
        {"regularizer": SAM(), "cp": 2, "zero": 2},
    ),
    ("regularizer.kind: bi-lora", "mesh.tp > 1 or mesh.pp > 1"): (
        {"regularizer": BiLora(), "pp": 2, "dp": 2},
        {"regularizer": BiLora(), "dp": 2},
    ),
    ("regularizer.kind: neftune", "mesh.pp > 1 or mesh.cp > 1"): (
        {"regularizer": NEFTune(), "cp": 2},
        {"regularizer": NEFTune(), "tp": 2},
    ),
    ("task.num_beams > 1", "mesh.pp > 1"): (
        {"task": Seq2Seq(score="generate", num_beams=4), "pp": 2},
        {"task": Seq2Seq(score="generate", num_beams=4), "dp": 2},
    ),
    ("regularizer.kind: bar", "optimizer.fixed: [a]"): (
        {"regularizer": BAR(), "fixed": ("a",)},
        {"regularizer": BAR()},
    ),
    ("regularizer.scope: microbatch or sample", "mesh.pp > 1"): (
        {"regularizer": GGPO(scope="sample"), "pp": 2},
        {"regularizer": GGPO(), "pp": 2},
    ),
}


def settings(changes: dict) -> RuleSettings:
    """A recipe's parts with some fields changed."""
    left = dict(changes)
    task = left.pop("task", LanguageModel())
    parts = {}
    regularizer = left.pop("regularizer", Plain())
    known = {"mesh": Mesh(), "train": Train(), "adapter": Adapter(), "optimizer": Optimizer()}
    for name, component in known.items():
        own = {field.name for field in dataclasses.fields(component)} & left.keys()
        parts[name] = dataclasses.replace(component, **{key: left.pop(key) for key in own})
    assert not left
    return RuleSettings(task=task, regularizer=regularizer, **parts)


def test_every_rule_has_a_case() -> None:
    keys = [(rule.setting, rule.other) for rule in RULES]
    assert len(set(keys)) == len(keys)
    assert set(CASES) == set(keys)


@pytest.mark.parametrize("key", CASES, ids=lambda key: " / ".join(key))
def test_a_rule_refuses_what_breaks_it(key: tuple[str, str]) -> None:
    breaking, obeying = CASES[key]
    (rule,) = [rule for rule in RULES if (rule.setting, rule.other) == key]
    with pytest.raises(UserError) as caught:
        check_settings(settings(breaking))
    verb = "needs" if rule.kind == REQUIRES else "does not go with"
    assert str(caught.value) == f"{rule.setting} {verb} {rule.other}: {rule.why}; {rule.fix}"
    check_settings(settings(obeying))


def test_the_defaults_break_no_rule() -> None:
    check_settings(settings({}))
