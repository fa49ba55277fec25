"""Tiny models, learnable rows and one training run, for comparing the same training on different meshes.

A *subject* is what is trained (a model and a regularizer), a *layout* is how (a mesh, accumulation, packing, where it
is stopped and resumed). A *course* is what came out: the losses of all updates and the gradients of the first. The
product's own stage loop makes it (`flatshift.finetune.train.trainer.Trainer` over `build_engine`).
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor

from flatshift.finetune.config import Adapter, Evaluate, Mesh, Optimizer, Train
from flatshift.finetune.data.batches import TrainingDataLoader
from flatshift.finetune.data.encoding import Example
from flatshift.finetune.errors import Interrupted
from flatshift.finetune.models.backbone import quiet_transformers
from flatshift.finetune.parallel.build import build_engine
from flatshift.finetune.parallel.engine import Engine
from flatshift.finetune.parallel.layout import local_part
from flatshift.finetune.parallel.mesh import ProcessMesh
from flatshift.finetune.planner.rules import RuleSettings, check_settings
from flatshift.finetune.run_directory import RunDirectory
from flatshift.finetune.seeds import torch_generator
from flatshift.finetune.tasks import Classify, LanguageModel, Seq2Seq, Task
from flatshift.finetune.train.stage import TrainingStage
from flatshift.finetune.train.trainer import Trainer
from flatshift.regularizers import GGPO, Plain, Regularizer, build

STEPS, SEED = 16, 7
LABELS = ("0", "1", "2")
VOCABULARY, SAMPLES, LENGTHS = 256, 24, (17, 22)
BATCH = 8
"""Rows of an update."""
ROW = 64
"""Tokens of a packed row: always three samples."""
ADAPTER = Adapter(rank=4, alpha=64)
OPTIMIZER = Optimizer(lr=1e-3, eps=1e-6, schedule="linear")
B_DEVIATION = 0.02
REGULARIZERS: dict[str, Any] = {"plain": Plain(), "ggpo": GGPO(sigma=0.05, refresh=4, ema=0.5)}
MODELS = ("llama", "qwen3", "gpt2", "t5", "bert")

_SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 8, "num_attention_heads": 8}
_IDS = {"vocab_size": VOCABULARY, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}
_SPREAD = {"initializer_range": 0.14, "max_position_embeddings": 128}
_GROUPED = {"num_key_value_heads": 4, "head_dim": 8}
_DRY = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_GPT2 = {"n_embd": 64, "n_layer": 8, "n_head": 8, "n_positions": 128, "initializer_range": 0.14}
_GPT2_DRY = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
_T5 = {"d_model": 64, "d_kv": 8, "d_ff": 96, "num_layers": 4, "num_heads": 8, "dropout_rate": 0.0}
_SMOOTH = {"feed_forward_proj": "gated-gelu"}  # rounding can push a token over the kink of a ReLU
_ARCHITECTURES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", {**_SIZES, **_IDS, **_SPREAD, **_GROUPED}),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**_SIZES, **_IDS, **_SPREAD, **_GROUPED}),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {**_GPT2, **_GPT2_DRY, **_IDS}),
    "t5": ("T5ForConditionalGeneration", "T5Config", {**_T5, **_SMOOTH, **_IDS, "decoder_start_token_id": 0}),
    "bert": ("BertModel", "BertConfig", {**_SIZES, **_IDS, **_DRY, "initializer_range": 0.06}),
    "roberta": ("RobertaModel", "RobertaConfig", {**_SIZES, **_IDS, **_DRY, "initializer_range": 0.06}),
    "eurobert": ("EuroBertModel", "EuroBertConfig", {**_SIZES, **_IDS, **_SPREAD, **_GROUPED, "mask_token_id": 3}),
}  # fmt: skip
_ENCODERS = ("bert", "roberta", "eurobert")
_LATENT = {"kv_lora_rank": 16, "q_lora_rank": None, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
_GROUPS = {"n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
MIXTURES: dict[str, dict[str, Any]] = {
    **{kind: {} for kind in ("gpt_oss", "granitemoe", "minimax", "mixtral", "olmoe")},
    **{kind: {**_GROUPS, **_LATENT, "num_key_value_heads": 8} for kind in ("deepseek_v2", "deepseek_v3")},
    **{kind: _GROUPS for kind in ("dots1", "glm4_moe")},
    **{kind: {"mlp_only_layers": [0]} for kind in ("qwen2_moe", "qwen3_moe")},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1, "moe_layer_interval": 1},
    "hunyuan_v1_moe": {"moe_topk": 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "llama4_text": {"intermediate_size_mlp": 96, "num_experts_per_tok": 1, "moe_layers": [1, 3]},
}
"""Mixtures of experts and what their configurations say besides; every expert has an adapter. They train at a smaller
scale: rounding grows with every update, and a token that it sends to another expert is a jump of the loss."""
_FAMILY = {
    **{**_SIZES, **_IDS, **_SPREAD, **_GROUPED, "num_hidden_layers": 4, "vocab_size": VOCABULARY + 1},
    **{"sliding_window": 16, "rotary_dim": 4, "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2},
    **{"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
}
"""Of a causal language model that has no entry above; what its configuration does not know has no effect. No even
number of ranks divides its vocabulary."""
_VARIANTS: dict[str, dict[str, Any]] = {
    "": {},
    "dropout": {
        **dict.fromkeys(("attention_dropout", "residual_dropout", "embedding_dropout", "hidden_dropout"), 0.1),
        **dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop", "embed_pdrop", "dropout_rate"), 0.1),
        **dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.1),
    },
    "one key": {"num_key_value_heads": 1},
    "three keys": {"num_attention_heads": 12, "num_key_value_heads": 3},
    "odd width": {"intermediate_size": 97, "n_inner": 97},
}
"""A model's name may end with one of these, as in `granite, dropout`."""


