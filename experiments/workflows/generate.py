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
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch

from flatshift.experiments.recipe.schema import Recipe
from flatshift.experiments.recipe.tree import Branch
from flatshift.experiments.run.console import Console
from flatshift.experiments.workflows.build import load_model
from flatshift.experiments.workflows.evaluation_target import AdapterSwitcher, EvaluationTarget
from flatshift.experiments.workflows.run_parts import check_generative, read_finished_recipe, to_single_process
from flatshift.finetune.atomic import atomic_file
from flatshift.finetune.compute.numerics import cpu_threads, evaluation_mode
from flatshift.finetune.data.encoding import decode_answer, get_end_token
from flatshift.finetune.data.eval_batching import EvalBatching
from flatshift.finetune.data.example import GenerationPrompt
from flatshift.finetune.data.formats import has_lone_surrogate
from flatshift.finetune.data.rows import Row, read_rows, require_rows
from flatshift.finetune.errors import UserError
from flatshift.finetune.evaluate.generation import Decoding, GeneratedAnswer, continue_prompts
from flatshift.finetune.lock import exclusive_lock
from flatshift.finetune.models.backbone import open_backbone
from flatshift.finetune.models.families import usable_positions
from flatshift.finetune.run_directory import check_new_file


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
        if out is not None:
            check_new_file(out)
        recipe = to_single_process(read_finished_recipe(path, overrides, other_rows=bool(data)))
        if recipe.adapter.projector is not None:
            raise UserError(
                f"{path}: its adapter reads features with every row (adapter.projector), and `flatshift generate` "
                "hands none in; evaluate it with `flatshift eval`"
            )
        check_generative(recipe.task)
        if raw and data:
            raise UserError("--raw is of --prompt, and rows of --data go through the template; leave one of them out")
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
        if "seed" in settings:
            raise UserError("seed is of draws, which a temperature makes; set temperature, or leave seed out")
        settings.setdefault("num_beams", recipe.task.num_beams or 1)
    return Decoding(**settings)


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
    numbers: Sequence[int] | None = None,
    on_token: Callable[[int, int], bool] | None = None,
) -> Iterator[tuple[int, str, GeneratedAnswer]]:
    """Yield (index, text, answer) of each question, longest first; answers end at the tokenizer's end token and the
    questions' own. numbers, on_token: as in `flatshift.finetune.evaluate.generation.continue_prompts`."""
    backbone = open_backbone(recipe.backbone)
    tokenizer, device = backbone.tokenizer, next(model.parameters()).device
    ends = [get_end_token(tokenizer), *sorted({question.stop for question in questions if question.stop is not None})]
    answers = continue_prompts(
        model, [question.ids for question in questions], decoding,
        EvalBatching.of(tokenizer, recipe.train, batch_size=batch_size, device=device),
        end=[token for token in ends if token is not None], numbers=numbers, on_token=on_token,
        decoder_start=backbone.decoder_start if recipe.task.traits.encoder_decoder else None,
        names=[question.where or question.id.replace("-", " ") for question in questions],
    )  # fmt: skip
    for index, answer in answers:
        yield index, decode_answer(tokenizer, answer.ids), answer


def format_answers(records: Sequence[dict[str, Any]]) -> str:
    """Format the generated texts, below their prompts if there are several."""
    if len(records) == 1:
        return str(records[0]["text"])
    return "\n\n".join(f"{record['id']}: {record['prompt']}\n→ {record['text'].strip()}" for record in records)


Message = Mapping[str, Any]
"""A message with `role` (system or developer, user, assistant) and `content`: a text, or a list of text parts."""
_CHARACTERS = 16
"""Maximum characters of a prompt for each position of the backbone. A token has about 4, so this refuses no prompt that
fits, and spares tokenising those that cannot."""


class UnknownRun(UserError):
    """A name that no run has."""


