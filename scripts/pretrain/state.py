"""Resumable state of a pretraining run: weights, AdamW's moments, the best weights, and progress."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flatshift.finetune import atomic


class Stopped(Exception):
    """Raised when the command stops before the budget is used; the state is saved."""


@dataclass
class TrainingProgress:
    """Progress of training."""

    step: int = 0
    seconds: float = 0.0
    best: float | None = None
    """Lowest validation loss, nats per token."""
    best_step: int | None = None


class PretrainingState:
    """State folder of a resumable run: weights, moments and the best weights as safetensors, and `TrainingProgress`."""

    def __init__(self, folder: Path, known: dict[str, Any]) -> None:
        """known: settings that must be the same for a run to be resumed."""
        self.folder, self.known = folder, json.loads(json.dumps(known))
        self.seconds = 0.0
        """Training time at its end, summed over all attempts."""

    def save(
        self, model: Any, optimizer: torch.optim.Optimizer, standing: TrainingProgress, best: dict[str, Tensor]
    ) -> None:
        """Replace the saved state, atomically."""
        from safetensors.torch import save_file

        tensors: dict[str, Tensor] = {f"best.{name}": tensor for name, tensor in best.items()}
        for name, parameter in model.named_parameters():
            tensors[f"model.{name}"] = parameter.detach()
            for moment in ("exp_avg", "exp_avg_sq"):
                if moment in optimizer.state[parameter]:
                    tensors[f"{moment}.{name}"] = optimizer.state[parameter][moment]
        with atomic.atomic_directory(self.folder) as folder:
            save_file(
                {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, folder / "state.safetensors"
            )
            atomic.write_json(folder / "state.json", {"known": self.known, **asdict(standing)})

    @torch.no_grad()
    def restore(self, model: Any, optimizer: torch.optim.Optimizer) -> tuple[TrainingProgress, dict[str, Tensor]]:
        """Load the saved state into model and optimizer; return the initial state if nothing is saved.

        Raises SystemExit for the state of other settings.
        """
        from safetensors.torch import load_file

        if not (self.folder / "state.json").is_file():
            return TrainingProgress(), {}
        about = json.loads((self.folder / "state.json").read_text(encoding="utf-8"))
        if (known := about.pop("known")) != self.known:
            odd = next(name for name in self.known if known.get(name) != self.known[name])
            raise SystemExit(
                f"{self.folder}: this state is of {odd} {known.get(odd)}, not {self.known[odd]}; name another --work"
            )
        standing, tensors = TrainingProgress(**about), load_file(self.folder / "state.safetensors")
        for name, parameter in model.named_parameters():
            parameter.copy_(tensors[f"model.{name}"])
            if f"exp_avg.{name}" in tensors:
                moments = {m: tensors[f"{m}.{name}"].to(parameter.device) for m in ("exp_avg", "exp_avg_sq")}
                step = torch.tensor(float(standing.step), device=parameter.device)
                optimizer.state[parameter] = {"step": step, **moments}
        return standing, {name.removeprefix("best."): t for name, t in tensors.items() if name.startswith("best.")}
