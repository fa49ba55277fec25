"""Vectors of a selection: from its embedder or the user's own; in memory if small, else in shards on disk.

A model's hidden states come from `finetune` through a callable: `selection` pools them and never loads a model.
"""

from __future__ import annotations

import contextlib
import hashlib
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from flatshift.experiments.recipe.schema import Recipe, Select
from flatshift.experiments.run.console import Console
from flatshift.experiments.select.adapted import Embed, gradient_embedder
from flatshift.experiments.select.pool import PoolRecords, Records
from flatshift.experiments.select.remote_features import LocalCopy, copy_features
from flatshift.finetune.data.view import RowView
from flatshift.finetune.errors import UserError, is_remote, user_path
from flatshift.finetune.seeds import derive_seed
from flatshift.selection.config import (
    BackboneEmbedder,
    Embedder,
    EncoderEmbedder,
    Gradients,
    Static,
    TfIdf,
    TokenNgrams,
    required_inputs,
)
from flatshift.selection.errors import BadRow
from flatshift.selection.features import FeatureCache, IndexedRows, embed_in_shards, load_features, open_directory
from flatshift.selection.features.cache import SHARD_ROWS
from flatshift.selection.features.directory import FeatureDirectory
from flatshift.selection.validation import check_same_width

HELD_BYTES = 256 << 20
"""Most bytes of vectors held in memory; larger ones stay on disk behind an array interface."""
_SCANNED = 1 << 14
"""Rows read at a time when searching for a bad one."""
IndependentEmbedder = BackboneEmbedder | EncoderEmbedder | Gradients | Static
"""Embedders that embed a text independently of the others."""


def check_vectors(spec: Select) -> None:
    """Check the storage settings of vectors.

    Raises UserError for settings that have no effect on the user's own features, and for features in an object store
    without a directory for their copy.
    """
    if (own := spec.own) is not None:
        sides = ("pool", "target", "negative")
        copies = [f"--{side}-features {getattr(own, side)}" for side in sides if is_remote(getattr(own, side))]
        if copies and not spec.cache:
            raise UserError(
                f"{copies[0]}: rows are read from a disk again and again; name a place for a copy, --select.cache DIR"
            )
        for name, default in (("cache", ""), ("feature_type", "float32")):
            if getattr(spec, name) != default and not (copies and name == "cache"):
                raise UserError(
                    f"select.{name}: features of your own are read from their files as they are; leave it out"
                )


def check_unused_features(spec: Select, x: Any, y: Any) -> None:
    """Check the user's own features if the method does not read them, because the map does.

    Raises SelectionError for a wrong shape and BadRow for a row that is not finite. A method that reads features checks
    them itself.
    """
    if spec.own is None or "features" in required_inputs(spec.method):
        return
    from flatshift.selection.transport.problem import check_finite_rows  # imports torch

    check_same_width(x, y)
    for side, matrix in (("pool", x), ("target", y)):
        for low in range(0, len(matrix), _SCANNED):
            check_finite_rows(np.asarray(matrix[low : low + _SCANNED]), side, low)


def backbone_tokenizer(recipe: Recipe) -> tuple[Callable[[list[str]], list[list[int]]], int]:
    """Return texts → token ids of the recipe's backbone, without special tokens, and the size of its vocabulary."""
    from flatshift.finetune.models.backbone import open_backbone

    tokenizer = open_backbone(recipe.backbone).tokenizer

    def tokenize(texts: list[str]) -> list[list[int]]:
        found: list[list[int]] = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        return found

    return tokenize, len(tokenizer)


@dataclass(frozen=True)
class Embedding:
    """Function from texts to vectors."""

    embed: Embed
    key: str
    """Key in a cache."""
    of_target: Embed | None = None
    """Embedding of the target's texts, if it differs from that of the pool's."""