@dataclass(frozen=True)
class Subject:
    """What is trained."""

    model: str
    regularizer: str

    def __str__(self) -> str:
        return f"{self.model}/{self.regularizer}"

    def task(self, *, packed: bool) -> Task:
        """Language models may be packed."""
        if self.model.startswith(_ENCODERS):
            return Classify(labels=LABELS)
        return Seq2Seq() if self.model.startswith("t5") else LanguageModel(pack=packed)


@dataclass(frozen=True)
class Layout:
    """How it is trained, on `mesh` and after `stops` updates each on the next of `others`."""

    name: str
    mesh: Mesh = field(default_factory=Mesh)
    others: tuple[Mesh, ...] = ()
    stop: int = STEPS
    accumulate: int = 1
    packed: bool = False
    whole: bool = False
    """Every update takes all samples; what a packed run is compared with, because packing changes the order."""
    checkpointing: Any = "none"
    models: tuple[str, ...] = MODELS

    @property
    def ranks(self) -> int:
        """Processes that it takes."""
        return max(mesh.size for mesh in (self.mesh, *self.others))

    @property
    def reference(self) -> Layout:
        """The run in one process that it must equal."""
        return WHOLE if self.whole else ALONE

    def train(self) -> Train:
        """Of the stage: the same rows an update, however they are cut."""
        rows = SAMPLES if self.whole else BATCH
        rows = rows // 3 if self.packed else rows
        return Train(
            steps=STEPS,
            batch_size=rows // self.accumulate,
            accumulate=self.accumulate,
            seed=SEED,
            max_length=ROW,
            checkpointing=self.checkpointing,
            save_every=0,
            device="cpu",
            threads=1,
        )


ALONE = Layout("one process")
WHOLE = Layout("one process, all samples in every update", whole=True)


