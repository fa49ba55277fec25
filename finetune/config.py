"""What a fine-tuning run can be told: one frozen dataclass per component. Imports nothing heavy.

What a run learns is in `flatshift.finetune.tasks`. Every field's docstring is its help text.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Any, Literal, TypeVar

DATA_INITS = ("eva", "corda", "lora-ga")
"""`adapter.init` that looks at training rows."""


@dataclass(frozen=True, kw_only=True)
class Projector:
    """One trained linear map (with bias) from feature vectors that every row brings along to the backbone's width."""

    features: str = "features"
    """Column of the rows: a list of `width` numbers, or a list of such lists where there are several vectors."""
    width: int = 768
    """Numbers in one vector, as the encoder that made them has it (ViT-B, AST and TimeSformer: 768)."""
    vectors: int | None = None
    """Vectors of each row; null: one, or one for each block of `inject`."""
    inject: Literal["first"] | tuple[int, ...] = "first"
    """`first`: each vector is a place of its own at the front of the row, from the first block on. Blocks, from 0: all
    vectors share one place; at each of these blocks the next vector replaces what is there, and before the first of
    them no token sees the place (eP-ALM's own way, in the upper blocks)."""

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
        """K: vectors of each row."""
        return (self.vectors or 1) if isinstance(self.inject, str) else len(self.inject)

    @property
    def places(self) -> int:
        """Positions that they take at the front of every row."""
        return self.count if isinstance(self.inject, str) else 1


