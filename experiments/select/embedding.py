"""Vectors of a selection: from its embedder or the user's own; in memory if small, else in shards on disk.

A model's hidden states come from `finetune` through a callable: `selection` pools them and never loads a model.

The user's own features in an object store are copied to a disk from which their rows are mapped, to
`select.cache`/features-KEY/. For a directory of shards KEY is the SHA-256 of its manifest, and the copy's own
`manifest.json` is written last, after every shard was verified against it; for a single `.npy` KEY is a hash of its
address and version. An interrupted copy of shards resumes, and a complete one is reused.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple, get_args

import numpy as np

from flatshift.experiments.recipe.schema import Recipe, Select
from flatshift.experiments.run.console import Console
from flatshift.experiments.select.adapted import Embed, gradient_embedder
from flatshift.experiments.select.pool import PoolRecords, Records, select_settings
from flatshift.experiments.select.stages import Stages
from flatshift.finetune.atomic import fsync_directory, make_directory, read_json_object, write_json
from flatshift.finetune.data.remote import BLOCK, RemoteFile, find_objects
from flatshift.finetune.data.view import RowView
from flatshift.finetune.digests import file_sha256
from flatshift.finetune.errors import UserError, is_remote, user_path
from flatshift.finetune.lock import exclusive_lock
from flatshift.finetune.models.backbone import open_backbone
from flatshift.finetune.seeds import derive_seed
from flatshift.selection import TfIdfEmbedder, config, pool_features
from flatshift.selection.errors import BadRow, SelectionError
from flatshift.selection.features import open_directory
from flatshift.selection.features.cache import SHARD_ROWS, FeatureCache, Stored, embed_in_shards
from flatshift.selection.features.directory import MANIFEST, FeatureDirectory, read_manifest
from flatshift.selection.features.matrix import IndexedRows, ShardedRows, load_features
from flatshift.selection.features.pooling import read_layout, transformer_folder
from flatshift.selection.features.tfidf import load_or_fit
from flatshift.selection.features.tokens import TokenNgramEmbedder
from flatshift.selection.shards import Arrays, Shard, ShardMap
from flatshift.selection.validation import check_same_width

MAX_BYTES = 256 << 20
"""Maximum bytes of vectors in memory; larger ones stay on disk behind an array interface."""
_BLOCK_ROWS = 1 << 14
"""Rows read at a time when searching for a bad one."""
IndependentEmbedder = config.BackboneEmbedder | config.EncoderEmbedder | config.Gradients | config.Static
"""Embedders that embed a text independently of the others."""


def check_vectors(spec: Select) -> None:
    """Check the storage settings of vectors.

    Raises UserError for settings that have no effect on the user's own features, and for features in an object store
    without a directory for their copy.
    """
    if (own := spec.own) is not None:
        sides = ("pool", "target", "negative")
        remote = [f"--{side}-features {getattr(own, side)}" for side in sides if is_remote(getattr(own, side))]
        if remote and not spec.cache:
            raise UserError(
                f"{remote[0]}: rows are read from a disk again and again; name a place for a copy, --select.cache DIR"
            )
        for name, default in (("cache", ""), ("feature_type", "float32")):
            if getattr(spec, name) != default and not (remote and name == "cache"):
                raise UserError(
                    f"select.{name}: features of your own are read from their files as they are; leave it out"
                )


def check_unused_features(spec: Select, x: Any, y: Any) -> None:
    """Check the user's own features if the method does not read them, because the map does.

    Raises SelectionError for a wrong shape and BadRow for a row that is not finite. A method that reads features checks
    them itself.
    """
    if spec.own is None or "features" in config.required_inputs(spec.method):
        return
    from flatshift.selection.transport.problem import check_finite_rows  # imports torch

    check_same_width(x, y)
    for side, matrix in (("pool", x), ("target", y)):
        for low in range(0, len(matrix), _BLOCK_ROWS):
            check_finite_rows(np.asarray(matrix[low : low + _BLOCK_ROWS]), side, low)


def backbone_tokenizer(recipe: Recipe) -> tuple[Callable[[list[str]], list[list[int]]], int]:
    """Return texts → token ids of the recipe's backbone, without special tokens, and the size of its vocabulary."""
    tokenizer = open_backbone(recipe.backbone).tokenizer

    return lambda texts: tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"], len(tokenizer)


