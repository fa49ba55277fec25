"""LoRA linear layer as one skinny pair of products added to the frozen one, with an explicit backward.

PEFT's forward computes W0 x, B(A x), its product with the scale and the sum one after another, each an array as large
as the layer's output, and autograd does the same backwards. Here

    z = x Aᵀ,   y = x W0ᵀ + s z Bᵀ

is two products and a third that is added in place, and nothing is computed for the frozen weight. The result is PEFT's
forward within rounding.

A frozen noise branch (`NoiseBranch`) makes it y = x (W0 + sBA + ε)ᵀ with ε = U S_V never formed, W0 never written: the
noise's columns are concatenated to A and B,

    z = x [S_V; A; S_P]ᵀ,   y = x W0ᵀ + z_{U,B} [U, sB]ᵀ.

S_P are probe columns multiplied by a factor U_P that is zero: they change nothing and give ∂L/∂U_P = G S_Pᵀ, a sketch
of the row gradients. Under LoRA dropout A sees the dropped x, the noise the undropped one. For all other layers (DoRA
and other variants, hooks, mixed dtypes, several adapters) the branch is added to the layer's output. If every sample b
of a batch has its own noise ε_b = U diag(c_b) S_V, the noise's columns of z are multiplied by the sample's signs c_b.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flatshift.regularizers.config import RegularizerError
from flatshift.regularizers.layers.forward import Forward, ForwardSwap, ForwardWithTerm
from flatshift.regularizers.layers.frozen import accumulation_dtype, is_quantised
from flatshift.regularizers.layers.sites import LoraSite, active_adapters, has_variant, is_lora, linear_shape


def unsafe_reshape(y: Tensor, shape: Sequence[int]) -> Tensor:
    """Return `y`, which must have no other reference, in another shape: a plain view returned by an autograd function
    could not be modified in place by the model (DeBERTa, LED do so)."""
    out: Tensor = torch.ops.aten._unsafe_view(y, shape)
    return out


def aligned_columns(count: int, device: torch.device) -> int:
    """Return `count` of probe columns with those of zeros that a device wants beside them: a row of a matrix that is
    not a multiple of 16 bytes keeps CUDA's matrix units from it."""
    return -(-count // 8) * 8 if device.type == "cuda" else count


def _up_projection(noise_out: Tensor, b: Tensor, scaling: float, dtype: torch.dtype) -> Tensor:
    """Return [U, sB] (m, k + r)."""
    return torch.cat([noise_out, b * scaling], 1).to(dtype)


def _apply_signs(z: Tensor, signs: Tensor | None) -> None:
    """Multiply the columns of z (samples·T, k) in place by each sample's `signs` (samples, k), if given."""
    if signs is not None:
        z.unflatten(0, (len(signs), -1)).mul_(signs[:, None])


class FusedLora(torch.autograd.Function):
    """Autograd function of the fused LoRA layer.

    x (..., n), dropped (..., n) | None: the adapter's own input if it is not x; weight (m, n), bias (m,) | None, a (r,
    n), b (m, r). x, weight and the products share one dtype; a and b may be wider.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        dropped: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        a: Tensor,
        b: Tensor,
        scaling: float,
    ) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        dropped = None if dropped is None else dropped.reshape(rows.shape)
        z = (rows if dropped is None else dropped) @ a.to(x.dtype).T
        y = F.linear(rows, weight, bias)
        y.addmm_(z, b.to(x.dtype).T, alpha=scaling)
        ctx.save_for_backward(rows, dropped, weight, a, z, b)
        ctx.scaling = scaling
        return unsafe_reshape(y, (*x.shape[:-1], y.shape[-1]))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, z, b = ctx.saved_tensors
        needs = ctx.needs_input_grad
        dy = grad.reshape(-1, grad.shape[-1])
        dz = (dy @ b.to(dy.dtype)).mul_(ctx.scaling) if _needs_dz(needs) else None
        gradients = _input_gradients(needs, grad.shape[:-1], dy, dz, *inputs)
        db = (dy.T @ z).to(b.dtype).mul_(ctx.scaling) if needs[5] else None
        return *gradients, db, None


class FusedNoise(torch.autograd.Function):
    """Autograd function of the fused LoRA layer with a noise branch.

    x (..., n), dropped (..., n) | None: the adapter's own input if it is not x; weight (m, n), bias (m,) | None, a (r,
    n), b (m, r), probe (m, p) zeros; noise_in (n, k), probe_in (n, p), noise_out (m, k); signs (samples, k) | None. x,
    weight and the products share one dtype; a, b and probe may be wider.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        dropped: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        a: Tensor,
        b: Tensor,
        probe: Tensor,
        noise_in: Tensor,
        probe_in: Tensor,
        noise_out: Tensor,
        signs: Tensor | None,
        scaling: float,
    ) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        k, r, dtype = noise_in.shape[1], a.shape[0], x.dtype
        if dropped is None:
            z = rows @ torch.cat([noise_in.T, a, probe_in.T]).to(dtype).T
        else:
            dropped = dropped.reshape(rows.shape)
            noisy = rows @ torch.cat([noise_in, probe_in], 1).to(dtype)
            z = torch.cat([noisy[:, :k], dropped @ a.to(dtype).T, noisy[:, k:]], 1)
        _apply_signs(z[:, :k], signs)
        y = F.linear(rows, weight, bias)
        y.addmm_(z[:, : k + r], _up_projection(noise_out, b, scaling, dtype).T)
        # The backward needs only the columns of A and S_P; a view would keep S_V's alive too.
        ctx.save_for_backward(rows, dropped, weight, a, z[:, k:].contiguous(), b)
        ctx.frozen = (noise_in, noise_out, signs, scaling)
        return unsafe_reshape(y, (*x.shape[:-1], y.shape[-1]))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, dropped, weight, a, z, b = ctx.saved_tensors
        noise_in, noise_out, signs, scaling = ctx.frozen
        needs, r = ctx.needs_input_grad, b.shape[1]
        dy = grad.reshape(-1, grad.shape[-1])
        dz = db = dprobe = None
        if _needs_dz(needs):
            dz = dy @ _up_projection(noise_out, b, scaling, dy.dtype)
            _apply_signs(dz[:, : noise_in.shape[1]], signs)
        gradients = _input_gradients(needs, grad.shape[:-1], dy, dz, rows, dropped, weight, a, noise_in)
        if needs[5] or needs[6]:
            dup = dy.T @ z
            db = dup[:, :r].to(b.dtype) * scaling
            dprobe = dup[:, r:].to(accumulation_dtype(dy.dtype))
        return *gradients, db, dprobe, None, None, None, None, None