@dataclass(frozen=True, kw_only=True)
class Spikes:
    """What to do when the loss jumps: roll back to a checkpoint and leave out the batches around (PaLM, arXiv
    2204.02311, §5.1).

    An update is a spike where its loss is above m + `threshold` · max(1.4826 · MAD, m/100), m the median of the losses
    of the last `window` updates and MAD their median distance from it.
    """

    window: int = 64
    """Updates whose losses say what is usual; none is a spike before so many."""
    threshold: float = 8.0
    """Robust standard deviations above the median."""
    back: int = 100
    """Updates before the spike that are undone at least: training goes on from the newest regular checkpoint (a
    multiple of `train.save_every`) that is so old."""
    skip: int = 200
    """Batches that are left out from there on; always at least those up to the spike."""
    most: int = 3
    """Spikes that a stage goes back for; the next one stops it."""

    def __post_init__(self) -> None:
        check_bounds(self, window=(4, None), threshold=(1, None), back=(0, None), skip=(1, None), most=(1, None))


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """A LoRA adapter, passed to PEFT's `LoraConfig`."""

    rank: int = 8
    """r: rows of A and columns of B."""
    alpha: float | Literal["rank"] | None = None
    """Scale numerator; the update is alpha/r·BA (alpha/√r with rslora). Null means 2·rank: a constant scale of 2;
    `rank` a constant scale of 1; a number the same alpha at every rank."""
    targets: str | tuple[str, ...] = "all-linear"
    """Module name suffixes that get an adapter, or `all-linear`."""
    dropout: float = 0.0
    """LoRA dropout on the adapter's input."""
    rslora: bool = False
    """Scale by alpha/√r instead of alpha/r."""
    dora: bool = False
    """Weight-decomposed LoRA: trains the magnitude vector too."""
    init: Literal["default", "pissa", "olora", "orthogonal", "loftq", "eva", "corda", "lora-ga"] = "default"
    """What A and B start from; other than `default` in one process only, by PEFT's own code. `default`: A drawn by
    `train.seed`, B = 0. `orthogonal`: both drawn, with BA = 0. From the weights: `pissa`, the r largest singular
    directions (2404.02948); `olora`, the first r of a QR decomposition (2406.01775); `loftq`, what 4-bit quantisation
    left out (2310.08659; with `train.quantization`). From `init_rows` training rows: `eva`, the directions in which a
    layer's inputs vary most, which also shares the ranks out among layers (2410.07170); `corda`, singular directions
    weighted by the inputs' covariance (2406.05223); `lora-ga`, those of the first gradient (2407.05000). What pissa,
    olora, corda and lora-ga start from is taken out of the frozen weights, and saved adapters hold the difference."""
    init_rows: int | None = None
    """Training rows, drawn by `train.seed`, that eva, corda and lora-ga look at; null: 64."""
    ranks: dict[str, int] | None = None
    """Other ranks for some layers: module name suffix or pattern → r (PEFT's rank_pattern), as `q_proj: 16`."""
    alphas: dict[str, float] | None = None
    """Other scale numerators for some layers (PEFT's alpha_pattern). A layer of `ranks` that is not named here keeps
    the scale of the others where `alpha` is null or `rank`."""
    layers: tuple[int, ...] | None = None
    """Blocks that get adapters, from 0; null: all."""
    exclude: tuple[str, ...] | None = None
    """Module name suffixes that get no adapter though `targets` names them."""
    bias: Literal["all", "adapted"] | None = None
    """Train the backbone's own biases too: all of them, or those of adapted layers."""
    train_whole: tuple[str, ...] | None = None
    """Module name suffixes that train whole, beside the adapter, and are saved with it (PEFT's modules_to_save)."""
    experts: int | None = None
    """Rank of an adapter on every expert of a mixture of experts; null: experts stay as they are. The router is
    always frozen."""
    start: str | None = None
    """Train on from this adapter: a run directory or a PEFT directory of the same backbone and settings. The optimizer
    starts anew."""
    under: str | None = None
    """A frozen adapter, of a run or PEFT directory, beneath the one that trains; the saved adapter holds both."""

    soft_tokens: int | None = None
    """Instead of LoRA: train so many vectors that lie before every row's embeddings (prompt tuning, 2104.08691; the
    soft prompt of eP-ALM, 2303.11403). For decoders without packing (`task.pack: false`), in one process."""
    projector: Projector | None = None
    """Put features that an encoder of yours made of each row's image, sound or video before its soft tokens and its
    text, through one trained linear map (eP-ALM, 2303.11403); null: rows are text alone. Needs `soft_tokens`."""

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
            refuse_zero(
                self, alpha="the adapter would be multiplied by 0; elsewhere 0 means the default, here null does"
            )
        for name, values in {"ranks": self.ranks, "alphas": self.alphas}.items():
            if odd := [(key, value) for key, value in (values or {}).items() if not 0 < value < inf]:
                raise ValueError(f"{name}.{odd[0][0]} must be above 0 and finite, got {odd[0][1]}; see `exclude`")
        if any(layer < 0 for layer in self.layers or ()):
            raise ValueError(f"layers must hold numbers ≥ 0, got {min(self.layers or ())}")
        if self.init_rows is not None and self.init not in DATA_INITS:
            raise ValueError(f"init_rows goes with init: {', '.join(DATA_INITS)}; init is {self.init}")
        if self.init != "default" and (self.start is not None or self.under is not None):
            other = "start" if self.start is not None else "under"
            raise ValueError(f"init must be default with {other}, which says what the adapter begins with")
        if self.start is not None and self.under is not None:
            raise ValueError("start does not go with under: each says what the adapter begins with; leave one out")
        if self.dora and (self.under is not None):
            raise ValueError("under does not go with dora, whose update is no sum")

    @property
    def numerator(self) -> float:
        """The alpha that PEFT is given."""
        return self.numerator_of(self.rank)

    @property
    def numerators(self) -> dict[str, float]:
        """The alpha_pattern that PEFT is given."""
        return {**{name: self.numerator_of(rank) for name, rank in (self.ranks or {}).items()}, **(self.alphas or {})}

    def numerator_of(self, rank: int) -> float:
        """The alpha of a layer of rank `rank` that is not in `alphas`."""
        if isinstance(self.alpha, str):
            return rank
        return 2 * rank if self.alpha is None else self.alpha