class Vectors:
    """Vectors of pool, target and negative examples of one recipe.

    The embedder is built on first use: TF-IDF is fitted on all three sides together, whatever part of the pool is then
    requested. state: directory for a model's vectors until the selection is complete; None: not kept. `about` describes
    the use of the cache for the manifest, `copies` the files copied from a store, by side. `close` removes temporary
    shards.
    """

    def __init__(
        self,
        recipe: Recipe,
        pool: PoolRecords,
        target: Records,
        negative: Records | None,
        directory: Path,
        console: Console,
        state: Path | None = None,
    ):
        spec = recipe.select
        assert spec is not None
        self.recipe = recipe
        self.spec = spec
        self._pool = pool
        self._target = target
        self._negative = negative
        self._console = console
        self._directory = directory
        self._state = state
        self._scratch: tempfile.TemporaryDirectory[str] | None = None
        self._embedding: Embedding | None = None
        self.about: dict[str, Any] = {}
        self.copies: dict[str, LocalCopy] = {}

    def pool(self, view: RowView | None = None, label: str = "embed pool") -> Any:
        """Return (N, d) of the whole pool, or of the rows of `view` (another view of the same records)."""
        view = self._pool.rows if view is None else view
        if self.spec.own is not None:
            return self._given("pool", self._pool, view.indices())
        return self._made(view.texts, label)

    def target(self) -> np.ndarray:
        """Return (M, d)."""
        return self._side(self._target, "target")

    def negative(self) -> np.ndarray | None:
        """Return (K, d), or None without negative examples."""
        return None if self._negative is None else self._side(self._negative, "negative")

    def close(self) -> None:
        """Remove temporary shards."""
        if self._scratch is not None:
            self._scratch.cleanup()
            self._scratch = None

    def _side(self, records: Records, name: str) -> np.ndarray:
        if self.spec.own is not None:
            index = np.array([row.index for row in records.rows], dtype=np.int64)
            return np.asarray(self._given(name, records, index))
        return np.asarray(self._made(_texts(records), f"embed {name}", of_target=True))

    def _given(self, name: str, records: Records, index: np.ndarray) -> Any:
        given: str = getattr(self.spec.own, name)
        if is_remote(given) and name not in self.copies:
            self.copies[name] = copy_features(given, self.spec.cache, f"--{name}-features", self._console)
        path = str(self.copies[name].path) if name in self.copies else given
        return _own_features(path, records, index, name, given)

    def _made(self, texts: Sequence[str], label: str, *, of_target: bool = False) -> Any:
        if self._embedding is None:
            self._embedding = _EMBEDDERS[type(self.spec.embedder)].make(self, self.spec.embedder)
        embed, dtype, key = self._embedding.embed, self.spec.feature_type, self._embedding.key
        if of_target and self._embedding.of_target is not None:
            embed, key = self._embedding.of_target, f"{key} of the target"
        with self._console.task(label, len(texts), "texts") as task:
            cache = self._cache(len(texts))
            if cache is None:
                return embed_in_shards(texts, embed, dtype=dtype, progress=task)
            rows = cache.features(texts, embed, key=key, dtype=dtype, progress=task)
        if self.spec.cache:
            for name in ("computed", "reused", "broken"):
                self.about[f"shards_{name}"] = self.about.get(f"shards_{name}", 0) + getattr(cache, name)
        return np.asarray(rows) if rows.nbytes <= HELD_BYTES else rows

    def _cache(self, count: int) -> FeatureCache | None:
        if self.spec.cache:
            return FeatureCache(user_path(self.spec.cache))
        embedder = self.spec.embedder
        # Fewer rows are a single shard, so there would be nothing to resume from.
        if self._state is not None and _EMBEDDERS[type(embedder)].slow and count > SHARD_ROWS:
            return FeatureCache(self._state / "vectors")
        width = getattr(embedder, "dim", 1024)
        if count * width * np.dtype(self.spec.feature_type).itemsize <= HELD_BYTES:
            return None
        if self._scratch is None:
            self._scratch = tempfile.TemporaryDirectory(prefix=".features-", dir=self._directory)
        return FeatureCache(self._scratch.name)

    @property
    def keyed(self) -> bool:
        """True if vectors are kept under a key that identifies their source."""
        return bool(self.spec.cache or self._state)

    @property
    def pool_texts(self) -> Sequence[str]:
        """Texts of the whole pool."""
        return self._pool.rows.texts

    @property
    def near(self) -> list[str]:
        """Texts of target and negative examples: a fitted embedder must know their words, and distances to them must be
        exact."""
        return _texts(self._target) + (_texts(self._negative) if self._negative is not None else [])


@contextlib.contextmanager
def report_bad_rows(vectors: Vectors, sides: Mapping[str, Records | None]) -> Iterator[None]:
    """Report a bad row of the user's own features by its record and its row in the file.

    A selector counts the rows it received: those that were kept, or a part of them. sides: by name, as in `vectors`;
    the bad row is searched there, first on the reported side. Raises UserError for BadRow.
    """
    try:
        yield
    except BadRow as error:
        if vectors.spec.own is None:
            raise
        named = error.side
        for name in sorted(sides, key=lambda name: name != named):
            records = sides[name]
            if records is None:
                continue
            x = vectors.pool(records.rows) if isinstance(records, PoolRecords) else getattr(vectors, name)()
            for low in range(0, len(x), _SCANNED):
                bad = np.flatnonzero(error.bad(np.asarray(x[low : low + _SCANNED])))
                if len(bad):
                    row = records.rows[low + int(bad[0])]
                    raise UserError(
                        f"{name} features: row {row.index} {error.problem} (record {row.id!r}, {row.where}); "
                        f"{error.fix}"
                    ) from None
        raise


