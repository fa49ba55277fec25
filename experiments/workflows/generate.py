"""Text generation with finished runs, from their directories alone: prompts in, answers out; and chat with several
adapters over one load of their backbone.

flatshift generate runs/first --prompt "The enzyme" --data more.jsonl --out answers.jsonl
flatshift chat runs/first runs/second
flatshift serve runs/first runs/second --port 8000
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flatshift.experiments.recipe.schema import Recipe
from flatshift.experiments.recipe.tree import Branch
from flatshift.experiments.run.console import Console
from flatshift.experiments.workflows.build import load_model
from flatshift.experiments.workflows.evaluation_target import AdapterSwitcher, EvaluationTarget
from flatshift.experiments.workflows.run_parts import check_generative, read_finished_recipe, to_single_process
from flatshift.finetune.atomic import atomic_file
from flatshift.finetune.compute.numerics import cpu_threads
from flatshift.finetune.data.encoding import get_end_token
from flatshift.finetune.data.eval_batching import EvalBatching
from flatshift.finetune.data.example import GenerationPrompt
from flatshift.finetune.data.formats import has_lone_surrogate
from flatshift.finetune.data.rows import Row, read_rows, require_rows
from flatshift.finetune.errors import UserError
from flatshift.finetune.evaluate.generation import Decoding, GeneratedAnswer, continue_prompts
from flatshift.finetune.lock import exclusive_lock
from flatshift.finetune.models.backbone import open_backbone


def generate_from_run(
    path: Path,
    *,
    prompts: Sequence[str] = (),
    data: Sequence[str] = (),
    raw: bool = False,
    decoding: dict[str, Any] | None = None,
    batch_size: int = 16,
    overrides: Sequence[Branch] = (),
    out: Path | None = None,
    quiet: bool = False,
) -> list[dict[str, Any]]:
    """Continue prompts with the adapter of a run, in one process whatever mesh it was trained on.

    prompts: texts for the run's own prompt template; for a chat run, the first turn of a user. data: files whose rows
    fill the template; for a chat run, conversations, whose last answer is left out if present. raw: pass `prompts` to
    the model without a template.
    decoding: fields of `flatshift.finetune.evaluate.generation.Decoding` that differ from its defaults; the run's
        `task.max_new_tokens` is the default where the task has one, and `task.num_beams` where nothing is drawn.
    overrides: another `train.device` than the run's; `data.columns` and `data.bad_rows` of the rows of `data`.
    out: JSONL file to write, whole or not at all.
    Returns a record for each prompt, texts first, then rows in order: `{id, prompt, text, tokens, ended}`; `text` is
    the exact generated text, `tokens` their number, `ended` True if the model closed its answer itself.
    Raises UserError if `path` is no finished run, its task generates no text, `out` exists or is in use, or a prompt is
    not valid Unicode, does not fit, or does not fill a template of several columns.
    """
    with nullcontext() if out is None else exclusive_lock(out):
        if out is not None and out.exists():
            raise UserError(f"--out: {out} exists; name another file or remove it")
        recipe = to_single_process(read_finished_recipe(path, overrides, other_rows=bool(data)))
        if recipe.adapter.projector is not None:
            raise UserError(
                f"{path}: its adapter reads features with every row (adapter.projector), and `flatshift generate` "
                "hands none in; evaluate it with `flatshift eval`"
            )
        check_generative(recipe.task)
        settings = _resolve_decoding(recipe, decoding or {})
        if batch_size < 1:
            raise UserError(f"--batch-size: {batch_size} is too small; give at least 1")
        for number, text in enumerate(prompts, start=1):
            if has_lone_surrogate(text):  # a lone surrogate: Python's stand-in for a byte that is not UTF-8
                raise UserError(f"--prompt {number} is not valid UTF-8; write it in that encoding")
        console = Console(quiet=quiet)
        questions = _build_questions(recipe, prompts, data, raw, console)
        records: list[dict[str, Any]] = [{"id": question.id, "prompt": question.text} for question in questions]
        with cpu_threads(recipe.train.threads), console.task("generating", len(records), "prompts") as bar:
            engine, _ = load_model(recipe, recipe.task, None, adapter=path / "adapter")
            answers = answer_questions(recipe, engine.model, questions, settings, batch_size=batch_size)
            for done, (index, text, answer) in enumerate(answers, start=1):
                records[index] |= {"text": text, "tokens": len(answer.ids), "ended": answer.ended}
                bar(done)
        if out is not None:
            with atomic_file(out) as temporary, temporary.open("w", encoding="utf-8") as stream:
                stream.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
        return records


def _resolve_decoding(recipe: Recipe, decoding: Mapping[str, Any]) -> Decoding:
    settings = {"max_new_tokens": recipe.task.max_new_tokens, **decoding}
    if not settings.get("temperature"):
        settings.setdefault("num_beams", recipe.task.num_beams or 1)
    try:
        return Decoding(**settings)
    except ValueError as error:
        raise UserError(f"generate: {error}") from None


def _build_questions(
    recipe: Recipe, prompts: Sequence[str], data: Sequence[str], raw: bool, console: Console
) -> list[GenerationPrompt]:
    task, tokenizer = recipe.task, open_backbone(recipe.backbone).tokenizer
    questions = task.input_format.build_text_prompts(prompts, tokenizer, raw=raw)
    if data:
        skipped: list[str] = []
        columns, bad_rows = recipe.data.columns, recipe.data.bad_rows
        read = read_rows(
            data, columns=columns, required=task.input_format.columns(), bad_rows=bad_rows, skipped=skipped
        )
        rows = require_rows(read, files=data, purpose="prompt", skipped=skipped)
        more, dropped = task.input_format.build_prompts(rows, tokenizer, bad_rows=bad_rows)
        if skipped := [*skipped, *dropped]:
            console.say(f"skipped {len(skipped):,} bad rows, first {skipped[0]}")
        questions += more
    if not questions:
        raise UserError("there is no prompt: give --prompt TEXT, --data FILE, or lines on standard input")
    return questions


def answer_questions(
    recipe: Recipe,
    model: Any,
    questions: Sequence[GenerationPrompt],
    decoding: Decoding,
    *,
    batch_size: int,
    on_token: Callable[[int], None] | None = None,
) -> Iterator[tuple[int, str, GeneratedAnswer]]:
    """Yield (index, text, answer) of each question, longest first; answers end at the tokenizer's end token and the
    questions' own. on_token: as in `flatshift.finetune.evaluate.generation.continue_prompts`."""
    backbone = open_backbone(recipe.backbone)
    tokenizer, device = backbone.tokenizer, next(model.parameters()).device
    ends = [get_end_token(tokenizer), *sorted({question.stop for question in questions if question.stop is not None})]
    answers = continue_prompts(
        model,
        [question.ids for question in questions],
        decoding,
        EvalBatching.of(tokenizer, recipe.train, batch_size=batch_size, device=device),
        end=[token for token in ends if token is not None],
        decoder_start=backbone.decoder_start if recipe.task.traits.encoder_decoder else None,
        on_token=on_token,
    )
    for index, answer in answers:
        yield index, str(tokenizer.decode(answer.ids, skip_special_tokens=True)), answer