OptimizerKind = Literal["adamw", "adamw-8bit", "paged-adamw", "paged-adamw-8bit", "gauss-newton"]


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """AdamW over the adapter (and head) in float32, with a learning-rate schedule."""

    kind: OptimizerKind = "adamw"
    """`adamw`; or by bitsandbytes (extra `quant`, one process): `adamw-8bit` keeps its two moments in 8 bits a block of
    256 values, the `paged` ones keep theirs in host memory that a CUDA device pages in. `gauss-newton`: every update
    solves the least-squares problem of the model linearised there, for squared losses and small problems (all rows and
    weights at once); set lr: 1, schedule: constant, warmup: 0 and clip: null."""
    lr: float = 1e-3
    """Peak learning rate."""
    weight_decay: float = 0.0
    """Decoupled weight decay of matrices; biases, norms and other vectors (DoRA's magnitudes) have none. Of
    gauss-newton the λ of ‖residuals‖² + λ‖weights‖²."""
    fixed: tuple[Literal["a", "head"], ...] | None = None
    """What keeps its first values though it is saved with the rest: `a`, the factors A, so that B alone trains
    (LoRA-FA, 2308.03303); `head`, everything that is not LoRA."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Adam moment decays."""
    eps: float = 1e-8
    """Adam denominator offset."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """Decay after warm-up, to zero at the last step (constant: none)."""
    warmup: float = 0.03
    """Share of the steps with linearly rising learning rate."""
    clip: float | None = 1.0
    """Global gradient-norm bound; null for none."""
    lora_plus: float | None = None
    """LoRA+: by how much the learning rate of the B factors is above that of everything else; null: not."""

    def __post_init__(self) -> None:
        check_bounds(self, lr=(0, None), weight_decay=(0, None), eps=(0, None), warmup=(0, 1), lora_plus=(1, None))
        check_bounds(self, clip=(0, inf))
        refuse_zero(self, lr="the adapter would stay as it begins; elsewhere 0 may mean a default, here 1e-3 is one")
        refuse_zero(self, clip="no gradient would be left; elsewhere 0 switches clipping off, here write null")
        refuse_zero(self, eps="a parameter without a gradient yet would become 0/0; write 1e-8")
        if self.kind == "gauss-newton" and (self.clip is not None or self.lora_plus is not None):
            wrong = "clip" if self.clip is not None else "lora_plus"
            raise ValueError(f"{wrong} is of gradients; gauss-newton goes along none: set {wrong}: null")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas must each be at least 0 and below 1, got {list(self.betas)}")


Quantization = Literal["nf4", "nf4-double", "int8"]
Precision = Literal["auto", "fp32", "bf16", "fp16"]
Extend = Literal["stretch", "rewarm", "keep-end"]
WIDTHS = {"auto": 4, "fp32": 4, "bf16": 2, "fp16": 2}
"""Bytes of a value by `train.precision`; what is not settled yet may turn out to be the widest."""


@dataclass(frozen=True, kw_only=True)
class Train:
    """How long, how much at once, and how often to look and to save."""

    steps: int = 200
    """Optimizer updates."""
    epochs: float | None = None
    """How often the fine-tune goes through its training rows (packed rows where those are packed), instead of `steps`;
    1.5 is once and a half. Counted in updates, rounded up, when the rows are known, and written down as `steps`; a
    sweep counts those of its recipe's own rows for all cells. Not for sources mixed by weight, nor for comparisons."""
    extend: Extend = "stretch"
    """The learning rate where a run that ended is resumed with more `steps`. `stretch`: from there on that of a run of
    all those steps, so a cosine that had come to 0 jumps up; `rewarm`: the added steps are a schedule of their own,
    warm-up included; `keep-end`: the rate of the last update stays."""
    batch_size: int = 16
    """Rows of one micro-batch, over all data-parallel ranks together."""
    accumulate: int = 1
    """Micro-batches of one optimizer update; the loss is divided by the update's supervised tokens."""
    seed: int = 0
    """The one seed; data order, subset, label noise, adapter initialisation and noise derive from it by name."""
    max_length: int = 256
    """Longest row, tokens; longer samples are truncated and counted."""
    truncation: Literal["left", "right"] | None = None
    """Which end a text or prompt loses where a sample is longer. Null: the left of a completion's prompt, else the
    right. An answer always loses its right, and only where the prompt has nothing left to lose."""
    overlong: Literal["drop", "refuse", "split"] | None = None
    """Longer samples are truncated (null), left out of the training rows (drop; dev and test rows are truncated), stop
    the run (refuse), or are read in consecutive pieces (split: language-model and masked-lm), every token once."""
    max_cut: float | None = None
    """Largest share of the samples, of each split and source, that `max_length` may cut, down to nothing of a prompt;
    more is refused. Null: 0.5 or `task.max_truncated`, the larger, and of whole prompts only the latter (else none)."""
    max_dropped: float | None = None
    """Largest share of the training samples, of each source, that `overlong: drop` leaves out; more is refused. Null:
    0.1."""
    group: Literal["length"] | None = None
    """`length`: rows of like length share a micro-batch, drawn anew in every window of 50 micro-batches, which saves
    padding; for tasks that are not packed. Null: rows meet by chance."""
    precision: Precision = "auto"
    """What a step computes in: autocast over a backbone kept in the same. `auto` takes what the device at hand does
    fastest: bf16 on CUDA devices that multiply it, fp16 with loss scaling on older ones, and on a CPU what a short
    measurement says. What it took is printed, written into the run's recipe, and kept on every later machine. fp16 is
    for CUDA."""
    tf32: bool = False
    """Let float32 products on CUDA round their inputs to 10 bits (TF32), several times as fast; for precision fp32."""
    backbone_precision: Literal["auto", "same", "bf16"] = "auto"
    """How frozen weights are kept: as they compute (`same`), or in half of float32's memory in bf16, each widened when
    it is used (`bf16`; precision fp32, one process, 1.1 to 1.3 times the time). `auto` is `same` unless that does not
    fit into memory and bf16 does."""
    quantization: Quantization | None = None
    """Keep the backbone's linear layers in 4 bits (`nf4`; `nf4-double` quantises the scales too) or 8 (`int8`); they
    compute with the dequantised values in `train.precision`. Needs the extra `quant`."""
    adapter_precision: Literal["auto", "fp32", "bf16"] = "auto"
    """How adapters are kept: in float32 (`auto`); bf16 halves what their inputs cost in memory, the optimizer keeps
    float32 masters. Not in fp16, where their gradients would vanish."""
    backbone_dropout: float | None = None
    """The backbone's own dropout rates while it trains; 0 turns them off. Null: those of its config.json."""
    checkpointing: Literal["none", "selective", "full"] = "none"
    """Recompute in backward instead of keeping activations: of attention only (selective), or of whole blocks."""
    compile: bool = False
    """Compile each transformer block (torch.compile) for training; rows are padded to `max_length`, so that there is
    one graph. In one process, or on `mesh.dp` and `mesh.replicate`."""
    skip_nonfinite: int = 0
    """How many updates in a row may be left out because their loss or gradient is not a finite number; one more stops
    the run."""
    spikes: Spikes | None = None
    """Go back and leave out batches when the loss jumps; null: go on."""
    peak_tflops: float | None = None
    """What one device can do, TFLOP/s, for the MFU; null: `flatshift train` measures a large matrix product."""
    eval_every: int | float = 0
    """Updates between dev evaluations; below 1 a share of the steps (0.25: four times); 0: only at the end."""
    best: str = "auto"
    """What makes one dev evaluation better than another: the lower `loss`, the higher `accuracy`, or any other metric
    that the task is judged by, for example `f1_macro` or `numeric_match`, which is then judged whole each time (ties:
    the lower loss). `auto` is accuracy for classification, where few labels make the loss rise long before the accuracy
    falls, and loss elsewhere."""
    patience: int | None = None
    """Stop after this many dev evaluations without a better one (`train.best`); null: never."""
    save_every: int = 100
    """Updates between checkpoints; 0: only at the end of a stage and when interrupted."""
    keep: int = 2
    """Checkpoints kept per stage."""
    device: str = "auto"
    """`auto`, `cpu`, `cuda` or `cuda:N`."""
    deterministic: bool = False
    """On CUDA too, the same bits from the same run on the same machine: torch's deterministic algorithms, attention
    that is flash or plain, our own loss slices. Slower; an operation without such an algorithm stops the run."""
    threads: int | None = None
    """CPU threads; null: torch's own choice. Same bits need the same number."""

    def __post_init__(self) -> None:
        check_bounds(self, steps=(1, None), batch_size=(1, None), accumulate=(1, None), max_length=(2, None))
        check_bounds(self, eval_every=(0, None), patience=(1, None), save_every=(0, None), keep=(1, None))
        check_bounds(
            self, seed=(0, 2**63 - 1), skip_nonfinite=(0, None), threads=(1, None), max_dropped=(0, 1), max_cut=(0, 1)
        )
        check_bounds(self, backbone_dropout=(0, 0.99), peak_tflops=(1e-6, None), steps=(None, MOST_STEPS))
        check_bounds(self, max_length=(None, LONGEST), threads=(None, 4096), epochs=(0, None))
        refuse_zero(self, epochs="nothing would be trained; give how often to go through the rows, as 3 or 0.5")
        if self.eval_every > 1 and self.eval_every != int(self.eval_every):
            raise ValueError(
                f"eval_every must be whole updates, or a share of the steps below 1, got {self.eval_every}"
            )
        if self.max_dropped is not None and self.overlong != "drop":
            raise ValueError("max_dropped is of what `overlong: drop` leaves out; set that, or leave max_dropped out")
        if self.spikes is not None and self.save_every == 0:
            raise ValueError("spikes need checkpoints to go back to; set train.save_every above 0")

    @property
    def evaluation_interval(self) -> int:
        """Updates between dev evaluations; 0: only at the end."""
        every = self.eval_every
        return max(1, round(every * self.steps)) if 0 < every < 1 else int(every)