@dataclass
class Course:
    """What came out. On ranks that only looked on, nothing."""

    losses: list[float] = field(default_factory=list)
    """Of every update, in order."""
    norms: list[float] = field(default_factory=list)
    """Of the gradients, before clipping."""
    gradients: dict[str, Tensor] = field(default_factory=dict)
    """Of the first update, whole, by plain name."""
    untouched: bool = True
    """Whether this rank's frozen parameters have the bytes that they had before."""

    def add(self, line: dict[str, Any]) -> None:
        """An update's line of metrics.jsonl."""
        self.losses.append(line["loss"])
        self.norms.append(line["grad_norm"])


# --------------------------------------------------------------------------------------------- models and rows


def write_backbone(model: str, directory: Path) -> None:
    """A random backbone whose weights are a pure function of its name, with matrices large enough to matter."""
    kind, _, variant = model.partition(", ")
    if kind in _ARCHITECTURES:
        model_class, config_class, settings = _ARCHITECTURES[kind]
        make, configure = getattr(transformers, model_class), getattr(transformers, config_class)
    else:
        configure, settings = transformers.CONFIG_MAPPING[kind], _FAMILY
        make = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[configure]
    config = configure(**settings | MIXTURES.get(kind, {}) | _VARIANTS[variant])
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        backbone = make(config)
    with torch.no_grad():
        for name, parameter in backbone.named_parameters():
            if parameter.ndim < 2:  # biases and norms start at 0 and 1, where errors could hide
                parameter.add_(torch.randn(parameter.shape, generator=torch_generator(0, name)) * 0.05)
    with quiet_transformers():
        backbone.save_pretrained(directory)


def examples(model: str) -> list[Example]:
    """Arithmetic progressions in a few tokens; for BERT the step is the class, T5 continues what it read."""
    results = []
    for i in range(SAMPLES):
        length, step = LENGTHS[0] + 5 * i % (LENGTHS[1] - LENGTHS[0]), 1 + i % 3
        first = 3 + 11 * (i % 3) if model.startswith(_ENCODERS) else 3
        ids = [first + (7 * i + step * k) % 11 for k in range(length + 9)]
        read, written = ids[:length], [*ids[length:], 1]
        if model.startswith(_ENCODERS):
            results.append(Example([2, *read[:-2], 1], i % 3, str(i), str(i)))
        elif model.startswith("t5"):
            results.append(Example([*read[:-1], 1], written, str(i), str(i), decoder_ids=[0, *written[:-1]]))
        else:
            results.append(Example(read, [-100, *read[1:]], str(i), str(i)))
    return results


def batches(
    subject: Subject, layout: Layout, *, share: tuple[int, int] = (0, 1), multiple: int = 1
) -> TrainingDataLoader:
    """The rows of every update; those of the `share[0]`-th data rank."""
    train = layout.train()
    return TrainingDataLoader(
        examples(subject.model),
        task=subject.task(packed=layout.packed),
        batch_size=train.batch_size,
        accumulate=train.accumulate,
        seed=SEED,
        max_length=train.max_length,
        pad_id=0,
        share=share,
        multiple=multiple,
    )


def alive(name: str, value: Tensor) -> Tensor:
    """The first value of a trained parameter: B is drawn by name where it would be zero, so that A has a gradient."""
    if ".lora_B." not in name:
        return value
    return torch.randn(value.shape, generator=torch_generator(SEED, "alive", name)) * B_DEVIATION


def write_start(model: str, backbone: Path, directory: Path) -> None:
    """The adapter that every run begins with, as PEFT keeps it."""
    engine = _engine(Subject(model, "plain"), ALONE, Mesh(), ProcessMesh.alone(), backbone)
    engine.save_adapter(directory)


def _engine(subject: Subject, layout: Layout, mesh: Mesh, world: ProcessMesh, backbone: Path) -> Engine:
    task, train = subject.task(packed=layout.packed), layout.train()
    adapter = replace(ADAPTER, experts=2, alpha=16) if subject.model.partition(",")[0] in MIXTURES else ADAPTER
    check_settings(RuleSettings(mesh, train, adapter, task))
    engine = build_engine(
        str(backbone),
        task=task,
        adapter=adapter,
        train=train,
        mesh=mesh,
        world=world,
        label_names=LABELS if task.has_classes else None,
    )
    first = {name: alive(name, value) for name, value in engine.full_tensors(engine.parameters).items()}
    engine.load_full_tensors(first, engine.parameters, context="the first values")
    return engine


