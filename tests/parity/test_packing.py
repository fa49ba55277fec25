"""Packed rows against the same samples one by one: loss, gradients, logits, and what happens when a model leaks."""

from __future__ import annotations

import pytest
import torch

from flatshift.finetune.compute.loss import loss_sum
from flatshift.finetune.data.batches import TrainingDataLoader
from flatshift.finetune.data.encoding import encode
from flatshift.finetune.data.mixture import Mixture
from flatshift.finetune.errors import UserError
from flatshift.finetune.evaluate.packing_check import check_packing_isolation
from flatshift.finetune.tasks import Completion, LanguageModel
from tests.support.data_models import byte_tokenizer, text_rows, tiny_model

TOKENIZER = byte_tokenizer()
KINDS = [("llama", "sdpa"), ("llama", "eager"), ("gpt2", "sdpa"), ("gpt2", "eager"), ("mistral", "sdpa")]


MIXTURE = Mixture(("a", "b"), (0.7, 0.3), (15, 25))


def packed_step(task):
    examples = encode(text_rows(40), task=task, tokenizer=TOKENIZER, max_length=64).examples
    batches = TrainingDataLoader(examples, task=task, batch_size=3, accumulate=2, seed=0, max_length=64, pad_id=0)
    micros = batches.at(0)
    assert max(len(row) for micro in micros for row in micro.rows) >= 3
    return examples, micros, batches.supervised(0)


def gradients(model, total: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    total.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("task", [LanguageModel(), Completion()], ids=lambda task: task.kind)
@pytest.mark.parametrize(("kind", "attention"), KINDS)
def test_packed_loss_and_gradients_are_the_unpacked_ones(kind, attention, task):
    model = tiny_model(kind, len(TOKENIZER), attention=attention)
    examples, micros, supervised = packed_step(task)
    packed = sum(loss_sum(model(**m.inputs).logits, m.labels, task=task) for m in micros) / supervised
    one_by_one = (
        sum(
            loss_sum(model(input_ids=torch.tensor([e.input_ids])).logits, torch.tensor([e.labels]), task=task)
            for m in micros
            for row in m.rows
            for e in [examples[i] for i in row]
        )
        / supervised
    )
    torch.testing.assert_close(packed, one_by_one, rtol=1e-5, atol=0)
    ours, theirs = gradients(model, packed), gradients(model, one_by_one)
    for name, gradient in theirs.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-5, atol=1e-6, msg=name)


def test_the_same_samples_packed_mixed_or_in_groups_of_like_length_have_one_loss_and_gradient():
    """A whole round of a mixture, cut into batches in three ways."""
    packed, apart = Completion(), Completion(pack=False)
    model = tiny_model("llama", len(TOKENIZER))
    examples = encode(text_rows(40), task=packed, tokenizer=TOKENIZER, max_length=64).examples
    found = []
    for task, options in ((packed, {}), (apart, {}), (apart, {"group": "length"})):
        settings = {"batch_size": 4, "seed": 0, "max_length": 64, "pad_id": 0, "mixture": MIXTURE, **options}
        batches = TrainingDataLoader(examples, task=task, **settings)
        if task.pack:  # rows of the first round alone, which are no multiple of a batch
            steps = -(-len(batches.epoch(0)) // 4)
            micros = [micro for step in range(steps) for micro in batches.at(step)]
            extra = steps * 4 - len(batches.epoch(0))
        else:
            micros, extra = [micro for step in range(10) for micro in batches.at(step)], 0
        total, samples = torch.zeros(()), []
        for k, micro in enumerate(micros):
            keep = len(micro.rows) - (extra if k == len(micros) - 1 else 0)
            inputs = {name: tensor[:keep] for name, tensor in micro.inputs.items()}
            total = total + loss_sum(model(**inputs).logits, micro.labels[:keep], task=task)
            samples += [i for row in micro.rows[:keep] for i in row]
        found.append((sorted(samples), total.detach(), gradients(model, total)))
    assert len(found[0][0]) == 40 and found[0][0] != list(range(40))  # as the weights have it, not each once
    for samples, total, gradient in found[1:]:
        assert samples == found[0][0]
        torch.testing.assert_close(total, found[0][1], rtol=1e-5, atol=0)
        for name, value in found[0][2].items():
            assert (gradient[name] - value).norm() <= 1e-4 * value.norm(), name


@pytest.mark.parametrize(("kind", "attention"), KINDS)
def test_a_neighbour_changes_no_bit_of_a_sample(kind, attention):
    model = tiny_model(kind, len(TOKENIZER), attention=attention)
    _, micros, _ = packed_step(LanguageModel())
    micro = next(m for m in micros if len(m.rows[0]) > 1)
    second = int((micro.inputs["position_ids"][0] == 0).nonzero()[1])
    with torch.no_grad():
        before = model(**micro.inputs).logits[0, second:]
        other = dict(micro.inputs, input_ids=micro.inputs["input_ids"].clone())
        other["input_ids"][0, :second] = 7
        after = model(**other).logits[0, second:]
    assert torch.equal(before, after)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "mistral"])