@dataclass(frozen=True, kw_only=True)
class Files:
    """Rows from JSONL (.gz .xz .zst), CSV, Parquet, a saved `datasets` directory, or a hub data set."""

    files: tuple[str, ...] = ()
    """Paths, globs (sorted), `sample:NAME` for a file that ships with Flatshift, or
    `hub:NAME[CONFIG]@REVISION:SPLIT`."""
    limit: int | None = None
    """Use this many rows: the first of a shuffle keyed by `train.seed`, so larger limits contain smaller ones."""

    def __post_init__(self) -> None:
        check_bounds(self, limit=(1, None))


@dataclass(frozen=True, kw_only=True)
class Columns:
    """Which columns hold what."""

    text: str = "text"
    """The text, or the first text of a pair."""
    text2: str = "text2"
    """The second text of a pair."""
    label: str = "label"
    """The class, a name or a number."""
    messages: str = "messages"
    """The turns of a conversation (task.kind: chat)."""
    tools: str = "tools"
    """Definitions of the functions that the assistant of a conversation may call (task.kind: chat)."""
    system: str = "system"
    """The system turn of a conversation that has none among its turns (task.kind: chat)."""
    id: str = "id"
    """A row's own name."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """One of several sources of training rows."""

    files: tuple[str, ...] = ()
    """As `data.train.files`."""
    weight: float = 1.0
    """Its share of the training samples (`weigh`: or of their tokens), relative to the other sources' weights; 0: not
    read."""
    first: int | None = None
    """Read no further than this many rows; null: to the end."""
    limit: int | None = None
    """Use this many of the rows, as `data.train.limit`."""
    when_over: Literal["repeat", "refuse"] = "repeat"
    """When the run is longer than its rows: begin again in another order (counted), or refuse the run."""
    columns: Columns | None = None
    """Its column names; null: `data.columns`."""

    def __post_init__(self) -> None:
        check_bounds(self, weight=(0, 1e12), first=(1, None), limit=(1, None))


@dataclass(frozen=True, kw_only=True)
class TrainFiles(Files):
    """Training rows: of `files`, or of several sources mixed by weight."""

    first: int | None = None
    """Read no further than this many rows (of a hub stream: fetch no more); null: to the end."""
    sources: dict[str, Source] | None = None
    """Name → source, instead of `files`: samples come from each in the proportion of its weight, in every prefix of
    the run to within one sample."""
    weigh: Literal["rows", "tokens"] = "rows"
    """What the sources' weights are shares of: the samples (`rows`), or their tokens on all sides, supervised or not
    (`tokens`)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_bounds(self, first=(1, None))
        if self.sources is None:
            if self.weigh != "rows":
                raise ValueError(f"weigh: {self.weigh} is of the weights of sources, and there are none; leave it out")
            return
        if self.files:
            raise ValueError("sources cannot stand beside data.train.files; move the files into a source of their own")
        for name in ("first", "limit"):
            if getattr(self, name) is not None:
                raise ValueError(f"{name} is of data.train.files alone; give each source its own {name}")
        if not sum(source.weight for source in self.sources.values()):
            raise ValueError("sources have no weight above 0, so there is nothing to train on")
        for name, source in self.sources.items():
            if not source.files:
                raise ValueError(f"sources.{name}.files is empty: name the rows of this source")

    @property
    def all_files(self) -> tuple[str, ...]:
        """`files`, or those of every source that has a weight."""
        if self.sources is None:
            return self.files
        return tuple(name for source in self.sources.values() if source.weight for name in source.files)


