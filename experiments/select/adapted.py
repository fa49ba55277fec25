"""Backbone with a light adapter for selectors: per-text gradients, and the loss change from training on the target.

`selection` loads no backbone: it receives a matrix or a callable from here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from flatshift.experiments.recipe.schema import Recipe
from flatshift.finetune.compute.cuda_status import resolve_device
from flatshift.finetune.config import Adapter, Optimizer, Train
from flatshift.finetune.data.encoding import encode
from flatshift.finetune.data.rows import Row
from flatshift.finetune.errors import UserError
from flatshift.finetune.lock import temporary_directory
from flatshift.finetune.models.backbone import open_backbone
from flatshift.finetune.run_directory import RunDirectory
from flatshift.finetune.seeds import derive_seed, numpy_generator
from flatshift.finetune.tasks import LanguageModel
from flatshift.regularizers import build
from flatshift.selection import RandomProjection
from flatshift.selection.config import Gradients, LossGap

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Embed = Callable[[list[str]], np.ndarray]
LANGUAGE = LanguageModel(pack=False)
_FLOOR = 1e-12
"""Added to second moments, relative to their mean."""


def gradient_embedder(recipe: Recipe, embedder: Gradients, texts: Sequence[str], *, keyed: bool) -> tuple[Embed, str]:
    """Return an embedder, texts → (n, dim) projected gradients of the mean −log p per token, and its cache key.

    Gradients are with respect to the adapter's factors B. A fresh adapter's A is a random projection and its B is 0, so
    the gradient of B is that of the frozen weights, projected: no warm-up is needed first. Preconditioned as in Adam:
    each number is divided by the fourth root of its second moment m, so that products of two texts are g·g'/√m; m is
    taken over `moment_texts` of `texts`, drawn by seed. A text without a token gets the zero vector.
    """
    from flatshift.finetune.data.eval_batching import get_pad_token_id
    from flatshift.finetune.models.hidden_states import model_fingerprint

    seed = derive_seed(recipe.train.seed, "select", "gradients")
    model, tokenizer, device = _load_adapted_backbone(recipe, embedder.rank, seed)
    gradients = SampleGradients(model, device, pad_id=get_pad_token_id(tokenizer), batch_size=embedder.batch_size)
    projection = RandomProjection(embedder.dim, seed=seed, kind="srht")
    scale: np.ndarray | None = None

    def iter_gradients(texts: Sequence[str]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield gradients, and the indices of their texts, batch by batch."""
        for low in range(0, len(texts), embedder.batch_size):
            batch = texts[low : low + embedder.batch_size]
            rows, numbers = gradients.of(encode_texts(batch, tokenizer, embedder.max_length))
            yield rows, low + np.array(numbers, dtype=np.int64)

    if embedder.adam:
        size = min(embedder.moment_texts, len(texts))
        sample = np.sort(numpy_generator(seed, "moments").choice(len(texts), size, replace=False))
        total, count = np.zeros(gradients.width), 0
        for rows, indices in iter_gradients([texts[i] for i in sample.tolist()]):
            total += (rows.astype(np.float64) ** 2).sum(0)
            count += len(indices)
        moment = total / max(count, 1)
        scale = ((moment + _FLOOR * max(moment.mean(), 1e-30)) ** -0.25).astype(np.float32)

    def embed(texts: list[str]) -> np.ndarray:
        out = np.zeros((len(texts), embedder.dim), dtype=np.float32)
        for rows, indices in iter_gradients(texts):
            if len(indices):
                out[indices] = projection.project(rows if scale is None else rows * scale)
        return out

    content = model_fingerprint(open_backbone(recipe.backbone).directory) if keyed else ""
    moments = "" if scale is None else f"{float(scale.astype(np.float64).sum()):.12g}"
    return embed, f"gradients {content} {embedder} {seed} {moments}"


