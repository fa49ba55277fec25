"""Training loss: a float32 sum over target tokens, which the loop divides by their count in the whole step.

The logits [B·T, V] of a language model are its largest tensor. If the head is a plain frozen `nn.Linear` whose output
is the model's, `linear_cross_entropy` computes them in slices and keeps only the gradient of the hidden states, in the
head's own forward, so that what gathers or frees its weights there (FSDP2) does so for the loss too. `find_head` runs
one batch and compares; models that do more to their logits than scale and soft-cap them use their own forward pass.

A loss over whole answers (`task.traits.is_answer_level`) is not a sum over tokens: it combines log p of each row's
answer and the base model's log p of it, which `add_reference` computes with the adapter off.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import attention as packed_attention
from .capabilities import capabilities
from .cuda_status import product_dtype
from .memory import slice_columns, slice_rows
from .micro_batch import MicroBatch
from .numerics import attention_kernel, evaluation_mode
from .precision import WidenedLinear
from .protocols import LossTask, TraitsTask

IGNORED = -100
_PROBE = 64
"""Tokens of the row that probes the head."""
_NUMBERS = (2.0**-16, 0.5, -1.0, 7.0, -30.0, 2.0**20)
"""Outputs of the head for which the model's logits show how it scales and caps them."""
_SMALL = 2.0**-40
"""Factor that makes a loss so small that tanh leaves it as it is; a power of 2, so exact."""


class Batch(Protocol):
    """Required attributes of a micro-batch (`flatshift.finetune.compute.micro_batch.MicroBatch`)."""

    @property
    def inputs(self) -> dict[str, Tensor]: ...

    @property
    def labels(self) -> Tensor: ...


_Any = TypeVar("_Any")