def _texts(records: Records) -> list[str]:
    return [row.values["text"] for row in records.rows]


def _own_features(path: str, records: Records, index: np.ndarray, name: str, given: str) -> Any:
    """Return the user's features at `index`: row i of the file belongs to record i before any filter.

    given: the user's name for the file at `path`.
    """
    directory = open_directory(path, f"--{name}-features") if user_path(path).is_dir() else None
    matrix: Any = load_features(path) if directory is None else directory
    if len(matrix) != records.total:
        raise UserError(
            f"--{name}-features: {given} has {len(matrix)} rows for {records.total} records; "
            "they must be in file order, one row per record"
        )
    if directory is not None and directory.has_ids:
        _check_ids(directory, records, name)
    taken = IndexedRows(matrix, index)
    if taken.nbytes <= HELD_BYTES:
        return np.asarray(taken)
    # All rows in file order need no index.
    return matrix if len(index) == len(matrix) and (index[:-1] < index[1:]).all() else taken


def _check_ids(directory: FeatureDirectory, records: Records, name: str) -> None:
    place, found, ids = -1, "", directory.ids()
    for row in records.rows:
        if row.index < place:  # rows that were sampled, in another order
            place, ids = -1, directory.ids()
        while place < row.index:
            place, found = place + 1, next(ids)
        if found not in (row.id, row.id.rpartition("#")[0]):  # a piece is called <id>#<k>
            raise UserError(
                f"--{name}-features: row {place} of {directory.directory} is of {found!r}, and the record there "
                f"({row.where}) is {row.id!r}; write the shards in the order of the files"
            )


# ------------------------------------------------------------------------------------------------------------ embedders


def _tfidf_embedding(vectors: Vectors, settings: TfIdf) -> Embedding:
    from flatshift.selection import TfIdfEmbedder
    from flatshift.selection.features.tfidf import load_or_fit

    cache = vectors.spec.cache
    seed = derive_seed(vectors.recipe.train.seed, "tfidf")
    tfidf = TfIdfEmbedder(dim=settings.dim, buckets=settings.buckets, seed=seed, fit_rows=settings.fit_rows)
    if not cache:
        tfidf.fit(vectors.pool_texts, vectors.near)
        return Embedding(tfidf.transform, "")
    texts = tfidf.fit_texts(vectors.pool_texts, vectors.near)
    digest = hashlib.sha256(repr((settings, seed, [len(text) for text in texts])).encode())
    for text in texts:
        digest.update(text.encode())
    path = user_path(cache) / f"tfidf-{digest.hexdigest()[:40]}.npz"
    load_or_fit(path, tfidf, lambda: tfidf.fit(texts))
    return Embedding(tfidf.transform, f"tfidf {tfidf.fingerprint}")


def _token_ngram_embedding(vectors: Vectors, settings: TokenNgrams) -> Embedding:
    from flatshift.selection.features.token_space import TokenNgramEmbedder

    tokenize, size = backbone_tokenizer(vectors.recipe)
    seed = derive_seed(vectors.recipe.train.seed, "token n-grams")
    made = TokenNgramEmbedder(tokenize, size, dim=settings.dim, fit_rows=settings.fit_rows, seed=seed)
    made.fit(vectors.pool_texts, vectors.near)
    return Embedding(made.transform, f"tokens {made.fingerprint}", made.transform_target)


def _independent_embedding(vectors: Vectors, settings: IndependentEmbedder) -> Embedding:
    texts = vectors.pool_texts if isinstance(settings, Gradients) else ()  # others need no pool
    return independent_embedding(vectors.recipe, settings, texts, keyed=vectors.keyed)


def independent_embedding(
    recipe: Recipe, settings: IndependentEmbedder, texts: Sequence[str], *, keyed: bool
) -> Embedding:
    """Build an embedding that is not fitted; keyed: its cache key must be complete.

    texts: used for the second moments of gradients only. Raises UserError.
    """
    if isinstance(settings, Gradients):
        return Embedding(*gradient_embedder(recipe, settings, texts, keyed=keyed))
    if isinstance(settings, Static):
        from flatshift.selection.features import StaticEmbedder

        if not settings.path:
            raise UserError("select.embedder.path is empty: name a directory or a file of word vectors")
        static = StaticEmbedder(settings.path, max_tokens=settings.max_length)
        return Embedding(static.transform, f"static {static.fingerprint if keyed else ''}")
    made = state_embedder(settings, backbone=recipe.backbone, device=recipe.train.device, keyed=keyed)
    return Embedding(*made)


