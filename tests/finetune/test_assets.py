"""What ships: sizes, formats, licences, splits that do not leak, and a backbone that loads like any other."""

from __future__ import annotations

import json
import lzma
import re
from collections import Counter
from pathlib import Path

import pytest

from flatshift.cli import run
from flatshift.finetune import assets
from flatshift.finetune.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
TARGETS = ("scicite", "banking", "snli")
CHATS = ("gsm8k",)
PAIRS = ("statements",)
SPLITS = ("train", "dev", "test")


def rows(name: str) -> list[dict[str, str]]:
    with lzma.open(assets.sample_path(name), "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def normal(text: str) -> str:
    return " ".join(re.findall(r"\w+", text.casefold()))


@pytest.fixture(scope="module")
def pool() -> list[dict[str, str]]:
    return rows("pool")


@pytest.fixture(scope="module")
def tags() -> list[list[str]]:
    with lzma.open(assets.pool_tags_path(), "rt", encoding="utf-8") as lines:
        return [line.rstrip("\n").split("\t") for line in lines]


@pytest.fixture(scope="module")
def backbone() -> Path:
    folder = assets.backbone_directory("flatshift-5m")
    assert folder is not None
    return folder


# Names


def test_names_are_listed_and_found(backbone: Path) -> None:
    assert assets.list_backbones() == ["flatshift-5m", *assets.SOURCE_ONLY]
    assert (backbone / "config.json").is_file()
    assert assets.backbone_directory("gpt2") is None
    assert assets.backbone_directory("../backbones/flatshift-5m") is None
    assert assets.list_samples() == sorted(
        ["pool", "languages", *(f"{target}/{split}" for target in TARGETS + CHATS + PAIRS for split in SPLITS)]
    )
    assert all(assets.sample_path(name).is_file() for name in assets.list_samples())


@pytest.mark.parametrize("command", [["train", "seq2seq", "--out", "run"], ["plan", "seq2seq"]])
def test_a_backbone_that_only_the_source_has_is_said(command, tmp_path, monkeypatch, capsys) -> None:
    (tmp_path / "backbones").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(assets, "_BACKBONES", tmp_path / "backbones")  # as in a package built without it
    assert run(command) == 2
    (said,) = capsys.readouterr().err.strip().splitlines()
    assert "'flatshift-t5-3m' is in the source archive" in said and "--backbone" in said
    assert [path.name for path in tmp_path.iterdir()] == ["backbones"]


@pytest.mark.parametrize(
    ("name", "says"),
    [("scicite/tran", "'scicite/train'"), ("scicite", "scicite/dev, scicite/test"), ("zzz", "banking/dev")],
)
def test_unknown_sample_names_the_nearest(name: str, says: str) -> None:
    with pytest.raises(UserError, match=re.escape(says)):
        assets.sample_path(name)


# Backbone


def test_backbone_is_small_and_bf16(backbone: Path) -> None:
    from safetensors import safe_open

    assert sum(file.stat().st_size for file in backbone.iterdir()) <= 24_000_000
    assert not [file for file in backbone.iterdir() if file.suffix in {".bin", ".pt", ".pkl", ".py"}]
    with safe_open(backbone / "model.safetensors", "pt") as tensors:
        assert {tensors.get_slice(name).get_dtype() for name in tensors.keys()} == {"BF16"}  # noqa: SIM118


@pytest.mark.parametrize("name", assets.SOURCE_ONLY)
def test_small_backbones_are_smaller_and_have_their_card(name: str) -> None:
    from safetensors import safe_open

    from scripts.pretrain.small_cards import render_card

    folder = assets.backbone_directory(name)
    assert folder is not None and (folder / "model.safetensors").stat().st_size <= 6_000_000
    assert not [file for file in folder.iterdir() if file.suffix in {".bin", ".pt", ".pkl", ".py"}]
    with safe_open(folder / "model.safetensors", "pt") as tensors:
        assert {tensors.get_slice(key).get_dtype() for key in tensors.keys()} == {"BF16"}  # noqa: SIM118
    card = json.loads((folder / "card.json").read_text(encoding="utf-8"))
    assert card["parameters"] <= 3_000_000 and card["cpu_minutes"] <= 12 and card["threads"] == 1
    found = card["validation"]
    assert found["nats_per_token"] < found["unigram_nats_per_token"] - 0.5
    assert (folder / "README.md").read_text(encoding="utf-8") == render_card(folder)


def test_the_small_encoder_tells_hidden_words_from_both_sides() -> None:
    import torch
    from transformers import AutoModelForMaskedLM, AutoTokenizer

    folder = assets.backbone_directory("flatshift-encoder-3m")
    model = AutoModelForMaskedLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert model.config.vocab_size == len(tokenizer) == 4097 == model.config.mask_token_id + 1
    ids = tokenizer("The river flows through the city and is one of the largest in the country.")["input_ids"]

    def nats(seen_after: int) -> float:
        """Mean over all words but the ends, each hidden alone, with so many tokens after it."""
        total = []
        for k in range(2, len(ids) - 3):
            row = [*ids[:k], 4096, *ids[k + 1 : k + 1 + seen_after]]
            with torch.no_grad():
                total.append(-torch.log_softmax(model(torch.tensor([row])).logits[0, k], -1)[ids[k]])
        return float(torch.stack(total).mean())

    assert nats(100) < 4 and nats(100) < nats(0) - 0.5, "uniform would be 8.3"


def test_the_small_encoder_decoder_fills_a_gap() -> None:
    import torch
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    folder = assets.backbone_directory("flatshift-t5-3m")
    model = AutoModelForSeq2SeqLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert model.config.vocab_size == len(tokenizer) == 4096 + 32 and model.config.decoder_start_token_id == 0

    def nats(gap: str) -> float:
        ids = tokenizer("The river flows<extra_id_0> the city in the north of England.", return_tensors="pt")
        labels = tokenizer(f"<extra_id_0>{gap}", return_tensors="pt")["input_ids"]
        with torch.no_grad():
            return float(model(**ids, labels=labels).loss)

    assert nats(" through") < nats(" zinc") and nats(" through") < nats("qx")


def test_backbone_loads_and_predicts_english(backbone: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(backbone)
    tokenizer = AutoTokenizer.from_pretrained(backbone)
    card = json.loads((backbone / "card.json").read_text(encoding="utf-8"))
    assert model.num_parameters() == card["parameters"]
    assert model.config.vocab_size == len(tokenizer) == 4096
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 2)
    assert (model.config.pad_token_id, model.config.bos_token_id, model.config.eos_token_id) == (0, 1, 2)

    def loss(text: str) -> float:
        ids = tokenizer(text, return_tensors="pt").input_ids
        with torch.no_grad():
            return model.float()(input_ids=ids, labels=ids).loss.item()

    text = "The river flows through the city and is one of the largest in the country."
    shuffled = " ".join(reversed(text.split()))
    assert loss(text) < 4.5 < loss(shuffled)


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "naïve café — “quoted” …",
        "tabs\tand\n\nnewlines \r\n  and   spaces  ",
        "日本語 العربية हिन्दी 🙂👩‍👩‍👧",
        "\x00\x1f\u200b\ufeff\u2028",
        "e\u0301 is not é",
        "<|endoftext|> [MASK] {{x}} $\\alpha_{i}$",
        "A" * 3000,
    ],
)
def test_tokenizer_round_trip(backbone: Path, text: str) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(backbone)
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text
    assert not set(ids) & {0, 1, 2}


