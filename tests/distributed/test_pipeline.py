"""A model cut into pipeline stages trains, judges and generates as the whole model does."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.distributed_ranks import run_ranks
from tests.support.finetune_models import save_backbone
from tests.support.mesh_updates import few_updates

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
    by_tokens: bool = False
    """Sequence parallelism."""
    reshard: bool | None = None
    prefetch: bool = False
    """As on a GPU."""


@dataclass(frozen=True)
class Micro:
    """A micro-batch as the loop makes them."""

    inputs: dict[str, Tensor]
    labels: Tensor


# ------------------------------------------------------------------------------------------------ models and batches


def whole_model(kind: str, blocks: int, first_adapted: int = 0, dropout: float = 0.0) -> Any:
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
    settings: dict[str, Any] = {"modules_to_save": head or None, "layers_to_transform": layers}
    peft = get_peft_model(model, LoraConfig(r=4, target_modules=targets, lora_dropout=dropout, **settings))
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
    from flatshift.finetune.models.checkpoint import canonical_name

    return {canonical_name(name): p for name, p in model.named_parameters() if p.requires_grad}


def train(
    model: nn.Module, update: Callable[[int], Tensor], whole: Callable[[dict[str, Tensor]], dict[str, Tensor]]
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses over the steps and the gradients of the first, made whole."""
    own = named_trained(model)
    optimizer = torch.optim.AdamW(own.values(), lr=1e-3, eps=1e-6) if own else None
    losses, first = [], {}
    for step in range(STEPS):
        losses.append(float(update(step)))
        if step == 0:
            first = {name: g.clone() for name, g in whole({name: p.grad for name, p in own.items()}).items()}
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
    return losses, first


def relative(a: Tensor, b: Tensor) -> float:
    """‖a − b‖ ÷ ‖b‖."""
    return float((a - b).norm() / b.norm().clamp(min=1e-12))


# ------------------------------------------------------------------------------------------------ what the ranks run


