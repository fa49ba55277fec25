"""Weights that are read straight to a device are those of a model that is built on the host and moved."""

from __future__ import annotations

import pytest
import torch

from flatshift.finetune.compute import cuda_status
from flatshift.finetune.models import load as loading
from flatshift.finetune.models.load import load_backbone
from flatshift.finetune.tasks import Classify, LanguageModel
from tests.support.finetune_models import save_backbone


def test_a_cpu_is_told_nothing():
    for device in ("cpu", "meta"):
        assert cuda_status.direct_load_kwargs(torch.device(device)) == {}
    device = torch.device("cuda", 1)
    assert cuda_status.direct_load_kwargs(device) == {"device_map": {"": device}}


@pytest.mark.parametrize(
    ("kind", "task", "options"),
    [
        ("llama", LanguageModel(), {}),
        ("llama", LanguageModel(), {"tie_word_embeddings": True}),
        ("gpt2", LanguageModel(), {}),
        ("bert", Classify(), {}),  # a head that the file lacks
        ("llama", Classify(), {}),
    ],
)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_it_is_the_same_model(tmp_path, monkeypatch, kind, task, options, precision):
    source = save_backbone(kind, tmp_path, **options)
    labels = ("a", "b", "c") if isinstance(task, Classify) else None

    def loaded():
        return load_backbone(source, task=task, label_names=labels, precision=precision)

    plain = loaded()
    asked = []
    monkeypatch.setattr(
        loading, "direct_load_kwargs", lambda device: asked.append(device) or {"device_map": {"": device}}
    )
    state = torch.random.get_rng_state()
    straight = loaded()
    assert asked == [torch.device("cpu")] and torch.equal(state, torch.random.get_rng_state())
    assert straight.new_parameters == plain.new_parameters and bool(labels) == bool(plain.new_parameters)
    theirs = dict(plain.named_parameters())
    mine = dict(straight.named_parameters())
    assert mine.keys() == theirs.keys()
    for name, parameter in mine.items():
        assert parameter.device == torch.device("cpu") and parameter.dtype == theirs[name].dtype
        assert not parameter.requires_grad and (name in plain.new_parameters or torch.equal(parameter, theirs[name]))
    for (name, buffer), (_, other) in zip(straight.named_buffers(), plain.named_buffers(), strict=True):
        assert torch.equal(buffer, other), name
    if options:
        assert straight.get_output_embeddings().weight is straight.get_input_embeddings().weight
    ids = torch.arange(3, 11)[None]
    if not labels:
        assert torch.equal(straight(input_ids=ids).logits, plain(input_ids=ids).logits)
