"""The script that makes the backbone, and the n-gram baseline that the backbone has to beat."""

from __future__ import annotations

import json
import lzma
import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from scripts.pretrain import backbone as pretrain_backbone
from scripts.pretrain.backbone import (
    PretrainingConfig,
    build_model,
    copy_to_device,
    learning_rate,
    load_windows,
    main,
    pretrain,
    stream_loss,
    token_stream,
    train,
    train_tokenizer,
)
from scripts.pretrain.backbone_card import measure_backbone, ngram_orders, render_card
from scripts.pretrain.ngram import KneserNey, unigram_log_probabilities
from scripts.pretrain.packed_tokens import pack_tokens, read_passages, sample_texts
from scripts.pretrain.state import Stopped


def naive_kneser_ney(train: list[int], order: int, vocabulary: int, history: tuple[int, ...], token: int) -> float:
    """Interpolated Kneser–Ney by dictionaries and recursion, straight from the definition."""
    grams = Counter(tuple(train[i : i + order]) for i in range(len(train) - order + 1))
    tables = {order: grams}
    for k in range(order - 1, 0, -1):
        tables[k] = Counter(gram[1:] for gram in tables[k + 1])

    def probability(k: int, history: tuple[int, ...]) -> float:
        if k == 0:
            return 1 / vocabulary
        table = tables[k]
        once = sum(count == 1 for count in table.values())
        twice = sum(count == 2 for count in table.values())
        discount = once / (once + 2 * twice) if once and twice else 0.5
        followers = {gram[-1]: count for gram, count in table.items() if gram[:-1] == history}
        lower = probability(k - 1, history[1:])
        if not followers:
            return lower
        total = sum(followers.values())
        return max(followers.get(token, 0) - discount, 0) / total + discount * len(followers) / total * lower

    return probability(order, history)


@pytest.mark.parametrize("order", [1, 2, 3, 4])
def test_kneser_ney_is_its_definition(order: int) -> None:
    rng = np.random.default_rng(order)
    stream = rng.zipf(1.6, size=400) % 7
    model = KneserNey(order, 8).fit(stream)  # token 7 never occurs
    test = np.concatenate([rng.integers(0, 8, size=60), [7, 7, 7, 0]])
    got = model.log_probabilities(test)
    for i in range(order, len(test)):
        history = tuple(int(t) for t in test[i - order + 1 : i])
        want = naive_kneser_ney([int(t) for t in stream], order, 8, history, int(test[i]))
        assert got[i - 1] == pytest.approx(math.log(want), abs=1e-12)


def test_kneser_ney_sums_to_one() -> None:
    rng = np.random.default_rng(0)
    model = KneserNey(3, 6).fit(rng.integers(0, 6, size=300))
    for history in [(0, 1), (5, 5), (3, 2)]:
        mass = sum(math.exp(model.log_probabilities(np.array([*history, token]))[-1]) for token in range(6))
        assert mass == pytest.approx(1.0, abs=1e-12)


def test_unigram_counts() -> None:
    got = unigram_log_probabilities(np.array([0, 0, 1]), np.array([9, 0, 2]) % 3, 3)
    assert np.exp(got) == pytest.approx([3 / 6, 1 / 6])


def test_ngram_refuses_what_it_cannot_pack() -> None:
    with pytest.raises(ValueError, match="lower the order"):
        KneserNey(6, 4096).fit(np.zeros(10, dtype=int))


TINY = PretrainingConfig(
    hidden=32, layers=1, heads=2, kv_heads=1, vocabulary=300, sequence=16, batch=4, tokens=16 * 4 * 12
)


def test_training_is_a_function_of_the_seed_and_learns() -> None:
    rng = np.random.default_rng(0)
    stream = np.tile(rng.integers(3, 300, size=40), 60).astype(np.int32)
    before = torch.random.get_rng_state()
    models = [build_model(TINY) for _ in range(2)]
    first = stream_loss(models[0], stream, length=16, batch=8, device="cpu", autocast=False)
    assert first == pytest.approx(math.log(300), rel=0.03)
    for model in models:
        assert train(model, stream, TINY, device="cpu", log=lambda line: None) == (12, 768)
    assert torch.equal(before, torch.random.get_rng_state())
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(one, other)
    assert stream_loss(models[0], stream, length=16, batch=8, device="cpu", autocast=False) < first


