"""Inputs of a selection method besides pool and target: checked settings, backbone perplexity, progress."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np

from flatshift.experiments.recipe.schema import Recipe, Select
from flatshift.experiments.run.console import Console, ProgressBar
from flatshift.experiments.select.kept import with_cached_losses
from flatshift.finetune.data.rows import Row
from flatshift.finetune.errors import UserError
from flatshift.finetune.tasks import LanguageModel
from flatshift.selection.config import Domains, LossGap, Method, Perplexity, ranking_method, required_inputs
from flatshift.selection.errors import TooLittleMemory
from flatshift.selection.transport.progress import ITERATIONS

_PATIENCE_S = 2.0
"""Seconds; shorter fits show no progress."""


def check_method(spec: Select) -> None:
    """Raise UserError for settings that cannot work or have no effect, before anything is read."""
    wanted = required_inputs(spec.method)
    kind: str = spec.method.kind
    if isinstance(spec.method, Domains):
        kind = f"{spec.method.inside.kind} inside domains"
    own = spec.own
    if "gradients" in wanted and own is None and spec.embedder.kind != "gradients":
        raise UserError(
            f"select.method: {kind} compares gradients; take --embedder gradients, "
            "or give yours with --pool-features and --target-features"
        )
    if "negative" in wanted and not spec.negative.files:
        raise UserError(
            f"select.negative.files is empty: {kind} moves away from negative examples; name files that hold them"
        )
    if "negative" not in wanted and spec.negative.files:
        raise UserError(
            f"select.negative.files: {kind} has no use for negative examples; choose gotd-contrast or drop them"
        )
    if own is not None and bool(own.negative) != ("negative" in wanted):
        raise UserError(
            f"select.embedder.negative: {kind} needs features of the negative examples; name their .npy file"
            if "negative" in wanted
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
    from flatshift.finetune.compute.cuda_status import resolve_device

    return str(resolve_device(recipe.train.device))


def backbone_nll(
    recipe: Recipe, method: Method, target: Sequence[str], state: Path | None = None
) -> Callable[[Sequence[str]], np.ndarray] | None:
    """Return texts → (n,) mean −log p per token under the recipe's backbone, NaN for a text without a token; or None.

    None if `method` needs no losses; for loss-gap the change of that loss by training on `target`. The backbone is
    loaded at the first call, in the recipe's precision. state: directory that keeps the losses of each batch until the
    selection is complete.
    """
    inner = ranking_method(method)
    if isinstance(inner, LossGap):
        from flatshift.experiments.select.adapted import loss_gap_scorer

        gap = loss_gap_scorer(recipe, inner, target)
        digest = hashlib.sha256("\0".join(target).encode("utf-8", "surrogatepass")).hexdigest()
        return (
            gap
            if state is None
            else with_cached_losses(gap, state / "losses", f"gap {recipe.backbone} {inner} {digest}")
        )
    if not isinstance(inner, Perplexity):
        return None
    max_length = inner.max_length
    loaded: list[Callable[[Sequence[str]], np.ndarray]] = []

    def measure(texts: Sequence[str]) -> np.ndarray:
        if not loaded:
            loaded.append(_build_nll(recipe, max_length))
        return loaded[0](texts)

    return (
        measure if state is None else with_cached_losses(measure, state / "losses", f"{recipe.backbone} {max_length}")
    )


def _build_nll(recipe: Recipe, max_length: int) -> Callable[[Sequence[str]], np.ndarray]:
    from flatshift.finetune.compute.cuda_status import resolve_device
    from flatshift.finetune.compute.precision import infer_precision
    from flatshift.finetune.data.encoding import encode
    from flatshift.finetune.data.eval_batching import EvalBatching
    from flatshift.finetune.evaluate.perplexity import document_nats
    from flatshift.finetune.models.backbone import open_backbone
    from flatshift.finetune.models.load import load_backbone

    task = LanguageModel(pack=False)
    device = resolve_device(recipe.train.device)
    tokenizer = open_backbone(recipe.backbone).tokenizer
    model = load_backbone(recipe.backbone, task=task, precision=recipe.train.precision, device=device).eval()
    inference = EvalBatching.of(tokenizer, infer_precision(recipe.train, model), batch_size=64, device=device)

    def measure(texts: Sequence[str]) -> np.ndarray:
        rows = [Row({"text": text}, str(i), f"text {i}") for i, text in enumerate(texts)]
        encoded = encode(rows, task=task, tokenizer=tokenizer, max_length=max_length, bad_rows="skip").examples
        nats, tokens = document_nats(model, encoded, inference, task=task)
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
        place = "select.method.inside.memory_gib" if isinstance(spec.method, Domains) else "--memory"
        raise UserError(
            f"{place}: {error.limit / 2**30:.3g} GiB is too little for {error.rows:,} rows and {error.targets:,} "
            f"targets; give at least {math.ceil(error.needed / 2**30 * 1000) / 1000:g}"
        ) from None


@contextmanager
def show_progress(console: Console) -> Iterator[Callable[[str, int, int], None]]:
    """Show a selector's `progress(stage, done, total)` as consecutive tasks of the console."""
    start = time.monotonic()
    stage: tuple[str, int] | None = None
    update: ProgressBar | None = None
    with ExitStack() as shown:

        def progress(name: str, done: int, total: int) -> None:
            nonlocal stage, update
            if time.monotonic() - start < _PATIENCE_S:
                return
            if (name, total) != stage or update is None:
                shown.close()
                stage, update = (
                    (name, total),
                    shown.enter_context(console.task(name, total, "" if name == ITERATIONS else "rows")),
                )
            update(done)
            if done == total:  # the next stage may run long without progress
                shown.close()
                stage = None

        yield progress
