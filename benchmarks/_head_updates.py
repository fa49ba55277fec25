"""A LoRA head trained by tens of thousands of updates on features that are made once.

The adapter of the recipe `positive-control` lies on the head, so that everything below it gives the same features at
every update. They are made once by the recipe's own model; the head is that model's own PEFT layer, trained in float64
on all rows at once. `python -m benchmarks.positive_control --walk` compares 400 updates with `flatshift train`'s.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flatshift.experiments.data.splits import prepare_data
from flatshift.experiments.recipe import load_recipe
from flatshift.experiments.recipe.tree import from_override
from flatshift.experiments.workflows.build import load_model
from flatshift.finetune.data.eval_batching import EvalBatching
from flatshift.regularizers import Plain, RegularizerConfig, build


@dataclass(frozen=True)
class Updates:
    """How the head is trained. momentum: Nesterov's, at the rate and momentum that the problem's curvature asks for."""

    steps: int = 20_000
    optimizer: Literal["momentum", "adamw"] = "momentum"
    regularizer: RegularizerConfig | None = None
    trained: tuple[str, ...] = ("lora_B",)
    loss: Literal["squared", "cross-entropy"] = "squared"


@dataclass(frozen=True)
class Head:
    """A head, and what it is given: features [N, D] and classes [N] of training and test rows."""

    layer: Any
    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]

    def share_wrong(self) -> float:
        """Of the test rows."""
        features, classes = self.test
        with torch.no_grad():
            return float((self.layer(features).argmax(1) != classes).double().mean())


class _Model(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.classifier = layer

    def forward(self, features: Tensor) -> Tensor:
        logits: Tensor = self.classifier(features)
        return logits


def head(recipe_name: str, rank: int, seed: int) -> Head:
    """The head of the recipe at this rank and seed, at its start, with the features of its rows; float64."""
    settings = {"adapter.rank": rank, "train.seed": seed}
    recipe = load_recipe(recipe_name, [from_override(key, str(value)) for key, value in settings.items()]).recipe
    prepared = prepare_data(recipe)
    engine, tokenizer = load_model(recipe, recipe.task, prepared.label_names)
    engine.model.eval()
    layer = next(module for name, module in engine.model.named_modules() if name.endswith(".classifier"))

    def given(examples: Any) -> tuple[Tensor, Tensor]:
        states: list[Tensor] = []
        order: list[int] = []
        hook = layer.register_forward_pre_hook(lambda _, inputs: states.append(inputs[0].detach()))
        with torch.no_grad():
            for micro in EvalBatching(100, int(tokenizer.pad_token_id or 0)).batches(examples, recipe.task):
                engine.model(**micro.to(engine.device).inputs)
                order += [row[0] for row in micro.rows]
        hook.remove()
        back = torch.argsort(torch.tensor(order))
        return torch.cat(states)[back].double(), torch.tensor([int(example.labels) for example in examples])

    rows = given(prepared.train), given(prepared.test)
    return Head(layer.double(), *rows)


def error_after(updates: Updates, head: Head, seed: int) -> float:
    """Train the head in place; the share of test rows that it then has wrong. seed: of the regularizer."""
    model = _Model(head.layer)
    moving = []
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(any(part in name for part in updates.trained))
        if parameter.requires_grad:
            moving.append(parameter)
    features, classes = head.train
    hot = F.one_hot(classes, head.layer.out_features).double()
    optimizer: torch.optim.Optimizer
    if updates.optimizer == "adamw":
        optimizer = torch.optim.AdamW(moving, lr=0.01, weight_decay=0.0)
    else:
        optimizer = _nesterov(head, moving)
    regularizer = build(updates.regularizer or Plain()).attach(model, seed=seed, total_steps=updates.steps)
    for step in range(updates.steps):
        with regularizer.step(step) as passes:
            for _ in passes:
                regularizer.on_micro_batch(0)
                logits = model(features)
                if updates.loss == "squared":
                    loss = (logits - hot).square().sum(1).mean()
                else:
                    loss = F.cross_entropy(logits, classes)
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        regularizer.after_optimizer_step(optimizer.param_groups[0]["lr"])
    regularizer.detach()
    return head.share_wrong()


def _nesterov(head: Head, moving: list[nn.Parameter]) -> torch.optim.SGD:
    """Rate 1/L and momentum (√L − √μ)/(√L + √μ) of the loss's largest and smallest curvature (Nesterov 2004, 2.2.1)."""
    features = head.train[0]
    with torch.no_grad():
        inner = head.layer.lora_A.default(features) * head.layer.scaling["default"]
    curvature = torch.linalg.eigvalsh(2 / len(features) * (inner @ inner.T))
    largest = float(curvature[-1])
    smallest = float(curvature[curvature > 1e-10 * largest][0])
    low, high = smallest**0.5, largest**0.5
    return torch.optim.SGD(moving, lr=1 / largest, momentum=(high - low) / (high + low), nesterov=True)
