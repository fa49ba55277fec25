"""Packed rows sample by sample: the loss and gradients of the dense mask, and no kernel that lets samples leak."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from flatshift.finetune.adapters.adapter import attach_adapter, trainable
from flatshift.finetune.compute import attention
from flatshift.finetune.compute.attention import NAME, drop_sample_offsets, offsets_as_mask, sample_offsets
from flatshift.finetune.compute.loss import batch_loss
from flatshift.finetune.config import Adapter, Optimizer, Train
from flatshift.finetune.data.batches import TrainingDataLoader
from flatshift.finetune.data.encoding import encode
from flatshift.finetune.errors import UserError
from flatshift.finetune.evaluate import packing_check
from flatshift.finetune.evaluate.packing_check import check_packing_isolation, isolate_packed_rows
from flatshift.finetune.parallel.activation_checkpoint import checkpoint_activations
from flatshift.finetune.parallel.engine import Engine
from flatshift.finetune.tasks import Completion, LanguageModel
from flatshift.finetune.train import prefetch
from flatshift.finetune.train.prefetch import Prefetcher
from tests.finetune.train.test_prefetch import FakeLane
from tests.support.data_models import byte_tokenizer, text_rows, tiny_model
from tests.support.stage_runs import run_or_stop

BYTES = byte_tokenizer()
CPU = torch.device("cpu")
BF16 = Train(precision="bf16")


def naive(query, key, value, begins, longest, *, scale, window):
    """Every sample by itself, one head after the other."""
    spans = list(zip(begins[:-1].tolist(), begins[1:].tolist(), strict=True))
    assert begins[0] == 0 and begins[-1] == len(query) and longest == max(stop - start for start, stop in spans)
    groups = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))
    out = []
    for start, stop in spans:
        q, k, v = (tensor[start:stop].transpose(0, 1) for tensor in (query, key, value))
        place = torch.arange(stop - start)
        seen = place[:, None] >= place
        if window is not None:
            seen &= place[:, None] - place < window
        out.append(F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale).transpose(0, 1))
    return torch.cat(out)


def leaking(query, key, value, begins, longest, *, scale, window):
    """As a kernel that takes all rows for one sample."""
    whole = torch.tensor([0, len(query)], dtype=torch.int32)
    return naive(query, key, value, whole, len(query), scale=scale, window=window)


def absent(*args, **how):
    raise RuntimeError("FlashAttention only supports Ampere GPUs or newer.\nmore words")


@pytest.fixture
def on_cuda(monkeypatch):
    """The CPU taken for a capable CUDA device."""
    monkeypatch.setattr(
        packing_check,
        "flash_attention_problem",
        lambda base, train, device, **how: attention._model_problem(base, train, **how),
    )


def engine_of(kind="llama", **overrides):
    model = tiny_model(kind, len(BYTES), **overrides)
    model.requires_grad_(False)
    model.config.use_cache = False
    return Engine.alone(attach_adapter(model, Adapter(rank=2), task=LanguageModel(), seed=0))


def batches_of(task, **options):
    examples = encode(text_rows(40), task=task, tokenizer=BYTES, max_length=64).examples
    settings = {"batch_size": 3, "accumulate": 2, "seed": 0, "max_length": 64, "pad_id": 0}
    return TrainingDataLoader(examples, task=task, **{**settings, **options})


def gradients(engine, micros, task):
    for parameter in engine.parameters.values():
        parameter.grad = None
    loss = sum(batch_loss(engine.model, micro.to(CPU), task=task) for micro in micros)
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in engine.parameters.items()}


@pytest.mark.parametrize("checkpointing", ["none", "full", "selective"])
@pytest.mark.parametrize(
    ("kind", "overrides"),
    [("llama", {}), ("gpt2", {}), ("mistral", {}), ("llama", {"num_attention_heads": 2, "head_dim": 16})],
)
@pytest.mark.parametrize("task", [LanguageModel(), Completion()], ids=lambda task: task.kind)
def test_loss_and_gradients_are_those_of_the_dense_mask(on_cuda, kind, overrides, task, checkpointing):
    engine, said = engine_of(kind, **overrides), []
    engine.model.train()
    checkpoint_activations(engine.model, checkpointing)
    with torch.no_grad():
        for parameter in engine.parameters.values():
            parameter.add_(0.05 * torch.sin(torch.arange(parameter.numel()).view_as(parameter)))
    plain = batches_of(task)
    assert max(len(row) for micro in plain.at(0) for row in micro.rows) >= 3
    wanted, expected = gradients(engine, plain.at(0), task)
    with isolate_packed_rows(engine, BF16, CPU, said.append, kernel=naive) as apart:
        assert apart and said == ["packed rows: flash attention over samples of any length"]
        assert engine.model.config._attn_implementation == NAME
        ahead = Prefetcher(batches_of(task), FakeLane(), offsets=True)
        for micro, usual in zip(ahead.at(0), plain.at(0), strict=True):  # on the host nothing is added
            assert micro.inputs.keys() == usual.inputs.keys() and "attention_mask" in micro.to(CPU).inputs
        found, got = gradients(engine, ahead.at(0), task)
        ahead.close()
        # what brings no starts is computed as before, to the bit
        again, same = gradients(engine, plain.at(0), task)
    assert torch.equal(again, wanted) and all(torch.equal(same[name], expected[name]) for name in expected)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=0)
    for name, gradient in expected.items():
        assert (got[name] - gradient).norm() < 1e-5 * gradient.norm(), name
    assert engine.model.config._attn_implementation == "sdpa"


def test_a_kernel_that_leaks_or_fails_is_not_taken(on_cuda):
    for kernel, words in (
        (leaking, "this backbone lets packed samples see each other"),
        (absent, "FlashAttention only supports Ampere GPUs or newer."),
    ):
        engine, said = engine_of(), []
        with isolate_packed_rows(engine, BF16, CPU, said.append, kernel=kernel) as apart:
            assert not apart and engine.model.config._attn_implementation == "sdpa"
        assert len(said) == 1 and said[0].startswith("packed rows: a dense mask of T² (") and words in said[0]
        assert "more words" not in said[0]
    with pytest.raises(UserError, match="see each other"):
        attention.register_packed_attention(leaking)
        engine.peft.get_base_model().set_attn_implementation(NAME)
        check_packing_isolation(engine.eval_model, starts=True)


@pytest.mark.parametrize(
    ("overrides", "train", "reason"),
    [
        ({}, Train(precision="fp32"), "float32 products"),
        ({}, Train(precision="bf16", compile=True), "train.compile wants one shape"),
        ({"attention": "eager"}, BF16, "attention is eager"),
        ({"head_dim": 12}, BF16, "heads are 12 channels wide"),
        ({"head_dim": 264}, BF16, "heads are 264 channels wide"),
        ({"attention_dropout": 0.1}, BF16, "attention dropout"),
    ],
)
def test_reasons_for_the_dense_mask(on_cuda, overrides, train, reason):
    said = []
    with isolate_packed_rows(engine_of("llama", **overrides), train, CPU, said.append, kernel=naive) as apart:
        assert not apart
    assert said == [f"packed rows: a dense mask of T² ({reason})"]


def test_a_cpu_is_asked_nothing():
    said = []
    with isolate_packed_rows(engine_of(), BF16, CPU, said.append, kernel=absent) as apart:
        assert not apart
    assert said == ["packed rows: a dense mask of T² (no CUDA device)"]


def test_starts_are_where_positions_begin_anew():
    positions = torch.tensor([[0, 1, 2, 0, 1, 0], [0, 0, 1, 2, 3, 4]])
    begins, longest = sample_offsets(positions)
    assert begins.tolist() == [0, 3, 5, 6, 7, 12] and longest == 5 and begins.dtype == torch.int32
    mask = offsets_as_mask(begins, longest)
    assert mask.shape == (1, 1, 5, 6) and mask.untyped_storage().nbytes() == begins.nbytes
    inputs = {"input_ids": positions, "attention_mask": mask}
    assert drop_sample_offsets(inputs).keys() == {"input_ids"}
    assert drop_sample_offsets({"attention_mask": torch.ones(1, 4, dtype=torch.long)}).keys() == {"attention_mask"}


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_a_stage_learns_the_same_curve(tmp_path, monkeypatch, on_cuda, checkpointing):
    """The whole loop: bf16 products, the sliced head, batches made ahead."""

    def trained(directory):
        engine = engine_of(head_dim=8)
        checkpoint_activations(engine.model, checkpointing)
        settings = {"task": LanguageModel(), "optimizer": Optimizer(lr=1e-3)}
        train = Train(steps=5, threads=1, precision="bf16", max_length=64)
        run_or_stop(engine, directory, batches=batches_of(LanguageModel()), train=train, **settings)
        log = (directory / "log.txt").read_text()
        return {name: p.detach().clone() for name, p in trainable(engine.model).items()}, log

    dense, said = trained(tmp_path / "dense")
    assert "packed rows" not in said
    monkeypatch.setattr(prefetch, "is_cuda", lambda device: True)
    monkeypatch.setattr(prefetch, "CudaTransfer", lambda device: FakeLane())
    seen = []

    def counted(*args, **how):
        seen.append(how["window"])
        return naive(*args, **how)

    monkeypatch.setattr(prefetch, "isolate_packed_rows", lambda *args: isolate_packed_rows(*args, kernel=counted))
    apart, said = trained(tmp_path / "apart")
    assert "packed rows: flash attention over samples of any length" in said
    # two blocks, two micro-batches, five updates, twice where blocks are computed again; and the trial's two passes
    assert len(seen) == 2 * 2 * 5 * (2 if checkpointing == "full" else 1) + 2 * 2
    # B begins at 0, so it is what was learnt; an AdamW update of a gradient that is rounding may turn its sign.
    learnt = {name: tensor for name, tensor in dense.items() if "lora_B" in name}
    distance = sum(float((apart[name] - tensor).square().sum()) for name, tensor in learnt.items()) ** 0.5
    assert distance < 0.25 * sum(float(tensor.square().sum()) for tensor in learnt.values()) ** 0.5


def test_torchs_kernel_takes_what_it_is_given_on_meta():
    """Shapes and arguments of `flash` beside the fake implementation that torch registers for its kernel."""
    query = torch.empty(12, 4, 16, device="meta", dtype=torch.bfloat16)
    key = torch.empty(12, 2, 16, device="meta", dtype=torch.bfloat16)
    begins = torch.empty(4, dtype=torch.int32, device="meta")
    for window in (None, 5):
        out = attention.flash_attention_varlen(query, key, key, begins, 5, scale=0.25, window=window)
        assert out.shape == query.shape and out.is_meta and out.dtype == torch.bfloat16


class Waits(TorchDispatchMode):
    """Counts kernels, and notes what would have to wait for a device."""

    def __init__(self):
        super().__init__()
        self.kernels, self.waits = [], []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = str(function)
        if "varlen" in name:
            self.kernels.append(name)
        if any(word in name for word in ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero")):
            self.waits.append(name)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_a_packed_step_on_meta_goes_through_torchs_kernel_and_waits_for_nothing(checkpointing):
    """Forward and backward with the real kernel's schema; a tensor of the host that strayed in would raise."""
    engine = engine_of()
    base = engine.peft.get_base_model()
    attention.register_packed_attention(attention.flash_attention_varlen)
    base.set_attn_implementation(NAME)
    model = engine.model.to("meta").to(torch.bfloat16).train()
    checkpoint_activations(model, checkpointing)
    micro = batches_of(LanguageModel()).at(0)[0]
    begins, longest = sample_offsets(micro.inputs["position_ids"])
    inputs = {name: tensor.to("meta") for name, tensor in micro.inputs.items()}
    with Waits() as seen:
        logits = model(**inputs, attention_mask=offsets_as_mask(begins.to("meta"), longest)).logits
        logits.float().sum().backward()
    assert all(p.grad is not None and p.grad.is_meta for p in trainable(model).values())
    again = 2 if checkpointing == "full" else 1
    assert seen.waits == [] and len(seen.kernels) == 2 * again + 2  # two blocks, and their backward passes


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_kernel_is_the_naive_one_on_a_device():
    generator = torch.Generator().manual_seed(0)
    begins = torch.tensor([0, 7, 8, 40, 64], dtype=torch.int32)
    made = [torch.randn(64, heads, 32, generator=generator) for heads in (4, 2, 2)]
    for window in (None, 6):
        ours = [tensor.cuda().bfloat16().requires_grad_() for tensor in made]
        out = attention.flash_attention_varlen(*ours, begins.cuda(), 32, scale=0.2, window=window)
        theirs = [tensor.bfloat16().float().requires_grad_() for tensor in made]
        wanted = naive(*theirs, begins, 32, scale=0.2, window=window)
        torch.testing.assert_close(out.float().cpu(), wanted, rtol=0, atol=2e-2)
        out.float().sin().sum().backward()
        wanted.sin().sum().backward()
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one.grad.float().cpu(), other.grad, rtol=0, atol=5e-2)
