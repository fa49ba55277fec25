"""The protocol: settings, attaching, detaching, misuse. Every refusal is one sentence and changes nothing."""

import copy
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from flatshift.regularizers import GGPO, MGPO, SAM, BiLora, FlatLora, Plain, PlainRegularizer, RegularizerError, build
from flatshift.regularizers.mesh import Placement
from flatshift.regularizers.methods.ggpo import GGPORegularizer
from tests.support.regularizer_models import clear, gradients, loss_of, perturbations, tiny_llama, tokens, with_lora


def traces(model: nn.Module) -> dict[str, list[str]]:
    """All instance attributes of all modules, and every hook."""
    return {
        name: [
            *sorted(vars(module)),
            *(f"{kind}:{len(getattr(module, kind))}" for kind in ("_forward_hooks", "_forward_pre_hooks")),
        ]
        for name, module in model.named_modules()
    }


def test_plain_does_nothing() -> None:
    model, ids = with_lora(tiny_llama()), tokens()
    before = loss_of(model, ids)
    regularizer = build(Plain())
    assert isinstance(regularizer, PlainRegularizer)
    assert regularizer.attach(model, seed=0, total_steps=1) is regularizer
    with regularizer.step(0):
        assert torch.equal(loss_of(model, ids), before)
    assert regularizer.metrics() == {} and regularizer.state_dict() == {}
    regularizer.load_state_dict({})
    regularizer.detach()
    with pytest.raises(RegularizerError, match=r"regularizer\.kind"):
        regularizer.load_state_dict({"seed": torch.zeros(1)})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("sigma", -0.1),
        ("sigma", float("nan")),
        ("beta", -1.0),
        ("mode", "product"),
        ("scope", "token"),
        ("normalize", "row"),
        ("control", "permuted"),
        ("schedule", "step"),
        ("ema", 1.0),
        ("refresh", 0),
        ("rank", 0),
        ("rank", 65),
        ("probes", 0),
        ("sketch_every", 0),
        ("tolerance", -0.1),
        ("tolerance", float("nan")),
    ],
)
def test_a_setting_without_a_meaning_is_refused_by_name(key: str, value: object) -> None:
    with pytest.raises(RegularizerError, match=rf"regularizer\.{key}: .*is not"):
        build(replace(GGPO(), **{key: value}))


def test_no_gradient_term_needs_no_probes() -> None:
    assert isinstance(build(GGPO(beta=0.0, probes=0)), GGPORegularizer)


def test_settings_of_an_unknown_type_are_refused() -> None:
    with pytest.raises(RegularizerError, match="dict"):
        build({"kind": "ggpo"})  # type: ignore[arg-type]


def test_a_model_without_lora_is_refused() -> None:
    for config, name in ((GGPO(), "GGPO"), (FlatLora(), "Flat-LoRA")):
        with pytest.raises(RegularizerError, match=rf"no LoRA layer, and {name} perturbs.*all-linear"):
            build(config).attach(tiny_llama(), seed=0, total_steps=1)


def test_a_model_with_lora_on_embeddings_only_is_refused_and_mixed_is_reported(caplog) -> None:
    with pytest.raises(RegularizerError, match="embed_tokens"):
        build(GGPO()).attach(with_lora(tiny_llama(), target_modules=["embed_tokens"]), seed=0, total_steps=1)
    model = with_lora(tiny_llama(), target_modules=["embed_tokens", "q_proj"])
    caplog.clear()
    regularizer = build(GGPO()).attach(model, seed=0, total_steps=1)
    assert [record.getMessage() for record in caplog.records] == [
        "GGPO leaves 1 LoRA layers that are not linear alone, e.g. base_model.model.model.embed_tokens: they train "
        "unperturbed"
    ]
    with regularizer.step(0):
        assert list(perturbations(regularizer)) == [
            f"base_model.model.model.layers.{i}.self_attn.q_proj" for i in range(2)
        ]
    assert regularizer.metrics()["perturbed_layers"] == 2 and regularizer.metrics()["layers_left_alone"] == 1


def test_a_weight_that_is_no_float_matrix_is_refused() -> None:
    model = with_lora(tiny_llama())
    base = model.get_submodule("base_model.model.model.layers.0.self_attn.q_proj").base_layer
    base.weight = nn.Parameter(torch.zeros(512, 1, dtype=torch.uint8), requires_grad=False)  # packed, as 4-bit is
    with pytest.raises(RegularizerError, match=r"q_proj.*uint8.*unquantised"):
        build(GGPO()).attach(model, seed=0, total_steps=1)


