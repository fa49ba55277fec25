"""Pretrain a small Llama-architecture decoder from scratch, as the shipped backbone was.

    python -m scripts.pretrain_backbone --data DIR --out DIR                     # the shipped size and token budget
    python -m scripts.pretrain_backbone --data DIR --out DIR --minutes 45        # as far as 45 minutes reach
    python -m scripts.pretrain_backbone --data DIR --out DIR --device cuda --hidden 384 --tokens 100e6

DIR holds `general-train-*.jsonl.xz` and `general-val.jsonl.xz` with a `text` per line. What is made: a byte-level BPE
tokenizer trained on the first training file, a decoder with tied embeddings in bf16 safetensors, and `card.json`. The
folder appears whole or not at all, and loads through `AutoModelForCausalLM` and `AutoTokenizer`.

With `--tokens` the learning rate follows a cosine over the token budget, and every draw comes from `--seed`: the same
machine, thread count and arguments give the same weights. With `--minutes` it follows the clock, which no seed can
reproduce; the shipped backbone was made that way (42 minutes, 14,761,984 tokens), so this script remakes its recipe
and its quality, not its bits.
"""

from __future__ import annotations

import argparse
import json
import lzma
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from finetune import atomic
from finetune.seeds import numpy_generator, torch_generator

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

PAD, BOS, EOS = 0, 1, 2
MAX_LENGTH = 1024
WARM_UP_STEPS = 150
FINAL_LR_SHARE = 0.05


@dataclass(frozen=True)
class Pretraining:
    """What is trained, and for how long. The defaults are the shipped backbone's."""

    hidden: int = 256
    layers: int = 6
    heads: int = 8
    kv_heads: int = 4
    vocabulary: int = 4096
    sequence: int = 256  # tokens per training window; windows may span documents, which <eos><bos> separates
    batch: int = 16
    lr: float = 2e-3
    seed: int = 0
    tokens: int = 14_761_984  # the budget; ignored when `minutes` is set
    minutes: float | None = None
    tokenizer_characters: int = 4000  # of each document, for training the tokenizer


def documents(folder: Path, pattern: str) -> Iterator[str]:
    """The texts of all .jsonl.xz files of `folder` that match, in name order."""
    files = sorted(folder.glob(pattern))
    if not files:
        raise SystemExit(f"{folder} has no {pattern}")
    for file in files:
        with lzma.open(file, "rt", encoding="utf-8") as lines:
            for line in lines:
                yield json.loads(line)["text"]


def train_tokenizer(texts: Iterator[str], vocabulary: int, characters: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE: any text round-trips, nothing is unknown."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=["<pad>", "<bos>", "<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator((text[:characters] for text in texts), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", model_max_length=MAX_LENGTH
    )


def token_stream(tokenizer: PreTrainedTokenizerFast, texts: Iterator[str]) -> tuple[np.ndarray, int]:
    """All documents as one int32 stream, each as `<bos> … <eos>`, and the number of UTF-8 bytes of their texts."""
    parts: list[np.ndarray] = []
    size = 0
    for text in texts:
        size += len(text.encode())
        ids = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
        parts.append(np.array([BOS, *ids, EOS], dtype=np.int32))
    return np.concatenate(parts), size


def build_model(config: Pretraining) -> LlamaForCausalLM:
    """A decoder whose initial weights depend on `config.seed` and the parameter's name alone."""
    from transformers import LlamaConfig, LlamaForCausalLM

    llama = LlamaConfig(
        vocab_size=config.vocabulary,
        hidden_size=config.hidden,
        intermediate_size=int(config.hidden * 8 / 3 / 32 + 0.5) * 32,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=True,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
    )
    with torch.random.fork_rng(devices=[]):  # the constructor draws from the global generator; ours replaces it below
        model = LlamaForCausalLM(llama)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                generator = torch_generator(config.seed, "pretrain", "init", name)
                parameter.normal_(0.0, llama.initializer_range, generator=generator)
    return model


def window(stream: np.ndarray, indices: np.ndarray, length: int) -> torch.Tensor:
    """Windows `indices` of the stream, (B, length + 1) int64: inputs are [:, :-1], labels [:, 1:]."""
    return torch.from_numpy(np.stack([stream[i * length : (i + 1) * length + 1] for i in indices]).astype(np.int64))


@torch.no_grad()
def stream_loss(
    model: LlamaForCausalLM, stream: np.ndarray, *, length: int, batch: int, device: str, autocast: bool
) -> float:
    """Mean nats per token over consecutive windows of the stream, each with no context but its own.

    The last, shorter window is left out.
    """
    model.eval()
    total, count = 0.0, 0
    windows = (len(stream) - 1) // length
    for start in range(0, windows, batch):
        ids = window(stream, np.arange(start, min(windows, start + batch)), length).to(device)
        with torch.autocast(torch.device(device).type, torch.bfloat16, enabled=autocast):
            logits = model(ids[:, :-1]).logits
        total += cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten(), reduction="sum").item()
        count += ids[:, 1:].numel()
    model.train()
    return total / count


