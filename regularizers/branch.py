"""The frozen noise branch of one LoRA layer: y = x (W0 + sBA + ε)ᵀ with ε = U S_V never formed, W0 never written.

Fused form, for a plain LoRA linear layer: one skinny GEMM pair carries adapter and noise,

    z = x [S_V; A; S_P]ᵀ,   y = x W0ᵀ + z_{U,B} [U, sB]ᵀ,

with an explicit backward, so that nothing is computed for the frozen factors. S_P are probe columns behind a factor
U_P that is zero: they change nothing and give ∂L/∂U_P = G S_Pᵀ, a sketch of the row gradients. Under LoRA dropout
A sees the dropped x, the noise the undropped one. Everything else (DoRA and other variants, hooks, mixed dtypes,
several adapters) gets the branch added to its output.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regularizers.errors import RegularizerError
from regularizers.layers import LoraSite
from regularizers.rownorms import accumulation_dtype


def _up(noise_out: Tensor, b: Tensor, scaling: float, dtype: torch.dtype) -> Tensor:
    """[U, sB] (m, k + r)."""
    return torch.cat([noise_out, b * scaling], 1).to(dtype)


class _FusedBranch(torch.autograd.Function):
    """x (..., n), dropped (..., n) | None: the adapter's own input where it is not x; weight (m, n), bias (m,) | None,
    a (r, n), b (m, r), probe (m, p) zeros; noise_in (n, k), probe_in (n, p), noise_out (m, k).

    x, weight and the products share one dtype; a, b and probe may be wider.
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
        y = F.linear(rows, weight, bias)
        y.addmm_(z[:, : k + r], _up(noise_out, b, scaling, dtype).T)
        # Only the columns of A and S_P are needed again; a view would keep S_V's alive too.
        ctx.save_for_backward(rows, dropped, z[:, k:].contiguous(), weight, a, b)
        ctx.frozen = (noise_in, noise_out, scaling)
        return y.view(*x.shape[:-1], y.shape[-1])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, dropped, z, weight, a, b = ctx.saved_tensors
        noise_in, noise_out, scaling = ctx.frozen
        need_x, need_dropped, need_weight, need_bias, need_a, need_b, need_probe = ctx.needs_input_grad[:7]
        k, r, shape = noise_in.shape[1], a.shape[0], (*grad.shape[:-1], rows.shape[1])
        dy = grad.reshape(-1, grad.shape[-1])
        dtype = dy.dtype
        dx = ddropped = dweight = dbias = da = db = dprobe = None
        if need_x or need_dropped or need_a:
            dz = dy @ _up(noise_out, b, scaling, dtype)
        if need_x:
            dx = dy @ weight
            if dropped is None:
                dx.addmm_(dz, torch.cat([noise_in.T, a]).to(dtype))
            else:
                dx.addmm_(dz[:, :k], noise_in.T.to(dtype))
            dx = dx.view(shape)
        if need_dropped:
            ddropped = (dz[:, k:] @ a.to(dtype)).view(shape)
        if need_weight:
            dweight = dy.T @ rows
        if need_bias:
            dbias = dy.sum(0)
        if need_a:
            da = (dz[:, k:].T @ (rows if dropped is None else dropped)).to(a.dtype)
        if need_b or need_probe:
            dup = dy.T @ z
            db = dup[:, :r].to(b.dtype) * scaling
            dprobe = dup[:, r:].to(accumulation_dtype(dtype))
        return dx, ddropped, dweight, dbias, da, db, dprobe, None, None, None, None


def _hooked(module: nn.Module) -> bool:
    """Whether calling the module does more than its class's forward."""
    return bool(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks) or "forward" in vars(
        module
    )