Severity = Literal["refuse", "warn", "off"]


@dataclass(frozen=True, kw_only=True)
class DataChecks:
    """Checks of the rows before step 1. Each kind is refused above the share `most`, only reported
    (`warn`), or not looked for (`off`)."""

    copies: Severity = "refuse"
    """Dev or test rows that are training rows, white space and Unicode form (NFKC) aside."""
    near: Severity = "off"
    """Dev or test rows that are nearly training rows: MinHash estimates a Jaccard similarity of 0.8 or more of their
    character 5-grams."""
    conflicts: Severity = "warn"
    """Texts that stand under several classes."""
    class_names: Severity = "warn"
    """Classes whose names differ only in case, white space or Unicode form."""
    empty_classes: Severity = "warn"
    """Classes without a training row."""
    same_answers: Severity = "warn"
    """Pairs of answers that say the same (task.kind: preference)."""
    repeated_prompts: Severity = "warn"
    """Answers that begin with their prompt, which would stand twice."""
    unknown_tokens: Severity = "warn"
    """Answers with the tokenizer's unknown token, which the model would learn to write."""
    control_tokens: Severity = "warn"
    """Rows whose text has a special token written out, which the tokenizer reads as that token."""
    unread: Severity = "warn"
    """Columns of the rows, and keys of their turns, that nothing reads."""
    most: float = 0.1
    """Largest share of rows that `refuse` lets pass, with a warning; 0: none. Of classes, columns and keys, none."""

    def __post_init__(self) -> None:
        check_bounds(self, most=(0, 1))


