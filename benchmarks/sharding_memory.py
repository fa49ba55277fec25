"""What loading and training cost in memory on a mesh, beside three other ways to shard, and under a hard limit.

    python -m benchmarks.sharding_memory

A random Llama of 12 blocks × 768 with 8192 tokens (377 MiB with rank-8 LoRA in float32), made on the fly. Bytes are
anonymous resident memory (mapped files do not count) above the level after the imports and one update of a tiny model;
the largest of any rank. glibc gives blocks of 128 KiB and more back at once (MALLOC_MMAP_THRESHOLD_), else it hides
what was freed. A step's transient is its peak above the level before it, when optimizer state exists already.

DeepSpeed is no dependency: `pip install --no-deps deepspeed==0.19.8 hjson ninja py-cpuinfo msgpack einops
nvidia-ml-py` makes its rows appear.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks._harness import Benchmark, PeakMemory, anonymous_rss
from benchmarks._limited import limited_rows
from benchmarks._ranks import on_ranks
from benchmarks._sized import Sizes, save_backbone

HERE = "benchmarks.sharding_memory"
BIG = Sizes(hidden=768, inner=2048, blocks=12, vocabulary=8192, rows=2, tokens=32)
TINY = Sizes(hidden=64, inner=128, blocks=2, vocabulary=256, rows=2, tokens=32)
STEPS = 3
MIB = 1 << 20
LOAD_SHARE, LOAD_MORE = 1.15, 32 * MIB
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
Update = Callable[[int], Any]


# --------------------------------------------------------------------------------------------- measuring


def measured(load: Callable[[], Update]) -> dict[str, float]:
    """Peak while `load()` makes an update; memory afterwards; peak of later updates above the level before them."""
    import gc

    gc.collect()
    level, total = anonymous_rss(), _resident()
    with PeakMemory(0.002) as loading:
        update = load()
    gc.collect()
    after = anonymous_rss() - level
    update(0)  # the first one also makes optimizer state and what FSDP2 keeps
    update(1)
    gc.collect()
    trained = _resident() - total
    with PeakMemory(0.002) as training:
        for step in range(STEPS):
            update(2 + step)
    return {"load": max(loading.bytes, after), "after": after, "resident": trained, "transient": training.bytes}


def _resident() -> int:
    """Bytes of resident memory, mapped files included."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("VmRSS is not reported by this kernel")


def _rows(sizes: Sizes, rank: int, step: int) -> Any:
    import torch

    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(1, sizes.vocabulary, (sizes.rows, sizes.tokens), generator=generator)


# --------------------------------------------------------------------------------------------- ours


def ours(
    tiny: str, big: str, mesh: dict[str, Any], precision: str = "fp32", sizes: dict[str, int] | None = None
) -> dict[str, float]:
    """Our engine on `mesh` (one process if that is empty), with `big` of `sizes`."""
    warm, _ = _engine(tiny, TINY, mesh, precision)
    for step in range(2):
        warm(step)
    found: dict[str, float] = {}

    def load() -> Update:
        update, engine = _engine(big, Sizes(**sizes) if sizes else BIG, mesh, precision)
        found.update(_held(engine))
        return update

    return measured(load) | found


def _engine(backbone: str, sizes: Sizes, mesh: dict[str, Any], precision: Any) -> tuple[Update, Any]:
    import contextlib

    import torch

    from flatshift.finetune.compute.micro_batch import MicroBatch
    from flatshift.finetune.config import Adapter, Mesh, Optimizer, Train
    from flatshift.finetune.parallel.build import build_engine
    from flatshift.finetune.parallel.mesh import ProcessMesh
    from flatshift.finetune.tasks import LanguageModel
    from flatshift.finetune.train.optimizer import AdapterOptimizer

    layout, task = Mesh(**mesh), LanguageModel(pack=False)
    world = ProcessMesh.of(layout, torch.device("cpu")) if mesh else ProcessMesh.alone()
    train = Train(max_length=sizes.tokens, batch_size=sizes.rows * world.width("replicate", "dp"), precision=precision)
    engine = build_engine(backbone, task=task, adapter=Adapter(rank=sizes.rank), train=train, mesh=layout, world=world)
    optimizer = AdapterOptimizer(engine.parameters, Optimizer())
    engine.model.train()
    head: list[Any] = []

    def update(step: int) -> None:
        ids = _rows(sizes, engine.share[0], step)
        labels = ids.clone()
        labels[:, 0] = -100
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        micro = MicroBatch(inputs, labels, sizes.supervised, sizes.rows, tuple((i,) for i in range(sizes.rows)))
        if not head:
            head.append(engine.find_head(inputs, task=task))
            engine.reshard()
        engine.forward_backward(
            [micro],
            sizes.supervised * engine.share[1],
            task=task,
            head=head[0],
            context=lambda _: contextlib.nullcontext(),
        )
        engine.clip(1.0)
        optimizer.step(1e-3)

    return update, engine


