"""Settings of a fine-tuning run: one frozen dataclass per component. Imports nothing heavy.

The tasks are in `flatshift.finetune.tasks`. Every field's docstring is its help text.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Any, Literal, TypeVar

DATA_INITS = ("eva", "corda", "lora-ga")
"""Values of `adapter.init` that use training examples."""


@dataclass(frozen=True, kw_only=True)
class Projector:
    """One trained linear map (with bias) from feature vectors, given with every example, to the backbone's width."""

    features: str = "features"
    """Column of the rows: a list of `width` numbers, or a list of such lists if there are several vectors."""
    width: int = 768
    """Numbers in one vector, set by the encoder that produced them (ViT-B, AST and TimeSformer: 768)."""
    vectors: int | None = None
    """Vectors per example; null: one, or one for each block of `inject`."""
    inject: Literal["first"] | tuple[int, ...] = "first"
    """`first`: each vector takes its own position at the front of the sequence, from the first block on. Block numbers,
    from 0: all vectors share one position; at each of these blocks the next vector replaces the hidden state there, and
    before the first of them no token attends to it (as in eP-ALM, in the upper blocks)."""

    def __post_init__(self) -> None:
        check_bounds(self, width=(1, None), vectors=(1, None))
        if isinstance(self.inject, str):
            return
        if not self.inject or self.inject[0] < 0 or list(self.inject) != sorted(set(self.inject)):
            raise ValueError(f"inject must be blocks in rising order, as [8, 9, 10], or first; got {list(self.inject)}")
        if self.vectors not in (None, len(self.inject)):
            raise ValueError(
                f"vectors is {self.vectors} and inject names {len(self.inject)} blocks; leave it out, or name as many"
            )

    @property
    def count(self) -> int:
        """K: vectors per example."""
        return (self.vectors or 1) if isinstance(self.inject, str) else len(self.inject)

    @property
    def places(self) -> int:
        """Positions taken at the front of every sequence."""
        return self.count if isinstance(self.inject, str) else 1


