"""Backbones load frozen, from safetensors only, and every unusable source is one clear sentence."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from flatshift.finetune.adapters.adapter import attach_adapter
from flatshift.finetune.compute.numerics import uses_dropout
from flatshift.finetune.config import Adapter
from flatshift.finetune.data.encoding import encode
from flatshift.finetune.data.eval_batching import EvalBatching
from flatshift.finetune.errors import UserError
from flatshift.finetune.models.backbone import open_backbone
from flatshift.finetune.models.fingerprint import checksum
from flatshift.finetune.models.hidden_states import hidden_state_encoder
from flatshift.finetune.models.load import load_backbone
from flatshift.finetune.models.meta import build_skeleton
from flatshift.finetune.tasks import Classify, Completion, LanguageModel, Seq2Seq
from tests.support.data_models import byte_tokenizer, text_rows
from tests.support.finetune_models import save_backbone


@pytest.fixture
def offline(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def test_shipped_backbone_loads_frozen_and_without_touching_the_global_state():
    before = torch.random.get_rng_state()
    model = load_backbone("flatshift-5m", task=LanguageModel())
    assert torch.equal(before, torch.random.get_rng_state())
    assert model.name_or_path == "flatshift-5m"
    assert not any(p.requires_grad for p in model.parameters())
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert model.config.use_cache is False and model.new_parameters == ()
    assert open_backbone("flatshift-5m").tokenizer.pad_token_id == 0


@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert", "roberta"])
def test_any_kind_gets_a_classification_head(kind, tmp_path):
    source = save_backbone(kind, tmp_path)
    model = load_backbone(source, task=Classify(), label_names=("no", "yes", "maybe"), precision="bf16")
    assert model.config.id2label == {0: "no", 1: "yes", 2: "maybe"} and model.config.pad_token_id == 0
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model.new_parameters and all(
        "score" in n or "classifier" in n or "pooler" in n for n in model.new_parameters
    )
    assert model(input_ids=torch.tensor([[5, 6, 7]])).logits.shape == (1, 3)
    assert model.name_or_path == str(tmp_path.resolve())


def without(directory, key):
    """Take `key` out of config.json."""
    config = json.loads((directory / "config.json").read_text())
    config.pop(key, None)
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_padded_row_is_judged_as_it_is_alone_where_the_config_names_no_pad_token(kind, tmp_path):
    """As Qwen2.5 and Llama-3 ship: the tokenizer pads with a token that is not the config's end of sequence."""
    source = without(save_backbone(kind, tmp_path, vocab_size=352), "pad_token_id")
    byte_tokenizer().save_pretrained(source)
    names = {"task": Classify(), "label_names": ("a", "b")}
    model, tokenizer = load_backbone(source, **names).eval(), open_backbone(source).tokenizer
    assert model.config.pad_token_id == tokenizer.pad_token_id == 0 != model.config.eos_token_id
    assert build_skeleton(source, **names).config.pad_token_id == 0
    rows = text_rows(2, words=(3, 4)) + text_rows(2, seed=1, words=(9, 10))
    examples = encode(rows, task=Classify(), tokenizer=tokenizer, max_length=64).examples

    def logits(some):
        micro = next(EvalBatching(4, tokenizer.pad_token_id).batches(some, Classify()))
        with torch.no_grad():
            return dict(zip((row for (row,) in micro.rows), model(**micro.inputs).logits, strict=True))

    together = logits(examples)
    assert len({len(example.input_ids) for example in examples}) > 1
    for place, example in enumerate(examples):
        torch.testing.assert_close(together[place], logits([example])[0], atol=1e-5, rtol=1e-5)
    model.config.save_pretrained(tmp_path / "merged")
    assert json.loads((tmp_path / "merged" / "config.json").read_text())["pad_token_id"] == 0


