"""Tokens per second, the floating-point operations of a step, and their share of the device's peak: MFU and HFU (PaLM,
2204.02311, appendix B).

The model's operations (MFU) are those that the method needs for the tokens of the rows; the hardware's (HFU) are those
that the device executes, including padding and what checkpointing recomputes.

**Operations** are counted from the shapes of the layers' inputs. A frozen layer with n weights costs 2n per token
forward and 2n backward, for the gradient of its input; it has no gradient of its own, so full fine-tuning's 6n are 4n
here. A factor of the adapter with n weights costs 6n. Below the first adapted layer no gradient is needed, so the
layers of the first block that receive the embeddings cost 2n (frozen) and 4n (A). Embeddings cost nothing. Attention
costs 4·d per pair of tokens forward, d the width of all heads, and 2·d for each of the four backward products that is
needed; causal masks are not subtracted (the convention of PaLM, 2204.02311, appendix B, and of torch's own counter).

Only products of linear layers and of attention are counted; a mixture's grouped experts, convolutions and the norms of
DoRA are not.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from flatshift.regularizers.protocol import MetricTensors

from ..compute.capabilities import copy_to_device
from ..compute.loss import Head
from ..compute.micro_batch import MicroBatch
from ..models.anatomy import attention_modules, is_linear
from ..parallel.engine import Engine
from ..parallel.mesh import DATA, TOKENS
from ..tasks import Task

EVERY = 10
"""Steps per row of throughput metrics."""


class ThroughputMeter:
    """Counts the work and the time of an engine's steps, except the first."""

    def __init__(self, engine: Engine, *, peak_tflops: float | None) -> None:
        """Create a meter. peak_tflops: of one device, TFLOP/s; None: no MFU."""
        self._engine, self._peak = engine, peak_tflops
        self._cost: StepCost | None = None
        self._first, self._passes = True, 0
        """The first step; passes of this one."""
        self._recent, self._total = defaultdict[str, float](float), defaultdict[str, float](float)

    @contextmanager
    def count(self, micros: Sequence[MicroBatch], *, head: Head | None) -> Iterator[None]:
        """Surround a forward and backward pass over a step's micro-batches of this rank."""
        if not self._first:
            yield
            self._add_work(micros)
            return
        with self._measure_cost(micros, head) if self._cost is None else nullcontext():
            yield

    def count_separately(self, micro: MicroBatch, *, task: Task, head: Head | None) -> None:
        """Measure a step's cost in a pass of its own, if hooks in the first step would be compiled into the model."""
        engine = self._engine
        with self._measure_cost([micro], head):
            engine.forward_backward([micro], 1, task=task, head=head, context=lambda _: nullcontext())
        for parameter in engine.parameters.values():
            parameter.grad = None

    @contextmanager
    def _measure_cost(self, micros: Sequence[MicroBatch], head: Head | None) -> Iterator[None]:
        world = self._engine.world
        width = attention_width(self._engine.peft.config)
        if width is None or any("decoder_input_ids" in micro.inputs for micro in micros):
            yield  # seq2seq has two kinds of rows: tokens are counted, operations are not
            return
        counter = FlopCounter()
        # heads are split along tp; along cp a rank has some of the queries and all keys
        with counter.count(self._engine.model, width=width * world.width("cp") / world.width("tp"), head=head):
            yield
        if counter.error is not None:
            return  # tokens are counted, operations are not
        shapes = [micro.inputs["input_ids"].shape for micro in micros]
        self._cost = counter.cost(
            positions=sum(b * t for b, t in shapes), pairs=sum(b * t * t for b, t in shapes), head=head
        )

    def _add_work(self, micros: Sequence[MicroBatch]) -> None:
        work, cost = self._recent, self._cost
        self._passes += 1
        for micro in micros:
            tokens, pairs = _count_real_tokens(micro)
            work["tokens"] += tokens if self._passes == 1 else 0  # of an update, however often it reads them
            if cost is not None:
                rows, width = micro.inputs["input_ids"].shape
                by_answer = getattr(micro, "preference", None) is not None  # answers are counted, not their tokens
                targets: float = len(micro.chosen) if by_answer and micro.chosen is not None else micro.supervised
                targets /= self._engine.world.width("cp")
                work["model"] += cost.model(tokens, pairs, targets)
                work["hardware"] += cost.hardware(rows * width, rows * width * width, targets)

    def end_step(self, seconds: float) -> MetricTensors:
        """Record a step that took `seconds`; return the metrics of the last `EVERY` steps once they are complete, else
        nothing. Collective when it returns metrics: all ranks of a mesh get the same. Does not wait for the device."""
        (first, passes), (self._first, self._passes) = (self._first, self._passes), (False, 0)
        if not first and passes:  # none: a solver makes the update without them
            self._recent["updates"] += 1
            self._recent["seconds"] += seconds
            if self._recent["updates"] == EVERY:
                return self._rates(self._take_recent())
        return MetricTensors(torch.empty(0), lambda numbers: {})

    def total_rates(self) -> dict[str, float]:
        """Return the metrics of all steps of this attempt but the first; empty if there were none. Collective."""
        self._take_recent()
        return self._rates(self._total).read() if self._total["updates"] else {}

    def _take_recent(self) -> dict[str, float]:
        recent, self._recent = self._recent, defaultdict(float)
        for name, value in recent.items():
            self._total[name] += value
        return recent

    def _rates(self, work: dict[str, float]) -> MetricTensors:
        """Return `tokens_s` of the whole mesh; `tflops` of one device, and `mfu` and `hfu`, its share of the peak."""
        world = self._engine.world
        sums = torch.tensor([work["model"], work["hardware"], work["tokens"]], dtype=torch.float64)
        if world.size > 1:
            sums = copy_to_device(sums, world.device)
            for axes in (TOKENS, ("tp",), ("pp",)):
                world.sum(sums[:2], *axes)
            world.sum(sums[2:], *DATA)
        seconds, cost_known = work["seconds"], self._cost is not None

        def named(numbers: Sequence[float]) -> dict[str, float]:
            *flops, tokens = numbers
            rates = {"tokens_s": tokens / seconds}
            if cost_known:
                model, hardware = (number / seconds / world.size / 1e12 for number in flops)
                rates["tflops"] = model
                if self._peak is not None:
                    self._peak = max(self._peak, hardware)  # the measured peak was too low: the machine was busy
                    rates |= {"mfu": model / self._peak, "hfu": hardware / self._peak}
            return {name: float(f"{value:.4g}") for name, value in rates.items()}

        return MetricTensors(sums, named)


