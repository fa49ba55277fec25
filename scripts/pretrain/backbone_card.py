"""Measure the shipped backbone against n-gram baselines and write its model card.

    python -m scripts.pretrain.backbone_card --data DIR [--backbone finetune/backbones/flatshift-5m]

DIR holds the pretraining text (`general-train-*.jsonl.xz`, `general-val.jsonl.xz`). Writes `README.md` and `card.json`
into the backbone's folder; every number in the card comes from this script, except those about the training run itself,
which `card.json` already holds. Takes minutes on one core.
"""

from __future__ import annotations

import argparse
import json
import lzma
import math
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from flatshift.finetune import assets, atomic
from flatshift.finetune.seeds import numpy_generator
from scripts.pretrain.backbone import EOS, read_documents, stream_loss, token_stream
from scripts.pretrain.ngram import KneserNey, unigram_log_probabilities

TARGETS = ("scicite", "banking", "snli")
PASSAGES_PER_DOMAIN = 100
COMMAND = (
    *("hidden", "layers", "heads", "kv_heads", "vocabulary", "sequence", "batch", "lr", "seed"),
    *("minutes", "epochs", "judge_every"),
)
"""Settings shown in the card's command."""


def same_budget_name(order: int) -> str:
    """Return the name of the n-gram model trained on as many tokens as the backbone."""
    return f"{order}-gram, as many tokens as the backbone saw"


def ngram_orders(vocabulary: int) -> tuple[int, int]:
    """Return the orders of the baseline n-grams: 3, and 5 or the highest whose keys fit 63 bits."""
    return 3, next(order for order in (5, 4) if vocabulary**order < 2**63)


def bits_per_byte(nats: float, size: int) -> float:
    """Return bits per byte of a text of `size` bytes whose tokens cost `nats` in total."""
    return nats / math.log(2) / size


@torch.no_grad()
def text_nats(model: Any, tokenizer: Any, texts: list[str], batch: int = 32) -> float:
    """Return the summed nats of the texts, each encoded alone as `<bos> text <eos>` (all but <bos> is predicted)."""
    model.eval()
    total = 0.0
    streams = sorted((torch.from_numpy(token_stream(tokenizer, iter([text]))[0]).long() for text in texts), key=len)
    for start in range(0, len(streams), batch):
        group = streams[start : start + batch]
        ids = torch.nn.utils.rnn.pad_sequence(group, batch_first=True, padding_value=EOS)
        lengths = torch.tensor([len(stream) for stream in group])
        real = torch.arange(ids.shape[1]) < lengths[:, None]
        # Padding is on the right, so a causal model needs no mask; predictions there are not counted.
        logits = model(ids[:, :-1]).logits
        nats = cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none").view(ids.shape[0], -1)
        total += nats[real[:, 1:]].double().sum().item()
    return total


def ngram_nats(model: KneserNey, tokenizer: Any, texts: list[str]) -> float:
    """Return the summed nats of the same tokens under an n-gram model, which also sees each text alone."""
    return -sum(float(model.log_probabilities(token_stream(tokenizer, iter([text]))[0]).sum()) for text in texts)


def xz_bits_per_byte(texts: list[str]) -> float:
    """Return bits per byte of all texts together under a general-purpose compressor, without training data."""
    data = "\n".join(texts).encode()
    return 8 * len(lzma.compress(data, preset=9 | lzma.PRESET_EXTREME)) / len(data)


def shipped_texts(seed: int) -> dict[str, list[str]]:
    """Return shipped texts of other kinds: the targets' test splits, and some passages of every domain of the pool."""
    groups: dict[str, list[str]] = {}
    for name in TARGETS:
        with lzma.open(assets.sample_path(f"{name}/test"), "rt", encoding="utf-8") as lines:
            rows = [json.loads(line) for line in lines]
        groups[f"{name}/test"] = [row[key] for row in rows for key in ("text", "text2") if key in row]
    with lzma.open(assets.pool_tags_path(), "rt", encoding="utf-8") as lines:
        domains = [line.split("\t")[1] for line in lines]
    by_domain: dict[str, list[str]] = defaultdict(list)
    with lzma.open(assets.sample_path("pool"), "rt", encoding="utf-8") as lines:
        for line, domain in zip(lines, domains, strict=True):
            by_domain[domain].append(json.loads(line)["text"])
    for domain in sorted(by_domain):
        passages = by_domain[domain]
        chosen = numpy_generator(seed, "card", domain).permutation(len(passages))[:PASSAGES_PER_DOMAIN]
        groups[f"pool: {domain}"] = [passages[int(index)] for index in chosen]
    return groups


