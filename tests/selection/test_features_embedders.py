"""Embedders against what they stand for: scikit-learn's pipeline, sentence-transformers' layout, static vectors."""

import gzip
import json
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from flatshift.selection import SelectionError, StaticEmbedder, TfIdfEmbedder, pool_features
from flatshift.selection.features.pooling import read_layout
from flatshift.selection.features.tfidf import WordHasher

R = np.random.default_rng(0)
WORDS = ["naïve", "Straße", "a1_b", "x", "data", "12", "The", "the", "日本", "it's", "e-mail", "  ", "\n", "ß", "İ"]
TEXTS = [" ".join(R.choice(WORDS, R.integers(0, 12))) for _ in range(300)] + ["", "\ud800 half"]


def test_counts_are_those_of_hashing_vectorizer():
    from sklearn.feature_extraction.text import HashingVectorizer

    texts = TEXTS[:-1]
    peer = HashingVectorizer(
        n_features=512, alternate_sign=False, norm=None, token_pattern=r"(?u)\b\w+\b", dtype=np.float32
    ).transform(texts)
    found = WordHasher(512).counts(texts)
    assert found.shape == peer.shape and (found != peer).nnz == 0 and found.dtype == np.float32
    assert WordHasher(512).counts(TEXTS).shape[0] == len(TEXTS)


def test_tfidf_is_scikit_learns_pipeline():
    from sklearn.decomposition import TruncatedSVD
    from sklearn.feature_extraction.text import HashingVectorizer, TfidfTransformer
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import Normalizer

    vocabulary = [f"w{i}" for i in range(400)]
    share = 1 / np.arange(1, 401)
    topics = [np.roll(share, 37 * k) / share.sum() for k in range(5)]
    texts = [" ".join(R.choice(vocabulary, 40, p=topics[i % 5])) for i in range(250)]
    hasher = HashingVectorizer(n_features=2**18, alternate_sign=False, norm=None, token_pattern=r"(?u)\b\w+\b")
    svd = TruncatedSVD(5, algorithm="arpack", random_state=0)
    peer = make_pipeline(hasher, TfidfTransformer(sublinear_tf=True), svd, Normalizer())
    wanted = peer.fit_transform(texts)
    found = TfIdfEmbedder(dim=5).fit(texts).transform(texts)
    np.testing.assert_allclose(found @ found.T, wanted @ wanted.T, atol=2e-2)


def test_tfidf_sample_holds_the_target_and_does_not_grow():
    pool = [f"pool{i}" for i in range(500)]
    target = [f"target{i}" for i in range(30)]
    embedder = TfIdfEmbedder(fit_rows=100, seed=3)
    drawn = embedder.fit_texts(pool, target)
    assert len(drawn) == 100 and set(target) <= set(drawn) and drawn == embedder.fit_texts(pool, target)
    assert drawn != TfIdfEmbedder(fit_rows=100, seed=4).fit_texts(pool, target)
    many = TfIdfEmbedder(fit_rows=100).fit_texts(pool, [f"t{i}" for i in range(400)])
    assert len(many) == 100 and sum(text.startswith("t") for text in many) == 50
    assert len(TfIdfEmbedder(fit_rows=100).fit_texts(pool[:20], [f"t{i}" for i in range(400)])) == 100


def states(texts):
    length = max(map(len, texts)) + 1
    hidden = np.full((len(texts), length, 2), np.nan, dtype=np.float32)
    mask = np.zeros((len(texts), length), dtype=np.int64)
    for row, text in enumerate(texts):
        for place, char in enumerate(text, start=1):  # padding on the left of the first token too
            hidden[row, place] = [ord(char) - 100, place]
            mask[row, place] = 1
    return hidden, mask


@pytest.mark.parametrize("pooling", ["mean", "cls", "max", "last"])
def test_poolings_see_real_tokens_only(pooling):
    texts = ["abc", "", "zebra", "b"]
    found = pool_features(texts, states, batch_size=2, pooling=pooling, normalise=False)
    for row, text in enumerate(texts):
        real = np.array([[ord(c) - 100, i] for i, c in enumerate(text, start=1)], dtype=float).reshape(-1, 2)
        wanted = {"mean": real.mean, "max": real.max}.get(pooling)
        naive = np.zeros(2) if not text else wanted(axis=0) if wanted else real[0 if pooling == "cls" else -1]
        np.testing.assert_allclose(found[row], naive, atol=1e-6)
    unit = pool_features(texts, states, pooling=pooling)
    np.testing.assert_allclose(np.linalg.norm(unit, axis=1), [1, 0, 1, 1], atol=1e-6)
    with pytest.raises(SelectionError, match="pooling must be one of mean"):
        pool_features(texts, states, pooling="median")


def write(path: Path, value) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value), encoding="utf-8")


