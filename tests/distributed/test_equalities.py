"""Real training with GGPO on small meshes equals one process: a part of `benchmarks/sharding_equalities.py`."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import mesh_families
from benchmarks._equalities import MODELS, STEPS, Layout, Subject
from benchmarks.sharding_equalities import BARS, FALL, LAYOUTS, PLAINLY, cells, write_references
from flatshift.finetune.config import Mesh
from tests.support.distributed_ranks import run_ranks


def compare(folder: Path, subjects: tuple[Subject, ...], *names: str) -> None:
    """Demand the bars of the table for these layouts of it; each of them is a cell for all subjects."""
    layouts = tuple(layout for layout in (PLAINLY, *LAYOUTS) if layout.name in names)
    assert len(layouts) == len(names)
    falls = write_references(folder, subjects, layouts)
    assert all(last / first <= FALL for first, last in falls.values()), falls
    for ranks in sorted({layout.ranks for layout in layouts}):
        wanted = tuple(layout for layout in layouts if layout.ranks == ranks)
        arguments = (str(folder), ranks, wanted, subjects)
        if ranks == 1:
            found = cells(*arguments)
        else:
            found = run_ranks("benchmarks.sharding_equalities:cells", ranks, *arguments)[0]
        assert len(found) == len(wanted) * len(subjects)
        for each in found:
            assert all(each[name] <= bar for name, bar in BARS.items()), each


def test_one_process_is_what_pytorch_and_peft_compute(tmp_path: Path) -> None:
    compare(tmp_path, tuple(Subject(model, "plain") for model in MODELS), PLAINLY.name)


@pytest.mark.parametrize(
    ("models", "layouts"),
    [
        (("llama",), ("pp 2, 1f1b", "dp 2 × tp 2")),
        pytest.param(("llama",), ("dp 2 (FSDP2)", "tp 2"), marks=pytest.mark.slow),
        pytest.param(("gpt2", "bert"), ("dp 2 (FSDP2)", "tp 2", "pp 2, 1f1b", "dp 2 × tp 2"), marks=pytest.mark.slow),
    ],
    ids=lambda names: "+".join(names),
)
def test_two_and_four_ranks(tmp_path: Path, models: tuple[str, ...], layouts: tuple[str, ...]) -> None:
    compare(tmp_path, tuple(Subject(model, "ggpo") for model in models), *layouts)


@pytest.mark.slow
def test_eight_ranks(tmp_path: Path) -> None:
    subjects = tuple(Subject(model, "ggpo") for model in MODELS)
    compare(tmp_path, subjects, "pp 2 × dp 2 × tp 2", "pp 2 × dp 2 × tp 2, interleaved")


ALSO = ("granite", "smollm3", "olmo", "cohere", "phi", "starcoder2", "helium", "nemotron", "arcee", "seed_oss")
ALSO += ("ministral", "ernie4_5", "olmo2", "phi3", "glm4", "vaultgemma")
RESUMED = Layout(
    "tp 2, then pp 2, dp 2, one process",
    Mesh(tp=2),
    (Mesh(pp=2), Mesh(dp=2), Mesh()),
    stop=STEPS // 4,
    models=tuple(mesh_families.VARIANTS),
)


def compare_families(
    folder: Path, models: tuple[str, ...], *layouts: Layout, regularizer: str = "plain", ranks: int = 2
) -> None:
    """Demand the bar of `benchmarks/mesh_families.py`; a cell without a figure is one that the family refuses."""
    subjects = tuple(Subject(model, regularizer) for model in models)
    falls = write_references(folder, subjects, layouts)
    assert all(last < first for first, last in falls.values()), falls
    found = run_ranks("benchmarks.sharding_equalities:cells", ranks, str(folder), ranks, layouts, subjects)[0]
    assert len(found) == len(layouts) * len(models)
    for each in found:
        print(each)
        refused = "sequence" in each["layout"] and each["subject"].startswith(("nemotron", "nanochat"))
        assert ("reason" in each) == refused, each
        assert refused or each["loss"] <= mesh_families.BAR, each


def test_families_by_transformers_own_plans(tmp_path: Path) -> None:
    """With dropout in the backbone alone, a vocabulary of 257 and one head for keys; each axis resumes the last."""
    compare_families(tmp_path, ("granite, dropout", "gemma3_text, one key"), RESUMED)


def test_a_mixture_of_experts_on_one_axis_after_the_other(tmp_path: Path) -> None:
    """Checkpoints of ranks with whole experts, with columns of each, with stages, and of one process."""
    models = ("glm4_moe, dropout",)
    others = (Mesh(tp=2), Mesh(pp=2), Mesh())
    resumed = Layout("ep, then tp, pp, one process", Mesh(dp=2, ep=2), others, stop=STEPS // 4, models=models)
    compare_families(tmp_path, models, resumed)


@pytest.mark.slow
def test_shared_experts_on_four_ranks(tmp_path: Path) -> None:
    models = ("mixtral, dropout", "qwen2_moe, dropout")
    meshes = (Mesh(dp=2, ep=2, cp=2), Mesh(dp=4, ep=2, zero=1), Mesh(dp=4, ep=2, adapters="replicate"))
    layouts = [Layout(f"ep {number}", mesh, models=models) for number, mesh in enumerate(meshes)]
    compare_families(tmp_path, models, *layouts, ranks=4)


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["", ", dropout"])
def test_more_families_by_transformers_own_plans(tmp_path: Path, variant: str) -> None:
    compare_families(tmp_path, tuple(f"{family}{variant}" for family in ALSO), *mesh_families.LAYOUTS)


@pytest.mark.slow
def test_noise_where_widths_do_not_divide(tmp_path: Path) -> None:
    models = ("gemma3_text, one key", "phi3, one key", "llama, odd width")
    compare_families(tmp_path, models, *mesh_families.LAYOUTS[:2], regularizer="ggpo")


@pytest.mark.slow
def test_four_ranks_where_widths_do_not_divide(tmp_path: Path) -> None:
    models = ("gemma3_text, one key", "llama, odd width", "phi3, dropout")
    both = Mesh(dp=2, tp=2)
    meshes = (both, Mesh(pp=2, tp=2), Mesh(cp=2, tp=2, sequence_parallel=True))
    layouts = [Layout(str(number), mesh, models=models) for number, mesh in enumerate(meshes)]
    resumed = Layout("tp 4, then dp 2 × tp 2", Mesh(tp=4), (both,), stop=STEPS // 2, models=models)
    compare_families(tmp_path, models, *layouts, resumed, ranks=4)
