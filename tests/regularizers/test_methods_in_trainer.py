"""The two-pass methods and Bi-LoRA in our own loop: dropout, mixed precision, an interrupt and the resume after it."""

from __future__ import annotations

import pytest
import torch

from flatshift.finetune.adapters.adapter import trainable
from flatshift.finetune.errors import Interrupted
from flatshift.finetune.models.fingerprint import checksum
from flatshift.finetune.run_directory import RunDirectory, read_metrics
from flatshift.regularizers import ASAM, SAM, BiLora, LoraSAM, Plain
from tests.finetune.train.test_trainer import fit, model_of, sources

__all__ = ["sources"]  # a fixture

FIGURES = {
    LoraSAM(rho=0.1): "perturbed_gradient_norm",
    ASAM(rho=0.5): "perturbed_gradient_norm",
    SAM(rho=0.1): "weight_gradient_norm",
    BiLora(rho=0.1): "auxiliary_norm",
}


@pytest.mark.bf16
@pytest.mark.parametrize("config", FIGURES, ids=lambda config: config.kind)
def test_a_resumed_stage_has_the_bits_of_an_uninterrupted_one(config, sources, tmp_path):
    results = []
    for stops in (False, True):
        path = tmp_path / str(stops)
        run, seen = RunDirectory.create(path), []
        model = model_of(sources["llama"], precision="bf16", dropout=0.1)
        before = checksum(model)
        if stops:
            with pytest.raises(Interrupted):
                fit(model, run, steps=6, precision="bf16", regularizer=config, on_step=seen.append, stop=seen.__len__)
            assert len(seen) == 1 and checksum(model) == before
            model = model_of(sources["llama"], precision="bf16", dropout=0.1)
        fit(model, run, steps=6, precision="bf16", regularizer=config)
        lines = read_metrics(path / "metrics.jsonl")
        assert checksum(model) == before and all(line[FIGURES[config]] > 0 for line in lines)
        results.append(([line["loss"] for line in lines], {n: p.detach() for n, p in trainable(model).items()}))
    (losses, whole), (other_losses, resumed) = results
    assert losses == other_losses and all(torch.equal(value, resumed[name]) for name, value in whole.items())


@pytest.mark.parametrize("kind", [LoraSAM, SAM])
def test_both_passes_drop_the_same(kind, sources, tmp_path):
    """ρ = 0 repeats the pass: with the same dropout it is plain training, bit for bit."""
    results = []
    for config in (Plain(), kind(rho=0.0)):
        model = model_of(sources["llama"], dropout=0.3)
        fit(model, RunDirectory.create(tmp_path / config.kind), steps=3, regularizer=config)
        results.append({n: p.detach() for n, p in trainable(model).items()})
    assert all(torch.equal(value, results[1][name]) for name, value in results[0].items())
