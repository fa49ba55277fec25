"""Random-weight Llama shapes made on the device, rows for them, and what LoRA costs on them in closed form."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from flatshift.finetune.tasks import LanguageModel

SEED = 0
PAD = 0
LANGUAGE = LanguageModel(pack=False)


@dataclass(frozen=True)
class Shape:
    """A Llama by its sizes."""

    hidden: int
    inner: int
    blocks: int
    heads: int
    kv_heads: int
    vocabulary: int
    tied: bool
    head: int | None = None
    """Width of a head; None: hidden ÷ heads."""

    @property
    def width(self) -> int:
        """Of all heads together."""
        return self.heads * self.each

    @property
    def each(self) -> int:
        """Of one head."""
        return self.head or self.hidden // self.heads

    @property
    def layers(self) -> dict[str, tuple[int, int]]:
        """(in, out) of the linear layers of a block."""
        d, kv = self.hidden, self.kv_heads * self.each
        return {
            "q": (d, self.width), "k": (d, kv), "v": (d, kv), "o": (self.width, d),
            "gate": (d, self.inner), "up": (d, self.inner), "down": (self.inner, d),
        }  # fmt: skip

    @property
    def parameters(self) -> int:
        """All weights of the backbone; a tied embedding counts once."""
        block = sum(into * out for into, out in self.layers.values()) + 2 * self.hidden
        return self.blocks * block + self.hidden + self.vocabulary * self.hidden * (1 if self.tied else 2)


SHAPES = {
    "1b": Shape(2048, 8192, 16, 32, 8, 128_256, True),
    "3b": Shape(3072, 8192, 28, 24, 8, 128_256, True),
    "8b": Shape(4096, 14_336, 32, 32, 8, 128_256, False),
}
"""Llama 3.2 1B and 3B, Llama 3.1 8B."""


@dataclass(frozen=True)
class Operations:
    """Floating-point operations of one update (forward and backward, nothing twice) by three conventions."""

    causal: float
    """Products of linear layers, and attention over the pairs that a causal mask leaves: what must be computed."""
    full: float
    """The same with all pairs (PaLM, 2204.02311, appendix B; `flatshift.finetune.train.throughput`)."""
    weights: float
    """4 for each weight of the backbone and token, no attention: the convention of the published figure."""


def operations(shape: Shape, *, rows: int, sequence: int, rank: int) -> Operations:
    """Of LoRA of `rank` on all linear layers of the blocks, over `rows` of `sequence` tokens that are all supervised.

    A frozen layer costs 2 a weight and token forward and 2 for the gradient of its input, which queries, keys and
    values of the first block do not need, nor their A; factors cost 2 more for their own gradient. The head is paid for
    the tokens that predict one. Attention: two products forward and four backward, 2·width each, a pair.
    """
    tokens, linear = rows * sequence, 0.0
    for block in range(shape.blocks):
        for name, (into, out) in shape.layers.items():
            needed = int(block > 0 or name not in "qkv")
            a, b = rank * into, rank * out
            linear += (2 + 2 * needed) * (into * out + a) + 2 * a + 6 * b
    linear *= tokens
    linear += 4.0 * shape.vocabulary * shape.hidden * rows * (sequence - 1)
    attention = 12.0 * shape.width * shape.blocks * rows
    return Operations(
        causal=linear + attention * sequence * (sequence + 1) / 2,
        full=linear + attention * sequence**2,
        weights=4.0 * shape.parameters * tokens,
    )


def configuration(shape: Shape) -> Any:
    """Of transformers."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.blocks,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.each,
        max_position_embeddings=131_072,
        tie_word_embeddings=shape.tied,
        pad_token_id=PAD,
    )


def backbone(shape: Shape, device: Any, *, precision: Literal["fp32", "bf16"] = "bf16") -> Any:
    """A frozen decoder of this shape with normal weights, made on the device; the same at every call on one device."""
    import torch
    from transformers import LlamaForCausalLM
    from transformers.utils import logging

    from flatshift.finetune.seeds import torch_generator

    logging.set_verbosity_error()
    where, config = torch.device(device), configuration(shape)
    wide, before = torch.bfloat16 if precision == "bf16" else torch.float32, torch.get_default_dtype()
    torch.set_default_dtype(wide)
    try:
        with torch.random.fork_rng(devices=[where] if where.type == "cuda" else []), where:
            model: Any = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    generator = torch_generator(SEED, "gpu", "backbone", device=str(device))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0.0, config.initializer_range, generator=generator)
    model.config.use_cache = False
    model.new_parameters = ()
    return model.requires_grad_(False)


def adapted(
    shape: Shape, device: Any, *, rank: int, checkpointing: Any = "none", precision: Literal["fp32", "bf16"] = "bf16"
) -> Any:
    """The same with an adapter on all linear layers, as a run has it."""
    from flatshift.finetune.adapters.adapter import attach_adapter
    from flatshift.finetune.config import Adapter
    from flatshift.finetune.parallel.activation_checkpoint import checkpoint_activations

    frozen = backbone(shape, device, precision=precision)
    model = attach_adapter(frozen, Adapter(rank=rank), task=LANGUAGE, seed=SEED)
    checkpoint_activations(model, checkpointing)
    return model


def batches(shape: Shape, *, rows: int, sequence: int, count: int = 4) -> Any:
    """Micro-batches of `rows` random rows of `sequence` tokens, all supervised; `count` of them before one comes
    again."""
    import numpy as np

    from flatshift.finetune.data.batches import TrainingDataLoader
    from flatshift.finetune.data.example import Example
    from flatshift.finetune.seeds import numpy_generator

    generator = numpy_generator(SEED, "gpu", "rows")
    ids = generator.integers(3, shape.vocabulary, (rows * count, sequence), dtype=np.int64)
    examples = []
    for number, row in enumerate(ids.tolist()):
        examples.append(Example(row, [-100, *row[1:]], str(number), f"random row {number}"))
    return TrainingDataLoader(examples, task=LANGUAGE, batch_size=rows, seed=SEED, max_length=sequence, pad_id=PAD)


class Padder:
    """All that a stage asks of a tokenizer."""

    pad_token_id = PAD


def stage(
    task: Any, batches: Any, train: Any, folder: Path, *, optimizer: Any = None, regularizer: Any = None, **more: Any
) -> Any:
    """A training stage into `folder`, without dev rows unless `more`, of `TrainingStage`, has some."""
    from flatshift.finetune.config import Evaluate, Optimizer
    from flatshift.finetune.run_directory import RunDirectory
    from flatshift.finetune.train.stage import TrainingStage
    from flatshift.regularizers import Plain, build

    run = RunDirectory.open(folder) if folder.exists() else RunDirectory.create(folder)
    optimizer, noise = optimizer or Optimizer(lr=1e-4), build(regularizer or Plain())
    settings = {"dev": [], "evaluate": Evaluate(), "regularizer": noise, "run": run, "seed": SEED, **more}
    return TrainingStage(name="fine-tune", task=task, batches=batches, optimizer=optimizer, train=train, **settings)  # type: ignore[arg-type]
