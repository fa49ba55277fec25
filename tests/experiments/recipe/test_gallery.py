"""The gallery: every recipe is a few lines over few bases, fits the hardware that it names by the plan, and trains two
steps on a tiny random model of its family."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf

from flatshift.cli import run
from flatshift.experiments.recipe import gallery_recipes, load_recipe, shipped_recipes
from flatshift.finetune.planner.devices import Cluster
from flatshift.finetune.planner.layouts import price_layout
from flatshift.finetune.planner.rules import RuleSettings, check_settings
from flatshift.finetune.planner.sizes import KNOWN, known_shape, read_sizes
from tests.support.data_models import byte_tokenizer, write_jsonl

NAMES = list(gallery_recipes())
SAMPLE = set(random.Random(0).sample(NAMES, 6))
FAMILIES = (
    *("Qwen", "Llama", "Gemma", "Mistral", "Phi", "SmolLM"),
    *("GPT-OSS", "DeepSeek-distill", "GLM", "Granite", "BERT", "T5"),
)
TINY = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 16,
    "num_key_value_heads": 1, "vocab_size": 352, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "max_position_embeddings": 512,
}  # fmt: skip
OWN: dict[str, dict[str, Any]] = {
    "gpt_oss": {"num_local_experts": 2, "num_experts_per_tok": 1},
    "t5": {"d_kv": 16, "d_ff": 48, "feed_forward_proj": "gated-gelu", "decoder_start_token_id": 0},
    "modernbert": {"cls_token_id": 1, "sep_token_id": 2},
}
ENCODERS = ("bert", "roberta", "modernbert")
ROWS = {
    "chat": {"messages": [{"role": "user", "content": "what is it"}, {"role": "assistant", "content": "a tree"}]},
    "preference": {"prompt": "what is it", "chosen": "a tree", "rejected": "nothing"},
    "language-model": {"text": "the cat sat on the mat and looked at a tree"},
    "seq2seq": {"prompt": "what is it", "completion": "a tree"},
}
QUICK = [
    *("--train.steps", "2", "--train.batch_size", "2", "--train.accumulate", "1", "--train.max_length", "64"),
    *("--train.precision", "fp32", "--train.threads", "1", "--train.quantization", "null", "--train.max_cut", "1"),
    *("--train.eval_every", "0", "--mesh.dp", "1", "--mesh.ep", "1", "--eval.cold", "0", "--eval.bootstrap", "10"),
    *("--data.holdout", "0", "--train.peak_tflops", "1"),
]
"""What a tiny model on this machine cannot have of the recipe: its lengths, four bits and eight devices."""


def test_the_gallery_is_large_and_its_bases_are_few() -> None:
    recipes = gallery_recipes().values()
    assert len(recipes) >= 60
    assert {recipe.family for recipe in recipes} == set(FAMILIES)
    assert {recipe.hardware for recipe in recipes} == {"laptop", "24gb", "80gb", "8x80gb"}
    bases = {recipe.task for recipe in recipes}
    assert len(bases) <= 10 and bases <= shipped_recipes().keys() and not gallery_recipes().keys() & shipped_recipes()
    for recipe in recipes:
        settings = [line for line in recipe.text.splitlines() if not line.startswith("#")]
        assert settings[0] == f"extends: {recipe.task}" and len(settings) <= 10, recipe.name


@pytest.mark.parametrize("name", NAMES)
def test_it_fits_as_it_is_written(name: str) -> None:
    """Its own mesh, micro-batch and checkpointing, in the precision that takes most there."""
    entry, recipe = gallery_recipes()[name], load_recipe(name).recipe
    train = dataclasses.replace(recipe.train, precision="fp32" if entry.hardware == "laptop" else "bf16")
    settings = RuleSettings.of(dataclasses.replace(recipe, train=train))
    check_settings(settings)
    sizes = read_sizes(recipe.backbone, recipe.adapter).under(recipe.task)
    cluster = Cluster.parse(entry.gpus)
    assert recipe.mesh.size == cluster.count
    assert sizes.positions is None or recipe.train.max_length <= sizes.positions
    read = dataclasses.replace(settings, train=recipe.task.traits.count_token_rows(train))
    assert price_layout(read, sizes, cluster).fits


@pytest.mark.parametrize("name", sorted(SAMPLE))
def test_the_plan_takes_the_hardware_that_the_recipe_names(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", name, "--json"]) == 0
    printed = capsys.readouterr()
    document, entry = json.loads(printed.out), gallery_recipes()[name]
    assert document["fits"] and document["model"] == entry.backbone
    assert document["devices"] == int(entry.gpus.partition("x")[0] or 1) if "x" in entry.gpus else 1
    assert f"planned for {entry.gpus}" in printed.err


def test_a_plan_of_another_device_can_say_no(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "llama-3.3-70b-chat-8x80gb", "--mesh.dp", "1", "--gpus", "1xRTX4090"]) == 1
    assert run(["plan", "qwen3-1.7b-chat-laptop", "--gpus", "CPU@2"]) == 1
    assert "it does not fit" in capsys.readouterr().out


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    home = tmp_path_factory.mktemp("families")
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"mask_token": "<mask>"})

    def save(kind: str) -> Path:
        if not (home / kind).is_dir():
            config = tf.CONFIG_MAPPING[kind](**{**TINY, **OWN.get(kind, {})})
            auto: Any = {"t5": tf.AutoModelForSeq2SeqLM, **dict.fromkeys(ENCODERS, tf.AutoModelForMaskedLM)}.get(
                kind, tf.AutoModelForCausalLM
            )
            with torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(0)
                auto.from_config(config).save_pretrained(home / kind)
            tokenizer.save_pretrained(home / kind)
        return home / kind

    return save


@pytest.mark.parametrize(
    "name", [name if name in SAMPLE else pytest.param(name, marks=pytest.mark.slow) for name in NAMES]
)
def test_it_trains_two_steps_on_a_tiny_model_of_its_family(
    name: str, tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    entry = gallery_recipes()[name]
    shape = known_shape(entry.backbone)
    assert shape is not None
    rows = [ROWS.get(entry.task, {"text": f"the cat {i}", "label": ("good", "bad")[i % 2]}) for i in range(8)]
    data = write_jsonl(tmp_path / "rows.jsonl", rows)
    words = ["train", name, "--backbone", str(tiny(shape["model_type"])), "--data", str(data), *QUICK]
    assert run([*words, "--out", str(tmp_path / "run")]) == 0
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert {line["step"] for line in lines if line["split"] == "train" and line["loss"] > 0} == {1, 2}


def test_a_recipe_of_ones_own_extends_one_of_the_gallery(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("extends: qwen3-8b-chat-24gb\ntrain: {max_length: 1024}\n", encoding="utf-8")
    recipe = load_recipe(str(tmp_path / "mine.yaml")).recipe
    assert recipe.train.max_length == 1024 and recipe.train.quantization == "nf4-double"
    assert recipe.backbone == "Qwen/Qwen3-8B" and recipe.task.kind == "chat"


def test_the_list_is_by_task_family_and_hardware(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["recipes"]) == 0
    listed = capsys.readouterr().out
    assert "\nchat, Qwen\n  laptop  qwen3-0.6b-chat-laptop" in listed and "\nseq2seq, T5\n" in listed
    assert all(name in listed for name in (*NAMES, *shipped_recipes()))
    assert run(["recipes", "list", "Qwen3", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["qwen3-8b-chat-24gb"] == {
        "summary": 'Conversations: Qwen3-8B on one card of 24 GB, in four bits (needs pip install "flatshift[quant]")',
        **{"task": "chat", "family": "Qwen", "backbone": "Qwen/Qwen3-8B", "hardware": "24gb", "gpus": "1xRTX4090"},
    }
    assert set(document) == {name for name in NAMES if "qwen3" in name}
    assert run(["recipes", "list", "qwenn"]) == 2 and "no recipe has 'qwenn'" in capsys.readouterr().err


def test_show_and_copy_print_the_whole_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["recipes", "show", "phi-4-chat-80gb"]) == 0
    text = capsys.readouterr().out
    assert text == gallery_recipes()["phi-4-chat-80gb"].text and "backbone: microsoft/phi-4\n" in text
    assert run(["recipes", "copy", "phi-4-chat-80gb", str(tmp_path / "phi.yaml")]) == 0
    assert load_recipe(str(tmp_path / "phi.yaml")).recipe == load_recipe("phi-4-chat-80gb").recipe
    assert run(["recipes", "show", "phi-4-chat-80g"]) == 2
    assert "did you mean 'phi-4-chat-80gb'" in capsys.readouterr().err


def test_an_error_names_the_recipe_and_its_line() -> None:
    origins = load_recipe("phi-4-chat-80gb").origins
    lines = gallery_recipes()["phi-4-chat-80gb"].text.splitlines()
    name, _, line = origins["train.max_length"].rpartition(":")
    assert name == "gallery recipe phi-4-chat-80gb" and "max_length: 4096" in lines[int(line) - 1]


def test_shapes_are_those_of_the_models() -> None:
    """Published sizes, in billions of parameters."""
    published = {
        "qwen3-0.6b": 0.596, "qwen3-8b": 8.19, "qwen3-32b": 32.8, "llama-3.2-1b": 1.24, "gemma-3-1b-it": 1.0,
        "gemma-3-27b-it": 27.0, "mistral-small-24b-instruct-2501": 23.6, "phi-4": 14.7, "phi-4-mini": 3.84,
        "smollm2-135m": 0.135, "smollm3-3b": 3.08, "gpt-oss-20b": 20.9, "gpt-oss-120b": 116.8, "glm-4-9b-0414": 9.4,
        "glm-4-32b-0414": 32.6, "granite-3.3-2b": 2.53, "granite-3.3-8b": 8.17, "deepseek-r1-distill-qwen-1.5b": 1.78,
        "bert-base-uncased": 0.110, "modernbert-base": 0.149, "modernbert-large": 0.395,
    }  # fmt: skip
    assert published.keys() <= KNOWN.keys()
    for name, billions in published.items():
        elements = read_sizes(name, load_recipe(None).recipe.adapter).elements
        assert elements / 1e9 == pytest.approx(billions, rel=0.01), name


def test_shapes_agree_with_the_configurations_of_transformers() -> None:
    """GPT-OSS-120B and GLM-4-9B are the defaults of their classes; T5 1.1 has an output layer of its own."""
    for name, config in {"gpt-oss-120b": tf.GptOssConfig(), "glm-4-9b-0414": tf.Glm4Config()}.items():
        shape = {key: value for key, value in KNOWN[name].items() if key != "max_position_embeddings"}
        assert {key: getattr(config, key) for key in shape} == shape, name
    shared = {"hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size"}
    small, large = KNOWN["gpt-oss-20b"], KNOWN["gpt-oss-120b"]
    assert {key: small[key] for key in shared} == {key: large[key] for key in shared}
    published = {"flan-t5-small": 76.96, "flan-t5-base": 247.58, "flan-t5-large": 783.15, "flan-t5-xl": 2849.76}
    for name, millions in published.items():
        elements = read_sizes(name, load_recipe(None).recipe.adapter).elements
        assert elements / 1e6 == pytest.approx(millions, rel=1e-3), name
