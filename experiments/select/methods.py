"""Inputs of a selection method besides pool and target: checked settings, backbone perplexity, progress; and the slow
scores and losses of an unfinished selection."""

from __future__ import annotations

import functools
import hashlib
import json
import math
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from flatshift.experiments.recipe.schema import Recipe, Select
from flatshift.experiments.run.console import Console, ProgressBar
from flatshift.experiments.select.adapted import LANGUAGE, encode_texts, train_loss_gap
from flatshift.experiments.select.pool import PoolAndTarget
from flatshift.finetune.atomic import to_json_values
from flatshift.finetune.compute.cuda_status import resolve_device
from flatshift.finetune.errors import UserError
from flatshift.finetune.models.backbone import open_backbone
from flatshift.selection.config import Domains, LossGap, Method, Perplexity, ranking_method, required_inputs
from flatshift.selection.errors import TooLittleMemory
from flatshift.selection.features.cache import FeatureCache, atomic_file
from flatshift.selection.methods.base import Selector

Measure = Callable[[Sequence[str]], np.ndarray]
_PATIENCE_S = 2.0
"""Seconds; shorter fits show no progress."""


def check_method(spec: Select) -> None:
    """Raise UserError for settings that cannot work or have no effect, before anything is read."""
    required = required_inputs(spec.method)
    kind: str = spec.method.kind
    if isinstance(spec.method, Domains):
        kind = f"{spec.method.inside.kind} inside domains"
    own = spec.own
    if "gradients" in required and own is None and spec.embedder.kind != "gradients":
        raise UserError(
            f"select.method: {kind} compares gradients; take --embedder gradients, "
            "or give yours with --pool-features and --target-features"
        )
    if "negative" in required and not spec.negative.files:
        raise UserError(
            f"select.negative.files is empty: {kind} moves away from negative examples; name files that hold them"
        )
    if "negative" not in required and spec.negative.files:
        raise UserError(
            f"select.negative.files: {kind} has no use for negative examples; choose gotd-contrast or drop them"
        )
    if own is not None and bool(own.negative) != ("negative" in required):
        raise UserError(
            f"select.embedder.negative: {kind} needs features of the negative examples; name their .npy file"
            if "negative" in required
            else f"select.embedder.negative: {kind} has no use for negative examples; leave it out"
        )


def needs_vectors(spec: Select) -> bool:
    """Return True if pool and target get vectors: the method uses them, or they are given and serve the report."""
    return "features" in required_inputs(spec.method) or spec.own is not None


def embeds_texts(spec: Select) -> bool:
    """Return True if texts are embedded, even if only for the distances of domains."""
    return spec.own is None and (needs_vectors(spec) or spec.relevance is not None)


def unused_setting(spec: Select) -> str | None:
    """Return the first vector setting that has no effect because no vectors are made; None if there is none."""
    if needs_vectors(spec) or embeds_texts(spec):
        return None
    default = Select()
    settings = ("embedder", "cache", "feature_type")
    return next((name for name in settings if getattr(spec, name) != getattr(default, name)), None)


def solver_device(recipe: Recipe) -> str:
    """Return the device of the transport solver: `train.device`, or the CPU for methods without a solver."""
    if recipe.select is None or "features" not in required_inputs(recipe.select.method):
        return "cpu"
    return str(resolve_device(recipe.train.device))


def backbone_nll(recipe: Recipe, method: Method, target: Sequence[str], state: Path | None = None) -> Measure | None:
    """Return texts → (n,) mean −log p per token under the recipe's backbone, NaN for a text without a token; or None.

    None if `method` needs no losses; for loss-gap the change of that loss by training on `target`. The backbone is
    loaded at the first call, in the recipe's precision. state: directory that keeps the losses of each batch until the
    selection is complete.
    """
    inner = ranking_method(method)
    if isinstance(inner, LossGap):
        digest = hashlib.sha256("\0".join(target).encode("utf-8", "surrogatepass")).hexdigest()
        key = f"gap {recipe.backbone} {inner} {digest}"
        build = functools.cache(functools.partial(train_loss_gap, recipe, inner, target))
    elif isinstance(inner, Perplexity):
        key = f"{recipe.backbone} {inner.max_length}"
        build = functools.cache(functools.partial(_build_nll, recipe, inner.max_length))
    else:
        return None

    def measure(texts: Sequence[str]) -> np.ndarray:
        return build()(texts)

    return measure if state is None else _cache_losses(measure, state / "losses", key)


def _build_nll(recipe: Recipe, max_length: int) -> Measure:
    from flatshift.finetune.compute.precision import infer_precision
    from flatshift.finetune.data.eval_batching import EvalBatching
    from flatshift.finetune.evaluate.perplexity import document_nats
    from flatshift.finetune.models.load import load_backbone

    device = resolve_device(recipe.train.device)
    tokenizer = open_backbone(recipe.backbone).tokenizer
    model = load_backbone(recipe.backbone, task=LANGUAGE, precision=recipe.train.precision, device=device).eval()
    inference = EvalBatching.of(tokenizer, infer_precision(recipe.train, model), batch_size=64, device=device)

    def measure(texts: Sequence[str]) -> np.ndarray:
        encoded = encode_texts(texts, tokenizer, max_length)
        nats, tokens = document_nats(model, encoded, inference, task=LANGUAGE)
        out = np.full(len(texts), np.nan)
        out[[int(example.id) for example in encoded]] = nats / np.maximum(tokens, 1)
        return out

    return measure