def _held(engine: Any) -> dict[str, float]:
    """Bytes of parameters on this rank, and of the largest unit as it is gathered."""
    from flatshift.finetune.parallel.layout import local_part

    mine = {id(p): local_part(p).untyped_storage().nbytes() for p in engine.model.parameters()}
    units = engine.sharding.units if engine.sharding is not None else ()
    sizes = [0]
    for unit in units:
        inner = [module for module in unit.modules() if module is not unit and module in units]
        other = {id(p) for module in inner for p in module.parameters()}
        sizes.append(sum(p.numel() * p.itemsize for p in unit.parameters() if id(p) not in other))
    return {"held": sum(mine.values()), "unit": max(sizes)}


# --------------------------------------------------------------------------------------------- the others


def native(tiny: str, big: str) -> dict[str, float]:
    """transformers' own FSDP route (`DistributedConfig`), with PEFT after it."""
    import torch.distributed as dist
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    def load(folder: str, sizes: Sizes) -> Update:
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype="float32", distributed_config=DistributedConfig(fsdp_size=dist.get_world_size())
        )
        return _simple_update(_peft(model), sizes)

    return _warm_then_measured(load, tiny, big)


def broadcast(tiny: str, big: str) -> dict[str, float]:
    """Rank 0 loads the whole model and `set_model_state_dict` hands it out; units as ours."""
    import torch
    import torch.distributed as dist
    from accelerate import init_empty_weights
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
    from transformers import AutoConfig, AutoModelForCausalLM

    from flatshift.finetune.config import Mesh
    from flatshift.finetune.parallel.fsdp import shard
    from flatshift.finetune.parallel.mesh import ProcessMesh
    from flatshift.finetune.parallel.weights import materialize

    mesh = Mesh(dp=dist.get_world_size())
    world = ProcessMesh.of(mesh, torch.device("cpu"))

    def load(folder: str, sizes: Sizes) -> Update:
        whole = {}
        if world.rank == 0:
            whole = _peft(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)).state_dict()
        with init_empty_weights(include_buffers=False):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
        model = _peft(model, meta=True)
        shard(model, mesh=mesh, world=world)
        materialize(model, "cpu")
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(model, whole, options=options)
        return _simple_update(model, sizes)

    return _warm_then_measured(load, tiny, big)


