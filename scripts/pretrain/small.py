"""Pretrain the small shipped encoder or encoder-decoder, with the decoder's tokenizer.

    python -m scripts.pretrain.small encoder --data DIR --out DIR     # flatshift-encoder-3m: masked language modelling
    python -m scripts.pretrain.small seq2seq --data DIR --out DIR     # flatshift-t5-3m: span corruption

DIR holds `general-train-0.jsonl.xz` and `general-val.jsonl.xz` with a `text` per line. Both start from the embedding
and two blocks of the decoder. The encoder attends in both directions (as BehnamGhader et al. 2404.05961 turn decoders
into encoders; the EuroBERT architecture of transformers is Llama's without the causal mask), and learns to predict 15 %
of a window's tokens, 80/10/10 as in BERT. The encoder-decoder (T5 architecture) has one block on either side and learns
to generate half of a window that was cut out of it in spans of eight (span corruption, Raffel et al. 1910.10683,
§3.1.4; as much as Tay et al. 2205.05131 cut out in their X-denoising, because so small a budget needs many targets).
The learning rate follows a cosine over the token budget and every draw is keyed by `--seed`, so that one machine,
thread count and command give the same weights. State is saved next to OUT every `--save-every` steps; the same command
continues from there.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import cross_entropy

from flatshift.finetune import assets, atomic
from flatshift.finetune.data.masking import IGNORE, SPECIAL, Masking
from flatshift.finetune.seeds import numpy_generator, torch_generator
from scripts.pretrain.backbone import BOS, EOS, PAD, learning_rate, read_documents, token_stream

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

TOKENIZER = "flatshift-5m"
SENTINELS = 32
MASKED = 0.15
CUT, SPAN = 0.5, 8
_MODEL, _FIRST, _SECOND, _POSITION = "model.", "exp_avg.", "exp_avg_sq.", "state.json"


@dataclass(frozen=True)
class SmallPretraining:
    """Model and training budget. The defaults are those of the shipped models."""

    kind: str = "encoder"
    blocks: tuple[int, ...] = (0, 5)  # of the decoder: the encoder's layers, or one for each side; sizes are its own
    sequence: int = 128  # tokens per window of text; windows may span documents
    batch: int = 8
    lr: float = 2e-3
    seed: int = 0
    tokens: int = 3_500_000
    save_every: int = 250


ENCODER = SmallPretraining()
SEQ2SEQ = SmallPretraining(kind="seq2seq")


# ------------------------------------------------------------------------------------------------ tokenizers


def build_tokenizer(kind: str) -> PreTrainedTokenizerFast:
    """Build the shipped decoder's tokenizer plus the tokens of `kind`: `<mask>`, or the sentinels `<extra_id_0>` etc.

    The encoder's texts get `<bos>` and `<eos>` around and between them; the encoder-decoder ends both sides with
    `<eos>`.
    """
    from tokenizers import AddedToken, Tokenizer
    from transformers import PreTrainedTokenizerFast

    folder = assets.backbone_directory(TOKENIZER)
    assert folder is not None
    base = Tokenizer.from_file(str(folder / "tokenizer.json"))
    common = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"}
    names = {"model_input_names": ["input_ids", "attention_mask"], "model_max_length": 256}
    if kind == "encoder":
        base.add_special_tokens([AddedToken("<mask>", lstrip=True, normalized=False)])
        _set_template(base, "<bos> $A <eos>", "<bos> $A <eos> $B <eos>")
        roles = {"cls_token": "<bos>", "sep_token": "<eos>", "mask_token": AddedToken("<mask>", lstrip=True)}
        return PreTrainedTokenizerFast(tokenizer_object=base, **common, **roles, **names)
    sentinels = [f"<extra_id_{i}>" for i in range(SENTINELS)]
    base.add_special_tokens([AddedToken(name, normalized=False) for name in sentinels])
    _set_template(base, "$A <eos>", "$A <eos> $B <eos>")
    return PreTrainedTokenizerFast(tokenizer_object=base, **common, extra_special_tokens=sentinels, **names)


def _set_template(tokenizer: Tokenizer, single: str, pair: str) -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer.post_processor = TemplateProcessing(
        single=single, pair=pair, special_tokens=[("<bos>", BOS), ("<eos>", EOS)]
    )


# ------------------------------------------------------------------------------------------------ models


@torch.no_grad()
def build_model(config: SmallPretraining, vocabulary: int) -> PreTrainedModel:
    """Build a model from the shipped decoder's weights, and from draws keyed by `config.seed` for the rest."""
    import transformers as tf

    decoder: Any = tf.AutoModelForCausalLM.from_pretrained(assets.backbone_directory(TOKENIZER), dtype=torch.float32)
    with torch.random.fork_rng(devices=[]):  # constructors draw from the global generator; our draws follow below
        model: Any = (_build_encoder if config.kind == "encoder" else _build_encoder_decoder)(
            decoder, config, vocabulary
        )
    table, known = model.get_input_embeddings().weight, decoder.model.embed_tokens.weight
    table[: len(known)] = known
    table[len(known) :] = known.mean(dim=0)
    if config.kind == "seq2seq":  # sentinels must differ
        more = table[len(known) :]
        generator = torch_generator(config.seed, "pretrain", "init", "sentinels")
        more += known.std() * torch.randn(more.shape, generator=generator)
    return model


