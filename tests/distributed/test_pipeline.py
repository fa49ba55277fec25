"""A model cut into pipeline stages trains, judges and generates as the whole model does."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from distributed_ranks import run_ranks
from torch import Tensor, nn

VOCABULARY = 64
STEPS = 3


@dataclass(frozen=True)
class Case:
    """One model on one schedule."""

    kind: str
    schedule: str
    virtual: int | None = None
    first_adapted: int = 0
    """Blocks before this one have no adapter."""
    pieces: int | None = None
    micros: int = 2


@dataclass(frozen=True)
class Micro:
    """A micro-batch as the loop makes them."""

    inputs: dict[str, Tensor]
    labels: Tensor


# ------------------------------------------------------------------------------------------------ models and batches


def whole_model(kind: str, blocks: int, first_adapted: int = 0) -> Any:
    """A tiny PEFT model whose adapters all have a gradient; the same on every rank."""
    import transformers as tf
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": blocks, "num_attention_heads": 4}
    ids: dict[str, Any] = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    kv = {"num_key_value_heads": 2}
    no_drop = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    gpt2 = {"n_embd": 32, "n_layer": blocks, "n_head": 4, "n_positions": 64}
    dry = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    t5 = {"d_model": 32, "d_ff": 48, "d_kv": 8, "num_heads": 4, "num_layers": blocks // 2, "dropout_rate": 0.0}
    table: dict[str, tuple[Any, Any, dict[str, Any], list[str]]] = {
        "llama": (tf.LlamaForCausalLM, tf.LlamaConfig, {**sizes, **kv}, ["q_proj", "v_proj", "down_proj"]),
        "llama-class": (tf.LlamaForSequenceClassification, tf.LlamaConfig, {**sizes, "num_labels": 3}, ["q_proj"]),
        "qwen3": (tf.Qwen3ForCausalLM, tf.Qwen3Config, {**sizes, **kv, "head_dim": 8}, ["q_proj", "o_proj"]),
        "gemma2": (tf.Gemma2ForCausalLM, tf.Gemma2Config, {**sizes, **kv, "head_dim": 8}, ["q_proj", "o_proj"]),
        "gpt2": (tf.GPT2LMHeadModel, tf.GPT2Config, {**gpt2, **dry}, ["c_attn", "c_proj"]),
        "gpt_neox": (tf.GPTNeoXForCausalLM, tf.GPTNeoXConfig, sizes, ["query_key_value"]),
        "bert": (tf.BertForSequenceClassification, tf.BertConfig, {**sizes, **no_drop, "num_labels": 3}, ["query"]),
        "roberta": (tf.RobertaForSequenceClassification, tf.RobertaConfig, {**sizes, **no_drop}, ["query"]),
        "t5": (tf.T5ForConditionalGeneration, tf.T5Config, {**t5, "decoder_start_token_id": 0}, ["q", "v", "wo"]),
    }
    model_class, config_class, own, targets = table[kind]
    model = model_class(config_class(**{**ids, **own, "initializer_range": 0.1, "use_cache": False}))
    head = [name for name in ("score", "classifier") if hasattr(model, name)]
    layers = list(range(first_adapted, blocks)) if first_adapted else None
    peft = get_peft_model(
        model, LoraConfig(r=4, target_modules=targets, modules_to_save=head or None, layers_to_transform=layers)
    )
    with torch.no_grad():
        for name, p in peft.named_parameters():
            if "lora_B" in name:
                p.normal_(std=0.1)
    return peft


def micros_at(kind: str, step: int, micros: int, *, seed: int = 0) -> list[Micro]:
    """Rows of several lengths, the last micro-batch narrower than the first."""
    generator = torch.Generator().manual_seed(100 * step + seed)
    found = []
    for index in range(micros):
        rows, tokens = 4, 12 - 3 * index
        ids = torch.randint(3, VOCABULARY // 4, (rows, tokens), generator=generator)
        mask = torch.ones_like(ids)
        mask[1, tokens - 3 :] = 0
        ids = torch.where(mask.bool(), ids, 0)
        inputs = {"input_ids": ids, "attention_mask": mask}
        labels = torch.where(mask.bool(), ids, -100)
        if kind in ("bert", "roberta", "llama-class"):
            labels = torch.randint(0, 2, (rows,), generator=generator)
        if kind == "t5":
            labels = torch.randint(3, VOCABULARY // 4, (rows, 5 + index), generator=generator)
            inputs["decoder_input_ids"] = F.pad(labels[:, :-1], (1, 0))
        found.append(Micro(inputs, labels))
    return found


def summed_loss(part: nn.Module, batch: Any) -> Tensor:
    """Cross entropy summed over supervised items; the labels of an encoder-decoder are not shifted."""
    logits = part(**batch.inputs).logits
    labels = batch.labels
    if labels.ndim == 2 and "decoder_input_ids" not in batch.inputs:
        logits, labels = logits[:, :-1], labels[:, 1:]
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), reduction="sum")


def count_of(micros: list[Micro]) -> int:
    """Supervised items."""
    shifted = [m.labels if m.labels.ndim == 1 or "decoder_input_ids" in m.inputs else m.labels[:, 1:] for m in micros]
    return sum(int((labels != -100).sum()) for labels in shifted)


def named_trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """Trained parameters by canonical name."""
    from finetune.parallel.layout import canonical

    return {canonical(name): p for name, p in model.named_parameters() if p.requires_grad}


def train(model: nn.Module, update: Callable[[int], Tensor]) -> tuple[list[float], dict[str, Tensor]]:
    """Losses over the steps and the gradients of the first."""
    own = named_trained(model)
    optimizer = torch.optim.AdamW(own.values(), lr=1e-3, eps=1e-6) if own else None
    losses, first = [], {}
    for step in range(STEPS):
        losses.append(float(update(step)))
        if step == 0:
            first = {name: _whole(p.grad).clone() for name, p in own.items() if p.grad is not None}
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
    return losses, first


def _whole(tensor: Any) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def relative(a: Tensor, b: Tensor) -> float:
    """‖a − b‖ ÷ ‖b‖."""
    return float((a - b).norm() / b.norm().clamp(min=1e-12))


# ------------------------------------------------------------------------------------------------ what the ranks run


def compare(case: Case, *, pp: int, dp: int = 1) -> dict[str, Any]:
    """Train the whole model and the stages; figures of the difference, the same on every rank."""
    import torch.distributed as dist

    from finetune.config import LanguageModel, Mesh
    from finetune.parallel.pipeline import PipelineRunner, cut_parts
    from finetune.parallel.world import World

    blocks = pp * 2
    mesh = Mesh(pp=pp, dp=dp, schedule=case.schedule, virtual=case.virtual, microbatches=case.pieces)
    world = World.of(mesh, torch.device("cpu"))
    whole = whole_model(case.kind, blocks, case.first_adapted)
    batches = [
        [micros_at(case.kind, step, case.micros, seed=7 * rank) for rank in range(dp)] for step in range(STEPS)
    ]
    counts = [sum(count_of(micros) for micros in step) for step in batches]
    parts, stages = cut_parts(copy.deepcopy(whole), lambda: copy.deepcopy(whole), mesh=mesh, world=world)
    if dp > 1:
        shard_parts(parts, world)
    runner = PipelineRunner(parts, mesh=mesh, world=world)

    def whole_update(step: int) -> Tensor:
        total = torch.zeros(())
        for micro in itertools.chain(*batches[step]):
            loss = summed_loss(whole, micro) / counts[step]
            loss.backward()
            total += loss.detach()
        return total

    def staged_update(step: int) -> Tensor:
        mine = batches[step][world.index("dp")]
        total = runner.forward_backward(mine, counts[step], task=LanguageModel(), loss=summed_loss, scale=dp)
        return world.sum(total, "dp")

    wanted_losses, wanted = train(whole, whole_update)
    losses, mine = train(parts, staged_update)
    found: list[Any] = [None] * world.width("pp")
    dist.all_gather_object(found, mine, group=world.group("pp"))
    gradients = {name: grad for part in found for name, grad in part.items()}
    assert gradients.keys() == wanted.keys(), gradients.keys() ^ wanted.keys()
    inputs = batches[0][0][0].inputs
    with torch.no_grad():
        whole.eval()
        runner.stand_in.eval()
        logits = runner.stand_in(**inputs).logits
        wanted_logits = whole(**inputs).logits
    figures: dict[str, Any] = {
        "stages": stages,
        "loss": max(abs(a - b) for a, b in zip(losses, wanted_losses, strict=True)),
        "fell": wanted_losses[0] - wanted_losses[-1],
        "gradient": max(relative(gradients[name], grad) for name, grad in wanted.items()),
        "smallest": min(float(grad.norm()) for grad in wanted.values()),
        "logits": relative(logits, wanted_logits),
        "elements": sum(p.numel() for p in parts.parameters()) / sum(p.numel() for p in whole.parameters()),
    }
    if logits.shape[-1] == VOCABULARY and case.kind != "t5":
        figures["generated"] = generated_alike(whole, runner)
    return figures


def shard_parts(parts: nn.Module, world: Any) -> None:
    """FSDP2 over dp, block by block."""
    from torch.distributed.fsdp import fully_shard

    from finetune.parallel.pipeline.families import Anatomy

    for part in parts:
        for block in Anatomy.of(part).blocks:
            if next(block.parameters(), None) is not None:
                fully_shard(block, mesh=world.submesh("dp"), reshard_after_forward=False)
        fully_shard(part, mesh=world.submesh("dp"), reshard_after_forward=False)


def generated_alike(whole: Any, runner: Any) -> bool:
    """Greedy answers to prompts padded on the left."""
    from transformers import GenerationConfig

    ids = torch.tensor([[0, 0, 5, 9, 4], [7, 6, 5, 4, 3]])
    mask = (ids != 0).long()
    config = GenerationConfig(do_sample=False, max_new_tokens=6, pad_token_id=0, eos_token_id=2, bos_token_id=1)
    wanted = whole.generate(input_ids=ids, attention_mask=mask, generation_config=config)
    found = runner.stand_in.generate(input_ids=ids, attention_mask=mask, generation_config=config)
    return bool(torch.equal(wanted, found))


def run_cases(cases: list[Case], pp: int, dp: int) -> list[dict[str, Any]]:
    """`compare` for each case, on one rank."""
    return [compare(case, pp=pp, dp=dp) for case in cases]


# ------------------------------------------------------------------------------------------------ tests


def check(cases: list[Case], *, pp: int, dp: int = 1) -> None:
    """Run the cases on pp × dp processes and demand the whole model's numbers."""
    ranks = run_ranks(run_cases, pp * dp, cases, pp, dp, timeout=170)
    for index, case in enumerate(cases):
        for figures in (rank[index] for rank in ranks):
            print(case, figures)
            assert figures["loss"] <= 1e-5, (case, figures)
            assert figures["gradient"] <= 1e-5, (case, figures)
            assert figures["logits"] <= 1e-5, (case, figures)
            assert figures["fell"] > 0 and figures["smallest"] > 1e-6, (case, figures)
            assert figures["elements"] < 0.9, (case, figures)
            assert figures.get("generated", True), (case, figures)