def test_an_epoch_draws_every_window_once(monkeypatch: pytest.MonkeyPatch) -> None:
    import scripts.pretrain.backbone as script

    drawn: dict[int, int] = defaultdict(int)
    original = script.stack_windows

    def spy(stream: np.ndarray, indices: np.ndarray, length: int) -> torch.Tensor:
        for index in indices:
            drawn[int(index)] += 1
        return original(stream, indices, length)

    monkeypatch.setattr(script, "stack_windows", spy)
    stream = np.arange(16 * 24 + 1, dtype=np.int32) % 300
    train(build_model(TINY), stream, TINY, device="cpu", log=lambda line: None)  # 12 steps of 4 = two epochs of 24
    assert dict(drawn) == dict.fromkeys(range(24), 2)


def test_learning_rate_warms_up_and_decays() -> None:
    assert learning_rate(TINY, 0, 0.0) == pytest.approx(TINY.lr / 150)
    assert learning_rate(TINY, 149, 0.0) == pytest.approx(TINY.lr)
    assert learning_rate(TINY, 10_000, 1.0) == pytest.approx(0.05 * TINY.lr)


TEXTS = [f"The {i}th house on the street was older than the other {i + 1}, naïve as they were." for i in range(80)]


def write_texts(folder: Path) -> Path:
    folder.mkdir()
    for name, part in {"general-train-0": TEXTS[:70], "general-val": TEXTS[70:]}.items():
        with lzma.open(folder / f"{name}.jsonl.xz", "wt", encoding="utf-8") as lines:
            lines.writelines(json.dumps({"text": text, "src": "wiki2015"}) + "\n" for text in part)
    return folder


def write_passages(folder: Path, texts: list[str], licences: list[str]) -> tuple[Path, Path]:
    with lzma.open(folder / "pool.jsonl.xz", "wt", encoding="utf-8") as lines:
        lines.writelines(json.dumps({"id": f"0-{i}", "text": text}) + "\n" for i, text in enumerate(texts))
    with lzma.open(folder / "tags.tsv.xz", "wt", encoding="utf-8") as lines:
        lines.writelines(f"0-{i}\tcode\tsomewhere\t{licence}\n" for i, licence in enumerate(licences))
    return folder / "pool.jsonl.xz", folder / "tags.tsv.xz"


def test_the_folder_it_writes_loads(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    texts = TEXTS
    card = pretrain(write_texts(tmp_path / "data"), tmp_path / "out", TINY, device="cpu")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert model.dtype == torch.bfloat16
    assert card == json.loads((tmp_path / "out" / "card.json").read_text(encoding="utf-8"))
    assert card["tokens_seen"] == 768 and card["device"] == "cpu"
    assert tokenizer.decode(tokenizer(texts[0]).input_ids) == texts[0]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["data", "out"]


def test_a_stopped_run_goes_on_to_the_same_weights(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    data = write_texts(tmp_path / "data")
    config = PretrainingConfig(**{**vars(TINY), "judge_every": 4})
    whole = pretrain(data, tmp_path / "whole", config, device="cpu")
    steps = iter([False] * 5 + [True] + [False] * 2 + [True])
    for _ in range(2):
        with pytest.raises(Stopped, match="of the budget"):
            pretrain(data, tmp_path / "parts", config, device="cpu", stop=lambda: next(steps))
        assert not (tmp_path / "parts").exists()
    (tmp_path / "parts.work" / ".state.12345678.tmp").mkdir()  # as a kill inside a save leaves it
    with pytest.raises(SystemExit, match="this state is of lr"):
        pretrain(data, tmp_path / "parts", PretrainingConfig(**{**vars(config), "lr": 1e-4}), device="cpu")
    parts = pretrain(data, tmp_path / "parts", config, device="cpu")
    assert {**parts, "minutes": 0} == {**whole, "minutes": 0}
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "parts"))
    assert one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def test_the_best_validation_is_kept(tmp_path: Path) -> None:
    """Training text that says nothing of the held-out text: its loss rises once the training text is known by heart."""
    rng = np.random.default_rng(0)
    stream = np.tile(rng.integers(3, 300, size=70), 40).astype(np.uint16)
    held_out = np.concatenate([stream[:200], rng.integers(3, 300, size=600)]).astype(np.uint16)
    config = PretrainingConfig(**{**vars(TINY), "tokens": 16 * 4 * 400, "lr": 1e-2, "judge_every": 20})
    model, said = build_model(config), []
    train(model, stream, config, device="cpu", log=said.append, held_out=held_out)
    judged = [float(line.split()[3]) for line in said if " validation " in line and line.startswith("step")]
    assert judged[-1] > min(judged) + 0.05
    kept = stream_loss(model, held_out, length=16, batch=4, device="cpu", autocast=True)
    assert kept == pytest.approx(min(judged), abs=1e-4)


def test_epochs_are_of_the_text() -> None:
    stream = np.arange(16 * 24 + 1, dtype=np.int32) % 300
    config = PretrainingConfig(**{**vars(TINY), "epochs": 1.5})
    assert train(build_model(config), stream, config, device="cpu", log=lambda line: None) == (9, 576)
    with pytest.raises(SystemExit, match="1 to 1024"):
        PretrainingConfig(sequence=2048)


