"""ZeRO shards: read in slices, trained and gathered, they are the whole model on every mesh of data axes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flatshift.finetune.config import Mesh
from flatshift.finetune.errors import UserError
from flatshift.finetune.models.checkpoint import CheckpointFiles, canonical_name
from flatshift.finetune.models.meta import empty_model
from flatshift.finetune.parallel.activation_checkpoint import checkpoint_activations
from flatshift.finetune.parallel.fsdp import shard
from flatshift.finetune.parallel.layout import (
    Slice,
    TensorParallelLayout,
    copy_local_part,
    gather_full_tensors,
    local_part,
)
from flatshift.finetune.parallel.mesh import TIMEOUT, ProcessMesh
from flatshift.finetune.parallel.weights import load_weights, materialize
from flatshift.finetune.seeds import torch_generator
from tests.support.distributed_ranks import run_ranks

ROWS, TOKENS, VOCABULARY = 8, 12, 96
AUTO = {
    "bert": "AutoModelForSequenceClassification",
    "t5": "AutoModelForSeq2SeqLM",
    "vit": "AutoModelForImageClassification",
}
CPU = torch.device("cpu")


# --------------------------------------------------------------------------------------------- tiny checkpoints


def save(kind: str, directory: Path, *, dtype: torch.dtype = torch.float32) -> Path:
    """A random backbone on disk; llama in several files, gpt2 without the prefix of its language model."""
    import transformers as tf

    ids = {"vocab_size": VOCABULARY, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4}
    gpt2 = {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 64}
    t5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}
    mixtral = {"num_key_value_heads": 2, "num_local_experts": 4}
    table: dict[str, Any] = {
        "llama": (tf.LlamaForCausalLM, tf.LlamaConfig, {**sizes, "num_key_value_heads": 2}),
        "gpt2": (tf.GPT2LMHeadModel, tf.GPT2Config, {**gpt2, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}),
        "bert": (tf.BertModel, tf.BertConfig, {**sizes, "hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0}),
        "t5": (tf.T5ForConditionalGeneration, tf.T5Config, {**t5, "dropout_rate": 0}),
        "vit": (tf.ViTForImageClassification, tf.ViTConfig, {**sizes, "image_size": 16, "patch_size": 4}),
        "mixtral": (tf.MixtralForCausalLM, tf.MixtralConfig, {**sizes, **mixtral}),
    }
    model_class, config_class, own = table[kind]
    config = config_class(**{**({} if kind == "vit" else ids), **own})
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        model = model_class(config).to(dtype)
        with torch.no_grad():
            for parameter in model.parameters():  # norms and biases that are not 1 and 0
                parameter.add_(torch.randn(parameter.shape).to(dtype) * 0.1)
    source = model.transformer if kind == "gpt2" else model
    source.save_pretrained(directory, max_shard_size="30KB" if kind == "llama" else "5GB")
    return directory


def options(kind: str) -> dict[str, Any]:
    return {"num_labels": 3} if kind == "bert" else {}


def auto(kind: str) -> Any:
    import transformers

    return getattr(transformers, AUTO.get(kind, "AutoModelForCausalLM"))


def adapted(model: Any, kind: str, *, rank: int, dtype: torch.dtype) -> Any:
    """`model`, whole or on meta, with LoRA on every linear layer and a head that trains."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=rank,
        lora_alpha=2 * rank,
        # peft turns adapters of stacked experts into others, under names of their own
        target_modules=["q_proj", "o_proj"] if kind == "mixtral" else "all-linear",
        task_type={"bert": "SEQ_CLS", "t5": "SEQ_2_SEQ_LM"}.get(kind, "CAUSAL_LM"),
        fan_in_fan_out=kind == "gpt2",
    )
    model.requires_grad_(False)
    model.config.use_cache = False
    model = get_peft_model(model, config, low_cpu_mem_usage=True, autocast_adapter_dtype=False)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)
    return model


def drawn(name: str, shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, generator=torch_generator(0, "test", canonical_name(name))) * 0.05


def fill(model: nn.Module, names: Any, layout: TensorParallelLayout) -> None:
    """Values by name for what no file has."""
    for name in names:
        parameter = model.get_parameter(name)
        copy_local_part(
            parameter,
            drawn(name, layout.shape(canonical_name(name), parameter.shape)),
            layout.slices.get(canonical_name(name)),
        )


