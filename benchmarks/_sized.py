"""A random Llama by its sizes, and updates of our engine on it: LoRA on every linear layer, random tokens.

updates = Updates(folder, {"dp": 2}, vocabulary=1024, rows=2, tokens=32)
updates(0)
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from flatshift.finetune.compute.attention import packed_attention
from flatshift.finetune.compute.micro_batch import MicroBatch
from flatshift.finetune.compute.numerics import without_input_casts
from flatshift.finetune.compute.precision import autocast
from flatshift.finetune.config import Adapter, Mesh, Optimizer, Train
from flatshift.finetune.parallel.build import build_engine
from flatshift.finetune.parallel.mesh import ProcessMesh
from flatshift.finetune.tasks import LanguageModel
from flatshift.finetune.train.optimizer import AdapterOptimizer
from flatshift.regularizers import Plain, build

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Sizes:
    """A Llama with as many key heads as heads, LoRA on every linear layer of a block, and a data rank's rows."""

    hidden: int = 128
    inner: int = 256
    blocks: int = 4
    vocabulary: int = 1024
    rank: int = 8
    rows: int = 2
    tokens: int = 32
    item: int = 4
    """Bytes of a weight of the backbone; adapters have 4."""

    @property
    def frozen_bytes(self) -> int:
        """Of the backbone: four attention and three MLP matrices and two norms a block, embedding, head, last norm."""
        block = 4 * self.hidden**2 + 3 * self.hidden * self.inner + 2 * self.hidden
        return self.item * (self.blocks * block + 2 * self.vocabulary * self.hidden + self.hidden)

    @property
    def trained_bytes(self) -> int:
        """Ψ_l: A and B of seven layers a block."""
        return 4 * self.blocks * self.rank * (8 * self.hidden + 3 * (self.hidden + self.inner))

    @property
    def whole_bytes(self) -> int:
        """Ψ."""
        return self.frozen_bytes + self.trained_bytes

    @property
    def states(self) -> int:
        """Bytes of the hidden states of a micro-batch, B·T·D."""
        return 4 * self.rows * self.tokens * self.hidden

    @property
    def trained_tokens(self) -> int:
        """Tokens of a micro-batch that the loss sees."""
        return self.rows * (self.tokens - 1)


def random_llama(
    *,
    vocabulary: int,
    hidden: int,
    inner: int,
    blocks: int,
    heads: int,
    groups: int | None = None,
    kind: str = "llama",
    **more: Any,
) -> Any:
    """A causal language model with random weights, the same at every call. more: fields of transformers' config."""
    fields = {
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": blocks,
        "num_attention_heads": heads,
        "num_key_value_heads": groups or heads,
        "tie_word_embeddings": False,
        "pad_token_id": 0,
    }
    config = transformers.CONFIG_MAPPING[kind].from_dict(fields | more)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        return transformers.AutoModelForCausalLM.from_config(config)


def save_backbone(sizes: Sizes, folder: str | Path, *, file_size: str = "5GB") -> None:
    """A random model of `sizes`; not on a rank, where transformers writes nothing."""
    shape = {"vocabulary": sizes.vocabulary, "hidden": sizes.hidden, "inner": sizes.inner, "blocks": sizes.blocks}
    model = random_llama(**shape, heads=4, max_position_embeddings=sizes.tokens)
    model.save_pretrained(folder, max_shard_size=file_size)


def draw_ids(vocabulary: int, rows: int, tokens: int, seed: int) -> Any:
    """Random token ids, (rows, tokens)."""
    return torch.randint(3, vocabulary, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def micro_batch(ids: Any) -> Any:
    """Every token but the first of each row is a label."""
    labels = ids.clone()
    labels[:, 0] = -100
    rows, tokens = ids.shape
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return MicroBatch(inputs, labels, rows * (tokens - 1), rows, tuple((i,) for i in range(rows)))


class Updates:
    """Our engine on a mesh ({} is one process); `updates(step)` makes one as the training loop does."""

    def __init__(
        self,
        backbone: str,
        mesh: dict[str, Any],
        *,
        vocabulary: int,
        rows: int,
        tokens: int,
        rank: int = 8,
        regularizer: Any = None,
        **train: Any,
    ) -> None:
        """rows: of a data rank's micro-batch. train: further settings of `Train`."""
        layout, self.task = Mesh(**mesh), LanguageModel(pack=False)
        self.world = ProcessMesh.of(layout, torch.device("cpu")) if layout.size > 1 else ProcessMesh.alone()
        width = self.world.width("replicate", "dp")
        self.train = Train(**{"precision": "fp32", "max_length": tokens, "batch_size": rows * width, **train})
        self.engine = build_engine(
            backbone, task=self.task, adapter=Adapter(rank=rank), train=self.train, mesh=layout, world=self.world
        )
        self.optimizer = AdapterOptimizer(self.engine.parameters, Optimizer())
        self.regularizer = build(regularizer or Plain())
        self.regularizer.attach(self.engine.model, seed=0, total_steps=100, placement=self.engine.placement)
        self.engine.model.train()
        self.head: Any = None
        self.shape, self.knows_head = (vocabulary, rows, tokens), False

    def micros(self, step: int) -> list[Any]:
        """This rank's micro-batches of an update."""
        seeds = (1000 * step + 100 * number + self.engine.share[0] for number in range(self.train.accumulate))
        return [micro_batch(draw_ids(*self.shape, seed)) for seed in seeds]

    def find_head(self) -> None:
        """Find the head before the first update, which does it otherwise."""
        with autocast(self.train, self.engine.device):
            self.head = self.engine.find_head(self.micros(0)[0].inputs, task=self.task)
        self.engine.reshard()
        self.knows_head = True  # it is None on all stages of a pipeline but the last

    def __call__(self, step: int) -> None:
        model, device, micros = self.engine.model, self.engine.device, self.micros(step)
        count = sum(micro.supervised for micro in micros) * self.engine.share[1]
        with without_input_casts(model, self.train), packed_attention(model, device):
            if not self.knows_head:
                self.find_head()
            with self.regularizer.step(step):
                self.engine.forward_backward(
                    micros, count, task=self.task, head=self.head, context=lambda _: autocast(self.train, device)
                )
        self.engine.clip(1.0)
        self.optimizer.step(1e-3)
