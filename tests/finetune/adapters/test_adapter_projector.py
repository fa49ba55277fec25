"""Features before the text: losses and gradients beside plain torch; padding, training, files and plain PEFT."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from array import array
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from flatshift.experiments.data.encode import is_large
from flatshift.experiments.recipe.rules import check_rules
from flatshift.experiments.recipe.schema import Recipe
from flatshift.finetune.adapters.adapter import attach_adapter, load_adapter, read_adapter, save_adapter, trainable
from flatshift.finetune.compute.loss import batch_loss, find_head
from flatshift.finetune.config import Adapter, Optimizer, Projector, Train
from flatshift.finetune.data.columns import ColumnarExamples
from flatshift.finetune.data.config import Data, TrainFiles
from flatshift.finetune.data.eval_batching import EvalBatching
from flatshift.finetune.data.example import Example
from flatshift.finetune.errors import UserError
from flatshift.finetune.evaluate import ranking
from flatshift.finetune.evaluate.generation import context_overflow
from flatshift.finetune.evaluate.perplexity import document_nats
from flatshift.finetune.models.anatomy import position_limit
from flatshift.finetune.models.fingerprint import checksum
from flatshift.finetune.models.load import load_backbone
from flatshift.finetune.parallel.engine import Engine
from flatshift.finetune.planner.memory import memory_plan
from flatshift.finetune.run_directory import read_metrics
from flatshift.finetune.tasks import Classify, Completion, LanguageModel
from flatshift.finetune.train.stage import check_length
from flatshift.regularizers import GGPO, RegularizerError, build
from tests.support.finetune_models import IGNORED, Micro, RandomBatches, save_backbone
from tests.support.stage_runs import run_or_stop

LM = LanguageModel(pack=False)
K, WIDTH, SOFT = 3, 6, 2
FIRST = Adapter(soft_tokens=SOFT, projector=Projector(width=WIDTH, vectors=K))
UPPER = Adapter(soft_tokens=SOFT, projector=Projector(width=WIDTH, inject=(1, 2, 3)))
FROM_ZERO = Adapter(soft_tokens=SOFT, projector=Projector(width=WIDTH, inject=(0, 2, 3)))


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    sizes = {"llama": {"num_hidden_layers": 4}, "gpt2": {"n_layer": 4}}
    return {kind: save_backbone(kind, tmp_path_factory.mktemp(kind), **more) for kind, more in sizes.items()}


def make(source, adapter, *, seed=0, task=LM):
    return attach_adapter(load_backbone(source, task=task), adapter, task=task, seed=seed)


def micro(seed=0, *, rows=3, length=9) -> Micro:
    """Rows of different lengths, padded on the right, with features."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 64, (rows, length), generator=generator)
    mask = (torch.arange(length) < torch.tensor([length, length - 3, length - 5])[:rows, None]).long()
    labels = torch.where((torch.rand(ids.shape, generator=generator) < 0.3) | (mask == 0), IGNORED, ids)
    features = torch.randn(rows, K, WIDTH, generator=generator)
    inputs = {"input_ids": ids * mask, "attention_mask": mask, "features": features}
    return Micro(inputs, labels, int((labels[:, 1:] != IGNORED).sum()), rows)


def naive_first(plain, weights, batch):
    """Logits of the text: projected features, soft tokens and text given to the model as embeddings, row by row."""
    rows = []
    for ids, mask, features in zip(*batch.inputs.values(), strict=True):
        length = int(mask.sum())
        projected = features @ weights["projector.weight"].T + weights["projector.bias"]
        text = plain.get_input_embeddings()(ids[:length])
        row = torch.cat([projected, weights["prompt_encoder.embedding.weight"], text])[None]
        rows.append(plain(inputs_embeds=row, use_cache=False).logits[0, K + SOFT :])
    return rows


