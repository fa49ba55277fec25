"""Frozen noise branch of one LoRA layer: y = x (W0 + sBA + ε)ᵀ with ε = U S_V never formed, W0 never written.

Fused form, for a plain LoRA linear layer: one skinny GEMM pair carries adapter and noise,

    z = x [S_V; A; S_P]ᵀ,   y = x W0ᵀ + z_{U,B} [U, sB]ᵀ,

with an explicit backward, so that nothing is computed for the frozen factors. S_P are probe columns multiplied by a
factor U_P that is zero: they change nothing and give ∂L/∂U_P = G S_Pᵀ, a sketch of the row gradients. Under LoRA
dropout A sees the dropped x, the noise the undropped one. For all other layers (DoRA and other variants, hooks, mixed
dtypes, several adapters) the branch is added to the layer's output. If every sample b of a batch has its own noise ε_b
= U diag(c_b) S_V, the noise's columns of z are multiplied by the sample's signs c_b.

A layer's `forward` is replaced by its branch, the same object in every step, which reads the noise from itself: the
guards of `torch.compile` then hold from step to step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from flatshift.regularizers.errors import RegularizerError
from flatshift.regularizers.layers.forward import ForwardSwap
from flatshift.regularizers.layers.fused import FusedNoise, LoraParts, fusible_parts
from flatshift.regularizers.layers.sites import LoraSite


class NoiseBranch:
    """Installs the noise branch in one layer's forward and removes it again without a trace."""

    def __init__(self, site: LoraSite, rank: int, probes: int, dtype: torch.dtype) -> None:
        self.site = site
        self.rank = rank
        self.probe = torch.zeros(site.rows, probes, dtype=dtype, device=site.device).requires_grad_(probes > 0)
        """U_P, a leaf of zeros that only receives a gradient. Not a Parameter: optimizers and clipping never see it."""
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
        """Compute the layer's output while the branch is installed."""
        parts, plain = self._fused, not (args or kwargs or self.site.layer.disable_adapters)
        found = parts.inputs(x) if parts is not None and plain else None
        if parts is None or found is None:
            return self._added(x, *args, **kwargs)
        x, dropped, weight, bias = found
        factors = parts.a.weight, parts.b.weight, self._leaf
        y: Tensor = FusedNoise.apply(x, dropped, weight, bias, *factors, *self._noise(x), parts.scaling)
        return y

    def _added(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the layer's own forward plus ε x, from x before any dropout; without ε if the adapters are
        disabled."""
        assert self._swap.plain is not None
        y = self._swap.plain(x, *args, **kwargs)
        if self.site.layer.disable_adapters:
            return y
        noise_in, probe_in, noise_out, signs = self._noise(x)
        dtype = torch.promote_types(y.dtype, torch.promote_types(x.dtype, noise_out.dtype))
        z = F.linear(x.to(dtype), torch.cat([noise_in, probe_in], 1).T.to(dtype))
        if signs is not None:
            columns = F.pad(signs, (0, probe_in.shape[1]), value=1.0)
            z = z * columns.view(len(signs), *[1] * (x.ndim - 2), -1)
        return (y + F.linear(z, torch.cat([noise_out, self._leaf], 1).to(dtype))).to(y.dtype)
