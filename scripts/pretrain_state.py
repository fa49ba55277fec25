"""What a pretraining run leaves behind to be gone on with: weights, AdamW's moments, the best weights, and how far."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flatshift.finetune import atomic


class Stopped(Exception):
    """The command's time is over before the budget; the state is saved."""


@dataclass
class Standing:
    """How far training has come."""

    step: int = 0
    seconds: float = 0.0
    best: float | None = None
    """Lowest validation loss, nats per token."""
    best_step: int | None = None


class State:
    """The folder of a run that may be stopped: weights, moments and the best weights as safetensors, and `Standing`."""

    def __init__(self, folder: Path, known: dict[str, Any]) -> None:
        """known: what must be the same for a run to go on."""
        self.folder, self.known = folder, json.loads(json.dumps(known))
        self.seconds = 0.0
        """Of training, at its end, all attempts together."""

    def save(self, model: Any, optimizer: torch.optim.Optimizer, standing: Standing, best: dict[str, Tensor]) -> None:
        """Put all of it in place of what there is, whole or not at all."""
        from safetensors.torch import save_file

        tensors: dict[str, Tensor] = {f"best.{name}": tensor for name, tensor in best.items()}
        for name, parameter in model.named_parameters():
            tensors[f"model.{name}"] = parameter.detach()
            for moment in ("exp_avg", "exp_avg_sq"):
                if moment in optimizer.state[parameter]:
                    tensors[f"{moment}.{name}"] = optimizer.state[parameter][moment]
        with atomic.replacing_directory(self.folder) as folder:
            save_file(
                {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, folder / "state.safetensors"
            )
            atomic.write_json(folder / "state.json", {"known": self.known, **asdict(standing)})

    @torch.no_grad()
    def restore(self, model: Any, optimizer: torch.optim.Optimizer) -> tuple[Standing, dict[str, Tensor]]:
        """What was saved, put into model and optimizer; the beginning where there is nothing.

        Raises SystemExit for the state of other settings.
        """
        from safetensors.torch import load_file

        if not (self.folder / "state.json").is_file():
            return Standing(), {}
        about = json.loads((self.folder / "state.json").read_text(encoding="utf-8"))
        if (known := about.pop("known")) != self.known:
            odd = next(name for name in self.known if known.get(name) != self.known[name])
            raise SystemExit(
                f"{self.folder}: this state is of {odd} {known.get(odd)}, not {self.known[odd]}; name another --work"
            )
        standing, tensors = Standing(**about), load_file(self.folder / "state.safetensors")
        for name, parameter in model.named_parameters():
            parameter.copy_(tensors[f"model.{name}"])
            if f"exp_avg.{name}" in tensors:
                moments = {m: tensors[f"{m}.{name}"].to(parameter.device) for m in ("exp_avg", "exp_avg_sq")}
                step = torch.tensor(float(standing.step), device=parameter.device)
                optimizer.state[parameter] = {"step": step, **moments}
        return standing, {name.removeprefix("best."): t for name, t in tensors.items() if name.startswith("best.")}
