"""Supervised tokens of public chat templates beside references marked by hand, and beside the usual ways to a mask.

    python -m benchmarks.masks

Templates, conversations and references: tests/data/chat_templates (README there). Three other ways get the same
conversations and tokenizers: transformers' own mask, which needs {% generation %} tags in the template; a search for
the generation prompt and the next end of turn, as collators for completions do it (the prompt given by hand, the end
too); and the differences between renderings of ever longer beginnings. A sample counts as right where it has the very
tokens of the reference and the same of them are supervised, by the rule of docs/supervised.md; a mask without a token
that is not refused counts as silent. The other ways are forgiven white space (the line end behind the end of turn).
They make one sample of a conversation, also where a template rewrites
its earlier turns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks._harness import Benchmark, cpu_seconds
from flatshift.finetune.data.encoding import IGNORE, encode
from flatshift.finetune.errors import UserError
from flatshift.finetune.tasks import Chat
from tests.support.chat_models import (
    CONVERSATIONS,
    DATE,
    REFERENCED,
    chat_tokenizer,
    conversation,
    reference_mask,
    references,
)
from tests.support.data_models import row

Mask = tuple[list[int], list[bool]]


@dataclass
class Score:
    """Of one template: samples whose supervised tokens are the reference's, empty masks, refusals."""

    right: int = 0
    silent: int = 0
    refused: int = 0
    samples: int = 0

    @property
    def share(self) -> float:
        return self.right / self.samples


def ours(tokenizer: Any, told: dict[str, Any]) -> list[Mask]:
    """Masks of our encoding, a sample each."""
    found = encode([row(0, **told)], task=Chat(date=DATE, empty_thoughts=True), tokenizer=tokenizer, max_length=8192)
    return [(example.input_ids, [label != IGNORE for label in _list(example.labels)]) for example in found.examples]


def tagged(tokenizer: Any, told: dict[str, Any]) -> list[Mask]:
    """transformers' `return_assistant_tokens_mask`."""
    out = tokenizer.apply_chat_template(
        told["messages"], tools=told.get("tools"), return_dict=True, return_assistant_tokens_mask=True
    )
    return [(out["input_ids"], [bool(on) for on in out["assistant_masks"]])]


def by_differences(tokenizer: Any, told: dict[str, Any]) -> list[Mask]:
    """Tokens that each assistant's turn adds to the rendering of what precedes it with the generation prompt."""
    messages, tools = told["messages"], told.get("tools")

    def rendered(count: int, prompt: bool = False) -> list[int]:
        return list(
            tokenizer.apply_chat_template(
                messages[:count], tools=tools, add_generation_prompt=prompt, return_dict=False
            )
        )

    ids = rendered(len(messages))
    mask = [False] * len(ids)
    for place, turn in enumerate(messages):
        if turn["role"] == "assistant":
            for at in range(len(rendered(place, True)), min(len(rendered(place + 1)), len(ids))):
                mask[at] = True
    return [(ids, mask)]


def by_search(tokenizer: Any, told: dict[str, Any]) -> list[Mask]:
    """All between the tokens of the generation prompt and the next end of turn, wherever they are."""
    messages, tools = told["messages"], told.get("tools")
    first = messages[: 1 + [turn["role"] for turn in messages].index("user")]
    plain = tokenizer.apply_chat_template(first, tools=tools, tokenize=False)
    asked = tokenizer.apply_chat_template(first, tools=tools, tokenize=False, add_generation_prompt=True)
    # Phi-3 closes a conversation that does not ask by another token than one that does.
    header = tokenizer(asked[len(_common(plain, asked)) :], add_special_tokens=False)["input_ids"]
    ids = list(tokenizer.apply_chat_template(messages, tools=tools, return_dict=False))
    ends = {tokenizer.eos_token_id, *(tokenizer.convert_tokens_to_ids(t) for t in ("<|end|>", "<turn|>", "<|call|>"))}
    mask, inside = [False] * len(ids), False
    for at, token in enumerate(ids):
        inside = inside or (bool(header) and ids[max(at - len(header), 0) : at] == header)
        mask[at] = inside
        inside = inside and token not in ends
    return [(ids, mask)]


