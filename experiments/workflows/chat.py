"""Chat with generative runs: several adapters over one load of their backbone.

flatshift chat runs/first runs/second
flatshift serve runs/first runs/second --port 8000
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flatshift.experiments.recipe.tree import Branch
from flatshift.experiments.run.console import Console
from flatshift.experiments.workflows.evaluation_target import AdapterSwitcher, EvaluationTarget
from flatshift.experiments.workflows.generate import check_generative, read_finished_recipe, to_single_process
from flatshift.finetune.compute.numerics import cpu_threads
from flatshift.finetune.data.encoding import get_end_token
from flatshift.finetune.data.example import GenerationPrompt
from flatshift.finetune.data.formats import has_lone_surrogate
from flatshift.finetune.data.rows import Row
from flatshift.finetune.errors import UserError

Message = Mapping[str, str]
"""A message with `role` (system, user, assistant) and `content`."""


@dataclass(frozen=True)
class Reply:
    """Answer of a run."""

    text: str
    prompt_tokens: int
    tokens: int
    ended: bool
    """True if the model ended its answer itself; False if `max_new_tokens` did."""


class GenerativeRuns:
    """Finished generative runs, by name; only one answers at a time, from whatever thread."""

    def __init__(self, paths: Sequence[Path], *, overrides: Sequence[Branch] = (), quiet: bool = False) -> None:
        """overrides: another `train.device` than the runs'. Raises UserError for an empty list, a path that is no
        finished run, a run that generates no text, and one that reads features."""
        if not paths:
            raise UserError("name at least one RUN_DIR")
        self._subjects: dict[str, EvaluationTarget] = {}
        for path in paths:
            recipe = to_single_process(read_finished_recipe(path, overrides))
            check_generative(recipe.task)
            if recipe.adapter.projector is not None:
                raise UserError(f"{path}: its adapter reads features with every row, and nobody hands it any here")
            name = path.resolve().name
            name = name if name not in self._subjects else str(path)
            if path.resolve() in [one.run.resolve() for one in self._subjects.values() if one.run is not None]:
                raise UserError(f"{path} is named twice; name each run once")
            self._subjects[name] = EvaluationTarget(name, recipe, path)
        self._models = AdapterSwitcher(Console(quiet=quiet))
        self._lock = threading.Lock()
        self._at: str | None = None
        self._model: Any = None

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the runs, in the order given."""
        return tuple(self._subjects)

    def check_system(self) -> None:
        """Raise UserError unless every run was trained on conversations, which may contain a system turn."""
        for name, subject in self._subjects.items():
            if not subject.recipe.task.input_format.uses_chat_template:
                raise UserError(
                    f"--system: {name} was not trained on conversations and reads no system turn; leave it out"
                )

    def reply(
        self,
        name: str,
        asked: str | Sequence[Message],
        *,
        raw: bool = False,
        decoding: Mapping[str, Any] | None = None,
        on_text: Callable[[str], None] = lambda piece: None,
    ) -> Reply:
        """Return the answer of the run `name`.

        asked: the turns of a conversation, ending with the user's; a text is one such turn. Runs that were not trained
        on conversations read the last turn alone, in their template. raw: continue a text without a template.
        decoding: fields of `Decoding`; the run's `task.max_new_tokens` is the default.
        on_text: called with each piece of the answer as it is generated.
        Raises UserError for an unknown name, turns that cannot be answered, and a prompt that does not fit the
        backbone.
        """
        from flatshift.finetune.data.eval_batching import EvalBatching
        from flatshift.finetune.evaluate.generation import Decoding, continue_prompts
        from flatshift.finetune.models.backbone import open_backbone

        if name not in self._subjects:
            raise UserError(f"no run is called {name!r}; there are {', '.join(self.names)}")
        subject = self._subjects[name]
        recipe, task = subject.recipe, subject.recipe.task
        backbone = open_backbone(recipe.backbone)
        tokenizer = backbone.tokenizer
        try:
            how = Decoding(**{"max_new_tokens": task.max_new_tokens, **(decoding or {})})
        except (ValueError, TypeError) as error:
            raise UserError(f"{error}") from None
        question = _build_question(task, asked, tokenizer, raw=raw)
        ends = {get_end_token(tokenizer), question.stop} - {None}
        written: list[int] = []
        said, lead = "", "" if raw else question.lead

        def tell(token: int) -> None:
            nonlocal said
            if token in ends:
                return
            written.append(token)
            text = _strip_lead(lead, str(tokenizer.decode(written, skip_special_tokens=True)))
            if not text.endswith("\ufffd"):  # an incomplete character: wait for its other bytes
                on_text(text[len(said) :])
                said = text

        with self._lock, cpu_threads(recipe.train.threads):
            if self._at != name:
                self._at = None
                self._model = self._models.of(subject, None)
                self._at = name
            ((_, answer),) = continue_prompts(
                self._model,
                [question.ids],
                how,
                EvalBatching.of(tokenizer, recipe.train, batch_size=1, device=next(self._model.parameters()).device),
                end=sorted(end for end in ends if end is not None),
                decoder_start=backbone.decoder_start if task.traits.encoder_decoder else None,
                on_token=tell if how.num_beams == 1 else None,
            )
        text = _strip_lead(lead, str(tokenizer.decode(answer.ids, skip_special_tokens=True)))
        if len(text) > len(said):
            on_text(text[len(said) :])
        return Reply(text, len(question.ids), len(answer.ids), answer.ended)


def _strip_lead(lead: str, text: str) -> str:
    """Remove from an answer the text that its template writes first, complete or in part."""
    return "" if lead.startswith(text) else text.removeprefix(lead)


def _build_question(task: Any, asked: str | Sequence[Message], tokenizer: Any, *, raw: bool) -> GenerationPrompt:
    turns = [{"role": "user", "content": asked}] if isinstance(asked, str) else [dict(turn) for turn in asked]
    for turn in turns:
        if turn.get("role") not in ("system", "user", "assistant") or not isinstance(turn.get("content"), str):
            raise UserError("a message needs a role (system, user or assistant) and a text as its content")
        if has_lone_surrogate(turn["content"]):
            raise UserError("a message is not valid Unicode; write it in UTF-8")
    if not turns or turns[-1]["role"] != "user":
        raise UserError("the last message must be the user's: there is nothing to answer")
    if raw or not task.input_format.uses_chat_template:
        (question,) = task.input_format.build_text_prompts([turns[-1]["content"]], tokenizer, raw=raw)
    else:
        (question,), _ = task.input_format.build_prompts(
            [Row(dict.fromkeys(task.input_format.columns(), turns), "1", "the conversation")], tokenizer
        )
    return question