def _needs_dz(needs: Sequence[bool]) -> bool:
    """True if x, dropped or a needs its gradient."""
    return needs[0] or needs[1] or needs[4]


def _input_gradients(
    needs: Sequence[bool],
    shape: Sequence[int],
    dy: Tensor,
    dz: Any,
    rows: Tensor,
    dropped: Tensor | None,
    weight: Tensor,
    a: Tensor,
    noise_in: Tensor | None = None,
) -> list[Tensor | None]:
    """Return the gradients of x, dropped, weight, bias and a as needed; dz: that of the columns [noise, adapter]."""
    dtype, k = dy.dtype, 0 if noise_in is None else noise_in.shape[1]
    dx = ddropped = dweight = dbias = da = None
    if needs[0]:
        dx = dy @ weight
        if dropped is None:
            dx.addmm_(dz, (a if noise_in is None else torch.cat([noise_in.T, a])).to(dtype))
        elif noise_in is not None:
            dx.addmm_(dz[:, :k], noise_in.T.to(dtype))
        dx = dx.view(*shape, rows.shape[1])
    if needs[1]:
        ddropped = (dz[:, k:] @ a.to(dtype)).view(*shape, rows.shape[1])
    if needs[2]:
        dweight = dy.T @ rows
    if needs[3]:
        dbias = dy.sum(0)
    if needs[4]:
        da = (dz[:, k:].T @ (rows if dropped is None else dropped)).to(a.dtype)
    return [dx, ddropped, dweight, dbias, da]


@dataclass(frozen=True)
class LoraParts:
    """Parts of a LoRA layer used by the fused form; `transposed` for GPT-2's Conv1D, whose weight is (n, m)."""

    base: Any
    transposed: bool
    a: Any
    b: Any
    dropout: Any
    scaling: float
    adapter: str

    def are_current(self, layer: Any) -> bool:
        """True if `fusible_parts` would still return these parts for this layer, whose modules have not been
        replaced."""
        active = not layer.disable_adapters and list(layer.active_adapters) == [self.adapter]
        return active and layer.scaling[self.adapter] == self.scaling and not self.have_hooks

    @property
    def have_hooks(self) -> bool:
        return any(map(_has_hooks, (self.base, self.a, self.b, self.dropout)))

    def inputs(self, x: Tensor) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None] | None:
        """Return (x, dropped, weight, bias) as the fused forms take them; None if the dtypes do not agree. With
        dropout, draws its mask."""
        device, weight = x.device.type, self.base.weight
        autocast = torch.is_autocast_enabled(device)
        dtype = torch.get_autocast_dtype(device) if autocast else torch.promote_types(x.dtype, self.a.weight.dtype)
        if dtype != weight.dtype:
            return None
        bias = self.base.bias if self.base.bias is None else self.base.bias.to(dtype)
        x = x.to(dtype)
        drops = getattr(self.dropout, "p", 0.0) > 0 and self.dropout.training
        dropped = self.dropout(x) if drops else None
        return x, dropped, weight.T if self.transposed else weight, bias