class Embedding(NamedTuple):
    """Function from texts to vectors, its key in a cache, and that of the target's texts, if it is another one.

    build: returns `embed` in another process, from the arrays `fitted`; align: the shards that it embeds there begin at
    a multiple of this row, for a model's batches to be those of one process.
    """

    embed: Embed
    key: str
    embed_target: Embed | None = None
    build: Callable[[Arrays], Embed] | None = None
    fitted: Arrays = {}  # noqa: RUF012 - not mutated
    align: int = 1


@dataclass
class Vectors:
    """Vectors of pool, target and negative examples of one recipe.

    The embedder is built on first use: TF-IDF is fitted on all three sides together, whatever part of the pool is then
    requested. state: directory for a model's vectors until the selection is complete; None: not kept. stages: embed the
    pool by shards. `cache_use` describes the use of the cache for the manifest, `copies` the files copied from a store,
    by side. `close` removes temporary shards.
    """

    recipe: Recipe
    _pool: PoolRecords
    _target: Records
    _negative: Records | None
    _directory: Path
    _console: Console
    state: Path | None = None
    cache_use: dict[str, Any] = field(default_factory=dict)
    copies: dict[str, LocalCopy] = field(default_factory=dict)
    _scratch: tempfile.TemporaryDirectory[str] | None = None
    stages: Stages | None = None

    @cached_property
    def spec(self) -> Select:
        return select_settings(self.recipe)

    @cached_property
    def _embedding(self) -> Embedding:
        embedder = self.spec.embedder
        return _EMBEDDERS[type(embedder)](self, embedder)

    def pool(self, view: RowView | None = None, label: str = "embed pool") -> Any:
        """Return (N, d) of the whole pool, or of the rows of `view` (another view of the same records)."""
        view = self._pool.rows if view is None else view
        if self.spec.own is not None:
            return self._read_own("pool", self._pool, view.indices())
        return self._embed(view.texts, label) if self.stages is None else self._embed_shards(self.stages.over(view))

    def target(self) -> np.ndarray:
        """Return (M, d)."""
        return self._embed_side(self._target, "target")

    def negative(self) -> np.ndarray | None:
        """Return (K, d), or None without negative examples."""
        return None if self._negative is None else self._embed_side(self._negative, "negative")

    def close(self) -> None:
        """Remove temporary shards."""
        if self._scratch is not None:
            self._scratch.cleanup()
            self._scratch = None

    def _embed_side(self, records: Records, name: str) -> np.ndarray:
        if self.spec.own is not None:
            index = np.array([row.index for row in records.rows], dtype=np.int64)
            return np.asarray(self._read_own(name, records, index))
        return np.asarray(self._embed(_texts(records), f"embed {name}", is_target=True))

    def _read_own(self, side: str, records: Records, index: np.ndarray) -> Any:
        address: str = getattr(self.spec.own, side)
        if is_remote(address) and side not in self.copies:
            self.copies[side] = copy_features(address, self.spec.cache, f"--{side}-features", self._console)
        path = str(self.copies[side].path) if side in self.copies else address
        return _own_features(path, records, index, side, address)

    def _embed(self, texts: Sequence[str], label: str, *, is_target: bool = False) -> Any:
        embed, key, embed_target = self._embedding[:3]
        if is_target and embed_target is not None:
            embed, key = embed_target, f"{key} of the target"
        dtype = self.spec.feature_type
        with self._console.task(label, len(texts), "texts") as task:
            cache = self._open_cache(len(texts))
            if cache is None:
                return embed_in_shards(texts, embed, dtype=dtype, progress=task)
            rows = cache.features(texts, embed, key=key, dtype=dtype, progress=task)
        if self.spec.cache:
            for name in ("computed", "reused", "broken"):
                self.cache_use[f"shards_{name}"] = self.cache_use.get(f"shards_{name}", 0) + getattr(cache, name)
        return np.asarray(rows) if rows.nbytes <= MAX_BYTES else rows

    def _embed_shards(self, shards: ShardMap) -> Any:
        embedding, dtype = self._embedding, self.spec.feature_type
        assert embedding.build is not None
        function = partial(_embed_shard, build=embedding.build, dtype=dtype)
        parts = shards("vectors", function, inputs=embedding.fitted, align=embedding.align)
        matrices: list[Any] = [part["vectors"] for part in parts]
        files = [Path(matrix.filename) for matrix in matrices]
        rows = ShardedRows(files, [len(matrix) for matrix in matrices], matrices[0].shape[1], dtype)
        return np.asarray(rows) if rows.nbytes <= MAX_BYTES else rows

    def _open_cache(self, count: int) -> FeatureCache | None:
        if self.spec.cache:
            return FeatureCache(user_path(self.spec.cache))
        embedder = self.spec.embedder
        # Fewer rows are a single shard, so there would be nothing to resume from; fitted embedders are fast.
        if self.state is not None and isinstance(embedder, IndependentEmbedder) and count > SHARD_ROWS:
            return FeatureCache(self.state / "vectors")
        width = getattr(embedder, "dim", 1024)
        if count * width * np.dtype(self.spec.feature_type).itemsize <= MAX_BYTES:
            return None
        if self._scratch is None:
            self._scratch = tempfile.TemporaryDirectory(prefix=".features-", dir=self._directory)
        return FeatureCache(self._scratch.name)

    @property
    def texts(self) -> tuple[Sequence[str], list[str]]:
        """Texts of the whole pool, and those of target and negative examples: a fitted embedder must know the latter's
        words, and distances to them must be exact."""
        return self._pool.rows.texts, _texts(self._target) + (_texts(self._negative) if self._negative else [])


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
        side = error.side
        for name in sorted(sides, key=lambda name: name != side):
            records = sides[name]
            if records is None:
                continue
            x = vectors.pool(records.rows) if isinstance(records, PoolRecords) else getattr(vectors, name)()
            for low in range(0, len(x), _BLOCK_ROWS):
                bad = np.flatnonzero(error.bad(np.asarray(x[low : low + _BLOCK_ROWS])))
                if len(bad):
                    row = records.rows[low + int(bad[0])]
                    raise UserError(
                        f"{name} features: row {row.index} {error.problem} (record {row.id!r}, {row.where}); "
                        f"{error.fix}"
                    ) from None
        raise


