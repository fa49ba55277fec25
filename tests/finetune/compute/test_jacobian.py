"""Jacobians by example, the update of gauss-newton, and LoRA on the head: each against its naive form."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.func import functional_call, jacrev

from flatshift.finetune import Adapter, attach_adapter, load_adapter, load_backbone, save_adapter, trainable
from flatshift.finetune.compute.jacobian import jacobian
from flatshift.finetune.errors import UserError
from flatshift.finetune.tasks import Classify
from flatshift.finetune.train.optimizer import solve_least_squares

NAMES = ("x", "y", "z")
TASK = Classify(labels=NAMES, loss="squared")


def model_of(rank: int = 4, targets: tuple[str, ...] = ("classifier",), seed: int = 3):
    backbone = load_backbone("flatshift-encoder-3m", task=TASK, label_names=NAMES)
    return attach_adapter(backbone, Adapter(rank=rank, targets=targets), task=TASK, seed=seed).eval()


def inputs(rows: int = 3) -> dict[str, torch.Tensor]:
    ids = torch.randint(5, 4000, (rows, 7), generator=torch.Generator().manual_seed(rows))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


@pytest.mark.parametrize("targets", [("classifier",), ("layers.1.mlp.down_proj", "layers.1.self_attn.q_proj")])
def test_jacobians_by_example_are_those_of_torch_func(targets):
    model, batch = model_of(targets=targets), inputs()
    with torch.no_grad():
        for p in trainable(model).values():
            p.add_(0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())))
    names = {name: p for name, p in model.named_parameters() if p.requires_grad and "lora_" in name}
    outputs, rows = jacobian(model, names, batch)
    one, total = jacobian(model, names, batch, summed=True)

    def of_one(weights, ids, mask):
        return functional_call(model, weights, (), {"input_ids": ids[None], "attention_mask": mask[None]}).logits[0]

    for b in range(3):
        row = {key: value[b] for key, value in batch.items()}
        found = jacrev(of_one)(names, row["input_ids"], row["attention_mask"])
        wanted = torch.cat([found[name].flatten(1) for name in names], 1)
        torch.testing.assert_close(rows[b], wanted, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(total[:, 0], rows.sum(1) / 3**0.5, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(outputs, one)
    assert not any(module._forward_hooks for module in model.modules())


def test_jacobians_refuse_what_is_no_linear_layer():
    model = model_of()
    norm = {"norm": next(p for name, p in model.named_parameters() if "norm" in name)}
    with pytest.raises(UserError, match="norm belongs to none"):
        jacobian(model, norm, inputs())


def test_the_solution_is_the_least_norm_or_ridge_one():
    generator = np.random.default_rng(0)
    for rows, weights in ((20, 50), (50, 20)):
        x, y = generator.standard_normal((rows, weights)), generator.standard_normal(rows)
        np.testing.assert_allclose(solve_least_squares(x, y, 0.0), np.linalg.pinv(x) @ y, atol=1e-9)
        ridge = np.linalg.solve(x.T @ x + 0.3 * np.eye(weights), x.T @ y)
        np.testing.assert_allclose(solve_least_squares(x, y, 0.3), ridge, atol=1e-9)
    doubled = generator.standard_normal((30, 10)) @ generator.standard_normal((10, 25))  # rank 10
    wanted = generator.standard_normal(30)
    np.testing.assert_allclose(solve_least_squares(doubled, wanted, 0.0), np.linalg.pinv(doubled) @ wanted, atol=1e-7)


def test_an_adapter_on_the_head_is_saved_whole_and_plain_peft_reads_it(tmp_path: Path):
    from peft import PeftModel

    model, batch = model_of(), inputs()
    with torch.no_grad():
        trainable(model)["classifier.lora_B.weight"].normal_(generator=torch.Generator().manual_seed(1))
    save_adapter(model, tmp_path / "adapter")
    wanted = model(**batch).logits
    plain = load_backbone("flatshift-encoder-3m", task=TASK, label_names=NAMES)
    read = PeftModel.from_pretrained(plain, str(tmp_path / "adapter")).eval()
    torch.testing.assert_close(read(**batch).logits, wanted)
    other = model_of(seed=8)
    assert not torch.allclose(other(**batch).logits, wanted)
    load_adapter(other, tmp_path / "adapter")
    torch.testing.assert_close(other(**batch).logits, wanted, rtol=0, atol=0)