def _build_encoder(decoder: Any, config: SmallPretraining, vocabulary: int) -> PreTrainedModel:
    """Build an encoder from some blocks and the last norm of the decoder, without its causal mask."""
    import transformers as tf

    old = decoder.config
    encoder: Any = tf.EuroBertForMaskedLM(
        tf.EuroBertConfig(
            vocab_size=vocabulary,
            hidden_size=old.hidden_size,
            intermediate_size=old.intermediate_size,
            num_hidden_layers=len(config.blocks),
            num_attention_heads=old.num_attention_heads,
            num_key_value_heads=old.num_key_value_heads,
            rms_norm_eps=old.rms_norm_eps,
            rope_parameters=old.rope_parameters,
            max_position_embeddings=old.max_position_embeddings,
            tie_word_embeddings=True,
            classifier_pooling="mean",
            pad_token_id=PAD,
            bos_token_id=BOS,
            eos_token_id=EOS,
            mask_token_id=vocabulary - 1,
        )
    )
    for block, number in zip(encoder.model.layers, config.blocks, strict=True):
        block.load_state_dict(decoder.model.layers[number].state_dict())
    encoder.model.norm.load_state_dict(decoder.model.norm.state_dict())
    return encoder


def _build_encoder_decoder(decoder: Any, config: SmallPretraining, vocabulary: int) -> PreTrainedModel:
    """Build an encoder-decoder from one decoder block per side, with T5's relative positions (initially 0) for RoPE.

    T5 does not divide scores by the root of a head's width, and multiplies a tied head's input by that of 1 / width:
    queries are scaled down and the last norm up, so that both compute the same as before. Cross attention is
    initialised at random with nearly no output.
    """
    import transformers as tf

    old = decoder.config
    t5: Any = tf.T5ForConditionalGeneration(
        tf.T5Config(
            vocab_size=vocabulary,
            d_model=old.hidden_size,
            d_kv=old.head_dim,
            d_ff=old.intermediate_size,
            num_layers=1,
            num_decoder_layers=1,
            num_heads=old.num_attention_heads,
            feed_forward_proj="gated-silu",
            layer_norm_epsilon=old.rms_norm_eps,
            dropout_rate=0.0,
            tie_word_embeddings=True,
            decoder_start_token_id=PAD,
            pad_token_id=PAD,
            eos_token_id=EOS,
        )
    )
    for name, parameter in t5.named_parameters():
        if "EncDecAttention" in name:
            generator = torch_generator(config.seed, "pretrain", "init", name)
            deviation = 0.02 * (0.1 if name.endswith(".o.weight") else 1.0)
            parameter.normal_(0.0, deviation, generator=generator)
        elif "relative_attention_bias" in name:
            parameter.zero_()
    groups = old.num_attention_heads // old.num_key_value_heads

    def spread(weight: Tensor) -> Tensor:
        """Repeat shared key or value heads for every query head."""
        shared = weight.view(old.num_key_value_heads, old.head_dim, old.hidden_size)
        return shared.repeat_interleave(groups, dim=0).flatten(0, 1)

    for side, number in zip((t5.encoder, t5.decoder), config.blocks, strict=True):
        source, block = decoder.model.layers[number], side.block[0].layer
        attention, theirs = block[0].SelfAttention, source.self_attn
        attention.q.weight.copy_(theirs.q_proj.weight / old.head_dim**0.5)
        attention.k.weight.copy_(spread(theirs.k_proj.weight))
        attention.v.weight.copy_(spread(theirs.v_proj.weight))
        attention.o.weight.copy_(theirs.o_proj.weight)
        block[0].layer_norm.weight.copy_(source.input_layernorm.weight)
        block[-1].layer_norm.weight.copy_(source.post_attention_layernorm.weight)
        feed, mlp = block[-1].DenseReluDense, source.mlp
        for ours, weights in ((feed.wi_0, mlp.gate_proj), (feed.wi_1, mlp.up_proj), (feed.wo, mlp.down_proj)):
            ours.weight.copy_(weights.weight)
    t5.decoder.final_layer_norm.weight.copy_(decoder.model.norm.weight * old.hidden_size**0.5)
    return t5


