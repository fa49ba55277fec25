"""What a mesh costs beside one process, beside DeepSpeed ZeRO-3 and beside the Trainer on DDP.

    python -m benchmarks.sharding_speed

A Llama of 8 blocks × 512 (random weights, 34 M parameters) with rank-8 LoRA on every linear layer, 4 rows of 128 tokens
a rank, AdamW, clipping at 1.0, one thread a rank. Every figure is the CPU-seconds of all ranks together for the same
number of updates, without start-up, each variant in fresh processes, in the order A B B A. One process gets the rows of
both ranks. DeepSpeed's default keeps a model of this size gathered between forward and backward, which is our
`mesh.reshard: false`; tuned, it frees every unit as our default does. Each is measured beside its like.

DeepSpeed is no dependency: `pip install --no-deps deepspeed==0.19.8 hjson ninja py-cpuinfo msgpack einops
nvidia-ml-py` makes its rows appear.
"""

from __future__ import annotations

import os
import tempfile
import time
from functools import partial
from typing import Any

from benchmarks._harness import Benchmark, interleave
from benchmarks._ranks import on_ranks

ROWS, TOKENS, VOCABULARY = 4, 128, 4096
WARM, STEPS, ROUNDS = 2, 6, 2
HERE = "benchmarks.sharding_speed"
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def save_backbone(folder: str, *, blocks: int = 8, hidden: int = 512, vocabulary: int = VOCABULARY) -> None:
    """The benchmark's model, and a config that says so."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=blocks,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        pad_token_id=0,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(folder)


def _tokens(rows: int, step: int) -> Any:
    import torch

    return torch.randint(1, VOCABULARY, (rows, TOKENS), generator=torch.Generator().manual_seed(step))


def _measured(update: Any, steps: int = STEPS) -> dict[str, float]:
    """CPU-seconds of `steps` updates after a warm-up; of the shortest one, its wall time and how much of that the
    computing thread was busy (waiting for other ranks is not). This rank's."""
    import torch.distributed as dist

    for step in range(WARM):
        update(step)
    dist.barrier()
    cpu, updates = time.process_time(), []
    for step in range(steps):
        wall, busy = time.monotonic(), time.thread_time()
        update(WARM + step)
        updates.append((time.monotonic() - wall, time.thread_time() - busy))
    shortest, busy = min(updates)
    return {"cpu": time.process_time() - cpu, "wall": shortest, "busy": busy}


# --------------------------------------------------------------------------------------------- the variants


def ours(
    backbone: str, mesh: dict[str, Any], rows: int, *, micros: int = 1, ggpo: bool = False, steps: int = STEPS
) -> dict[str, float]:
    """Our engine on `mesh`: `rows` rows a rank (of each of `micros` micro-batches)."""
    import contextlib

    import torch

    from flatshift.finetune.compute.micro_batch import MicroBatch
    from flatshift.finetune.config import Adapter, Mesh, Optimizer, Train
    from flatshift.finetune.parallel.build import build_engine
    from flatshift.finetune.parallel.mesh import ProcessMesh
    from flatshift.finetune.tasks import LanguageModel
    from flatshift.finetune.train.optimizer import AdapterOptimizer
    from flatshift.regularizers import build
    from flatshift.regularizers.config import GGPO, Plain

    layout = Mesh(**mesh)
    device = torch.device("cpu")
    world = ProcessMesh.of(layout, device) if layout.size > 1 else ProcessMesh.alone(device)
    task = LanguageModel(pack=False)
    train = Train(max_length=TOKENS, batch_size=rows * layout.replicate * layout.dp)
    engine = build_engine(backbone, task=task, adapter=Adapter(rank=8), train=train, mesh=layout, world=world)
    optimizer = AdapterOptimizer(engine.parameters, Optimizer())
    regularizer = build(GGPO() if ggpo else Plain())
    regularizer.attach(engine.model, seed=0, total_steps=WARM + steps, placement=engine.placement)
    index, width = engine.share
    engine.model.train()

    def micro(step: int, number: int) -> MicroBatch:
        ids = _tokens(rows * width, step * 1000 + number)[index * rows : (index + 1) * rows]
        labels = ids.clone()
        labels[:, 0] = -100
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        return MicroBatch(inputs, labels, rows * (TOKENS - 1), rows, tuple((i,) for i in range(rows)))

    head = engine.find_head(micro(0, 0).inputs, task=task)
    engine.reshard()

    def update(step: int) -> None:
        batch = [micro(step, number) for number in range(micros)]
        count = rows * width * micros * (TOKENS - 1)
        with regularizer.step(step):
            engine.forward_backward(batch, count, task=task, head=head, context=lambda _: contextlib.nullcontext())
        engine.clip(1.0)
        optimizer.step(1e-3)

    return _measured(update, steps)


def _peft(backbone: str) -> Any:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(backbone, dtype=torch.float32)
    model.config.use_cache = False
    return get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules=list(TARGETS), task_type="CAUSAL_LM"))