@dataclass(frozen=True, kw_only=True)
class SpikeRecovery:
    """Recovery from loss spikes: roll back to a checkpoint and skip the batches around the spike (PaLM, arXiv
    2204.02311, §5.1).

    A step is a spike if its loss is above m + `threshold` · max(1.4826 · MAD, m/100), where m is the median loss of the
    last `window` steps and MAD their median absolute deviation from it.
    """

    window: int = 64
    """Steps whose losses define the usual range; no step counts as a spike before there are this many."""
    threshold: float = 8.0
    """Robust standard deviations above the median."""
    back: int = 100
    """Minimum number of steps before the spike to undo: training resumes from the newest regular checkpoint (a multiple
    of `train.save_every`) that is at least this old."""
    skip: int = 200
    """Batches to skip from there on; always at least those up to the spike."""
    most: int = 3
    """Maximum number of rollbacks in a stage; the next spike stops it."""

    def __post_init__(self) -> None:
        check_bounds(self, window=(4, None), threshold=(1, None), back=(0, None), skip=(1, None), most=(1, None))


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """LoRA adapter, passed to PEFT's `LoraConfig`."""

    rank: int = 8
    """LoRA rank r: rows of A and columns of B."""
    alpha: float | Literal["rank"] | None = None
    """Numerator of the LoRA scale; the weight change is alpha/r·BA (alpha/√r with rslora). Null means 2·rank: a
    constant scale of 2; `rank` a constant scale of 1; a number the same alpha at every rank."""
    targets: str | tuple[str, ...] = "all-linear"
    """Module name suffixes that get an adapter, or `all-linear`."""
    dropout: float = 0.0
    """LoRA dropout on the adapter's input."""
    rslora: bool = False
    """Scale by alpha/√r instead of alpha/r."""
    dora: bool = False
    """Weight-decomposed LoRA: also train the magnitude vector."""
    init: Literal["default", "pissa", "olora", "orthogonal", "loftq", "eva", "corda", "lora-ga"] = "default"
    """Initialisation of A and B; values other than `default` use PEFT's own code and need a single process. `default`:
    A random from `train.seed`, B = 0. `orthogonal`: both random, with BA = 0. From the weights: `pissa`, the top r
    singular directions (2404.02948); `olora`, the first r of a QR decomposition (2406.01775); `loftq`, the error of
    4-bit quantisation (2310.08659; with `train.quantization`). From `init_rows` training examples: `eva`, the
    directions in which a layer's inputs vary most, which also distributes the ranks among layers (2410.07170); `corda`,
    singular directions weighted by the inputs' covariance (2406.05223); `lora-ga`, those of the first gradient
    (2407.05000). The initial product of pissa, olora, corda and lora-ga is subtracted from the frozen weights, and
    saved adapters hold the difference."""
    init_rows: int | None = None
    """Training examples, drawn with `train.seed`, for eva, corda and lora-ga; null: 64."""
    ranks: dict[str, int] | None = None
    """Different ranks for some layers: module name suffix or pattern → r (PEFT's rank_pattern), as `q_proj: 16`."""
    alphas: dict[str, float] | None = None
    """Different alphas for some layers (PEFT's alpha_pattern). A layer in `ranks` that is not listed here keeps the
    scale of the others if `alpha` is null or `rank`."""
    layers: tuple[int, ...] | None = None
    """Blocks that get adapters, from 0; null: all."""
    exclude: tuple[str, ...] | None = None
    """Module name suffixes that get no adapter even if `targets` includes them."""
    bias: Literal["all", "adapted"] | None = None
    """Also train the backbone's biases: all of them, or those of adapted layers."""
    train_whole: tuple[str, ...] | None = None
    """Module name suffixes to train in full, in addition to the adapter, and save with it (PEFT's modules_to_save)."""
    experts: int | None = None
    """Rank of an adapter on every expert of a mixture of experts; null: experts stay frozen. The router is always
    frozen."""
    start: str | None = None
    """Continue training this adapter: a run directory or a PEFT directory of the same backbone and settings. The
    optimizer state starts fresh."""
    under: str | None = None
    """A frozen adapter (run or PEFT directory) to train the new one on top of; the saved adapter holds both."""

    soft_tokens: int | None = None
    """Instead of LoRA, train this many vectors before the embeddings of every sequence (prompt tuning, 2104.08691; the
    soft prompt of eP-ALM, 2303.11403). For decoders without packing (`task.pack: false`), in one process."""
    projector: Projector | None = None
    """Insert features that your own encoder made of each example's image, sound or video before its soft tokens and
    text, through one trained linear map (eP-ALM, 2303.11403); null: examples are text only. Needs `soft_tokens`."""

    def __post_init__(self) -> None:
        check_bounds(
            self, rank=(1, None), dropout=(0, 0.99), soft_tokens=(1, None), init_rows=(1, None), experts=(1, None)
        )
        if self.soft_tokens is not None:
            for name, setting in self.__dataclass_fields__.items():
                if name not in ("soft_tokens", "projector", "rank") and getattr(self, name) != setting.default:
                    raise ValueError(f"{name} is a setting of LoRA, which soft_tokens takes the place of; leave it out")
        elif self.projector is not None:
            raise ValueError("projector puts features before trained soft tokens; set soft_tokens: 1")
        if not isinstance(self.alpha, str):
            check_bounds(self, alpha=(0, None))
            check_nonzero(
                self, alpha="the adapter would be multiplied by 0; elsewhere 0 means the default, here null does"
            )
        for name, values in {"ranks": self.ranks, "alphas": self.alphas}.items():
            if odd := [(key, value) for key, value in (values or {}).items() if not 0 < value < inf]:
                raise ValueError(f"{name}.{odd[0][0]} must be above 0 and finite, got {odd[0][1]}; see `exclude`")
            for key in values or {}:
                try:
                    re.compile(key)
                except re.error as error:
                    raise ValueError(
                        f"{name}: {key!r} is no name or pattern ({error}); write .* for any text"
                    ) from None
        if self.layers is not None and min(self.layers, default=-1) < 0:
            raise ValueError(f"layers must hold numbers ≥ 0, got {list(self.layers)}; null: all blocks")
        if self.init_rows is not None and self.init not in DATA_INITS:
            raise ValueError(f"init_rows goes with init: {', '.join(DATA_INITS)}; init is {self.init}")
        if self.init != "default" and (self.start is not None or self.under is not None):
            other = "start" if self.start is not None else "under"
            raise ValueError(f"init must be default with {other}, which says what the adapter begins with")
        if self.start is not None and self.under is not None:
            raise ValueError("start does not go with under: each says what the adapter begins with; leave one out")
        if self.dora and (self.under is not None):
            raise ValueError("under does not go with dora, whose weight change is no sum")

    @property
    def numerator(self) -> float:
        """Value of `lora_alpha` for PEFT."""
        return self.numerator_of(self.rank)

    @property
    def numerators(self) -> dict[str, float]:
        """Value of `alpha_pattern` for PEFT."""
        return {**{name: self.numerator_of(rank) for name, rank in (self.ranks or {}).items()}, **(self.alphas or {})}

    def numerator_of(self, rank: int) -> float:
        """Return the alpha of a layer of rank `rank` that is not in `alphas`."""
        if isinstance(self.alpha, str):
            return rank
        return 2 * rank if self.alpha is None else self.alpha


