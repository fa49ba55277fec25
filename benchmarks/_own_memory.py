"""Our own memory beside the plan's: updates of random backbones on this machine's cores, fresh processes for each.

Two measures of each configuration: what tensors take at the worst moment of an update, as the allocator tells the
profiler, on the rank that has most; and how much the process grew in resident memory by the kernel's own high-water
mark, mapped weight files included, since before the backbone was there. The second also holds what the C library kept
of what was given back to it, and what oneDNN compiled: an interval, which other models in other processes tell
(`flatshift.finetune.planner.calibration.measure_overhead`).
"""

from __future__ import annotations

import dataclasses
import gc
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks._harness import peak_bytes
from benchmarks._ranks import on_ranks
from flatshift.finetune.compute.memory import measure_peaks, process_bytes

HERE = "benchmarks._own_memory"


@dataclasses.dataclass(frozen=True)
class Case:
    """A configuration as a recipe would have it."""

    kind: str
    """transformers' model type."""
    hidden: int
    inner: int
    blocks: int
    heads: int
    groups: int
    vocabulary: int
    rows: int
    """Of a micro-batch of all data ranks together."""
    tokens: int
    rank: int = 8
    precision: str = "fp32"
    checkpointing: str = "none"
    mesh: dict[str, Any] = dataclasses.field(default_factory=dict)
    tied: bool = False
    more: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Further settings of `train`."""

    @property
    def ranks(self) -> int:
        """Processes."""
        found = 1
        for axis in ("replicate", "dp", "tp", "pp", "cp"):
            found *= self.mesh.get(axis, 1)
        return found

    def __str__(self) -> str:
        mesh = " × ".join(f"{axis} {width}" for axis, width in self.mesh.items()) or "one process"
        return (
            f"{self.kind} {self.blocks} × {self.hidden}, {self.rows} × {self.tokens} tokens, r {self.rank}, "
            f"{self.precision}, recompute {self.checkpointing}, {mesh}"
        )


def _llama(**changed: Any) -> Case:
    plain = Case("llama", 320, 896, 8, heads=10, groups=2, vocabulary=10000, rows=2, tokens=288)
    return dataclasses.replace(plain, **changed)


def _qwen2(**changed: Any) -> Case:
    plain = Case("qwen2", 384, 1920, 5, heads=6, groups=2, vocabulary=20000, rows=2, tokens=320, tied=True)
    return dataclasses.replace(plain, **changed)


def _qwen3(**changed: Any) -> Case:
    plain = Case("qwen3", 512, 1408, 4, heads=8, groups=2, vocabulary=9000, rows=3, tokens=224)
    return dataclasses.replace(plain, **changed)


CASES = (
    _llama(),
    _llama(precision="bf16", checkpointing="full", rows=4),
    _llama(precision="bf16", rank=64),
    _qwen2(precision="bf16"),
    _qwen2(checkpointing="full", more={"accumulate": 2}),
    _qwen3(),
    _qwen3(precision="bf16", checkpointing="selective"),
    _llama(mesh={"dp": 2}),
    _llama(mesh={"dp": 2}, precision="bf16", checkpointing="full", rows=4),
    _llama(mesh={"dp": 2, "zero": 1}),
    _llama(mesh={"tp": 2}),
)
"""Never used to find a formula: those were found on a Llama of 4 × 512 with 8,192 words in one process, and that
gradients come while activations go on other sizes than these."""
_UPDATES = 4
"""Until what the process holds grows no more: the first also makes optimizer state."""
_WARM = dataclasses.replace(_llama(), hidden=64, inner=128, blocks=2, heads=2, groups=2, vocabulary=256, tokens=32)


def measured(ranks: int) -> list[tuple[Case, int, dict[str, float]]]:
    """Every case of so many ranks with the plan's bytes and those of the rank that has most."""
    found = []
    for case in (case for case in CASES if case.ranks == ranks):
        with tempfile.TemporaryDirectory() as folder:
            save(dataclasses.replace(_WARM, mesh=case.mesh), f"{folder}/tiny")
            save(case, f"{folder}/own")
            told = on_ranks(f"{HERE}:held", ranks, folder=folder, case=dataclasses.asdict(case), wall_cap_s=3600.0)
            most = {name: max(rank[name] for rank in told) for name in told[0]}
            found.append((case, predicted(f"{folder}/own", case), most))
    return found


