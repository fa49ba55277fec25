"""A miniature comparison for tests: tiny random backbones, tasks that a word gives away, two methods."""

from __future__ import annotations

import json
import random
from pathlib import Path

from tests.support.data_models import bert_tokenizer, byte_tokenizer
from tests.support.finetune_models import save_backbone

WORDS = ["the", "cat", "sat", "on", "mat", "and", "dog", "log", "text", "question", "answer"]


def make_study(directory: Path, *, seeds: int = 3) -> Path:
    """A recipe file in `directory`, with its backbones and rows beside it."""
    for kind, tokenizer in (("bert", bert_tokenizer()), ("gpt2", byte_tokenizer())):
        save_backbone(kind, directory / kind, vocab_size=max(len(tokenizer), 64))
        tokenizer.save_pretrained(directory / kind)
    classes = ["good", "bad", "neutral"]
    _rows(directory / "easy.jsonl", classes[:2], words=1)
    _rows(directory / "hard.jsonl", classes, words=4)
    with (directory / "answers.jsonl").open("w", encoding="utf-8") as handle:
        for i in range(60):
            row = {"question": f"{WORDS[i % 11]} on", "answer": WORDS[i % 5], "split": "train" if i < 45 else "test"}
            handle.write(json.dumps(row) + "\n")
    recipe = directory / "mini.yaml"
    recipe.write_text(
        f"""
backbone: {directory / "bert"}
task: classify
data: {{checks: {{copies: warn}}}}
adapter: {{rank: 2}}
train: {{steps: 6, batch_size: 8, max_length: 16, max_cut: 1, save_every: 0, precision: fp32}}
comparison:
  seeds: {seeds}
  exploratory_seeds: 2
  lr: [1e-2, 3e-2]
  rounds: 2
  sharpness_seeds: 1
  equal_time_above: 1
  resamples: 200
  tasks:
    easy: {{file: easy.jsonl, train: 40, validation: 20, test: 30}}
    answers:
      file: answers.jsonl
      train: 30
      validation: 10
      test: 15
      set:
        backbone: {directory / "gpt2"}
        task.kind: completion
        task.prompt: "{{question}}"
        task.completion: "{{answer}}"
  methods:
    plain: {{}}
    ggpo: {{confirmatory: true, set: {{regularizer.kind: ggpo}}, note: "<b>noise</b>"}}
""",
        encoding="utf-8",
    )
    return recipe


def _rows(path: Path, classes: list[str], *, words: int) -> None:
    draw = random.Random(0)
    with path.open("w", encoding="utf-8") as handle:
        for i in range(110):
            label = classes[draw.randrange(len(classes))]
            text = " ".join([*draw.choices(WORDS, k=words), label])
            handle.write(json.dumps({"text": text, "label": label, "split": "train" if i < 75 else "test"}) + "\n")