def _texts(records: Records) -> list[str]:
    return [row.values["text"] for row in records.rows]


def _own_features(path: str, records: Records, index: np.ndarray, side: str, address: str) -> Any:
    """Return the user's features at `index`: row i of the file belongs to record i before any filter.

    address: the user's name for the file at `path`.
    """
    directory = open_directory(path, f"--{side}-features") if user_path(path).is_dir() else None
    matrix: Any = load_features(path) if directory is None else directory
    if len(matrix) != records.total:
        raise UserError(
            f"--{side}-features: {address} has {len(matrix)} rows for {records.total} records; "
            "they must be in file order, one row per record"
        )
    if directory is not None and directory.has_ids:
        _check_ids(directory, records, side)
    rows = IndexedRows(matrix, index)
    if rows.nbytes <= MAX_BYTES:
        return np.asarray(rows)
    # All rows in file order need no index.
    return matrix if len(index) == len(matrix) and (index[:-1] < index[1:]).all() else rows


def _check_ids(directory: FeatureDirectory, records: Records, side: str) -> None:
    number, identity, ids = -1, "", directory.ids()
    for row in records.rows:
        if row.index < number:  # rows that were sampled, in another order
            number, ids = -1, directory.ids()
        while number < row.index:
            number, identity = number + 1, next(ids)
        if identity != row.id:
            raise UserError(
                f"--{side}-features: row {number} of {directory.directory} is of {identity!r}, and the record there "
                f"({row.where}) is {row.id!r}; write the shards in the order of the files"
            )


