"""`task.kind: preference`: pairs of a chosen and a rejected answer, or single answers with a verdict."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from ..compute.protocols import TaskTraits
from ..config import check_bounds
from ..errors import UserError
from ..evaluate.metrics import metric_names
from .base import InputFormat, TemplateFormat, TemplateTask
from .chat import Chat, ChatFormat

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

    from ..compute.micro_batch import PreferenceTargets
    from ..data.example import Example, GenerationPrompt
    from ..data.preference import PreferenceEncoder
    from ..data.rows import Row
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
    """Assumed share of pairs with swapped answers (dpo: as cDPO, ericmitchell.ai/cdpo.pdf; simpo). Null: 0."""
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

    answer_setting: ClassVar[str] = "answer"
    traits: ClassVar[TaskTraits] = TaskTraits(
        causal=True,
        is_answer_level=True,
        rows_per_example=2,
        backbone="decoder",
        truncation_side="left",
        loss_unit="per pair of answers, of kto per answer",
        refusals={
            "warmup": "the recipe's `warmup` block moves towards the target's texts, and pairs of answers (task.kind: "
            "preference) have none; leave it out",
            "record": "record: task.kind: preference evaluates pairs of answers, of which no step is recorded; take "
            "the block out: dev figures are in metrics.jsonl",
            "--harness": "--harness: lm-eval would not ask a preference run as it was trained; `flatshift merge` it "
            "and give that to lm-eval, or evaluate it with `flatshift eval RUN_DIR --data FILE`",
        },
    )

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
        chat_settings = ("template", "template_arguments", "system", "date")
        if not self.chat and (used := [name for name in chat_settings if getattr(self, name) not in (None, "auto")]):
            raise ValueError(f"{used[0]} is of conversations; set chat: true, or leave it out")
        if self.chat and (self.prompt, self.answer) != ("{prompt}", "{answer}"):
            raise ValueError(
                "prompt and answer are templates of texts, and with chat: true a chat template writes both; set them "
                "to '{prompt}' and '{answer}'"
            )
        if self.chat:
            _ = self.as_chat  # raises for an invalid date or arguments

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
    def input_format(self) -> InputFormat:
        return _ChatPreferenceFormat(self) if self.chat else _PreferenceFormat(self)

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
    def name(self) -> str:
        return self.kind if self.loss == "dpo" else f"{self.kind} (loss: {self.loss})"

    @property
    def no_axes(self) -> Mapping[str, str]:
        return {
            "cp": "the loss is no sum over tokens, and a cp rank sees some of an answer's",
            "pp": "a pipeline passes rows on one by one, and its first pass would have to be without adapters",
        }

    @property
    def figure_names(self) -> tuple[str, ...]:
        return ("loss", *metric_names("preferences", *(["reference"] if self.has_reference else [])))

    def columns(self) -> tuple[str, ...]:
        others = () if self.chat else (name for name in self.templates()[1].columns if name != "answer")
        answers = () if self.is_unpaired else ("chosen", "rejected")  # kto takes either these or completion and label
        return tuple(dict.fromkeys((*self.input_format.columns(), *answers, *others)))

    def optional_columns(self) -> tuple[str, ...]:
        single = ("chosen", "rejected", "completion", "label") if self.is_unpaired else ()
        return (*single, "tools", "system") if self.chat else single

    def read_label(self, value: Any) -> Any:
        """Return for kto whether an answer is desirable, from true, false, 1, 0 or such a text."""
        if not self.is_unpaired:
            return super().read_label(value)
        verdict = str(value).strip().lower()
        if verdict not in (*_TRUE, *_FALSE):
            raise ValueError(f"is {value!r}, not true or false")
        return verdict in _TRUE

    def placeholders(self, label_names: Sequence[str] | None) -> dict[str, Any]:
        return {"label": True} if self.is_unpaired else {}

    def encoder(self, tokenizer: PreTrainedTokenizerBase, max_length: int, **options: Any) -> PreferenceEncoder:
        """Return an encoder of both answers after their prompt; an answer and the end token after it are target tokens
        (`flatshift.finetune.data.preference`).

        If too long, truncated as a completion or a chat; the prompt is cut to fit the longer answer.
        """
        from ..data.preference import PreferenceEncoder

        return PreferenceEncoder(self, tokenizer, max_length, **options)

    def rewards(self, log_probs: Tensor, targets: PreferenceTargets) -> Tensor:
        """Return the implicit reward of each row's answer (R,): β·(log p − log p of the base model), or β·log p
        without a reference; divided by its tokens if the loss is per token."""
        log_ratios = log_probs if targets.reference is None else log_probs - targets.reference
        per_token = self.per_token or self.loss in ("ipo", "simpo", "orpo")
        return self.scale * (log_ratios / targets.lengths if per_token else log_ratios)

    def answer_losses(self, log_probs: Tensor, targets: PreferenceTargets) -> Tensor:
        """Return the loss of each pair; kto: of each answer, λ·(1 − σ(±(reward − β·z0))) with z0 the drift of the
        optimizer step."""
        from torch.nn.functional import logsigmoid

        rewards = self.rewards(log_probs, targets)
        if self.loss == "kto":
            assert targets.drift is not None
            desirable, undesirable = (1.0 if w is None else w for w in (self.desirable_weight, self.undesirable_weight))
            weights = (targets.signs > 0) * desirable + (targets.signs < 0) * undesirable
            return weights * (1 - (targets.signs * (rewards - self.scale * targets.drift)).sigmoid())
        chosen, rejected = rewards.view(-1, 2).unbind(1)
        if self.loss == "ipo":
            # rewards include β, but IPO's loss is on plain log-ratios
            return ((chosen - rejected) / self.scale - 1 / (2 * self.scale)).square()
        if self.loss == "orpo":  # rewards are the mean log p per token
            log_odds = chosen - rejected - (_log1mexp(chosen) - _log1mexp(rejected))
            return -chosen - (0.1 if self.odds_weight is None else self.odds_weight) * logsigmoid(log_odds)
        margin = chosen - rejected
        if self.loss == "simpo":
            margin = margin - (self.scale / 2 if self.gamma is None else self.gamma)
        swapped = self.label_smoothing or 0.0
        return -(1 - swapped) * logsigmoid(margin) - swapped * logsigmoid(-margin)

    def evaluate(self, evaluator: Evaluator, examples: Sequence[Example]) -> dict[str, BootstrapInterval]:
        """Return `loss` per pair or answer, and the metrics of
        `flatshift.finetune.evaluate.preference.preference_metrics`."""
        from ..evaluate.preference import preference_metrics

        return preference_metrics(evaluator, examples)

    def predict(self, evaluator: Evaluator, examples: Sequence[Example]) -> dict[str, list[Any]]:
        """Return `chosen_reward, rejected_reward`, their `reward_margin`, and the answer that the model prefers as
        `preferred` (None at a tie); for single answers only `reward`."""
        from ..evaluate.preference import answer_scores

        rewards = answer_scores(evaluator, examples).rewards
        if rewards.shape[1] == 1:
            return {"reward": rewards[:, 0].tolist()}
        chosen, rejected = rewards.T
        margins = (chosen - rejected).tolist()
        return {
            "chosen_reward": chosen.tolist(),
            "rejected_reward": rejected.tolist(),
            "reward_margin": margins,
            "preferred": ["chosen" if m > 0 else "rejected" if m < 0 else None for m in margins],
        }


class _PreferenceFormat(TemplateFormat):
    def build_prompts(
        self, rows: Iterable[Row], tokenizer: PreTrainedTokenizerBase, *, bad_rows: str = "refuse"
    ) -> tuple[list[GenerationPrompt], list[str]]:
        rows = list(rows)
        turns = next((row for row in rows if isinstance(row.values.get("prompt"), list)), None)
        if turns is not None:
            raise UserError(f"{turns.where}: this run reads texts, and column 'prompt' holds turns; give one text")
        return super().build_prompts(rows, tokenizer, bad_rows=bad_rows)


class _ChatPreferenceFormat(ChatFormat):
    def __init__(self, task: Preference) -> None:
        super().__init__(task.as_chat)
        self.single_answers = task.is_unpaired

    def columns(self) -> tuple[str, ...]:
        return ("prompt",)

    def matches_saved(self, saved: PreTrainedTokenizerBase, row: Row, example: Example, max_length: int) -> bool:
        from ..data.preference import build_conversation, read_answers

        answers, _ = read_answers(row.values, single=self.single_answers)
        conversation = dataclasses.replace(row, values={"messages": build_conversation(row, *answers)})
        return super().matches_saved(saved, conversation, example, max_length)

    def build_prompts(
        self, rows: Iterable[Row], tokenizer: PreTrainedTokenizerBase, *, bad_rows: str = "refuse"
    ) -> tuple[list[GenerationPrompt], list[str]]:
        from ..data.rows import parse_turns

        conversations = []
        for row in rows:
            turns = parse_turns(row.values.get("prompt"), "user")
            conversations.append(dataclasses.replace(row, values={**row.values, "messages": turns}))
        return super().build_prompts(conversations, tokenizer, bad_rows=bad_rows)


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