def test_a_stream_on_a_device_gives_the_windows_of_the_mapped_one() -> None:
    stream = np.random.default_rng(0).integers(0, 65_000, 500).astype(np.uint16)
    there = torch.from_numpy(stream.astype(np.int32))
    chosen = np.array([3, 0, 7])
    assert torch.equal(load_windows(there, chosen, 60, "cpu"), load_windows(stream, chosen, 60, "cpu"))
    assert copy_to_device(stream, "cpu") is stream


def test_packed_tokens_are_those_of_the_stream_and_are_made_once(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(iter(TEXTS), 300, 4000)
    wanted, size = token_stream(tokenizer, iter(TEXTS))
    packed = pack_tokens(tmp_path, "train", tokenizer, TEXTS, of="texts")
    assert packed.tokens.dtype == np.uint16 and np.array_equal(packed.tokens, wanted)
    assert (packed.bytes, packed.documents) == (size, 80)

    def never() -> Iterator[str]:
        raise AssertionError("made again")
        yield

    assert np.array_equal(pack_tokens(tmp_path, "train", tokenizer, never(), of="texts").tokens, wanted)
    with (tmp_path / "train.bin").open("r+b") as file:  # a copy that broke off
        file.truncate(101)
    assert np.array_equal(pack_tokens(tmp_path, "train", tokenizer, TEXTS, of="texts").tokens, wanted)
    assert len(pack_tokens(tmp_path, "train", tokenizer, TEXTS[:3], of="others").tokens) < len(wanted)
    with pytest.raises(SystemExit, match="no text"):
        pack_tokens(tmp_path, "none", tokenizer, [], of="nothing")


def test_passages_are_open_and_none_that_ships(tmp_path: Path) -> None:
    known = sample_texts()
    assert len(known) > 24_000
    texts = ["a", next(iter(known)), "b", "c"]
    file, tags = write_passages(tmp_path, texts, ["open", "open", "research-or-unclear", "open"])
    assert list(read_passages(file, tags, without=known)) == ["a", "c"]
    assert list(read_passages(file, None, without=known)) == ["a", "b", "c"]
    (tmp_path / "short").mkdir()
    _, fewer = write_passages(tmp_path / "short", texts[:2], ["open"] * 2)
    with pytest.raises(SystemExit, match=r"tags.tsv.xz:3: not the tags of"):
        list(read_passages(file, fewer))


def test_the_command_stops_in_time_goes_on_and_its_backbone_gets_a_card(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = write_texts(tmp_path / "data")
    file, tags = write_passages(tmp_path, [f"def house_{i}(): return {i}" for i in range(30)], ["open"] * 30)
    arguments = ["pretrain", "--data", str(data), "--out", str(tmp_path / "tiny"), "--device", "cpu", "--epochs", "3"]
    arguments += ["--passages", str(file), "--tags", str(tags), "--vocabulary", "300", "--sequence", "16"]
    arguments += ["--hidden", "32", "--layers", "1", "--heads", "2", "--kv-heads", "1", "--batch", "4"]
    monkeypatch.setattr("signal.signal", lambda number, handler: None)
    monkeypatch.setattr("sys.argv", [*arguments, "--stop-after", "0"])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 3 and (tmp_path / "tiny.work" / "state" / "state.json").is_file()
    monkeypatch.setattr("sys.argv", arguments)
    main()
    monkeypatch.setattr(
        "scripts.pretrain.backbone_card.shipped_texts", lambda seed: {"pool: code": ["def house(): return 1"]}
    )
    card = measure_backbone(tmp_path / "tiny", data)
    config = json.loads((tmp_path / "tiny" / "config.json").read_text(encoding="utf-8"))
    text = render_card(card, config, "tiny")
    assert "# tiny" in text and "3.0 epochs" in text and "none that" not in text
    assert "no text that ships as a sample" in text and "--epochs 3.0" in text and "3-gram" in text
    assert card["baselines"]["ngram_train_tokens"] < card["train_tokens"]


def test_n_grams_have_the_order_that_fits_the_vocabulary() -> None:
    assert (ngram_orders(4096), ngram_orders(8192)) == ((3, 5), (3, 4))


def test_the_shipped_card_is_what_the_script_renders() -> None:
    folder = Path(pretrain_backbone.__file__).parents[2] / "finetune" / "backbones" / "flatshift-5m"
    card, config = (json.loads((folder / name).read_text(encoding="utf-8")) for name in ("card.json", "config.json"))
    assert render_card(card, config) == (folder / "README.md").read_text(encoding="utf-8")