def test_the_pad_token_of_the_config_stays_where_nothing_else_is_padded_with(tmp_path):
    task = {"task": Classify(), "label_names": ("a", "b")}
    bare = without(save_backbone("llama", tmp_path / "bare"), "pad_token_id")  # no tokenizer: it is the caller's own
    assert load_backbone(bare, **task).config.pad_token_id == 1
    counting = save_backbone("roberta", tmp_path / "roberta", vocab_size=352, pad_token_id=3)
    byte_tokenizer().save_pretrained(counting)  # its positions begin after the pad token, in a merged model too
    assert load_backbone(counting, **task).config.pad_token_id == 3
    beyond = without(save_backbone("llama", tmp_path / "beyond", vocab_size=320), "pad_token_id")
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"pad_token": "<beyond>"})
    assert tokenizer.pad_token_id == 320, "added without a row of the embedding, as many Llama tokenizers have it"
    tokenizer.save_pretrained(beyond)
    assert load_backbone(beyond, **task).config.pad_token_id == open_backbone(beyond).tokenizer.eos_token_id == 2


@pytest.mark.parametrize("kind", ["gpt2-dropout", "bert", "roberta"])
def test_dropout_of_the_backbone_can_be_turned_off_or_set(kind, tmp_path):
    source, task = save_backbone(kind, tmp_path), Classify()
    names = {"task": task, "label_names": ("no", "yes")}
    tokens = {"input_ids": torch.tensor([[5, 6, 7, 8]]), "attention_mask": torch.ones(1, 4, dtype=torch.long)}
    dry = load_backbone(source, **names, dropout=0.0)
    assert not uses_dropout(dry) and not uses_dropout(build_skeleton(source, **names, dropout=0.0))
    assert torch.equal(dry.train()(**tokens).logits, dry.eval()(**tokens).logits)
    wet = load_backbone(source, **names)
    assert uses_dropout(wet) and not torch.equal(wet.train()(**tokens).logits, wet.eval()(**tokens).logits)
    dry.load_state_dict(wet.state_dict())  # their new heads were drawn apart
    assert torch.equal(wet.eval()(**tokens).logits, dry(**tokens).logits)
    half = load_backbone(source, **names, dropout=0.5)
    assert {m.p for m in half.modules() if isinstance(m, torch.nn.Dropout)} == {0.5}


def test_dropout_is_set_in_every_configuration_inside_or_refused(tmp_path, monkeypatch):
    import transformers as tf

    side = tf.BertConfig(
        vocab_size=16, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, pad_token_id=0
    )
    config = tf.EncoderDecoderConfig.from_encoder_decoder_configs(side, side)
    config.decoder_start_token_id = config.pad_token_id = 0
    tf.EncoderDecoderModel(config).save_pretrained(tmp_path)
    rates = {
        dropout: {m.p for m in load_backbone(tmp_path, task=Seq2Seq(), dropout=dropout).modules() if hasattr(m, "p")}
        for dropout in (None, 0.0, 0.3)
    }
    assert rates == {None: {0.1}, 0.0: {0.0}, 0.3: {0.3}}
    monkeypatch.setattr("flatshift.finetune.models.meta.dropout_rates", lambda config: iter(()))
    with pytest.raises(UserError, match="has dropout that its configuration does not name"):
        load_backbone(tmp_path, task=Seq2Seq(), dropout=0.0)
    with pytest.raises(UserError, match=r"^train\.backbone_dropout: config\.json of this backbone names no dropout"):
        load_backbone(tmp_path, task=Seq2Seq(), dropout=0.3)


def test_checksum_sees_one_bit_of_the_frozen_weights_and_none_of_the_adapter(llama):
    task = LanguageModel()
    model = attach_adapter(load_backbone(llama, task=task), Adapter(rank=2), task=task, seed=0)
    first = checksum(model)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(1.0)
    assert checksum(model) == first
    weight = model.get_base_model().model.layers[0].mlp.up_proj.base_layer.weight
    with torch.no_grad():
        weight.view(torch.int32)[0, 0] ^= 1
    assert checksum(model) != first


def test_encoder_as_language_model_is_refused(tmp_path):
    source = save_backbone("bert", tmp_path)
    with pytest.raises(UserError, match=r"encoder.*classify"):
        load_backbone(source, task=Completion())


def test_missing_directory_names_what_ships(offline, llama):
    with pytest.raises(UserError, match=r"no such directory.*flatshift-5m"):
        open_backbone("/nowhere/at/all")
    near = str(llama.parent / (llama.name + "x"))
    with pytest.raises(UserError, match=f"did you mean .*{llama.name}'"):
        open_backbone(near)