def format_answers(records: Sequence[dict[str, Any]]) -> str:
    """Format the generated texts, below their prompts if there are several."""
    if len(records) == 1:
        return str(records[0]["text"])
    return "\n\n".join(f"{record['id']}: {record['prompt']}\n→ {record['text'].strip()}" for record in records)


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

    def __init__(self, paths: Sequence[Path], *, overrides: Sequence[Branch] = ()) -> None:
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
            if path.resolve() in [subject.run.resolve() for subject in self._subjects.values() if subject.run]:
                raise UserError(f"{path} is named twice; name each run once")
            self._subjects[name] = EvaluationTarget(name, recipe, path)
        self._models = AdapterSwitcher()
        self._lock = threading.Lock()
        self._loaded: tuple[str, Any] = "", None  # name and model

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
        messages: str | Sequence[Message],
        *,
        raw: bool = False,
        decoding: Mapping[str, Any] | None = None,
        on_text: Callable[[str], None] = lambda piece: None,
    ) -> Reply:
        """Return the answer of the run `name`.

        messages: the turns of a conversation, ending with the user's; a text is one such turn. Runs that were not
        trained on conversations read the last turn alone, in their template. raw: continue a text without a template.
        decoding: fields of `Decoding`; the run's `task.max_new_tokens` is the default.
        on_text: called with each piece of the answer as it is generated.
        Raises UserError for an unknown name, turns that cannot be answered, and a prompt that does not fit the
        backbone.
        """
        if name not in self._subjects:
            raise UserError(f"no run is called {name!r}; there are {', '.join(self.names)}")
        subject = self._subjects[name]
        recipe, task = subject.recipe, subject.recipe.task
        tokenizer = open_backbone(recipe.backbone).tokenizer
        try:
            settings = Decoding(**{"max_new_tokens": task.max_new_tokens, **(decoding or {})})
        except (ValueError, TypeError) as error:
            raise UserError(f"{error}") from None
        question = _build_question(task, messages, tokenizer, raw=raw)
        ends = {get_end_token(tokenizer), question.stop}
        tokens: list[int] = []
        printed, lead = "", "" if raw else question.lead

        def print_token(token: int) -> None:
            nonlocal printed
            if token in ends:
                return
            tokens.append(token)
            text = _strip_lead(lead, str(tokenizer.decode(tokens, skip_special_tokens=True)))
            if not text.endswith("\ufffd"):  # an incomplete character: wait for its other bytes
                on_text(text[len(printed) :])
                printed = text

        with self._lock, cpu_threads(recipe.train.threads):
            if self._loaded[0] != name:
                self._loaded = "", None
                self._loaded = name, self._models.load(subject, None)
            on_token = print_token if settings.num_beams == 1 else None
            model = self._loaded[1]
            ((_, text, answer),) = answer_questions(
                recipe, model, [question], settings, batch_size=1, on_token=on_token
            )
        text = _strip_lead(lead, text)
        if len(text) > len(printed):
            on_text(text[len(printed) :])
        return Reply(text, len(question.ids), len(answer.ids), answer.ended)


def _strip_lead(lead: str, text: str) -> str:
    """Remove from an answer the text that its template writes first, complete or in part."""
    return "" if lead.startswith(text) else text.removeprefix(lead)


def _build_question(task: Any, messages: str | Sequence[Message], tokenizer: Any, *, raw: bool) -> GenerationPrompt:
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    turns = [dict(message) for message in messages]
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