def test_card_states_what_was_measured(backbone: Path) -> None:
    card = json.loads((backbone / "card.json").read_text(encoding="utf-8"))
    assert card["tokens_seen"] == 14_761_984
    assert {"parameters", "steps", "minutes", "val_nats_per_token", "val_bits_per_byte", "train_tokens"} <= set(card)
    validation = card["baselines"]["validation"]
    measured = {name: row["bits_per_byte"] for name, row in validation.items()}
    assert measured["backbone"] < measured["5-gram"] < measured["3-gram"] < measured["unigram"] < measured["uniform"]
    # The same model measured twice: in training (bf16 autocast) and for the card (fp32).
    assert measured["backbone"] == pytest.approx(card["val_bits_per_byte"], rel=2e-3)

    text = (backbone / "README.md").read_text(encoding="utf-8")
    assert text.startswith("---\nlicense: cc-by-sa-4.0\n")
    assert "undertrained" in text and "trained on CC BY-SA text" in text and "14,761,984" in text
    for name in ("backbone", "unigram", "3-gram", "5-gram"):
        assert f"| {validation[name]['nats_per_token']:.3f} | {validation[name]['bits_per_byte']:.3f} |" in text


# Samples


def test_samples_are_small() -> None:
    folder = assets.sample_path("pool").parent
    assert sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) <= 6_000_000


def test_pool_is_large_mixed_and_opaque(pool: list[dict[str, str]], tags: list[list[str]]) -> None:
    assert len(pool) >= 20_000
    assert all(set(row) == {"id", "text"} and row["text"].strip() for row in pool)
    assert max(len(row["text"]) for row in pool) <= 700
    assert len({normal(row["text"]) for row in pool}) == len(pool)
    assert [row["id"] for row in pool] == [tag[0] for tag in tags]
    domains = Counter(tag[1] for tag in tags)
    assert len(domains) >= 8
    assert max(domains.values()) < len(pool) / 2
    # Neither ids nor positions tell the domain: every thousand rows look like the whole.
    share = domains["wikipedia"] / len(pool)
    for start in range(0, len(tags) - 1000, 1000):
        here = sum(tag[1] == "wikipedia" for tag in tags[start : start + 1000]) / 1000
        assert abs(here - share) < 0.08


