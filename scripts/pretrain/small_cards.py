"""Write the model cards of the small encoder and encoder-decoder from the measurements of their pretraining.

    python -m scripts.pretrain.small_cards finetune/backbones/flatshift-encoder-3m finetune/backbones/flatshift-t5-3m

Every number comes from the `card.json` that `scripts.pretrain.small` wrote into the folder, or from config.json.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from flatshift.finetune import atomic

_DATA = """## Data and licence

The first {train_tokens:,} tokens ({megabytes:.1f} MB of text) of what flatshift-5m was trained on: English Wikipedia
articles of 2015 (CC BY-SA 3.0, Wikipedia contributors) and English novels published between 1839 and 1930 (public
domain in the United States), each token seen {epochs:.2f} times{also}. **The model was trained on CC BY-SA text**;
its weights are offered under CC BY-SA 4.0. Attributions: `NOTICE`. No text was filtered for content.
"""
_ALSO = ", besides the 14.8 M that its\nblocks saw as a decoder"
_LIMITS = """## Use and limits

For: running the recipe `{recipe}` without a network, tests, teaching. Not for: any result about {what} in general,
text that anybody relies on, languages other than English, code. It has read Victorian novels and an encyclopaedia, and
repeats their views of people without understanding either.

## How it was made

```
python -m scripts.pretrain.small {kind} --data DIR --out DIR
python -m scripts.pretrain.small_cards DIR
```
"""


def render_card(folder: Path) -> str:
    """Return the card of the model in `folder`."""
    card = json.loads((folder / "card.json").read_text(encoding="utf-8"))
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return (_encoder_card if card["args"]["kind"] == "encoder" else _seq2seq_card)(folder.name, card, config)


def _encoder_card(name: str, card: dict[str, Any], config: dict[str, Any]) -> str:
    blocks = _format_blocks(card)
    shape = (
        f"{config['num_hidden_layers']} layers, width {config['hidden_size']}, {config['num_attention_heads']} heads "
        f"({config['num_key_value_heads']} key-value), SwiGLU {config['intermediate_size']}"
    )
    millions = _format_millions(card)
    return f"""---
license: cc-by-sa-4.0
language: en
library_name: transformers
pipeline_tag: fill-mask
tags: [eurobert, masked-lm, undertrained, warm-up]
---

# {name}

A {millions} M-parameter encoder with a masked-LM head that lies in a clone of Flatshift (not in its wheel), so that the
warm-up of encoders (the recipe `encoder-warmup`) runs on a laptop without a network. **Tiny and undertrained**: take
a real encoder (BERT, RoBERTa, MiniLM) for anything but trying things out.

```python
from transformers import AutoModelForMaskedLM, AutoTokenizer
from flatshift.finetune.assets import backbone_directory

model = AutoModelForMaskedLM.from_pretrained(backbone_directory("{name}"))
tokenizer = AutoTokenizer.from_pretrained(backbone_directory("{name}"))
```

## What it is

|  |  |
| --- | --- |
| architecture | EuroBERT, that is Llama without the causal mask: {shape}, RoPE, RMSNorm, tied embeddings |
| parameters | {card["parameters"]:,}, bf16 safetensors |
| began as | embedding, blocks {blocks} and last norm of flatshift-5m |
| tokenizer | flatshift-5m's 4,096 entries and `<mask>`; texts stand as `<bos> … <eos>`, pairs `<bos> … <eos> … <eos>` |
| classifiers | pool by the mean (`classifier_pooling` in config.json) |
| context | trained on windows of {card["args"]["sequence"]} tokens |
| tokens seen | {card["tokens_seen"]:,} in {card["steps"]:,} steps, of which 15 % were to be told |
| made in | {card["cpu_minutes"]:.1f} CPU-minutes on one thread, bf16 autocast over fp32 weights |

{_data_section(card, _ALSO)}
## How good it is

{_metrics_table(card, "the hidden tokens of 90 held-out documents, windows as in training under one fixed draw")}
{_LIMITS.format(recipe="encoder-warmup", what="encoders", kind="encoder")}"""


def _seq2seq_card(name: str, card: dict[str, Any], config: dict[str, Any]) -> str:
    blocks = _format_blocks(card)
    shape = (
        f"{config['num_layers']} + {config['num_decoder_layers']} layers, width {config['d_model']}, "
        f"{config['num_heads']} heads, SwiGLU {config['d_ff']}"
    )
    what = (
        "the cut-out text of 90 held-out documents, windows as in training under one fixed draw, each token given "
        "those before it; sentinels and `<eos>` do not count"
    )
    millions = _format_millions(card)
    return f"""---
license: cc-by-sa-4.0
language: en
library_name: transformers
pipeline_tag: text2text-generation
tags: [t5, span-corruption, undertrained]
---

# {name}

A {millions} M-parameter encoder-decoder of the T5 architecture that lies in a clone of Flatshift (not in its wheel), so
that the recipe `seq2seq` runs on a laptop without a network. **Tiny and very undertrained**: it can be
fine-tuned to write labels, not sentences. Take a real T5 for anything but trying things out.

```python
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
from flatshift.finetune.assets import backbone_directory

model = AutoModelForSeq2SeqLM.from_pretrained(backbone_directory("{name}"))
tokenizer = AutoTokenizer.from_pretrained(backbone_directory("{name}"))
```

## What it is

|  |  |
| --- | --- |
| architecture | T5: {shape}, relative positions, tied embeddings |
| parameters | {card["parameters"]:,}, bf16 safetensors |
| tokenizer | flatshift-5m's 4,096 entries and the sentinels `<extra_id_0>` to `<extra_id_31>` (T5 has 100) |
| form | a text is closed by `<eos>`; the decoder starts with `<pad>` |
| began as | embedding, blocks {blocks} (one a side) and last norm of flatshift-5m; cross attention at random |
| context | trained on windows of {card["args"]["sequence"]} tokens, half of them cut out in spans of about eight |
| tokens seen | {card["tokens_seen"]:,} in {card["steps"]:,} steps |
| made in | {card["cpu_minutes"]:.1f} CPU-minutes on one thread, bf16 autocast over fp32 weights |

{_data_section(card, _ALSO)}
## How good it is

{_metrics_table(card, what)}
{_LIMITS.format(recipe="seq2seq", what="encoder-decoders", kind="seq2seq")}"""


def _format_blocks(card: dict[str, Any]) -> str:
    return " and ".join(str(block + 1) for block in card["args"]["blocks"])


def _format_millions(card: dict[str, Any]) -> str:
    return f"{card['parameters'] / 1e6:.1f}"


def _data_section(card: dict[str, Any], also: str) -> str:
    return _DATA.format(
        train_tokens=card["train_tokens"],
        megabytes=card["train_bytes"] / 1e6,
        epochs=card["tokens_seen"] / card["train_tokens"],
        also=also,
    )


def _metrics_table(card: dict[str, Any], what: str) -> str:
    result = card["validation"]
    return f"""On {what} ({result["tokens"]:,.0f} tokens):

| model | nats per token | told right |
| --- | --- | --- |
| **this model** | {result["nats_per_token"]:.3f} | {100 * result["top_1"]:.1f} % |
| unigram, add-one | {result["unigram_nats_per_token"]:.3f} | |
| uniform over the vocabulary | {card["uniform_nats_per_token"]:.3f} | |
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+")
    for folder in parser.parse_args().folders:
        atomic.write_text(folder / "README.md", render_card(folder))
        print(folder / "README.md")


if __name__ == "__main__":
    main()
