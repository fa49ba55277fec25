"""Static word vectors: a table of vectors, looked up token by token and averaged. No model is run.

Layouts: model2vec (model.safetensors, tokenizer.json, config.json), sentence-transformers' StaticEmbedding, and the
text format of word2vec, GloVe and fastText (`word v1 … vd` a line, with or without a first line `rows columns`).
"""

from __future__ import annotations

import gzip
import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from flatshift.selection.errors import SelectionError
from flatshift.selection.features.pooling import normalise_rows, read_json
from flatshift.selection.lazy import np
from flatshift.selection.validation import Settings, bounded

_BATCH = 4096
_WORDS = re.compile(r"\w+|[^\w\s]")
Tokenise = Callable[[list[str]], list[list[int]]]
"""Function texts → rows of the table for each text's tokens; tokens without a row are omitted."""


@dataclass(frozen=True, kw_only=True)
class Static(Settings):
    """Mean of static word vectors (model2vec or sentence-transformers' StaticEmbedding, or a text file of word2vec,
    GloVe or fastText). No model is run."""

    kind: Literal["static"] = "static"
    path: str = ""
    """Local directory with model.safetensors and tokenizer.json, or a .txt or .vec file (also .gz)."""
    max_length: int = bounded(512, minimum=1)
    """Maximum number of tokens per text."""


class StaticEmbedder:
    """Mean of the vectors of a text's tokens: float32 (n, d). A text without a known token gets the zero vector.

    path: a directory of model2vec's or sentence-transformers' static layout, or a text file of word vectors (.txt,
    .vec, also .gz). max_tokens: tokens used per text, from its start. normalise: to L2 norm 1; None: as set in the
    layout, and True for a text file. Files are read in the constructor, which raises SelectionError.
    """

    def __init__(self, path: str | Path, *, max_tokens: int = 512, normalise: bool | None = None):
        if max_tokens < 1:
            raise SelectionError(f"max_tokens must be at least 1, not {max_tokens}")
        try:
            self.path = Path(path).expanduser()
        except RuntimeError:
            raise SelectionError(f"{path}: there is no user of this name; write the path without ~") from None
        self.max_tokens = max_tokens
        if self.path.is_dir():
            self._table, self._tokenise, default = _read_directory(self.path)
        elif self.path.is_file():
            self._table, vocabulary = _read_text_vectors(self.path)
            self._tokenise, default = _tokenise_words(vocabulary), True
        else:
            raise SelectionError(f"{self.path}: no such directory or file of word vectors")
        if not np.isfinite(self._table).all():
            raise SelectionError(f"{self.path}: a vector holds a NaN or an infinity")
        self.normalise = default if normalise is None else normalise

    @property
    def dim(self) -> int:
        return int(self._table.shape[1])

    @property
    def fingerprint(self) -> str:
        """Digest of the files and of the parameters."""
        digest = hashlib.sha256(f"{self.max_tokens} {self.normalise}".encode())
        files = sorted(f for f in self.path.rglob("*") if f.is_file()) if self.path.is_dir() else [self.path]
        for file in files:
            if file.suffix in (".json", ".safetensors") or file == self.path:
                with file.open("rb") as handle:
                    digest.update(hashlib.file_digest(handle, "sha256").digest())
        return digest.hexdigest()

    def transform(self, texts: Sequence[str]) -> np.ndarray:
        """Return the vectors, float32 (len(texts), d)."""
        from scipy.sparse import csr_matrix

        out = np.zeros((len(texts), self.dim), dtype=np.float32)
        for low in range(0, len(texts), _BATCH):
            tokens = [row[: self.max_tokens] for row in self._tokenise(list(texts[low : low + _BATCH]))]
            sizes = np.fromiter(map(len, tokens), dtype=np.int64, count=len(tokens))
            columns = np.fromiter(chain.from_iterable(tokens), dtype=np.int64, count=int(sizes.sum()))
            shares = np.repeat(1.0 / np.maximum(sizes, 1), sizes).astype(np.float32)
            ends = np.concatenate([[0], np.cumsum(sizes)])
            bags = csr_matrix((shares, columns, ends), shape=(len(tokens), len(self._table)))
            out[low : low + len(tokens)] = bags @ self._table
        return normalise_rows(out) if self.normalise else out


