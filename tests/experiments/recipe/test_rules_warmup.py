"""What a `warmup` block cannot be, refused in a sentence before anything is read: one case for each refusal."""

from __future__ import annotations

import pytest

from flatshift.experiments.recipe import from_override, load_recipe
from flatshift.experiments.recipe.rules import check_recipe
from flatshift.finetune.errors import UserError
from flatshift.finetune.models.backbone import check_task
from flatshift.finetune.models.load import load_backbone
from flatshift.finetune.tasks import Classify, Completion, LanguageModel, MaskedLM, Regress, Seq2Seq
from tests.support.objective_models import save_encoder
from tests.support.seq2seq_models import save_encoder_decoder

DECODER, ENCODER, BOTH = "flatshift-5m", "flatshift-encoder-3m", "flatshift-t5-3m"
TASKS = [LanguageModel(), Completion(), MaskedLM(), Classify(labels=("a", "b")), Regress(), Seq2Seq()]

SOFT = {"task": "language-model", "task.pack": "false", "adapter.soft_tokens": 4}


def recipe(name="warmup", **settings):
    return load_recipe(name, [from_override(k.replace("__", "."), v) for k, v in settings.items()]).recipe


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    return str(save_encoder(tmp_path_factory.mktemp("bert")))


@pytest.fixture(scope="module")
def bart(tmp_path_factory):
    return str(save_encoder_decoder("bart", tmp_path_factory.mktemp("bart")))


@pytest.mark.parametrize("kind", ["decoder", "encoder", "both", "bert", "bart"])
@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.kind)
def test_what_its_configuration_tells_is_what_loading_tells(task, kind, bert, bart):
    """Each task on each kind of backbone: the same sentence, or none, without reading weights."""
    backbone = {"decoder": DECODER, "encoder": ENCODER, "both": BOTH, "bert": bert, "bart": bart}[kind]
    said = []
    for judged in (check_task, lambda name, task: load_backbone(name, task=task, num_labels=2)):
        try:
            judged(backbone, task)
            said.append(None)
        except UserError as error:
            said.append(str(error))
    causal = ("language-model", "completion")
    if kind == "bart" and task.kind in causal:  # there is a class for its decoder alone; only the weights tell
        assert said[0] is None and "its weights lack" in said[1]
        return
    assert said[0] == said[1]
    fits = {"decoder": causal, "encoder": ("masked-lm",), "both": ("seq2seq",)}
    fits |= {"bert": fits["encoder"], "bart": fits["both"]}
    assert (said[0] is None) == (task.kind in (*fits[kind], "classify", "regress"))


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"warmup.task": "masked-lm"}, r"^warmup\.task: backbone 'flatshift-5m': transformers has no masked language"),
        (
            {"warmup.task": "language-model", "backbone": ENCODER},
            r"^warmup\.task: backbone 'flatshift-encoder-3m': .* no causal .* without warmup\.task the backbone",
        ),
        ({"backbone": BOTH}, r"trains a decoder or an encoder alone, and backbone 'flatshift-t5-3m' has both"),
        ({"backbone": BOTH, "task": "seq2seq"}, r"alone, and task\.kind: seq2seq has both; leave it out"),
        ({"task": "completion", "backbone": ENCODER}, r"^backbone 'flatshift-encoder-3m': transformers has no causal"),
        ({"task": "chat", "task.template": "plain"}, r"conversations \(task\.kind: chat\) have none; leave it out"),
        ({"select": "null"}, r"no `select` block: name a pool in select\.pool\.files"),
        ({"mesh.dp": 2, "warmup.batch_size": 3}, r"warmup\.batch_size: 3 rows do not divide among the 2 data ranks"),
        ({"backbone": ENCODER, "adapter.init": "pissa"}, r"^adapter\.init: pissa does not go with the warm-up of an e"),
        (SOFT, r"^adapter\.soft_tokens: a warm-up hands on the factors of LoRA, .* leave the recipe's `warmup` block"),
        ({**SOFT, "adapter.projector.features": "clip"}, r"^adapter\.projector: the rows of a warm-up are texts"),
        ({"backbone": ENCODER, "adapter.under": "run"}, r"^adapter\.under does not go with the warm-up of an encoder"),
    ],
)
def test_a_warm_up_that_cannot_be_is_refused_before_anything_runs(settings, says):
    with pytest.raises(UserError, match=says):
        check_recipe(recipe(**{"regularizer": "plain", **settings}))


def test_an_encoder_whose_class_could_write_is_refused_too(bert):
    with pytest.raises(UserError, match=rf"^warmup\.task: backbone '{bert}' is an encoder \(bert\)"):
        check_recipe(recipe(backbone=bert, warmup__task="language-model"))


@pytest.mark.parametrize("setting", ["steps", "batch_size", "accumulate", "lr"])
def test_numbers_out_of_range_are_refused_where_they_stand(setting):
    with pytest.raises(UserError, match=rf"{setting} must be (≥|between)"):
        recipe(**{f"warmup.{setting}": -1})


@pytest.mark.parametrize("backbone", [DECODER, ENCODER])
def test_a_warm_up_that_fits_is_not(backbone):
    check_recipe(recipe(backbone=backbone))
    check_recipe(recipe(backbone=backbone, warmup__task={DECODER: "language-model", ENCODER: "masked-lm"}[backbone]))