OptimizerKind = Literal[
    "adamw", "adamw-8bit", "paged-adamw", "paged-adamw-8bit", "gauss-newton", "riemannian", "lora-muon"
]
FACTOR_OPTIMIZERS = ("riemannian", "lora-muon")
"""Optimizers whose step of one LoRA factor depends on the other factor of its layer."""


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """Optimizer of the adapter (and head) in float32, with a learning-rate schedule."""

    kind: OptimizerKind = "adamw"
    """`adamw`; or from bitsandbytes (extra `quant`, one process): `adamw-8bit` keeps its two moments in 8 bits with
    blocks of 256 values, the `paged` ones keep them in host memory that a CUDA device pages in. `gauss-newton`: every
    step solves the least-squares problem of the linearised model, for squared losses and small problems (all examples
    and weights at once); set lr: 1, schedule: constant, warmup: 0 and clip: null. Two step both factors of a linear
    layer together, and leave all else to AdamW: `riemannian`, AdamW of the gradients (BᵀB + δ)⁻¹∇A and ∇B(AAᵀ + δ)⁻¹
    (2402.02347, as PEFT's); `lora-muon`, steps along the momentum that change BA by lr/10 in root mean square through
    A and as much through B, with equal singular values (2606.12921)."""
    lr: float = 1e-3
    """Peak learning rate."""
    weight_decay: float = 0.0
    """Decoupled weight decay of matrices; biases, norms and other vectors (DoRA's magnitudes) have none. For
    gauss-newton, the λ of ‖residuals‖² + λ‖weights‖²; lora-muon shrinks BA, not each factor, by lr · weight_decay."""
    fixed: tuple[Literal["a", "head"], ...] | None = None
    """Parameters that keep their initial values but are saved with the rest: `a`, the factors A, so that only B trains
    (LoRA-FA, 2308.03303); `head`, everything that is not LoRA."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Adam moment decays."""
    eps: float = 1e-8
    """Adam denominator offset."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """Decay after warm-up, to zero right after the last step (constant: none)."""
    warmup: float = 0.03
    """Fraction of the steps with linearly rising learning rate."""
    clip: float | None = 1.0
    """Maximum global gradient norm; null: no clipping."""
    lora_plus: float | None = None
    """LoRA+: ratio of the learning rate of the B factors to that of everything else; null: off."""
    damping: float | None = None
    """δ of riemannian and lora-muon, added to the diagonals of BᵀB and AAᵀ before they are inverted; null: 0.01."""

    def __post_init__(self) -> None:
        check_bounds(self, lr=(0, None), weight_decay=(0, None), eps=(0, None), warmup=(0, 1), lora_plus=(1, None))
        check_bounds(self, clip=(0, inf))
        check_nonzero(self, lr="the adapter would stay as it begins; elsewhere 0 may mean a default, here 1e-3 is one")
        check_nonzero(self, clip="no gradient would be left; elsewhere 0 switches clipping off, here write null")
        check_nonzero(self, eps="a parameter without a gradient yet would become 0/0; write 1e-8")
        if self.kind == "gauss-newton" and (self.clip is not None or self.lora_plus is not None):
            wrong = "clip" if self.clip is not None else "lora_plus"
            raise ValueError(f"{wrong} is of gradients; gauss-newton goes along none: set {wrong}: null")
        if self.kind == "gauss-newton" and (self.betas, self.eps) != (Optimizer.betas, Optimizer.eps):
            raise ValueError("betas and eps are of averages of gradients, and gauss-newton keeps none; leave them out")
        check_bounds(self, damping=(0, None))
        check_nonzero(self, damping="BᵀB, which begins at 0, could not be inverted; write null for 0.01")
        if self.damping is not None and self.kind not in FACTOR_OPTIMIZERS:
            raise ValueError(f"damping is of {' and '.join(FACTOR_OPTIMIZERS)}; kind is {self.kind}; leave it out")
        if self.kind == "lora-muon" and self.lora_plus is not None:
            raise ValueError("lora_plus: lora-muon gives A and B half of each step; set lora_plus: null")
        if self.kind == "lora-muon" and self.lr * self.weight_decay >= 1:
            raise ValueError(f"lr · weight_decay must be below 1, got {self.lr * self.weight_decay:g}")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas must each be at least 0 and below 1, got {list(self.betas)}")

    def is_fixed(self, name: str) -> bool:
        """Return True if `fixed` keeps a trained tensor at its initial values."""
        is_a = ".lora_A." in name or name.endswith(".lora_embedding_B")
        return ("a" in (self.fixed or ()) and is_a) or ("head" in (self.fixed or ()) and ".lora_" not in name)


Quantization = Literal["nf4", "nf4-double", "int8"]
Precision = Literal["auto", "fp32", "bf16", "fp16"]
Extend = Literal["stretch", "rewarm", "keep-end"]
WIDTHS = {"auto": 4, "fp32": 4, "bf16": 2, "fp16": 2}
"""Bytes per value by `train.precision`; `auto`, not resolved yet, counts as the widest."""


@dataclass(frozen=True, kw_only=True)
class Train:
    """Training length, batch sizes, and the intervals of evaluation and checkpoints."""

    steps: int = 200
    """Optimizer steps."""
    epochs: float | None = None
    """Passes over the fine-tuning examples (packed rows if they are packed), instead of `steps`; 1.5 is one and a half.
    Converted to `steps`, rounded up, once the examples are known, and recorded as `steps`; a sweep uses its recipe's
    own examples for all cells. Not for sources mixed by weight, nor for comparisons."""
    extend: Extend = "stretch"
    """Learning rate when a finished run is resumed with more `steps`. `stretch`: from there on that of a run of all
    those steps, so a cosine that had reached 0 jumps up; `rewarm`: the added steps get their own schedule, including
    warm-up; `keep-end`: keep the rate of the last step."""
    batch_size: int = 16
    """Examples of one micro-batch, summed over all data-parallel ranks."""
    accumulate: int = 1
    """Micro-batches per optimizer step; the loss is divided by the step's target tokens."""
    seed: int = 0
    """Random seed; data order, subset, label noise, adapter initialisation and noise derive from it by name."""
    max_length: int = 256
    """Maximum sequence length in tokens; longer examples are truncated and counted."""
    truncation: Literal["left", "right"] | None = None
    """End at which a text or prompt is cut if an example is longer. Null: the left of a completion's prompt, else the
    right. An answer is always cut on the right, and only if nothing is left of the prompt."""
    overlong: Literal["drop", "refuse", "split"] | None = None
    """Longer examples are truncated (null), dropped from the training data (drop; dev and test examples are truncated),
    stop the run (refuse), or are read in consecutive pieces (split: language-model and masked-lm), every token once."""
    max_cut: float | None = None
    """Largest fraction of the examples, per split and source, that `max_length` may truncate or leave without any
    prompt; more stops the run. Null: the larger of 0.5 and `task.max_truncated` for truncated examples,
    `task.max_truncated` (else none) for those without a prompt."""
    max_dropped: float | None = None
    """Largest fraction of the training examples, per source, that `overlong: drop` may drop; more stops the run. Null:
    0.1."""
    group: Literal["length"] | None = None
    """`length`: examples of similar length share a micro-batch, redrawn in every window of 50 micro-batches, which
    saves padding; for tasks that are not packed. Null: random batches."""
    precision: Precision = "auto"
    """Compute precision: autocast over a backbone stored in the same precision. `auto` takes the fastest on the current
    device: bf16 on CUDA devices that support it, fp16 with loss scaling on older ones, and on a CPU the result of a
    short measurement. The choice is printed, written to the run's recipe, and kept on every later machine. fp16 is for
    CUDA."""
    tf32: bool = False
    """Let float32 matrix products on CUDA round their inputs to 10 mantissa bits (TF32), several times as fast; for
    precision fp32."""
    backbone_precision: Literal["auto", "same", "bf16"] = "auto"
    """Storage of frozen weights: in the compute precision (`same`), or in bf16 at half the memory of float32, each
    widened when it is used (`bf16`; precision fp32, one process, .98 to 1.25 of the time). `auto` is `same` unless
    that does not fit into memory and bf16 does."""
    quantization: Quantization | None = None
    """Store the backbone's linear layers in 4 bits (`nf4`; `nf4-double` quantises the scales too) or 8 (`int8`); they
    compute with the dequantised values in `train.precision`. Needs the extra `quant`."""
    adapter_precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Storage of adapters: float32 (`auto`); bf16 halves the memory of their inputs, and the optimizer keeps float32
    masters. Not with fp16, where their gradients would underflow."""
    backbone_dropout: float | None = None
    """Dropout rate of the backbone during training; 0 turns it off. Null: the rates in its config.json."""
    checkpointing: Literal["none", "selective", "full"] = "none"
    """Recompute activations in the backward pass instead of storing them: of attention only (selective), or of whole
    blocks (full)."""
    compile: bool = False
    """Compile each transformer block (torch.compile) for training; sequences are padded to `max_length`, so that there
    is one graph. On any mesh that is written out (not `mesh.auto`)."""
    skip_nonfinite: int = 0
    """Maximum number of consecutive steps to skip because their loss or gradient is not finite; one more stops the
    run."""
    spikes: SpikeRecovery | None = None
    """Roll back and skip batches when the loss spikes; null: off."""
    peak_tflops: float | None = None
    """Peak throughput of one device in TFLOP/s, for the MFU; null: `flatshift train` measures a large matrix
    product."""
    eval_every: int | float = 0
    """Steps between dev evaluations; up to 1.0 a fraction of the steps (0.25: four times); 0: only at the end."""
    best: str = "auto"
    """Metric that selects the best dev evaluation: the lower `loss`, the higher `accuracy`, or any other metric of the
    task, for example `f1_macro` or `numeric_match`, which is then evaluated in full each time (ties: the lower loss).
    `auto` is accuracy for classification, where with few labels the loss rises long before accuracy falls, and loss
    elsewhere."""
    patience: int | None = None
    """Stop after this many dev evaluations without improvement (`train.best`); null: never."""
    save_every: int = 100
    """Steps between checkpoints; 0: only at the end of a stage and when interrupted."""
    keep: int = 2
    """Checkpoints kept per stage."""
    device: str = "auto"
    """Device to train on: `auto`, `cpu`, `cuda` or `cuda:N`."""
    deterministic: bool = False
    """Make runs on the same machine bit-identical on CUDA too: torch's deterministic algorithms, flash or plain
    attention, our own loss slices. Slower; an operation without such an algorithm stops the run."""
    threads: int | None = None
    """CPU threads; null: torch's own choice. Bit-identical results need the same number."""

    def __post_init__(self) -> None:
        check_bounds(self, steps=(1, None), batch_size=(1, None), accumulate=(1, None), max_length=(2, None))
        check_bounds(self, eval_every=(0, None), patience=(1, None), save_every=(0, None), keep=(1, None))
        check_bounds(self, seed=(0, 2**63 - 1), skip_nonfinite=(0, None), threads=(1, 4096), max_dropped=(0, 1))
        check_bounds(self, max_cut=(0, 1), backbone_dropout=(0, 0.99), peak_tflops=(1e-6, None), epochs=(0, None))
        check_bounds(self, steps=(None, MAX_STEPS), max_length=(None, MAX_LENGTH))
        check_nonzero(self, epochs="nothing would be trained; give how often to go through the rows, as 3 or 0.5")
        if self.eval_every > 1 and self.eval_every != int(self.eval_every):
            raise ValueError(f"eval_every must be whole steps, or a share of the steps below 1, got {self.eval_every}")
        if self.max_dropped is not None and self.overlong != "drop":
            raise ValueError("max_dropped is of what `overlong: drop` leaves out; set that, or leave max_dropped out")
        if self.spikes is not None and self.save_every == 0:
            raise ValueError("spikes need checkpoints to go back to; set train.save_every above 0")

    @property
    def evaluation_interval(self) -> int:
        """Steps between dev evaluations; 0: only at the end."""
        every = self.eval_every  # 1 is every step; who writes 1.0 means all of them
        return max(1, round(every * self.steps)) if 0 < every <= 1 and isinstance(every, float) else int(every)