def test_attaching_twice_is_refused_until_detached() -> None:
    model = with_lora(tiny_llama())
    first = build(GGPO()).attach(model, seed=0, total_steps=1)
    with pytest.raises(RegularizerError, match="attached already"):
        first.attach(model, seed=0, total_steps=1)
    with pytest.raises(RegularizerError, match="another regularizer"):
        build(GGPO()).attach(model, seed=0, total_steps=1)
    first.detach()
    second = build(GGPO()).attach(model, seed=0, total_steps=1)
    del second  # a regularizer that is gone holds nothing
    build(GGPO()).attach(model, seed=0, total_steps=1)


def test_use_before_attach_is_refused() -> None:
    regularizer = build(GGPO())
    with pytest.raises(RegularizerError, match="attach"), regularizer.step(0):
        pass
    with pytest.raises(RegularizerError, match="attach"):
        regularizer.load_state_dict({})
    regularizer.detach()  # harmless


def test_a_ramp_needs_a_length() -> None:
    with pytest.raises(RegularizerError, match=r"regularizer\.schedule"):
        build(GGPO(schedule="cosine")).attach(with_lora(tiny_llama()), seed=0, total_steps=0)


def test_a_step_inside_a_step_is_refused_and_the_outer_one_ends_clean() -> None:
    model = with_lora(tiny_llama())
    before = traces(model)
    regularizer = build(GGPO()).attach(model, seed=0, total_steps=1)
    with pytest.raises(RegularizerError, match=r"step\(1\)"), regularizer.step(0), regularizer.step(1):
        pass
    assert traces(model) == before


def test_a_merged_adapter_is_refused_and_leaves_no_layer_perturbed() -> None:
    model = with_lora(tiny_llama())
    regularizer = build(GGPO()).attach(model, seed=0, total_steps=1)
    model.get_submodule("base_model.model.model.layers.1.mlp.down_proj").merge()
    before = traces(model)
    with pytest.raises(RegularizerError, match=r"down_proj.*merged"), regularizer.step(0):
        pass
    assert traces(model) == before


def test_attach_step_and_detach_leave_no_trace() -> None:
    model, ids = with_lora(tiny_llama()), tokens()
    before, reference = traces(model), copy.deepcopy(model)
    names = [name for name, _ in model.named_parameters()]
    regularizer = build(GGPO(sigma=0.3)).attach(model, seed=0, total_steps=4)
    assert traces(model) == before
    for t in range(2):
        with regularizer.step(t):
            assert traces(model) != before
            loss_of(model, ids).backward()
        assert traces(model) == before
    regularizer.detach()
    clear(model)
    assert traces(model) == before and [name for name, _ in model.named_parameters()] == names
    loss, expected = loss_of(model, ids), loss_of(reference, ids)
    loss.backward(), expected.backward()
    assert torch.equal(loss, expected)
    mine, theirs = gradients(model), gradients(reference)
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize(
    ("config", "dora"), [(GGPO(), False), (GGPO(), True), (MGPO(form="code"), False), (SAM(), False), (BiLora(), False)]
)
def test_a_reference_by_another_adapter_is_unperturbed(config, dora) -> None:
    """As of TRL's DPOTrainer, which goes on from an adapter and keeps a copy of it as `ref`."""
    model, ids = with_lora(tiny_llama(), use_dora=dora), tokens()
    model.add_adapter("ref", LoraConfig(target_modules="all-linear", init_lora_weights=False, use_dora=dora))
    model.set_adapter("ref")
    expected = loss_of(model, ids)
    model.set_adapter("default")
    regularizer = build(config).attach(model, seed=0, total_steps=2)
    for t in range(2):  # in the first step some methods perturb nothing
        with regularizer.step(t) as passes:
            for _ in passes:
                loss_of(model, ids).backward()
                model.set_adapter("ref")
                assert torch.equal(loss_of(model, ids), expected)
                model.set_adapter("default")
        regularizer.after_optimizer_step(1e-2)