def measure_backbone(folder: Path, data: Path) -> dict[str, Any]:
    """Measure all numbers of the card."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    card = json.loads((folder / "card.json").read_text(encoding="utf-8"))
    length = card["args"].get("seq") or card["args"]["sequence"]

    train, train_bytes = token_stream(tokenizer, read_documents(data, "general-train-*.jsonl.xz"))
    held_out, size = token_stream(tokenizer, read_documents(data, "general-val.jsonl.xz"))
    predicted = len(held_out) - 1
    # As in `stream_loss`, only whole windows, so that every row of the table scores the same tokens.
    scored = held_out[: predicted // length * length + 1]

    def row(nats_per_token: float) -> dict[str, float]:
        return {
            "nats_per_token": round(nats_per_token, 4),
            "bits_per_byte": round(bits_per_byte(nats_per_token * predicted, size), 4),
        }

    nats = stream_loss(model, held_out, length=length, batch=16, device="cpu", autocast=False)
    general: dict[str, dict[str, float]] = {"backbone": row(nats)}
    general["unigram"] = row(-float(unigram_log_probabilities(train, scored, tokenizer.vocab_size).mean()))
    # A second model of the highest order is trained on as many tokens as the backbone.
    budget = train[: card["tokens_seen"]]
    orders = ngram_orders(tokenizer.vocab_size)
    ngrams: dict[str, KneserNey] = {}
    for order in orders:
        ngrams[f"{order}-gram"] = KneserNey(order, tokenizer.vocab_size).fit(train)
        general[f"{order}-gram"] = row(-float(ngrams[f"{order}-gram"].log_probabilities(scored).mean()))
    if len(budget) < len(train):
        fewer = KneserNey(max(orders), tokenizer.vocab_size).fit(budget)
        general[same_budget_name(max(orders))] = row(-float(fewer.log_probabilities(scored).mean()))
        del fewer
    with lzma.open(data / "general-val.jsonl.xz", "rt", encoding="utf-8") as lines:
        held_out_rows = [json.loads(line) for line in lines]
    general["uniform"] = row(math.log(tokenizer.vocab_size))

    best = ngrams[f"{max(orders)}-gram"]
    elsewhere: dict[str, dict[str, float]] = {}
    for name, group in shipped_texts(card["args"]["seed"]).items():
        group_bytes = sum(len(text.encode()) for text in group)
        elsewhere[name] = {
            "backbone": round(bits_per_byte(text_nats(model, tokenizer, group), group_bytes), 3),
            f"{max(orders)}-gram": round(bits_per_byte(ngram_nats(best, tokenizer, group), group_bytes), 3),
            "bytes_per_token": round(group_bytes / len(token_stream(tokenizer, iter(group))[0]), 2),
        }
        print(name, elsewhere[name], flush=True)
    card["baselines"] = {
        "validation": general,
        "validation_bytes": size,
        "validation_tokens": len(held_out),
        "validation_documents": len(held_out_rows),
        "validation_wikipedia_documents": sum(row["src"].startswith("wiki") for row in held_out_rows),
        "xz_bits_per_byte": round(xz_bits_per_byte([row["text"] for row in held_out_rows]), 4),
        "ngram_train_tokens": len(train),
        "ngram_train_bytes": train_bytes,
        "bits_per_byte_elsewhere": elsewhere,
    }
    return card


def markdown_table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """Return a Markdown table."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [head, ("---",) * len(head), *rows])