MESH_AXES = ("pp", "replicate", "dp", "ep", "cp", "tp")
"""Axes of a mesh, those of the farthest ranks first."""


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """Device mesh: number of ranks along each parallel axis, and its options. All ones: one process, one device."""

    replicate: int = 1
    """Full replicas of the backbone (DDP); together with dp: hybrid sharding (HSDP), shards inside a node."""
    dp: int = 1
    """Parameter shards (FSDP2, ZeRO-3): each rank holds 1/dp of the weights and processes its own part of the batch."""
    tp: int = 1
    """Tensor-parallel ranks: each holds its heads and columns of every block (Megatron-LM)."""
    pp: int = 1
    """Pipeline stages: each holds a run of blocks (GPipe, PTD-P)."""
    cp: int = 1
    """Context-parallel ranks: each holds 1/cp of every sequence's tokens and gathers keys and values in attention
    (sequences are padded to a multiple of 2·cp tokens). For sequences that do not fit on one device; dp communicates
    less if they do."""
    ep: int = 1
    """Expert-parallel ranks: of the dp ranks, as many share the experts of every block of a mixture of experts, send
    each other the tokens that are routed there, and never gather the experts of others."""
    auto: bool = False
    """Choose the axes for the available devices and print why; axes that are set stay as they are."""
    zero: Literal[1, 2, 3] = 3
    """State sharded along dp: 3 weights too; 2 gradients and optimizer state of the adapter; 1 its optimizer state
    only."""
    reshard: bool | None = None
    """Free a block's gathered weights after its forward pass and gather them again for backward; false keeps them (half
    the traffic, more memory), in a pipeline for all pieces of a step. null: true without a pipeline, false with one."""
    adapters: Literal["shard", "replicate"] = "shard"
    """Shard adapters along dp with their block, or replicate them and sum their gradients in one collective."""
    offload: bool = False
    """Keep frozen and adapter shards in host memory and copy a block's shard to the device ahead of its use."""
    sequence_parallel: bool = False
    """Along tp, split norms and residuals by tokens (Korthikanti et al. 2205.05198)."""
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero-bubble", "zbv"] = "1f1b"
    """Pipeline schedule; interleaved, zero-bubble and zbv hold several stages per rank (`virtual`)."""
    virtual: int | None = None
    """Stages per pipeline rank; null: 1 for gpipe and 1f1b, 2 for the others."""
    microbatches: int | None = None
    """Pieces into which the pipeline splits each micro-batch; null: as many as make a step shortest, up to four per
    rank. The bubble is (pp - 1) / (virtual * pieces * accumulate)."""
    stall: float = 45.0
    """Seconds without progress on any rank after which the job ends and names the rank that hangs (at least ten times
    the longest step so far)."""

    def __post_init__(self) -> None:
        check_bounds(self, replicate=(1, None), dp=(1, None), tp=(1, None), pp=(1, None), cp=(1, None), ep=(1, None))
        check_bounds(self, virtual=(1, None), microbatches=(1, None), stall=(5, None))

    @property
    def reshards(self) -> bool:
        """True if gathered weights are freed after a forward pass."""
        return self.pp == 1 if self.reshard is None else self.reshard

    @property
    def size(self) -> int:
        """Total number of ranks."""
        return self.replicate * self.dp * self.tp * self.pp * self.cp


