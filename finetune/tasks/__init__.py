"""One file per `task.kind`, with its settings and everything specific to it.

    task = Classify(labels=("no", "yes"))
    encode(rows, task=task, tokenizer=tokenizer, max_length=256)       # calls task.encode
    loss_sum(logits, labels, task=task)                                # calls task.example_losses
    evaluate(model, tokenizer, examples, task=task, config=Evaluate()) # calls task.evaluate

`BaseTask` is the interface; no caller branches on the kind. To add a kind, write a file here and add its class to
`Task`, the union from which a recipe's `task.kind` is parsed. Importing this package is cheap (no torch, no
transformers).
"""

from collections.abc import Iterator
from typing import get_args

from .base import BaseTask as BaseTask
from .chat import Chat as Chat
from .classify import Classify as Classify
from .completion import Completion as Completion
from .language_model import LanguageModel as LanguageModel
from .masked_lm import MaskedLM as MaskedLM
from .preference import Preference as Preference
from .regress import Regress as Regress
from .seq2seq import Seq2Seq as Seq2Seq

Task = LanguageModel | Completion | Chat | Preference | MaskedLM | Classify | Regress | Seq2Seq
KINDS: dict[str, type[BaseTask]] = {kind.kind: kind for kind in get_args(Task)}
"""Task classes by their `kind`."""


def list_unsupported_axes() -> Iterator[tuple[str, str, str]]:
    """Yield the mesh axes that some kinds do not train on: (axis, reason, names of the kinds joined by "or")."""
    tasks = [
        task for kind in KINDS.values() for task in ((kind(), kind(multi=True)) if kind is Classify else (kind(),))
    ]
    for axis in ("tp", "pp", "cp"):
        for reason in dict.fromkeys(task.no_axes[axis] for task in tasks if axis in task.no_axes):
            refused = [task for task in tasks if task.no_axes.get(axis) == reason]
            whole = {task.kind for task in refused if task.name == task.kind}  # refused with every setting
            kinds = [task.name for task in refused if task.name == task.kind or task.kind not in whole]
            yield axis, reason, " or ".join(kinds)