def learning_rate(config: Pretraining, step: int, progress: float) -> float:
    """Linear over the first steps, then a cosine down to `FINAL_LR_SHARE`; `progress` runs from 0 to 1."""
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    return config.lr * min(1.0, (step + 1) / WARM_UP_STEPS) * (FINAL_LR_SHARE + (1 - FINAL_LR_SHARE) * cosine)


def train(
    model: LlamaForCausalLM,
    stream: np.ndarray,
    config: Pretraining,
    *,
    device: str,
    log: Callable[[str], None] = print,
) -> tuple[int, int]:
    """Train in place; returns (steps, tokens seen). Windows are drawn without replacement within an epoch."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    windows = (len(stream) - 1) // config.sequence
    if windows < config.batch:
        raise SystemExit(f"{len(stream)} training tokens are less than one batch of {config.batch} × {config.sequence}")
    per_epoch = windows // config.batch
    per_step = config.batch * config.sequence
    order = np.empty(0, dtype=np.int64)
    start = time.perf_counter()
    step = 0
    while True:
        elapsed = time.perf_counter() - start
        progress = step * per_step / config.tokens if config.minutes is None else elapsed / (60 * config.minutes)
        if progress >= 1:
            return step, step * per_step
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config, step, progress)
        epoch, position = divmod(step, per_epoch)
        if position == 0:
            order = numpy_generator(config.seed, "pretrain", "order", epoch).permutation(windows)
        chosen = order[position * config.batch : (position + 1) * config.batch]
        ids = window(stream, chosen, config.sequence).to(device)
        with torch.autocast(torch.device(device).type, torch.bfloat16):
            logits = model(ids[:, :-1]).logits
        loss = cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        if step % 100 == 0:
            rate = step * per_step / (time.perf_counter() - start)
            log(f"step {step}  {step * per_step / 1e6:.1f} M tokens  loss {loss.item():.3f}  {rate:,.0f} tokens/s")


def pretrain(data: Path, out: Path, config: Pretraining, *, device: str) -> dict[str, object]:
    """Make tokenizer, model and card in `out`; returns the card."""
    tokenizer = train_tokenizer(
        documents(data, "general-train-0.jsonl.xz"), config.vocabulary, config.tokenizer_characters
    )
    stream, _ = token_stream(tokenizer, documents(data, "general-train-*.jsonl.xz"))
    held_out, held_out_bytes = token_stream(tokenizer, documents(data, "general-val.jsonl.xz"))
    model: Any = build_model(config)
    model.to(device)
    parameters = model.num_parameters()
    print(f"{parameters:,} parameters; {len(stream):,} training and {len(held_out):,} validation tokens")
    start = time.perf_counter()
    steps, seen = train(model, stream, config, device=device)
    minutes = (time.perf_counter() - start) / 60
    nats = stream_loss(model, held_out, length=config.sequence, batch=config.batch, device=device, autocast=True)
    card: dict[str, object] = {
        "parameters": parameters,
        "tokens_seen": seen,
        "steps": steps,
        "minutes": round(minutes, 2),
        "val_nats_per_token": nats,
        "val_bits_per_byte": nats * (len(held_out) - 1) / math.log(2) / held_out_bytes,
        "train_tokens": len(stream),
        "args": asdict(config),
    }
    with atomic.replacing_directory(out) as folder:
        tokenizer.save_pretrained(folder)
        model.to(torch.bfloat16).save_pretrained(folder)
        atomic.write_json(folder / "card.json", card)
    return card


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--tokens", type=lambda text: int(float(text)), default=Pretraining.tokens)
    length.add_argument("--minutes", type=float, default=None)
    for name in ("hidden", "layers", "heads", "kv_heads", "vocabulary", "sequence", "batch", "seed"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(Pretraining, name))
    parser.add_argument("--lr", type=float, default=Pretraining.lr)
    options = vars(parser.parse_args())
    data, out, device = options.pop("data"), options.pop("out"), options.pop("device")
    if out.exists():
        parser.error(f"--out {out} exists already; name a new folder")
    print(json.dumps(pretrain(data, out, Pretraining(**options), device=device), indent=2))


if __name__ == "__main__":
    main()
