"""The rows and templates that the data page shows do what it says."""

from __future__ import annotations

import re
from pathlib import Path

from flatshift.finetune.data.encoding import encode
from flatshift.finetune.data.rows import read_rows
from flatshift.finetune.tasks import Chat, Classify, Completion
from tests.support.chat_models import chat_tokenizer, unmarked
from tests.support.data_models import byte_tokenizer

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_the_rows_on_the_page_can_be_read_and_encoded(tmp_path):
    page, supervised = ((DOCS / name).read_text(encoding="utf-8") for name in ("data.md", "supervised.md"))
    (block,) = re.findall(r"```jsonl\n(.*?)```", page, re.DOTALL)
    (tmp_path / "rows.jsonl").write_text(block, encoding="utf-8")
    prompt, completion = re.search(r'templates: `"(.*?)"` and `"(.*?)"`', supervised).groups()
    tokenizer = byte_tokenizer()
    for task in (Classify(), Completion(prompt=prompt.replace(r"\n", "\n"), completion=completion, score="rank")):
        rows = list(read_rows([str(tmp_path / "rows.jsonl")], required=task.columns()))
        encoded = encode(rows, task=task, tokenizer=tokenizer, max_length=256)
        assert len(encoded.examples) == 2 and encoded.label_names == ("INHIBITOR", "UPREGULATOR")
    shown = tokenizer.decode(encoded.examples[0].input_ids)
    assert shown == "<bos>The enzyme was inhibited by aspirin.\nLabel: INHIBITOR<eos>"


def test_the_conversations_on_the_page_are_encoded_as_it_says(tmp_path):
    page = (DOCS / "supervised.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```jsonl\n(.*?)```", page, re.DOTALL)
    (tmp_path / "rows.jsonl").write_text(block, encoding="utf-8")
    rows = list(read_rows([str(tmp_path / "rows.jsonl")], required=Chat().columns()))
    tokenizer = chat_tokenizer("qwen2_5")
    encoded = encode(rows, task=Chat(), tokenizer=tokenizer, max_length=4096)
    (shown,) = re.findall(r"```\n(<\|im_start\|>user.*?)```", page, re.DOTALL)
    text, ((start, end),) = unmarked(shown)
    first, second = encoded.examples
    assert tokenizer.decode(first.input_ids).endswith(text)
    assert tokenizer.decode([label for label in first.labels if label != -100]) == text[start:end]
    assert tokenizer.decode([label for label in second.labels if label != -100]) == (
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn"}}\n</tool_call><|im_end|>Sunny.<|im_end|>'
    )
