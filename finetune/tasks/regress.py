"""`task.kind: regress`: a number per row."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from ..compute.protocols import TaskTraits
from ..errors import UserError
from ..evaluate.metrics import metric_names
from .base import BaseTask, SequenceLevelTask

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

    traits: ClassVar[TaskTraits] = replace(
        SequenceLevelTask.traits,
        has_targets=True,
        loss_unit="squared error per example, of targets as training sees them",
        refusals={"record": "record: task.kind: regress has no right and wrong to record; take the block out"},
    )

    def read_label(self, value: Any) -> float:
        from ..data.labels import read_number

        return read_number(value)

    def encode(self, rows: Iterable[Row], encoder: RowEncoder) -> tuple[list[Example], None]:
        """Encode as `Classify.encode`, with the row's number as the label."""
        from ..data.labels import Units

        encoded = encoder.wholes(rows)
        for row, _, _ in encoded:
            if not isinstance(row.values.get("label"), float):
                raise ValueError(f"{row.where}: read a regression's rows with label=task.read_label")
        targets = [row.values["label"] for row, _, _ in encoded]
        return encoder.labelled(encoded, targets, units=encoder.units or Units(0.0)), None

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

    def format_label(self, label: Tensor, *, label_names: Sequence[str] | None, units: Units | None) -> str:
        return f"{units.offset + units.scale * float(label) if units else float(label):.6g}"

    def placeholders(self, label_names: Sequence[str] | None) -> dict[str, Any]:
        return {"label": 0.0}

    def predict(self, evaluator: Evaluator, examples: Sequence[Example]) -> dict[str, list[Any]]:
        """Return `value`, in the targets' own units."""
        return {"value": evaluator.head_scores(examples)[1][:, 0].tolist()}

    @property
    def figure_names(self) -> tuple[str, ...]:
        return ("loss", *metric_names("numbers"))

    def evaluate(self, evaluator: Evaluator, examples: Sequence[Example]) -> dict[str, BootstrapInterval]:
        """Return `loss` (squared error per example in training units), and the metrics of
        `flatshift.finetune.evaluate.prediction_metrics.regression_metrics`. The model must predict in the targets' own
        units (`flatshift.finetune.data.labels.fold_units`)."""
        import numpy as np

        from ..evaluate.prediction_metrics import regression_metrics

        predicted = evaluator.head_scores(examples)[1][:, 0]
        units = examples[0].units
        assert units is not None
        true = np.array([example.labels for example in examples], dtype=np.float64)
        evaluator.columns["label"], evaluator.columns["predicted"] = true, predicted
        loss = evaluator.record_mean("loss", ((predicted - true) / units.scale) ** 2)
        options = {"figures": evaluator.figures, **evaluator.bootstrap}
        return {"loss": loss} | regression_metrics(true, predicted, mean=units.mean, **options)


def standardised_layer(task: BaseTask, backbone: str | Path) -> OutputLayer | None:
    """Return the layer of `backbone` into which standardisation is folded after training; None without standardisation.
    Reads only config.json and the headers of the backbone's files.

    Raises UserError: as `flatshift.finetune.models.meta.build_skeleton`; or no single fully trained linear output
    layer.
    """
    from ..adapters.settings import is_fully_trained
    from ..data.labels import OutputLayer
    from ..models.meta import build_skeleton

    if not task.standardise:
        return None
    model: Any = build_skeleton(backbone, task=task)
    layers = [
        OutputLayer(name, module.bias is not None)
        for name, module in model.named_modules()
        if getattr(module, "out_features", None) == 1 and is_fully_trained(name, model)
    ]
    if len(layers) != 1:
        raise UserError(
            f"task.standardise: backbone {str(backbone)!r} has no single linear layer that answers and is trained "
            "whole, so targets cannot be standardised; set task.standardise: false"
        )
    return layers[0]