def _count_real_tokens(micro: MicroBatch) -> tuple[int, int]:
    """Return the tokens of a micro-batch without padding, and its pairs of tokens that belong to one sample."""
    counted: tuple[int, int] | None = getattr(micro, "real", None)
    if counted is not None:
        return counted
    inputs: dict[str, Any] = micro.inputs
    if "position_ids" in inputs:  # packed: positions restart at each sample; the run after the last one is padding
        lengths = torch.cat(
            [
                torch.diff((positions == 0).nonzero().flatten(), append=positions.new_tensor([len(positions)]))[
                    : len(samples)
                ]
                for positions, samples in zip(inputs["position_ids"], micro.rows, strict=True)
            ]
        )
    elif "attention_mask" in inputs:
        lengths = inputs["attention_mask"].sum(1)
    else:
        lengths = torch.full((len(inputs["input_ids"]),), inputs["input_ids"].shape[1])
    decoder_tokens = inputs["decoder_input_ids"].numel() if "decoder_input_ids" in inputs else 0
    return int(lengths.sum()) + decoder_tokens, int(lengths.square().sum())


_FUSED = ("qkv", "query_key_value", "c_attn", "in_proj")


@dataclass(frozen=True)
class StepCost:
    """Operations of one rank, forward and backward.

    `token`: of linear layers, per position of its rows; `pair`: of attention, per pair of positions of a row;
    `supervised`: of the output head, per target token, if the loss is computed in slices; `again_token`, `again_pair`:
    of recomputation by checkpointing.
    """

    token: float
    pair: float
    supervised: float
    again_token: float
    again_pair: float

    def model(self, tokens: float, pairs: float, supervised: float) -> float:
        """Return the operations that the method needs, without recomputation."""
        return self.token * tokens + self.pair * pairs + self.supervised * supervised

    def hardware(self, positions: float, pairs: float, supervised: float) -> float:
        """Return the operations that the device executes, including recomputation."""
        linear, attention = self.token + self.again_token, self.pair + self.again_pair
        return linear * positions + attention * pairs + self.supervised * supervised