def compare(case: Case, *, pp: int, dp: int = 1, tp: int = 1) -> dict[str, Any]:
    """Train the whole model and the stages; figures of the difference, the same on every rank."""
    import torch.distributed as dist

    from flatshift.finetune.compute.capabilities import CUDA, override_capabilities
    from flatshift.finetune.compute.loss import batch_loss, head_probe
    from flatshift.finetune.config import Mesh
    from flatshift.finetune.parallel.fsdp import shard
    from flatshift.finetune.parallel.layout import gather_full_tensors
    from flatshift.finetune.parallel.mesh import ProcessMesh
    from flatshift.finetune.parallel.pipeline import PipelineRunner, build_rank_stages
    from flatshift.finetune.parallel.tensor import tensor_parallel
    from flatshift.finetune.tasks import Classify, LanguageModel

    mesh = Mesh(
        pp=pp, dp=dp, tp=tp, schedule=case.schedule, virtual=case.virtual, microbatches=case.pieces,
        sequence_parallel=case.by_tokens, reshard=case.reshard,
    )  # fmt: skip
    world = ProcessMesh.of(mesh, torch.device("cpu"))
    whole = whole_model(case.kind, 2 * pp, case.first_adapted)
    batches = [[micros_at(case.kind, step, case.micros, seed=7 * row) for row in range(dp)] for step in range(STEPS)]
    counts = [sum(count_of(micros) for micros in step) for step in batches]
    task = Classify() if batches[0][0][0].labels.ndim == 1 else LanguageModel()
    loss = summed_loss if case.kind == "t5" else None
    parts, stages = build_rank_stages(copy.deepcopy(whole), lambda: copy.deepcopy(whole), mesh=mesh, world=world)
    layout = tensor_parallel(parts, world=world, sequence_parallel=case.by_tokens)
    with override_capabilities(CUDA, on="cpu") if case.prefetch else contextlib.nullcontext():
        sharding = shard(parts, mesh=mesh, world=world)
    prefetched: list[int] = []
    for unit in sharding.units if case.prefetch else ():
        state = unit._get_fsdp_state()
        prefetched.append(len(state._states_to_forward_prefetch) + len(state._states_to_backward_prefetch))
    runner = PipelineRunner(parts, mesh=mesh, world=world)
    head = None if loss is not None else runner.find_head(head_probe(batches[0][0][0].inputs), task=task)

    def whole_update(step: int) -> Tensor:
        total = torch.zeros(())
        for micro in itertools.chain(*batches[step]):
            part = (summed_loss(whole, micro) if loss else batch_loss(whole, micro, task=task)) / counts[step]
            part.backward()
            total += part.detach()
        return total

    def staged_update(step: int) -> Tensor:
        mine = batches[step][world.index("dp")]
        total = runner.forward_backward(mine, counts[step], task=task, head=head, loss=loss, scale=dp)
        for name, parameter in own.items():
            if name in layout.partial:
                world.sum(parameter.grad, "tp") if dp == 1 else world.sum(parameter.grad.to_local(), "tp")
        return world.sum(total, "dp")

    def gathered(gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        found: list[Any] = [None] * pp
        mine = gather_full_tensors(gradients, parameters=own, layout=layout, world=world)
        dist.all_gather_object(found, mine, group=world.group("pp"))
        return {name: grad for part in found for name, grad in part.items()}

    own = named_trained(parts)
    wanted_losses, wanted = train(whole, whole_update, dict)
    losses, gradients = train(parts, staged_update, gathered)
    assert gradients.keys() == wanted.keys(), gradients.keys() ^ wanted.keys()
    inputs = batches[0][0][0].inputs
    whole.eval()
    runner.stand_in.eval()
    with torch.no_grad():
        logits, wanted_logits = runner.stand_in(**inputs).logits, whole(**inputs).logits
    figures: dict[str, Any] = {
        "stages": stages,
        "loss": max(abs(a - b) for a, b in zip(losses, wanted_losses, strict=True)),
        "gradient": max(relative(gradients[name], grad) for name, grad in wanted.items()),
        "smallest": min(float(grad.norm()) for grad in wanted.values()),
        "logits": relative(logits, wanted_logits),
        "head": head is not None,
        "prefetched": sum(prefetched),
        "elements": sum(p.numel() for p in parts.parameters()) / sum(p.numel() for p in whole.parameters()),
    }
    if task.kind != "classify" and loss is None:
        figures["generated"] = generated_alike(whole, runner)
    return figures


def generated_alike(whole: Any, runner: Any) -> bool:
    """Greedy answers to prompts padded on the left."""
    from transformers import GenerationConfig

    ids = torch.tensor([[0, 0, 5, 9, 4], [7, 6, 5, 4, 3]])
    mask = (ids != 0).long()
    config = GenerationConfig(do_sample=False, max_new_tokens=6, pad_token_id=0, eos_token_id=2, bos_token_id=1)
    wanted = whole.generate(input_ids=ids, attention_mask=mask, generation_config=config)
    found = runner.stand_in.generate(input_ids=ids, attention_mask=mask, generation_config=config)
    return bool(torch.equal(wanted, found))


def run_cases(cases: list[Case], pp: int, dp: int, tp: int) -> list[dict[str, Any]]:
    """`compare` for each case, on one rank."""
    return [compare(case, pp=pp, dp=dp, tp=tp) for case in cases]


def with_dropout() -> tuple[list[str], list[int]]:
    """Sums of the gradients of three updates, the first two with the same seeds, and the numbers that seeds come by."""
    from flatshift.finetune.config import Mesh
    from flatshift.finetune.parallel.mesh import ProcessMesh
    from flatshift.finetune.parallel.pipeline import PipelineRunner, build_rank_stages
    from flatshift.finetune.tasks import LanguageModel

    mesh = Mesh(pp=2, schedule="interleaved")
    world = ProcessMesh.of(mesh, torch.device("cpu"))
    parts, _ = build_rank_stages(
        whole_model("gpt2", 4, dropout=0.2), lambda: whole_model("gpt2", 4, dropout=0.2), mesh=mesh, world=world
    )
    runner = PipelineRunner(parts, mesh=mesh, world=world)
    seen: list[int] = []
    sums = []
    for seed in (1, 1, 2):
        seen.clear()

        @contextlib.contextmanager
        def seeded(number: int, seed: int = seed) -> Any:
            seen.append(number)
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(1000 * seed + number)
                yield

        micros = micros_at("gpt2", 0, 2)
        loss = runner.forward_backward(micros, count_of(micros), task=LanguageModel(), context=seeded)
        grads = [p.grad for p in parts.parameters() if p.grad is not None]
        sums.append(f"{float(loss)!r} {float(sum(g.double().sum() for g in grads))!r}")
        for p in parts.parameters():
            p.grad = None
    return sums, list(seen)


# ------------------------------------------------------------------------------------------------ tests


def check(cases: list[Case], *, pp: int, dp: int = 1, tp: int = 1) -> None:
    """Run the cases on pp × dp × tp processes and demand the whole model's numbers."""
    ranks = run_ranks(run_cases, pp * dp * tp, cases, pp, dp, tp)
    for index, case in enumerate(cases):
        for rank, figures in enumerate(rank[index] for rank in ranks):
            print(rank, case, figures)
            assert figures["loss"] <= 1e-5, (case, figures)
            assert figures["gradient"] <= 1e-5, (case, figures)
            assert figures["logits"] <= 1e-5, (case, figures)
            assert figures["smallest"] > 1e-6, (case, figures)
            assert figures["elements"] < 0.9, (case, figures)
            assert figures.get("generated", True), (case, figures)
            assert bool(figures["prefetched"]) == case.prefetch, (case, figures)
        last = [figures["head"] for figures in (rank[index] for rank in ranks)]
        assert any(last) == (case.kind in WITH_HEAD), (case, last)


WITH_HEAD = ("llama", "qwen3", "gemma2", "gpt2", "gpt_neox")


def test_two_stages() -> None:
    """Every schedule and family, also with first stages without trained parameters; accumulation in each."""
    schedules = [Case("llama", name) for name in ("gpipe", "1f1b", "interleaved", "zero-bubble", "zbv")]
    families = [Case(kind, "1f1b") for kind in ("gpt2", "qwen3", "gemma2", "bert", "llama-class", "t5")]
    more = [Case("gpt2", "zbv"), Case("roberta", "interleaved"), Case("gpt_neox", "zero-bubble"), Case("t5", "zbv")]
    frozen = [Case("llama", name, first_adapted=3) for name in ("gpipe", "1f1b", "interleaved")]
    frozen += [Case("llama", name, first_adapted=2) for name in ("zero-bubble", "zbv")]
    check([*schedules, *families, *more, *frozen], pp=2)


@pytest.mark.slow
def test_four_stages_and_odd_numbers_of_pieces() -> None:
    """Fewer pieces than stages, a number that interleaving does not take, three micro-batches, no virtual stages."""
    odd = [Case("llama", "1f1b", pieces=1, micros=1), Case("gpt2", "zbv", pieces=3, micros=3)]
    more = [Case("qwen3", "interleaved", pieces=3, micros=3), Case("t5", "zbv"), Case("bert", "interleaved", virtual=1)]
    check([*odd, *more], pp=4)


@pytest.mark.slow
def test_sharded_stages() -> None:
    """FSDP2 inside the stages reduces gradients once, in the last piece's backward pass."""
    cases = [Case("llama", "1f1b"), Case("gpt2", "zbv"), Case("bert", "interleaved"), Case("t5", "1f1b")]
    frozen = [Case("llama", "zero-bubble", first_adapted=2), Case("llama", "gpipe", first_adapted=3)]
    check([*cases, *frozen], pp=2, dp=2)


@pytest.mark.slow
def test_stages_that_free_their_weights_between_pieces() -> None:
    cases = [Case("llama", "1f1b", reshard=True, prefetch=True), Case("llama", "zbv", reshard=True)]
    check([*cases, Case("t5", "1f1b", reshard=True), Case("gpt2", "gpipe", first_adapted=3, reshard=True)], pp=2, dp=2)


@pytest.mark.slow
def test_tensor_parallel_stages() -> None:
    """Each tensor-parallel rank sends its share of the hidden states: of their width, or of their tokens."""
    by_tokens = [Case("llama", "interleaved", by_tokens=True), Case("qwen3", "zbv", by_tokens=True, first_adapted=2)]
    check([Case("llama", "1f1b"), Case("gpt2", "zbv"), Case("t5", "1f1b"), *by_tokens], pp=2, tp=2)


@pytest.mark.slow
def test_three_axes() -> None:
    check([Case("llama", "1f1b"), Case("qwen3", "interleaved")], pp=2, dp=2, tp=2)


def test_dropout_is_drawn_by_piece_and_stage() -> None:
    ranks = run_ranks(with_dropout, 2)
    for sums, _ in ranks:
        assert sums[0] == sums[1] != sums[2]
    numbers = [number for _, seen in ranks for number in seen]
    assert len(numbers) == len(set(numbers))


def long_rows(source: str) -> list[list[float]]:
    """Losses of one process and of two stages on rows longer than those that the head is looked for with."""
    from flatshift.finetune.config import Adapter, Mesh, Train
    from flatshift.finetune.data.batches import TrainingDataLoader
    from flatshift.finetune.data.example import Example
    from flatshift.finetune.parallel.build import build_engine
    from flatshift.finetune.parallel.mesh import ProcessMesh
    from flatshift.finetune.tasks import LanguageModel

    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, VOCABULARY, (8, 150), generator=generator).tolist()
    examples = [Example(row, [-100, *row[1:]], id=str(i), where="test") for i, row in enumerate(ids)]
    task, train, cpu = LanguageModel(pack=False), Train(batch_size=2, max_length=150, device="cpu"), torch.device("cpu")
    found = []
    for mesh in (Mesh(), Mesh(pp=2)):
        world = ProcessMesh.alone(cpu) if mesh.size == 1 else ProcessMesh.of(mesh, cpu)
        engine = build_engine(source, task=task, adapter=Adapter(rank=4), train=train, mesh=mesh, world=world)
        batches = TrainingDataLoader(
            examples, task=task, batch_size=2, accumulate=1, seed=0, max_length=150, pad_id=0, share=engine.share
        )
        found.append(few_updates(engine, batches, task, STEPS)[0])
    return found


def test_rows_longer_than_the_probe_of_the_head(tmp_path: Path) -> None:
    source = str(save_backbone("llama", tmp_path / "backbone"))
    for alone, staged in run_ranks(long_rows, 2, source):
        assert staged == pytest.approx(alone, abs=1e-5)