@dataclass(frozen=True, kw_only=True)
class TraceRecording:
    """Training trace, written to `trace.jsonl`: one line per recorded step of fine-tuning, in one process.

    Recording does not change training: results are bit-identical with and without it.
    """

    steps: Literal["log"] | tuple[int, ...] = "log"
    """Steps after which metrics are recorded: `log` (evenly spaced in the logarithm of the step), or a list of steps.
    Always also before the first step and after the last."""
    per_doubling: int = 2
    """Recorded steps in each doubling of the step (steps: log)."""
    train_rows: int | None = 128
    """Training examples evaluated at each recorded step, drawn with `train.seed` so that larger numbers contain smaller
    ones; null: all. Their evaluation is most of the cost of recording."""
    heldout_rows: int | None = 128
    """Examples of dev, and of test, evaluated at each recorded step; the draw does not depend on `train.seed`. Null:
    all."""
    dynamics: bool = True
    """Norms of the adapter, its gradients and its last weight change, and the number of directions in that change."""
    sharpness: tuple[int, ...] = ()
    """Steps at which curvature in the adapter's space is measured too: λ_max, the trace, and λ_max preconditioned by
    Adam. With 0 in the list, the run reports before step 1 the learning rate above which Adam would oscillate there."""
    sharpness_rows: int = 64
    """Training examples whose mean loss the curvature is computed from."""

    def __post_init__(self) -> None:
        check_bounds(
            self, per_doubling=(1, None), train_rows=(1, None), heldout_rows=(1, None), sharpness_rows=(1, None)
        )
        for name in ("steps", "sharpness"):
            value = getattr(self, name)
            if value != "log" and any(step < 0 for step in value):
                raise ValueError(f"{name} must hold numbers ≥ 0, got {min(value)}")
        if self.steps != "log" and self.per_doubling != TraceRecording.per_doubling:
            raise ValueError("per_doubling is of steps: log, and steps lists its own; leave one of them out")


