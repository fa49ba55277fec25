"""NEFTune: uniform noise on the embedded input tokens of a training step. Does not find flat minima; for comparison.

    x ← x + u α/√(T·D),   u uniform in [−1, 1],   x the output (B, T, D) of the input embedding

T is the padded length of the current micro-batch over all ranks, as in transformers' `neftune_noise_alpha` (the
authors' first code counts each row's own tokens). In training mode only. An encoder-decoder gets the noise on its
encoder's tokens: those of its decoder are the targets, shifted. (transformers hooks the embedding table that the two
share, which T5 never calls.) If the loop passes `inputs_embeds` to the model, nothing is embedded and no noise added.

u is a hash of (seed, optimizer step, micro-batch, row of the micro-batch over all ranks, position, dim), so that any
split of the rows over ranks gives the same noise. A loop that accumulates must call `on_micro_batch(index)`, or all
micro-batches of a step get the same noise; so do all processes that attach without a placement.

Source: Jain et al., NEFTune: Noisy Embeddings Improve Instruction Finetuning, ICLR 2024 (arXiv 2310.05914), Alg. 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor, nn

from flatshift.regularizers.config import NEFTune, RegularizerError
from flatshift.regularizers.layers.signs import counter_values, layer_uid, mix64, sign_words, step_id
from flatshift.regularizers.mesh import SINGLE_PROCESS, Placement
from flatshift.regularizers.methods.base import AttachedRegularizer, require_nonnegative
from flatshift.regularizers.protocol import MetricTensors

_WRAPPERS = ("module", "_orig_mod")


class NEFTuneRegularizer(AttachedRegularizer):
    """NEFTune (see the module docstring); created by `flatshift.regularizers.build(NEFTune(...))`."""

    def __init__(self, config: NEFTune) -> None:
        require_nonnegative("alpha", config.alpha)
        super().__init__("neftune", "neftune.")
        self.config = config
        self._embedding: nn.Module | None = None
        self._micro = 0
        self._bound = torch.zeros((), dtype=torch.float64)

    def attach(self, model: nn.Module, *, seed: int, total_steps: int, placement: Placement | None = None) -> Self:
        self._check_not_attached()
        placement = placement or SINGLE_PROCESS
        _check_mesh(placement)
        embedding = input_embedding(model)
        self._finish_attach({"of the input tokens": embedding}, seed, placement)
        self._embedding, self._micro, self._bound = embedding, 0, torch.zeros((), dtype=torch.float64)
        return self

    def detach(self) -> None:
        super().detach()
        self._embedding = None

    @contextmanager
    def step(self, t: int, *, loss_scale: float = 1.0) -> Iterator[Iterable[int]]:
        with self._in_step(t):
            self._micro, self._bound = 0, torch.zeros_like(self._bound)
            if self.config.alpha == 0:
                yield range(1)
                return
            assert self._embedding is not None
            handle = self._embedding.register_forward_hook(self._add)
            try:
                yield range(1)
            finally:
                handle.remove()

    def on_micro_batch(self, index: int) -> None:
        self._micro = index

    def _add(self, module: nn.Module, inputs: Any, output: Tensor) -> Tensor | None:
        if not module.training:
            return None
        rows, length, width = output.shape
        own, ranks = self._placement.share
        lengths = torch.zeros(ranks, dtype=torch.float64, device=output.device)
        lengths[own] = length
        self._placement.sum_data(lengths)
        self._bound = self.config.alpha / (lengths.max() * width).sqrt()
        numbers = torch.arange(rows, device=output.device) + own * rows
        noise = uniform_noise(seed=self._seed, step=self._step, micro=self._micro, rows=numbers, count=length * width)
        return output + (noise * self._bound.float()).view(output.shape).to(output.dtype)

    def metric_tensors(self) -> MetricTensors:
        """Return `embedding_noise`: α/√(T·D) of the last micro-batch; 0 if none was perturbed."""
        return MetricTensors(self._bound[None], lambda n: {"embedding_noise": n[0]})


def _check_mesh(placement: Placement) -> None:
    """Raise RegularizerError for pipeline stages and context parallelism, under which a rank cannot know its rows or
    positions."""
    stages, tokens = torch.ones(1, device=placement.device), torch.ones(1, device=placement.device)
    placement.sum_pipeline(stages)
    placement.sum_data(tokens)
    if int(stages) > 1:
        raise RegularizerError(
            "NEFTune does not run on mesh.pp, whose stages see a micro-batch in pieces; use mesh.dp or mesh.tp"
        )
    if int(tokens) != placement.share[1]:
        raise RegularizerError(
            "NEFTune does not run on mesh.cp, whose ranks see parts of a row; use mesh.dp or mesh.tp"
        )


def input_embedding(model: nn.Module) -> nn.Module:
    """Return the module that embeds the input tokens of a transformers model, wrapped or not; for an encoder-decoder,
    the encoder's. Raises RegularizerError if there is none."""
    inner: Any = model
    while wrapped := next((name for name in _WRAPPERS if isinstance(getattr(inner, name, None), nn.Module)), None):
        inner = getattr(inner, wrapped)
    inner = inner.get_base_model() if hasattr(inner, "get_base_model") else inner
    if getattr(getattr(inner, "config", None), "is_encoder_decoder", False):
        inner = inner.get_encoder()
    try:
        embedding = inner.get_input_embeddings()
    except (AttributeError, NotImplementedError):
        embedding = None
    if not isinstance(embedding, nn.Module):
        raise RegularizerError(
            f"NEFTune perturbs embedded tokens, and {type(inner).__name__} has no input embedding; use another "
            "regularizer.kind"
        )
    return embedding


def uniform_noise(*, seed: int, step: int, micro: int, rows: Tensor, count: int) -> Tensor:
    """Return uniform noise in [−1, 1], float32 (len(rows), count), for global `rows` (int64) of a micro-batch. Each
    64-bit word of the counter hash gives two numbers: its lower half, then its upper one."""
    keys = mix64(counter_values(rows) + (step_id(seed, step) ^ step_id(layer_uid("neftune"), micro)))
    counts = counter_values(torch.arange((count + 1) // 2, device=rows.device))
    # Row by row: the hash makes several int64 copies of the words.
    noise = [sign_words(row, counts).view(torch.int32)[:count].float() for row in keys]
    return torch.stack(noise).mul_(2.0**-31)
