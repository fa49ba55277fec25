"""Tiny random backbones of the families that people merge and export, each with a tokenizer and rows for its task; made
here, nothing is downloaded. Those whose checkpoints bring a SentencePiece file get one where `sentencepiece` (extra
gguf) is installed.

A decoder's tokenizer ends a text with `<eos>`, and its chat template a turn with `<|im_end|>`, which its own settings
do not name: what training supervises as the end is not what the backbone ends with.
"""

from __future__ import annotations

import importlib.util
import io
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaTokenizer, PreTrainedTokenizerFast, T5Tokenizer

TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIALS = ["<eos>", "<pad>", "<|im_start|>", "<|im_end|>"]
TEXTS = [f"the {a} {b} is {c} and the {b} was {a}" for a in ("red", "old", "new") for b in ("pump", "card", "valve")
         for c in ("late", "lost", "broken", "here")]  # fmt: skip
_SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
_GROUPED = {**_SIZES, "num_key_value_heads": 2, "max_position_embeddings": 128}
_VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
           "image_size": 64, "patch_size": 16}  # fmt: skip


@dataclass(frozen=True)
class Family:
    """Recipe of its backbone, and its task."""

    name: str
    model: str
    """transformers' class."""
    config: dict[str, Any]
    task: str = "chat"
    settings: dict[str, Any] = field(default_factory=dict)
    """Of the recipe, by dotted key."""
    sentencepiece: str = ""
    """Kind of its SentencePiece model (bpe, unigram)."""
    older: dict[str, Any] = field(default_factory=dict)
    """Keys of config.json as the hub's checkpoints have them, and transformers no longer writes them."""


def _gemma3() -> dict[str, Any]:
    text = {**_GROUPED, "head_dim": 16, "sliding_window": 16, "query_pre_attn_scalar": 16, "vocab_size": 512,
            "eos_token_id": 0, "pad_token_id": 1, "bos_token_id": 0}  # fmt: skip
    ids = {"mm_tokens_per_image": 4, "image_token_index": 500, "boi_token_index": 501, "eoi_token_index": 502}
    return {"text_config": text, "vision_config": _VISION, **ids}