def reference(kind: str, directory: Path, **more: Any) -> Any:
    """The same model whole, loaded by transformers."""
    from flatshift.finetune.models.backbone import quiet_transformers

    with quiet_transformers():
        model = auto(kind).from_pretrained(directory, dtype=more.get("precision", torch.float32), **options(kind))
    model = adapted(model, kind, rank=more.get("rank", 4), dtype=more.get("dtype", torch.float32))
    materialize(model, "cpu")
    new = [n for n, _ in model.named_parameters() if "lora_" in n or (kind == "bert" and "classifier" in n)]
    fill(model, new, TensorParallelLayout())
    return model.train()


def sharded(kind: str, directory: Path, mesh: Mesh, world: ProcessMesh, **more: Any) -> tuple[Any, Any, Any]:
    """A model that was built on meta, sharded over `mesh` and filled, its sharding and its loading report."""
    model = empty_model(auto(kind), directory, dtype=more.get("precision", torch.float32), **options(kind))
    checkpoint = CheckpointFiles.of(model, directory)
    model = adapted(model, kind, rank=more.get("rank", 4), dtype=more.get("dtype", torch.float32))
    assert all(p.is_meta for p in model.parameters())
    checkpoint_activations(model, more.get("checkpointing", "none"))
    sharding = shard(model, mesh=mesh, world=world)
    materialize(model, "cpu")
    loaded = load_weights(model, checkpoint, layout=TensorParallelLayout(), world=world)
    fill(model, loaded.unread, TensorParallelLayout())
    return model.train(), sharding, loaded


# --------------------------------------------------------------------------------------------- one update


def rows(kind: str) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, VOCABULARY, (ROWS, TOKENS), generator=generator)
    labels = torch.randint(0, 3, (ROWS,), generator=generator) if kind == "bert" else ids.clone()
    if kind != "bert":
        labels[torch.rand(ids.shape, generator=generator) < 0.3] = -100
    return {"input_ids": ids, "labels": labels}


def loss_sum(model: nn.Module, kind: str, batch: dict[str, Tensor]) -> Tensor:
    labels = batch["labels"]
    more = {"labels": labels} if kind == "t5" else {}
    narrow = next(p for p in model.parameters() if not p.requires_grad).dtype == torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16, enabled=narrow):
        logits = model(input_ids=batch["input_ids"], **more).logits
    if kind in ("llama", "gpt2", "mixtral"):
        logits, labels = logits[:, :-1], labels[:, 1:]
    return F.cross_entropy(logits.flatten(0, -2).float(), labels.flatten(), reduction="sum")


def count(kind: str, batch: dict[str, Tensor]) -> int:
    labels = batch["labels"] if kind in ("bert", "t5") else batch["labels"][:, 1:]
    return int((labels != -100).sum())


