"""Settings of GGPO through the command: what each changes in the lines of metrics.jsonl."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from flatshift.cli import run
from tests.support.commands import flags
from tests.support.data_models import byte_tokenizer
from tests.support.finetune_models import save_backbone

SMALL = {
    **{"train.steps": 3, "train.batch_size": 2, "train.max_length": 24, "train.max_cut": 1, "train.eval_every": 0},
    **{"train.threads": 1, "train.precision": "fp32", "train.device": "cpu", "train.peak_tflops": 1},
    **{"data.train.limit": 16, "data.dev.files": "[]", "data.test.files": "[]", "eval.bootstrap": 10, "eval.cold": 0},
    **{"optimizer.lr": 0.01, "regularizer.kind": "ggpo"},
}
Lines = dict[str, list[float]]


@pytest.fixture(scope="module")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of two blocks: 14 layers get adapters."""
    path = save_backbone("llama", tmp_path_factory.mktemp("backbone"), vocab_size=len(byte_tokenizer()))
    byte_tokenizer().save_pretrained(path)
    return path


def trained(out: Path, backbone: Path, **settings: object) -> Lines:
    """Three steps: each metric of the training lines, by its name."""
    own = SMALL | {"backbone": backbone} | {f"regularizer.{key}": value for key, value in settings.items()}
    assert run(["train", "language-model", "--out", str(out), *flags(own)]) == 0
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    lines = [line for line in lines if line["split"] == "train"]
    return {key: [line[key] for line in lines] for key in lines[0] if key != "stage" and key != "split"}


@pytest.fixture(scope="module")
def usual(backbone: Path, tmp_path_factory: pytest.TempPathFactory) -> Lines:
    return trained(tmp_path_factory.mktemp("runs") / "usual", backbone)


def same(values: list[float]) -> object:
    return pytest.approx(values, rel=1e-3, abs=1e-9)


def rank_and_intervals(ours: Lines, usual: Lines) -> None:
    """Other noise of the same size at first; a sketch at every other step, row norms at every one."""
    assert ours["loss"][0] != usual["loss"][0] and ours["row_sigma_mean"][:1] == same(usual["row_sigma_mean"][:1])
    assert (ours["sketches"], usual["sketches"]) == ([1, 1, 2], [1, 2, 3])
    assert (ours["norms_refreshed"], usual["norms_refreshed"]) == ([14, 14, 14], [14, 0, 0])


def probes_and_tolerance(ours: Lines, usual: Lines) -> None:
    """The probes change no output, but the estimate; B is 0 at the refresh, so |w₀ᵢ| is exact and all are skipped."""
    assert ours["loss"][:1] == same(usual["loss"][:1]) and ours["gradient_share"][1:] == same([0.5, 0.5])
    assert ours["guidance"][1:] != same(usual["guidance"][1:]) and ours["norms_refreshed"] == [0, 0, 0]


def no_average(ours: Lines, usual: Lines) -> None:
    """The first two steps know one sketch at most."""
    assert ours["guidance"][:2] == same(usual["guidance"][:2]) and ours["guidance"][2:] != same(usual["guidance"][2:])


def a_line(ours: Lines, usual: Lines) -> None:
    assert usual["sigma"] == [0.05] * 3 and ours["sigma"] == same([0, 0.05 / 3, 0.1 / 3])


def the_literal_sum(ours: Lines, usual: Lines) -> None:
    """Squared gradient norms are far below those of weights; σ rises by half a cosine."""
    assert ours["sigma"] == same([0, 0.0125, 0.0375])
    assert 0 < ours["gradient_share"][2] < 0.2 and usual["gradient_share"][2:] == same([0.5])


def other_rows(ours: Lines, usual: Lines) -> None:
    """The same power at first, half of it by the gradient then, but to other rows."""
    assert ours["row_sigma_mean"][:1] == same(usual["row_sigma_mean"][:1])
    assert ours["gradient_share"] == same([0, 0.5, 0.5]) and usual["gradient_share"] == same([0, 0.5, 0.5])
    assert ours["guidance"][1:] != same(usual["guidance"][1:]) and ours["loss"][1] != usual["loss"][1]


def between_layers(ours: Lines, usual: Lines) -> None:
    """Moving power between layers is more than moving it within each."""
    other_rows(ours, usual)
    assert all(1.2 * usual["guidance"][step] < ours["guidance"][step] < 1 for step in (1, 2))