def deepspeed_zero3(tiny: str, big: str, *, tuned: bool) -> dict[str, float]:
    """DeepSpeed ZeRO-3 + PEFT, the weights partitioned as they are read; tuned: nothing is kept gathered."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed
    import torch
    import torch.distributed as dist
    from transformers import AutoModelForCausalLM
    from transformers.integrations.deepspeed import HfDeepSpeedConfig

    zero: dict[str, Any] = {"stage": 3}
    if tuned:
        zero |= {"stage3_prefetch_bucket_size": 0, "stage3_param_persistence_threshold": 0}
        zero |= {"stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0}
    config = {
        "train_micro_batch_size_per_gpu": BIG.rows,
        "gradient_clipping": 1.0,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
    }
    deepspeed.init_distributed(dist_backend="gloo")
    keep = [HfDeepSpeedConfig(config)]

    def load(folder: str, sizes: Sizes) -> Update:
        model = _peft(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

        def update(step: int) -> None:
            ids = _rows(sizes, dist.get_rank(), step)
            engine.backward(engine(input_ids=ids, labels=ids).loss)
            engine.step()

        return update

    found = _warm_then_measured(load, tiny, big)
    keep.clear()
    return found


def _warm_then_measured(load: Callable[[str, Sizes], Update], tiny: str, big: str) -> dict[str, float]:
    warm = load(tiny, TINY)
    for step in range(2):
        warm(step)
    return measured(lambda: load(big, BIG))


def _peft(model: Any, *, meta: bool = False) -> Any:
    from peft import LoraConfig, get_peft_model

    model.config.use_cache = False
    config = LoraConfig(r=BIG.rank, lora_alpha=16, target_modules=list(TARGETS), task_type="CAUSAL_LM")
    return get_peft_model(model, config, low_cpu_mem_usage=meta, autocast_adapter_dtype=False)


def _simple_update(model: Any, sizes: Sizes) -> Update:
    """A plain loop; gradients that FSDP2 does not hold are summed one by one."""
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor

    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    model.train()

    def update(step: int) -> None:
        ids = _rows(sizes, dist.get_rank(), step)
        model(input_ids=ids, labels=ids).loss.backward()
        for parameter in trained:
            if not isinstance(parameter, DTensor):
                dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()

    return update


# --------------------------------------------------------------------------------------------- the table


def main() -> None:
    """Measure all rows and write benchmarks/results/sharding_memory.json."""
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(128 << 10)
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # DeepSpeed builds with ninja
    bench = Benchmark("sharding_memory", packages=("torch", "transformers", "peft", "accelerate", "deepspeed"))
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TORCH_EXTENSIONS_DIR"] = f"{folder}/extensions"
        tiny, big = f"{folder}/tiny", f"{folder}/big"
        save_backbone(TINY, tiny)
        save_backbone(BIG, big)
        # The child of one process: what the same rows cost without any sharding.
        alone = _worst("ours", 1, tiny=tiny, big=big, mesh={})
        found = {}
        for mesh, precision in (
            ({"dp": 2}, "fp32"),
            ({"dp": 4}, "fp32"),
            ({"dp": 2}, "bf16"),
            ({"dp": 4}, "bf16"),
            ({"tp": 2}, "fp32"),
            ({"dp": 2, "tp": 2}, "fp32"),
            ({"pp": 2}, "fp32"),
        ):
            name = " × ".join(f"{axis} {width}" for axis, width in mesh.items()) + f", {precision}"
            ranks = 1
            for width in mesh.values():
                ranks *= width
            found[name] = _worst("ours", ranks, tiny=tiny, big=big, mesh=mesh, precision=precision)
            _own_rows(bench, name, mesh, precision, found[name], alone)
        bench.row("one process, fp32: transient of an update", ours=alone["transient"], unit="bytes")
        _others(bench, found, tiny, big)
        limited_rows(bench, folder)
    bench.finish()


def _worst(function: str, ranks: int, **arguments: Any) -> dict[str, float]:
    """The largest figure of any rank."""
    results = on_ranks(f"{HERE}:{function}", ranks, **arguments)
    return {name: max(result[name] for result in results) for name in results[0]}


def _own_rows(
    bench: Benchmark,
    name: str,
    mesh: dict[str, int],
    precision: str,
    found: dict[str, float],
    alone: dict[str, float],
) -> None:
    sizes = Sizes(**{**asdict(BIG), "item": 2 if precision == "bf16" else 4})
    if set(mesh) == {"dp"}:
        bench.row(
            f"{name}: bytes of parameters on a rank", ours=found["held"], peer=sizes.whole_bytes / mesh["dp"],
            peer_name="Ψ/N", unit="bytes", bar_op="==", bar_value=1.0,
        )  # fmt: skip
    bound = LOAD_SHARE * found["held"] + LOAD_MORE
    bench.row(
        f"{name}: peak while loading", ours=found["load"], peer=bound, peer_name="shard + 15 % + 32 MiB",
        unit="bytes", bar_op="<=", bar_value=1.0,
    )  # fmt: skip
    if set(mesh) == {"dp"}:
        bound = 3 * found["unit"] + alone["transient"]
        bench.row(
            f"{name}: transient of an update", ours=found["transient"], peer=bound,
            peer_name="3 largest units + one process's transient", unit="bytes", bar_op="<=", bar_value=1.0,
        )  # fmt: skip


def _others(bench: Benchmark, found: dict[str, dict[str, float]], tiny: str, big: str) -> None:
    figures = {"load": "peak while loading", "resident": "resident after an update", "transient": "transient"}
    peers: dict[str, tuple[str, dict[str, Any]]] = {
        "transformers' DistributedConfig": ("native", {}),
        "rank 0 loads, broadcast": ("broadcast", {}),
        "DeepSpeed ZeRO-3, default": ("deepspeed_zero3", {"tuned": False}),
        "DeepSpeed ZeRO-3, tuned": ("deepspeed_zero3", {"tuned": True}),
    }
    for ranks in (2, 4):
        mine = found[f"dp {ranks}, fp32"]
        for name, (function, settings) in peers.items():
            theirs, reason = None, None
            if function == "deepspeed_zero3" and not _has_deepspeed():
                reason = "deepspeed is not installed"
            else:
                theirs = _worst(function, ranks, tiny=tiny, big=big, **settings)
            for key, what in figures.items():
                peer = None if theirs is None else theirs[key]
                bench.row(f"dp {ranks}: {what}", ours=mine[key], peer=peer, peer_name=name, unit="bytes", reason=reason)


def _has_deepspeed() -> bool:
    from importlib.util import find_spec

    return find_spec("deepspeed") is not None


if __name__ == "__main__":
    main()
