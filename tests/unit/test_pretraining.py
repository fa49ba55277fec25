"""The script that makes the backbone, and the n-gram baseline that the backbone has to beat."""

from __future__ import annotations

import json
import lzma
import math
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch

from scripts.ngram import KneserNey, unigram_log_probabilities
from scripts.pretrain_backbone import Pretraining, build_model, learning_rate, pretrain, stream_loss, train


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


TINY = Pretraining(hidden=32, layers=1, heads=2, kv_heads=1, vocabulary=300, sequence=16, batch=4, tokens=16 * 4 * 12)


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
    import scripts.pretrain_backbone as script

    drawn: dict[int, int] = defaultdict(int)
    original = script.window

    def spy(stream: np.ndarray, indices: np.ndarray, length: int) -> torch.Tensor:
        for index in indices:
            drawn[int(index)] += 1
        return original(stream, indices, length)

    monkeypatch.setattr(script, "window", spy)
    stream = np.arange(16 * 24 + 1, dtype=np.int32) % 300
    train(build_model(TINY), stream, TINY, device="cpu", log=lambda line: None)  # 12 steps of 4 = two epochs of 24
    assert dict(drawn) == dict.fromkeys(range(24), 2)


def test_learning_rate_warms_up_and_decays() -> None:
    assert learning_rate(TINY, 0, 0.0) == pytest.approx(TINY.lr / 150)
    assert learning_rate(TINY, 149, 0.0) == pytest.approx(TINY.lr)
    assert learning_rate(TINY, 10_000, 1.0) == pytest.approx(0.05 * TINY.lr)


def test_the_folder_it_writes_loads(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    data = tmp_path / "data"
    data.mkdir()
    texts = [f"The {i}th house on the street was older than the other {i + 1}, naïve as they were." for i in range(80)]
    for name, part in {"general-train-0": texts[:70], "general-val": texts[70:]}.items():
        with lzma.open(data / f"{name}.jsonl.xz", "wt", encoding="utf-8") as lines:
            lines.writelines(json.dumps({"text": text}) + "\n" for text in part)
    card = pretrain(data, tmp_path / "out", TINY, device="cpu")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert model.dtype == torch.bfloat16
    assert card == json.loads((tmp_path / "out" / "card.json").read_text(encoding="utf-8"))
    assert card["tokens_seen"] == 768
    assert tokenizer.decode(tokenizer(texts[0]).input_ids) == texts[0]
    assert [entry.name for entry in tmp_path.iterdir() if entry.name.endswith(".tmp")] == []