def naive_upper(plain, weights, batch, inject=(1, 2, 3)):
    """The same for a Llama whose k-th vector is put in front of the hidden states at block inject[k], in place of the
    one before; below the first, there is nothing in front."""
    rows = []
    for ids, mask, features in zip(*batch.inputs.values(), strict=True):
        projected = features @ weights["projector.weight"].T + weights["projector.bias"]
        text = plain.get_input_embeddings()(ids[: int(mask.sum())])
        hidden = torch.cat([weights["prompt_encoder.embedding.weight"], text])[None]
        for number, block in enumerate(plain.model.layers):
            if number in inject:
                k = inject.index(number)
                hidden = torch.cat([projected[None, k : k + 1], hidden[:, 1 if k else 0 :]], dim=1)
            places = torch.arange(hidden.shape[1])[None]
            causal = torch.full((1, 1, hidden.shape[1], hidden.shape[1]), -torch.inf).triu(1)
            turned = plain.model.rotary_emb(hidden, places)
            hidden = block(hidden, attention_mask=causal, position_ids=places, position_embeddings=turned)
        rows.append(plain.lm_head(plain.model.norm(hidden))[0, 1 + SOFT :])
    return rows


@pytest.mark.parametrize(
    ("kind", "adapter", "naive"),
    [
        ("llama", FIRST, naive_first),
        ("gpt2", FIRST, naive_first),
        ("llama", UPPER, naive_upper),
        ("llama", FROM_ZERO, functools.partial(naive_upper, inject=(0, 2, 3))),
    ],
    ids=["llama-first", "gpt2-first", "llama-upper", "llama-from-0"],
)
def test_loss_and_gradients_are_those_of_plain_torch(kind, adapter, naive, sources):
    from transformers import AutoModelForCausalLM

    state = torch.random.get_rng_state()
    model = make(sources[kind], adapter)
    assert torch.equal(state, torch.random.get_rng_state())
    live = trainable(model)
    assert {name: tuple(p.shape) for name, p in live.items()} == {
        "prompt_encoder.embedding.weight": (SOFT, 32), "projector.weight": (32, WIDTH), "projector.bias": (32,)
    }  # fmt: skip
    batch = micro()
    plain = AutoModelForCausalLM.from_pretrained(sources[kind], dtype=torch.float32).eval().requires_grad_(False)
    weights = {name: p.detach().clone().requires_grad_() for name, p in live.items()}
    wanted = torch.zeros(())
    logits = naive(plain, weights, batch)
    for row, labels in zip(logits, batch.labels, strict=True):
        wanted = wanted + F.cross_entropy(row[:-1], labels[1 : len(row)], reduction="sum", ignore_index=IGNORED)
    wanted.backward()
    model.eval()
    assert find_head(model, batch.inputs, task=LM) is None
    loss = batch_loss(model, batch, task=LM)
    loss.backward()
    torch.testing.assert_close(loss, wanted, rtol=1e-5, atol=1e-5)
    for name, parameter in live.items():
        torch.testing.assert_close(parameter.grad, weights[name].grad, rtol=1e-4, atol=1e-5, msg=name)
        assert parameter.grad.abs().max() > 1e-3
    with torch.no_grad():
        ours = model(**batch.inputs).logits
    assert ours.shape == (*batch.labels.shape, 64)
    for mine, its in zip(ours, logits, strict=True):  # the padding behind a row changes nothing in it
        torch.testing.assert_close(mine[: len(its)], its.detach(), rtol=0, atol=1e-5)


def test_blocks_below_see_nothing_of_the_features(sources):
    model = make(sources["gpt2"], Adapter(soft_tokens=SOFT, projector=Projector(width=WIDTH, inject=(2, 3))))
    seen = {}
    for number, block in enumerate(model.get_base_model().transformer.h):
        block.register_forward_hook(lambda m, a, out, n=number: seen.setdefault(n, []).append(out[:, 1:].clone()))
    batch = micro()
    with torch.no_grad():
        for factor in (1.0, -2.0):
            model.eval()(**{**batch.inputs, "features": factor * batch.inputs["features"][:, :2]})
    assert [torch.equal(*seen[number]) for number in range(4)] == [True, True, False, False]