@dataclass(eq=False, kw_only=True)
class Question:
    """Prompt for one run, and its answer as far as it is generated."""

    name: str
    """Name of the run."""
    prompt: GenerationPrompt
    decoding: Decoding
    tokenizer: Any
    number: int = 0
    """Noise stream of a sampled answer."""
    stop: Sequence[str] = ()
    """Texts that end the answer and are left out of it."""
    on_text: Callable[[str], None] | None = None
    """Called with each piece of the answer as it is generated."""
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    ended: bool = False
    """True if the model or a stop text ended the answer; False if `max_new_tokens` did."""
    is_cancelled: bool = False
    """Set from another thread to stop the answer at its next token."""

    @property
    def batch_key(self) -> tuple[str, int | None, Decoding]:
        """Run, end token and settings, equal for questions that can be answered in one batch."""
        seed = self.decoding.seed if self.decoding.temperature else 0
        return self.name, self.prompt.stop, replace(self.decoding, max_new_tokens=1, seed=seed)

    @property
    def is_complete(self) -> bool:
        """True if no token may follow."""
        return self.ended or self.is_cancelled or len(self.tokens) >= self.decoding.max_new_tokens

    def add(self, token: int) -> bool:
        """Add a token to the answer unless it is complete; return True if it is now."""
        if not self.is_complete:
            if token in (get_end_token(self.tokenizer), self.prompt.stop):
                self.ended = True
            else:
                self.tokens.append(token)
                if self.stop or self.on_text is not None:
                    self.update_text()
        return self.is_complete

    def update_text(self, *, complete: bool = False) -> None:
        """Decode the tokens so far; unless the answer is complete, without an end that the next token may change."""
        text, lead = decode_answer(self.tokenizer, self.tokens), self.prompt.lead
        text = "" if lead.startswith(text) else text.removeprefix(lead)  # what the template writes first, in part too
        places = [place for stop in self.stop if (place := text.find(stop)) >= 0]
        if places:
            text, self.ended = text[: min(places)], True
        elif not complete:
            if text.endswith("\ufffd"):  # an incomplete character: wait for its other bytes
                return
            begun = (size for stop in self.stop for size in range(1, len(stop)) if text.endswith(stop[:size]))
            text = text[: len(text) - max(begun, default=0)]
        if self.on_text is not None and len(text) > len(self.text):
            self.on_text(text[len(self.text) :])
        self.text = text


@dataclass(frozen=True)
class TokenScore:
    """Log-probability of a token after those before it."""

    token: int
    logprob: float
    likeliest: tuple[tuple[int, float], ...]
    """The likeliest tokens at its place, with their log-probabilities."""


