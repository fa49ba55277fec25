"""Loss and gradients of an encoder-decoder are those of transformers' own `model(input_ids, labels=labels).loss`."""

from __future__ import annotations

import pytest
import torch

from flatshift.finetune.adapters.adapter import attach_adapter, trainable
from flatshift.finetune.config import Adapter
from flatshift.finetune.data.batches import TrainingDataLoader
from flatshift.finetune.data.encoding import encode
from flatshift.finetune.models.backbone import open_backbone
from flatshift.finetune.models.load import load_backbone
from flatshift.finetune.parallel.engine import Engine
from flatshift.finetune.tasks import Seq2Seq
from tests.support.data_models import text_rows
from tests.support.seq2seq_models import TOKENIZER, save_encoder_decoder

TASK = Seq2Seq()


@pytest.mark.parametrize("kind", ["t5", "t5-gated", "bart"])
def test_an_update_equals_transformers_loss(kind, tmp_path):
    source = save_encoder_decoder(kind, tmp_path)
    model = attach_adapter(load_backbone(source, task=TASK), Adapter(rank=4), task=TASK, seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in trainable(model).values():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    examples = encode(
        text_rows(12), task=TASK, tokenizer=TOKENIZER, max_length=32, decoder_start=open_backbone(source).decoder_start
    ).examples
    batches = TrainingDataLoader(examples, task=TASK, batch_size=4, accumulate=3, seed=0, max_length=32, pad_id=0)
    micros, count = batches.at(0), batches.supervised(0)

    theirs = torch.zeros(())
    for micro in micros:
        base = model.get_base_model()
        shifted = base.prepare_decoder_input_ids_from_labels(micro.labels)
        real = micro.labels != -100
        assert (shifted[real] == micro.inputs["decoder_input_ids"][real]).all()
        inputs = {name: micro.inputs[name] for name in ("input_ids", "attention_mask")}
        loss = model(**inputs, labels=micro.labels).loss * micro.supervised / count
        loss.backward()
        theirs += loss.detach()
    expected = {name: p.grad.clone() for name, p in trainable(model).items()}
    model.zero_grad()

    engine = Engine.alone(model)
    head = engine.find_head(micros[0].inputs, task=TASK)
    ours = engine.forward_backward(micros, count, task=TASK, head=head, context=lambda index: torch.enable_grad())
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-6)
    for name, parameter in trainable(model).items():
        assert (parameter.grad - expected[name]).norm() <= 1e-5 * expected[name].norm(), name
        assert expected[name].norm() > 0, name