def layout(root: Path, *kinds: str, pooling=None, **more) -> Path:
    write(
        root / "modules.json",
        [{"idx": i, "path": f"{i}_{k}", "type": f"sentence_transformers.models.{k}"} for i, k in enumerate(kinds)],
    )
    write(root / "1_Pooling" / "config.json", pooling or {"pooling_mode_cls_token": True})
    for name, value in more.items():
        write(
            root / {"bert": "0_Transformer/sentence_bert_config.json", "st": "config_sentence_transformers.json"}[name],
            value,
        )
    return root


def test_sentence_layout(tmp_path: Path):
    assert read_layout(tmp_path) is None
    root = layout(
        tmp_path / "a",
        "Transformer",
        "Pooling",
        "Normalize",
        bert={"max_seq_length": 128, "do_lower_case": True},
        st={"prompts": {"query": "query: "}, "default_prompt_name": "query"},
    )
    found = read_layout(root)
    assert found.transformer == root / "0_Transformer" and (found.pooling, found.normalise) == ("cls", True)
    assert (found.max_length, found.lower, found.prompt) == (128, True, "query: ")
    plain = read_layout(layout(tmp_path / "b", "Transformer", "Pooling", pooling={"pooling_mode": "lasttoken"}))
    assert (plain.pooling, plain.normalise, plain.max_length, plain.prompt) == ("last", False, None, "")


@pytest.mark.parametrize(
    ("kinds", "more", "words"),
    [
        (("Transformer", "Pooling", "Dense"), {}, "module .Dense. is not supported"),
        (("Transformer",), {}, "no Transformer followed by Pooling"),
        (("CLIPModel", "Pooling"), {}, "CLIPModel"),
        (("Transformer", "Pooling"), {"pooling": {"pooling_mode_weightedmean_tokens": True}}, "weightedmean"),
        (
            ("Transformer", "Pooling"),
            {"pooling": {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}},
            r"cls_token \+ pooling_mode_mean",
        ),
        (("Transformer", "Pooling"), {"pooling": {"pooling_mode": "mean", "include_prompt": False}}, "include_prompt"),
        (("Transformer", "Pooling"), {"st": {"default_prompt_name": "q"}}, "none of its prompts"),
        (("Transformer", "Pooling"), {"pooling": [1]}, "JSON object"),
    ],
)
def test_a_layout_is_followed_whole_or_refused(tmp_path: Path, kinds, more, words):
    with pytest.raises(SelectionError, match=words):
        read_layout(layout(tmp_path, *kinds, **more))


