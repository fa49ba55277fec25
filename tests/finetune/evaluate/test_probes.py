"""Probes by word lists: every figure by hand, and lists that cannot be asked."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from flatshift.cli import run
from flatshift.experiments.workflows.samples import read_probe
from flatshift.finetune.errors import UserError
from flatshift.finetune.evaluate.probes import (
    WordListProbe,
    fill_templates,
    measure_association,
    measure_cooccurrence,
    shipped_probes,
)
from tests.support.data_models import write_jsonl

LISTS: dict = {
    "groups": {"men": ["he", "the man"], "women": ["she", "the woman"]},
    "attributes": {"craft": ["welder", "truck driver"], "care": ["nurse", "nanny"]},
    "templates": ["{group} is a {attribute}.", "the {attribute} said {group} came"],
    "prompts": ["{group} was a"],
    "window": 2,
}


def probe(**changed) -> WordListProbe:
    lists = {**LISTS, **changed}
    kinds = {k: {n: tuple(w) for n, w in lists[k].items()} for k in ("groups", "attributes")}
    return WordListProbe(
        **kinds, templates=tuple(lists["templates"]), prompts=tuple(lists["prompts"]), window=lists["window"]
    )


def test_sentences_are_pairs():
    texts, keys = fill_templates(probe())
    assert len(texts) == 2 * 4 * 2 * 2 and texts[0] == "He is a welder."
    men = [t for t, key in zip(texts, keys, strict=True) if key[0] == "men"]
    women = [t for t, key in zip(texts, keys, strict=True) if key[0] == "women"]
    swapped = [t.replace("The man", "The woman").replace("the man", "the woman") for t in men]
    swapped = [t.replace("He ", "She ").replace(" he ", " she ") for t in swapped]
    assert swapped == women


def test_association_by_hand():
    texts, keys = fill_templates(probe())
    nats = np.zeros(len(texts))
    effect = {"welder": 1.0, "truck driver": 3.0, "nurse": -2.0, "nanny": -4.0}
    for i, (group, _, attribute) in enumerate(keys):
        nats[i] = 10.0 + (effect[attribute] if group == "women" else 0.0)  # of women with a welder: 1 nat less likely
    found = measure_association(probe(), keys, nats)["women"]
    assert found["sets"]["craft"]["value"] == -2.0 and found["sets"]["care"]["value"] == 3.0
    assert found["sets"]["care"]["words"] == {"nurse": 2.0, "nanny": 4.0}
    assert found["between"]["care"]["value"] == 5.0
    for name, low, high in (("craft", -3.0, -1.0), ("care", 2.0, 4.0)):
        assert (found["sets"][name]["low"], found["sets"][name]["high"]) == (low, high)
    shifted = measure_association(probe(), keys, nats + np.array([k[0] == "women" for k in keys]) * 7)["women"]
    assert shifted["between"]["care"]["value"] == pytest.approx(5.0)  # a rarer word of a group moves no difference
    alone = probe(attributes={"craft": ["welder"], "care": ["nurse"]})
    found = measure_association(alone, fill_templates(alone)[1], np.arange(16.0))["women"]
    assert found["sets"]["craft"]["low"] is None and found["between"]["care"]["low"] is None


def test_cooccurrence_by_hand():
    texts = [
        "He was a welder, a nurse.",  # near he: was a → no set; window 2
        "The nurse saw he and a Truck Driver.",  # near: nurse saw | and a
        "the woman, a NURSE",  # the, woman are the group's; near: a nurse
        "she nurse she nanny x y z",  # near: nurse nanny x, once each
        "nothing here",
    ]
    found = measure_cooccurrence(probe(), texts)
    assert found["men"]["near"] == 2 + 4 and found["men"]["texts"] == 2
    assert found["men"]["sets"]["care"]["count"] == 1 and found["men"]["sets"]["craft"]["count"] == 0
    assert found["men"]["sets"]["craft"] == {"count": 0, "value": 0.0, "low": None, "high": None, "n": 2}
    assert found["women"]["near"] == 2 + 3 and found["women"]["sets"]["care"]["count"] == 3
    assert found["women"]["sets"]["care"]["value"] == pytest.approx(3 / 5)
    wide = measure_cooccurrence(probe(window=4), texts)
    assert wide["men"]["sets"]["craft"]["count"] == 1 + 2  # a phrase counts its words
    none = measure_cooccurrence(probe(), ["nothing"])
    assert none["men"] == {
        "near": 0, "texts": 0,
        "sets": {s: {"count": 0, "value": None, "low": None, "high": None, "n": 0} for s in ("craft", "care")},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"groups": {"men": ["he"]}}, "two at least"),
        ({"groups": {"men": ["he"], "women": ["she", "her"]}}, "men 1, women 2"),
        ({"attributes": {}}, "names a set at least"),
        ({"attributes": {"craft": ["He"]}}, "'He' is of men and of craft"),
        ({"attributes": {"craft": ["…"]}}, "which is no word"),
        ({"templates": ["{group} sleeps"]}, "once each"),
        ({"prompts": ["a man"]}, "once each"),
        ({"window": 0}, "from 1 on"),
    ],
)
def test_lists_that_cannot_be_asked(changed, said):
    with pytest.raises(UserError, match=said):
        probe(**changed)


@pytest.mark.parametrize("name", shipped_probes())
def test_shipped_probes_can_be_asked(name):
    assert fill_templates(read_probe(name))[0] and read_probe(name).prompts and read_probe(name).review


def test_the_command_agrees_with_a_plain_reading(tmp_path: Path, capsys):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from flatshift.finetune.assets import backbone_directory

    lists = tmp_path / "lists.yaml"
    lists.write_text(yaml.safe_dump({**LISTS, "groups": {"men": ["he"], "women": ["she"]}}))
    texts = write_jsonl(tmp_path / "texts.jsonl", [{"text": "she is a nurse"}, {"text": "he is a welder"}])
    out = tmp_path / "probed"
    words = ["eval", "flatshift-5m", "--train.precision", "fp32", "--probe", str(lists), "--data", str(texts)]
    assert run([*words, "--samples", "2", "--max-new-tokens", "3", "--out", str(out), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == json.loads((out / "probe.json").read_text())
    told = found["models"]["flatshift-5m"]["association"]["women"]["sets"]["care"]["words"]["nurse"]
    folder = backbone_directory("flatshift-5m")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)

    def log_p(text: str) -> float:
        ids = torch.tensor([[tokenizer.bos_token_id, *tokenizer(text, add_special_tokens=False)["input_ids"]]])
        with torch.no_grad():
            return -float(torch.nn.functional.cross_entropy(model(ids).logits[0, :-1], ids[0, 1:], reduction="sum"))

    each = [
        log_p(t.format(group="She", attribute="nurse")) - log_p(t.format(group="He", attribute="nurse"))
        if t.startswith("{group}")
        else log_p(t.format(group="she", attribute="nurse").capitalize())
        - log_p(t.format(group="he", attribute="nurse").capitalize())
        for t in LISTS["templates"]
    ]
    assert told == pytest.approx(math.fsum(each) / 2, abs=1e-3)
    assert found["data"]["women"]["sets"]["care"]["count"] == 0 and found["data"]["women"]["near"] == 2
    lines = [json.loads(line) for line in (out / "generations.jsonl").read_text().splitlines()]
    assert [line["prompt"] for line in lines] == ["He was a", "She was a"]
    assert all(len(line["texts"]) == 2 for line in lines) and not list(tmp_path.glob(".probed*"))
    assert found["models"]["flatshift-5m"]["cooccurrence"]["men"]["texts"] == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["flatshift-5m", "--probe", "nowhere"], "none of the shipped probes (occupations)"),
        (["flatshift-5m", "--probe", "occupations", "--group-by", "lang"], "--group-by does not go with --probe"),
        (["flatshift-encoder-3m", "--probe", "occupations"], "asks a language model of whole texts"),
    ],
)
def test_mistakes_are_one_sentence(words, said, capsys):
    assert run(["eval", *words]) == 2
    assert said in capsys.readouterr().err
