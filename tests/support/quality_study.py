"""A miniature study of selectors for tests: shipped passages and targets, a tiny random backbone, few steps."""

from __future__ import annotations

import itertools
import json
import lzma
from pathlib import Path

from flatshift.finetune.assets import pool_tags_path, sample_path
from tests.support.data_models import byte_tokenizer
from tests.support.finetune_models import save_backbone

POOL = 400


def make_study(directory: Path, *, seeds: int = 2) -> Path:
    """A recipe file in `directory`, with backbone, pool, tags and targets beside it."""
    tokenizer = byte_tokenizer()
    save_backbone("gpt2", directory / "tiny", vocab_size=max(len(tokenizer), 64))
    tokenizer.save_pretrained(directory / "tiny")
    with (directory / "pool.jsonl").open("w", encoding="utf-8") as handle:
        handle.writelines(_lines(sample_path("pool"), POOL))
    with (directory / "tags.tsv").open("w", encoding="utf-8") as handle:
        handle.writelines(_lines(pool_tags_path(), POOL))
    for name in ("scicite", "banking"):
        with (directory / f"{name}.jsonl").open("w", encoding="utf-8") as handle:
            for split, count in (("train", 80), ("test", 40)):
                for line in _lines(sample_path(f"{name}/{split}"), count):
                    handle.write(json.dumps({**json.loads(line), "split": split}) + "\n")
    recipe = directory / "mini.yaml"
    recipe.write_text(
        f"""
backbone: {directory / "tiny"}
task: classify
adapter: {{rank: 2}}
train: {{steps: 2, batch_size: 4, max_length: 16, max_cut: 1, save_every: 0, precision: fp32}}
warmup: {{steps: 2, batch_size: 2}}
select:
  embedder: {{kind: tfidf, dim: 8}}
  hygiene: {{exact: true, length: {{min_words: 3}}}}
quality:
  pool: pool.jsonl
  tags: tags.tsv
  seeds: {seeds}
  budgets: [10, 30]
  primary_budget: 30
  fine_tune_budgets: [30]
  packed: 24
  judged_length: 16
  lr: [1e-3, 1e-2]
  rounds: 0
  fine_tune_lr: [1e-3, 1e-2]
  targets:
    science: {{file: scicite.jsonl, domains: [arxiv_qbio, medical_qa], texts: 20, labels: 12, validation: 10, test: 12}}
    bank: {{file: banking.jsonl, domains: [dialogue], texts: 20, labels: 12, validation: 10, test: 12, budgets: [30]}}
  arms:
    random: {{set: {{select.method.kind: random}}}}
    gotd: {{set: {{select.method.kind: gotd}}, note: "<b>transport</b>"}}
    matched: {{source: matched, like: gotd}}
    by-form: {{source: form}}
    all: {{source: pool}}
    target-text: {{source: target}}
    no-warm-up: {{source: none}}
""",
        encoding="utf-8",
    )
    return recipe


def _lines(path: Path, count: int) -> list[str]:
    with lzma.open(path, "rt", encoding="utf-8") as lines:
        return list(itertools.islice(lines, count))