def static_directory(root: Path, **tensors) -> Path:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    root.mkdir(parents=True)
    tokenizer = Tokenizer(WordLevel({"[UNK]": 0, "a": 1, "b": 2, "c": 3}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(root / "tokenizer.json"))
    save_file({name: torch.tensor(value) for name, value in tensors.items()}, root / "model.safetensors")
    return root


TABLE = [[9.0, 9.0], [1.0, 0.0], [0.0, 2.0], [3.0, 3.0]]


def test_static_vectors_of_model2vec(tmp_path: Path):
    root = static_directory(tmp_path / "m", embeddings=TABLE)
    write(root / "config.json", {"normalize": False})
    found = StaticEmbedder(root).transform(["a b", "a zzz", "", "c c a", "zzz"])
    np.testing.assert_allclose(found, [[0.5, 1], [1, 0], [0, 0], [7 / 3, 2], [0, 0]], atol=1e-6)
    assert found.dtype == np.float32
    np.testing.assert_allclose(StaticEmbedder(root, max_tokens=1).transform(["a b"]), [[1, 0]])
    unit = StaticEmbedder(root, normalise=True)
    np.testing.assert_allclose(unit.transform(["b"]), [[0, 1]])
    assert unit.fingerprint != StaticEmbedder(root).fingerprint == StaticEmbedder(root).fingerprint
    shared = static_directory(
        tmp_path / "n", embeddings=[[1.0, 0.0], [0.0, 1.0]], mapping=[0, 0, 1, 1], weights=[1.0, 2.0, 1.0, 4.0]
    )
    np.testing.assert_allclose(StaticEmbedder(shared).transform(["a c", "b"]), [[1, 2], [0, 1]], atol=1e-6)


def test_static_vectors_of_sentence_transformers(tmp_path: Path):
    root = tmp_path / "s"
    static_directory(root / "0_StaticEmbedding", **{"embedding.weight": TABLE})
    write(
        root / "modules.json", [{"path": "0_StaticEmbedding", "type": "sentence_transformers.models.StaticEmbedding"}]
    )
    np.testing.assert_allclose(StaticEmbedder(root).transform(["a b", "b zzz"]), [[0.5, 1], [4.5, 5.5]])
    write(root / "modules.json", [{"path": "", "type": "x.Transformer"}])
    with pytest.raises(SelectionError, match="no static vectors"):
        StaticEmbedder(root)


@pytest.mark.parametrize("header", [True, False])
@pytest.mark.parametrize("packed", [True, False])
def test_static_vectors_of_a_text_file(tmp_path: Path, header: bool, packed: bool):
    content = ("4 2\n" if header else "") + "the 1 0\nThe 0 1\nnew york 5 5\nthe 7 7\n"
    path = tmp_path / ("v.txt.gz" if packed else "v.vec")
    path.write_bytes(gzip.compress(content.encode()) if packed else content.encode())
    if not header:
        path.write_bytes(
            gzip.compress(content.replace("new york 5 5\n", "").encode())
            if packed
            else content.replace("new york 5 5\n", "").encode()
        )
    embedder = StaticEmbedder(path, normalise=False)
    np.testing.assert_allclose(embedder.transform(["the The", "THE", "nothing"]), [[0.5, 0.5], [1, 0], [0, 0]])
    np.testing.assert_allclose(np.linalg.norm(StaticEmbedder(path).transform(["the The"]), axis=1), 1, atol=1e-6)


@pytest.mark.parametrize(
    ("content", "words"),
    [("a 1 2\nb 1\n", "v.txt:2"), ("a 1 x\n", "v.txt:1"), ("", "no vectors"), ("a 1 nan\n", "NaN"), ("\n", "v.txt:1")],
)
def test_bad_word_vectors_are_one_sentence(tmp_path: Path, content: str, words: str):
    (tmp_path / "v.txt").write_text(content, encoding="utf-8")
    with pytest.raises(SelectionError, match=words):
        StaticEmbedder(tmp_path / "v.txt")


def test_bad_static_directories_are_one_sentence(tmp_path: Path):
    with pytest.raises(SelectionError, match="no such directory"):
        StaticEmbedder(tmp_path / "none")
    with pytest.raises(SelectionError, match=r"no model\.safetensors"):
        StaticEmbedder(tmp_path)
    with pytest.raises(SelectionError, match="knows 4 tokens, and the table has 2"):
        StaticEmbedder(static_directory(tmp_path / "short", embeddings=TABLE[:2]))
    with pytest.raises(SelectionError, match="has no matrix"):
        StaticEmbedder(static_directory(tmp_path / "other", words=TABLE))
    broken = static_directory(tmp_path / "broken", embeddings=TABLE)
    (broken / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(SelectionError, match="cannot be read"):
        StaticEmbedder(broken)
    modules = '[{"type": "x.StaticEmbedding", "path": ""}]'
    for name, content, told in (
        ("config.json", "{", "cannot be read"),
        ("config.json", "[]", "must hold a JSON object"),
        ("modules.json", modules[:-1], "cannot be read"),
        ("modules.json", '["x.StaticEmbedding"]', "must hold a JSON array of objects"),
    ):
        root = static_directory(tmp_path / f"{name} {len(content)}", embeddings=TABLE)
        (root / name).write_text(content, encoding="utf-8")
        with pytest.raises(SelectionError, match=rf"{name}: {told}"):
            StaticEmbedder(root)


def test_an_encoder_directory_is_followed_as_it_says(tmp_path: Path):
    """Class token, no normalisation, prompt, lower case and length of a sentence-transformers directory, end to end."""
    from flatshift.experiments.recipe.schema import Recipe, Select
    from flatshift.experiments.run.console import Console
    from flatshift.experiments.select.embedding import Vectors
    from flatshift.experiments.select.pool import Records
    from flatshift.finetune.data.rows import Row
    from flatshift.finetune.models.backbone import open_backbone
    from flatshift.finetune.models.hidden_states import hidden_state_encoder
    from flatshift.selection.config import EncoderEmbedder

    root = layout(tmp_path / "s", "Transformer", "Pooling")
    backbone = open_backbone("flatshift-5m").directory
    (root / "0_Transformer").symlink_to(backbone)
    write(root / "config_sentence_transformers.json", {"prompts": {"q": "find: "}, "default_prompt_name": "q"})
    texts = ["Some Text to embed", "another, rather longer TEXT that is about something else", "x"]
    target = Records([Row({"text": text}, str(i), "") for i, text in enumerate(texts)], [], 3)

    def vectors(**more):
        spec = Select(embedder=EncoderEmbedder(path=str(root), **more), cache=str(tmp_path / "cache"))
        pool: Any = None  # only the target's side is asked for
        return Vectors(Recipe(select=spec), pool, target, None, tmp_path, Console(quiet=True)).target()

    encode = hidden_state_encoder("flatshift-5m", max_length=5, device="cpu")
    wanted = np.concatenate([encode([f"find: {text}"])[0][:, 0] for text in texts])
    np.testing.assert_allclose(vectors(max_length=5), wanted, atol=1e-4)
    mean = vectors(max_length=5, pooling="mean")
    np.testing.assert_allclose(np.linalg.norm(mean, axis=1), 1, atol=1e-5)
    assert len(list((tmp_path / "cache").glob("*.npy"))) == 2, "one shard for each pooling"


def test_every_embedder_of_a_recipe_has_its_entry():
    from flatshift.experiments.select.embedding import _EMBEDDERS
    from flatshift.selection.config import Embedder, PrecomputedFeatures

    assert {*_EMBEDDERS, PrecomputedFeatures} == set(get_args(Embedder))
