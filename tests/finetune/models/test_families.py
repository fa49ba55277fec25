"""The table of families."""

from flatshift.finetune.models.families import FAMILIES
from tests.support.tensor_models import KINDS


def test_every_family_with_a_plan_has_a_tiny_model_for_the_mesh_tests() -> None:
    tiny = {kind.split("-")[0] for kind in KINDS}
    missing = {name for name in FAMILIES if name.removesuffix("_text") not in tiny}
    assert not missing, f"add {missing} to KINDS in tests/support/tensor_models.py"
