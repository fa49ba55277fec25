"""What a run learns: one file for each `task.kind`, with its settings and all that is particular to it.

    task = Classify(labels=("no", "yes"))
    encode(rows, task=task, tokenizer=tokenizer, max_length=256)      # asks task.encode
    loss_sum(logits, labels, task=task)                               # asks task.example_losses
    evaluate(model, tokenizer, examples, task=task, config=Evaluate()) # asks task.judge

`Objective` says what can be asked of a task; nobody asks which kind it is. A new kind is a file here and its line in
`Task`, from which a recipe's `task.kind` is read. Imports nothing heavy.
"""

from typing import get_args

from .chat import Chat as Chat
from .classify import Classify as Classify
from .completion import Completion as Completion
from .language_model import LanguageModel as LanguageModel
from .masked_lm import MaskedLM as MaskedLM
from .objective import Objective as Objective
from .regress import Regress as Regress
from .seq2seq import Seq2Seq as Seq2Seq

Task = LanguageModel | Completion | Chat | MaskedLM | Classify | Regress | Seq2Seq
KINDS: dict[str, type[Objective]] = {kind.kind: kind for kind in get_args(Task)}
"""Every kind by its tag."""