def render_card(card: dict[str, Any], config: dict[str, Any], name: str = "flatshift-5m") -> str:
    """Return the model card of the backbone `name`, Markdown with YAML front matter."""
    measured = card["baselines"]
    general, elsewhere = measured["validation"], measured["bits_per_byte_elsewhere"]
    orders = ngram_orders(config["vocab_size"])
    top, all_read = f"{max(orders)}-gram", measured["ngram_train_tokens"]
    window = card["args"].get("seq") or card["args"]["sequence"]
    parameters, seen, all_tokens = card["parameters"], card["tokens_seen"], card["train_tokens"]
    megabytes, more = card.get("train_bytes", measured["ngram_train_bytes"]) / 1e6, describe_passages(card)
    longest = config["max_position_embeddings"]
    beyond = f"accepts {longest:,}, but positions beyond {window} are untrained" if window < longest else "no more"
    names = {
        "backbone": f"**{name}** (this model)",
        "unigram": "unigram, add-one",
        **{f"{k}-gram": f"{k}-gram, Kneser–Ney, on all {all_read / 1e6:.1f} M training tokens" for k in orders},
        same_budget_name(max(orders)): f"{top}, Kneser–Ney, on {seen / 1e6:.2f} M tokens, as many as this model saw",
        "uniform": "uniform over the vocabulary",
    }
    against = markdown_table(
        ("model", "nats per token", "bits per byte"),
        (
            (names[which], f"{row['nats_per_token']:.3f}", f"{row['bits_per_byte']:.3f}")
            for which, row in sorted(general.items(), key=lambda item: item[1]["bits_per_byte"])
        ),
    )
    gap = markdown_table(
        ("text", name, top, "bytes per token"),
        (
            (text, f"{row['backbone']:.2f}", f"{row[top]:.2f}", f"{row['bytes_per_token']:.2f}")
            for text, row in elsewhere.items()
        ),
    )
    behind = [text for text, row in elsewhere.items() if row["backbone"] > row[top]]
    what = markdown_table(
        ("", ""),
        (
            (
                "architecture",
                f"Llama: {config['num_hidden_layers']} layers, width {config['hidden_size']}, "
                f"{config['num_attention_heads']} heads ({config['num_key_value_heads']} key-value), "
                f"SwiGLU {config['intermediate_size']}, RoPE, RMSNorm, tied embeddings",
            ),
            ("parameters", f"{parameters:,}, bf16 safetensors"),
            ("tokenizer", f"own byte-level BPE, {config['vocab_size']:,} entries; any text round-trips"),
            (
                "context",
                f"trained on windows of {window} tokens; {beyond}",
            ),
            ("tokens seen", f"{seen:,} in {card['steps']:,} steps: {format_epochs(seen / all_tokens)}"),
            ("made in", f"{card['minutes']:.0f} minutes on {training_device(card)}, bf16 autocast over fp32 weights"),
        ),
    )
    training = describe_training_amount(card)
    return f"""---
license: cc-by-sa-4.0
language: en
library_name: transformers
pipeline_tag: text-generation
tags: [llama, causal-lm, {"undertrained" if seen < 20 * parameters else "small"}, warm-up]
---

# {name}

A {parameters / 1e6:.1f} M-parameter decoder that ships inside Flatshift, so that every journey works on a laptop
without a network. {training} It is there to be adapted, measured and compared, not to be talked to.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer
from flatshift.finetune.assets import backbone_directory

model = AutoModelForCausalLM.from_pretrained(backbone_directory("{name}"))
tokenizer = AutoTokenizer.from_pretrained(backbone_directory("{name}"))
```

## What it is

{what}

The tokenizer does not add `<bos>` or `<eos>` by itself; in pretraining every document stood as `<bos> … <eos>`.

## Data and licence

{all_tokens:,} tokens ({megabytes:.1f} MB of text): English Wikipedia articles of 2015
(CC BY-SA 3.0, Wikipedia contributors) and English novels published between 1839 and 1930 (public domain in the United
States){more}. **The model was trained on CC BY-SA text**; its weights are offered under CC BY-SA 4.0. Attributions:
`NOTICE`. No text was filtered for content.

## How good it is

Validation: {measured["validation_documents"]} held-out documents of the same kinds, of which
{measured["validation_wikipedia_documents"]} are Wikipedia articles and the rest parts of novels whose other parts
training saw; {measured["validation_bytes"]:,} bytes, {measured["validation_tokens"]:,} tokens. All rows score the same
tokens, end-of-document included; the backbone computes in fp32 and sees no context but its own window of {window}
tokens, the n-grams see across windows.

{against}

As an anchor that needs no training: `xz -9e` takes {measured["xz_bits_per_byte"]:.3f} bits per byte of the same text.

## Where it is weak: other kinds of text

Bits per byte on texts that ship as samples, each text on its own (`<bos> text <eos>`). Short texts cost more under any
model, so compare rows with care. `pool:` rows are {PASSAGES_PER_DOMAIN} passages of each domain of the shipped pool.
This gap is what a warm-up on selected data is meant to close. The {top} is ahead on: {", ".join(behind) or "none"}.

{gap}

## Use and limits

For: trying Flatshift, tests, studies of selection and adapters that fit a laptop, teaching. Not for: generating text
that anybody relies on, languages other than English, code, facts, or claims about how large models behave. It has
read Victorian novels and an encyclopaedia, and repeats their views of people without understanding either.

## How it was made

{describe_command(card)}

```
python -m scripts.pretrain.backbone_card --data DIR
```

and are kept in `card.json`.
"""