def _tfidf_embedding(vectors: Vectors, settings: config.TfIdf) -> Embedding:
    cache = vectors.spec.cache
    seed = derive_seed(vectors.recipe.train.seed, "tfidf")
    tfidf = TfIdfEmbedder(dim=settings.dim, buckets=settings.buckets, seed=seed, fit_rows=settings.fit_rows)
    if not cache:
        tfidf.fit(*vectors.texts)
        return Embedding(tfidf.transform, "", build=partial(_restore_tfidf, settings), fitted=tfidf.state())
    texts = tfidf.fit_texts(*vectors.texts)
    digest = hashlib.sha256(repr((settings, seed, [len(text) for text in texts])).encode())
    for text in texts:
        digest.update(text.encode())
    path = user_path(cache) / f"tfidf-{digest.hexdigest()[:40]}.npz"
    load_or_fit(path, tfidf, lambda: tfidf.fit(texts))
    return Embedding(tfidf.transform, f"tfidf {tfidf.fingerprint}")


def _token_ngram_embedding(vectors: Vectors, settings: config.TokenNgrams) -> Embedding:
    tokenize, size = backbone_tokenizer(vectors.recipe)
    seed = derive_seed(vectors.recipe.train.seed, "token n-grams")
    ngrams = TokenNgramEmbedder(tokenize, size, dim=settings.dim, fit_rows=settings.fit_rows, seed=seed)
    ngrams.fit(*vectors.texts)
    build = partial(_restore_token_ngrams, vectors.recipe)
    key = f"tokens {ngrams.fingerprint}"
    return Embedding(ngrams.transform, key, ngrams.transform_target, build=build, fitted=ngrams.state())


def _embed_shard(shard: Shard, *, build: Callable[[Arrays], Embed], dtype: Stored) -> Arrays:
    return {"vectors": embed_in_shards(shard.texts, build(shard.inputs), dtype=dtype)}


def _restore_tfidf(settings: config.TfIdf, fitted: Arrays) -> Embed:
    arrays = {name: np.asarray(array) for name, array in fitted.items()}
    return TfIdfEmbedder(dim=settings.dim, buckets=settings.buckets).restore(arrays).transform


def _restore_token_ngrams(recipe: Recipe, fitted: Arrays) -> Embed:
    return TokenNgramEmbedder(*backbone_tokenizer(recipe)).restore(fitted).transform


def _build_in_worker(recipe: Recipe, settings: IndependentEmbedder, fitted: Arrays) -> Embed:
    return _build_independent(recipe, settings, (), keyed=False).embed


def _independent_embedding(vectors: Vectors, settings: IndependentEmbedder) -> Embedding:
    texts = vectors.texts[0] if isinstance(settings, config.Gradients) else ()  # others need no pool
    keyed = bool(vectors.spec.cache or vectors.state)
    embedding = _build_independent(vectors.recipe, settings, texts, keyed=keyed)
    return embedding._replace(build=partial(_build_in_worker, vectors.recipe, settings), align=SHARD_ROWS)


def _build_independent(
    recipe: Recipe, settings: IndependentEmbedder, texts: Sequence[str], *, keyed: bool
) -> Embedding:
    """Build an embedding that is not fitted; keyed: its cache key must be complete.

    texts: used for the second moments of gradients only. Raises UserError.
    """
    if isinstance(settings, config.Gradients):
        return Embedding(*gradient_embedder(recipe, settings, texts, keyed=keyed))
    if isinstance(settings, config.Static):
        from flatshift.selection.features import StaticEmbedder

        if not settings.path:
            raise UserError("select.embedder.path is empty: name a directory or a file of word vectors")
        static = StaticEmbedder(settings.path, max_tokens=settings.max_length)
        return Embedding(static.transform, f"static {static.fingerprint if keyed else ''}")
    return Embedding(*state_embedder(settings, backbone=recipe.backbone, device=recipe.train.device, keyed=keyed))