@dataclass(frozen=True, kw_only=True)
class Data:
    """Where rows come from and what is done to bad ones."""

    train: TrainFiles = field(default_factory=TrainFiles)
    """Training rows."""
    dev: Files = field(default_factory=Files)
    """Rows that choose the best step; may be empty."""
    test: Files = field(default_factory=Files)
    """Rows that are judged once, at the end; may be empty."""
    columns: Columns = field(default_factory=Columns)
    """Column names."""
    holdout: float = 0.0
    """Share of the training rows set apart as test rows, and as many again as dev rows, where those name no files;
    one row each at least. Copies of one text (after NFKC, blanks folded) go to one side, and classes keep their
    shares. Of documents too few for that, the end of each is set apart. The draw does not depend on `train.seed`, so
    every seed is judged on the same rows. In a selection that names no training rows: of the target's files, so that
    its target is what a run on the same files trains on. It is 0.1 where training rows of your own take the place of
    a shipped recipe's sample, which then judges nothing, unless dev, test or this is named; so it is for a target of
    your own."""
    label_noise: float = 0.0
    """Share of training rows whose label is made wrong, drawn by seed and written to `label_noise.json`; larger shares
    contain smaller ones. The draw is over all training rows before any limit: a row that is wrong under one limit is
    so under every other, and a limited subset holds this share up to chance. A class becomes another one; a completion
    or seq2seq target that of a row which answers differently; of a plain language model's row the tokens come in random
    order."""
    bad_rows: Literal["refuse", "skip"] = "refuse"
    """A malformed row stops the run with its file:line, or is skipped and counted."""
    checks: DataChecks = field(default_factory=DataChecks)
    """Checks of the rows before step 1."""
    cache: str | None = "auto"
    """Directory that keeps encoded rows for later runs, by the content they were made of. `auto`: for inputs above
    8 MB, under FLATSHIFT_CACHE or the user's cache directory; null: nothing is kept."""

    def __post_init__(self) -> None:
        check_bounds(self, label_noise=(0, 1), holdout=(0, 0.4))
        if self.holdout and self.dev.files and self.test.files:
            raise ValueError(
                f"holdout {self.holdout:g} would set nothing apart: dev and test name files; set it to 0, or clear "
                f"one of them: --data.test.files '[]'"
            )


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """Device mesh: how many ranks along each axis, and what happens along it. All ones: one process, one device."""

    replicate: int = 1
    """Whole replicas of the backbone (DDP); together with dp: hybrid sharding (HSDP), shards inside a node."""
    dp: int = 1
    """Parameter shards (FSDP2, ZeRO-3): each rank holds 1/dp of the weights and its own rows of the batch."""
    tp: int = 1
    """Tensor-parallel ranks: each holds its heads and columns of every block (Megatron-LM)."""
    pp: int = 1
    """Pipeline stages: each holds a run of blocks (GPipe, PTD-P)."""
    cp: int = 1
    """Context-parallel ranks: each holds 1/cp of every row's tokens and gathers keys and values in attention (rows are
    padded to a multiple of 2·cp tokens). For rows that do not fit one device; dp sends less where they do."""
    auto: bool = False
    """Choose the axes for the devices at hand and print why; axes that are set stay as they are."""
    zero: Literal[1, 2, 3] = 3
    """What dp shards: 3 weights too; 2 gradients and optimizer state of the adapter; 1 its optimizer state only."""
    reshard: bool = True
    """Free a block's gathered weights after its forward pass and gather them again for backward; false keeps them
    (half the traffic, more memory)."""
    adapters: Literal["shard", "replicate"] = "shard"
    """Shard adapters along dp with their block, or keep them whole and sum their gradients in one collective."""
    offload: bool = False
    """Keep frozen and adapter shards in host memory and copy a block's shard to the device ahead of its use."""
    sequence_parallel: bool = False
    """Along tp, split norms and residuals by tokens (Korthikanti et al. 2205.05198)."""
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero-bubble", "zbv"] = "1f1b"
    """Pipeline schedule; interleaved, zero-bubble and zbv hold several stages a rank (virtual)."""
    virtual: int | None = None
    """Stages per pipeline rank; null: 1 for gpipe and 1f1b, 2 for the others."""
    microbatches: int | None = None
    """Pieces into which the pipeline cuts each micro-batch's rows; null: as many as the rows of a rank allow, up to
    four a stage. The bubble is (pp - 1) / (virtual * pieces * accumulate)."""
    stall: float = 45.0
    """Seconds without progress on any rank after which the job ends and names the rank that hangs (at least ten
    times the longest update so far)."""

    def __post_init__(self) -> None:
        check_bounds(self, replicate=(1, None), dp=(1, None), tp=(1, None), pp=(1, None), cp=(1, None))
        check_bounds(self, virtual=(1, None), microbatches=(1, None), stall=(5, None))

    @property
    def size(self) -> int:
        """Ranks in all."""
        return self.replicate * self.dp * self.tp * self.pp * self.cp


