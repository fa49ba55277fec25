"""Other ways to shard a Llama with LoRA: each is a function of one update on random tokens.

DeepSpeed is no dependency: `pip install --no-deps deepspeed==0.19.8 hjson ninja py-cpuinfo msgpack einops
nvidia-ml-py` makes its rows appear.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from typing import Any

from benchmarks._sized import TARGETS, Sizes, draw_ids

Update = Callable[[int], Any]


def has_deepspeed() -> bool:
    return importlib.util.find_spec("deepspeed") is not None


def add_adapter(model: Any, *, meta: bool = False) -> Any:
    """PEFT's LoRA of rank 8 on every linear layer of a block."""
    from peft import LoraConfig, get_peft_model

    model.config.use_cache = False
    config = LoraConfig(r=8, lora_alpha=16, target_modules=list(TARGETS), task_type="CAUSAL_LM")
    return get_peft_model(model, config, low_cpu_mem_usage=meta, autocast_adapter_dtype=False)


def load_adapted(folder: str) -> Any:
    """A float32 backbone with that adapter."""
    import torch
    from transformers import AutoModelForCausalLM

    return add_adapter(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))


def deepspeed_update(folder: str, sizes: Sizes, *, tuned: bool, partitioned: bool) -> Update:
    """DeepSpeed ZeRO-3 + PEFT; tuned: nothing kept gathered, no prefetch, no persistent small parameters; partitioned:
    the weights are cut as they are read."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed
    import torch
    import torch.distributed as dist
    from transformers.integrations.deepspeed import HfDeepSpeedConfig

    zero: dict[str, Any] = {"stage": 3}
    if tuned:
        names = ("prefetch_bucket_size", "param_persistence_threshold", "max_live_parameters", "max_reuse_distance")
        zero |= {f"stage3_{name}": 0 for name in names}
    config = {
        "train_micro_batch_size_per_gpu": sizes.rows,
        "gradient_clipping": 1.0,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
    }
    deepspeed.init_distributed(dist_backend="gloo")
    partition = HfDeepSpeedConfig(config) if partitioned else None
    model = load_adapted(folder)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3, fused=not partitioned)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    engine.train()
    engine.partition = partition  # transformers looks whether one is alive

    def update(step: int) -> None:
        ids = draw_ids(sizes.vocabulary, sizes.rows, sizes.tokens, 1000 * step + dist.get_rank())
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()

    return update


def plain_update(model: Any, sizes: Sizes) -> Update:
    """A plain loop; gradients that FSDP2 does not hold are summed one by one."""
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor

    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    model.train()

    def update(step: int) -> None:
        ids = draw_ids(sizes.vocabulary, sizes.rows, sizes.tokens, 1000 * step + dist.get_rank())
        model(input_ids=ids, labels=ids).loss.backward()
        for parameter in trained:
            if not isinstance(parameter, DTensor):
                dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()

    return update


def native_update(folder: str, sizes: Sizes) -> Update:
    """transformers' own FSDP route (`DistributedConfig`), with PEFT after it."""
    import torch.distributed as dist
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    config = DistributedConfig(fsdp_size=dist.get_world_size())
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32", distributed_config=config)
    return plain_update(add_adapter(model), sizes)


def broadcast_update(folder: str, sizes: Sizes) -> Update:
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
    whole = load_adapted(folder).state_dict() if world.rank == 0 else {}
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    model = add_adapter(model, meta=True)
    shard(model, mesh=mesh, world=world)
    materialize(model, "cpu")
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, whole, options=options)
    return plain_update(model, sizes)
