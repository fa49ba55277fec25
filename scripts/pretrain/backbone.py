"""Pretrain a small Llama-architecture decoder from scratch, as the shipped backbone was.

    python -m scripts.pretrain.backbone --data DIR --out DIR                     # the shipped size and token budget
    python -m scripts.pretrain.backbone --data DIR --out DIR --minutes 45        # as far as 45 minutes reach
    python -m scripts.pretrain.backbone --data DIR --out DIR --device cuda \\
     --passages POOL.jsonl.xz --tags TAGS.tsv.xz --hidden 384 --layers 10 --heads 6 --kv-heads 3 \\
     --vocabulary 8192 --sequence 1024 --batch 96 --lr 3e-3 --compile --judge-every 500 --minutes 14 --stop-after 9

DIR holds `general-train-*.jsonl.xz` and `general-val.jsonl.xz` with a `text` per line; `--passages` adds a pool,
restricted by `--tags` to its openly licensed rows, and never a text that ships as a sample. The output is a byte-level
BPE tokenizer trained on the first training file and the passages, a decoder with tied embeddings in bf16 safetensors,
and `card.json` with the validation loss and its bits per byte. The folder is written atomically, and loads through
`AutoModelForCausalLM` and `AutoTokenizer`; `scripts.pretrain.backbone_card` then evaluates it and writes its card.

The learning rate follows a cosine over the token budget (`--tokens`, or `--epochs` of the text), or with `--minutes`
over the elapsed time. Every draw is keyed by `--seed`: with a token budget the same machine, thread count and arguments
give the same weights; elapsed time is not reproducible. The shipped backbone was trained by time (42 minutes,
14,761,984 tokens), so this script reproduces its recipe and its quality, not its bits.

OUT.work (`--work`), next to OUT, holds the tokenizer, the tokens in memory-mapped files, and the training state, saved
every few minutes and when `--stop-after` or a signal ends the command before the budget is used: it then exits with
code 3, and the same command continues from there. With `--judge-every` the weights in OUT are those with the lowest
validation loss, which over many epochs need not be the last.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from flatshift.finetune import atomic
from flatshift.finetune.seeds import numpy_generator, torch_generator
from scripts.pretrain.packed_tokens import BOS as BOS
from scripts.pretrain.packed_tokens import EOS as EOS
from scripts.pretrain.packed_tokens import PAD as PAD
from scripts.pretrain.packed_tokens import pack_tokens, read_passages, sample_texts
from scripts.pretrain.packed_tokens import read_documents as read_documents
from scripts.pretrain.packed_tokens import token_stream as token_stream
from scripts.pretrain.state import PretrainingState, Stopped, TrainingProgress

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

MAX_LENGTH = 1024
WARM_UP_STEPS = 150
FINAL_LR_SHARE = 0.05
SAVE_MINUTES = 2.0
LARGEST = 20_000_000
"""Maximum number of parameters of a shipped backbone: 40 MB in bf16."""


@dataclass(frozen=True)
class PretrainingConfig:
    """Model size and training budget. The defaults are the shipped backbone's."""

    hidden: int = 256
    layers: int = 6
    heads: int = 8
    kv_heads: int = 4
    vocabulary: int = 4096
    sequence: int = 256  # tokens per training window; windows may span documents, which <eos><bos> separates
    batch: int = 16
    lr: float = 2e-3
    seed: int = 0
    tokens: int = 14_761_984  # the budget; ignored if `minutes` or `epochs` is set
    minutes: float | None = None
    epochs: float | None = None
    tokenizer_characters: int = 4000  # of each document, for training the tokenizer
    judge_every: int = 0  # steps between validations; 0: only at the end

    def __post_init__(self) -> None:
        if not 1 <= self.sequence <= MAX_LENGTH:
            raise SystemExit(f"--sequence {self.sequence}: windows are of 1 to {MAX_LENGTH} tokens")