def _read_directory(root: Path) -> tuple[np.ndarray, Tokenise, bool]:
    folder, normalise = root, False
    if (root / "modules.json").is_file():
        modules = read_json(root / "modules.json", list)
        kinds = [str(module.get("type", "")).rpartition(".")[2] for module in modules]
        if kinds not in (["StaticEmbedding"], ["StaticEmbedding", "Normalize"]):
            raise SelectionError(f"{root}: holds {', '.join(kinds)}, no static vectors; use the embedder `encoder`")
        folder, normalise = root / str(modules[0].get("path", "")), len(kinds) == 2
    for name in ("model.safetensors", "tokenizer.json"):
        if not (folder / name).is_file():
            raise SelectionError(f"{folder}: has no {name}; static vectors need model.safetensors and tokenizer.json")
    if (folder / "config.json").is_file():
        normalise = bool(read_json(folder / "config.json", dict).get("normalize", normalise))
    tensors = _read_tensors(folder / "model.safetensors")
    name = "embeddings" if "embeddings" in tensors else "embedding.weight"
    if name not in tensors or tensors[name].ndim != 2:
        raise SelectionError(
            f"{folder / 'model.safetensors'}: has no matrix `embeddings` or `embedding.weight`, "
            f"only {', '.join(sorted(tensors)) or 'nothing'}"
        )
    table = tensors[name].astype(np.float32)
    if "mapping" in tensors:  # model2vec: several tokens may share a vector
        table = table[tensors["mapping"].astype(np.int64)]
    if "weights" in tensors:
        table = table * tensors["weights"].astype(np.float32).reshape(-1, 1)
    return table, _tokenise_with(folder / "tokenizer.json", len(table), without_unknown=name == "embeddings"), normalise


def _read_tensors(path: Path) -> dict[str, np.ndarray]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return {name: tensor.float().numpy() for name, tensor in load_file(path).items()}
    except (SafetensorError, OSError) as error:
        raise SelectionError(f"{path}: cannot be read ({error})") from error


def _tokenise_with(path: Path, rows: int, *, without_unknown: bool) -> Tokenise:
    from tokenizers import Tokenizer

    try:
        tokenizer: Any = Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises bare Exception for a file it cannot read
        raise SelectionError(f"{path}: not a tokenizer ({error})") from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    if tokenizer.get_vocab_size() > rows:
        raise SelectionError(f"{path}: knows {tokenizer.get_vocab_size()} tokens, and the table has {rows} vectors")
    model = read_json(path, dict).get("model", {})
    unknown = model.get("unk_id")
    if unknown is None and model.get("unk_token") is not None:
        unknown = tokenizer.token_to_id(model["unk_token"])

    def tokenise(texts: list[str]) -> list[list[int]]:
        rows = [encoding.ids for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]
        if without_unknown and unknown is not None:
            return [[token for token in ids if token != unknown] for ids in rows]
        return rows

    return tokenise


def _tokenise_words(vocabulary: dict[str, int]) -> Tokenise:
    def row(word: str) -> int | None:
        number = vocabulary.get(word)
        return vocabulary.get(word.lower()) if number is None else number

    def tokenise(texts: list[str]) -> list[list[int]]:
        return [[r for word in _WORDS.findall(text) if (r := row(word)) is not None] for text in texts]

    return tokenise


def _read_text_vectors(path: Path) -> tuple[np.ndarray, dict[str, int]]:
    """Read the vectors of a text file and each word's row; for a repeated word the first counts."""
    vocabulary: dict[str, int] = {}
    parts: list[np.ndarray] = []
    width = 0
    try:
        opener: Any = gzip.open if path.suffix == ".gz" else open
        with opener(path, "rb") as handle:
            for number, raw in enumerate(handle, start=1):
                fields = raw.decode("utf-8", errors="replace").rstrip().split(" ")
                if number == 1 and len(fields) == 2 and all(field.isdigit() for field in fields):
                    width = int(fields[1])
                    continue
                width = width or len(fields) - 1
                # Some files have words that contain spaces, so the vector is taken from the end.
                word = " ".join(fields[:-width]) if width else ""
                try:
                    vector = np.array(fields[-width:], dtype=np.float32)
                except ValueError:
                    vector = np.empty(0, np.float32)
                if not word or len(vector) != width or not width:
                    raise SelectionError(f"{path}:{number}: not a word followed by {width or 'its'} numbers")
                if word not in vocabulary:
                    vocabulary[word] = len(parts)
                    parts.append(vector)
    except (OSError, EOFError) as error:
        raise SelectionError(f"{path}: cannot be read ({error})") from error
    if not parts:
        raise SelectionError(f"{path}: holds no vectors")
    return np.stack(parts), vocabulary
