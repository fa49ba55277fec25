"""`task.kind: preference`: pairs of a chosen and a rejected answer, or single answers with a verdict."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from ..config import check_bounds
from ..errors import UserError
from .base import TemplateTask
from .chat import Chat

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

    from ..compute.micro_batch import PreferenceTargets
    from ..data.example import Example, GenerationPrompt
    from ..data.preference import PreferenceEncoder
    from ..data.rows import Row
    from ..data.template import Template
    from ..evaluate.bootstrap import BootstrapInterval
    from ..evaluate.evaluator import Evaluator

_BETA = {"dpo": 0.1, "ipo": 0.1, "kto": 0.1, "simpo": 2.0}
_OWN = {
    "beta": ("dpo", "ipo", "kto", "simpo"),
    "label_smoothing": ("dpo", "simpo"),
    "per_token": ("dpo",),
    "gamma": ("simpo",),
    "odds_weight": ("orpo",),
    "desirable_weight": ("kto",),
    "undesirable_weight": ("kto",),
}
"""Settings that only some losses have."""
_TRUE, _FALSE = ("true", "1", "1.0"), ("false", "0", "0.0")


@dataclass(frozen=True, kw_only=True)
class Preference(TemplateTask):
    """Preference training: make the chosen answer to a prompt likelier than the rejected one (`prompt, chosen,
    rejected`); kto also takes single answers."""

    kind: Literal["preference"] = "preference"
    loss: Literal["dpo", "ipo", "kto", "simpo", "orpo"] = "dpo"
    """`dpo` (2305.18290), `ipo` (2310.12036, per token) and `kto` (2402.01306) compare with the base model, run with
    the adapter off; `simpo` (2405.14734) and `orpo` (2403.07691) need no reference, which saves a forward pass."""
    beta: float | None = None
    """Reward per nat of log-likelihood (ipo: its τ; simpo: of the mean over an answer's tokens). Smaller values let
    the model move further from the base model. Null: 0.1; for simpo 2."""
    label_smoothing: float | None = None
    """Assumed share of pairs with swapped answers (dpo: cDPO, 2306.12929; simpo). Null: 0."""
    per_token: bool = False
    """dpo: divide each answer's log-ratio by its number of tokens. ipo, simpo and orpo always do, kto never."""
    gamma: float | None = None
    """simpo: margin by which the chosen answer's reward must exceed the rejected one's. Null: half of beta."""
    odds_weight: float | None = None
    """orpo: weight λ of the odds ratio, added to the chosen answer's nats per token. Null: 0.1."""
    desirable_weight: float | None = None
    """kto: weight of desirable answers. Null: 1."""
    undesirable_weight: float | None = None
    """kto: weight of undesirable answers. Null: 1."""
    prompt: str = "{prompt}"
    """Template of the prompt over the row's columns; its tokens are not trained on."""
    answer: str = "{answer}"
    """Template of an answer, placed after the prompt: `{answer}` stands for the value of `chosen`, `rejected` or
    `completion`. The end-of-sequence token follows."""
    chat: bool = False
    """Rows are conversations (lists of turns, or texts that are one turn each), rendered by a chat template instead
    of `prompt` and `answer`."""
    template: str = "auto"
    """chat: chat template, as for task.kind: chat; `auto`: the tokenizer's own, or `base` if it has none."""
    template_arguments: dict[str, Any] | None = None
    """chat: variables passed to the template, as for task.kind: chat."""
    system: str | None = None
    """chat: system turn for rows that have none."""
    date: str | None = None
    """chat: date (YYYY-MM-DD) given to templates that print today's date."""
    max_truncated: float | None = None
    """Maximum share of rows with an answer truncated at `train.max_length`; the run stops if there are more. Null:
    0.1."""

    by_answer: ClassVar[bool] = True
    rows_of_example: ClassVar[int] = 2
    loss_unit: ClassVar[str] = "per pair of answers, of kto per answer"
    causal: ClassVar[bool] = True
    backbone: ClassVar[Literal["decoder"]] = "decoder"
    truncates: ClassVar[Literal["left"]] = "left"
    refuses: ClassVar[Mapping[str, str]] = {
        "warmup": "the recipe's `warmup` block moves towards the target's texts, and pairs of answers (task.kind: "
        "preference) have none; warm up in a run of its own, merge it, and start from that backbone",
        "record": "record: task.kind: preference evaluates pairs of answers, of which no step is recorded; take the "
        "block out: dev figures are in metrics.jsonl",
        "--harness": "--harness: lm-eval would not ask a preference run as it was trained; `flatshift merge` it and "
        "give that to lm-eval, or evaluate it with `flatshift eval RUN_DIR --data FILE`",
    }

    def __post_init__(self) -> None:
        for name, losses in _OWN.items():
            default = type(self).__dataclass_fields__[name].default
            if getattr(self, name) != default and self.loss not in losses:
                hint = "; ORPO's weight is odds_weight" if name == "beta" else ""
                raise ValueError(f"{name} is of loss: {' or '.join(losses)}, and loss is {self.loss}{hint}")
        check_bounds(self, beta=(1e-6, 1e6), gamma=(0, None), odds_weight=(0, None), max_truncated=(0, 1))
        check_bounds(self, label_smoothing=(0, 0.499), desirable_weight=(0, None), undesirable_weight=(0, None))
        if "{answer}" not in self.answer:
            raise ValueError(f"answer needs the place {{answer}}: by {self.answer!r} both answers would be the same")
        own = {name: getattr(self, name) for name in ("template", "template_arguments", "system", "date")}
        if not self.chat and (named := [name for name, value in own.items() if value not in (None, "auto")]):
            raise ValueError(f"{named[0]} is of conversations; set chat: true, or leave it out")
        if self.chat and (self.prompt, self.answer) != ("{prompt}", "{answer}"):
            raise ValueError(
                "prompt and answer are templates of texts, and with chat: true a chat template writes both; set them "
                "to '{prompt}' and '{answer}'"
            )
        if self.chat:
            _ = self.as_chat  # raises for an invalid date or arguments

    # ------------------------------------------------------------------------------------------- properties of the kind

    @property
    def as_chat(self) -> Chat:
        """Chat task that encodes prompt and answer as a conversation with the answer as its last turn (chat)."""
        return Chat(
            turns="last",
            template=self.template,
            template_arguments=self.template_arguments,
            system=self.system,
            date=self.date,
            max_truncated=1.0,
            max_unsupervised=1.0,
        )

    @property
    def scale(self) -> float:
        """β, the reward per nat; 1 for orpo, which has no β."""
        return _BETA.get(self.loss, 1.0) if self.beta is None else self.beta

    @property
    def uses_chat_template(self) -> bool:
        return self.chat

    @property
    def is_unpaired(self) -> bool:
        return self.loss == "kto"

    @property
    def has_reference(self) -> bool:
        return self.loss in ("dpo", "ipo", "kto")

    @property
    def loss_denominator(self) -> str:
        return "answers" if self.is_unpaired else "pairs"

    @property
    def smoothing(self) -> float:
        return 0.0  # the base property smooths tokens; `label_smoothing` here applies to pairs

    def for_evaluation(self) -> Self:
        return self if self.label_smoothing is None else self.replace(label_smoothing=None)

    def without_limits(self) -> Self:
        return self.replace(max_truncated=1.0)

    @property
    def name(self) -> str:
        return self.kind if self.loss == "dpo" else f"{self.kind} (loss: {self.loss})"

    @classmethod
    def variants(cls) -> Sequence[Self]:
        return cls(), cls(loss="kto"), cls(loss="simpo"), cls(loss="orpo")

    @property
    def no_axes(self) -> Mapping[str, str]:
        return {
            "cp": "the loss is no sum over tokens, and a cp rank sees some of an answer's",
            "pp": "a pipeline passes rows on one by one, and its first pass would have to be without adapters",
        }

    @property
    def figure_names(self) -> tuple[str, ...]:
        from ..evaluate.metrics import metric_names

        return ("loss", *metric_names("preferences", *(["reference"] if self.has_reference else [])))

    # -------------------------------------------------------------------------------------------------------- columns

    def templates(self) -> tuple[Template, Template]:
        from ..data.template import Template

        return Template(self.prompt, "task.prompt"), Template(self.answer, "task.answer")

    def prompt_columns(self) -> tuple[str, ...]:
        return ("prompt",) if self.chat else super().prompt_columns()

    def columns(self) -> tuple[str, ...]:
        own = () if self.chat else (name for name in self.templates()[1].columns if name != "answer")
        answers = () if self.is_unpaired else ("chosen", "rejected")  # kto takes either these or completion and label
        return tuple(dict.fromkeys((*self.prompt_columns(), *answers, *own)))

    def asked_columns(self) -> tuple[str, ...]:
        return self.columns()

    def optional_columns(self) -> tuple[str, ...]:
        single = ("chosen", "rejected", "completion", "label") if self.is_unpaired else ()
        return (*single, "tools", "system") if self.chat else single

    def read_label(self, value: Any) -> Any:
        """Return for kto whether an answer is desirable, from true, false, 1, 0 or such a text."""
        if not self.is_unpaired:
            return super().read_label(value)
        said = str(value).strip().lower()
        if said not in (*_TRUE, *_FALSE):
            raise ValueError(f"is {value!r}, not true or false")
        return said in _TRUE

    def placeholders(self, label_names: Sequence[str] | None) -> dict[str, Any]:
        return {"label": True} if self.is_unpaired else {}

    def with_noise(
        self, rows: Sequence[Row], *, rate: float, label_names: Sequence[str] | None, seed: int
    ) -> tuple[list[Row], list[str]]:
        """Swap the chosen and the rejected answer."""
        from ..data.noise import flip_preferences
        from ..data.preference import swap_answers

        return flip_preferences(rows, exchange=swap_answers, rate=rate, seed=seed)

    # ------------------------------------------------------------------------------------------------------- encoding

    def encoder(self, tokenizer: PreTrainedTokenizerBase, max_length: int, **how: Any) -> PreferenceEncoder:
        """Return an encoder of both answers after their prompt; an answer and the end token after it are target tokens
        (`flatshift.finetune.data.preference`).

        If too long, truncated as a completion or a chat; the prompt is cut to fit the longer answer.
        """
        from ..data.preference import PreferenceEncoder

        return PreferenceEncoder(self, tokenizer, max_length, **how)

    def template_record(self) -> dict[str, str] | None:
        return self.as_chat.template_record() if self.chat else None

    def prepare_tokenizer(self, tokenizer: PreTrainedTokenizerBase) -> None:
        if self.chat:
            self.as_chat.prepare_tokenizer(tokenizer)
        else:
            super().prepare_tokenizer(tokenizer)

    def reads_same(self, saved: PreTrainedTokenizerBase, row: Row, example: Example, max_length: int) -> bool:
        from ..data.preference import build_conversation, read_answers

        if not self.chat:
            return super().reads_same(saved, row, example, max_length)
        answers, _ = read_answers(row.values, single=self.is_unpaired)
        talk = dataclasses.replace(row, values={"messages": build_conversation(row, *answers)})
        return self.as_chat.reads_same(saved, talk, example, max_length)

    # ------------------------------------------------------------------------------------------------------------ loss

    def rewards(self, log_probs: Tensor, sides: PreferenceTargets) -> Tensor:
        """Return the implicit reward of each row's answer (R,): β·(log p − log p of the base model), or β·log p
        without a reference; divided by its tokens if the loss is per token."""
        from_reference = log_probs if sides.reference is None else log_probs - sides.reference
        divided = self.per_token or self.loss in ("ipo", "simpo", "orpo")
        return self.scale * (from_reference / sides.lengths if divided else from_reference)

    def answer_losses(self, log_probs: Tensor, sides: PreferenceTargets) -> Tensor:
        """Return the loss of each pair; kto: of each answer, λ·(1 − σ(±(reward − β·z0))) with z0 the drift of the
        optimizer step."""
        from torch.nn.functional import logsigmoid

        rewards = self.rewards(log_probs, sides)
        if self.loss == "kto":
            assert sides.drift is not None
            up, down = (1.0 if w is None else w for w in (self.desirable_weight, self.undesirable_weight))
            weights = (sides.signs > 0) * up + (sides.signs < 0) * down
            return weights * (1 - (sides.signs * (rewards - self.scale * sides.drift)).sigmoid())
        chosen, rejected = rewards.view(-1, 2).unbind(1)
        if self.loss == "ipo":
            # rewards include β, but IPO's loss is on plain log-ratios
            return ((chosen - rejected) / self.scale - 1 / (2 * self.scale)).square()
        if self.loss == "orpo":  # rewards are the mean log p per token
            odds = chosen - rejected - (_log1mexp(chosen) - _log1mexp(rejected))
            return -chosen - (0.1 if self.odds_weight is None else self.odds_weight) * logsigmoid(odds)
        margin = chosen - rejected
        if self.loss == "simpo":
            margin = margin - (self.scale / 2 if self.gamma is None else self.gamma)
        wrong = self.label_smoothing or 0.0
        return -(1 - wrong) * logsigmoid(margin) - wrong * logsigmoid(-margin)

    # ------------------------------------------------------------------------------------------------------- evaluation

    def judge(self, judge: Evaluator, examples: Sequence[Example]) -> dict[str, BootstrapInterval]:
        """Return `loss` per pair or answer, and the metrics of
        `flatshift.finetune.evaluate.preference.preference_metrics`."""
        from ..evaluate.preference import preference_metrics

        return preference_metrics(judge, examples)

    def predict(self, judge: Evaluator, examples: Sequence[Example]) -> dict[str, list[Any]]:
        """Return `chosen_reward, rejected_reward`, their `reward_margin`, and the answer that the model prefers as
        `preferred`; for single answers only `reward`."""
        from ..evaluate.preference import answer_scores

        found = answer_scores(judge, examples)
        if not found.paired:
            return {"reward": found.rewards[:, 0].tolist()}
        chosen, rejected = found.rewards.T
        return {
            "chosen_reward": chosen.tolist(),
            "rejected_reward": rejected.tolist(),
            "reward_margin": (chosen - rejected).tolist(),
            "preferred": ["chosen" if ahead else "rejected" for ahead in chosen > rejected],
        }

    # ------------------------------------------------------------------------------------------------------- generation

    def ask_texts(
        self, texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, *, raw: bool = False
    ) -> list[GenerationPrompt]:
        if self.chat:
            return self.as_chat.ask_texts(texts, tokenizer, raw=raw)
        return super().ask_texts(texts, tokenizer, raw=raw)

    def ask(
        self, rows: Iterable[Row], tokenizer: PreTrainedTokenizerBase, *, bad_rows: str = "refuse"
    ) -> tuple[list[GenerationPrompt], list[str]]:
        if not self.chat:
            rows = list(rows)
            listed = next((row for row in rows if isinstance(row.values.get("prompt"), list)), None)
            if listed is not None:
                raise UserError(f"{listed.where}: this run reads texts, and column 'prompt' holds turns; give one text")
            return super().ask(rows, tokenizer, bad_rows=bad_rows)
        talks = []
        for row in rows:
            prompt = row.values.get("prompt")
            turns = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
            talks.append(dataclasses.replace(row, values={**row.values, "messages": turns}))
        return self.as_chat.ask(talks, tokenizer, bad_rows=bad_rows)


def _log1mexp(x: Tensor) -> Tensor:
    """Return log(1 − exp x) for x < 0, by the formula that is accurate at x (Mächler 2012); 0 is replaced by the
    largest negative float."""
    import torch

    x = x.clamp(max=-torch.finfo(x.dtype).tiny)
    small = x > -0.6931471805599453
    # torch.where also backpropagates through the branch not taken: keep its gradient finite.
    far = torch.where(small, torch.full_like(x, -1.0), x)
    near = torch.where(small, x, torch.full_like(x, -0.1))
    return torch.where(small, (-torch.expm1(near)).log(), torch.log1p(-far.exp()))