@pytest.mark.parametrize(
    ("settings", "check"),
    [
        ({"rank": 2, "sketch_every": 2, "refresh": 1}, rank_and_intervals),
        ({"probes": 1, "tolerance": 1}, probes_and_tolerance),
        ({"ema": 0}, no_average),
        ({"schedule": "linear"}, a_line),
        ({"mode": "paper", "schedule": "cosine"}, the_literal_sum),
        ({"mode": "relative-product"}, other_rows),
        ({"control": "shuffled"}, other_rows),
        ({"normalize": "model"}, between_layers),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else value.__name__,
)
def test_each_setting_has_its_effect(
    settings: dict[str, object], check: Callable[[Lines, Lines], None], usual: Lines, backbone: Path, tmp_path: Path
) -> None:
    check(trained(tmp_path / "run", backbone, **settings), usual)


def own_noise(ours: Lines, usual: Lines) -> None:
    assert ours["loss"][0] != usual["loss"][0] and ours["row_sigma_mean"][:1] == same(usual["row_sigma_mean"][:1])


def norm_of(first: float) -> Callable[[Lines, Lines], None]:
    def the_step_has_it(ours: Lines, usual: Lines) -> None:
        at = ours["perturbation_norm"].index(next(filter(None, ours["perturbation_norm"])))
        assert ours["perturbation_norm"][at] == pytest.approx(first, rel=1e-4) != usual["perturbation_norm"][at]

    return the_step_has_it


def no_memory(higher: bool) -> Callable[[Lines, Lines], None]:
    """The last gradient is the momentum; the other sign leads to a higher or a lower loss."""

    def it_has_none(ours: Lines, usual: Lines) -> None:
        assert ours["momentum_norm"] == same(ours["gradient_norm"]) != same(usual["momentum_norm"])
        assert (ours["loss"][1] > usual["loss"][1]) == higher and ours["loss"][1] != usual["loss"][1]
        assert ours.get("gradient_norm_average", ours["gradient_norm"]) == same(ours["gradient_norm"])

    return it_has_none


def a_constant(ours: Lines, usual: Lines) -> None:
    assert ours["alpha"] == same([0.1] * 3) and usual["alpha"] == same([0.05, 0.1 / 3, 0.05 / 3])


def the_larger_factor(ours: Lines, usual: Lines) -> None:
    """Of the factors, not of their gradients: one shrinks and none grows, which at this rate is 1e-5 of their norms."""
    assert ours["alpha"] == same([0.05, 0.0375, 0.0125]) and 0 < ours["balance"][0] < 1
    assert all(
        0 < abs(one - other) < 1e-4 for one, other in zip(ours["balance"][1:], usual["balance"][1:], strict=True)
    )


def other_flat_noise(ours: Lines, usual: Lines) -> None:
    assert ours["sigma"] == same([0.1] * 3) and usual["sigma"] == same([0, 0.0125, 0.0375])
    assert ours["norms_refreshed"] == [14, 14, 14] and ours["loss"][0] != usual["loss"][0]


def a_second_adapter(ours: Lines, usual: Lines) -> None:
    assert ours["auxiliary_norm"] == same([0.1] * 3) and usual["auxiliary_norm"] == same([0.05] * 3)
    assert ours["loss"][1] != usual["loss"][1]


def a_slow_second_adapter(ours: Lines, usual: Lines) -> None:
    assert ours["auxiliary_norm"][0] < 0.01 and ours["auxiliary_clips"] == [0, 0, 0]


@pytest.fixture(scope="module")
def defaults(backbone: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Lines]:
    """The lines of a kind with its own defaults."""
    folder = tmp_path_factory.mktemp("defaults")
    return functools.cache(lambda kind: trained(folder / kind, backbone, kind=kind))


@pytest.mark.parametrize(
    ("kind", "settings", "check"),
    [
        ("ggpo", {"scope": "microbatch"}, own_noise),
        ("ggpo", {"scope": "sample"}, own_noise),
        ("ggpo", {"beta": 3}, lambda ours, _: ours["gradient_share"] == same([0, 0.75, 0.75]) or pytest.fail()),
        ("sam", {"rho": 0.1}, norm_of(0.1)),
        ("lora-sam", {"rho": 0.1}, norm_of(0.1)),
        ("asam", {"rho": 1.0}, norm_of(0.01)),
        ("asam", {"eta": 0.02}, norm_of(0.01)),
        ("mgpo", {"rho": 0.1}, norm_of(2 * 0.047604)),
        ("mgpo", {"momentum": 0, "ema": 0, "sign": -1}, no_memory(higher=False)),
        ("mgpo", {"form": "code", "clamp": 0.5, "rho": 0.1}, norm_of(0.05 * 14**0.5)),
        ("msam", {"rho": 0.1}, norm_of(0.1)),
        ("msam", {"momentum": 0, "sign": 1}, no_memory(higher=True)),
        ("bar", {"alpha": 0.1, "schedule": "constant"}, a_constant),
        ("bar", {"form": "obar", "schedule": "cosine"}, the_larger_factor),
        ("flat-lora", {"sigma": 0.1, "schedule": "constant", "refresh": 1, "rank": 2}, other_flat_noise),
        ("bi-lora", {"rho": 0.1, "rank": 2}, a_second_adapter),
        ("bi-lora", {"lr_scale": 1e-3}, a_slow_second_adapter),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else value if isinstance(value, str) else "",
)
def test_each_setting_of_the_other_methods_has_its_effect(
    kind: str,
    settings: dict[str, object],
    check: Callable[[Lines, Lines], None],
    defaults: Callable[[str], Lines],
    backbone: Path,
    tmp_path: Path,
) -> None:
    check(trained(tmp_path / "run", backbone, kind=kind, **settings), defaults(kind))