def state_embedder(
    embedder: BackboneEmbedder | EncoderEmbedder, *, backbone: str, device: str, keyed: bool
) -> tuple[Embed, str]:
    """Return texts → pooled hidden states of a model, and its cache key (complete if `keyed`)."""
    from flatshift.finetune.models.backbone import open_backbone
    from flatshift.finetune.models.hidden_states import hidden_state_encoder, model_fingerprint
    from flatshift.selection import pool_features
    from flatshift.selection.features import read_layout, transformer_folder

    name = embedder.path if isinstance(embedder, EncoderEmbedder) else backbone
    if not name:
        raise UserError("select.embedder.path is empty: name a local directory or a hub encoder")
    pooling, normalise, length, lower, prompt = "mean", True, embedder.max_length, False, ""
    if isinstance(embedder, EncoderEmbedder):
        root = user_path(name)
        # Older sentence-transformers directories keep the transformer, config.json and all, one folder below.
        if not (root / "modules.json").is_file():
            root = open_backbone(name).directory
        layout = read_layout(root) if embedder.pooling == "auto" else None
        if layout is not None:
            name, pooling, normalise = str(layout.transformer), layout.pooling, layout.normalise
            length, lower, prompt = min(length, layout.max_length or length), layout.lower, layout.prompt
        elif embedder.pooling != "auto":
            name, pooling = str(transformer_folder(root)), embedder.pooling
    encode = hidden_state_encoder(name, max_length=length, device=device)

    def embed(texts: list[str]) -> np.ndarray:
        given = [prompt + (text.lower() if lower else text) for text in texts]
        return pool_features(given, encode, batch_size=64, pooling=pooling, normalise=normalise)  # type: ignore[arg-type]

    content = model_fingerprint(open_backbone(name).directory) if keyed else ""
    return embed, f"states {content} {length} {pooling} {normalise} {lower} {prompt}"


class _EmbedderEntry(NamedTuple):
    make: Callable[[Vectors, Any], Embedding]
    slow: bool
    """True if its vectors are worth keeping until the selection is complete."""


_EMBEDDERS: dict[type, _EmbedderEntry] = {
    TfIdf: _EmbedderEntry(_tfidf_embedding, slow=False),
    TokenNgrams: _EmbedderEntry(_token_ngram_embedding, slow=False),
    Static: _EmbedderEntry(_independent_embedding, slow=True),
    Gradients: _EmbedderEntry(_independent_embedding, slow=True),
    BackboneEmbedder: _EmbedderEntry(_independent_embedding, slow=True),
    EncoderEmbedder: _EmbedderEntry(_independent_embedding, slow=True),
}
"""Entry for each kind of settings in `flatshift.selection.config.Embedder`, except the user's own features."""


class RecipeEmbedder:
    """texts → (n, dim) float32, the vectors that `flatshift select` makes of them by the recipe's `select.embedder`,
    for the maps of other engines (`flatshift.selection.features.ShardWriter`).

    embedder: the model's states (`backbone`, `encoder`), gradients of a light adapter on it (`gradients`), or word
    vectors (`static`). moments: the texts that Adam's second moments of gradients are taken over, the same in every
    task and for the target (the embedder draws `moment_texts` of them); others have no use for them. Pickled it holds
    settings alone: the model is loaded at a process's first call.

    Raises UserError for an embedder that is fitted to pool and target, or gradients without texts for their moments.
    """

    def __init__(self, recipe: Recipe, embedder: Embedder, moments: Sequence[str] = ()):
        if not isinstance(embedder, IndependentEmbedder):
            raise UserError(
                f"select.embedder.kind: {embedder.kind} is no function of a text alone; take backbone, encoder, "
                "gradients or static, or TfIdfEmbedder, fitted once"
            )
        if isinstance(embedder, Gradients) and embedder.adam and not moments:
            raise UserError(
                "moments: gradients are divided by the root of their second moments; give a few hundred texts of the "
                "pool, the same in every task, or set select.embedder.adam to false"
            )
        self.recipe, self.embedder, self.moments = recipe, embedder, tuple(moments)
        self._embed: Embed | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_embed": None}

    def __call__(self, texts: Sequence[str]) -> np.ndarray:
        if self._embed is None:
            self._embed = independent_embedding(self.recipe, self.embedder, self.moments, keyed=False).embed
        return self._embed(list(texts))