def test_it_comes_back_from_disk_and_plain_peft_takes_the_soft_tokens(sources, tmp_path):
    from peft import PeftModel
    from safetensors import safe_open
    from safetensors.torch import load_file

    model, batch = make(sources["llama"], UPPER), micro()
    assert position_limit(make(sources["gpt2"], FIRST)) == 64 - K - SOFT
    assert position_limit(make(sources["gpt2"], UPPER)) == 64 - 1 - SOFT
    other = make(sources["llama"], UPPER, seed=1)
    assert not any(torch.equal(a, b) for a, b in zip(trainable(model).values(), trainable(other).values(), strict=True))
    again = trainable(make(sources["llama"], UPPER))
    assert all(torch.equal(again[name], p) for name, p in trainable(model).items()), "drawn by the seed"
    save_adapter(model, tmp_path / "adapter")
    assert read_adapter(tmp_path / "adapter").keys() == trainable(model).keys()
    loss = batch_loss(model.eval(), batch, task=LM)
    assert batch_loss(other.eval(), batch, task=LM) != loss
    load_adapter(other, tmp_path / "adapter")
    assert torch.equal(batch_loss(other.eval(), batch, task=LM), loss)
    theirs = PeftModel.from_pretrained(load_backbone(sources["llama"], task=LM), tmp_path / "adapter")
    assert torch.equal(theirs.get_prompt(1)[0], trainable(model)["prompt_encoder.embedding.weight"])
    file = tmp_path / "adapter" / "projector.safetensors"
    linear = nn.Linear(WIDTH, 32)
    linear.load_state_dict(load_file(file))
    with safe_open(file, "pt") as opened:
        told = json.loads(opened.metadata()["projector"])
    assert told == {"inject": [1, 2, 3], "vectors": 3, "features": "features"}
    wider = make(sources["llama"], Adapter(soft_tokens=SOFT, projector=Projector(width=7, inject=(1, 2, 3))))
    with pytest.raises(UserError, match=r"projector\.weight has the shape \(32, 6\) and the model wants \(32, 7\)"):
        load_adapter(wider, tmp_path / "adapter")
    for entering, says in (
        (
            {"inject": (0, 2, 3)},
            r"inject \[1, 2, 3\] and vectors 3, .* here inject \[0, 2, 3\] and vectors 3; set them",
        ),
        ({"vectors": 3}, r'has inject \[1, 2, 3\] .* here inject "first" and vectors 3'),
        ({"inject": (1, 2)}, r"vectors 3, .* here inject \[1, 2\] and vectors 2"),
    ):
        elsewhere = make(sources["llama"], Adapter(soft_tokens=SOFT, projector=Projector(width=WIDTH, **entering)))
        with pytest.raises(UserError, match=rf"projector\.safetensors: this projector .*{says}"):
            load_adapter(elsewhere, tmp_path / "adapter")
    file.unlink()
    with pytest.raises(UserError, match=r"projector\.bias has no partner"):
        load_adapter(other, tmp_path / "adapter")


def test_the_lines_of_the_docs_compute_the_same(sources, tmp_path):
    model, batch = make(sources["llama"], FIRST), micro()
    save_adapter(model, tmp_path)
    page = (Path(__file__).parents[3] / "docs" / "adapters.md").read_text(encoding="utf-8")
    (lines,) = [code for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "projector.safetensors" in code]
    ids, features = batch.inputs["input_ids"], batch.inputs["features"]
    known = {"BACKBONE": sources["llama"], "ADAPTER": tmp_path, "ids": ids, "features": features}
    with torch.no_grad():
        exec(lines, known)
        ours = model.eval()(input_ids=ids, features=features).logits
    torch.testing.assert_close(known["logits"], ours, rtol=0, atol=1e-5)
    assert torch.equal(known["written"][:, 0], ours[:, -1].argmax(-1))


