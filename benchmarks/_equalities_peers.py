"""The same training written again without our loop, loader, meshes or losses: the checks on the reference itself.

`plainly` is PyTorch and PEFT as their tutorials use them, in one process. `natively` is transformers' own sharding
(`DistributedConfig`) with PEFT on top. Both start from the adapter as a PEFT directory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from peft import PeftConfig, PeftModel, get_peft_model, set_peft_model_state_dict
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from benchmarks import _equalities as own
from benchmarks._equalities import ALONE, OPTIMIZER, SEED, STEPS, Course, Subject, batches, examples, regularizer
from flatshift.finetune.models.backbone import quiet_transformers
from flatshift.finetune.models.checkpoint import canonical_name
from flatshift.finetune.seeds import derive_seed


@dataclass(frozen=True)
class Native:
    """A layout of transformers' own."""

    name: str
    sizes: dict[str, int]
    plans: dict[str, dict[str, str] | None]
    """The models that it can train, with a plan where they have none of their own."""
    reason: str
    """Why it cannot train the others."""

    def refuses(self, subject: Subject) -> str | None:
        """Why it cannot train `subject`; None if it can."""
        if subject.regularizer != "plain":
            return "GGPO does not know transformers' layouts"
        return None if subject.model in self.plans else self.reason


_BLOCKS = "free_full_weight"
_PLANS: dict[str, dict[str, str] | None] = {
    "llama": None,
    "qwen3": None,
    "gpt2": {"transformer.h.*": _BLOCKS},
    "t5": {"encoder.block.*": _BLOCKS, "decoder.block.*": _BLOCKS},
}
_NO_HEAD = "PEFT cannot copy a head that transformers has already sharded"
_NO_PLAN = "transformers has no tensor-parallel plan for it"
NATIVE = (
    Native("transformers' DistributedConfig, fsdp 2", {"fsdp_size": 2}, _PLANS, _NO_HEAD),
    Native("transformers' DistributedConfig, tp 2", {"tp_size": 2}, {"llama": None, "qwen3": None}, _NO_PLAN),
)


def plainly(subject: Subject, *, backbone: Path, adapter: Path) -> Course:
    """One process: a loop over padded rows, cross entropy of whole logits, `torch.optim.AdamW`."""
    model = PeftModel.from_pretrained(_auto(subject.model, backbone), adapter, is_trainable=True)
    noise = regularizer(subject).attach(model, seed=derive_seed(SEED, "regularizer"), total_steps=STEPS)
    course = _loop(model, subject, noise=noise)
    noise.detach()
    return course


def natively(subject: Subject, native: Native, *, backbone: Path, adapter: Path) -> Course:
    """transformers' sharding over all ranks; whole gradients are known on all of them."""
    from transformers.distributed import DistributedConfig

    config = DistributedConfig(**native.sizes, fsdp_plan=native.plans[subject.model])  # type: ignore[arg-type]
    base = _auto(subject.model, backbone, distributed_config=config)
    settings = PeftConfig.from_pretrained(str(adapter))
    settings.inference_mode = False
    with _global_sizes():
        model = get_peft_model(base, settings)
    set_peft_model_state_dict(model, load_file(adapter / "adapter_model.safetensors"))
    sharded = sum(isinstance(p, DTensor) for p in model.parameters())
    assert sharded > 0, "silently unsharded"
    return _loop(model, subject, data_ranks=native.sizes.get("fsdp_size", 1))


def _auto(model: str, backbone: Path, **options: Any) -> Any:
    kind = {"bert": "SequenceClassification", "t5": "Seq2SeqLM"}.get(model, "CausalLM")
    if model == "bert":
        options["num_labels"] = len(own.LABELS)
    auto: Any = getattr(transformers, f"AutoModelFor{kind}")
    with quiet_transformers(), torch.random.fork_rng(devices=[]):
        return auto.from_pretrained(backbone, dtype=torch.float32, **options)