def test_a_missing_directory_suggests_no_folder_that_is_no_model(offline, tmp_path):
    (tmp_path / "run").mkdir()
    with pytest.raises(UserError, match="no such directory; shipped: flatshift-5m"):
        open_backbone(str(tmp_path / "b-run"))


def test_unknown_name_offline_is_answered_at_once(offline):
    with pytest.raises(UserError, match="did you mean 'flatshift-5m'"):
        open_backbone("flatshift-5n")
    with pytest.raises(UserError, match=r"hub cannot be reached"):
        assert open_backbone("somebody/some-model").tokenizer


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: (d / "config.json").unlink(), "no config.json"),
        (lambda d: (d / "model.safetensors").unlink(), "no weights"),
        (lambda d: (d / "model.safetensors").rename(d / "pytorch_model.bin"), "only as pytorch_model.bin.*unpickling"),
        (lambda d: (d / "config.json").write_text("{"), "config.json:1: not valid JSON"),
        (lambda d: (d / "config.json").write_text('{"model_type": "nonesuch"}'), "'nonesuch'"),
        (
            lambda d: (d / "model.safetensors").write_bytes((d / "model.safetensors").read_bytes()[:-99]),
            "cut short|loaded",
        ),
    ],
)
def test_unusable_directories(damage, message, llama, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(llama, copy)
    damage(copy)
    with pytest.raises(UserError, match=message):
        load_backbone(copy, task=LanguageModel())


def test_remote_code_is_refused_and_never_run(llama, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(llama, copy)
    (copy / "modeling_own.py").write_text("raise SystemExit('ran foreign code')\n")
    config = json.loads((copy / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"OwnForCausalLM.*trust_remote_code"):
        load_backbone(copy, task=LanguageModel())
    config["auto_map"] = {"AutoModelForCausalLM": "modeling_own.LlamaForCausalLM"}  # transformers has this class itself
    (copy / "config.json").write_text(json.dumps(config))
    assert type(load_backbone(copy, task=LanguageModel())).__module__.startswith("transformers.")


def test_incomplete_checkpoint_is_refused_instead_of_drawn_at_random(llama, tmp_path):
    from safetensors.torch import load_file, save_file

    copy = tmp_path / "copy"
    shutil.copytree(llama, copy)
    weights = load_file(copy / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"lack model\.layers\.1\.mlp\.up_proj\.weight"):
        load_backbone(copy, task=LanguageModel())


def test_hidden_states_match_the_model_and_the_mask_marks_padding():
    encode = hidden_state_encoder("flatshift-5m", max_length=6, device="cpu")
    states, mask = encode(["one two three four five six seven eight nine", "one"])
    assert states.shape[:2] == mask.shape and states.shape[1] == 6
    alone, _ = encode(["one"])
    length = int(mask[1].sum())
    assert 0 < length < 6 and alone.shape[1] == length
    assert abs(states[1, :length] - alone[0]).max() < 1e-4


def test_hidden_states_of_texts_without_a_token():
    encode = hidden_state_encoder("flatshift-5m", max_length=6, device="cpu")
    assert encode([""])[0].shape[1] == 0, "this tokenizer adds no token of its own"
    states, mask = encode([""] * 3)
    assert states.shape == (3, 0, encode(["one"])[0].shape[2]) and mask.shape == (3, 0)
    assert encode(["", "one"])[1][0].sum() == 0


@pytest.mark.parametrize(("kind", "readable"), [("BertModel", 32), ("RobertaModel", 30)])
def test_hidden_states_of_texts_longer_than_the_model_reads(kind, readable, tmp_path):
    """RoBERTa counts positions from its padding token's number + 1 = 2."""
    import transformers

    shape = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    config = transformers.AutoConfig.for_model(
        kind.removesuffix("Model").lower(), vocab_size=6000, max_position_embeddings=32, pad_token_id=1, **shape
    )
    getattr(transformers, kind)(config).save_pretrained(tmp_path)
    for file in open_backbone("flatshift-5m").directory.glob("tokenizer*"):
        shutil.copy(file, tmp_path)
    told = f"reads no more than {readable} tokens: texts are cut there, not at 256"
    with pytest.warns(UserWarning, match=told):
        encode = hidden_state_encoder(tmp_path, max_length=256, device="cpu")
    states, mask = encode(["one two three four five " * 20, "one"])
    assert states.shape[1] == readable == mask[0].sum()


def test_a_hub_name_in_the_cache_loads_without_a_network(llama, tmp_path, offline, monkeypatch):
    import huggingface_hub.constants

    commit = "0" * 40
    repository = tmp_path / "models--somebody--tiny"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    shutil.copytree(llama, repository / "snapshots" / commit)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    model = load_backbone("somebody/tiny", task=LanguageModel())
    assert model.name_or_path == "somebody/tiny" and model.new_parameters == ()
    (repository / "snapshots" / commit / "model.safetensors").rename(repository / "snapshots" / commit / "model.bin")
    with pytest.raises(UserError, match="somebody/tiny"):
        open_backbone("somebody/tiny")


@pytest.mark.parametrize("lost", ["tokenizer", "model-00002", ""], ids=["tokenizer", "shard", "nothing"])
def test_a_part_in_the_cache_is_completed_by_the_hub(llama, tmp_path, monkeypatch, lost):
    whole, part = (Path(shutil.copytree(llama, tmp_path / name)) for name in ("whole", "part"))
    byte_tokenizer().save_pretrained(part)
    index = {"weight_map": {"a": "model.safetensors", "b": "model-00002.safetensors"}}
    for file in (part / "model.safetensors.index.json", part / "model-00002.safetensors"):
        file.write_text(json.dumps(index))
    for file in part.glob(f"{lost}*") if lost else ():
        file.unlink()
    fetch = lambda name, local_files_only=False, **options: part if local_files_only else whole  # noqa: E731
    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("HTTPS_PROXY", "http://localhost:1")  # so the hub counts as reachable
    assert open_backbone(f"somebody/without{lost}").directory == (whole if lost else part)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert open_backbone(f"somebody/offline{lost}").directory == part


@pytest.mark.parametrize(
    ("name", "advice"), [("GatedRepoError", "accept its terms"), ("RepositoryNotFoundError", "no s")]
)
def test_a_model_that_the_hub_keeps_back_is_named_so(monkeypatch, name, advice):
    def fetch(*_, **__):
        raise type(name, (Exception,), {})("401 Client Error. (Request ID: 1)\n\nAccess is restricted.")

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("HTTPS_PROXY", "http://localhost:1")
    with pytest.raises(UserError, match=f"somebody/gated.*{advice}.*hf auth login"):
        open_backbone("somebody/gated")


def test_sentencepiece_and_code_files_belong_to_a_backbone(llama, tmp_path, offline, monkeypatch):
    directory, asked = Path(shutil.copytree(llama, tmp_path / "marian")), []
    before = open_backbone(directory).text_digests
    for name in ("source.spm", "bpe.codes"):
        (directory / name).write_bytes(b"pieces")
    assert open_backbone(directory).text_digests.keys() - before.keys() == {"source.spm", "bpe.codes"}
    fetch = lambda name, **options: asked.extend(options["allow_patterns"]) or directory  # noqa: E731
    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    assert open_backbone("somebody/marian").directory == directory and {"*.spm", "*.codes"} <= set(asked)


def test_the_tokenizer_of_another_backbone_is_refused(tmp_path):
    directory = save_backbone("llama", tmp_path / "llama", vocab_size=100)
    byte_tokenizer().save_pretrained(directory)
    with pytest.raises(UserError, match=r"its tokenizer has \d+ tokens and the model reads 100, so it is another"):
        open_backbone(directory).tokenizer  # noqa: B018
    directory = save_backbone("llama", tmp_path / "added", vocab_size=len(byte_tokenizer()))
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["<image>"])  # as Gemma 3 has one for pictures
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    tokenizer.save_pretrained(directory)
    assert len(open_backbone(directory).tokenizer) == open_backbone(directory).config.vocab_size + 2
    assert open_backbone(directory).tokenizer.pad_token == "<eos>"  # the model reads no [PAD]
