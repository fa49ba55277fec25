"""Models, losses and settings that cannot be measured, each in one sentence."""

import math
from typing import Any

import pytest

from flatshift.regularizers.config import RegularizerError
from flatshift.regularizers.sharpness import Sharpness, measure
from tests.support.regularizer_models import tiny_llama, tokens, with_lora
from tests.support.sharpness_models import IDS, SMALL, SPACES, both_spaces, everything, loss_of, tiny


@both_spaces
def test_models_that_cannot_be_measured(kind: str) -> None:
    with pytest.raises(RegularizerError, match="LoRA"):
        SPACES[kind](tiny_llama())
    assert SPACES[kind](with_lora(tiny_llama())).size > 0
    merged = tiny()
    merged.merge_adapter()
    with pytest.raises(RegularizerError, match=r"model.q is merged .*unmerge_adapter"):
        SPACES[kind](merged)


def test_losses_that_cannot_be_measured() -> None:
    model = tiny()
    before = everything(model)
    with pytest.raises(RegularizerError, match="loss at the weights themselves is nan"):
        measure(model, lambda: loss_of(model, IDS) * math.nan, SMALL)
    with pytest.raises(RegularizerError, match=r"no gradient .* switch the adapters on"), model.disable_adapter():
        measure(model, lambda: loss_of(model, IDS), Sharpness(spaces=("full",)))
    drawn = iter(range(100))
    with pytest.raises(RegularizerError, match=r"at one time .* at another.*fixed batches"):
        measure(model, lambda: loss_of(model, tokens(6, 8, seed=next(drawn))), SMALL)
    assert everything(model) == before


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"sigmas": (0.1, -0.1)}, r"sharpness\.sigmas.*numbers > 0"),
        ({"rhos": (math.nan,)}, r"sharpness\.rhos"),
        ({"rhos": (0.1, 0.1 + 1e-9)}, "different"),
        ({"spaces": ("adapters",)}, r"sharpness\.spaces.*`adapter`, `full`"),
        ({"spaces": ()}, r"sharpness\.spaces"),
        ({"spaces": "adapter"}, "adapter is not a list of"),
        ({"draws": 0}, r"sharpness\.draws: 0 is not a number ≥ 1"),
        ({"line_points": 4}, "odd"),
        ({"plane_points": 1}, "0 or an odd number ≥ 3"),
        ({"reach": 0.0}, "reach"),
        ({"confidence": 1.0}, "confidence"),
    ],
)
def test_settings_without_a_meaning(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(RegularizerError, match=message):
        Sharpness(**settings)