def test_models_that_keep_samples_apart_pass_the_check(kind, dtype):
    model = tiny_model(kind, len(TOKENIZER)).to(dtype).train()
    check_packing_isolation(model)
    assert model.training


class Around(torch.nn.Module):
    """A model whose logits `change(input_ids, logits)` alters."""

    def __init__(self, inner, change) -> None:
        super().__init__()
        self.inner, self.change = inner, change

    def get_input_embeddings(self):
        return self.inner.get_input_embeddings()

    def forward(self, input_ids, **inputs):
        out = self.inner(input_ids=input_ids, **inputs)
        out.logits = self.change(input_ids, out.logits)
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_smallest_leak_is_one(dtype):
    """A hundredth of what half precision moves where a sample is read at another shape."""

    def change(ids, logits):
        return logits.float() + 1e-5 * ids[0, 0] * (ids.shape == (1, 16))

    llama = tiny_model("llama", len(TOKENIZER)).to(dtype)
    check_packing_isolation(Around(llama, lambda ids, logits: logits))
    with pytest.raises(UserError, match="lets packed samples see each other"):
        check_packing_isolation(Around(llama, change))


def test_bits_that_are_not_repeated_are_no_leak():
    """Kernels with atomic sums, and experts whose products have shapes that follow from the whole batch."""
    from transformers import MixtralConfig, MixtralForCausalLM

    draws = torch.Generator().manual_seed(0)
    llama = tiny_model("llama", len(TOKENIZER))
    noisy = Around(llama, lambda ids, logits: logits + 1e-4 * torch.rand(logits.shape, generator=draws))
    check_packing_isolation(noisy)
    check_packing_isolation(
        Around(llama, lambda ids, logits: logits + 1e-4 * ids.flatten()[0])
    )  # of the batch, packed or not
    noisy.inner = tiny_model("bloom", len(TOKENIZER))
    with pytest.raises(UserError, match="lets packed samples see each other"):
        check_packing_isolation(noisy)
    sizes = {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 8}
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        config = MixtralConfig(vocab_size=500, hidden_size=64, intermediate_size=96, use_cache=False, **sizes)
        experts = MixtralForCausalLM(config)
    check_packing_isolation(experts)


def test_every_rank_takes_part_where_one_finds_a_difference():
    calls = []
    model = Around(tiny_model("llama", len(TOKENIZER)), lambda ids, logits: calls.append(tuple(ids.shape)) or logits)
    check_packing_isolation(model)
    assert calls == [(1, 16)] * 2
    calls.clear()
    check_packing_isolation(model, agree=lambda differs: True)
    assert calls == [(1, 16)] * 3 + [(2, 8)] * 2


def test_models_that_would_leak_are_refused():
    for dtype in (torch.float32, torch.bfloat16):
        with pytest.raises(UserError, match=r"set task\.pack: false"):
            check_packing_isolation(tiny_model("bloom", len(TOKENIZER)).to(dtype))

    class Deaf(torch.nn.Module):
        """A Llama behind a wrapper that loses the positions."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = tiny_model("llama", len(TOKENIZER))

        def get_input_embeddings(self):
            return self.inner.get_input_embeddings()

        def forward(self, input_ids, position_ids):
            return self.inner(input_ids=input_ids)

    with pytest.raises(UserError, match="lets packed samples see each other"):
        check_packing_isolation(Deaf())

    caching = tiny_model("llama", len(TOKENIZER))
    caching.config.use_cache = True
    with pytest.raises(UserError, match="lets packed samples see each other"):
        check_packing_isolation(caching)