def deepspeed_zero3(backbone: str, rows: int, *, tuned: bool) -> dict[str, float]:
    """DeepSpeed ZeRO-3 + PEFT; tuned: nothing kept gathered, no prefetch, no persistent small parameters."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed
    import torch
    import torch.distributed as dist

    zero: dict[str, Any] = {"stage": 3}
    if tuned:
        zero |= {"stage3_prefetch_bucket_size": 0, "stage3_param_persistence_threshold": 0}
        zero |= {"stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0}
    config = {
        "train_micro_batch_size_per_gpu": rows,
        "gradient_clipping": 1.0,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
    }
    model = _peft(backbone)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3, fused=True)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    rank, width = dist.get_rank(), dist.get_world_size()
    engine.train()

    def update(step: int) -> None:
        ids = _tokens(rows * width, step * 1000)[rank * rows : (rank + 1) * rows]
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()

    return _measured(update)


def trainer_ddp(backbone: str, rows: int) -> dict[str, float]:
    """transformers' Trainer + PEFT on DDP, as `accelerate launch --cpu` runs it; CPU-seconds between two steps."""
    import torch
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Rows(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return rows * 2 * (WARM + STEPS)

        def __getitem__(self, i: int) -> dict[str, Any]:
            ids = _tokens(1, i)[0]
            return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}

    found: dict[str, float] = {}

    class Clock(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == WARM:
                found["cpu"], found["wall"] = -time.process_time(), -time.monotonic()
            if state.global_step == WARM + STEPS:
                found["cpu"] += time.process_time()
                found["wall"] += time.monotonic()

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=rows,
            max_steps=WARM + STEPS,
            learning_rate=1e-3,
            optim="adamw_torch_fused",
            lr_scheduler_type="constant",
            max_grad_norm=1.0,
            save_strategy="no",
            report_to=[],
            logging_steps=1000,
            use_cpu=True,
            disable_tqdm=True,
            ddp_backend="gloo",
        )
        Trainer(model=_peft(backbone), args=arguments, train_dataset=Rows(), callbacks=[Clock()]).train()
    return found


# --------------------------------------------------------------------------------------------- the table


def _cpu(function: str, ranks: int, **arguments: Any) -> float:
    return sum(found["cpu"] for found in on_ranks(f"{HERE}:{function}", ranks, **arguments))


def main() -> None:
    """Measure all rows and write benchmarks/results/sharding_speed.json."""
    bench = Benchmark("sharding_speed", packages=("torch", "transformers", "peft", "accelerate", "deepspeed"))
    with tempfile.TemporaryDirectory() as backbone:
        save_backbone(backbone)
        _against_one_process(bench, backbone)
        _against_deepspeed(bench, backbone)
        ours_two, peer_two = interleave(
            lambda: _cpu("ours", 2, backbone=backbone, mesh={"replicate": 2}, rows=ROWS),
            lambda: _cpu("trainer_ddp", 2, backbone=backbone, rows=ROWS),
            rounds=ROUNDS,
            measure=lambda run: run(),
        )
        bench.row(
            "replicate 2", ours=ours_two, peer=peer_two, peer_name="Trainer on DDP", unit="CPU-s", bar_op="<=",
            bar_value=1.0,
        )  # fmt: skip
    bench.finish()


def _against_one_process(bench: Benchmark, backbone: str) -> None:
    cases: dict[str, tuple[dict[str, Any], int]] = {
        "FSDP2, dp 2": ({"dp": 2}, ROWS),
        "FSDP2, dp 2, weights kept gathered": ({"dp": 2, "reshard": False}, ROWS),
        "tp 2": ({"tp": 2}, 2 * ROWS),
        "replicate 2": ({"replicate": 2}, ROWS),
        "GGPO, dp 2": ({"dp": 2}, ROWS),
    }
    for what, (mesh, rows) in cases.items():
        more = {"ggpo": True} if what.startswith("GGPO") else {}
        mine, one = interleave(
            partial(_cpu, "ours", 2, backbone=backbone, mesh=mesh, rows=rows, **more),
            partial(_cpu, "ours", 1, backbone=backbone, mesh={}, rows=2 * ROWS, **more),
            rounds=ROUNDS,
            measure=lambda run: run(),
        )
        bench.row(f"{what}, the same rows", ours=mine, peer=one, peer_name="one process", unit="CPU-s")


def _against_deepspeed(bench: Benchmark, backbone: str) -> None:
    try:
        import deepspeed  # noqa: F401
    except ImportError:
        bench.row("FSDP2, dp 2", unit="CPU-s", peer_name="DeepSpeed ZeRO-3", reason="deepspeed is not installed")
        return
    likes: dict[str, tuple[str, dict[str, Any]]] = {
        "default": ("FSDP2, dp 2, weights kept gathered", {"dp": 2, "reshard": False}),
        "tuned": ("FSDP2, dp 2", {"dp": 2}),
    }
    for name, (what, mesh) in likes.items():
        mine, peer = interleave(
            partial(_cpu, "ours", 2, backbone=backbone, mesh=mesh, rows=ROWS),
            partial(_cpu, "deepspeed_zero3", 2, backbone=backbone, rows=ROWS, tuned=name == "tuned"),
            rounds=ROUNDS,
            measure=lambda run: run(),
        )
        peer_name = f"DeepSpeed ZeRO-3, {name}"
        bench.row(what, ours=mine, peer=peer, peer_name=peer_name, unit="CPU-s", bar_op="<=", bar_value=0.8)


if __name__ == "__main__":
    main()
