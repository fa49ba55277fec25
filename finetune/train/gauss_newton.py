"""`optimizer.kind: gauss-newton`: each update solves the least-squares problem of the model linearised where it stands.

With r the residuals of all rows of an update and J their Jacobian, the weights that move become
θ' = argmin ‖r + Jθ − Jθ'‖² + λ‖θ'‖², and the step goes `lr` of the way there; λ is `weight_decay`. Without it the step
has the least norm among those that fit best. A model that is linear in what moves is trained to the end by one update:
an adapter on the head of which only B moves (`optimizer.fixed: [a, head]`).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn

from ..compute.jacobian import jacobian
from ..errors import UserError
from .stage import ForwardBackward

LARGEST = 300_000_000
"""Numbers of a Jacobian, at most: 2.4 GB in float64."""
_NOISE = 1e-12
"""Eigenvalues below this share of the largest are the rounding of features that were computed in float32."""


def solve(jac: np.ndarray, wanted: np.ndarray, decay: float) -> np.ndarray:
    """[P]: argmin over θ of ‖wanted − jac·θ‖² + decay·‖θ‖², of least norm; jac [N, P], wanted [N], float64."""
    wide = jac.shape[0] <= jac.shape[1]
    values, vectors = np.linalg.eigh(jac @ jac.T if wide else jac.T @ jac)
    kept = values > _NOISE * values[-1]
    gains = np.divide(1.0, values + decay, out=np.zeros_like(values), where=kept)
    right = wanted if wide else jac.T @ wanted
    found = vectors @ (gains * (vectors.T @ right))
    return jac.T @ found if wide else found


class GaussNewton:
    """Makes the updates of a stage; what it finds lies in the gradients, as minus the step."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], *, decay: float) -> None:
        """parameters: those that move. decay: λ."""
        self.parameters, self.decay = dict(parameters), decay

    def compute(self, work: ForwardBackward) -> Tensor:
        """The step of an update into the gradients; returns its loss before it, as `ForwardBackward.compute`.

        Raises:
            UserError: more numbers than `LARGEST`, a parameter outside linear layers.
        """
        sizes = [p.numel() for p in self.parameters.values()]
        jacobians, residuals = [], []
        for index, micro in enumerate(work.micros):
            batch = micro.to(work.engine.device)
            with work.context(index):
                outputs, rows = jacobian(work.engine.model, self.parameters, batch.inputs)
            whole = work.count * rows.shape[1] * rows.shape[2]
            if whole > LARGEST:
                raise UserError(
                    f"optimizer.kind: gauss-newton solves for {work.count} rows × {rows.shape[1]} outputs × "
                    f"{sum(sizes):,} weights at once, above its {LARGEST:.0e} numbers; lower adapter.rank, or "
                    "train.batch_size · train.accumulate"
                )
            jacobians.append(rows.flatten(0, 1).double().cpu().numpy())
            residuals.append(work.task.residuals(outputs, batch.labels).flatten().double().cpu().numpy())
            work.engine.beat()
        jac, residual = np.concatenate(jacobians), np.concatenate(residuals)
        now = torch.cat([p.detach().flatten() for p in self.parameters.values()]).double().cpu().numpy()
        if self.decay:
            step = solve(jac, residual + jac @ now, self.decay) - now
        else:
            step = solve(jac, residual, 0.0)
        parts = torch.from_numpy(step).split(sizes)
        for parameter, part in zip(self.parameters.values(), parts, strict=True):
            parameter.grad = -part.view_as(parameter).to(parameter)
        loss = float(residual @ residual) / work.count
        return torch.tensor(loss, device=work.engine.device)
