"""The fused form of plain LoRA layers against PEFT's own forward, in float64, float32 and bf16, and what it leaves
alone."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from peft import AdaLoraConfig, LoraConfig, get_peft_model
from torch import Tensor, nn

from flatshift.regularizers.layers.forward import ForwardSwap
from flatshift.regularizers.layers.fused import FusedLayers, FusedLora
from flatshift.regularizers.layers.sites import find_lora_sites
from flatshift.regularizers.methods.sam import _collect_weight_gradient
from tests.support.regularizer_models import (
    clear,
    frozen_checksums,
    gradients,
    tiny_gpt2,
    tiny_llama,
    tokens,
    with_lora,
)


def llama(dtype: torch.dtype = torch.float64, **settings: Any) -> Callable[[], Any]:
    return lambda: with_lora(tiny_llama(dtype=dtype), **settings)


def conv1d() -> Any:
    return with_lora(tiny_gpt2(dtype=torch.float64), fan_in_fan_out=True)


def trained_head() -> Any:
    """A base weight and bias with gradients of their own beside the adapter's."""
    model = with_lora(tiny_gpt2(dtype=torch.float64), fan_in_fan_out=True)
    for name, parameter in model.named_parameters():
        if "c_fc.base_layer" in name:
            parameter.requires_grad_(True)
    return model


def two_adapters() -> Any:
    model = with_lora(tiny_llama(dtype=torch.float64))
    model.add_adapter("second", LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False))
    model.base_model.set_adapter(["default", "second"])
    return model.double()


def hooked() -> Any:
    """A hook between the layer and its factor doubles what goes through."""
    model = with_lora(tiny_llama(dtype=torch.float64))
    for name, module in model.named_modules():
        if name.endswith("lora_A.default"):
            module.register_forward_hook(lambda layer, args, out: 2 * out)
    return model


def merged() -> Any:
    model = with_lora(tiny_llama(dtype=torch.float64))
    model.merge_adapter()
    return model


def adalora() -> Any:
    config = AdaLoraConfig(init_r=4, target_r=2, tinit=1, tfinal=2, total_step=9, target_modules=["q_proj"])
    return get_peft_model(tiny_llama(dtype=torch.float64), config).double().train()


SERVED = {
    "llama": llama(),
    "rslora": llama(use_rslora=True),
    "dropout": llama(lora_dropout=0.3),
    "conv1d": conv1d,
    "trained-base": trained_head,
}
LEFT = {
    "dora": llama(use_dora=True),
    "lora-bias": llama(lora_bias=True),
    "two-adapters": two_adapters,
    "hooked": hooked,
    "merged": merged,
    "adalora": adalora,
}


def passed(
    model: Any, *, fused: bool, autocast: bool = False, embed: torch.dtype = torch.float64
) -> tuple[int, Tensor, Tensor, dict[str, Tensor]]:
    """Layers in the fused form; loss, the gradient of the input embeddings and those of all that is trained."""
    clear(model)
    ids = tokens()
    generator = torch.Generator().manual_seed(2)
    embeds = torch.randn(*ids.shape, 32, generator=generator, dtype=torch.float64).to(embed).requires_grad_()
    layers, count = FusedLayers(model), 0
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(5)  # of the dropout masks
        if fused:
            with layers.replace_forwards() as count, torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                loss = model(inputs_embeds=embeds, labels=ids).loss
                loss.backward()
        else:
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                loss = model(inputs_embeds=embeds, labels=ids).loss
            loss.backward()
    assert embeds.grad is not None
    return count, loss.detach(), embeds.grad, gradients(model)


def lora_layers(model: nn.Module) -> int:
    return sum(hasattr(module, "lora_A") for module in model.modules())