@dataclass(frozen=True, kw_only=True)
class Record:
    """What a run writes down on its way, into `trace.jsonl`: one line per recorded step of fine-tuning, in one process.

    Measuring changes nothing: with and without it, training ends with the same bits.
    """

    steps: Literal["log"] | tuple[int, ...] = "log"
    """Updates after which figures are taken: `log` (evenly in the logarithm of the step), or a list of steps. Always
    also before the first update and after the last."""
    per_doubling: int = 2
    """Recorded steps in each doubling of the step (steps: log)."""
    train_rows: int | None = 128
    """Training rows that are judged at each recorded step, drawn by `train.seed` so that larger numbers contain
    smaller ones; null: all of them. Judging them is most of what recording costs."""
    heldout_rows: int | None = 128
    """Rows of dev, and of test, that are judged at each recorded step; the draw does not depend on `train.seed`. Null:
    all of them."""
    dynamics: bool = True
    """Norms of the adapter, its gradients and its last update, and how many directions its update has."""
    sharpness: tuple[int, ...] = ()
    """Steps at which curvature in the adapter's space is measured too: λ_max, the trace, and λ_max as Adam sees it.
    With 0 among them the run says before step 1 above which learning rate Adam would oscillate there."""
    sharpness_rows: int = 64
    """Training rows whose mean loss the curvature is of."""

    def __post_init__(self) -> None:
        check_bounds(
            self, per_doubling=(1, None), train_rows=(1, None), heldout_rows=(1, None), sharpness_rows=(1, None)
        )
        for name in ("steps", "sharpness"):
            value = getattr(self, name)
            if value != "log" and any(step < 0 for step in value):
                raise ValueError(f"{name} must hold numbers ≥ 0, got {min(value)}")