def _has_hooks(module: nn.Module) -> bool:
    """True if hooks or a patched forward make the module compute something other than its class's forward."""
    before = [hook for hook in module._forward_pre_hooks.values() if not getattr(hook, "keeps_values", False)]
    return bool(module._forward_hooks or before or module._backward_hooks) or "forward" in vars(module)


def fusible_parts(layer: Any) -> LoraParts | None:
    """Return the parts of a LoRA layer if the fused form supports it, else None. Supported: one active adapter with the
    plain rule W0 + sBA, a plain float weight, factors without bias, and no hooks on any part."""
    active = active_adapters(layer)
    if len(active) != 1 or has_variant(layer, active[0]):
        return None
    base, shape = layer.base_layer, linear_shape(layer.base_layer)
    a, b, dropout = (modules[active[0]] for modules in (layer.lora_A, layer.lora_B, layer.lora_dropout))
    plain_base = shape is not None and (type(base) is nn.Linear or shape[2]) and not is_quantised(base)
    plain_parts = type(a) is nn.Linear and type(b) is nn.Linear and a.bias is None and b.bias is None
    known_dropout = type(dropout) in (nn.Identity, nn.Dropout)
    if shape is None or not (plain_base and plain_parts and known_dropout):
        return None
    parts = LoraParts(base, shape[2], a, b, dropout, layer.scaling[active[0]], active[0])
    return None if parts.have_hooks else parts


class _FusedLayer:
    def __init__(self, layer: Any, parts: LoraParts) -> None:
        self.layer, self.parts = layer, parts

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        layer, parts = self.layer, self.parts
        inputs = None if args or kwargs or layer.disable_adapters else parts.inputs(x)
        if inputs is None:
            own: Tensor = type(layer).forward(layer, x, *args, **kwargs)
            return own
        y: Tensor = FusedLora.apply(*inputs, parts.a.weight, parts.b.weight, parts.scaling)
        return y


class FusedLayers:
    """The plain LoRA layers of a PEFT model, computed in the fused form inside `replace_forwards`."""

    def __init__(self, model: nn.Module) -> None:
        self._layers: list[Any] = [m for m in model.modules() if is_lora(m) and _uses_peft_forward(m)]
        self._fused: dict[Any, _FusedLayer] = {}

    @contextmanager
    def replace_forwards(self) -> Iterator[int]:
        """Replace the forward of every layer that is currently fusible; yield their number.

        On exit the model is unchanged, and no weight is ever written. If a regularizer has added a term after a layer's
        own forward, only that own forward is replaced; any other patched forward is left alone, and a merged adapter is
        left to PEFT. A layer falls back to PEFT's forward for calls with further arguments or mixed dtypes. Not for
        `torch.compile`, which fuses PEFT's products itself.
        """
        replaced: list[tuple[Any, Forward | None]] = []
        try:
            for layer in self._layers:
                outer = vars(layer).get("forward")
                own = outer.own if isinstance(outer, ForwardWithTerm) else None
                if layer.merged or (outer is not None and getattr(own, "__self__", None) is not layer):
                    continue
                fused = self._fuse(layer)
                if fused is None:
                    continue
                if outer is None:
                    replaced.append((layer, None))
                    layer.forward = fused
                else:
                    replaced.append((outer, outer.own))
                    outer.own = fused
            yield len(replaced)
        finally:
            for owner, own in replaced:
                if own is None:
                    del owner.forward
                else:
                    owner.own = own

    def _fuse(self, layer: Any) -> _FusedLayer | None:
        """Return the fused form of a layer, None if it is not fusible now. The cached form is rebuilt only after a
        change: doing so in every pass would slow down a small model."""
        fused = self._fused.get(layer)
        if fused is None or not fused.parts.are_current(layer):
            parts = fusible_parts(layer)
            if parts is None:
                return None
            fused = self._fused[layer] = _FusedLayer(layer, parts)
        return fused


