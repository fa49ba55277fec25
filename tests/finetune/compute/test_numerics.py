"""Which attention kernel a training pass takes, and that both give the same gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from flatshift.finetune.compute import numerics
from flatshift.finetune.compute.numerics import SHORT, attention_kernel
from flatshift.finetune.compute.precision import autocast
from flatshift.finetune.config import Train


@pytest.fixture(autouse=True)
def instructions(monkeypatch):
    """Of a CPU with bf16 instructions, whatever this one has; results do not depend on them."""
    monkeypatch.setattr(numerics, "has_bf16_matmul", lambda: True)


FLASH = "aten::_scaled_dot_product_flash_attention_for_cpu"


def _qkv(tokens, dtype=torch.float64):
    generator = torch.Generator().manual_seed(tokens)
    drawn = (torch.randn(3, 4, tokens, 32, generator=generator, dtype=dtype) for _ in range(3))
    return [tensor.requires_grad_() for tensor in drawn]


def _kernels(tokens, precision, *, grad=True):
    q, k, v = (tensor.detach().float().requires_grad_() for tensor in _qkv(tokens))
    inputs = {"input_ids": torch.zeros(3, tokens, dtype=torch.long), "lengths": torch.zeros(3)}
    with (
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler,
        torch.set_grad_enabled(grad),
        autocast(Train(precision=precision), torch.device("cpu")),
        attention_kernel(inputs),
    ):
        F.scaled_dot_product_attention(q, k, v)
    return {event.key for event in profiler.key_averages()}


@pytest.mark.parametrize(
    ("tokens", "precision", "grad", "flash"),
    [
        (SHORT, "bf16", True, False),
        (SHORT + 1, "bf16", True, True),
        (SHORT, "fp32", True, True),
        (SHORT, "bf16", False, True),
    ],
)
def test_short_rows_of_a_bf16_training_pass_leave_flash_attention(tokens, precision, grad, flash):
    assert (FLASH in _kernels(tokens, precision, grad=grad)) is flash


def test_a_cpu_without_bf16_instructions_keeps_flash_attention(monkeypatch):
    monkeypatch.setattr(numerics, "has_bf16_matmul", lambda: False)
    assert FLASH in _kernels(8, "bf16")


def test_nothing_is_chosen_where_no_input_has_rows():
    with torch.autocast("cpu", dtype=torch.bfloat16), attention_kernel({"lengths": torch.zeros(3)}):
        assert torch.backends.cuda.flash_sdp_enabled()


def test_the_choice_ends_with_the_pass():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with attention_kernel({"input_ids": torch.zeros(1, 4)}):
            assert not torch.backends.cuda.flash_sdp_enabled()
        assert torch.backends.cuda.flash_sdp_enabled()


@pytest.mark.bf16
def test_gradients_of_short_rows_are_as_near_to_float64_as_those_of_flash():
    exact = _qkv(16)
    target = torch.randn(3, 4, 16, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    (F.scaled_dot_product_attention(*exact) * target).sum().backward()

    def error(context):
        rough = [tensor.detach().bfloat16().requires_grad_() for tensor in exact]
        with torch.autocast("cpu", dtype=torch.bfloat16), context:
            (F.scaled_dot_product_attention(*rough) * target.bfloat16()).sum().backward()
        assert all(tensor.grad is not None for tensor in (*rough, *exact))
        pairs = zip(rough, exact, strict=True)
        return max(float((a.grad.double() - b.grad).norm() / b.grad.norm()) for a, b in pairs)

    torch_own = error(torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours = attention_kernel({"input_ids": torch.zeros(3, 16)})
    assert error(ours) < 1.5 * torch_own
    assert torch_own < 0.02