@contextmanager
def report_memory_shortage(spec: Select) -> Iterator[None]:
    """Report too little memory for the transport solver by its setting. Raises UserError for TooLittleMemory."""
    try:
        yield
    except TooLittleMemory as error:
        setting = "select.method.inside.memory_gib" if isinstance(spec.method, Domains) else "--memory"
        raise UserError(
            f"{setting}: {error.limit / 2**30:.3g} GiB is too little for {error.rows:,} rows and {error.targets:,} "
            f"targets; give at least {math.ceil(error.needed / 2**30 * 1000) / 1000:g}"
        ) from None


@contextmanager
def show_progress(console: Console) -> Iterator[Callable[[str, int, int], None]]:
    """Show a selector's `progress(stage, done, total)` as consecutive tasks of the console."""
    from flatshift.selection.transport.settings import ITERATIONS

    start = time.monotonic()
    stage: tuple[str, int] | None = None
    update: ProgressBar | None = None
    with ExitStack() as tasks:

        def progress(name: str, done: int, total: int) -> None:
            nonlocal stage, update
            if time.monotonic() - start < _PATIENCE_S:
                return
            if (name, total) != stage or update is None:
                tasks.close()
                stage = name, total
                update = tasks.enter_context(console.task(name, total, "" if name == ITERATIONS else "rows"))
            update(done)
            if done == total:  # the next stage may run long without progress
                tasks.close()
                stage = None

        yield progress


_BLOCK_ROWS = 1 << 14  # hashed at a time: features of the user may be a memory map larger than memory


class ScoreCheckpoint:
    """Scores of a fitted selector in `directory`, tied to the exact texts they belong to.

    Selectors with the parameter `state` are not stored here: their solver keeps its own passes
    (`flatshift.selection.transport`).
    """

    def __init__(self, directory: Path, sides: PoolAndTarget):
        self.path = directory / "scores.npz"
        self._sides = sides
        self.restored = False

    def save(self, selector: Selector) -> None:
        """Write the file that `restore` reads."""
        if any(hasattr(part, "state") for part in (selector, getattr(selector, "inside", None))):
            return
        diagnostics = np.array(json.dumps(to_json_values(selector.diagnostics_)))
        optional = {"nearest": selector.nearest_target_, "readings": selector.readings_}
        arrays: dict[str, Any] = {name: array for name, array in optional.items() if array is not None}
        with atomic_file(self.path) as handle:
            np.savez(handle, digest=np.array(self._digest()), scores=selector.scores_, told=diagnostics, **arrays)

    def restore(self, selector: Selector) -> bool:
        """Return True if `selector` now has the scores of an earlier attempt on these texts, else False."""
        try:
            with np.load(self.path, allow_pickle=False) as stored:
                if str(stored["digest"]) != self._digest():
                    return False
                selector.scores_ = stored["scores"]
                selector.nearest_target_ = stored["nearest"] if "nearest" in stored.files else None
                selector.readings_ = stored["readings"] if "readings" in stored.files else None
                selector.diagnostics_ = json.loads(str(stored["told"]))
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
            return False
        self.restored = True
        return True

    def _digest(self) -> str:
        digest = hashlib.sha256()
        targets = (row.values["text"] for row in self._sides.target.rows)
        for texts in (self._sides.pool.rows.texts, targets):
            for text in texts:
                raw = text.encode("utf-8", "surrogatepass")
                digest.update(len(raw).to_bytes(8, "little") + raw)
        sides = (self._sides.x, self._sides.y, self._sides.z)  # one's own features do not depend on the texts
        for side in (side for side in sides if side is not None):
            for start in range(0, len(side), _BLOCK_ROWS):
                digest.update(np.ascontiguousarray(side[start : start + _BLOCK_ROWS]).tobytes())
        return digest.hexdigest()


def _cache_losses(measure: Measure, directory: Path, key: str) -> Measure:
    """Return `measure` with the losses of each batch of texts stored in `directory`."""

    def split_nan(texts: Sequence[str]) -> np.ndarray:
        """Return (n, 2): the losses with 0 in place of NaN, and a flag for each NaN."""
        losses = measure(texts)
        return np.stack([np.where(np.isnan(losses), 0.0, losses), np.isnan(losses)], axis=1)

    def read_losses(texts: Sequence[str]) -> np.ndarray:
        rows = FeatureCache(directory).features(texts, split_nan, key=key, shard_rows=len(texts))
        values = np.asarray(rows, dtype=np.float64)
        return np.where(values[:, 1] > 0, np.nan, values[:, 0])

    return read_losses