class NoiseBranch:
    """Puts the branch into one layer's forward and takes it out again, without a trace."""

    def __init__(self, site: LoraSite, rank: int, probes: int, dtype: torch.dtype) -> None:
        self.site = site
        self.rank = rank
        self.probe = torch.zeros(site.rows, probes, dtype=dtype, device=site.device).requires_grad_(probes > 0)
        """U_P, a leaf of zeros that only receives a gradient. No parameter: optimizers and clipping never see it."""
        self.noise_in: Tensor | None = None
        self.noise_out: Tensor | None = None
        self.probe_in: Tensor | None = None
        self._plain: Callable[..., Tensor] | None = None
        self._replaced: Callable[..., Tensor] | None = None

    def install(self, noise_in: Tensor, noise_out: Tensor, probe_in: Tensor) -> None:
        """Perturb from now on: S_V as (n, k), U = diag(σ_i/√k) S_U (m, k), S_P as (n, p)."""
        layer = self.site.layer
        if getattr(layer, "merged", False):
            raise RegularizerError(
                f"the adapter of layer {self.site.name} is merged into the backbone; call model.unmerge_adapter() "
                "before training"
            )
        self.probe.grad = None  # of a backward that ran after its step had ended
        self.noise_in, self.noise_out, self.probe_in = noise_in, noise_out, probe_in
        self._replaced = vars(layer).get("forward")
        self._plain = layer.forward
        layer.forward = self._fused_forward() if self._fusible() else self._added

    def remove(self) -> None:
        """Restore the layer's forward and drop the noise; harmless if nothing is installed."""
        if self._plain is None:
            return
        if self._replaced is None:
            del self.site.layer.forward
        else:
            self.site.layer.forward = self._replaced
        self.noise_in = self.noise_out = self.probe_in = self._plain = self._replaced = None

    def _fusible(self) -> bool:
        site, active = self.site, self.site.active()
        if len(active) != 1 or self._replaced is not None or site.has_variant(active[0]):
            return False
        layer, base = site.layer, site.layer.base_layer
        a, b, dropout = (part[active[0]] for part in (layer.lora_A, layer.lora_B, layer.lora_dropout))
        plain_base = base is site.base and (type(base) is nn.Linear or site.transposed)
        plain_parts = type(a) is nn.Linear and type(b) is nn.Linear and a.bias is None and b.bias is None
        known_dropout = type(dropout) in (nn.Identity, nn.Dropout)
        return plain_base and plain_parts and known_dropout and not any(map(_hooked, (base, a, b, dropout)))

    def _fused_forward(self) -> Callable[..., Tensor]:
        """The layer's forward with everything that is constant during a step looked up once."""
        layer, base, transposed = self.site.layer, self.site.base, self.site.transposed
        name = self.site.active()[0]
        a, b, scaling, dropout = (
            part[name] for part in (layer.lora_A, layer.lora_B, layer.scaling, layer.lora_dropout)
        )
        drops = getattr(dropout, "p", 0.0) > 0
        probe, noise = self.probe, (self.noise_in, self.probe_in, self.noise_out)

        def forward(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            device = x.device.type
            autocast = torch.is_autocast_enabled(device)
            dtype = torch.get_autocast_dtype(device) if autocast else torch.promote_types(x.dtype, a.weight.dtype)
            weight = base.weight
            if args or kwargs or layer.disable_adapters or dtype != weight.dtype:
                return self._added(x, *args, **kwargs)
            weight = weight.T if transposed else weight
            bias = base.bias if base.bias is None else base.bias.to(dtype)
            x = x.to(dtype)
            dropped = dropout(x) if drops and dropout.training else None
            return _FusedBranch.apply(x, dropped, weight, bias, a.weight, b.weight, probe, *noise, scaling)

        return forward

    def _added(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The layer's own forward plus ε x, from x before any dropout; nothing where the adapters are switched off."""
        plain, noise_in, noise_out, probe_in = self._plain, self.noise_in, self.noise_out, self.probe_in
        assert plain is not None and noise_in is not None and noise_out is not None and probe_in is not None
        y = plain(x, *args, **kwargs)
        if self.site.layer.disable_adapters:
            return y
        dtype = torch.promote_types(y.dtype, torch.promote_types(x.dtype, noise_out.dtype))
        z = F.linear(x.to(dtype), torch.cat([noise_in, probe_in], 1).T.to(dtype))
        return (y + F.linear(z, torch.cat([noise_out, self.probe], 1).to(dtype))).to(y.dtype)
