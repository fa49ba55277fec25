"""A Llama by its sizes: a random one on disk, and what a mesh must send for it by formula.

Ψ is the bytes of all weights, Ψ_l of the trained ones. Volumes are bytes of whole tensors in one update of one
micro-batch: what an all-gather makes, what a reduce-scatter or an all-reduce adds up, what is sent.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

GGPO_PROBES = 4
Bytes = dict[str, int]


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
    def block(self) -> int:
        """Weights of a block: four attention and three MLP matrices, two norms."""
        return 4 * self.hidden**2 + 3 * self.hidden * self.inner + 2 * self.hidden

    @property
    def table(self) -> int:
        """Weights of the embedding; as many as of the head."""
        return self.vocabulary * self.hidden

    @property
    def frozen_bytes(self) -> int:
        """Of the backbone."""
        return self.item * (self.blocks * self.block + 2 * self.table + self.hidden)

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
    def supervised(self) -> int:
        """Tokens of a micro-batch that the loss sees."""
        return self.rows * (self.tokens - 1)

    @property
    def row_parallel(self) -> int:
        """Rows of the layers that tensor parallelism cuts by columns: two a block."""
        return 2 * self.hidden * self.blocks

    @property
    def column_parallel(self) -> int:
        """Rows of the layers that it cuts by rows: five a block."""
        return (3 * self.hidden + 2 * self.inner) * self.blocks


def save_backbone(sizes: Sizes, folder: str | Path, *, file_size: str = "5GB") -> None:
    """A random model of `sizes` in files of at most `file_size`; not on a rank, where transformers writes nothing."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=sizes.vocabulary,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.inner,
        num_hidden_layers=sizes.blocks,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=sizes.tokens,
        tie_word_embeddings=False,
        pad_token_id=0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(folder, max_shard_size=file_size)


def sharded(s: Sizes, *, gathers: int = 2) -> Bytes:
    """FSDP2: all weights `gathers` times, gradients of the adapters once, of frozen weights never."""
    return {"dp all-gather": gathers * s.whole_bytes, "dp reduce-scatter": s.trained_bytes}


def whole_factors(s: Sizes) -> int:
    """Bytes of A of the five column-parallel and B of the two row-parallel layers of each block: their gradients are
    summands on tensor-parallel ranks."""
    return 4 * s.blocks * 7 * s.rank * s.hidden


def vocabulary(s: Sizes) -> int:
    """The embedding's sum, three scalars a supervised token of the cross entropy, and the gradient of its input; the
    vocabulary's size is not in it."""
    return s.states + 4 * s.supervised * (3 + s.hidden)


def tensor(s: Sizes) -> Bytes:
    """Four all-reduces of the hidden states a block, of which the first block's first needs no gradient."""
    return {"tp all-reduce": (4 * s.blocks - 1) * s.states + vocabulary(s) + whole_factors(s)}


def tensor_by_tokens(s: Sizes) -> Bytes:
    """Sequence parallelism: the same all-reduces as an all-gather and a reduce-scatter each, and one gather at the
    end of the blocks."""
    return {
        "tp all-gather": (4 * s.blocks + 1) * s.states,
        "tp reduce-scatter": (4 * s.blocks - 1) * s.states,
        "tp all-reduce": vocabulary(s) + whole_factors(s),
    }


def tensor_recomputed(s: Sizes) -> Bytes:
    """With whole blocks recomputed, the attention's sum in each of them once more; the block's last result is not
    needed again."""
    return {"tp all-reduce": tensor(s)["tp all-reduce"] + s.blocks * s.states}


def pipeline(s: Sizes, *, stages: int, tp: int = 1) -> Bytes:
    """Hidden states forward and their gradient back at every border; a tensor-parallel rank sends its share."""
    return {"pp send": 2 * (stages - 1) * s.states // tp}


def scattered(s: Sizes, *, stages: int = 2, tp: int = 2) -> Bytes:
    """pp × tp: shares sent at every border, and gathered along tp where they arrive, forward and back."""
    return {**pipeline(s, stages=stages, tp=tp), "tp all-gather": 2 * (stages - 1) * s.states}


def both(s: Sizes, *, dp: int = 2, tp: int = 2) -> Bytes:
    """dp × tp: a rank's share of every matrix is sharded; norms and whole factors are not divided by tp."""
    norms = s.item * (2 * s.blocks + 1) * s.hidden
    mine = norms + (s.frozen_bytes - norms) // tp + whole_factors(s) + (s.trained_bytes - whole_factors(s)) // tp
    trained = whole_factors(s) + (s.trained_bytes - whole_factors(s)) // tp
    summed = tensor(s)["tp all-reduce"] - whole_factors(s) + whole_factors(s) // dp
    return {"dp all-gather": 2 * mine, "dp reduce-scatter": trained, "tp all-reduce": summed}


def ggpo_sharded(s: Sizes, *, fresh: bool) -> Bytes:
    """In every update the probes' gradients, one row of them for each row of each layer; when row norms are recomputed
    also the adapters, gathered, and one number a row."""
    layers, rows = 7 * s.blocks, s.column_parallel + s.row_parallel
    base = sharded(s)
    each = 4 * (GGPO_PROBES * rows + layers)
    if not fresh:
        return {**base, "dp all-reduce": each}
    return {
        "dp all-gather": base["dp all-gather"] + s.trained_bytes,
        "dp reduce-scatter": base["dp reduce-scatter"],
        "dp all-reduce": each + 4 * rows,
    }


def ggpo_tensor(s: Sizes, *, fresh: bool) -> Bytes:
    """The probes' gradients of row-parallel layers, two means a column-parallel layer, and with new row norms one
    number a row of the row-parallel layers."""
    means = 4 * 2 * 5 * s.blocks
    added = 4 * GGPO_PROBES * s.row_parallel + means + (4 * s.row_parallel if fresh else 0)
    return {"tp all-reduce": tensor(s)["tp all-reduce"] + added}
