"""NEFTune: the noise's law and keys, where it is added and where not, its refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification, T5Config, T5ForConditionalGeneration

from flatshift.regularizers import GGPO, NEFTune, RegularizerError, build
from flatshift.regularizers.mesh import Placement
from flatshift.regularizers.methods.neftune import NEFTuneRegularizer, input_embedding, uniform_noise
from tests.support.regularizer_models import VOCABULARY, gradients, loss_of, tiny_gpt2, tiny_llama, tokens, with_lora
from tests.support.regularizer_stage import run_stage, same_course


def tiny_bert() -> Any:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = BertConfig(vocab_size=VOCABULARY, max_position_embeddings=64, **sizes)
    return with_lora(BertForSequenceClassification(config).requires_grad_(False), task_type="SEQ_CLS")


def tiny_t5() -> Any:
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4, "decoder_start_token_id": 0}
    config = T5Config(vocab_size=VOCABULARY, dropout_rate=0.0, **sizes)
    return with_lora(
        T5ForConditionalGeneration(config).requires_grad_(False), task_type="SEQ_2_SEQ_LM", target_modules=["q", "v"]
    )


MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: with_lora(tiny_llama()),
    "gpt2": lambda: with_lora(tiny_gpt2(), fan_in_fan_out=True),
    "bert": tiny_bert,
    "t5": tiny_t5,
    "lora on the embedding": lambda: with_lora(tiny_llama(), target_modules=["embed_tokens", "q_proj"]),
}


class Ranks(Placement):
    """The i-th of n processes with other rows, padded to `length` tokens at most."""

    def __init__(
        self, share: tuple[int, int] = (0, 1), *, data: int | None = None, stages: int = 1, length: int = 0
    ) -> None:
        self._share, self._data, self._stages, self._length = share, data or share[1], stages, length

    @property
    def share(self) -> tuple[int, int]:
        return self._share

    def sum_data(self, tensor: Tensor) -> None:
        if len(tensor) > 1:  # the lengths of all ranks
            tensor[tensor == 0] = self._length
        else:
            tensor *= self._data

    def sum_pipeline(self, tensor: Tensor) -> None:
        tensor *= self._stages


def attached(model: Any, *, alpha: float = 5.0, seed: int = 3, placement: Any = None) -> NEFTuneRegularizer:
    regularizer = build(NEFTune(alpha=alpha)).attach(model, seed=seed, total_steps=4, placement=placement)
    assert isinstance(regularizer, NEFTuneRegularizer)
    return regularizer


# --- the draws --------------------------------------------------------------------------------------------------------


def draw(rows: range = range(64), count: int = 999, **keys: int) -> Tensor:
    return uniform_noise(**({"seed": 1, "step": 2, "micro": 3} | keys), rows=torch.tensor(rows), count=count)


def test_the_draws_are_uniform_and_independent() -> None:
    u = draw().double()
    assert u.abs().max() <= 1 and u.max() > 0.999 and u.min() < -0.999
    n = u.numel()
    for power, wanted, spread in ((1, 0.0, 1 / 3), (2, 1 / 3, 4 / 45), (4, 1 / 5, 16 / 225)):
        assert abs(float((u**power).mean()) - wanted) < 4 * (spread / n) ** 0.5, power
    counts = torch.histc(u, bins=64, min=-1, max=1)
    assert float(((counts - n / 64) ** 2 / (n / 64)).sum()) < 63 + 4 * (2 * 63) ** 0.5
    # neighbours share a word or a row: no correlation between halves, rows, or positions
    for one, other in ((u[:, 0:-1:2], u[:, 1::2]), (u[:-1], u[1:]), (u[:, :-1], u[:, 1:])):
        assert abs(float((one * other).mean()) * 3) < 4 / one.numel() ** 0.5


def test_every_key_counts_and_any_split_of_rows_sees_the_same() -> None:
    whole = draw()
    assert torch.equal(whole, draw())
    for keys in ({"seed": 2}, {"step": 3}, {"micro": 4}, {"seed": 2, "step": 1}, {"step": 3, "micro": 2}):
        assert abs(float((whole * draw(**keys)).mean()) * 3) < 4 / whole.numel() ** 0.5, keys
    assert torch.equal(whole[10:17], draw(range(10, 17))) and torch.equal(whole[:, :500], draw(count=500))


# --- where it goes ----------------------------------------------------------------------------------------------------


def inputs_of(model: Any, ids: Tensor) -> dict[str, Tensor]:
    labels = ids[:, 0] % 2 if model.config.model_type == "bert" else ids
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


@pytest.mark.parametrize("case", MODELS)
def test_it_is_uniform_noise_on_the_embedded_input_tokens_of_a_training_step(case: str) -> None:
    """The loss in a step is that of the noisy embeddings handed in by ourselves; nowhere else is there any noise."""
    model, ids = MODELS[case](), tokens()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    inputs = inputs_of(model, ids)
    regularizer = attached(model, alpha=40.0)
    embedding = input_embedding(model)
    plain, clean = model(**inputs).loss, embedding(ids)
    with regularizer.step(1):
        regularizer.on_micro_batch(2)
        state = torch.random.get_rng_state()
        noisy = embedding(ids)
        assert torch.equal(state, torch.random.get_rng_state())
        loss = model(**inputs).loss
        by_hand = model(**{k: v for k, v in inputs.items() if k != "input_ids"}, inputs_embeds=noisy).loss
        model.eval()
        assert torch.equal(embedding(ids), clean)
        model.train()
    bound = 40.0 / (10 * 32) ** 0.5
    wanted = uniform_noise(seed=3, step=1, micro=2, rows=torch.arange(4), count=320).view(4, 10, 32) * bound
    assert torch.allclose(noisy - clean, wanted, atol=1e-5)
    assert torch.equal(loss, by_hand) and abs(float((loss - plain).detach())) > 1e-5
    assert torch.equal(model(**inputs).loss, plain) and torch.equal(embedding(ids), clean)
    assert regularizer.metrics()["embedding_noise"] == pytest.approx(bound)


def test_an_encoder_decoder_keeps_its_decoder_s_tokens_clean() -> None:
    model, ids = tiny_t5(), tokens()
    inner = model.get_base_model()
    seen = {}
    for name in ("encoder", "decoder"):
        getattr(inner, name).embed_tokens.register_forward_hook(
            lambda _m, _i, y, n=name: seen.setdefault(n, []).append(y)
        )
    regularizer = attached(model)
    model(**inputs_of(model, ids))
    with regularizer.step(0):
        model(**inputs_of(model, ids))
    assert torch.equal(*seen["decoder"])
    with regularizer.step(0):
        noisy = inner.encoder.embed_tokens(ids)
    assert not torch.equal(noisy, seen["encoder"][0])


def test_micro_batches_and_steps_differ_and_ranks_have_their_rows() -> None:
    model, ids = with_lora(tiny_llama()), tokens(8)
    embedding = input_embedding(model)
    clean = embedding(ids)

    def noise(part: Tensor, *, step: int = 0, micro: int = 0, placement: Any = None) -> Tensor:
        regularizer = attached(model, placement=placement)
        with regularizer.step(step):
            regularizer.on_micro_batch(micro)
            noisy = embedding(part)
        regularizer.detach()
        return noisy

    whole = noise(ids)
    assert not torch.equal(whole, noise(ids, step=1)) and not torch.equal(whole, noise(ids, micro=1))
    length = ids.shape[1]
    halves = [noise(part, placement=Ranks((i, 2), length=length)) for i, part in enumerate(ids.chunk(2))]
    assert torch.equal(torch.cat(halves), whole) and not torch.equal(whole, clean)
    # a rank that pads its rows to fewer tokens adds the same noise
    short = noise(ids.chunk(2)[1][:, : length // 2], placement=Ranks((1, 2), length=length))
    assert torch.equal(short, halves[1][:, : length // 2])
    width = whole.to(torch.bfloat16)
    model.bfloat16()
    assert noise(ids).dtype == torch.bfloat16 and torch.allclose(noise(ids).float(), width.float(), atol=1e-2)


def test_checkpointed_recomputation_sees_the_same_noise() -> None:
    model, results = with_lora(tiny_llama()), []
    for checkpointed in (False, True):
        if checkpointed:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        regularizer = attached(model)
        with regularizer.step(0):
            loss_of(model, tokens()).backward()
        results.append(gradients(model))
        model.zero_grad()
        regularizer.detach()
    assert all(torch.equal(grad, results[1][name]) for name, grad in results[0].items())


# --- traces and refusals ----------------------------------------------------------------------------------------------


def test_no_trace_after_a_step_an_exception_or_detaching() -> None:
    model = with_lora(tiny_llama())

    def traces() -> dict[str, tuple[list[str], int]]:
        return {n: (sorted(vars(m)), len(m._forward_hooks)) for n, m in model.named_modules()}

    before, regularizer = traces(), attached(model)
    plain = loss_of(model, tokens())
    for error in (RuntimeError, KeyboardInterrupt):
        with pytest.raises(error), regularizer.step(0):
            assert traces() != before
            raise error
        assert traces() == before
    with regularizer.step(0):
        loss_of(model, tokens()).backward()
    assert traces() == before and torch.equal(loss_of(model, tokens()), plain)
    still = attached(with_lora(tiny_llama()), alpha=0.0)
    with still.step(0):
        assert torch.equal(loss_of(model, tokens()), plain)
    regularizer.detach()
    regularizer.detach()
    assert traces() == before
    attached(model)


def test_wrapped_models_are_looked_into() -> None:
    model = with_lora(tiny_llama())
    wrapper = nn.Module()
    wrapper.module = model
    assert input_embedding(wrapper) is input_embedding(model) is model.get_base_model().model.embed_tokens


def test_misuse_and_foreign_states_are_refused() -> None:
    for alpha in (-1.0, float("nan")):
        with pytest.raises(RegularizerError, match=r"regularizer\.alpha: .*is not"):
            build(NEFTune(alpha=alpha))
    with pytest.raises(RegularizerError, match=r"no input embedding"):
        attached(nn.Linear(2, 2))
    model = with_lora(tiny_llama())
    with pytest.raises(RegularizerError, match=r"mesh\.pp"):
        attached(model, placement=Ranks(stages=2))
    with pytest.raises(RegularizerError, match=r"mesh\.cp"):
        attached(model, placement=Ranks((0, 2), data=4))
    fresh = build(NEFTune())
    for use in (lambda: fresh.step(0).__enter__(), lambda: fresh.load_state_dict({})):
        with pytest.raises(RegularizerError, match="not attached"):
            use()
    regularizer = attached(model)
    with pytest.raises(RegularizerError, match="attached already"):
        regularizer.attach(model, seed=0, total_steps=1)
    with pytest.raises(RegularizerError, match="input tokens serves another"):
        attached(model)
    with pytest.raises(RegularizerError, match=r"step\(1\)"), regularizer.step(0), regularizer.step(1):
        pass
    good = regularizer.state_dict()
    ggpo = build(GGPO()).attach(model, seed=3, total_steps=1)
    with pytest.raises(RegularizerError, match="does not belong"):
        regularizer.load_state_dict(ggpo.state_dict())
    with pytest.raises(RegularizerError, match=r"train\.seed"):
        regularizer.load_state_dict(good | {"neftune.seed": torch.tensor(9)})
    regularizer.load_state_dict(good)


def test_the_public_loop_trains_logs_and_resumes(tmp_path: Any) -> None:
    lines, adapter = run_stage(NEFTune(alpha=5.0), tmp_path)
    assert all(line["embedding_noise"] == pytest.approx(5 / (12 * 32) ** 0.5) for line in lines)
    assert same_course(run_stage(NEFTune(alpha=5.0), tmp_path, stop_at=2), (lines, adapter))
    assert not same_course(run_stage(NEFTune(alpha=0.0), tmp_path), (lines, adapter))