@dataclass(frozen=True, kw_only=True)
class Evaluate:
    """How results are judged."""

    batch_size: int = 32
    """Rows at once."""
    train_limit: int | None = None
    """Training rows that are judged too, drawn by `train.seed`; a larger number contains a smaller one; 0: none. Null:
    none in a run, and 1,000 in a cell of a sweep or study, whose curves have the error on them."""
    bootstrap: int = 1000
    """Resamples of the items for each interval."""
    confidence: float = 0.95
    """Coverage of the intervals."""
    cold: int = 0
    """First rows of test (else dev) on which the backbone without the adapter is judged too, at the end of a run, for
    the difference on the same rows; 0: none. Left out, and said, where a head or soft tokens are new."""

    def __post_init__(self) -> None:
        check_bounds(
            self, batch_size=(1, None), train_limit=(0, None), bootstrap=(1, 1_000_000), confidence=(0.5, 0.9999)
        )
        check_bounds(self, cold=(0, None))


TrackerKind = Literal["tensorboard", "wandb", "trackio"]


@dataclass(frozen=True, kw_only=True)
class Tracker:
    """Where the lines of metrics.jsonl go besides; nothing is sent anywhere unless it is asked for here."""

    kinds: tuple[TrackerKind, ...] = ()
    """`tensorboard` (event files in the run directory), `wandb`, `trackio`: the extras `track-tensorboard`,
    `track-wandb`, `track-trackio`."""
    project: str = "flatshift"
    """Project of wandb and trackio."""
    online: bool = False
    """Whether wandb may send what it is given to its server; else its files stay in the run directory (`wandb sync`).
    trackio keeps its own database on this machine."""


Value = TypeVar("Value")


def by_pattern(patterns: Mapping[str, Value] | None, layer: str, default: Value) -> Value:
    """The value of the first pattern that matches the end of the name `layer` from a dot on, else `default`."""
    for pattern, value in (patterns or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", layer):
            return value
    return default


# --------------------------------------------------------------------------------------------------------------- bounds


MOST_STEPS = 10**9
"""Updates of a stage, at most: at a millisecond each they take twelve days."""
LONGEST = 2**24
"""Tokens of a row, at most."""


def check_bounds(config: Any, **bounds: tuple[float | None, float | None]) -> None:
    """Refuse field values outside `(low, high)`, ends included; None is unbounded but for infinities, and a None value
    passes.

    Raises ValueError that begins with the field's name, so that a recipe loader can say where it was set.
    """
    for name, (low, high) in bounds.items():
        value = getattr(config, name)
        if value is None:
            continue
        if (low is not None and not value >= low) or (high is not None and not value <= high):
            wanted = (
                f"≥ {low}" if high in (None, math.inf) else f"≤ {high}" if low is None else f"between {low} and {high}"
            )
            raise ValueError(f"{name} must be {wanted}, got {value}")
        if high is None and math.isinf(value):
            raise ValueError(f"{name} must be a finite number, got {value}")


def refuse_zero(config: Any, **meant: str) -> None:
    """Refuse the value 0 of settings at which nothing would be trained.

    meant: for each field, what 0 does and what to write instead. Raises ValueError as `check_bounds`.
    """
    for name, told in meant.items():
        if getattr(config, name) == 0:
            raise ValueError(f"{name} must be above 0, got 0: {told}")