class FlopCounter:
    """Sums the operations of the forward passes inside `count` and of their backward passes."""

    def __init__(self) -> None:
        self.linear = self.attention = self.again_linear = self.again_attention = 0.0
        self.error: Exception | None = None
        """Error of a layer that could not be counted because its inputs or outputs have an unknown form. The sums are
        then a lower bound."""
        self._forward: dict[nn.Module, tuple[float, float]] = {}
        """Operations of each layer's last forward pass: linear, attention."""

    @contextmanager
    def count(self, model: nn.Module, *, width: float, head: Head | None) -> Iterator[None]:
        """Hook the linear layers and attention modules of `model` inside.

        Results are unchanged, and a layer that cannot be counted raises nothing (`error`).

        width: of attention (`attention_width`), on this rank.
        head: its loss is computed in slices of target tokens, so it is not counted here.
        """
        counted: dict[nn.Module, Any] = {a: partial(self._attention, width) for a in attention_modules(model)}
        skipped: set[nn.Module] = {head.linear} if head is not None else set()
        for module in model.modules():
            if module in skipped:
                continue
            if is_linear(getattr(module, "base_layer", None)) and hasattr(module, "lora_A"):
                skipped.update(module.modules())
                counted[module] = self._adapted_linear
            elif is_linear(module):
                counted[module] = self._plain_linear
        handles = [
            module.register_forward_hook(partial(self._call_safely, hook), with_kwargs=True)
            for module, hook in counted.items()
        ]
        # pre-hooks, because checkpointing aborts a layer midway once it has what backward needs
        for module in counted:
            # if only attention is recomputed, its own hooks do not run, so its last product is hooked
            last = [inner for inner in module.modules() if inner in counted][-1]
            handles.append(last.register_forward_pre_hook(partial(self._recomputed, module)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def cost(self, *, positions: int, pairs: int, head: Head | None) -> StepCost:
        """Return the operations counted so far per position, pair of positions and target token."""
        rows, columns = head.linear.weight.shape if head is not None else (0, 0)
        vocabulary = getattr(head.linear, "vocabulary", None) if head is not None else None
        if vocabulary is not None and vocabulary.rows_differ:  # a rank's share of the products of all ranks' tokens
            rows = vocabulary.size
        return StepCost(
            token=self.linear / max(positions, 1),
            pair=self.attention / max(pairs, 1),
            supervised=4.0 * rows * columns,  # forward, and the gradient of the hidden states
            again_token=self.again_linear / max(positions, 1),
            again_pair=self.again_attention / max(pairs, 1),
        )

    def _call_safely(self, hook: Any, layer: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        try:
            hook(layer, args[0] if args else next(iter(kwargs.values())), output)
        except Exception as error:  # a meter must not stop training
            self.error = self.error or error

    def _plain_linear(self, layer: nn.Module, x: Tensor, output: Any) -> None:
        products = 2.0 * x.numel() * _layer_output(output).shape[-1]
        trained = any(p.requires_grad for p in layer.parameters(recurse=False))
        self._add_linear(layer, products, products * (int(x.requires_grad) + int(trained)))

    def _adapted_linear(self, layer: Any, x: Tensor, output: Any) -> None:
        rows, width_in, width_out = x.numel() // x.shape[-1], x.shape[-1], _layer_output(output).shape[-1]
        frozen = 2.0 * rows * width_in * width_out
        rank = sum(layer.r[name] for name in layer.active_adapters if name in layer.r)
        a, b = 2.0 * rows * rank * width_in, 2.0 * rows * rank * width_out
        # backward: gradients of A, of B and of the activation between them; that of the input only if needed
        self._add_linear(layer, frozen + a + b, int(x.requires_grad) * (frozen + a) + a + 2 * b)

    def _add_linear(self, layer: nn.Module, forward: float, backward: float) -> None:
        if _is_first_forward():
            self.linear += forward + backward
            self._forward[layer] = (forward, 0.0)

    def _attention(self, width: float, layer: nn.Module, x: Tensor, output: Any) -> None:
        product = 2.0 * x.shape[0] * x.shape[1] ** 2 * width
        q, k, v = (x.requires_grad or trained for trained in _trained_projections(layer))
        # dO·Vᵀ if the attention weights need a gradient, then dQ and dK; Pᵀ·dO for dV
        backward = product * (int(q or k) + int(q) + int(k) + int(v))
        if _is_first_forward():
            self.attention += 2 * product + backward
            self._forward[layer] = (0.0, 2 * product)

    def _recomputed(self, layer: nn.Module, inner: nn.Module, args: Any) -> None:
        if torch.is_grad_enabled() and not _is_first_forward():
            linear, attention = self._forward.get(layer, (0.0, 0.0))
            self.again_linear += linear
            self.again_attention += attention


def _is_first_forward() -> bool:
    """Return True in a forward pass that needs a backward pass, False in one that backward recomputes."""
    return torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1


def _layer_output(output: Any) -> Tensor:
    """Return a layer's product; routers of mixtures (Llama 4) are linear layers that return two tensors."""
    x: Tensor = output[-1] if isinstance(output, tuple) else output
    return x


def _trained_projections(attention: nn.Module) -> tuple[bool, bool, bool]:
    """Return for queries, keys and values True if their own layers have trainable parameters."""
    trained: set[str] = set()
    for name, parameter in attention.named_parameters():
        if parameter.requires_grad:
            words = {word.split("_")[0] for word in name.split(".")}
            trained |= {
                letter for letter, word in zip("qkv", ("query", "key", "value"), strict=True) if words & {letter, word}
            }
            if any(fused in name.lower() for fused in _FUSED):
                trained |= set("qkv")
    return "q" in trained, "k" in trained, "v" in trained


def attention_width(config: Any) -> int | None:
    """Return d, the number of heads times the width of one, from a base model's configuration; None if it is
    unspecified."""
    config = config.get_text_config() if hasattr(config, "get_text_config") else config

    def first_int(*names: str) -> int | None:
        return next((value for name in names if isinstance(value := getattr(config, name, None), int)), None)

    heads = first_int("num_attention_heads", "n_head", "num_heads")
    hidden = first_int("hidden_size", "n_embd", "d_model")
    width = first_int("head_dim") or (hidden // heads if heads and hidden else None)
    return heads * width if heads and width else None