@pytest.mark.parametrize(("adapter", "places"), [(FIRST, "3 places"), (UPPER, "1 place")], ids=["first", "upper"])
def test_what_lies_before_the_text_is_named_where_room_is_short(adapter, places, sources):
    model = make(sources["gpt2"], adapter)
    left, front = position_limit(model), f"2 soft tokens and {places} of features"
    check_length(Engine.alone(model), SimpleNamespace(max_length=left))
    with pytest.raises(UserError, match=f"{left + 1} is above the {left} positions that .* has left after {front}$"):
        check_length(Engine.alone(model), SimpleNamespace(max_length=left + 1))
    assert context_overflow(model, [3] * (left - 4), 4, apart=False) is None
    assert context_overflow(model, [3] * (left - 3), 4, apart=False) == f"the backbone's 64 positions next to {front}"


def test_choices_are_ranked_some_examples_at_a_time(sources, monkeypatch):
    """Each choice has a copy of its row's vectors: they are not all in memory at once."""
    model, choices = make(sources["llama"], FIRST).eval(), ((9, 1), (10, 11, 1), (12, 1))
    numbers = torch.randn(7, K, WIDTH, generator=torch.Generator().manual_seed(0))
    examples = [
        Example(
            [2, 20 + i, *choices[0]], [IGNORED, IGNORED, *choices[0]], str(i), "", choices=choices,
            features=tuple(array("f", vector.tolist()) for vector in numbers[i]),
        )
        for i in range(7)
    ]  # fmt: skip
    seen = []

    def watched(model, rows, *how, **task):
        seen.append(len(rows))
        return document_nats(model, rows, *how, **task)

    monkeypatch.setattr(ranking, "document_nats", watched)
    whole = ranking.rank_choices(model, ColumnarExamples.of(examples), EvalBatching(4, 0), task=Completion())
    monkeypatch.setattr(ranking, "_VECTORS", 2 * len(choices) * K * WIDTH * 4 + 1)
    sliced = ranking.rank_choices(model, ColumnarExamples.of(examples), EvalBatching(4, 0), task=Completion())
    assert seen == [21, 6, 6, 6, 3]
    np.testing.assert_allclose(sliced, whole, rtol=1e-5)
    for i, k in ((0, 0), (4, 1), (6, 2)):
        ids, said = torch.tensor([[2, 20 + i, *choices[k]]]), torch.tensor(choices[k])
        with torch.no_grad():
            nats = model(input_ids=ids, features=numbers[i : i + 1]).logits[0].log_softmax(-1)
        assert whole[i, k] == pytest.approx(nats[1:-1].gather(1, said[:, None]).sum().item(), abs=1e-4)


def test_files_with_features_are_streamed_before_they_fill_memory(tmp_path):
    with (tmp_path / "rows.parquet").open("wb") as file:
        file.truncate(20 << 20)
    recipe = Recipe(task=LM, data=Data(train=TrainFiles(files=(str(tmp_path / "rows.parquet"),))))
    assert not is_large(recipe)
    assert is_large(dataclasses.replace(recipe, adapter=FIRST))


class FeatureBatches(RandomBatches):
    """Random rows with random features, a pure function of the step."""

    def _one(self, seed):
        made = super()._one(seed)
        features = torch.randn(self.rows, K, WIDTH, generator=torch.Generator().manual_seed(seed))
        return Micro({**made.inputs, "features": features}, made.labels, made.supervised, made.samples)


def train(model, directory, *, stop_at=None, batches=FeatureBatches, **more):
    adapter = run_or_stop(
        model,
        directory,
        stop_at=stop_at,
        task=LM,
        batches=batches(accumulate=2),
        optimizer=Optimizer(lr=0.02),
        train=Train(**{"steps": 8, "save_every": 3, "max_length": 24, "threads": 1, **more}),
    )
    if adapter is None:
        return None
    return [(adapter / name).read_bytes() for name in ("adapter_model.safetensors", "projector.safetensors")]