def format_epochs(count: float) -> str:
    """Format a number of epochs."""
    return f"{100 * count:.0f} % of one epoch" if count < 1 else f"{count:.1f} epochs"


def training_device(card: dict[str, Any]) -> str:
    """Return the device of the training run; cards without a device are from the first backbone."""
    device = card.get("device", "two CPU cores")
    return "CPU cores" if device == "cpu" else device


def describe_passages(card: dict[str, Any]) -> str:
    """Return the clause on training text other than articles and novels."""
    if not card.get("passages"):
        return ""
    return (
        ", and the openly licensed passages (CC BY-SA, CC BY, CC0, PSF-2.0, public domain) of the pool that "
        "`sample:pool`\nis drawn from; no text that ships as a sample is among them, and the n-grams below have not "
        "read them"
    )


def describe_command(card: dict[str, Any]) -> str:
    """Return the command and its reproducibility, for the card's last chapter."""
    if "device" in card:
        chosen = {name: value for name, value in card["args"].items() if value is not None and name in COMMAND}
        flags = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in chosen.items())
        more = " --passages … --tags …" if card.get("passages") else ""
        by = "\nThe learning rate followed the clock, which no seed can reproduce." if chosen.get("minutes") else ""
        command = f"python -m scripts.pretrain.backbone --data DIR --out DIR{more} {flags}"
        return f"```\n{command}\n```\n{by}\nThe numbers above come from"
    return f"""```
python -m scripts.pretrain.backbone --data DIR --out DIR
```

repeats the recipe with a fixed token budget. The shipped weights come from the first version of that script, whose
learning rate followed the clock for {card["minutes"]:.0f} minutes: what the script makes now has the same tokenizer,
byte for byte, and the same size and budget, but other weights. The numbers above come from"""


def describe_training_amount(card: dict[str, Any]) -> str:
    """Describe the amount of text per parameter, for the card's first paragraph."""
    per = card["tokens_seen"] / card["parameters"]
    if per < 20:
        return (
            f"It is a real pretrained model, and a weak one: **undertrained**, at {per:.1f} training\n"
            "tokens per parameter where about 20 are usual."
        )
    return (
        f"It is a real pretrained model, and a small one: {per:.0f} training\n"
        f"tokens per parameter, {card['train_tokens'] / card['parameters']:.1f} of them different."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--backbone", type=Path, default=assets.backbone_directory("flatshift-5m"))
    options = parser.parse_args()
    card = measure_backbone(options.backbone, options.data)
    config = json.loads((options.backbone / "config.json").read_text(encoding="utf-8"))
    atomic.write_json(options.backbone / "card.json", card)
    atomic.write_text(options.backbone / "README.md", render_card(card, config, options.backbone.name))
    print(json.dumps(card["baselines"]["validation"], indent=2))


if __name__ == "__main__":
    main()