# --------------------------------------------------------------------------------------------- one training run


def run(
    subject: Subject, layout: Layout, *, backbone: Path, folder: Path, worlds: Callable[[Mesh], ProcessMesh]
) -> Course:
    """Train `subject` as `layout` says. Collective where there are more ranks than one.

    Args:
        folder: a new run directory that all ranks see.
        worlds: this rank's place in a mesh that spans all ranks.
    """
    course, task = Course(), subject.task(packed=layout.packed)
    meshes = (layout.mesh, *layout.others)
    for number, mesh in enumerate(meshes):
        stop = None if number + 1 == len(meshes) else (number + 1) * layout.stop
        world = ProcessMesh.alone() if mesh.size == 1 else worlds(mesh)
        if world.size > 1 or not dist.is_initialized() or dist.get_rank() == 0:
            engine = _engine(subject, layout, mesh, world, backbone)
            before = frozen_bytes(engine)
            stage = TrainingStage(
                name="fine-tune",
                task=task,
                batches=batches(subject, layout, share=engine.share, multiple=engine.multiple),
                dev=[],
                optimizer=OPTIMIZER,
                train=layout.train(),
                evaluate=Evaluate(),
                regularizer=regularizer(subject),
                run=RunDirectory(folder, writes=world.is_main),
                seed=SEED,
                on_step=course.add,
                stop=lambda stop=stop: len(course.losses) == stop,
            )
            watch = contextlib.nullcontext() if number else _watched(engine, course)
            with watch, contextlib.suppress(Interrupted):
                Trainer(engine, SimpleNamespace(pad_token_id=0), stage).fit()  # type: ignore[arg-type]
            engine.reshard()
            course.untouched = course.untouched and frozen_bytes(engine) == before
        if dist.is_initialized():
            dist.barrier()
    return course


def regularizer(subject: Subject) -> Regularizer:
    """A fresh one."""
    return build(REGULARIZERS[subject.regularizer])


@contextlib.contextmanager
def _watched(engine: Engine, course: Course) -> Iterator[None]:
    """Take down the gradients of the first update when the loop comes to clip them."""
    clip = engine.clip

    def take(bound: float | None) -> Tensor:
        if not course.norms:
            grads = {name: p.grad for name, p in engine.parameters.items() if p.grad is not None}
            course.gradients = {name: grad.clone() for name, grad in engine.full_tensors(grads).items()}
        return clip(bound)

    vars(engine)["clip"] = take
    try:
        yield
    finally:
        del vars(engine)["clip"]


def frozen_bytes(engine: Engine) -> str:
    """SHA-256 over this rank's part of every frozen parameter."""
    digest = hashlib.sha256()
    for name, parameter in sorted(engine.model.named_parameters()):
        if not parameter.requires_grad:
            digest.update(
                name.encode() + local_part(parameter).detach().contiguous().view(torch.uint8).numpy().tobytes()
            )
    return digest.hexdigest()


# --------------------------------------------------------------------------------------------- comparing


def distances(mine: Course, reference: Course) -> dict[str, float]:
    """`loss`: the largest absolute difference over the updates; `gradients`: the largest relative one of a tensor.

    Raises AssertionError where something is missing, or a gradient of the reference is dead.
    """
    assert len(mine.losses) == len(reference.losses) == STEPS
    assert mine.gradients.keys() == reference.gradients.keys()
    results = {"loss": max(abs(a - b) for a, b in zip(mine.losses, reference.losses, strict=True)), "gradients": 0.0}
    for name, wanted in reference.gradients.items():
        size = wanted.double().norm()
        assert size > 0, f"{name} has no gradient"
        far = (mine.gradients[name].double() - wanted.double()).norm() / size
        results["gradients"] = max(results["gradients"], far.item())
    return results