def train_tokenizer(texts: Iterator[str], vocabulary: int, characters: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer: any text round-trips, nothing is unknown."""
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


def build_model(config: PretrainingConfig) -> LlamaForCausalLM:
    """Build a decoder whose initial weights depend only on `config.seed` and the parameter's name."""
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
    with torch.random.fork_rng(devices=[]):  # the constructor draws from the global generator; our draws follow below
        model = LlamaForCausalLM(llama)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                generator = torch_generator(config.seed, "pretrain", "init", name)
                parameter.normal_(0.0, llama.initializer_range, generator=generator)
    return model


def stack_windows(stream: np.ndarray, indices: np.ndarray, length: int) -> Tensor:
    """Return windows `indices` of the stream, (B, length + 1) int64: inputs are [:, :-1], labels [:, 1:]."""
    return torch.from_numpy(np.stack([stream[i * length : (i + 1) * length + 1] for i in indices]).astype(np.int64))


def gather_windows(stream: Tensor, indices: np.ndarray, length: int) -> Tensor:
    """Return the same windows from a stream on a device, (T,) int32: only the indices are copied, without waiting."""
    starts = torch.from_numpy(np.ascontiguousarray(indices)) * length
    if stream.is_cuda:
        starts = starts.pin_memory()
    places = starts.to(stream.device, non_blocking=True)[:, None] + torch.arange(length + 1, device=stream.device)
    return stream[places].long()


def load_windows(stream: np.ndarray | Tensor, indices: np.ndarray, length: int, device: str) -> Tensor:
    """Return windows on the device, from a stream on the host or on the device."""
    if isinstance(stream, Tensor):
        return gather_windows(stream, indices, length)
    return stack_windows(stream, indices, length).to(device)


def copy_to_device(stream: np.ndarray, device: str) -> np.ndarray | Tensor:
    """Copy a mapped stream to a GPU, where it takes little memory and saves waiting for the host; unchanged on a
    CPU."""
    if device == "cpu":
        return stream
    return torch.from_numpy(np.asarray(stream).astype(np.int32)).to(device)


@torch.no_grad()
def stream_loss(
    model: LlamaForCausalLM,
    stream: np.ndarray | Tensor,
    *,
    length: int,
    batch: int,
    device: str,
    autocast: bool,
) -> float:
    """Return mean nats per token over consecutive windows of the stream, each without context from before it.

    The last, shorter window is skipped.
    """
    model.eval()
    total = torch.zeros((), dtype=torch.float64, device=device)
    windows = (len(stream) - 1) // length
    for start in range(0, windows, batch):
        ids = load_windows(stream, np.arange(start, min(windows, start + batch)), length, device)
        with torch.autocast(torch.device(device).type, torch.bfloat16, enabled=autocast):
            logits = model(ids[:, :-1]).logits
        total += cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten(), reduction="sum").double()
    model.train()
    return total.item() / (windows * length)


def learning_rate(config: PretrainingConfig, step: int, progress: float) -> float:
    """Return the learning rate: linear warm-up, then a cosine down to `FINAL_LR_SHARE`; `progress` runs from 0 to 1."""
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    return config.lr * min(1.0, (step + 1) / WARM_UP_STEPS) * (FINAL_LR_SHARE + (1 - FINAL_LR_SHARE) * cosine)


