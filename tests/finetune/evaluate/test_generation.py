"""Continuing prompts: batches equal one by one, draws have their distribution and come from a seed alone, stops."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.stats import chi2
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, GenerationConfig, PretrainedConfig

from flatshift.experiments.workflows.run_parts import check_generative
from flatshift.finetune.adapters.adapter import attach_adapter, trainable
from flatshift.finetune.config import Adapter
from flatshift.finetune.data.encoding import IGNORE, encode, get_end_token
from flatshift.finetune.data.eval_batching import DataShard, EvalBatching
from flatshift.finetune.data.example import Example
from flatshift.finetune.errors import UserError
from flatshift.finetune.evaluate.answers import generate_answers, prompt_tokens
from flatshift.finetune.evaluate.generation import Decoding, _logits_processors, continue_prompts
from flatshift.finetune.evaluate.generation import generate_batches as run_prompts
from flatshift.finetune.models.load import load_backbone
from flatshift.finetune.tasks import Classify, Completion, LanguageModel, Seq2Seq
from flatshift.regularizers.layers.fused import fusible_parts
from tests.support.data_models import bert_tokenizer, byte_tokenizer, row, text_rows, tiny_model
from tests.support.finetune_models import save_backbone
from tests.support.seq2seq_models import save_encoder_decoder

TOKENIZER = byte_tokenizer()
PAD, BOS, EOS = 0, 1, 2
PROMPTS = [[BOS, *TOKENIZER(text)["input_ids"]] for text in ("the cat", "a", "good bad neutral positive", "dog sat")]


def written(model, how=None, *, prompts=PROMPTS, batch_size=16, end=EOS, **more):
    found = dict(
        continue_prompts(model, prompts, how or Decoding(max_new_tokens=8), EvalBatching(batch_size, PAD), end=end)
    )
    return [found[i] for i in range(len(prompts))]


def naive(model, prompt, count):
    """Greedy, one token at a time, no cache, no padding."""
    ids = list(prompt)
    for _ in range(count):
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        if ids[-1] == EOS:
            return ids[len(prompt) : -1]
    return ids[len(prompt) :]


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mistral", "bloom"])
def test_padded_batches_write_what_a_naive_loop_writes_for_each_prompt(kind):
    model = tiny_model(kind, len(TOKENIZER))
    expected = [naive(model, prompt, 8) for prompt in PROMPTS]
    assert len({tuple(ids) for ids in expected}) == len(PROMPTS)
    for size in (1, 3, 16):
        assert [answer.ids for answer in written(model, batch_size=size)] == expected


def test_no_row_copies_the_head(tmp_path):
    """transformers hands the head a slice of the hidden states, of which torch would make one product a row."""
    source = save_backbone("llama", tmp_path / "llama", vocab_size=5000)
    backbone = load_backbone(source, task=LanguageModel(), precision="bf16").eval()
    plain = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16).eval().requires_grad_(False)
    ours = load_backbone(source, task=LanguageModel(), precision="bf16")
    adapted = attach_adapter(ours, Adapter(rank=2, targets=("lm_head",)), task=LanguageModel(), seed=0).eval()
    prompts = [[3, 4, 5], [6, 7], [8, 9, 10, 11]]

    class Largest(TorchDispatchMode):
        """Elements of the largest matrix operand of a product."""

        found = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            for one in args:
                if isinstance(one, torch.Tensor) and 5000 in one.shape[-2:]:
                    self.found = max(self.found, one.numel() // 5000)
            return function(*args, **(kwargs or {}))

    found = {}
    for name, model in {"plain": plain, "ours": backbone, "adapted": adapted}.items():
        with Largest() as largest:
            found[name] = written(model, Decoding(max_new_tokens=2), prompts=prompts, end=None)
        copied = name == "plain" and tuple(map(int, torch.__version__.split(".")[:2])) < (2, 14)  # 2.14 copies no row
        assert (largest.found > 32) == copied, (name, largest.found)  # D = 32: one copy of the head
    assert found["ours"] == found["adapted"]
    hidden = torch.randn(3, 7, 32, dtype=torch.bfloat16)[:, -1:]
    head = backbone.get_output_embeddings()
    assert torch.equal(head(hidden), torch.nn.functional.linear(hidden.contiguous(), head.weight))
    assert fusible_parts(adapted.get_base_model().lm_head) is not None  # its own steps stay fused


@pytest.mark.parametrize(
    "how", [{"temperature": 0.8, "top_k": 40}, {"temperature": 1.3, "top_p": 0.9}, {"num_beams": 3}]
)
def test_batches_do_not_change_draws_or_beams_and_no_global_generator_is_touched(how):
    model = tiny_model("llama", len(TOKENIZER))
    how = Decoding(max_new_tokens=8, **how)
    before = torch.random.get_rng_state()
    alone = [answer.ids for answer in written(model, how, batch_size=1)]
    together = [answer.ids for answer in written(model, how, batch_size=16)]
    assert alone == together and torch.equal(before, torch.random.get_rng_state())
    if how.temperature:
        torch.manual_seed(99)
        other = Decoding(max_new_tokens=8, temperature=how.temperature, top_k=how.top_k, top_p=how.top_p, seed=1)
        assert [answer.ids for answer in written(model, how)] == alone
        assert [answer.ids for answer in written(model, other)] != alone


@pytest.mark.parametrize(("top_k", "top_p"), [(None, None), (4, None), (None, 0.7)])
def test_draws_have_the_distribution_that_they_should(top_k, top_p):
    """Chi-square against the softmax in float64, truncated by hand; 20,000 draws of ten tokens."""
    logits = torch.tensor([2.0, 1.5, 1.0, 0.7, 0.2, 0.0, -0.5, -1.0, -1.5, -3.0])
    temperature, count = 0.7, 20_000
    expected = np.exp(logits.double().numpy() / temperature)
    expected /= expected.sum()
    if top_k is not None:
        expected[top_k:] = 0
    if top_p is not None:
        expected[np.cumsum(expected) - expected >= top_p] = 0
    expected /= expected.sum()
    how = Decoding(temperature=temperature, top_k=top_k, top_p=top_p, seed=5)
    scores = logits.expand(count, -1).clone()
    for processor in _logits_processors(how, range(count)):
        scores = processor(torch.zeros(count, 1, dtype=torch.long), scores)
    seen = np.bincount(scores.argmax(dim=1).numpy(), minlength=10)
    kept = expected > 0
    assert not seen[~kept].any() and kept.sum() >= 2
    statistic = float(((seen[kept] - count * expected[kept]) ** 2 / (count * expected[kept])).sum())
    assert statistic < chi2.ppf(0.9999, kept.sum() - 1)


def test_soft_tokens_take_positions():
    model = tiny_model("llama", len(TOKENIZER))
    room = model.config.max_position_embeddings
    prompt = [[BOS, *[5] * (room - 9)]]
    assert len(written(model, Decoding(max_new_tokens=8), prompts=prompt)) == 1
    model.soft_tokens = 1
    with pytest.raises(UserError, match=f"backbone's {room} positions next to 1 soft token;"):
        written(model, Decoding(max_new_tokens=8), prompts=prompt)
    judged = [Example([*prompt[0], 7], [*[IGNORE] * len(prompt[0]), 7], "0", "rows.jsonl:1", answer="x")]
    with pytest.raises(UserError, match=r"rows\.jsonl:1: .* positions next to 1 soft token; lower train\.max_length"):
        generate_answers(model, TOKENIZER, judged, EvalBatching.of(TOKENIZER, batch_size=1), max_new_tokens=8)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_behind_soft_tokens_batches_write_what_a_naive_loop_writes(kind):
    task = Completion(pack=False)
    model = attach_adapter(tiny_model(kind, len(TOKENIZER)), Adapter(soft_tokens=5), task=task, seed=0).eval()
    with torch.no_grad():
        (soft,) = trainable(model).values()
        soft.add_(torch.randn(soft.shape, generator=torch.Generator().manual_seed(3)))
    prompts = [*PROMPTS, [BOS, *TOKENIZER("the dog")["input_ids"]], PROMPTS[0]]
    assert len({len(prompt) for prompt in prompts}) < len(prompts), "two share a batch"
    expected = []
    for prompt in prompts:
        ids = list(prompt)
        for _ in range(8):
            with torch.no_grad():
                ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
        expected.append(ids[len(prompt) :])
    for size in (1, 3, 16):
        assert [answer.ids for answer in written(model, prompts=prompts, batch_size=size, end=None)] == expected
    how = Decoding(max_new_tokens=6, num_beams=3)
    beams = [[answer.ids for answer in written(model, how, prompts=prompts, batch_size=size)] for size in (1, 16)]
    assert beams[0] == beams[1]


def test_every_process_goes_through_the_same_batches_behind_soft_tokens():
    model = tiny_model("llama", len(TOKENIZER))
    model.soft_tokens = 1
    shapes: list[list[tuple[int, ...]]] = [[], []]
    config = GenerationConfig(max_new_tokens=1, pad_token_id=PAD)
    for index, seen in enumerate(shapes):
        model.generate = lambda seen=seen, **more: (seen.append(more["attention_mask"].shape), more["input_ids"])[1]
        share = DataShard(index=index, width=2)
        rows = [p for p, _ in run_prompts(model, [*PROMPTS, PROMPTS[0]], config, EvalBatching(4, PAD, share=share))]
        assert sorted(i for places in rows for i in places) == ([0, 1, 2, 3], [4])[index]
    assert [shape[1] for shape in shapes[0]] == [shape[1] for shape in shapes[1]]


def test_an_answer_ends_at_the_end_token_and_says_so():
    model = tiny_model("llama", len(TOKENIZER))
    long = written(model)
    assert not any(answer.ended for answer in long) and all(len(answer.ids) == 8 for answer in long)
    stop = long[0].ids[2]
    first = long[0].ids.index(stop)
    stopped = written(model, end=stop)[0]
    assert stopped.ended and stopped.ids == long[0].ids[:first]


def test_what_the_backbones_own_settings_ask_for_is_left_out():
    model = tiny_model("llama", len(TOKENIZER))
    expected = [answer.ids for answer in written(model)]
    banned = sorted({token for ids in expected for token in ids})
    own = GenerationConfig(suppress_tokens=banned, repetition_penalty=5.0, do_sample=True, min_new_tokens=3)
    model.generation_config = own
    assert [answer.ids for answer in written(model)] == expected
    assert model.generation_config is own


def test_it_writes_what_evaluation_judges():
    task = Completion(prompt="{text}:", completion=" {label}", score="generate", max_new_tokens=6)
    examples = encode(text_rows(6), task=task, tokenizer=TOKENIZER, max_length=64).examples
    model = tiny_model("llama", len(TOKENIZER))
    judged = generate_answers(model, TOKENIZER, examples, EvalBatching.of(TOKENIZER, batch_size=4), max_new_tokens=6)
    ours = written(model, Decoding(max_new_tokens=6), prompts=[prompt_tokens(e) for e in examples])
    assert [TOKENIZER.decode(a.ids, skip_special_tokens=True).strip() for a in ours] == judged


def test_an_encoder_decoder_begins_with_its_start_token(tmp_path):
    task = Seq2Seq(prompt="say: {text}", target="{label}", score="generate", max_new_tokens=6)
    model = attach_adapter(
        load_backbone(save_encoder_decoder("bart", tmp_path), task=task), Adapter(rank=4), task=task, seed=0
    )
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in trainable(model).values():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    rows = text_rows(5)
    examples = encode(rows, task=task, tokenizer=TOKENIZER, max_length=64, decoder_start=2).examples
    judged = generate_answers(model, TOKENIZER, examples, EvalBatching.of(TOKENIZER, batch_size=5), max_new_tokens=6)
    prompts = [question.ids for question in task.input_format.build_prompts(rows, TOKENIZER)[0]]
    assert prompts == [example.input_ids for example in examples]
    how = Decoding(max_new_tokens=6)
    found = dict(continue_prompts(model, prompts, how, EvalBatching(2, PAD), end=EOS, decoder_start=2))
    assert [TOKENIZER.decode(found[i].ids, skip_special_tokens=True).strip() for i in range(5)] == judged


@pytest.mark.parametrize(
    "tokenizer", [TOKENIZER, byte_tokenizer(bos=False), bert_tokenizer()], ids=["bos", "no", "own"]
)
def test_prompts_are_what_training_put_before_the_answer(tokenizer):
    rows = text_rows(8)
    for task in (Completion(prompt="Q: {text}\nA:", completion=" {label}"), LanguageModel()):
        for r, example in zip(rows, encode(rows, task=task, tokenizer=tokenizer, max_length=512).examples, strict=True):
            ids = task.input_format.token_ids(tokenizer, task.input_format.render(r))
            assert example.input_ids[: len(ids)] == ids
            if isinstance(task, Completion):
                assert prompt_tokens(example) == ids
            assert example.input_ids[-1] == get_end_token(tokenizer)


class Parrot:
    """Writes the same tokens after every prompt."""

    config = PretrainedConfig()

    def __init__(self, *ids):
        self.ids = ids

    def generate(self, *, input_ids, generation_config, **_):
        self.ends = generation_config.eos_token_id
        return torch.cat([input_ids, torch.tensor([self.ids]).expand(len(input_ids), -1)], dim=1)


def parrot_says(text, tokenizer):
    model = Parrot(*tokenizer(text, add_special_tokens=False)["input_ids"], get_end_token(tokenizer))
    task = Completion(score="generate")
    examples = encode([row(text="cat", label=text)], task=task, tokenizer=tokenizer, max_length=64).examples
    (answer,) = generate_answers(model, tokenizer, examples, EvalBatching.of(tokenizer, batch_size=1), max_new_tokens=8)
    return answer, model


def test_without_an_eos_a_judged_answer_ends_at_the_trained_end():
    tokenizer = bert_tokenizer()
    answer, model = parrot_says("dog", tokenizer)
    assert answer == "dog" and tokenizer.eos_token_id is None
    assert model.ends == [tokenizer.sep_token_id] == [get_end_token(tokenizer)]


def test_a_judged_answer_keeps_the_spaces_that_it_was_written_with():
    tokenizer = bert_tokenizer()
    tokenizer.add_tokens(["."])
    tokenizer.clean_up_tokenization_spaces = True
    assert (
        parrot_says("the cat .", tokenizer)[0] == "the cat ." != tokenizer.decode(tokenizer("the cat .")["input_ids"])
    )


def test_refusals_name_the_nearest_fix():
    model = tiny_model("gpt2", len(TOKENIZER))
    with pytest.raises(UserError, match=r"classify trains a model that writes no text.*flatshift eval"):
        check_generative(Classify())
    with pytest.raises(UserError, match=r"prompt 2: 90 tokens and --max-new-tokens 8 do not fit .* 96 positions"):
        written(model, prompts=[[1, 5], [5] * 90])
    with pytest.raises(UserError, match=r"rows\.jsonl:3: 90 tokens and --max-new-tokens 8 do not fit"):
        asked = continue_prompts(
            model, [[5] * 90], Decoding(max_new_tokens=8), EvalBatching(1, PAD), end=EOS, names=["rows.jsonl:3"]
        )
        next(asked)
    with pytest.raises(UserError, match="prompt 1 is empty"):
        written(model, prompts=[[]])
    with pytest.raises(ValueError, match="top_p limits draws"):
        Decoding(top_p=0.5)
    with pytest.raises(ValueError, match="num_beams"):
        Decoding(temperature=1.0, num_beams=2)
    assert LanguageModel().input_format.columns() == ("text",)
    asks = Completion(prompt="{text}?").input_format
    assert asks.render(row(text="why")) == "why?"
    rows = [row(0, text=["no", "text"]), row(1, text="why")]
    prompts, skipped = asks.build_prompts(rows, TOKENIZER, bad_rows="skip")
    assert [(p.id, p.text, p.where) for p in prompts] == [("0-1", "why?", "rows.jsonl:2")]
    assert len(skipped) == 1 and skipped[0].startswith("rows.jsonl:1: column 'text'")
    with pytest.raises(UserError, match=r"rows\.jsonl:1: column 'text'"):
        asks.build_prompts(rows, TOKENIZER)