class GenerativeRuns:
    """Finished generative runs, by name; one batch is answered at a time, from whatever thread."""

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
            if path.resolve() in [subject.run.resolve() for subject in self._subjects.values() if subject.run]:
                raise UserError(f"{path} is named twice; name each run once")
            names = path.resolve().name, str(path), str(path.resolve())
            name = next(name for name in names if name not in self._subjects)
            self._subjects[name] = EvaluationTarget(name, recipe, path)
        self._models = AdapterSwitcher()
        self._lock, self._encoding = threading.Lock(), threading.Lock()
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

    def _recipe(self, name: str) -> Recipe:
        if name not in self._subjects:
            raise UnknownRun(f"no run is called {name[:200]!r}; there are {', '.join(self.names)}")
        return self._subjects[name].recipe

    def positions(self, name: str) -> int | None:
        """Return the positions of the run's backbone for a prompt and its answer; None if they are not limited."""
        recipe = self._recipe(name)
        limit = usable_positions(open_backbone(recipe.backbone).config)
        return None if limit is None else limit - (recipe.adapter.soft_tokens or 0)

    def ask(
        self,
        name: str,
        messages: str | Sequence[Message] | Sequence[int],
        *,
        raw: bool = False,
        decoding: Mapping[str, Any] | None = None,
        stop: Sequence[str] = (),
        on_text: Callable[[str], None] | None = None,
    ) -> Question:
        """Return a question to the run `name`, for `answer`.

        messages: the turns of a conversation, ending with the user's; a text is one such turn. Runs that were not
        trained on conversations read the last turn alone, in their template. raw: continue a text, or tokens, without a
        template.
        decoding: fields of `Decoding`, without beams; the run's `task.max_new_tokens` is the default.
        Raises UserError for an unknown name, turns that cannot be answered, and a prompt that does not fit the
        backbone.
        """
        recipe = self._recipe(name)
        task = recipe.task
        with self._encoding:
            tokenizer, positions = open_backbone(recipe.backbone).tokenizer, self.positions(name)
        settings = Decoding(**{"max_new_tokens": task.max_new_tokens, **(decoding or {})})
        if raw and not isinstance(messages, str):
            tokens = [token for token in messages if isinstance(token, int)]
            if odd := [token for token in tokens if not 0 <= token < len(tokenizer)]:
                raise UserError(f"the prompt has the token {odd[0]}; the tokenizer has 0 to {len(tokenizer) - 1:,}")
            with self._encoding:
                prompt = replace(_build_question(task, _read_turns(""), tokenizer, raw=True), ids=tokens)
        else:
            turns = _read_turns(messages)
            turns = turns if task.input_format.uses_chat_template else turns[-1:]
            length, limit = sum(len(turn["content"]) + 1 for turn in turns), _CHARACTERS * (positions or 1 << 16)
            if length > limit:
                raise UserError(
                    f"the prompt has {length:,} characters, more than {_CHARACTERS} for each of the backbone's "
                    f"{positions or 1 << 16:,} positions; shorten it"
                )
            with self._encoding:  # tokenizers change state while they encode
                prompt = _build_question(task, turns, tokenizer, raw=raw)
        if not prompt.ids:
            raise UserError("the prompt is empty and this tokenizer begins no text by itself; write something")
        apart = task.traits.encoder_decoder
        if positions is not None and _batch_length([prompt.ids], settings.max_new_tokens, apart=apart) > positions:
            raise UserError(
                f"the prompt's {len(prompt.ids):,} tokens and an answer of {settings.max_new_tokens:,} do not fit the "
                f"backbone's {positions:,} positions; shorten the prompt or ask for a shorter answer"
            )
        return Question(name=name, prompt=prompt, decoding=settings, tokenizer=tokenizer, stop=stop, on_text=on_text)

    def can_join(self, questions: Sequence[Question]) -> bool:
        """True if `answer` can take these questions in one batch: their keys are equal and its rows fit the backbone's
        positions."""
        first, count = questions[0], len({question.batch_key for question in questions})
        recipe, positions = self._recipe(first.name), self.positions(first.name)
        if count > 1 or recipe.adapter.soft_tokens is not None:
            return len(questions) == 1
        longest = max(question.decoding.max_new_tokens for question in questions)
        width = _batch_length([q.prompt.ids for q in questions], longest, apart=recipe.task.traits.encoder_decoder)
        return positions is None or width <= positions

    def answer(self, questions: Sequence[Question]) -> None:
        """Generate the answers of questions that `can_join`, in one batch."""
        first = questions[0]
        recipe = self._recipe(first.name)
        longest = max(question.decoding.max_new_tokens for question in questions)
        with self._lock, cpu_threads(recipe.train.threads):
            answers = answer_questions(
                recipe, self._load(first.name), [question.prompt for question in questions],
                replace(first.decoding, max_new_tokens=longest), batch_size=len(questions),
                numbers=[question.number for question in questions],
                on_token=lambda index, token: questions[index].add(token),
            )  # fmt: skip
            for _ in answers:
                pass
        for question in questions:
            question.update_text(complete=True)

    def score(self, name: str, tokens: Sequence[int], count: int) -> list[TokenScore]:
        """Return the score of each token but the first, with the `count` likeliest at its place. Raises UserError for
        an encoder-decoder, whose prompts are not scored."""
        recipe = self._recipe(name)
        if recipe.task.traits.encoder_decoder:
            raise UserError(f"{name} is an encoder-decoder, which gives no log-probabilities here; leave logprobs out")
        with self._lock, cpu_threads(recipe.train.threads), torch.no_grad():
            model = self._load(name)
            device = next(model.parameters()).device
            settings = EvalBatching.of(open_backbone(recipe.backbone).tokenizer, recipe.train, batch_size=1)
            ids = torch.tensor([list(tokens)], device=device)
            with evaluation_mode(model), replace(settings, device=device).precision():
                logits = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0, -len(tokens) : -1]
            scores: list[TokenScore] = []
            for rows, chosen in zip(logits.split(_SCORE_ROWS), ids[0, 1:].split(_SCORE_ROWS), strict=True):
                logprobs = rows.float().log_softmax(-1)
                own = logprobs.gather(1, chosen[:, None])[:, 0].tolist()
                best = logprobs.topk(min(count, logprobs.shape[1]))
                likeliest = zip(best.indices.tolist(), best.values.tolist(), strict=True)
                scores += [
                    TokenScore(token, logprob, tuple(zip(*pair, strict=True)))
                    for token, logprob, pair in zip(chosen.tolist(), own, likeliest, strict=True)
                ]
        return scores

    def _load(self, name: str) -> Any:
        if self._loaded[0] != name:
            self._loaded = "", None
            self._loaded = name, self._models.load(self._subjects[name], None)
        return self._loaded[1]