@pytest.mark.parametrize("case", SERVED)
def test_loss_and_all_gradients_equal_pefts(case: str) -> None:
    model = SERVED[case]()
    frozen = frozen_checksums(model)
    count, loss, dx, found = passed(model, fused=True)
    assert count == lora_layers(model) > 0
    none, wanted_loss, wanted_dx, wanted = passed(model, fused=False)
    assert none == 0 and found.keys() == wanted.keys() and len(found) >= 2 * count
    assert abs(loss / wanted_loss - 1) < 1e-12
    assert (dx - wanted_dx).norm() < 1e-11 * wanted_dx.norm()
    for name, gradient in found.items():
        assert wanted[name].norm() > 0 and (gradient - wanted[name]).norm() < 1e-11 * wanted[name].norm(), name
    assert frozen_checksums(model) == frozen
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize("case", LEFT)
def test_what_is_not_plain_stays_pefts_to_the_bit(case: str) -> None:
    model = LEFT[case]()
    count, loss, dx, found = passed(model, fused=True)
    assert count == 0 < lora_layers(model)
    _, wanted_loss, wanted_dx, wanted = passed(model, fused=False)
    assert torch.equal(loss, wanted_loss) and torch.equal(dx, wanted_dx)
    assert all(torch.equal(gradient, wanted[name]) for name, gradient in found.items())


def test_a_regularizers_own_forward_is_left_to_it() -> None:
    model = with_lora(tiny_llama(dtype=torch.float64))
    layer = next(module for module in model.modules() if hasattr(module, "lora_A"))
    own = layer.forward = lambda x: type(layer).forward(layer, x) * 0.5
    with FusedLayers(model).replace_forwards() as count:
        assert count == lora_layers(model) - 1 and layer.forward is own
    assert layer.forward is own


def test_a_term_behind_a_layer_stays_and_the_layer_is_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = with_lora(tiny_llama(dtype=torch.float64))
    terms = [ForwardSwap(site) for site in find_lora_sites(model)[0]]
    for term in terms:
        term.add_term(lambda y, x: y + x.sum(-1, keepdim=True) * 0.01)
    before = [vars(module)["forward"].own for module in model.modules() if hasattr(module, "lora_A")]
    calls: list[int] = []
    real = FusedLora.apply
    monkeypatch.setattr(FusedLora, "apply", lambda *inputs: calls.append(1) or real(*inputs))
    fused = passed(model, fused=True)
    assert fused[0] == len(calls) == len(terms)
    wanted = passed(model, fused=False)
    assert len(calls) == len(terms)
    assert (fused[2] - wanted[2]).norm() < 1e-11 * wanted[2].norm()
    for name, gradient in fused[3].items():
        assert (gradient - wanted[3][name]).norm() < 1e-11 * wanted[3][name].norm(), name
    assert before == [vars(module)["forward"].own for module in model.modules() if hasattr(module, "lora_A")]
    for term in terms:
        term.restore()
    assert abs(passed(model, fused=True)[1] - fused[1]) > 1e-6  # the term was there


def test_in_float32_and_bf16_it_is_as_near_to_float64_as_peft_is() -> None:
    exact = passed(with_lora(tiny_llama(dtype=torch.float64)), fused=False)

    def distance(found: tuple[int, Tensor, Tensor, dict[str, Tensor]]) -> float:
        parts = [(found[3][name].double() - wanted).norm() / wanted.norm() for name, wanted in exact[3].items()]
        return float(torch.stack(parts).mean())

    def cast(dtype: torch.dtype) -> Any:
        model = with_lora(tiny_llama(dtype=torch.float64)).float()
        for name, parameter in model.named_parameters():
            if "lora_" not in name:
                parameter.data = parameter.data.to(dtype)
        return model

    for dtype, most in ((torch.float32, 2e-6), (torch.bfloat16, 0.1)):
        how: dict[str, Any] = {"autocast": dtype == torch.bfloat16, "embed": dtype}
        fused, peft = passed(cast(dtype), fused=True, **how), passed(cast(dtype), fused=False, **how)
        assert fused[0] > 0
        assert distance(fused) <= 1.3 * distance(peft) + 1e-9 and distance(peft) < most
        assert all(gradient.dtype == torch.float32 for gradient in fused[3].values())


