"""Soft tokens: the model beside one that is fed their embeddings by hand, through training, files, and plain PEFT."""

from __future__ import annotations

import pytest
import torch

from flatshift.finetune.adapters.adapter import attach_adapter, load_adapter, read_adapter, save_adapter, trainable
from flatshift.finetune.config import Adapter, Mesh, Optimizer, Train
from flatshift.finetune.errors import UserError
from flatshift.finetune.models.anatomy import position_limit
from flatshift.finetune.models.load import load_backbone
from flatshift.finetune.planner.rules import RuleSettings, check_settings
from flatshift.finetune.run_directory import read_metrics
from flatshift.finetune.tasks import Classify, Completion, LanguageModel
from flatshift.regularizers import GGPO, RegularizerError, build
from tests.support.adapter_models import IDS, logits
from tests.support.finetune_models import RandomBatches
from tests.support.stage_runs import run_or_stop

LM = LanguageModel(pack=False)
FIVE = Adapter(soft_tokens=5)


def make(source, *, seed=0, adapter=FIVE):
    return attach_adapter(load_backbone(source, task=LM), adapter, task=LM, seed=seed)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_rows_see_the_tokens_before_them_and_plain_peft_agrees(kind, sources, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    state = torch.random.get_rng_state()
    model = make(sources[kind])
    assert torch.equal(state, torch.random.get_rng_state())
    (soft,) = trainable(model).values()
    plain = AutoModelForCausalLM.from_pretrained(sources[kind], dtype=torch.float32).eval()
    table = plain.get_input_embeddings().weight
    assert soft.shape == (5, 32) and all((table == row).all(1).any() for row in soft), "embeddings of drawn tokens"
    assert not torch.equal(soft, next(iter(trainable(make(sources[kind], seed=1)).values())))
    with torch.no_grad():
        soft.add_(0.1 * torch.randn(soft.shape, generator=torch.Generator().manual_seed(1)))
        embedded = torch.cat([soft.expand(2, -1, -1), table[IDS]], dim=1)
        wanted = plain(inputs_embeds=embedded).logits[:, 5:]
    torch.testing.assert_close(logits(model), wanted, rtol=0, atol=1e-5)
    mask = torch.ones_like(IDS)
    mask[1, 8:] = 0  # padding changes nothing before it
    torch.testing.assert_close(logits(model, attention_mask=mask)[:, :8], wanted[:, :8], rtol=0, atol=1e-5)
    save_adapter(model, tmp_path / "adapter")
    assert list(read_adapter(tmp_path / "adapter")) == list(trainable(model))
    theirs = PeftModel.from_pretrained(plain, tmp_path / "adapter")
    assert torch.equal(logits(theirs)[:, 5:], logits(model))
    ours = make(sources[kind], seed=4)
    load_adapter(ours, tmp_path / "adapter")
    assert torch.equal(logits(ours), logits(model))
    limit = position_limit(load_backbone(sources[kind], task=LM))
    assert position_limit(model) == (None if limit is None else limit - 5)


def train(source, directory, *, stop_at=None):
    adapter = run_or_stop(
        make(source),
        directory,
        stop_at=stop_at,
        task=LM,
        batches=RandomBatches(),
        optimizer=Optimizer(lr=0.05),
        train=Train(steps=12, save_every=4, max_length=24, threads=1),
    )
    return None if adapter is None else (adapter / "adapter_model.safetensors").read_bytes()


def test_they_learn_and_a_resumed_run_ends_with_the_same_bits(sources, tmp_path):
    whole = train(sources["llama"], tmp_path / "whole")
    losses = [r["loss"] for r in read_metrics(tmp_path / "whole" / "metrics.jsonl") if r["split"] == "train"]
    assert sum(losses[-3:]) < 0.95 * sum(losses[:3])
    assert train(sources["llama"], tmp_path / "stopped", stop_at=7) is None
    assert train(sources["llama"], tmp_path / "stopped") == whole


def test_what_they_do_not_go_with(sources):
    for task, message in ((LanguageModel(), "needs task.pack: false"), (Completion(), "needs task.pack: false")):
        with pytest.raises(UserError, match=message):
            check_settings(RuleSettings(Mesh(), Train(), FIVE, task))
    with pytest.raises(UserError, match="needs one rank"):
        check_settings(RuleSettings(Mesh(dp=2), Train(), FIVE, LM))
    with pytest.raises(ValueError, match="dora is a setting of LoRA"):
        Adapter(soft_tokens=5, dora=True)
    backbone = load_backbone(sources["llama"], task=LM)
    with pytest.raises(UserError, match=r"needs task\.kind: language-model or completion"):
        attach_adapter(backbone, FIVE, task=Classify(), seed=0)
    with pytest.raises(UserError, match=r"does not go with task\.score: generate"):
        attach_adapter(backbone, FIVE, task=Completion(pack=False, score="generate"), seed=0)
    with pytest.raises(RegularizerError, match="no LoRA layer"):
        build(GGPO()).attach(make(sources["llama"]), seed=0, total_steps=4)
