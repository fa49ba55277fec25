"""|W0 + sBA| by rows, without forming it, against float64."""

import pytest
import torch
from torch import Tensor

from flatshift.regularizers.layers import frozen
from flatshift.regularizers.layers.frozen import adapted_squared_row_norms, squared_row_norms, squared_update_norms
from flatshift.regularizers.layers.sites import canonical_name, find_lora_sites
from tests.support.regularizer_models import tiny_gpt2, tiny_llama, with_lora


def problem(dtype: torch.dtype, rows: int = 96, columns: int = 200, rank: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    weight = (torch.randn(rows, columns, generator=generator) * 0.02).to(dtype)
    a = (torch.rand(rank, columns, generator=generator) * 2 - 1) / columns**0.5
    return weight, a, torch.randn(rows, rank, generator=generator) * 0.1


def materialised(weight: Tensor, a: Tensor, sb: Tensor) -> Tensor:
    return (weight.double() + sb.double() @ a.double()).square().sum(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("chunk", [1 << 22, 1000])
def test_identity_against_float64(dtype: torch.dtype, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frozen, "_CHUNK", chunk)
    weight, a, sb = problem(dtype)
    expected = materialised(weight, a, sb)
    error = (adapted_squared_row_norms(weight, a, sb).double() / expected - 1).abs().max()
    assert float(error) < (1e-13 if dtype == torch.float64 else 1e-6)


def test_skip_bound_holds_and_is_attained_by_aligned_rows() -> None:
    weight, a, sb = problem(torch.float64)
    a, sb = a.double(), sb.double()
    moved = (materialised(weight, a, sb).sqrt() - squared_row_norms(weight).sqrt()).abs()
    bound = squared_update_norms(a, sb).sqrt()
    assert bool((moved <= bound * (1 + 1e-12)).all())
    aligned = (2 * sb @ a).contiguous()  # W0 parallel to the update: the norm grows by the whole of it
    grown = adapted_squared_row_norms(aligned, a, sb).sqrt() - squared_row_norms(aligned).sqrt()
    assert torch.allclose(grown, bound, rtol=1e-9)


def test_the_bound_of_a_layer_needs_no_look_at_its_weight() -> None:
    model = with_lora(tiny_llama(), use_rslora=True)
    for site in find_lora_sites(model)[0]:
        factors, weight = site.factors(), site.base.weight
        base, update = site.bound(factors)
        assert torch.equal(base, squared_row_norms(weight))
        dense = 4.0 * factors[1].double() @ factors[0].double()  # α/√r = 8/2
        assert torch.allclose(update.double(), dense.square().sum(1), rtol=1e-5)
        moved = (site.squared_norms(factors).sqrt() - base.sqrt()).abs()
        assert bool((moved <= update.sqrt() * (1 + 1e-5)).all())
        weight.data.zero_()
        assert torch.equal(site.bound(factors)[1], update)
    dora = find_lora_sites(with_lora(tiny_llama(), use_dora=True))[0][0]
    assert bool(dora.bound(dora.factors())[1].isinf().all())


@pytest.mark.parametrize(
    ("make", "settings"),
    [
        (tiny_llama, {}),
        (tiny_llama, {"use_rslora": True, "lora_alpha": 3}),
        (tiny_gpt2, {"fan_in_fan_out": True}),
        (tiny_llama, {"use_dora": True}),
    ],
    ids=["lora", "rslora", "conv1d", "dora"],
)
def test_every_kind_of_layer(make, settings: dict) -> None:
    model = with_lora(make(), **settings)
    sites, others = find_lora_sites(model)
    assert not others
    for site in sites:
        layer = site.layer
        if settings.get("use_dora"):
            expected = layer.lora_magnitude_vector["default"].weight.double().square()
        else:
            scaling = 3 / 4**0.5 if settings.get("use_rslora") else 8 / 4
            update = scaling * layer.lora_B["default"].weight.double() @ layer.lora_A["default"].weight.double()
            weight = layer.base_layer.weight.double()
            expected = ((weight.T if make is tiny_gpt2 else weight) + update).square().sum(1)
        assert torch.allclose(site.squared_norms(site.factors()).double(), expected, rtol=1e-6)


def test_several_active_adapters_add_up() -> None:
    from peft import LoraConfig

    model = with_lora(tiny_llama())
    model.add_adapter("second", LoraConfig(r=2, lora_alpha=6, target_modules="all-linear", init_lora_weights=False))
    model.base_model.set_adapter(["default", "second"])
    site = find_lora_sites(model)[0][0]
    weight = site.layer.base_layer.weight.double()
    for name in ("default", "second"):
        weight = weight + site.layer.scaling[name] * (
            site.layer.lora_B[name].weight.double() @ site.layer.lora_A[name].weight.double()
        )
    assert torch.allclose(site.squared_norms(site.factors()).double(), weight.square().sum(1), rtol=1e-6)


def test_names_do_not_depend_on_wrappers() -> None:
    assert (
        canonical_name("module._orig_mod.model.layers.0._checkpoint_wrapped_module.q_proj") == "model.layers.0.q_proj"
    )