def build_optimizer(model: LlamaForCausalLM, config: PretrainingConfig) -> torch.optim.Optimizer:
    """Build fused AdamW with weight decay on matrices, not on norms."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    norms = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=config.lr, betas=(0.9, 0.95), fused=True)


def train(
    model: LlamaForCausalLM,
    stream: np.ndarray | Tensor,
    config: PretrainingConfig,
    *,
    device: str,
    log: Callable[[str], None] = print,
    held_out: np.ndarray | Tensor | None = None,
    state: PretrainingState | None = None,
    stop: Callable[[], bool] = lambda: False,
    compiled: bool = False,
) -> tuple[int, int]:
    """Train in place; return (steps, tokens seen). Windows are drawn without replacement within an epoch.

    held_out: validation tokens for `judge_every`; the best weights are restored at the end. state: state to resume from
    and save to. stop: called after each step; True saves and raises Stopped.
    """
    model.train()
    optimizer = build_optimizer(model, config)
    windows = (len(stream) - 1) // config.sequence
    if windows < config.batch:
        raise SystemExit(f"{len(stream)} training tokens are less than one batch of {config.batch} × {config.sequence}")
    per_epoch = windows // config.batch
    per_step = config.batch * config.sequence
    budget = config.tokens if config.epochs is None else int(config.epochs * windows * config.sequence)
    standing, best = state.restore(model, optimizer) if state else (TrainingProgress(), {})
    forward = torch.compile(model) if compiled else model
    order, drawn = np.empty(0, dtype=np.int64), -1
    spent, start = standing.seconds, time.perf_counter()
    saved, first = start, standing.step
    while True:
        standing.seconds = spent + time.perf_counter() - start
        step = standing.step
        progress = step * per_step / budget if config.minutes is None else standing.seconds / (60 * config.minutes)
        if progress >= 1:
            break
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config, step, progress)
        epoch, position = divmod(step, per_epoch)
        if epoch != drawn:
            order = numpy_generator(config.seed, "pretrain", "order", epoch).permutation(windows)
            drawn = epoch
        ids = load_windows(
            stream, order[position * config.batch : (position + 1) * config.batch], config.sequence, device
        )
        with torch.autocast(torch.device(device).type, torch.bfloat16):
            logits = forward(ids[:, :-1]).logits
        loss = cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        standing.step = step = step + 1
        if step % 100 == 0:
            result, took = loss.item(), time.perf_counter() - start  # waits for the device
            rate = (step - first) * per_step / took
            seen = f"{step * per_step / 1e6:.1f} M tokens, {step / per_epoch:.1f} epochs"
            log(f"step {step}  {seen}  loss {result:.3f}  {rate:,.0f} tokens/s  {100 * progress:.0f} %")
        if config.judge_every and held_out is not None and step % config.judge_every == 0:
            _validate(model, held_out, config, standing, best, device, log)
        if state is not None and time.perf_counter() - saved > 60 * SAVE_MINUTES:
            state.save(model, optimizer, standing, best)
            saved = time.perf_counter()
        if stop():
            if state is not None:
                standing.seconds = spent + time.perf_counter() - start
                state.save(model, optimizer, standing, best)
            raise Stopped(f"stopped after step {step}, {100 * progress:.0f} % of the budget")
    if config.judge_every and held_out is not None:
        _validate(model, held_out, config, standing, best, device, log)
        _restore_best(model, best)
        log(f"the best of the validations: {standing.best:.4f} nats per token after step {standing.best_step}")
    if state is not None:
        state.seconds = standing.seconds
    return standing.step, standing.step * per_step


def _validate(
    model: LlamaForCausalLM,
    held_out: np.ndarray | Tensor,
    config: PretrainingConfig,
    standing: TrainingProgress,
    best: dict[str, Tensor],
    device: str,
    log: Callable[[str], None],
) -> None:
    """Validate once; store the weights in `best` if the loss is the lowest so far."""
    nats = stream_loss(model, held_out, length=config.sequence, batch=config.batch, device=device, autocast=True)
    log(f"step {standing.step}  validation {nats:.4f} nats per token")
    if standing.best is None or nats < standing.best:
        standing.best, standing.best_step = nats, standing.step
        best.update({name: parameter.detach().clone() for name, parameter in model.named_parameters()})


@torch.no_grad()
def _restore_best(model: LlamaForCausalLM, best: dict[str, Tensor]) -> None:
    for name, parameter in model.named_parameters():
        parameter.copy_(best[name])


@dataclass(frozen=True)
class TextSources:
    """Text sources of pretraining."""

    data: Path
    passages: tuple[Path, ...] = ()
    tags: tuple[Path, ...] = ()
    """One for each file of passages; empty: use all rows."""

    def tokenizer(self) -> Iterator[str]:
        """Yield the texts that the tokenizer is trained on."""
        yield from read_documents(self.data, "general-train-0.jsonl.xz")
        yield from self._passages()

    def training(self) -> Iterator[str]:
        """Yield the texts that the model is trained on."""
        yield from read_documents(self.data, "general-train-*.jsonl.xz")
        yield from self._passages()

    def _passages(self) -> Iterator[str]:
        without = sample_texts() if self.passages else frozenset()
        for place, file in enumerate(self.passages):
            yield from read_passages(file, self.tags[place] if self.tags else None, without=without)

    @property
    def of(self) -> str:
        """The files, by name and size."""
        files = [*sorted(self.data.glob("general-*.jsonl.xz")), *self.passages, *self.tags]
        return ", ".join(f"{file.name} {file.stat().st_size}" for file in files)


def pretrain(
    data: Path,
    out: Path,
    config: PretrainingConfig,
    *,
    device: str,
    text: TextSources | None = None,
    work: Path | None = None,
    stop: Callable[[], bool] = lambda: False,
    compiled: bool = False,
) -> dict[str, object]:
    """Train tokenizer and model and write them with the card to `out`; return the card. Raises Stopped if `stop` is
    True.

    work: folder of tokens and state until training is done; by default OUT.work.
    """
    text = text or TextSources(data)
    work = work or out.with_name(f"{out.name}.work")
    work.mkdir(parents=True, exist_ok=True)
    atomic.remove_leftovers(work)
    tokenizer = _load_or_train_tokenizer(work / "tokenizer", text, config)
    packed = pack_tokens(work, "train", tokenizer, text.training(), of=text.of)
    evaluation = pack_tokens(work, "validation", tokenizer, read_documents(data, "general-val.jsonl.xz"), of=text.of)
    stream, held_out = copy_to_device(packed.tokens, device), copy_to_device(evaluation.tokens, device)
    model: Any = build_model(config)
    model.to(device)
    parameters = model.num_parameters()
    print(f"{parameters:,} parameters; {len(stream):,} training and {len(held_out):,} validation tokens", flush=True)
    if parameters > LARGEST:
        print(f"more than the {LARGEST:,} parameters of a backbone that may ship", flush=True)
    state = PretrainingState(work / "state", {"text": text.of, **asdict(config)})
    steps, seen = train(
        model, stream, config, device=device, held_out=held_out, state=state, stop=stop, compiled=compiled,
        log=lambda line: print(line, flush=True),
    )  # fmt: skip
    nats = stream_loss(model, held_out, length=config.sequence, batch=config.batch, device=device, autocast=True)
    card: dict[str, object] = {
        "parameters": parameters,
        "tokens_seen": seen,
        "steps": steps,
        "minutes": round(state.seconds / 60, 2),
        "device": torch.cuda.get_device_name(device) if device.startswith("cuda") else "cpu",
        "val_nats_per_token": nats,
        "val_bits_per_byte": nats * (len(held_out) - 1) / math.log(2) / evaluation.bytes,
        "train_tokens": len(stream),
        "train_bytes": packed.bytes,
        "train_documents": packed.documents,
        "passages": [file.name for file in text.passages],
        "args": asdict(config),
    }
    with atomic.atomic_directory(out) as folder:
        tokenizer.save_pretrained(folder)
        model.to(torch.bfloat16).save_pretrained(folder)
        atomic.write_json(folder / "card.json", card)
    shutil.rmtree(work)
    return card


def _load_or_train_tokenizer(folder: Path, text: TextSources, config: PretrainingConfig) -> PreTrainedTokenizerFast:
    """Train the tokenizer once, then load it from `folder`."""
    from transformers import AutoTokenizer

    if not folder.is_dir():
        trained = train_tokenizer(text.tokenizer(), config.vocabulary, config.tokenizer_characters)
        with atomic.atomic_directory(folder) as temporary:
            trained.save_pretrained(temporary)
    result: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(folder)
    if len(result) > config.vocabulary:
        raise SystemExit(f"{folder} has {len(result)} entries, not {config.vocabulary}; name another --work")
    return result


def _stop_condition(minutes: float | None) -> Callable[[], bool]:
    """Return a function that is True after so many minutes, or once a signal asks this process to stop."""
    asked: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda received, frame: asked.append(received))
    ends = math.inf if minutes is None else time.monotonic() + 60 * minutes
    return lambda: bool(asked) or time.monotonic() >= ends


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--passages", type=Path, nargs="+", default=[], help="more text, .jsonl.xz with `id` and `text`"
    )
    parser.add_argument("--tags", type=Path, nargs="+", default=[], help="of each file of passages: only open rows")
    parser.add_argument("--work", type=Path, help="where tokens and state lie until it is done; by default OUT.work")
    parser.add_argument("--stop-after", type=float, metavar="MINUTES", help="leave with code 3, to be gone on with")
    parser.add_argument("--compile", action="store_true", help="torch.compile the forward and backward pass")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--tokens", type=lambda text: int(float(text)), default=PretrainingConfig.tokens)
    length.add_argument("--epochs", type=float, default=None)
    length.add_argument("--minutes", type=float, default=None)
    for name in ("hidden", "layers", "heads", "kv_heads", "vocabulary", "sequence", "batch", "seed", "judge_every"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(PretrainingConfig, name))
    parser.add_argument("--lr", type=float, default=PretrainingConfig.lr)
    options = vars(parser.parse_args())
    data, out, device, work = (options.pop(name) for name in ("data", "out", "device", "work"))
    text = TextSources(data, tuple(options.pop("passages")), tuple(options.pop("tags")))
    stop, compiled = _stop_condition(options.pop("stop_after")), options.pop("compile")
    if text.tags and len(text.tags) != len(text.passages):
        parser.error(f"--tags names {len(text.tags)} files and --passages {len(text.passages)}; give one for each")
    if out.exists():
        parser.error(f"--out {out} exists already; name a new folder")
    try:
        card = pretrain(
            data, out, PretrainingConfig(**options), device=device, text=text, work=work, stop=stop, compiled=compiled
        )
    except Stopped as stopped:
        print(f"{stopped}; the same command goes on from there", flush=True)
        raise SystemExit(3) from None
    print(json.dumps(card, indent=2))


if __name__ == "__main__":
    main()