def test_mixed_dtypes_and_calls_that_ask_for_more_go_to_peft() -> None:
    wide = with_lora(tiny_llama(dtype=torch.float64)).float()  # under autocast the frozen weights are float32 still
    with FusedLayers(wide).replace_forwards() as count, torch.autocast("cpu", dtype=torch.bfloat16):
        found = wide(input_ids=tokens()).logits
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert count and torch.equal(found, wide(input_ids=tokens()).logits)
    model = with_lora(tiny_llama(dtype=torch.float64))
    with FusedLayers(model).replace_forwards(), model.disable_adapter():
        off = model(input_ids=tokens()).logits
    with model.disable_adapter():
        assert torch.equal(off, model(input_ids=tokens()).logits)


def test_what_changes_between_two_passes_is_seen() -> None:
    """A second adapter, another scale, a hook, one adapter again: each pass is PEFT's, fused where it may be."""
    model = two_adapters()
    layers = FusedLayers(model)
    inner = next(module for name, module in model.named_modules() if name.endswith("lora_A.second"))
    total = lora_layers(model)

    def compared() -> int:
        with layers.replace_forwards() as count:
            found = model(input_ids=tokens()).logits
        wanted = model(input_ids=tokens()).logits
        assert (found - wanted).norm() < 1e-12 * wanted.norm()
        return count

    assert compared() == 0
    model.base_model.set_adapter("second")
    assert compared() == total
    for module in model.modules():
        if hasattr(module, "lora_A"):
            module.scaling["second"] *= 3
    assert compared() == total
    handle = inner.register_forward_hook(lambda layer, args, out: 2 * out)
    assert compared() == total - 1
    handle.remove()
    assert compared() == total
    model.base_model.set_adapter("default")
    assert compared() == total


def test_recomputation_in_backward_computes_the_same() -> None:
    plain, checkpointed = (with_lora(tiny_llama(dtype=torch.float64), lora_dropout=0.3) for _ in range(2))
    checkpointed.gradient_checkpointing_enable({"use_reentrant": False})
    wanted, found = passed(plain, fused=True), passed(checkpointed, fused=True)
    assert found[0] == wanted[0] > 0 and torch.equal(found[1], wanted[1])
    assert all(torch.equal(gradient, found[3][name]) for name, gradient in wanted[3].items())


def tiny_deberta() -> Any:
    """Adds its biases to what the fused query, key and value layer gives, in place."""
    config = transformers.DebertaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, pad_token_id=0,
        relative_attention=True, pos_att_type=["c2p", "p2c"], hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.DebertaForMaskedLM(config)


def tiny_led() -> Any:
    """Divides what the query layer gives by the root of its width, in place."""
    config = transformers.LEDConfig(
        vocab_size=64, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, encoder_ffn_dim=48,
        decoder_attention_heads=2, decoder_ffn_dim=48, attention_window=8, dropout=0.0, pad_token_id=0,
        max_encoder_position_embeddings=64, max_decoder_position_embeddings=64,
    )  # fmt: skip
    return transformers.LEDForConditionalGeneration(config)


@pytest.mark.parametrize("made", [tiny_deberta, tiny_led])
@pytest.mark.parametrize("collects", [False, True])
def test_models_that_write_into_what_a_layer_gives(made: Callable[[], Any], collects: bool) -> None:
    """collects: behind SAM's identity over the whole weight, which collects gradients."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        model = with_lora(made().double(), task_type=None)
    ids = tokens()[:, :8].contiguous()
    found = []
    for fused in (False, True):
        clear(model)
        with contextlib.ExitStack() as stack:
            for site in find_lora_sites(model)[0] if fused and collects else ():
                term = ForwardSwap(site)
                term.add_term(
                    partial(_collect_weight_gradient, torch.zeros(site.rows, site.columns, dtype=torch.float64))
                )
                stack.callback(term.restore)
            if fused:
                assert stack.enter_context(FusedLayers(model).replace_forwards()) == lora_layers(model)
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
        found.append((loss.detach(), gradients(model)))
    (plain, wanted), (loss, got) = found
    assert torch.allclose(loss, plain, rtol=1e-12)
    for name, gradient in wanted.items():
        assert torch.allclose(got[name], gradient, rtol=1e-9, atol=1e-12), name
