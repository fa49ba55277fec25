"""Counted dropout masks: their distribution, what they depend on, how cut tensors draw their part, and derivatives."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from benchmarks.cuda_rehearsal import Rehearsal
from flatshift.finetune.compute import dropout
from flatshift.finetune.compute.capabilities import CUDA
from flatshift.finetune.compute.dropout import KeyedDropout, with_query_offset
from flatshift.finetune.errors import UserError
from flatshift.finetune.parallel.build import check_mesh_support
from flatshift.regularizers.layers.signs import layer_uid, step_id

ROWS, TOKENS, WIDTH, HEADS = 6, 8, 24, 4


class Layer(nn.Module):
    """A dropout module, a dropout function and attention, each of which draws."""

    def __init__(self, rate: float = 0.3) -> None:
        super().__init__()
        self.drop = nn.Dropout(rate)

    def forward(self, x: Tensor, *, attend: bool = True, **how: Any) -> Tensor:
        y = F.dropout(self.drop(x), 0.1, self.training)
        if not attend:
            return y
        q = y.unflatten(-1, (HEADS, -1)).transpose(1, 2)
        rate = 0.2 if self.training else 0.0
        return F.scaled_dot_product_attention(q, q, q, dropout_p=rate, **how).transpose(1, 2).flatten(2)


def keyed(layer: nn.Module, **place: Any) -> KeyedDropout:
    return KeyedDropout({module: name for name, module in layer.named_modules()}, 7, **place)


def dropped(layer: nn.Module, x: Tensor, *, step: int = 0, first: int = 0, **how: Any) -> Tensor:
    with keyed(layer).forward_pass(step, first_row=first, rows=len(x), tokens=x.shape[1]):
        out: Tensor = layer(x, **how)
    return out


def data() -> Tensor:
    return torch.randn(ROWS, TOKENS, WIDTH, generator=torch.Generator().manual_seed(0))


def test_rate_scale_and_independence() -> None:
    layer, x = nn.Dropout(0.1), torch.ones(64, 128, 50)
    masks = [dropped(layer, x, step=step) for step in range(2)]
    masks.append(dropped(layer, x, first=64))
    for mask in masks:
        assert mask.unique().tolist() == pytest.approx([0.0, 1 / 0.9], rel=1e-4)
        share = (mask == 0).double()
        # 409,600 draws: five deviations of a share are 0.0024; of rows, tokens and channels in proportion
        assert abs(share.mean() - 0.1) < 0.0025
        for dim, draws in ((0, 6400), (1, 3200), (2, 8192)):
            others = [d for d in range(3) if d != dim]
            assert (share.mean(others) - 0.1).abs().max() < 5 * (0.09 / draws) ** 0.5
        # neighbours know nothing of each other
        centred = share - 0.1
        for one, other in ((centred[..., 1:], centred[..., :-1]), (centred[:, 1:], centred[:, :-1])):
            assert abs((one * other).mean()) < 5 * 0.09 / 640**0.5 / 25
    assert not any(torch.equal(a, b) for i, a in enumerate(masks) for b in masks[:i])


def test_no_generator_is_read_and_evaluation_drops_nothing() -> None:
    layer, x = Layer(), data()
    before = torch.get_rng_state()
    assert torch.equal(dropped(layer, x), dropped(layer, x))
    assert torch.equal(torch.get_rng_state(), before)
    layer.eval()
    assert torch.equal(dropped(layer, x), layer(x))


def test_a_cut_tensor_draws_its_part() -> None:
    layer, x = Layer(), data()
    whole = dropped(layer, x)
    assert torch.allclose(torch.cat([dropped(layer, x[:4]), dropped(layer, x[4:], first=4)]), whole, atol=1e-6)
    plain = dropped(layer, x, attend=False)
    cuts = torch.tensor([5, 11])
    parts = []
    for start, part in zip((0, *cuts.tolist()), x.tensor_split(cuts, dim=2), strict=True):  # at any feature
        place = keyed(layer, columns={"": start, "drop": start})
        with place.forward_pass(0, first_row=0, rows=ROWS, tokens=TOKENS):
            parts.append(layer(part, attend=False))
    assert torch.equal(torch.cat(parts, 2), plain)
    half = [torch.tensor([0, 1, 6, 7]), torch.tensor([2, 3, 4, 5])]
    for mine in half:  # tokens, as of context parallelism
        place = keyed(layer, positions=lambda own, mine=mine: mine)
        with place.forward_pass(0, first_row=0, rows=ROWS, tokens=len(mine)):
            assert torch.equal(layer(x[:, mine], attend=False), plain[:, mine])
    q = x.unflatten(-1, (HEADS, -1)).transpose(1, 2)

    def attention(q: Tensor, k: Tensor, place: KeyedDropout, first: int = 0) -> Tensor:
        with place.forward_pass(0, first_row=0, rows=ROWS, tokens=TOKENS), with_query_offset(first):
            return F.scaled_dot_product_attention(q, k, k, dropout_p=0.4)

    all_heads = attention(q, q, keyed(layer))
    second = attention(q[:, 2:], q[:, 2:], keyed(layer, tensor=(1, 2)))
    assert torch.allclose(second, all_heads[:, 2:], atol=1e-6)
    assert torch.allclose(attention(q[:, :, 5:], q, keyed(layer), first=5), all_heads[:, :, 5:], atol=1e-6)


def test_rows_laid_end_to_end_draw_like_rows() -> None:
    layer, x = nn.Dropout(0.4), data()
    place = KeyedDropout({layer: "shared_expert.up_proj.lora_dropout"}, 7)
    with place.forward_pass(0, first_row=3, rows=ROWS, tokens=TOKENS):
        flat = layer(x.flatten(0, 1))
    with place.forward_pass(0, first_row=3, rows=ROWS, tokens=TOKENS):
        assert torch.equal(flat.view_as(x), layer(x))


@pytest.mark.parametrize("shape", [(ROWS * TOKENS, WIDTH), (1, TOKENS, WIDTH)], ids=["table", "row"])
def test_what_all_rows_share_drops_alike_at_any_row(shape: tuple[int, ...]) -> None:
    layer, table = nn.Dropout(0.4), torch.ones(shape)  # relative positions, as DeBERTa has them
    owner = nn.ModuleDict({"pos_dropout": layer})

    def drawn(first: int, rows: int) -> torch.Tensor:
        with keyed(owner).forward_pass(0, first_row=first, rows=rows, tokens=TOKENS):
            kept: torch.Tensor = layer(table)
        return kept

    assert torch.equal(drawn(0, ROWS), drawn(ROWS, ROWS)) and torch.equal(drawn(0, ROWS), drawn(2, 2))


@pytest.mark.parametrize("how", [{}, {"is_causal": True}, {"attn_mask": "bool"}, {"attn_mask": "float"}])
def test_attention_is_torchs_with_the_mask_between(how: dict[str, Any]) -> None:
    g = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(2, heads, 5, 8, generator=g, dtype=torch.float64) for heads in (4, 2, 2))
    mask = torch.ones(5, 5, dtype=torch.bool).tril()
    given = dict(how)
    if how.get("attn_mask") == "bool":
        given["attn_mask"] = mask
    elif how.get("attn_mask") == "float":
        given["attn_mask"] = torch.zeros(5, 5, dtype=torch.float64).masked_fill(~mask, float("-inf"))
    with keyed(nn.Identity()).forward_pass(0, first_row=0, rows=2, tokens=5):
        kept = F.dropout(torch.ones(2, 4, 5, 5, dtype=torch.float64), 0.3)
    with keyed(nn.Identity()).forward_pass(0, first_row=0, rows=2, tokens=5):
        ours = F.scaled_dot_product_attention(q, k, v, dropout_p=0.3, enable_gqa=True, scale=0.5, **given)
    scores = 0.5 * q @ k.repeat_interleave(2, 1).transpose(-1, -2)
    if how:
        scores = scores.masked_fill(~mask, float("-inf"))
    wanted = (scores.softmax(-1) * kept) @ v.repeat_interleave(2, 1)
    assert torch.allclose(ours, wanted, atol=1e-6)


def test_derivatives_of_any_order() -> None:
    layer = nn.Dropout(0.3)
    x = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)

    def function(x: Tensor) -> Tensor:
        return dropped(layer, x).square()

    assert torch.autograd.gradcheck(function, x) and torch.autograd.gradgradcheck(function, x)


def test_a_cuda_device_is_never_waited_for() -> None:
    layer, x = Layer(), torch.empty(ROWS, TOKENS, WIDTH, device="meta", requires_grad=True)
    with Rehearsal(CUDA, on="meta") as seen:
        dropped(layer, x, is_causal=True).sum().backward()
    assert not seen.waits and x.grad is not None


@pytest.mark.slow
def test_a_mask_is_six_kernels_where_its_hash_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: the hash must be one kernel of the compiler; every other operation that is no view is one too."""
    from torch._inductor import metrics

    launched: list[str] = []

    def compiled(*counters: Any) -> Tensor:
        launched.append("hash")
        with _disable_current_modes():
            return dropout.compiled_hash(*counters)

    class Counter(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if not func.is_view:
                launched.append(str(func))
            return func(*args, **(kwargs or {}))

    layer, x = nn.Dropout(0.3), data()
    plain = [dropped(layer, x, step=step) for step in range(2)]
    metrics.reset()
    monkeypatch.setattr(dropout, "_hash_function", lambda compiled_too: compiled)
    with keyed(layer).forward_pass(0, first_row=0, rows=len(x), tokens=x.shape[1]):
        layer(x)  # counts the indices, once for all layers of this size
        launched.clear()
        with Counter():
            layer(x)
    assert len(launched) <= 6 and launched.count("hash") == 1, launched
    kernels = 3 if torch.__version__.startswith("2.11") else 1  # torch 2.11 does not fuse all of it
    assert metrics.generated_kernel_count == kernels
    assert all(torch.equal(dropped(layer, x, step=step), mask) for step, mask in enumerate(plain))
    dropped(layer, x[:1, :1, :1])
    assert metrics.generated_kernel_count == kernels, "compiled again for other sizes"


def test_masks_are_those_of_the_rule() -> None:
    """Written again with Python's integers."""
    word = (1 << 64) - 1

    def mix(value: int) -> int:
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            value = (value ^ (value >> shift)) * factor & word
        return value ^ (value >> 31)

    def kept(*index: int) -> bool:
        value = (layer_uid("dropout 0 layer") ^ step_id(7, 3)) & word
        for each in (*index[:-1], index[-1] // 4):
            value = mix(value + (each + 1) * 0x9E3779B97F4A7C15 & word)
        lane = value >> 16 * (index[-1] % 4) & 0xFFFF
        return (lane ^ 0x8000) >= round(0.3 * 65536)

    layer = nn.Dropout(0.3)
    with KeyedDropout({layer: "layer"}, 7).forward_pass(3, first_row=2, rows=2, tokens=3):
        mask = layer(torch.ones(2, 3, 7)) > 0
    assert mask.tolist() == [[[kept(r + 2, t, f) for f in range(7)] for t in range(3)] for r in range(2)]


def test_blocks_left_out_by_chance_are_refused_on_a_mesh() -> None:
    from transformers import BartConfig

    config = BartConfig(encoder_layerdrop=0.1)
    model = SimpleNamespace(get_base_model=lambda: SimpleNamespace(config=config))
    with pytest.raises(UserError, match=r"^mesh: encoder_layerdrop 0\.1 of this backbone .*train\.backbone_dropout: 0"):
        check_mesh_support(model)


@pytest.mark.parametrize(("kind", "rate"), [("xlnet", 0.1), ("fsmt", 0.1), ("xlnet", 0.0)])
def test_tokens_before_rows_are_refused_on_a_mesh_where_they_are_dropped(kind: str, rate: float) -> None:
    model: Any = nn.Sequential(nn.Dropout(rate))
    model.config = SimpleNamespace(model_type=kind, dropout=rate)
    model.get_base_model, model.peft_config = lambda: model, {"default": SimpleNamespace(target_parameters=None)}
    if rate == 0:
        check_mesh_support(model)
        return
    with pytest.raises(UserError, match=rf"^mesh: {kind} models .*train\.backbone_dropout: 0 and adapter\.dropout: 0"):
        check_mesh_support(model)


@pytest.mark.parametrize("layer", [nn.Dropout1d(0.1), nn.AlphaDropout(0.1), nn.MultiheadAttention(8, 2, dropout=0.1)])
def test_what_is_drawn_by_a_generator_all_the_same_is_refused_on_a_mesh(layer: nn.Module) -> None:
    def holding(part: nn.Module) -> Any:
        model: Any = nn.ModuleDict({"pooler": part})
        model.config = SimpleNamespace(model_type="other")
        model.get_base_model, model.peft_config = lambda: model, {"default": SimpleNamespace(target_parameters=None)}
        return model

    with pytest.raises(UserError, match=rf"^mesh: pooler of this backbone is a {type(layer).__name__}, .* one process"):
        check_mesh_support(holding(layer))
    check_mesh_support(holding(nn.Dropout(0.1)))
    check_mesh_support(holding(type(layer)(8, 2) if isinstance(layer, nn.MultiheadAttention) else type(layer)(0.0)))


def test_torchs_function_takes_its_own_names() -> None:
    x = torch.ones(ROWS, TOKENS, WIDTH)
    with keyed(nn.Identity()).forward_pass(0, first_row=0, rows=ROWS, tokens=TOKENS):
        named = torch.dropout(input=x, p=0.4, train=True)
    with keyed(nn.Identity()).forward_pass(0, first_row=0, rows=ROWS, tokens=TOKENS):
        assert torch.equal(F.dropout(x, 0.4), named)


class Router(nn.Module):
    """Noise as routers draw it: of tokens laid end to end, and of hidden states."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        flat = torch.empty_like(x).flatten(0, 1)
        return flat.exponential_(), torch.empty_like(x).uniform_(0.5, 1.5), torch.rand_like(flat[:, :1])


def test_noise_of_a_router_is_numbered_like_masks() -> None:
    router, x = Router(), data()
    wholes = dropped(router, x)  # type: ignore[assignment]
    for start in (0, ROWS // 2):
        parts = dropped(router, x[start : start + ROWS // 2], first=start)  # type: ignore[assignment]
        for whole, part in zip(wholes, parts, strict=True):
            own = whole.view(ROWS, -1, whole.shape[-1])[start : start + ROWS // 2]
            assert torch.equal(own, part.view(own.shape))
    again = dropped(router, x, step=1)
    assert not any(torch.equal(one, other) for one, other in zip(wholes, again, strict=True))
    many = dropped(router, torch.empty(64, 128, 50))
    exponential, uniform, rand = (each.double() for each in many)
    # 409,600 draws (8,192 of the last): five deviations of a mean are 5 σ / √n
    assert exponential.min() > 0 and abs(exponential.mean() - 1) < 0.008 and abs(exponential.std() - 1) < 0.016
    assert 0.5 < uniform.min() < 0.501 and 1.499 < uniform.max() < 1.5 and abs(uniform.mean() - 1) < 0.0023
    assert rand.min() > 0 and rand.max() < 1 and abs(rand.mean() - 0.5) < 0.016
    assert many[2].shape == (64 * 128, 1) and many[1].dtype == torch.float32


def test_rows_laid_end_to_end_have_masks_of_their_own() -> None:
    """As OPT drops after its feed-forward."""
    layer, x = nn.Dropout(0.3), torch.ones(ROWS, TOKENS, WIDTH)

    def mask(rows: int, first: int) -> Tensor:
        with keyed(layer).forward_pass(0, first_row=first, rows=rows, tokens=TOKENS):
            kept: Tensor = layer(x[:rows].flatten(0, 1))
        return kept.view(rows, TOKENS, WIDTH)

    whole = mask(ROWS, 0)
    assert torch.equal(whole[3:], mask(3, 3)) and torch.equal(whole[-1:], mask(1, ROWS - 1))
    assert not torch.equal(whole[:3], whole[3:])