def _uses_peft_forward(module: nn.Module) -> bool:
    """True if calling `module` runs PEFT's own forward for linear layers, not a variant's (AdaLoRA's)."""
    forward = type(module).forward
    return (forward.__module__, forward.__qualname__) == ("peft.tuners.lora.layer", "Linear.forward")


class NoiseBranch:
    """Installs the noise branch in one layer's forward and removes it again without a trace.

    A layer's `forward` is replaced by its branch, the same object in every step, which reads the noise from itself: the
    guards of `torch.compile` then hold from step to step.
    """

    def __init__(self, site: LoraSite, rank: int, probes: int, dtype: torch.dtype) -> None:
        self.site, self.rank = site, rank
        columns = aligned_columns(probes, site.device)
        self.probe = torch.zeros(site.rows, columns, dtype=dtype, device=site.device).requires_grad_(probes > 0)
        """U_P, a leaf of zeros that only receives a gradient, with `aligned_columns`. Not a Parameter: optimizers and
        clipping never see it."""
        self.noise_in: Tensor | None = None
        self.noise_out: Tensor | None = None
        self.probe_in: Tensor | None = None
        self.signs: Callable[[Tensor], Tensor] | None = None
        """Function from a layer's input to c (samples, k), if every sample has its own noise."""
        self._leaf = self.probe
        """U_P, or its first zero columns in a step without probes."""
        self._fused: LoraParts | None = None
        """Parts of the layer for the fused form, looked up once a step; None if the form does not apply."""
        self._swap = ForwardSwap(site)

    def install(self, noise_in: Tensor | None, noise_out: Tensor | None, probe_in: Tensor) -> None:
        """Perturb from now on: S_V as (n, k), U = diag(σ_i/√k) S_U (m, k), S_P as (n, p), or (n, 0) for a step without
        probes. If the noise is None, `redraw` must set it before the first forward pass."""
        self._swap.begin()
        self.probe.grad = None  # from a backward that ran after its step had ended
        self.noise_in, self.noise_out, self.probe_in = noise_in, noise_out, probe_in
        self._leaf = self.probe if probe_in.shape[1] else self.probe.detach()[:, :0]
        self._fused = fusible_parts(self.site.layer) if self._swap.patched is None else None
        self._swap.put(self)

    def redraw(self, noise_in: Tensor, noise_out: Tensor) -> None:
        """Set another noise for later forward passes; earlier ones keep theirs for their backward."""
        self.noise_in, self.noise_out = noise_in, noise_out

    def remove(self) -> None:
        """Restore the layer's forward and drop the noise; no-op if nothing is installed."""
        if self._swap.plain is None:
            return
        self._swap.restore()
        self.noise_in = self.noise_out = self.probe_in = self._fused = None

    def _noise(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return S_V, S_P, U and the samples' signs for the current forward pass."""
        noise_in, probe_in, noise_out = self.noise_in, self.probe_in, self.noise_out
        if noise_in is None or noise_out is None:
            raise RegularizerError(
                f"layer {self.site.name} is called before the regularizer knows the micro-batch; with this "
                "regularizer.scope call regularizer.on_micro_batch(index) before each forward pass"
            )
        assert probe_in is not None
        return noise_in, probe_in, noise_out, None if self.signs is None else self.signs(x)

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        parts, plain = self._fused, not (args or kwargs) and self._swap.applies()
        inputs = parts.inputs(x) if parts is not None and plain else None
        if parts is None or inputs is None:
            return self._added(x, *args, **kwargs)
        factors = parts.a.weight, parts.b.weight, self._leaf
        y: Tensor = FusedNoise.apply(*inputs, *factors, *self._noise(inputs[0]), parts.scaling)
        return y

    def _added(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the layer's own forward plus ε x, if it applies, from x before any dropout."""
        assert self._swap.plain is not None
        y = self._swap.plain(x, *args, **kwargs)
        if not self._swap.applies():
            return y
        noise_in, probe_in, noise_out, signs = self._noise(x)
        dtype = torch.promote_types(y.dtype, torch.promote_types(x.dtype, noise_out.dtype))
        z = F.linear(x.to(dtype), torch.cat([noise_in, probe_in], 1).T.to(dtype))
        if signs is not None:
            columns = F.pad(signs, (0, probe_in.shape[1]), value=1.0)
            z = z * columns.view(len(signs), *[1] * (x.ndim - 2), -1)
        return (y + F.linear(z, torch.cat([noise_out, self._leaf], 1).to(dtype))).to(y.dtype)
