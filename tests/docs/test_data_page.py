"""The rows and templates that the data page shows do what it says."""

from __future__ import annotations

import re
from pathlib import Path

from finetune.config import Classify, Completion
from finetune.data import encode, read_rows, required_columns
from tests.data_models import byte_tokenizer

PAGE = Path(__file__).resolve().parents[2] / "docs" / "data.md"


def test_the_rows_on_the_page_can_be_read_and_encoded(tmp_path):
    page = PAGE.read_text(encoding="utf-8")
    (block,) = re.findall(r"```jsonl\n(.*?)```", page, re.DOTALL)
    (tmp_path / "rows.jsonl").write_text(block, encoding="utf-8")
    prompt, completion = re.search(r'templates: `"(.*?)"` and `"(.*?)"`', page).groups()
    tokenizer = byte_tokenizer()
    for task in (Classify(), Completion(prompt=prompt.replace(r"\n", "\n"), completion=completion, score="rank")):
        rows = list(read_rows([str(tmp_path / "rows.jsonl")], required=required_columns(task)))
        encoded = encode(rows, task=task, tokenizer=tokenizer, max_length=256)
        assert len(encoded.examples) == 2 and encoded.label_names == ("INHIBITOR", "UPREGULATOR")
    shown = tokenizer.decode(encoded.examples[0].input_ids)
    assert shown == "<bos>The enzyme was inhibited by aspirin.\nLabel: INHIBITOR<eos>"