class SampleGradients:
    """Per-text gradients with respect to all factors B of a LoRA model, by hooks: one backward pass per batch.

    A factor's gradient for a text is Σ_t δ_t h_tᵀ, δ_t at its output and h_t at its input; `width` numbers in all.
    """

    def __init__(self, model: Any, device: torch.device, *, pad_id: int, batch_size: int):
        self.model, self.device, self.pad_id, self.batch_size = model, device, pad_id, batch_size
        factors = {n: m for n, m in model.named_modules() if ".lora_B." in n and hasattr(m, "weight")}
        self._factors = dict(sorted(factors.items()))
        self.width = sum(module.weight.numel() for module in self._factors.values())

    def of(self, examples: Sequence[Any]) -> tuple[np.ndarray, list[int]]:
        """Return (n, width) float32, and the number (its id) of each example's text; there may be fewer examples than
        texts."""
        import torch

        from flatshift.finetune.data.eval_batching import EvalBatching
        from flatshift.finetune.evaluate.perplexity import token_nats

        rows: list[np.ndarray] = []
        numbers: list[int] = []
        inputs: dict[str, Tensor] = {}
        deltas: dict[str, Tensor] = {}
        hooks = []
        for name, module in self._factors.items():

            def record(_: Any, arguments: Any, output: Tensor, name: str = name) -> None:
                inputs[name] = arguments[0].detach()
                output.register_hook(lambda delta: deltas.__setitem__(name, delta.detach()))

            hooks.append(module.register_forward_hook(record))
        try:
            for micro in EvalBatching(self.batch_size, self.pad_id).batches(examples, LANGUAGE):
                batch = micro.to(self.device)
                with torch.enable_grad():
                    logits = self.model(**batch.inputs, use_cache=False).logits
                    nats, row = token_nats(logits, batch.labels, LANGUAGE)
                    # Texts of a batch do not interact, so the gradients of the sum are those of each text.
                    (nats / torch.bincount(row, minlength=len(micro.rows)).clamp(min=1)[row]).sum().backward()
                factors = [
                    torch.einsum("bto,btr->bor", deltas[name].float(), inputs[name].float()).flatten(1)
                    for name in self._factors
                ]
                rows.append(torch.cat(factors, 1).cpu().numpy())
                numbers += [int(examples[indices[0]].id) for indices in micro.rows]
                self.model.zero_grad(set_to_none=True)
        finally:
            for hook in hooks:
                hook.remove()
        return np.concatenate([np.empty((0, self.width), np.float32), *rows]), numbers


def train_loss_gap(recipe: Recipe, settings: LossGap, target: Sequence[str]) -> Callable[[Sequence[str]], np.ndarray]:
    """Train a light adapter on `target` by the usual training loop; return texts → (n,) nats per token with it minus
    those without it, relative to the latter if `normalised`; NaN for a text without a token."""
    from flatshift.finetune.compute.numerics import evaluation_mode
    from flatshift.finetune.data.batches import TrainingDataLoader
    from flatshift.finetune.data.eval_batching import EvalBatching, get_pad_token_id
    from flatshift.finetune.evaluate.perplexity import document_nats
    from flatshift.finetune.parallel.engine import Engine
    from flatshift.finetune.train.stage import TrainingStage
    from flatshift.finetune.train.trainer import Trainer

    seed = derive_seed(recipe.train.seed, "select", "loss gap")
    model, tokenizer, device = _load_adapted_backbone(recipe, settings.rank, seed)
    examples = encode_texts(list(target), tokenizer, settings.max_length)
    if not examples:
        raise UserError("select.target: no text holds a token; loss-gap has nothing to read")
    size = min(settings.batch_size, len(examples))
    train = Train(
        steps=settings.steps, batch_size=size, seed=seed, max_length=settings.max_length, save_every=0,
        precision="fp32", device=recipe.train.device,
    )  # fmt: skip
    batches = TrainingDataLoader(
        examples, task=LANGUAGE, batch_size=size, accumulate=1, seed=derive_seed(seed, "order"),
        max_length=settings.max_length, pad_id=get_pad_token_id(tokenizer), group=train.group,
    )  # fmt: skip
    with temporary_directory("flatshift-gap-") as folder:
        stage = TrainingStage(
            name="loss gap", task=LANGUAGE, batches=batches, dev=[], optimizer=Optimizer(lr=settings.lr), train=train,
            evaluate=recipe.eval, regularizer=build(recipe.regularizer), run=RunDirectory(folder), seed=seed,
        )  # fmt: skip
        Trainer(Engine.alone(model), tokenizer, stage).fit()

    def measure(texts: Sequence[str]) -> np.ndarray:
        encoded = encode_texts(list(texts), tokenizer, settings.max_length)
        inference = EvalBatching.of(tokenizer, train, batch_size=64, device=device)
        with evaluation_mode(model):
            after, tokens = document_nats(model, encoded, inference, task=LANGUAGE)
            with model.disable_adapter():
                before, _ = document_nats(model, encoded, inference, task=LANGUAGE)
        out = np.full(len(texts), np.nan)
        per = np.maximum(before, _FLOOR) if settings.normalised else np.maximum(tokens, 1)
        out[[int(example.id) for example in encoded]] = (after - before) / per
        return out

    return measure


def _load_adapted_backbone(recipe: Recipe, rank: int, seed: int) -> tuple[Any, Any, torch.device]:
    from flatshift.finetune.adapters.adapter import attach_adapter
    from flatshift.finetune.models.load import load_backbone

    device = resolve_device(recipe.train.device)
    model = load_backbone(recipe.backbone, task=LANGUAGE, precision="fp32", device=device)
    wrapped = attach_adapter(model, Adapter(rank=rank), task=LANGUAGE, seed=seed)
    return wrapped.eval(), open_backbone(recipe.backbone).tokenizer, device


def encode_texts(texts: Sequence[str], tokenizer: Any, max_length: int) -> list[Any]:
    """Encode texts as examples whose id is the text's number; texts without a token are left out."""
    rows = [Row({"text": text}, str(i), f"text {i}") for i, text in enumerate(texts)]
    return list(encode(rows, task=LANGUAGE, tokenizer=tokenizer, max_length=max_length, bad_rows="skip").examples)