@dataclass(frozen=True, kw_only=True)
class Evaluate:
    """Evaluation settings."""

    batch_size: int = 32
    """Examples per batch."""
    train_limit: int | None = None
    """Training examples to evaluate too, drawn with `train.seed`, or all if there are fewer; a larger number contains a
    smaller one; 0: none. Null: none in a run, and 1,000 in a cell of a sweep or study, whose curves show the training
    error."""
    bootstrap: int = 1000
    """Bootstrap resamples of the examples for each interval."""
    confidence: float = 0.95
    """Coverage of the intervals."""
    cold: int = 0
    """First examples of test (else dev), or all if there are fewer, on which the base model without the adapter is
    evaluated too, at the end of a run, for the difference on the same examples; 0: none. Skipped, with a note, if a
    head or soft tokens are new."""
    answers: int = 2
    """First rows of test (else dev) that the trained model answers at the end of a run on one process, printed next to
    the rows' own answers: greedy, at most 64 tokens. For tasks that answer a prompt; 0: none."""

    def __post_init__(self) -> None:
        check_bounds(self, batch_size=(1, None), train_limit=(0, None), cold=(0, None), answers=(0, None))
        check_bounds(self, bootstrap=(1, 1_000_000), confidence=(0.5, 0.9999))


TrackerKind = Literal["tensorboard", "wandb", "trackio"]


