"""`task.kind: regress`: a number per row."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from ..errors import UserError
from .base import SequenceLevelTask

if TYPE_CHECKING:
    from torch import Tensor

    from ..data.encoding import RowEncoder
    from ..data.example import Example
    from ..data.labels import OutputLayer, Units
    from ..data.rows import Row
    from ..evaluate.bootstrap import BootstrapInterval
    from ..evaluate.evaluator import Evaluator


@dataclass(frozen=True, kw_only=True)
class Regress(SequenceLevelTask):
    """Regression for `text` (or the pair `text`, `text2`) with a new head of one output: mean squared error."""

    kind: Literal["regress"] = "regress"
    standardise: bool = True
    """Standardise targets for training by the mean and standard deviation of the training rows (only scale them, by
    their root mean square, if the backbone's head has no bias). The saved and evaluated head predicts in your own
    units."""

    has_targets: ClassVar[bool] = True
    loss_unit: ClassVar[str] = "squared error per example, of targets as training sees them"
    refuses: ClassVar[dict[str, str]] = {
        "record": "record: task.kind: regress has no right and wrong to record; take the block out"
    }

    @property
    def own_units(self) -> bool:
        return self.standardise

    def read_label(self, value: Any) -> float:
        from ..data.labels import read_number

        return read_number(value)

    def units(self, targets: Sequence[float], backbone: str | Path) -> Units:
        from ..data.labels import fit_units

        return fit_units(targets, self.head_layer(backbone))

    def head_layer(self, backbone: str | Path) -> OutputLayer | None:
        """Return the layer of `backbone` into which standardisation is folded; reads only config.json and the headers
        of its files.

        Raises:
            UserError: as `flatshift.finetune.models.meta.build_skeleton`; or no single fully trained linear output
                layer.
        """
        from ..adapters.settings import is_fully_trained
        from ..data.labels import OutputLayer
        from ..models.meta import build_skeleton

        if not self.standardise:
            return None
        model: Any = build_skeleton(backbone, task=self)
        found = [
            OutputLayer(name, module.bias is not None)
            for name, module in model.named_modules()
            if getattr(module, "out_features", None) == 1 and is_fully_trained(name, model.new_parameters)
        ]
        if len(found) != 1:
            raise UserError(
                f"task.standardise: backbone {str(backbone)!r} has no single linear layer that answers and is trained "
                "whole, so targets cannot be standardised; set task.standardise: false"
            )
        return found[0]

    def with_noise(
        self, rows: Sequence[Row], *, rate: float, label_names: Sequence[str] | None, seed: int
    ) -> tuple[list[Row], list[str]]:
        """Replace the target by that of a row with a different one."""
        from ..data.noise import replace_answers

        return replace_answers(rows, columns=("label",), rate=rate, seed=seed)

    def encode(self, rows: Iterable[Row], to: RowEncoder) -> tuple[list[Example], None]:
        """Encode as `Classify.encode`, with the row's number as the label."""
        from ..data.labels import Units

        kept = to.wholes(rows)
        return to.labelled(kept, [_get_target(row) for row, _, _ in kept], units=to.units or Units(0.0)), None

    def head_settings(self, *, num_labels: int | None, label_names: Sequence[str] | None) -> dict[str, Any]:
        return {"num_labels": 1, "problem_type": "regression"}

    def example_losses(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the squared error of the single output with targets [B]."""
        return (logits.float()[:, 0] - labels).square()

    @property
    def squares(self) -> bool:
        return True

    def residuals(self, logits: Tensor, labels: Tensor) -> Tensor:
        return labels[:, None] - logits.float()

    def shown_label(self, label: Tensor, *, label_names: Sequence[str] | None, units: Units | None) -> str:
        seen = float(label)
        return f"{units.offset + units.scale * seen if units else seen:.6g}"

    def placeholders(self, label_names: Sequence[str] | None) -> dict[str, Any]:
        return {"label": 0.0}

    def predict(self, judge: Evaluator, examples: Sequence[Example]) -> dict[str, list[Any]]:
        """Return `value`, in the targets' own units."""
        return {"value": judge.head(examples)[1][:, 0].tolist()}

    @property
    def figure_names(self) -> tuple[str, ...]:
        from ..evaluate.metrics import metric_names

        return ("loss", *metric_names("numbers"))

    def judge(self, judge: Evaluator, examples: Sequence[Example]) -> dict[str, BootstrapInterval]:
        """Return `loss` (squared error per example in training units), and the metrics of
        `flatshift.finetune.evaluate.regression.regression_metrics`. The model must predict in the targets' own units
        (`flatshift.finetune.data.labels.fold_units`)."""
        import numpy as np

        from ..evaluate.regression import regression_metrics

        predicted = judge.head(examples)[1][:, 0]
        units = examples[0].units
        assert units is not None
        true = np.array([example.labels for example in examples], dtype=np.float64)
        judge.said["label"], judge.said["predicted"] = true, predicted
        loss = judge.mean("loss", ((predicted - true) / units.scale) ** 2)
        numbers = regression_metrics(true, predicted, mean=units.mean, figures=judge.figures, **judge.draw)
        return {"loss": loss} | numbers


def _get_target(row: Row) -> float:
    target = row.values.get("label")
    if not isinstance(target, float):
        raise ValueError(f"{row.where}: read a regression's rows with label=task.read_label")
    return target