def state_embedder(
    embedder: config.BackboneEmbedder | config.EncoderEmbedder, *, backbone: str, device: str, keyed: bool
) -> tuple[Embed, str]:
    """Return texts → pooled hidden states of a model, and its cache key (complete if `keyed`)."""
    from flatshift.finetune.models.hidden_states import hidden_state_encoder, model_fingerprint

    name = embedder.path if isinstance(embedder, config.EncoderEmbedder) else backbone
    if not name:
        raise UserError("select.embedder.path is empty: name a local directory or a hub encoder")
    pooling, normalise, length, lower, prompt = "mean", True, embedder.max_length, False, ""
    if isinstance(embedder, config.EncoderEmbedder):
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
        prompted = [prompt + (text.lower() if lower else text) for text in texts]
        return pool_features(prompted, encode, batch_size=64, pooling=pooling, normalise=normalise)  # type: ignore[arg-type]

    content = model_fingerprint(open_backbone(name).directory) if keyed else ""
    return embed, f"states {content} {length} {pooling} {normalise} {lower} {prompt}"


_EMBEDDERS: dict[type, Callable[[Vectors, Any], Embedding]] = {
    config.TfIdf: _tfidf_embedding,
    config.TokenNgrams: _token_ngram_embedding,
    **dict.fromkeys(get_args(IndependentEmbedder), _independent_embedding),
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

    def __init__(self, recipe: Recipe, embedder: config.Embedder, moments: Sequence[str] = ()):
        if not isinstance(embedder, IndependentEmbedder):
            raise UserError(
                f"select.embedder.kind: {embedder.kind} is no function of a text alone; take backbone, encoder, "
                "gradients or static, or TfIdfEmbedder, fitted once"
            )
        if isinstance(embedder, config.Gradients) and embedder.adam and not moments:
            raise UserError(
                "moments: gradients are scaled by their second moments; give a few hundred texts of the "
                "pool, the same in every task, or set select.embedder.adam to false"
            )
        self.recipe, self.embedder, self.moments = recipe, embedder, tuple(moments)
        self._embed: Embed | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_embed": None}

    def __call__(self, texts: Sequence[str]) -> np.ndarray:
        if self._embed is None:
            self._embed = _build_independent(self.recipe, self.embedder, self.moments, keyed=False).embed
        return self._embed(list(texts))


_SOURCE = "source.json"
"""File next to a single array: its source and its SHA-256."""


class LocalCopy(NamedTuple):
    """Path of copied features, and their record in the selection's manifest: `path, sha256, bytes, version`, for a
    directory those of its manifest, and `shards`."""

    path: Path
    record: dict[str, Any]


def copy_features(address: str, cache: str, flag: str, console: Console) -> LocalCopy:
    """Copy the array or directory of shards at `address` to this machine's disk, below the directory `cache`.

    Raises UserError for a missing object, a shard that differs from its manifest or a store that refuses access, and
    SelectionError for a manifest that cannot be used.
    """
    address = address.rstrip("/")
    make_directory(user_path(cache))
    copy = _copy_array if address.endswith(".npy") else _copy_shard_directory
    return copy(address, user_path(cache), flag, console)


def _copy_array(address: str, root: Path, flag: str, console: Console) -> LocalCopy:
    source = _find_object(address, flag)
    with source.open():  # fixes the version that every later read must see
        version = source.version
    key = hashlib.sha256(json.dumps([address, source.size, version], sort_keys=True).encode()).hexdigest()[:40]
    folder = root / f"features-{key}"
    file, record = folder / source.name, folder / _SOURCE
    with exclusive_lock(folder, alternative="another select.cache"):
        make_directory(folder)
        if not (version and file.is_file() and record.is_file()):  # no version: a copy cannot be recognised
            (folder / f".{file.name}.part").unlink(missing_ok=True)  # nothing identifies the source of a partial copy
            with console.task(f"copy {flag.removeprefix('--')}, MiB", (source.size or 0) >> 20) as bar:
                sha256 = _copy_object(source, file, lambda done: bar(done >> 20))
            write_json(record, {"path": address, "sha256": sha256, "bytes": file.stat().st_size})
        known = read_json_object(record, "sha256", "bytes", fix=f"delete {folder}, it is copied again")
        if file_sha256(file) != known["sha256"]:
            raise UserError(f"{flag}: {file} is no longer the copy of {address}; delete {folder}, it is copied again")
    return LocalCopy(file, {"path": address, "sha256": known["sha256"], "bytes": known["bytes"], "version": version})


def _copy_shard_directory(address: str, root: Path, flag: str, console: Console) -> LocalCopy:
    try:
        source = _find_object(f"{address}/{MANIFEST}", flag)
    except UserError as error:
        raise UserError(f"{error} (a directory of shards has one, a single array's address ends with .npy)") from error
    with source.open() as handle:
        content = handle.read()
    sha256 = hashlib.sha256(content).hexdigest()
    folder = root / f"features-{sha256[:40]}"
    with exclusive_lock(folder, alternative="another select.cache"):
        make_directory(folder)
        complete = (folder / MANIFEST).is_file()
        file = folder / (MANIFEST if complete else f".{MANIFEST}.part")
        if not complete:
            file.write_bytes(content)
        manifest = read_manifest(file, flag)
        if not complete:
            _copy_shards(address, manifest, folder, flag, console)
            file.replace(folder / MANIFEST)
            fsync_directory(folder)
        try:
            open_directory(folder, flag)
        except SelectionError as error:
            (folder / MANIFEST).unlink()
            if not complete:
                raise
            for damaged in (*folder.glob("*.npy"), *folder.glob("*.ids")):
                damaged.unlink()
            raise UserError(
                f"{flag}: the copy of {address} in {folder} was damaged and is removed ({error}); start again"
            ) from None
    record = {"path": address, "sha256": sha256, "bytes": len(content), "version": source.version}
    return LocalCopy(folder, record | {"shards": len(manifest["shards"]), "rows": manifest["rows"]})


def _copy_shards(address: str, manifest: dict[str, Any], folder: Path, flag: str, console: Console) -> None:
    files = [(shard["file"], shard["sha256"]) for shard in manifest["shards"]]
    if manifest["ids"]:
        files += [(Path(shard["file"]).with_suffix(".ids").name, shard["ids_sha256"]) for shard in manifest["shards"]]
    with console.task(f"copy {flag.removeprefix('--')}", len(files), "files") as bar:
        for number, (name, sha256) in enumerate(files, start=1):
            if not (folder / name).is_file():
                source = _find_object(f"{address}/{name}", flag)
                if _copy_object(source, folder / name, lambda done: None, sha256) != sha256:
                    (folder / f".{name}.part").unlink()
                    raise UserError(
                        f"{flag}: {address}/{name} is not what {MANIFEST} says (SHA-256); write it again, then seal "
                        "again, or start again if the copy was cut"
                    )
            bar(number)


def _find_object(address: str, flag: str) -> RemoteFile:
    try:
        files, directory = find_objects(address)
    except UserError as error:
        raise UserError(f"{flag}: {error}") from error.__cause__
    if directory or len(files) != 1:
        raise UserError(f"{flag}: {address} is no single object; name a .npy file, or a directory with {MANIFEST}")
    return files[0]


def _copy_object(source: RemoteFile, file: Path, progress: Callable[[int], None], sha256: str | None = None) -> str:
    """Copy an object, resuming after the bytes of an earlier attempt; return its SHA-256.

    The file gets its final name unless the digest differs from `sha256`.
    """
    digest, partial = hashlib.sha256(), file.with_name(f".{file.name}.part")
    with partial.open("a+b") as out, source.open() as handle:
        out.seek(0)
        while chunk := out.read(BLOCK):
            digest.update(chunk)
        handle.seek(out.tell())
        while chunk := handle.read(BLOCK):
            out.write(chunk)
            digest.update(chunk)
            progress(out.tell())
        out.flush()
        os.fsync(out.fileno())
    if sha256 in (None, digest.hexdigest()):
        partial.replace(file)
        fsync_directory(file.parent)
    return digest.hexdigest()