def test_a_forward_that_someone_else_replaced_is_called_and_restored() -> None:
    model, ids = with_lora(tiny_llama()), tokens()
    layer = model.get_submodule("base_model.model.model.layers.0.self_attn.q_proj")
    calls, original = [], layer.forward

    def counted(*args, **kwargs):
        calls.append(1)
        return original(*args, **kwargs)

    layer.forward = counted
    regularizer = build(GGPO(sigma=0.3)).attach(model, seed=0, total_steps=4)
    with regularizer.step(0):
        loss_of(model, ids)
    assert calls and layer.forward is counted


def test_a_variant_keeps_its_slot_and_is_delegated_to() -> None:
    """DoRA's rule is asked for every forward pass, and its slot in the layer is never written."""
    model, ids = with_lora(tiny_llama(), use_dora=True), tokens()
    layer = model.get_submodule("base_model.model.model.layers.0.self_attn.q_proj")
    variant, calls = layer.lora_variant["default"], []
    slots = {id(module.lora_variant["default"]) for module in model.modules() if hasattr(module, "lora_variant")}

    class Counted(type(variant)):
        @staticmethod
        def forward(module, *args, **kwargs):
            calls.append(1)
            return type(variant).forward(module, *args, **kwargs)

    layer.lora_variant["default"] = mine = Counted()
    regularizer = build(GGPO(sigma=0.3)).attach(model, seed=0, total_steps=1)
    with regularizer.step(0):
        loss_of(model, ids).backward()
        assert layer.lora_variant["default"] is mine and len(calls) == 1
    regularizer.detach()
    layer.lora_variant["default"] = variant
    assert slots == {
        id(module.lora_variant["default"]) for module in model.modules() if hasattr(module, "lora_variant")
    }


def test_state_of_something_else_is_refused() -> None:
    regularizer = build(GGPO()).attach(with_lora(tiny_llama()), seed=5, total_steps=4)
    good = regularizer.state_dict()
    assert all(isinstance(value, torch.Tensor) for value in good.values())
    with pytest.raises(RegularizerError, match="does not belong"):
        regularizer.load_state_dict({})
    with pytest.raises(RegularizerError, match="shape"):
        regularizer.load_state_dict({k: v[:-1] if k.endswith(".ema") else v for k, v in good.items()})
    with pytest.raises(RegularizerError, match=r"train\.seed"):
        regularizer.load_state_dict(good | {"seed": torch.tensor(6)})
    regularizer.load_state_dict(good)


def test_a_stage_of_a_pipeline_takes_its_layers_from_the_state_of_all() -> None:
    class Stage(Placement):
        """A placement that is not the single process's."""

    whole = build(GGPO()).attach(with_lora(tiny_llama()), seed=5, total_steps=4).state_dict()
    part = nn.Module()
    part.part0 = with_lora(tiny_llama(), target_modules=r".*layers\.1\..*_proj")
    regularizer = build(GGPO()).attach(part, seed=5, total_steps=4, placement=Stage())
    own = regularizer.state_dict()
    assert set(own) < set(whole)
    regularizer.load_state_dict(whole)
    with pytest.raises(RegularizerError, match="does not belong"):
        regularizer.load_state_dict({name: v for name, v in whole.items() if ".layers.1." not in name})


def test_heads_trained_whole_are_untouched() -> None:
    backbone = tiny_llama()
    model = get_peft_model(
        backbone, LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM")
    )
    regularizer = build(GGPO(sigma=0.3)).attach(model, seed=0, total_steps=4)
    head = model.base_model.model.lm_head
    before = {name: sorted(vars(module)) for name, module in head.named_modules()}
    with regularizer.step(0):
        assert {name: sorted(vars(module)) for name, module in head.named_modules()} == before
        loss_of(model, tokens()).backward()
    assert head.modules_to_save["default"].weight.grad is not None


def test_the_package_imports_neither_torch_nor_peft() -> None:
    code = (
        "import sys; from flatshift import regularizers; "
        "from flatshift.regularizers import config, protocol; "
        "assert 'torch' not in sys.modules; import flatshift.regularizers.methods.ggpo; "
        "assert not {'peft', 'transformers'} & set(sys.modules); "
        "assert set(dir(regularizers)) >= set(regularizers.__all__); "
        "assert all(getattr(regularizers, name) for name in regularizers.__all__)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    from flatshift import regularizers

    with pytest.raises(AttributeError, match="nonsense"):
        regularizers.nonsense  # noqa: B018