def _common(one: str, other: str) -> str:
    count = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return one[:count]


def _list(labels: list[int] | int) -> list[int]:
    assert isinstance(labels, list)
    return labels


def score(template: str, way: Callable[[Any, dict[str, Any]], list[Mask]]) -> Score:
    """One way on all conversations of one template."""
    tokenizer, found = chat_tokenizer(template), Score()
    if way is not ours:  # gpt-oss writes today's date, and nobody but us fixes it
        tokenizer.chat_template = tokenizer.chat_template.replace('strftime_now("%Y-%m-%d")', f'"{DATE}"')
    for told, samples in references(template).items():
        if told == "end":
            continue
        wanted = [reference_mask(tokenizer, marked) for marked in samples]
        found.samples += len(wanted)
        try:
            masks = way(tokenizer, conversation(told, template))
        except UserError:
            found.refused += len(wanted)
            continue
        blank = None if way is ours else tokenizer
        found.right += sum(any(_same(mask, one, blank) for one in masks) for mask in wanted)
        found.silent += sum(not any(mask) for _, mask in masks)
    return found


def _same(wanted: Mask, found: Mask, blank: Any) -> bool:
    """Whether the same tokens are supervised; with a tokenizer for `blank`, white space aside."""
    if wanted[0] != found[0]:
        return False
    pairs = zip(*wanted, found[1], strict=True)
    return all(a == b or (blank is not None and not blank.decode([token]).strip()) for token, a, b in pairs)


def rows_a_second(template: str, copies: int) -> float:
    """Conversations that are encoded in a CPU-second."""
    tokenizer = chat_tokenizer(template)
    names = [told for told in references(template) if told != "end"]
    rows = [row(i, **conversation(names[i % len(names)], template)) for i in range(copies)]
    task = Chat(date=DATE, empty_thoughts=True)
    encode(rows[: len(names)], task=task, tokenizer=tokenizer, max_length=8192)
    return copies / cpu_seconds(lambda: encode(rows, task=task, tokenizer=tokenizer, max_length=8192))


def _total(scores: Sequence[Score], name: str) -> int:
    return sum(getattr(one, name) for one in scores)


def main() -> None:
    bench = Benchmark("masks", packages=("transformers", "tokenizers", "jinja2"))
    mine = {template: score(template, ours) for template in REFERENCED}
    for template, found in mine.items():
        what = f"{template}: {found.samples} samples whose supervised tokens are those marked by hand"
        bench.row(what, "share", ours=found.share, exactly=1.0)
    bench.row("public templates", "templates", ours=len(REFERENCED), minimum=10)
    what = f"empty masks that nobody refused, of {_total(list(mine.values()), 'samples')} samples"
    bench.row(what, "samples", ours=_total(list(mine.values()), "silent"), exactly=0)
    for name, way in (
        ("transformers' return_assistant_tokens_mask", tagged),
        ("a search for generation prompt and end of turn", by_search),
        ("differences between renderings of ever longer beginnings", by_differences),
    ):
        theirs = [score(template, way) for template in REFERENCED]
        samples = _total(theirs, "samples")
        bench.row(f"the same by {name}: right", "share", ours=_total(theirs, "right") / samples)
        bench.row(f"the same by {name}: empty in silence", "samples", ours=_total(theirs, "silent"))
    for template in ("qwen2_5", "qwen3"):
        what = f"{template}: encoding, {len(CONVERSATIONS)} short conversations over and over"
        bench.row(what, "rows/CPU-s", ours=rows_a_second(template, 1000))
    bench.finish()


if __name__ == "__main__":
    main()