def test_nothing_else_trains_and_a_resumed_run_ends_with_the_same_bits(sources, tmp_path):
    model = make(sources["llama"], UPPER)
    before = checksum(model)
    whole = train(model, tmp_path / "whole")
    assert checksum(model) == before
    losses = [r["loss"] for r in read_metrics(tmp_path / "whole" / "metrics.jsonl") if r["split"] == "train"]
    assert losses[-1] < 0.95 * losses[0]
    assert train(make(sources["llama"], UPPER), tmp_path / "stopped", stop_at=5) is None
    assert train(make(sources["llama"], UPPER), tmp_path / "stopped") == whole
    assert memory_plan(model, train=Train(max_length=24)).activations > 0


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_recomputed_blocks_see_the_same(mode, sources):
    from flatshift.finetune.parallel.activation_checkpoint import checkpoint_activations

    gradients = []
    for checkpointing in ("none", mode):
        model = make(sources["llama"], UPPER).train()
        checkpoint_activations(model, checkpointing)
        batch_loss(model, micro(), task=LM).backward()
        gradients.append([p.grad for p in trainable(model).values()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.bf16
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bf16_trains(dtype, sources, tmp_path):
    backbone = load_backbone(sources["llama"], task=LM, precision="bf16")
    model = attach_adapter(backbone, UPPER, task=LM, seed=0, dtype=dtype)
    assert all(p.dtype == dtype for p in trainable(model).values())
    assert train(model, tmp_path / "run", precision="bf16", steps=2) is not None
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert all(0 < line["loss"] < 10 and line["grad_norm"] > 0 for line in lines if line["split"] == "train")


def test_what_is_refused(sources):
    for wrong, message in (
        ({"projector": Projector()}, "projector puts features before trained soft tokens; set soft_tokens: 1"),
        ({"soft_tokens": 1, "projector": Projector(), "dora": True}, "dora is a setting of LoRA"),
    ):
        with pytest.raises(ValueError, match=message):
            Adapter(**wrong)
    for wrong, message in (
        ({"inject": (2, 1)}, r"inject must be blocks in rising order.*\[2, 1\]"),
        ({"inject": ()}, "inject must be blocks"),
        ({"inject": (1, 2), "vectors": 3}, "vectors is 3 and inject names 2 blocks"),
        ({"width": 0}, "width must be ≥ 1"),
    ):
        with pytest.raises(ValueError, match=message):
            Projector(**wrong)
    with pytest.raises(UserError, match=r"projector\.inject: there is no block 4; this backbone has 4, from 0 to 3"):
        make(sources["llama"], Adapter(soft_tokens=1, projector=Projector(inject=(2, 4))))
    eager = load_backbone(sources["llama"], task=LM)
    eager.config._attn_implementation = "eager"  # as Gemma 2 has it, from some version of transformers on
    with pytest.raises(UserError, match="possible in sdpa attention, and this backbone has eager"):
        attach_adapter(eager, Adapter(soft_tokens=1, projector=Projector(inject=(1,))), task=LM, seed=0)
    for task in (Classify(labels=("a", "b")), Completion(pack=False, score="generate")):
        with pytest.raises(UserError, match=r"adapter\.soft_tokens (needs task\.kind|does not go with task\.score)"):
            attach_adapter(load_backbone(sources["llama"], task=LM), FIRST, task=task, seed=0)
    model = make(sources["llama"], FIRST)
    batch = micro()
    for features, given in ((None, "none"), (batch.inputs["features"][:, :2], r"\(3, 2, 6\)")):
        with pytest.raises(
            UserError, match=rf"features of the shape \(3, 3, 6\) with these rows, and is given {given}"
        ):
            model(**{**batch.inputs, "features": features})
    with pytest.raises(RegularizerError, match="no LoRA layer"):
        build(GGPO()).attach(model, seed=0, total_steps=4)
    with pytest.raises(UserError, match=r"train\.compile does not go with adapter\.projector"):
        check_rules(Recipe(train=Train(compile=True), adapter=FIRST, task=LM))