# ------------------------------------------------------------------------------------------------ batches


def masked_batch(
    stream: NDArray, chosen: NDArray, config: SmallPretraining, masking: Masking, *names: Any
) -> dict[str, Tensor]:
    """Return windows as `<bos> text <eos>` (B, T) with hidden tokens, and labels (B, T); `names` key the draw."""
    length = config.sequence - 2
    read, labels = [], []
    for row, i in enumerate(chosen):
        ids = np.concatenate([[BOS], stream[i * length : (i + 1) * length], [EOS]]).astype(np.int64)
        words = np.where(ids > EOS, np.arange(len(ids)), SPECIAL)
        one = masking.draw(ids, words, numpy_generator(config.seed, "pretrain", *names, row))
        read.append(one[0])
        labels.append(one[1])
    return {"input_ids": torch.from_numpy(np.stack(read)), "labels": torch.from_numpy(np.stack(labels))}


def corrupted_batch(
    stream: NDArray, chosen: NDArray, config: SmallPretraining, sentinel: int, *names: Any
) -> dict[str, Tensor]:
    """Return windows with spans cut out as encoder input (B, T), and labels (B, U): each span's sentinel and tokens.

    All windows lose as many tokens in as many spans, so nothing is padded.
    """
    rng = numpy_generator(config.seed, "pretrain", *names)
    length = config.sequence
    noise = round(length * CUT)
    spans = round(noise / SPAN)
    read, written = [], []
    for i in chosen:
        window = stream[i * length : (i + 1) * length].astype(np.int64)
        visible, cut = _random_segments(length - noise, spans, rng), _random_segments(noise, spans, rng)
        inputs: list[NDArray] = []
        labels: list[NDArray] = []
        at = 0
        for k in range(spans):
            mark = np.array([sentinel + k])
            inputs += [window[at : at + visible[k]], mark]
            at += visible[k]
            labels += [mark, window[at : at + cut[k]]]
            at += cut[k]
        read.append(np.concatenate([*inputs, [EOS]]))
        written.append(np.concatenate([*labels, [EOS]]))
    return {"input_ids": torch.from_numpy(np.stack(read)), "labels": torch.from_numpy(np.stack(written))}


def _random_segments(total: int, parts: int, rng: np.random.Generator) -> NDArray:
    """Draw `parts` positive lengths with this sum, uniformly over all compositions."""
    borders = np.sort(rng.choice(total - 1, size=parts - 1, replace=False)) + 1
    return np.diff(np.concatenate([[0], borders, [total]]))