@contextlib.contextmanager
def _global_sizes() -> Iterator[None]:
    """PEFT 0.21 sizes adapters by a DTensor's local part, which transformers from 5.20 on no longer goes along with."""
    from peft.tuners import tuners_utils
    from peft.tuners.lora import layer

    usual = tuners_utils._get_in_out_features

    def whole(module: nn.Module) -> Any:
        return (module.in_features, module.out_features) if isinstance(module, nn.Linear) else usual(module)

    tuners_utils._get_in_out_features = layer._get_in_out_features = whole  # type: ignore[attr-defined]
    try:
        yield
    finally:
        tuners_utils._get_in_out_features = layer._get_in_out_features = usual  # type: ignore[attr-defined]


def _loop(model: Any, subject: Subject, *, noise: Any = None, data_ranks: int = 1) -> Course:
    model.train()
    named = {canonical_name(name): p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(named.values(), lr=OPTIMIZER.lr, eps=OPTIMIZER.eps, weight_decay=0.0, foreach=False)
    rise = round(OPTIMIZER.warmup * STEPS)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda t: (t + 1) / (rise + 1) if t < rise else 1 - (t - rise) / (STEPS - rise)
    )
    mine = own.BATCH // data_ranks
    first = mine * dist.get_rank() if data_ranks > 1 else 0
    order, course = batches(subject, ALONE), Course()
    for step in range(STEPS):
        rows = [i for micro in order.rows_at(step) for row in micro for i in row]
        count = sum(_supervised(subject.model, i) for i in rows)
        with contextlib.nullcontext() if noise is None else noise.step(step):
            loss = _loss(model, subject.model, rows[first : first + mine]) / count
            # FSDP2 averages what it holds; what it does not hold is averaged below
            (loss * data_ranks).backward()
        total = loss.detach().clone()
        if data_ranks > 1:
            dist.all_reduce(total)
            for parameter in named.values():
                if not isinstance(parameter, DTensor):
                    dist.all_reduce(parameter.grad)
                    parameter.grad /= data_ranks
        whole = {name: _whole(p.grad) for name, p in named.items()}
        course.gradients = course.gradients or {name: grad.clone() for name, grad in whole.items()}
        norm = torch.stack([grad.norm() for grad in whole.values()]).norm()
        for parameter in named.values():
            parameter.grad *= min(1.0, 1.0 / (norm.item() + 1e-6))
        course.losses.append(total.item())
        course.norms.append(norm.item())
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return course


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _supervised(model: str, i: int) -> int:
    labels = examples(model)[i].labels
    return 1 if isinstance(labels, int) else sum(label != -100 for label in labels)


def _loss(model: Any, kind: str, rows: list[int]) -> Tensor:
    """Σ cross entropy of these samples, each padded to the longest."""
    chosen = [examples(kind)[i] for i in rows]
    ids = _padded([example.input_ids for example in chosen], 0)
    mask = _padded([[1] * len(example.input_ids) for example in chosen], 0)
    assert ids.shape[1] <= own.ROW
    if kind == "bert":
        logits = model(input_ids=ids, attention_mask=mask).logits
        return F.cross_entropy(logits, torch.tensor([example.labels for example in chosen]), reduction="sum")
    labels = _padded([list(example.labels) for example in chosen], -100)  # type: ignore[arg-type]
    if kind == "t5":
        decoder = _padded([list(example.decoder_ids or ()) for example in chosen], 0)
        logits = model(input_ids=ids, attention_mask=mask, decoder_input_ids=decoder).logits
    else:
        logits, labels = model(input_ids=ids, attention_mask=mask).logits[:, :-1], labels[:, 1:]
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")


def _padded(rows: list[list[int]], value: int) -> Tensor:
    width = max(map(len, rows))
    return torch.tensor([[*row, *[value] * (width - len(row))] for row in rows])