_MOE = {"norm_topk_prob": True, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_EXPERTS = {"adapter.experts": 2}
_PRIVATE = {"head_dim": 16}
FAMILIES = (
    Family("Llama", "LlamaForCausalLM", _GROUPED),
    Family("Mistral", "MistralForCausalLM", {**_GROUPED, "sliding_window": 64}),
    Family("Qwen 2, tied", "Qwen2ForCausalLM", {**_GROUPED, "tie_word_embeddings": True}),
    Family("Qwen 3, both of a tied pair adapted", "Qwen3ForCausalLM",
           {**_GROUPED, **_PRIVATE, "tie_word_embeddings": True},
           settings={"adapter.targets": "[embed_tokens, lm_head, q_proj]"}),
    Family("Gemma 3", "Gemma3ForCausalLM", {**_GROUPED, **_PRIVATE, "sliding_window": 16, "query_pre_attn_scalar": 16},
           sentencepiece="bpe"),
    Family("Gemma 3 with its vision tower", "Gemma3ForConditionalGeneration", {}, sentencepiece="bpe"),
    Family("Phi 3", "Phi3ForCausalLM", _GROUPED, sentencepiece="bpe"),
    Family("GPT-2", "GPT2LMHeadModel", {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128},
           older={"n_ctx": 128}),
    Family("GPT-NeoX (Pythia)", "GPTNeoXForCausalLM", {**_SIZES, "max_position_embeddings": 128},
           older={"rotary_pct": 0.25}),
    Family("OPT", "OPTForCausalLM", {"hidden_size": 64, "ffn_dim": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
           "max_position_embeddings": 128, "word_embed_proj_dim": 64}, settings={"task.pack": False}),
    Family("Mixtral, experts adapted", "MixtralForCausalLM", {**_GROUPED, "num_local_experts": 4}, settings=_EXPERTS),
    Family("Qwen 3 MoE, experts adapted", "Qwen3MoeForCausalLM", {**_GROUPED, **_PRIVATE, **_MOE}, settings=_EXPERTS),
    Family("T5", "T5ForConditionalGeneration", {"d_model": 64, "d_ff": 96, "d_kv": 16, "num_layers": 2, "num_heads": 4},
           task="seq2seq", sentencepiece="unigram"),
    Family("BERT, classifier", "BertForMaskedLM", {**_SIZES, "max_position_embeddings": 130}, task="classify"),
    Family("RoBERTa, classifier", "RobertaForMaskedLM", {**_SIZES, "max_position_embeddings": 130}, task="classify"),
)  # fmt: skip


def named(name: str) -> Family:
    """The family whose name begins so."""
    return next(family for family in FAMILIES if family.name.startswith(name))


def save_family(family: Family, folder: Path) -> Path:
    """Write its backbone and tokenizer to `folder`, and rows for its task to `rows.jsonl` there; returns `folder`."""
    kind = getattr(transformers, family.model)
    own = {"vocab_size": 512, "eos_token_id": 0, "pad_token_id": 1, "bos_token_id": 0, "decoder_start_token_id": 1}
    if family.model == "Gemma3ForConditionalGeneration":
        config = kind.config_class(**_gemma3())
    else:
        config = kind.config_class(**own | family.config)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        model = kind(config)
        with torch.no_grad():  # away from a random start, whose logits are all alike
            for parameter in model.parameters():
                parameter.add_(0.03 * torch.randn(parameter.shape))
    model.save_pretrained(folder)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text(encoding="utf-8")) | family.older), encoding="utf-8")
    if family.sentencepiece and importlib.util.find_spec("sentencepiece") is not None:
        tokenizer = sentencepiece_tokenizer(family.sentencepiece, folder)
    else:
        tokenizer = byte_level()
    if family.task == "chat":
        tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    rows = [_ROWS[family.task](text, number) for number, text in enumerate(TEXTS)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return folder


_ROWS: dict[str, Callable[[str, int], dict[str, Any]]] = {
    "chat": lambda text, number: {
        "messages": [{"role": "user", "content": text}, {"role": "assistant", "content": text.split()[1]}]
    },
    "seq2seq": lambda text, number: {"text": text, "label": text.split()[1]},
    "classify": lambda text, number: {"text": text, "label": text.split()[1]},
}


def byte_level() -> Any:
    """A byte-level BPE as GPT-2's, which adds no special token by itself."""
    result = Tokenizer(models.BPE())
    result.pre_tokenizer, result.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIALS, initial_alphabet=alphabet, show_progress=False
    )
    result.train_from_iterator(TEXTS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=result, eos_token="<eos>", pad_token="<pad>", bos_token="<eos>")


def sentencepiece_tokenizer(kind: str, folder: Path) -> Any:
    """Of a SentencePiece model that it writes to `folder`, by the name that Llama's and T5's have."""
    from sentencepiece import SentencePieceTrainer

    written = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS), model_writer=written, model_type=kind, vocab_size=400, hard_vocab_limit=False,
        byte_fallback=kind == "bpe", eos_id=0, pad_id=1, unk_id=2, bos_id=-1, eos_piece="<eos>", pad_piece="<pad>",
        user_defined_symbols=SPECIALS[2:] if kind == "bpe" else [], minloglevel=2, num_threads=1,
    )  # fmt: skip
    file = folder / ("tokenizer.model" if kind == "bpe" else "spiece.model")
    file.write_bytes(written.getvalue())
    own = {"eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"}
    if kind == "unigram":
        return T5Tokenizer.from_pretrained(folder, extra_ids=0, **own)
    return LlamaTokenizer.from_pretrained(folder, bos_token="<eos>", **own)


def train_words(family: Family, backbone: Path, out: Path) -> list[str]:
    """The words of `flatshift` that train a run of it."""
    own = "".join(f" --{key} {str(value).replace(' ', '')}" for key, value in family.settings.items())
    settings = f"""--backbone {backbone} --data.train.files [{backbone}/rows.jsonl] --data.dev.files []
        --data.test.files [] --data.holdout 0.2 --adapter.rank 4 --optimizer.lr 0.02 --train.batch_size 4
        --train.steps 4 --train.max_length 64 --train.eval_every 4 --train.threads 1 --train.precision fp32
        --train.peak_tflops 1 --regularizer plain --eval.bootstrap 5 --eval.cold 0{own}"""
    return ["train", family.task, "--out", str(out), *settings.split()]