class PretrainingObjective:
    """Batches and their loss, for either kind."""

    def __init__(self, config: SmallPretraining, tokenizer: PreTrainedTokenizerFast) -> None:
        self.config = config
        vocabulary = len(tokenizer)
        self.sentinel = vocabulary - SENTINELS
        self.masking = None
        if config.kind == "encoder":
            plain = np.arange(EOS + 1, vocabulary - 1)
            self.masking = Masking(int(tokenizer.mask_token_id or 0), plain, share=MASKED)

    def windows(self, stream: NDArray) -> int:
        return len(stream) // (self.config.sequence - 2 * (self.masking is not None))

    def batch(self, stream: NDArray, chosen: NDArray, *names: Any) -> dict[str, Tensor]:
        if self.masking is not None:
            return masked_batch(stream, chosen, self.config, self.masking, *names)
        return corrupted_batch(stream, chosen, self.config, self.sentinel, *names)

    def scores(self, model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return logits (n, V) of the tokens to predict, and these tokens (n,)."""
        if self.masking is not None:
            hidden = model.model(batch["input_ids"]).last_hidden_state
            result = batch["labels"] != IGNORE
            return model.lm_head(hidden[result]), batch["labels"][result]
        return model(**batch).logits.flatten(0, 1), batch["labels"].flatten()


# ------------------------------------------------------------------------------------------------ training


def train(
    model: Any, stream: NDArray, objective: PretrainingObjective, state: Path, log: Any = print
) -> tuple[int, float]:
    """Train in place, resuming from `state` if it exists; return (steps, CPU seconds). Each window is seen once per
    epoch."""
    config = objective.config
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr, betas=(0.9, 0.98), weight_decay=0.01)
    per_epoch = objective.windows(stream) // config.batch
    steps = -(-config.tokens // (config.batch * config.sequence))
    step, spent = _restore(state, model, optimizer)
    order = np.empty(0, dtype=np.int64)
    drawn = -1
    before = time.process_time()
    while step < steps:
        epoch, position = divmod(step, per_epoch)
        if epoch != drawn:
            order = numpy_generator(config.seed, "pretrain", "order", epoch).permutation(objective.windows(stream))
            drawn = epoch
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config, step, step / steps)  # type: ignore[arg-type]
        batch = objective.batch(stream, order[position * config.batch : (position + 1) * config.batch], "draw", step)
        with torch.autocast("cpu", torch.bfloat16):
            logits, result = objective.scores(model, batch)
        loss = cross_entropy(logits.float(), result)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        if step % config.save_every == 0 or step == steps:
            seconds = spent + time.process_time() - before
            _save(state, model, optimizer, step, seconds)
            log(f"step {step} of {steps}  loss {loss.item():.3f}  {seconds:.0f} CPU s")
    return step, spent + time.process_time() - before


def _save(state: Path, model: Any, optimizer: Any, step: int, seconds: float) -> None:
    from safetensors.torch import save_file

    tensors = {}
    for name, parameter in model.named_parameters():
        moments = optimizer.state[parameter]
        tensors[_MODEL + name] = parameter.detach()
        tensors[_FIRST + name], tensors[_SECOND + name] = moments["exp_avg"], moments["exp_avg_sq"]
    with atomic.atomic_directory(state) as folder:
        save_file(tensors, folder / "state.safetensors")
        atomic.write_json(folder / _POSITION, {"step": step, "cpu_seconds": seconds})


@torch.no_grad()
def _restore(state: Path, model: Any, optimizer: Any) -> tuple[int, float]:
    from safetensors.torch import load_file

    if not (state / _POSITION).is_file():
        return 0, 0.0
    about = json.loads((state / _POSITION).read_text(encoding="utf-8"))
    tensors = load_file(state / "state.safetensors")
    for name, parameter in model.named_parameters():
        parameter.copy_(tensors[_MODEL + name])
        optimizer.state[parameter] = {
            "step": torch.tensor(float(about["step"])),
            "exp_avg": tensors[_FIRST + name],
            "exp_avg_sq": tensors[_SECOND + name],
        }
    return about["step"], about["cpu_seconds"]


# ------------------------------------------------------------------------------------------------ evaluation


@torch.no_grad()
def evaluate_held_out(
    model: Any, stream: NDArray, unigram: NDArray, objective: PretrainingObjective
) -> dict[str, float]:
    """Evaluate on all windows of `stream` under one draw.

    Returns nats and accuracy on the text tokens to predict (without sentinels and `<eos>`), and the nats of `unigram`
    log-probabilities on the same tokens.
    """
    model.eval()
    nats = right = count = common = 0.0
    windows = objective.windows(stream)
    for start in range(0, windows, objective.config.batch):
        chosen = np.arange(start, min(windows, start + objective.config.batch))
        logits, result = objective.scores(model, objective.batch(stream, chosen, "held-out", start))
        text = (result > EOS) & (result < len(unigram))
        nats += cross_entropy(logits[text].float(), result[text], reduction="sum").item()
        right += (logits[text].argmax(-1) == result[text]).sum().item()
        common -= unigram[result[text].numpy()].sum()
        count += int(text.sum())
    model.train()
    return {
        "tokens": count,
        "nats_per_token": nats / count,
        "top_1": right / count,
        "unigram_nats_per_token": float(common) / count,
    }


def unigram_table(stream: NDArray, vocabulary: int) -> NDArray:
    """Return log-probabilities (V,) from add-one smoothed counts."""
    counts = np.bincount(stream, minlength=vocabulary) + 1.0
    return np.log(counts / counts.sum())


def pretrain(data: Path, out: Path, config: SmallPretraining) -> dict[str, Any]:
    """Train, and write tokenizer, model and card.json to `out`; return the card."""
    tokenizer = build_tokenizer(config.kind)
    objective = PretrainingObjective(config, tokenizer)
    stream, size = token_stream(tokenizer, _take_texts(read_documents(data, "general-train-0.jsonl.xz"), config.tokens))
    heldout, _ = token_stream(tokenizer, read_documents(data, "general-val.jsonl.xz"))
    if objective.windows(stream) < config.batch:
        raise SystemExit(f"{len(stream)} training tokens are less than one batch")
    model: Any = build_model(config, len(tokenizer))
    print(f"{model.num_parameters():,} parameters; {len(stream):,} training and {len(heldout):,} validation tokens")
    state = out.with_name(out.name + ".state")
    steps, seconds = train(model, stream, objective, state)
    model.to(torch.bfloat16).float()  # evaluate the weights as shipped, rounded to bf16
    result = evaluate_held_out(
        model, heldout, unigram_table(stream, len(tokenizer) - _count_added_tokens(config)), objective
    )
    card: dict[str, Any] = {
        "parameters": model.num_parameters(),
        "steps": steps,
        "tokens_seen": steps * config.batch * config.sequence,
        "train_tokens": len(stream),
        "train_bytes": size,
        "cpu_minutes": round(seconds / 60, 2),
        "threads": torch.get_num_threads(),
        "validation": result,
        "uniform_nats_per_token": math.log(len(tokenizer)),
        "args": {**asdict(config), "blocks": list(config.blocks)},
    }
    with atomic.atomic_directory(out) as folder:
        tokenizer.save_pretrained(folder)
        model.to(torch.bfloat16).save_pretrained(folder)
        atomic.write_json(folder / "card.json", card)
    shutil.rmtree(state)
    return card


def _take_texts(texts: Iterator[str], tokens: int) -> Iterator[str]:
    """Yield the first texts that contain `tokens` tokens, assuming five bytes per token, more than the actual
    average."""
    left = 5 * tokens
    for text in texts:
        yield text
        left -= len(text.encode())
        if left <= 0:
            return


def _count_added_tokens(config: SmallPretraining) -> int:
    """Return the number of tokens added to the decoder's."""
    return 1 if config.kind == "encoder" else SENTINELS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("encoder", "seq2seq"))
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokens", type=lambda text: int(float(text)))
    parser.add_argument("--blocks", type=int, nargs="+")
    for name in ("sequence", "batch", "seed", "save_every"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int)
    parser.add_argument("--lr", type=float)
    options = vars(parser.parse_args())
    data, out = options.pop("data"), options.pop("out")
    if out.exists():
        parser.error(f"--out {out} exists already; name a new folder")
    default = ENCODER if options["kind"] == "encoder" else SEQ2SEQ
    given = {n: tuple(v) if isinstance(v, list) else v for n, v in options.items() if v is not None}
    print(json.dumps(pretrain(data, out, SmallPretraining(**{**asdict(default), **given})), indent=2))


if __name__ == "__main__":
    main()