def save(case: Case, folder: str | Path) -> None:
    """Random weights of the case's backbone, and a config that says so."""
    import torch
    import transformers

    fields = {
        "hidden_size": case.hidden,
        "intermediate_size": case.inner,
        "num_hidden_layers": case.blocks,
        "num_attention_heads": case.heads,
        "num_key_value_heads": case.groups,
        "vocab_size": case.vocabulary,
        "tie_word_embeddings": case.tied,
        "max_position_embeddings": 4096,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if case.kind == "qwen3":
        fields["head_dim"] = case.hidden // case.heads
    config = transformers.CONFIG_MAPPING[case.kind].from_dict(fields)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def settings(case: Case) -> tuple[Any, Any, Any]:
    """Mesh, adapter and train of a case."""
    from flatshift.finetune.config import Adapter, Mesh, Train

    train = Train(
        max_length=case.tokens,
        batch_size=case.rows,
        precision=case.precision,  # type: ignore[arg-type]
        checkpointing=case.checkpointing,  # type: ignore[arg-type]
        **case.more,
    )
    return Mesh(**case.mesh), Adapter(rank=case.rank), train


def updates(backbone: str, case: Case) -> Callable[[int], None]:
    """The case laid out on its mesh; the function makes an update."""
    import torch

    from flatshift.finetune.compute import attention
    from flatshift.finetune.compute.micro_batch import MicroBatch
    from flatshift.finetune.compute.numerics import without_input_casts
    from flatshift.finetune.compute.precision import autocast
    from flatshift.finetune.config import Optimizer
    from flatshift.finetune.parallel.build import build_engine
    from flatshift.finetune.parallel.mesh import ProcessMesh
    from flatshift.finetune.tasks import LanguageModel
    from flatshift.finetune.train.optimizer import AdapterOptimizer

    mesh, adapter, train = settings(case)
    task, device = LanguageModel(pack=False), torch.device("cpu")
    world = ProcessMesh.of(mesh, device) if case.mesh else ProcessMesh.alone(device)
    engine = build_engine(backbone, task=task, adapter=adapter, train=train, mesh=mesh, world=world)
    optimizer = AdapterOptimizer(engine.parameters, Optimizer())
    engine.model.train()
    index, width = engine.share
    rows, pieces = case.rows // width, train.accumulate
    head: list[Any] = []

    def micro(step: int, number: int) -> Any:
        drawn = torch.Generator().manual_seed(1000 * step + 100 * number + index)
        ids = torch.randint(3, case.vocabulary, (rows, case.tokens), generator=drawn)
        labels = ids.clone()
        labels[:, 0] = -100
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        return MicroBatch(inputs, labels, rows * (case.tokens - 1), rows, tuple((i,) for i in range(rows)))

    def update(step: int) -> None:
        batch = [micro(step, number) for number in range(pieces)]
        with (
            without_input_casts(engine.model, train),
            attention.packed_attention(engine.model, device),
        ):  # as the loop does
            if not head:
                with autocast(train, device):
                    head.append(engine.find_head(batch[0].inputs, task=task))
                engine.reshard()
            count = case.rows * pieces * (case.tokens - 1)
            engine.forward_backward(batch, count, task=task, head=head[0], context=lambda _: autocast(train, device))
        engine.clip(1.0)
        optimizer.step(1e-3)

    return update


def held(folder: str, case: dict[str, Any]) -> dict[str, float]:
    """Of a case whose backbone lies in `folder`/own: bytes of this rank at the worst moment of an update, by the
    allocator and by growth of the process. The tiny one of `folder`/tiny goes before it, so that libraries are there.
    """
    own = Case(**case)
    tiny = updates(f"{folder}/tiny", dataclasses.replace(_WARM, mesh=own.mesh, precision=own.precision))
    tiny(0)
    del tiny
    gc.collect()
    before = process_bytes("VmRSS")
    update = updates(f"{folder}/own", own)
    resident, _ = measure_peaks(lambda: [update(step) for step in range(_UPDATES)])
    assert before is not None and resident is not None
    return {"allocated": peak_bytes(partial(update, _UPDATES)), "resident": resident - before}


def predicted(folder: str | Path, case: Case) -> int:
    """The plan's bytes of the fullest rank in an update, without the logits of an evaluation."""
    from flatshift.finetune.planner.footprint import predict_footprint
    from flatshift.finetune.planner.sizes import read_sizes

    mesh, adapter, train = settings(case)
    needs = predict_footprint(read_sizes(folder, adapter), mesh=mesh, adapter=adapter, train=train, device="cpu")
    return dataclasses.replace(needs, logits=0).total