def test_every_licence_is_open_and_in_notice(tags: list[list[str]]) -> None:
    notice = (ROOT / "NOTICE").read_text(encoding="utf-8")
    readme = (assets.sample_path("pool").parent / "README.md").read_text(encoding="utf-8")
    assert {tag[3] for tag in tags} <= {"CC0 1.0", "CC BY 4.0", "CC BY-SA 4.0", "public domain", "PSF-2.0"}
    # An entry of NOTICE starts with its domains and runs to the next line that is indented as little.
    entries = re.split(r"\n  (?=\S)", notice)
    for domain, licence in {(tag[1], tag[3]) for tag in tags}:
        (entry,) = [entry for entry in entries if re.search(rf"\b{domain}\b", entry.split("\n")[0])]
        assert licence in entry, f"NOTICE does not give {licence} for {domain}"
        assert domain in readme
    for target in TARGETS:
        assert f"\n  {target} " in notice and f"`{target}/train`" in readme
    assert "CC BY-SA" in notice.split("POOL")[0]
    assert (assets.sample_path("pool").parent / "licenses" / "PSF-2.0.txt").is_file()


@pytest.mark.parametrize("target", TARGETS)
def test_splits_are_labelled_and_disjoint(target: str) -> None:
    splits = {split: rows(f"{target}/{split}") for split in SPLITS}
    texts = {split: {normal(row["text"]) for row in splits[split]} for split in SPLITS}
    assert not texts["train"] & texts["test"]
    assert not texts["train"] & texts["dev"]
    assert not texts["dev"] & texts["test"]
    labels = {split: {row["label"] for row in splits[split]} for split in SPLITS}
    assert labels["train"] == labels["dev"] == labels["test"]
    assert len(labels["train"]) == {"scicite": 3, "banking": 10, "snli": 3}[target]
    ids = [row["id"] for split in SPLITS for row in splits[split]]
    assert len(set(ids)) == len(ids)
    fields = {"id", "text", "text2", "label"} if target == "snli" else {"id", "text", "label"}
    assert all(set(row) == fields for split in SPLITS for row in splits[split])


def test_conversations_are_whole_and_disjoint() -> None:
    splits = {split: rows(f"gsm8k/{split}") for split in SPLITS}
    assert {split: len(found) for split, found in splits.items()} == {"train": 600, "dev": 80, "test": 120}
    everything = [row for split in SPLITS for row in splits[split]]
    assert all(row.keys() == {"id", "messages"} for row in everything)
    roles = [[turn["role"] for turn in row["messages"]] for row in everything]
    assert all(own == ["user", "assistant", "user", "assistant"] for own in roles)
    assert all(
        turn["content"].strip() and "<<" not in turn["content"] for row in everything for turn in row["messages"]
    )
    assert all(re.fullmatch(r"-?\d+(\.\d+)?", row["messages"][3]["content"]) for row in everything)
    questions = [normal(row["messages"][0]["content"]) for row in everything]
    assert len(set(questions)) == len(questions) == len({row["id"] for row in everything})
    notice = (ROOT / "NOTICE").read_text(encoding="utf-8")
    assert "\n  gsm8k " in notice and (assets.sample_path("pool").parent / "licenses" / "MIT-gsm8k.txt").is_file()


def test_pairs_are_whole_and_disjoint() -> None:
    splits = {split: rows(f"statements/{split}") for split in SPLITS}
    assert {split: len(found) for split, found in splits.items()} == {"train": 1200, "dev": 200, "test": 400}
    everything = [row for split in SPLITS for row in splits[split]]
    assert all(row.keys() == {"id", "prompt", "chosen", "rejected"} for row in everything)
    assert all(row["prompt"] and row["chosen"].strip() and row["rejected"].strip() for row in everything)
    assert all(row["chosen"] != row["rejected"] for row in everything)
    prompts = [normal(row["prompt"]) for row in everything]
    assert len(set(prompts)) == len(prompts) == len({row["id"] for row in everything})
    assert "\n  statements " in (ROOT / "NOTICE").read_text(encoding="utf-8")


def test_pool_holds_no_target_text(pool: list[dict[str, str]]) -> None:
    def runs(text: str) -> set[str]:
        words = normal(text).split()
        return {" ".join(words[i : i + 8]) for i in range(len(words) - 7)}

    held_out = [row[key] for t in TARGETS for s in SPLITS for row in rows(f"{t}/{s}") for key in row if "text" in key]
    told = [row["messages"] for t in CHATS for s in SPLITS for row in rows(f"{t}/{s}")]
    held_out += [turn["content"] for turns in told for turn in turns[:2]]
    held_out += [row[key] for p in PAIRS for s in SPLITS for row in rows(f"{p}/{s}") for key in row if key != "id"]
    held_out_runs = set().union(*map(runs, held_out))
    whole = set(map(normal, held_out))
    leaks = [
        row["id"] for row in pool if normal(row["text"]) in whole or not held_out_runs.isdisjoint(runs(row["text"]))
    ]
    assert leaks == []