@dataclass(frozen=True, kw_only=True)
class Tracker:
    """Experiment trackers that also receive the lines of metrics.jsonl; nothing is sent anywhere unless enabled
    here."""

    kinds: tuple[TrackerKind, ...] = ()
    """`tensorboard` (event files in the run directory), `wandb`, `trackio`: the extras `track-tensorboard`,
    `track-wandb`, `track-trackio`."""
    project: str = "flatshift"
    """Project name for wandb and trackio."""
    online: bool = False
    """Let wandb send its data to its server; else its files stay in the run directory (`wandb sync`). trackio keeps its
    own database on this machine."""


Value = TypeVar("Value")


def match_pattern(patterns: Mapping[str, Value] | None, layer: str, default: Value) -> Value:
    """Return the value of the first pattern that matches the end of the name `layer` at a dot, else `default`."""
    for pattern, value in (patterns or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", layer):
            return value
    return default


MAX_STEPS = 10**9
"""Maximum steps of a stage: at a millisecond each they take twelve days."""
MAX_LENGTH = 2**24
"""Maximum tokens of a sequence."""


def check_bounds(config: Any, **bounds: tuple[float | None, float | None]) -> None:
    """Check that field values are in `(low, high)`, ends included. An upper bound of None allows any finite value; a
    value of None passes.

    Raises ValueError that starts with the field's name, so that a recipe loader can report where it was set.
    """
    for name, (low, high) in bounds.items():
        value = getattr(config, name)
        if value is None:
            continue
        # negated comparisons, so that NaN fails too
        if (low is not None and not value >= low) or (high is not None and not value <= high):
            range_text = (
                f"≥ {low}" if high in (None, math.inf) else f"≤ {high}" if low is None else f"between {low} and {high}"
            )
            raise ValueError(f"{name} must be {range_text}, got {value}")
        if high is None and math.isinf(value):
            raise ValueError(f"{name} must be a finite number, got {value}")


def check_nonzero(config: Any, **effects: str) -> None:
    """Reject the value 0 for settings with which nothing would be trained.

    effects: for each field, the effect of 0 and what to write instead. Raises ValueError as `check_bounds`.
    """
    for name, effect in effects.items():
        if getattr(config, name) == 0:
            raise ValueError(f"{name} must be above 0, got 0: {effect}")
