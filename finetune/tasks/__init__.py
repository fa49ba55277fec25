"""What a run learns: one file for each `task.kind`, with its settings and all that is particular to it.

    task = Classify(labels=("no", "yes"))
    encode(rows, task=task, tokenizer=tokenizer, max_length=256)      # asks task.encode
    loss_sum(logits, labels, task=task)                               # asks task.example_losses
    evaluate(model, tokenizer, examples, task=task, config=Evaluate()) # asks task.judge

`Objective` says what can be asked of a task; nobody asks which kind it is. A new kind is a file here and its line in
`Task`, from which a recipe's `task.kind` is read. Imports nothing heavy.
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
"""Every kind by its tag."""


def refused_axes() -> Iterator[tuple[str, str, str]]:
    """Axes of a mesh that kinds do not train on: (axis, reason, the kinds in words)."""
    tasks = [task for kind in KINDS.values() for task in kind.variants()]
    for axis in ("tp", "pp", "cp"):
        for why in dict.fromkeys(task.no_axes[axis] for task in tasks if axis in task.no_axes):
            refused = [task for task in tasks if task.no_axes.get(axis) == why]
            whole = {task.kind for task in refused if task.name == task.kind}  # whatever else is set
            kinds = [task.name for task in refused if task.name == task.kind or task.kind not in whole]
            yield axis, why, " or ".join(kinds)