@dataclass(frozen=True)
class Head:
    """Plain frozen linear layer whose output x becomes the model's logits: scale · x, soft-capped as
    cap · tanh(scale · x / cap) if there is a cap."""

    linear: nn.Linear
    kernel: Callable[..., Tensor] | None = None
    """Kernel for the training loss instead of `linear_cross_entropy` (`flatshift.finetune.compute.fused_loss`)."""
    scale: float = 1.0
    cap: float | None = None

    def cross_entropy(
        self, hidden: Tensor, targets: Tensor, *, smoothing: float = 0.0, by_probability: bool = False
    ) -> Tensor:
        """Return the loss summed over the rows of `hidden` [n, D], float32, without the logits of all of them at once.

        With `linear` sliced over ranks (`flatshift.finetune.parallel.tensor.vocabulary`) it is computed by all of them.
        by_probability: weight each row's term (`weigh_by_probability`), which no `kernel` does.
        """
        if by_probability:
            terms = weigh_by_probability(self.cross_entropies(hidden, targets))
            return terms.sum(dtype=capabilities(hidden.device).sums).float()
        hidden, vocabulary = self._scaled(hidden), getattr(self.linear, "vocabulary", None)
        if vocabulary is not None:
            loss: Tensor = vocabulary.cross_entropy(hidden, self.linear, targets, smoothing=smoothing, cap=self.cap)
            return loss
        if self.kernel is not None and hidden.requires_grad and len(hidden):
            return self.kernel(hidden, self.linear, targets, smoothing=smoothing)
        return linear_cross_entropy(hidden, self.linear, targets, smoothing=smoothing, cap=self.cap)

    def cross_entropies(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Return the terms of `cross_entropy`, one per row, float32 (n,)."""
        hidden, vocabulary = self._scaled(hidden), getattr(self.linear, "vocabulary", None)
        if vocabulary is not None:
            terms: Tensor = vocabulary.cross_entropies(hidden, self.linear, targets, cap=self.cap)
            return terms
        return linear_cross_entropies(hidden, self.linear, targets, cap=self.cap)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of rows of hidden states: [n, D] → [n, V]."""
        return soft_cap(F.linear(self._scaled(hidden), self.linear.weight, self.linear.bias), self.cap)

    def _scaled(self, hidden: Tensor) -> Tensor:
        return hidden if self.scale == 1 else hidden * self.scale

    def as_output(self, values: Tensor) -> Tensor:
        """Return `values` (float32) as outputs of the layer [n, 1, 1] that the model scales and caps on their way to
        `from_logits`: so small that a cap leaves them as they are."""
        small = values if self.cap is None else values * _SMALL
        return (small / self.scale).view(-1, 1, 1).clone()  # FSDP2 hooks what a unit returns and warns of views

    def from_logits(self, logits: Tensor) -> Tensor:
        """Return the values of `as_output` (n,) from the model's logits."""
        return logits.flatten() if self.cap is None else logits.flatten() / _SMALL

    @contextlib.contextmanager
    def computing(self, forward: Callable[[Tensor], Tensor]) -> Iterator[None]:
        """Make the layer compute `forward(hidden [B, T, D])` instead; its hooks still run around it."""
        attributes = vars(self.linear)
        before = attributes.get("forward")
        attributes["forward"] = forward
        try:
            yield
        finally:
            del attributes["forward"]
            if before is not None:
                attributes["forward"] = before

    def taken(self, function: Callable[[Tensor], _Any], run: Callable[[], Any]) -> _Any:
        """Return `function` of the last hidden states [B, T, D] while `run` calls the model without logits."""
        values: list[_Any] = []

        def watch(hidden: Tensor) -> Tensor:
            values.append(function(hidden))
            return hidden.new_zeros(1, 1, 1)

        with self.computing(watch):
            run()
        (only,) = values
        return only


def weigh_by_probability(terms: Tensor) -> Tensor:
    """Return the terms −log p of target tokens times p, whose own gradient is left out (DFT, arXiv 2508.05629)."""
    return terms * torch.exp(-terms.detach())


def loss_sum(logits: Tensor, labels: Tensor, *, task: LossTask, chosen: Tensor | None = None) -> Tensor:
    """Return the loss summed over target items, float32 scalar: cross entropy in nats, or the task's `example_losses`.

    logits: [B, T, V] (`traits.causal`: position t predicts the label at t + 1; else the label at t) or [B, C]
        (`task.traits.is_sequence_level`).
    labels: [B, T] with -100 where there is no target, or in the form the task expects.
    chosen: indices of the targets among the B·T labels, if known.
    """
    if task.traits.is_sequence_level:
        return task.example_losses(logits, labels).sum()
    rows, targets = select_targets(logits, labels, task, chosen)
    if task.dft:
        return weigh_by_probability(F.cross_entropy(rows.float(), targets, reduction="none")).sum()
    return F.cross_entropy(rows.float(), targets, reduction="sum", label_smoothing=task.smoothing)


def batch_loss(model: nn.Module, batch: Batch, *, task: LossTask, head: Head | None = None) -> Tensor:
    """Return `loss_sum` of one micro-batch on the model's device, by the sliced path if there is a `head`.

    For whole answers, the sum over pairs or answers; the reference is computed here if it is missing.
    """
    if task.traits.is_answer_level:
        known: MicroBatch = batch  # type: ignore[assignment]
        if task.has_reference and known.preference is not None and known.preference.reference is None:
            (known,) = add_reference(model, [known], task=task, head=head)
        assert known.preference is not None
        return task.answer_losses(answer_log_probs(model, known, task=task, head=head), known.preference).sum()
    if head is None:
        with attention_kernel(batch.inputs), packed_attention.packed_batch(batch) as inputs:
            logits = model(**inputs).logits
        return loss_sum(logits, batch.labels, task=task, chosen=getattr(batch, "chosen", None))

    def cost(hidden: Tensor) -> Tensor:
        rows, targets = select_targets(hidden, batch.labels, task, getattr(batch, "chosen", None))
        return head.as_output(head.cross_entropy(rows, targets, smoothing=task.smoothing, by_probability=task.dft))

    with head.computing(cost), attention_kernel(batch.inputs), packed_attention.packed_batch(batch) as inputs:
        return head.from_logits(model(**inputs).logits).sum()


def answer_log_probs(model: nn.Module, batch: MicroBatch, *, task: LossTask, head: Head | None = None) -> Tensor:
    """Return Σ log p of the target tokens of each row, (R,) float32."""
    if head is None:
        with attention_kernel(batch.inputs), packed_attention.packed_batch(batch) as inputs:
            logits = model(**inputs).logits
        return _sum_by_row(
            logits, batch, task, lambda rows, targets: F.cross_entropy(rows.float(), targets, reduction="none")
        )

    def summed(hidden: Tensor) -> Tensor:
        return head.as_output(_sum_by_row(hidden, batch, task, head.cross_entropies))

    with head.computing(summed), attention_kernel(batch.inputs), packed_attention.packed_batch(batch) as inputs:
        return head.from_logits(model(**inputs).logits)


def _sum_by_row(
    values: Tensor, batch: MicroBatch, task: TraitsTask, nats: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    chosen = batch.chosen
    assert chosen is not None
    each = nats(*select_targets(values, batch.labels, task, chosen))
    rows, tokens = batch.labels.shape
    return each.new_zeros(rows).index_add(0, chosen // tokens, -each)


@torch.no_grad()
def add_reference(
    model: nn.Module,
    micros: Sequence[MicroBatch],
    *,
    task: LossTask,
    head: Head | None = None,
    precision: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    add: Callable[[Tensor], Tensor] = lambda sums: sums,
) -> list[MicroBatch]:
    """Return the micro-batches of a step, on the model's device, with the reference and, if the task needs it
    (`task.is_unpaired`), the drift of their `PreferenceTargets`.

    The reference is the base model (adapter off, no dropout). The drift is the mean over all mismatched rows of log p
    minus the base model's, clamped at 0 (KTO, arXiv 2402.01306, §4.1), at the current weights.

    precision: context of each forward pass.
    add: sums a tensor over the ranks that have other rows of the step.
    """

    def log_probs(micro: MicroBatch) -> Tensor:
        with precision():
            return answer_log_probs(model, micro, task=task, head=head)

    known: list[MicroBatch] = []
    total: Tensor | float = 0.0
    count = 0
    with evaluation_mode(model):
        for micro in micros:
            assert micro.preference is not None
            sides, others = micro.preference, micro.preference.mismatched
            with disable_adapters(model):
                sides = replace(sides, reference=log_probs(micro))
                apart = None if others is None else -log_probs(others)
            if others is not None and apart is not None:
                total = total + (apart + log_probs(others)).sum(dtype=capabilities(apart.device).sums)
                count += len(apart)
            known.append(replace(micro, preference=sides))
    if not isinstance(total, Tensor):
        return known
    sums = add(torch.stack([total, total.new_tensor(float(count))]))
    drift = (sums[0] / sums[1]).clamp(min=0.0).float()
    return [
        replace(micro, preference=replace(micro.preference, drift=drift))
        for micro in known
        if micro.preference is not None
    ]


@contextlib.contextmanager
def disable_adapters(model: nn.Module) -> Iterator[None]:
    """Make every layer that PEFT wraps compute without its adapter; trainability of parameters is unchanged."""
    wrapped: list[Any] = [module for module in model.modules() if hasattr(module, "_disable_adapters")]
    before = [module._disable_adapters for module in wrapped]
    for module in wrapped:
        module._disable_adapters = True
    try:
        yield
    finally:
        for module, disabled in zip(wrapped, before, strict=True):
            module._disable_adapters = disabled


def head_probe(inputs: Mapping[str, Any], *, multiple: int = 1) -> dict[str, Any]:
    """Return the inputs for `find_head`: the first tokens of the first row, 64 or the next `multiple` that the mesh
    requires.

    A pipeline cuts them before its first stage, because its last one receives hidden states.
    """
    rows = len(next(iter(inputs.values())))
    cut = -(-_PROBE // multiple) * multiple
    return {
        name: (v[:1, :cut] if v.ndim == 2 else v[:1]) if isinstance(v, Tensor) and v.ndim >= 2 and len(v) == rows else v
        for name, v in inputs.items()
    }


def find_head(model: nn.Module, probe: dict[str, Any], *, task: LossTask) -> Head | None:
    """Return the plain head of `model`, or None if only the model's own forward pass gives its logits.

    Runs a short row (`head_probe`) in evaluation mode without gradients. The head must receive one hidden state per
    token (of the decoder, if there is one) and compute nothing but W h + b, and the model may only scale and soft-cap
    each of its outputs, which numbers in their place show (BART adds a bias to the logits, which is zero until
    trained). The logits must equal the model's, bit for bit if they are neither scaled nor capped. Under FSDP2 every
    rank of the mesh calls this together.
    """
    if task.traits.is_sequence_level:
        return None
    causal: Any = getattr(model, "get_base_model", lambda: model)()
    linear = getattr(causal, "get_output_embeddings", lambda: None)()
    if not isinstance(linear, nn.Linear) or not _is_plain_linear(linear) or linear.weight.requires_grad:
        return None
    head = Head(linear)
    seen: list[tuple[Tensor, Tensor, bool]] = []
    usual = linear.forward

    def watched(hidden: Tensor) -> Tensor:
        out = usual(hidden)
        own = hasattr(linear, "vocabulary") or torch.equal(
            F.linear(hidden, linear.weight.to(hidden.dtype), linear.bias), out
        )
        seen.append((hidden, out, own))
        return out

    logits = _logits_with_head(model, probe, head, watched)
    if len(seen) != 1:
        return None
    hidden, out, own = seen[0]
    tokens = probe["decoder_input_ids"] if task.traits.encoder_decoder else next(iter(probe.values()))
    if not own or hidden.shape[:2] != tokens.shape[:2] or out.shape != logits.shape:
        return None
    numbers = torch.tensor(_NUMBERS, dtype=torch.float64, device=hidden.device).view(1, -1, 1)
    results = _logits_with_head(model, probe, head, lambda hidden: numbers)
    if results.shape != numbers.shape:
        return None
    fitted = _fit_scale_and_cap(linear, numbers.flatten(), results.flatten().double())
    if fitted is None or (fitted.cap is not None and task.smoothing):  # smoothed, every logit has a slope of its own
        return None
    if fitted.scale == 1 and fitted.cap is None:
        return fitted if torch.equal(out, logits) else None
    rounding = 8 * torch.finfo(logits.dtype).eps
    own_logits = soft_cap(out.float() * fitted.scale, fitted.cap)
    return fitted if torch.allclose(own_logits, logits.float(), rtol=rounding, atol=rounding) else None


def _fit_scale_and_cap(linear: nn.Linear, numbers: Tensor, results: Tensor) -> Head | None:
    """Return the head whose scale and cap give `results` for `numbers` (both float64, of `_NUMBERS`), if there is one.

    A soft cap is the limit for large numbers, and a scale the slope at 0.
    """
    slope, limit = float(results[0] / numbers[0]), float(results[-1])
    scale = 1.0 if abs(slope - 1) < 1e-9 else slope
    if torch.equal(numbers, results):
        return Head(linear)
    for cap in (None, limit):
        if scale > 0 and torch.allclose(soft_cap(numbers * scale, cap), results, rtol=1e-6, atol=0):
            return Head(linear, scale=scale, cap=cap)
    return None


def soft_cap(logits: Tensor, cap: float | None) -> Tensor:
    """Return cap · tanh(logits / cap); the logits themselves without a cap."""
    return logits if cap is None else torch.tanh(logits / cap) * cap


@torch.no_grad()
def _logits_with_head(
    model: nn.Module, inputs: dict[str, Tensor], head: Head, forward: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return the model's logits in evaluation mode with `forward` as its head."""
    training = model.training
    model.eval()
    try:
        with head.computing(forward):
            return model(**inputs).logits
    finally:
        model.train(training)


def _is_plain_linear(linear: nn.Linear) -> bool:
    """Return True for nn.Linear itself, our widened subclass, or FSDP2's subclass of nn.Linear."""
    kinds = type(linear).__mro__
    return kinds[0] in (nn.Linear, WidenedLinear) or (kinds[0].__name__ == "FSDPLinear" and nn.Linear in kinds[1:3])


def select_targets(
    values: Tensor, labels: Tensor, task: TraitsTask, chosen: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the rows of `values` [B, T, D] that predict a target token, [n, D], and these tokens [n].

    chosen: their indices among the B·T `labels`, ascending; without it the device is asked, and the host waits.
    """
    if chosen is None or labels.shape != values.shape[:2]:
        values, targets = align_targets(values, labels, task)
        mask = targets != IGNORED
        return values[mask], targets[mask]
    before = 1 if task.traits.causal else 0
    return values.flatten(0, 1).index_select(0, chosen - before), labels.flatten().index_select(0, chosen)


def align_targets(values: Tensor, labels: Tensor, task: TraitsTask) -> tuple[Tensor, Tensor]:
    """Return the positions of `values` [B, T, ...] and the labels they predict.

    A Seq2Seq decoder reads shifted inputs and a masked token is predicted in place, so both need no shift. Labels may
    be T + 1, if the last position's next token is known (context parallelism).
    """
    if task.traits.causal:
        return values[:, : labels.shape[1] - 1], labels[:, 1:]
    return values, labels


def linear_cross_entropy(
    hidden: Tensor, linear: nn.Linear, targets: Tensor, *, smoothing: float = 0.0, cap: float | None = None
) -> Tensor:
    """Return Σ −log softmax(W h + b)[target] over the rows of `hidden` [n, D], float32, with W and b frozen.

    With `smoothing` ε a row's term is (1 − ε) of that plus ε times the mean of −log softmax over all V. With `cap` the
    logits are soft-capped (`soft_cap`), without smoothing.

    Logits exist for one slice of rows at a time, in the forward pass only, where the gradient (softmax − onehot) W is
    computed as well: the backward pass is one scaling. Under autocast the products are in its precision.
    """
    hidden = hidden.to(product_dtype(hidden))
    return _LinearCrossEntropy.apply(hidden, linear.weight, linear.bias, targets, smoothing, cap)


def linear_cross_entropies(hidden: Tensor, linear: nn.Linear, targets: Tensor, *, cap: float | None = None) -> Tensor:
    """Return the terms of `linear_cross_entropy`, one per row, float32 (n,)."""
    return _LinearCrossEntropies.apply(hidden.to(product_dtype(hidden)), linear.weight, linear.bias, targets, cap)


def _sliced_nll(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    gradient: Tensor | None,
    smoothing: float = 0.0,
    cap: float | None = None,
) -> Iterator[Tensor]:
    """Yield −log p (rows, 1) of each slice of rows, smoothed or soft-capped; write ∂/∂hidden into `gradient` if
    given."""
    assert cap is None or not smoothing
    device = capabilities(hidden.device).kind
    weight = weight.to(hidden.dtype)
    bias = None if bias is None else bias.to(hidden.dtype)
    vocabulary, is_wide = len(weight), hidden.dtype == torch.float32
    count = -(-len(hidden) // slice_rows(vocabulary, device, hidden.element_size()))
    rows = -(-len(hidden) // max(count, 1))
    # Every slice reuses these: on a CPU, new pages cost more than the sums
    buffer = hidden.new_empty(rows, vocabulary)
    columns = slice_columns(vocabulary, device)
    wide = buffer if is_wide else hidden.new_empty(rows, columns, dtype=torch.float32)
    with torch.autocast(device, enabled=False):
        for start in range(0, len(hidden), max(rows, 1)):
            part, wanted = hidden[start : start + rows], targets[start : start + rows, None]
            logits = buffer[: len(part)]
            if bias is None:
                torch.mm(part, weight.t(), out=logits)
            else:
                torch.addmm(bias, part, weight.t(), out=logits)
            peak = soft_cap(logits.amax(dim=1, keepdim=True).float(), cap)
            chosen = soft_cap(logits.gather(1, wanted).float(), cap)
            norm, total = torch.zeros_like(peak), torch.zeros_like(peak)
            for tile in logits.split(columns, dim=1):
                exps = tile if is_wide else wide[: len(part), : tile.shape[1]].copy_(tile)
                if smoothing:
                    total += exps.sum(dim=1, keepdim=True)
                slope = None
                if cap is not None:
                    exps.div_(cap).tanh_()
                    slope = 1 - exps.square()
                    exps.mul_(cap)
                norm += exps.sub_(peak).exp_().sum(dim=1, keepdim=True)
                if gradient is not None and slope is not None:
                    exps.mul_(slope)
                if gradient is not None and not is_wide:
                    tile.copy_(exps)
            # with smoothing, log p(target) is mixed with the mean over the vocabulary
            yield norm.log() + peak - ((1 - smoothing) * chosen + smoothing / vocabulary * total)
            if gradient is not None:
                scale = norm
                if logits.dtype == torch.float16:  # a sum over the vocabulary can exceed its range
                    logits.div_(norm)
                    scale = torch.ones_like(norm)
                if smoothing:
                    logits.sub_((scale * (smoothing / vocabulary)).to(logits.dtype))
                # p - 1 in float32: the difference of rounded numbers would be all rounding where p is near 1
                error = (chosen - peak).exp() / norm - (1 - smoothing) - smoothing / vocabulary
                if cap is not None:
                    error *= 1 - (chosen / cap).square()
                # not `scatter_`, which copies a whole bf16 tensor to float32 and back
                index = torch.arange(len(part), device=logits.device)
                logits[index, wanted[:, 0]] = (scale * error).to(logits.dtype)[:, 0]
                torch.mm(logits, weight, out=gradient[start : start + rows]).div_(scale)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, smoothing: float, cap: float | None
    ) -> Tensor:
        gradient = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        wide = capabilities(hidden.device).sums
        total = torch.zeros((), dtype=wide, device=hidden.device)
        for nats in _sliced_nll(hidden, weight, bias, targets, gradient, smoothing, cap):
            total += nats.sum(dtype=wide)
        ctx.save_for_backward(gradient)
        return total.float()

    @staticmethod
    def backward(ctx, upstream: Tensor):
        (gradient,) = ctx.saved_tensors
        return gradient * upstream.to(gradient.dtype), None, None, None, None, None


class _LinearCrossEntropies(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, cap: float | None) -> Tensor:
        gradient = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        parts = list(_sliced_nll(hidden, weight, bias, targets, gradient, cap=cap))
        ctx.save_for_backward(gradient)
        return torch.cat(parts)[:, 0] if parts else hidden.new_zeros(0, dtype=torch.float32)

    @staticmethod
    def backward(ctx, upstream: Tensor):
        (gradient,) = ctx.saved_tensors
        return gradient * upstream[:, None].to(gradient.dtype), None, None, None, None
