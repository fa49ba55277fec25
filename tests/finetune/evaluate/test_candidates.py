"""Candidates after shared contexts: the same numbers as scoring each anew, for every cache and every length."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from flatshift.experiments.workflows import few_shot
from flatshift.experiments.workflows.few_shot import FewShot, mcnemar, rank_rows, read_prompt
from flatshift.finetune.compute.loss import find_head
from flatshift.finetune.data.eval_batching import EvalBatching
from flatshift.finetune.errors import UserError
from flatshift.finetune.evaluate import candidates
from flatshift.finetune.evaluate.candidates import score_candidates, tokenize_candidates
from flatshift.finetune.evaluate.prompts import Prompt, check_prompt, fill_prompt, shipped_prompts
from flatshift.finetune.models.backbone import open_backbone
from flatshift.finetune.tasks import Completion
from tests.support.data_models import byte_tokenizer, row, tiny_model

TOKENIZER = byte_tokenizer()
HOW = EvalBatching(batch_size=3, pad_id=TOKENIZER.pad_token_id)
SHOTS = "worked example one. worked example two. "


def items(count: int = 7, shots: str = SHOTS):
    texts = [
        [(f"{shots}item {'x' * (3 * n % 11)} asks ", said, "." * (n % 3)) for said in ("yes", "no at all")]
        for n in range(count)
    ]
    flat = tokenize_candidates(TOKENIZER, [one for item in texts for one in item], (TOKENIZER.bos_token_id,))
    return [flat[2 * n : 2 * n + 2] for n in range(count)]


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mistral", "bloom"])
@pytest.mark.parametrize("shots", [SHOTS, ""], ids=["shots", "none"])
@pytest.mark.parametrize("by_head", [False, True], ids=["logits", "head"])
def test_shared_contexts_give_the_same_log_likelihoods(kind, shots, by_head):
    model = tiny_model(kind, len(TOKENIZER)).eval().requires_grad_(False)
    made = items(shots=shots)
    head = find_head(model, {"input_ids": torch.tensor([made[0][0].ids])}, task=Completion()) if by_head else None
    assert (head is not None) == by_head
    ours = score_candidates(model, made, HOW, head=head)
    naive = score_candidates(model, made, HOW, shared=False)
    for one, other, item in zip(ours, naive, made, strict=True):
        for a, b, candidate in zip(one, other, item, strict=True):
            assert len(a) == len(b) == len(candidate.ids) - candidate.start
            np.testing.assert_allclose(a, b, atol=2e-4)
    # and the naive way is the definition
    candidate = made[3][1]
    with torch.no_grad():
        logp = model(input_ids=torch.tensor([candidate.ids])).logits[0].double().log_softmax(-1)
    expected = [float(logp[t - 1, candidate.ids[t]]) for t in range(candidate.start, len(candidate.ids))]
    np.testing.assert_allclose(naive[3][1], expected, atol=2e-4)


def test_shared_contexts_are_read_once(monkeypatch):
    model, rows = tiny_model("llama", len(TOKENIZER)).eval(), []
    made = items(40)
    monkeypatch.setattr(candidates, "_can_repeat_cache", lambda *a: True)
    model.register_forward_pre_hook(lambda m, a, k: rows.append(k["input_ids"].numel()), with_kwargs=True)
    score_candidates(model, made, HOW)
    shared, rows[:] = sum(rows), []
    score_candidates(model, made, HOW, shared=False)
    assert shared * 2 < sum(rows)


def test_a_cache_that_cannot_be_repeated_is_not_trusted(monkeypatch):
    model = tiny_model("llama", len(TOKENIZER)).eval()
    monkeypatch.setattr(candidates, "_score_after_prefix", lambda *a: [[np.zeros(1)] * 2 for _ in a[1]])
    made = items(4)
    for one, other in zip(
        score_candidates(model, made, HOW), score_candidates(model, made, HOW, shared=False), strict=True
    ):
        assert all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def test_where_the_label_lies_and_blanks_belong_to_it():
    (one,) = tokenize_candidates(TOKENIZER, [("premise, right? ", "Yes", ", hypothesis")], ())
    text = TOKENIZER.decode(one.ids[one.start :])
    assert text == " Yes, hypothesis" and one.bytes == len(text)
    low, high = one.label
    assert TOKENIZER.decode(one.ids[one.start + low : one.start + high]) == " Yes"


NLI = Prompt(text="{text}, right? {label}, {text2}", labels={"a": "Yes", "b": "No"})


def nli_rows(count: int, start: int = 0):
    return [
        row(n, text=f"premise {n}", text2=f"hypothesis {n}", label="ab"[n % 2]) for n in range(start, start + count)
    ]


def test_worked_examples_are_named_draws_and_never_the_row_itself(monkeypatch):
    model = tiny_model("llama", len(TOKENIZER)).eval()
    rows = nli_rows(12)
    asked = FewShot(prompt=NLI, name="nli", shots=11 - 1, source=("x",), seeds=(3,))
    seen = []
    whole = candidates.tokenize_candidates
    monkeypatch.setattr(
        "flatshift.experiments.workflows.few_shot.tokenize_candidates",
        lambda t, texts, b: seen.extend(texts) or whole(t, texts, b),
    )
    found = rank_rows(model, TOKENIZER, rows, rows, asked, HOW, window=4096)
    for place, one in enumerate(rows):
        for context, _, _ in seen[2 * place : 2 * place + 2]:
            assert context.count(f"{one.values['text']},") == 1 and context.count("right?") == 11
    again = rank_rows(model, TOKENIZER, rows, rows, asked, HOW, window=4096)
    assert again.predictions == found.predictions and found.right.shape == (1, 12)
    assert found.figures["accuracy"].share  # of one seed: at 0 and 1 its interval is exact


def test_examples_that_do_not_fit_are_left_out_whole_and_counted(monkeypatch):
    model = tiny_model("llama", len(TOKENIZER)).eval()
    rows = nli_rows(4)
    asked = FewShot(prompt=NLI, name="nli", shots=3, source=("x",))
    found = rank_rows(model, TOKENIZER, rows, nli_rows(9, 20), asked, HOW, window=100)
    assert found.dropped == 4 * 2 and found.cut == 0
    longest = []
    monkeypatch.setattr(few_shot, "score_candidates", lambda model, rows, *more, **how: longest.append(
        max(len(c.ids) for row in rows for c in row)) or score_candidates(model, rows, *more, **how))  # fmt: skip
    asked = FewShot(prompt=NLI, name="nli", shots=3, source=("x",), score="calibrated")
    assert rank_rows(model, TOKENIZER, rows, nli_rows(9, 20), asked, HOW, window=100).dropped == 4 * 2
    assert len(longest) == 2 and max(longest) <= 100  # the texts without content fit too
    with pytest.raises(UserError, match="a candidate alone is longer than the 12 tokens"):
        rank_rows(model, TOKENIZER, rows, nli_rows(9, 20), asked, HOW, window=12)


@pytest.mark.parametrize("mode", ["sum", "label", "mean", "byte", "pmi", "calibrated"])
def test_scores_by_hand(mode, monkeypatch):
    model = tiny_model("llama", len(TOKENIZER)).eval()
    rows, prompt = nli_rows(6), Prompt(text=NLI.text, labels={"a": "Yes", "b": "No, not at all"})  # of two lengths
    asked, held, score = FewShot(prompt=prompt, name="nli", score=mode), {}, few_shot._Ranker.score
    monkeypatch.setattr(few_shot._Ranker, "score", lambda *asked: held.update(made := score(*asked)) or made)
    found = rank_rows(model, TOKENIZER, rows, [], asked, HOW, window=4096)

    def logs(context: str, said: str, after: str) -> np.ndarray:
        (one,) = tokenize_candidates(TOKENIZER, [(context, said, after)], (TOKENIZER.bos_token_id,))
        return score_candidates(model, [[one]], HOW, shared=False)[0][0], one

    for place, one in enumerate(rows):
        values = []
        for said in prompt.labels.values():
            after = f", {one.values['text2']}"
            scored, made = logs(f"{one.values['text']}, right? ", said, after)
            label = scored[made.label[0] : made.label[1]].sum()
            free = [logs(f"{empty}, right? ", said, after) for empty in ("N/A", "[MASK]", "")]
            values.append(
                {
                    "sum": scored.sum(), "label": label, "mean": scored.mean(), "byte": scored.sum() / made.bytes,
                    "pmi": scored.sum() - logs(", right? ", said, after)[0].sum(),
                    "calibrated": (label, [s[m.label[0] : m.label[1]].sum() for s, m in free]),
                }[mode]
            )  # fmt: skip
        if mode == "calibrated":
            shares = np.exp([v[1] for v in values])
            share = (shares / shares.sum(0)).mean(1)
            values = [v[0] - np.log(s) for v, s in zip(values, share, strict=True)]
        assert found.predictions[0][place] == "ab"[int(np.argmax(values))]
        np.testing.assert_allclose(np.diff(held[mode][place]), np.diff(values), atol=2e-3)  # their sum is free


def test_choices_of_their_own_and_answers_in_every_form():
    prompt = Prompt(text="{question} {label}", choices=("options",), answer="answer")
    for answer, gold in (("B", 1), (2, 2), ("third", 2), ("0", 0)):
        one = row(0, question="which?", options=["first", "second", "third"], answer=answer)
        assert fill_prompt(prompt, one).gold == gold
    for answer, gold in ((3, 3), (4, 3), ("3", 2), ("D", 3)):  # a number is a place where there is such a place
        assert fill_prompt(prompt, row(0, question="how many?", options=list("1234"), answer=answer)).gold == gold
    for answer in ("D", 3, "fourth", "inf"):
        with pytest.raises(UserError, match="is none of its 3 choices"):
            fill_prompt(prompt, row(0, question="which?", options=["first", "second", "third"], answer=answer))


@pytest.mark.parametrize("name", shipped_prompts())
def test_shipped_prompts_are_sound(name):
    prompt = read_prompt(name)
    tokenizer = open_backbone("flatshift-5m").tokenizer
    check_prompt(prompt, tokenizer)
    assert prompt.columns()


def test_prompts_that_are_refused():
    with pytest.raises(UserError, match="either `labels`"):
        Prompt(text="{text} {label}")
    with pytest.raises(UserError, match=r"must have \{label\} once"):
        Prompt(text="{text}", labels={"a": "x", "b": "y"})
    with pytest.raises(UserError, match="are the same tokens"):
        check_prompt(Prompt(text="{text} {label}", labels={"a": "yes", "b": " yes"}), TOKENIZER)
    wrong = {"labels": {"a": "نعم", "b": "رقم"}}
    from flatshift.finetune.evaluate.prompts import Wording

    arabic = Prompt(text="{text} {label}", labels={"a": "x", "b": "y"}, by="lang", wordings={"ar": Wording(**wrong)})
    with pytest.raises(UserError, match="means a number"):
        check_prompt(arabic, TOKENIZER)


def test_mcnemar_is_exact():
    ours, theirs = np.array([1, 1, 1, 1, 1, 0, 1], bool), np.array([0, 0, 0, 0, 0, 1, 1], bool)
    found = mcnemar(ours, theirs)
    assert (found["only_ours"], found["only_theirs"]) == (5, 1) and found["p"] == pytest.approx(14 / 64)


def test_paired_sentences_without_a_context():
    model = tiny_model("llama", len(TOKENIZER)).eval()
    rows = [row(n, more=f"the old {n} left", less=f"the young {n} left", label=0) for n in range(5)]
    found = rank_rows(model, TOKENIZER, rows, [], FewShot(prompt=read_prompt("pairs"), name="pairs"), HOW, window=99)
    for place, one in enumerate(rows):
        sums = []
        for text in (one.values["more"], one.values["less"]):
            ids = [TOKENIZER.bos_token_id, *TOKENIZER(text, add_special_tokens=False)["input_ids"]]
            with torch.no_grad():
                logp = model(input_ids=torch.tensor([ids])).logits[0].double().log_softmax(-1)
            sums.append(sum(float(logp[t - 1, ids[t]]) for t in range(1, len(ids))))
        assert bool(found.right[0, place]) is (sums[0] > sums[1])