_SCORE_ROWS = 256
"""Positions whose log-probabilities are computed at a time."""


def _batch_length(prompts: Sequence[Sequence[int]], max_new_tokens: int, *, apart: bool) -> int:
    """Return the positions that a batch of prompts takes with its answers; apart: encoder and decoder have their
    own."""
    width = max(map(len, prompts))
    return max(width, 1 + max_new_tokens) if apart else width + max_new_tokens


def _read_turns(messages: str | Sequence[Any]) -> list[dict[str, str]]:
    """Return turns with a role and a text. Raises UserError for others, and if the last is not the user's."""
    given: Sequence[Any] = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
    turns = []
    for message in given:
        content = message.get("content")
        if isinstance(content, list):
            parts = [part for part in content if isinstance(part, dict) and part.get("type") == "text"]
            texts: list[Any] = [part.get("text") for part in parts]
            if len(texts) < len(content) or not all(isinstance(text, str) for text in texts):
                raise UserError('the parts of a message must be texts: {"type": "text", "text": …}')
            content = "".join(texts)
        role = "system" if message.get("role") == "developer" else message.get("role")
        if role not in ("system", "user", "assistant") or not isinstance(content, str):
            raise UserError("a message needs a role (system, developer, user or assistant) and a text as its content")
        if odd := sorted(key for key, value in message.items() if value and key not in ("role", "content")):
            raise UserError(f"a message has role and content; {odd[0]!r} is not read here, leave it out")
        if has_lone_surrogate(content):
            raise UserError("a message is not valid Unicode; write it in UTF-8")
        turns.append({"role": role, "content": content})
    if not turns or turns[-1]["role"] != "user":
        raise UserError("the last message must be the user's: there is nothing to answer")
    return turns


def _build_question(task: Any, turns: list[dict[str, str]], tokenizer: Any, *, raw: bool) -> GenerationPrompt:
    if raw or not task.input_format.uses_chat_template:
        (question,) = task.input_format.build_text_prompts([turns[-1]["content"]], tokenizer, raw=raw)
        return replace(question, lead="") if raw else question
    row = Row(dict.fromkeys(task.input_format.columns(), turns), "1", "the conversation")
    questions, problems = task.input_format.build_prompts([row], tokenizer, bad_rows="skip")
    if problems:
        raise UserError(problems[0])
    return cast(GenerationPrompt, questions[0])