def one_update(
    model: Any, sharding: Any, kind: str, world: ProcessMesh, accumulate: int
) -> tuple[float, dict[str, Tensor]]:
    """The loss of the whole batch and the whole gradients by name, as every rank sees them."""
    batch = rows(kind)
    total, axes = count(kind, batch), ("replicate", "dp", "cp")
    ranks, place = world.width(*axes), world.index(*axes)
    mine = {k: v[place * ROWS // ranks : (place + 1) * ROWS // ranks] for k, v in batch.items()}
    pieces = [{k: v.chunk(accumulate)[i] for k, v in mine.items()} for i in range(accumulate)]
    loss = torch.zeros(())
    for number, piece in enumerate(pieces):
        sharding.set_sync(last=number == accumulate - 1)
        part = loss_sum(model, kind, piece) / total
        (part * sharding.group).backward()
        loss += part.detach()
    live = {canonical_name(n): p for n, p in model.named_parameters() if p.requires_grad}
    assert all(p.grad is None for p in model.parameters() if not p.requires_grad)
    for name in sorted(live.keys() - sharding.reduced):
        world.sum(live[name].grad, *axes)
    grads = gather_full_tensors(
        {n: p.grad for n, p in live.items()}, parameters=live, layout=TensorParallelLayout(), world=world
    )
    return float(world.sum(loss, *axes)), grads


def worst(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    assert ours.keys() == theirs.keys() and all(t.norm() > 0 for t in theirs.values())
    return max(float((ours[n] - theirs[n]).norm() / theirs[n].norm()) for n in theirs)


def compare(directories: dict[str, Path], cases: list[tuple[str, dict[str, Any], dict[str, Any]]]) -> list[dict]:
    """Each case: (kind, settings of the mesh, more): how far the sharded update is from the whole one."""
    found = []
    for kind, settings, more in cases:
        mesh = Mesh(**settings)
        world = ProcessMesh.of(mesh, CPU)
        single = reference(kind, directories[kind], **more)
        (true := loss_sum(single, kind, rows(kind)) / count(kind, rows(kind))).backward()
        truth = {canonical_name(n): p.grad for n, p in single.named_parameters() if p.requires_grad}
        model, sharding, loaded = sharded(kind, directories[kind], mesh, world, **more)
        loss, grads = one_update(model, sharding, kind, world, more.get("accumulate", 1))
        sharding.reshard()
        live = {canonical_name(n): p for n, p in model.named_parameters()}
        tensors = gather_full_tensors(
            {n: p.detach() for n, p in live.items()}, parameters=live, layout=TensorParallelLayout(), world=world
        )
        same = all(torch.equal(tensors[canonical_name(n)], p.detach()) for n, p in single.named_parameters())
        found.append(
            {
                "loss": abs(loss - true.item()),
                "grads": worst({n: g.float() for n, g in grads.items()}, {n: g.float() for n, g in truth.items()}),
                "same": same,
                "whole": sharding.whole_bytes,
                "sharded": sharding.sharded_bytes,
                "local": sharding.local_bytes,
                "held": len(sharding.reduced),
                "adapter": sum(p.numel() * p.itemsize for p in live.values() if p.requires_grad),
                "units": len(sharding.units),
                "read": loaded.bytes,
            }
        )
    return found


@pytest.fixture(scope="module")
def directories(tmp_path_factory) -> dict[str, Path]:
    return {
        kind: save(kind, tmp_path_factory.mktemp(kind)) for kind in ("llama", "gpt2", "bert", "t5", "mixtral", "vit")
    }


FULL = {"dp": 2}
ON_TWO = [
    ("llama", FULL, {}),
    ("gpt2", FULL, {}),
    ("bert", FULL, {}),
    ("t5", FULL, {}),
    ("mixtral", FULL, {}),
    ("llama", {"dp": 2, "reshard": False}, {"accumulate": 2}),
    ("llama", FULL, {"checkpointing": "full"}),
    ("t5", FULL, {"checkpointing": "selective"}),
    ("bert", FULL, {"checkpointing": "selective", "accumulate": 2}),
    ("llama", {"dp": 2, "zero": 1}, {"accumulate": 2}),
    ("llama", {"dp": 2, "zero": 2}, {"accumulate": 2}),
    ("gpt2", {"dp": 2, "adapters": "replicate"}, {"accumulate": 2}),
    ("llama", {"replicate": 2}, {}),
    ("llama", {"cp": 2}, {}),  # shards along cp as well; here its ranks see different rows
]


def test_two_ranks_make_the_update_of_one(directories):
    results = run_ranks(compare, 2, directories, ON_TWO)
    for (kind, mesh, more), first, second in zip(ON_TWO, *results, strict=True):
        case = (kind, mesh, more, first, second)
        assert first["loss"] < 1e-6 and first["grads"] < 1e-5 and first["same"], case
        assert first["loss"] == second["loss"] and first["grads"] == second["grads"], case
        if mesh == FULL:  # everything is sharded; only the head's bias has an odd number of entries
            assert first["sharded"] == first["whole"] == first["local"] + second["local"], case
            assert kind == "bert" or first["local"] == second["local"], case
            assert first["units"] == {"llama": 7, "gpt2": 5, "bert": 6, "t5": 5, "mixtral": 7}[kind], case
    by_case = dict(zip(map(str, ON_TWO), results[0], strict=True))
    replicated, first_stage, copies = (by_case[str(ON_TWO[i])] for i in (11, 9, 12))
    assert replicated["held"] == 0 and replicated["local"] - replicated["whole"] / 2 == replicated["adapter"] / 2
    assert first_stage["sharded"] == first_stage["adapter"]
    assert copies["units"] == copies["sharded"] == 0 and copies["local"] == copies["whole"]


ON_FOUR = [
    ("llama", {"dp": 4}, {}),
    ("llama", {"replicate": 2, "dp": 2}, {"accumulate": 2}),
    ("gpt2", {"replicate": 2, "dp": 2, "zero": 2}, {"accumulate": 2}),
    ("llama", {"dp": 2, "cp": 2}, {}),
    ("gpt2", {"dp": 4}, {"rank": 2, "checkpointing": "full"}),  # r below the ranks: cut along another dim
    ("bert", {"dp": 4}, {"rank": 3}),  # heads of 3 classes over 4 ranks
    ("llama", {"dp": 4}, {"dtype": torch.bfloat16}),
    ("llama", {"dp": 4}, {"precision": torch.bfloat16}),
]


@pytest.mark.slow
def test_four_ranks_make_the_update_of_one(directories):
    results = run_ranks(compare, 4, directories, ON_FOUR)
    for (kind, mesh, more), *ranks in zip(ON_FOUR, *results, strict=True):
        case, first = (kind, mesh, more, ranks), ranks[0]
        coarse = torch.bfloat16 in more.values()
        assert first["loss"] < (1e-4 if coarse else 1e-6) and first["grads"] < (2e-2 if coarse else 1e-5), case
        assert first["same"], case
        copies = mesh.get("replicate", 1)
        if mesh.get("zero", 3) == 3:
            assert sum(r["local"] for r in ranks) == copies * first["whole"], case
            assert first["sharded"] == first["whole"], case


# --------------------------------------------------------------------------------------------- cut by hand


CUTS = {  # leaf module, or stacked parameter: (dim of the weight, fused blocks, whether its bias is cut too)
    "llama": {"q_proj": (0, 1, True), "k_proj": (0, 1, True), "down_proj": (1, 1, False), "lm_head": (0, 1, True)},
    "gpt2": {"c_attn": (1, 3, True), "c_fc": (1, 1, True), "c_proj": (0, 1, False)},
    "bert": {"query": (0, 1, True), "key": (0, 1, True), "word_embeddings": (0, 1, False)},
    "t5": {"q": (0, 1, True), "o": (1, 1, False), "shared": (0, 1, False)},
    "vit": {"q_proj": (0, 1, True), "fc2": (1, 1, False)},
    "mixtral": {"o_proj": (1, 1, False), "gate_up_proj": (1, 2, False), "down_proj": (2, 1, False)},
}


def cut(model: Any, kind: str, world: ProcessMesh) -> TensorParallelLayout:
    """Replace parameters of the plain model on meta by their tensor-parallel part."""
    layout, done = TensorParallelLayout(), {}
    names = {id(p): n for n, p in model.named_parameters()}
    for path, module in model.named_modules():
        dim, fused, bias = CUTS[kind].get(path.rpartition(".")[-1], (0, 0, False))
        leaves = {"weight": (dim, fused), **({"bias": (0, fused)} if bias else {})} if fused else {}
        leaves |= {leaf: CUTS[kind][leaf][:2] for leaf in module._parameters if leaf in CUTS[kind]}
        for leaf, (along, fused) in leaves.items():
            parameter = getattr(module, leaf, None)
            if parameter is None:
                continue
            size = parameter.shape[along]
            piece = Slice.part(along, size, rank=world.index("tp"), width=world.width("tp"), fused=fused)
            layout.slices[names[id(parameter)]] = piece
            done[id(parameter)] = nn.Parameter(piece.take(parameter.detach()), requires_grad=False)
    for module in model.modules():  # of tied weights every owner
        for leaf, parameter in module._parameters.items():
            module._parameters[leaf] = done.get(id(parameter), parameter)
    assert len(done) >= 3
    return layout


def read_and_gather(directories: dict[str, Path], settings: dict[str, Any]) -> list[tuple[str, Any]]:
    world = ProcessMesh.of(Mesh(**settings), CPU)
    wrong: list[tuple[str, Any]] = []
    for kind, directory in directories.items():
        family = kind.removesuffix("-bf16")
        model = empty_model(auto(family), directory, dtype=torch.float32, **options(family)).requires_grad_(False)
        checkpoint = CheckpointFiles.of(model, directory)
        layout = cut(model, family, world)
        shard(model, mesh=Mesh(**settings), world=world)
        materialize(model, "cpu")
        loaded = load_weights(model, checkpoint, layout=layout, world=world)
        if kind == "mixtral":  # experts that the file has one by one: no rank reads another's
            assert len(checkpoint.stacked) == len(checkpoint.converted) == 2 * model.config.num_hidden_layers
            assert loaded.bytes == sum(local_part(p).nbytes for p in model.parameters())
        with torch.random.fork_rng(devices=[]):
            truth = auto(family).from_pretrained(directory, dtype=torch.float32, **options(family))
        live = dict(model.named_parameters())
        gathered = gather_full_tensors(live, parameters=live, layout=layout, world=world)
        expected = {n: p.detach() for n, p in truth.named_parameters() if n not in loaded.unread}
        wrong += [(kind, n) for n, t in expected.items() if not torch.equal(t, gathered[n])]
        wrong += [(kind, n) for n, b in truth.named_buffers() if not torch.equal(b, dict(model.named_buffers())[n])]
        if dict(model.named_parameters()).keys() != dict(truth.named_parameters()).keys():
            wrong.append((kind, "names"))
        # there and back: into the parameters, and into plain moments of their shapes
        values = {n: torch.randn(t.shape, generator=torch_generator(0, n)) for n, t in gathered.items()}
        moments = {n: torch.zeros_like(p.to_local()) for n, p in live.items()}
        for name, value in values.items():
            copy_local_part(live[name], value, layout.slices.get(name))
            copy_local_part(moments[name], value, layout.slices.get(name), parameter=live[name])
        for tensors in (live, moments):
            back = gather_full_tensors(tensors, parameters=live, layout=layout, world=world)
            wrong += [(kind, n) for n, value in values.items() if not torch.equal(back[n], value)]
    return wrong


def test_slices_of_files_are_the_whole_checkpoint_under_tensor_parallel_cuts(directories, tmp_path):
    kinds = {kind: directories[kind] for kind in CUTS}
    kinds["llama-bf16"] = save("llama", tmp_path, dtype=torch.bfloat16)
    for wrong in run_ranks(read_and_gather, 4, kinds, {"dp": 2, "tp": 2}):
        assert wrong == []


# --------------------------------------------------------------------------------------------- refusals


def refused(directory: Path) -> list[str]:
    said = []
    for settings in ({"dp": 2, "offload": True}, {"dp": 2, "zero": 1, "adapters": "replicate"}):
        try:
            sharded("llama", directory, Mesh(**settings), ProcessMesh.of(Mesh(**settings), CPU))
        except UserError as error:
            said.append(str(error))
    world = ProcessMesh.of(Mesh(dp=2), CPU)
    model = adapted(empty_model(auto("llama"), directory, dtype=torch.float32), "llama", rank=2, dtype=torch.float32)
    from flatshift.finetune.parallel import fsdp as module

    module.fully_shard = lambda unit, **options: unit  # what a library does that ignores the CPU
    try:
        shard(model, mesh=Mesh(dp=2), world=world)
    except RuntimeError as error:
        said.append(str(error))
    return said


def test_what_cannot_be_sharded_is_said(directories):
    for offload, replicate, silent in run_ranks(refused, 2, directories["llama"]):
        assert "mesh.offload" in offload and "mesh.zero 1" in replicate
        assert silent.startswith("silently unsharded: 0 of 7 units")


def timeouts() -> list[Any]:
    """Of the groups of single axes, and of two together."""
    world = ProcessMesh.of(Mesh(dp=2, tp=2), torch.device("cpu"))
    groups = [world.group(*axes) for axes in (("dp",), ("tp",), ("dp", "tp"))]
    return [group._get_backend(torch.device("cpu")).options._timeout for group in groups]


def test_groups_of_axes_wait_as_long_as_the_job() -> None:
    """Not for torch's ten or thirty minutes, which an evaluation on one rank may exceed."""
    assert run_ranks(timeouts, 4) == [[TIMEOUT] * 3] * 4
