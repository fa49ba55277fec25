"""Where answers begin and end: templates of every awkward kind, proven or refused, and the way to tokens."""

from __future__ import annotations

import copy
import json
from itertools import groupby

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from flatshift.finetune.data.chat.answers import AssistantSpans, RenderedConversation
from flatshift.finetune.data.chat.conversation import read_conversation
from flatshift.finetune.data.chat.template import ChatTemplate
from flatshift.finetune.data.chat.tokens import ConversationTokeniser
from flatshift.finetune.data.encoding import encode
from flatshift.finetune.errors import UserError
from flatshift.finetune.tasks import Chat
from tests.support.chat_models import CONVERSATIONS, DATE, chat_tokenizer, conversation
from tests.support.data_models import byte_tokenizer, row

TOKENIZER = byte_tokenizer()
MULTI = CONVERSATIONS["multi"]["messages"]
LOOP = "{% for m in messages %}"
END = "{% endfor %}"
ASKED = "{% if add_generation_prompt %}A:{% endif %}"


def shown(text, told=MULTI, *, turns="all", tokenizer=TOKENIZER, date=None):
    """Samples under a template, as text with what is supervised in [ ]; and the notes."""
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = text
    task = Chat(turns=turns, date=date)
    rows = [row(0, **(told if isinstance(told, dict) else {"messages": told}))]
    found = encode(rows, task=task, tokenizer=tokenizer, max_length=4096)
    samples = []
    for example in found.examples:
        out = ""
        for on, run in groupby(zip(example.input_ids, example.labels, strict=True), key=lambda pair: pair[1] != -100):
            text = tokenizer.decode([token for token, _ in run])
            out += f"[{text}]" if on else text
        samples.append(out)
    return samples, found.notes


def test_a_template_without_a_generation_prompt_has_its_header_left_out():
    """Vicuna's form asks for nothing: the header is found as what stands before the content."""
    vicuna = (
        LOOP + "{% if m.role == 'user' %}USER: {{ m.content }}{% else %} ASSISTANT: {{ m.content }}{{ eos_token }}"
        "{% endif %}" + END
    )
    samples, notes = shown(vicuna)
    assert samples == [
        "USER: Hi ASSISTANT: [Hello! How can I help?<eos>]USER: Name a colour. ASSISTANT: [Blue.<eos>]"
        "USER: Another. ASSISTANT: [Red.<eos>]"
    ]
    assert "3 answers do not follow the template's generation prompt" in notes[1]


LLAMA_2 = (
    "{% if messages[0].role == 'system' %}{% set first = '<<SYS>>\n' + messages[0].content + '\n<</SYS>>\n\n' %}"
    "{% set messages = messages[1:] %}{% else %}{% set first = '' %}{% endif %}"
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('alternate') }}"
    "{% endif %}{% if m.role == 'user' %}{{ bos_token + '[INST] ' + (first if loop.first else '') + m.content.strip() "
    "+ ' [/INST]' }}{% else %}{{ ' ' + m.content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)


def test_a_template_that_strips_and_begins_every_turn_anew():
    """Llama 2's form: content stripped, a space before the end, a beginning of sequence before every user turn."""
    samples, _ = shown(LLAMA_2, CONVERSATIONS["odd"]["messages"])
    (sample,) = samples
    assert sample.startswith("<bos>[INST] Two\n\nlines") and "<bos><bos>" not in sample
    assert "[/INST][ First line\n    indented" in sample
    assert "ends in spaces and a line end <eos>]<bos>[INST] [assistant] ok? [/INST][ user: ok 🙂 <eos>]" in sample
    samples, _ = shown(LLAMA_2, CONVERSATIONS["system"]["messages"])
    assert samples[0].startswith("<bos>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nWho wrote Faust? [/INST][ Goethe. <eos>]")


def test_a_template_that_moves_the_system_turn_makes_a_sample_of_each_turn():
    """Mistral's later forms put it before the last user turn, so earlier texts are no beginnings of later ones."""
    moved = (
        "{% set last = messages | selectattr('role', 'equalto', 'user') | list | length %}{% set ns = namespace(n=0) %}"
        + LOOP + "{% if m.role == 'user' %}{% set ns.n = ns.n + 1 %}U:{% if ns.n == last %}{{ messages[0].content }} "
        "{% endif %}{{ m.content }};{% elif m.role == 'assistant' %}A:{{ m.content }}{{ eos_token }}{% endif %}"
        + END + ASKED
    )  # fmt: skip
    samples, notes = shown(moved, CONVERSATIONS["system"]["messages"])
    assert samples == [
        "U:Who wrote Faust?;A:Goethe.<eos>U:Be brief. When?;A:[1808.<eos>]",
        "U:Be brief. Who wrote Faust?;A:[Goethe.<eos>]",
    ]
    assert notes[1].startswith("1 conversations came apart") and "2 samples in all" in notes[1]
    assert shown(moved, CONVERSATIONS["system"]["messages"], turns="last")[0] == samples[:1]


REFUSED = {
    "writes nothing after turn 2, so the model would never learn to stop": LOOP + "{{ m.content }}\n" + END,
    "leaves out the content of turn 2": LOOP + "{{ m.content if m.role == 'user' }};{{ eos_token }}" + END,
    "repeats the content of turn 2": LOOP + "{{ m.content }}{{ m.content }}{{ eos_token }}" + END + ASKED,
    "leaves out or rewrites a part of turn 2": LOOP + "{{ m.content[1:] }}{{ eos_token }}" + END,
    "writes turn 2 differently depending on how its text ends": (
        LOOP + "{{ m.content }}{{ '<eos>' if m.content[-1] == '?' else '<pad>' }}" + END
    ),
    "which part of '<eos><pad>' after turn 2 ends it is not certain": (
        LOOP + "{{ m.content }}{{ ('<eos><pad>' if loop.last else '<bos>') if m.role == 'assistant' }}" + END
    ),
    r"fails on it \(list object has no element 9\)": "{{ messages[9].content }}" + ASKED,
}


def test_a_tool_call_that_does_not_follow_the_generation_prompt_is_refused():
    text = LOOP + "{{ m.content }}{% for c in m.tool_calls %}{{ c.function }}{% endfor %}{{ eos_token }}" + END
    told = CONVERSATIONS["tools"]
    (sample,), _ = shown("{{ tools }}" + text, told)
    assert "Weather in Bonn?<eos>[{'name': 'weather'" in sample
    with pytest.raises(UserError, match="turn 2 is not written after the template's generation prompt"):
        shown("{{ tools }}" + text + ASKED, told)


@pytest.mark.parametrize("reason", list(REFUSED))
def test_what_cannot_be_proven_is_refused_in_a_sentence(reason):
    with pytest.raises(UserError, match=rf"^rows\.jsonl:1: [^\n]*{reason}[^\n]*$"):
        shown(REFUSED[reason])


def test_a_tool_turn_may_be_written_as_json_and_not_left_out():
    told = copy.deepcopy(CONVERSATIONS["tools"])
    told["messages"][2]["content"] = 'hail\n& "frost"'
    text = (
        "{{ tools }}" + LOOP + "{{ m.content if m.role != 'tool' else WRITTEN }}{{ m.tool_calls }}{{ eos_token }}" + END
    )
    (sample,), _ = shown(text.replace("WRITTEN", "m.content | tojson"), told)
    assert r"hail\n" in sample
    with pytest.raises(
        UserError, match=r"leaves out or rewrites turn 3 \(tool\); task.template: base ships and writes"
    ):
        shown(text.replace("WRITTEN", "''"), told)


def test_public_templates_that_lose_something_are_refused():
    def encoded(template, told):
        return encode([row(0, **told)], task=Chat(), tokenizer=chat_tokenizer(template), max_length=4096)

    with pytest.raises(UserError, match="writes nothing after turn 2"):
        encoded("glm4moe", conversation("multi", "glm4moe"))
    call = CONVERSATIONS["tools"]["messages"][1]
    told = copy.deepcopy(CONVERSATIONS["tools"])
    told["messages"][1]["content"] = ""
    with pytest.raises(UserError, match="leaves out the tool calls of turn 2"):
        encoded("phi3", told)
    thinking = [MULTI[0], {"role": "assistant", "content": "<think>\nhm\n</think>\n\nHello"}]
    with pytest.raises(UserError, match="leaves out or rewrites a part of turn 2"):
        encoded("deepseek_r1_distill", {"messages": thinking})
    assert len(encoded("qwen3", {"messages": thinking}).examples) == 1
    with pytest.raises(UserError, match="leaves out the tool 'weather'"):
        encoded("phi3", {**CONVERSATIONS["single"], "tools": CONVERSATIONS["tools"]["tools"]})
    asked = [{"role": "developer", "content": "Be brief."}, *MULTI[:2]]
    with pytest.raises(UserError, match=r"leaves out or rewrites turn 1 \(developer\)"):
        encoded("phi3", {"messages": asked})
    quoted = copy.deepcopy(call)
    quoted["tool_calls"][0]["function"]["arguments"] = json.dumps({"city": "Bonn"})
    told = {**CONVERSATIONS["tools"], "messages": [MULTI[0], quoted]}
    plain = {**told, "messages": [MULTI[0], call]}
    for template in ("qwen2_5", "qwen3"):
        assert encoded(template, told).examples == encoded(template, plain).examples
    note = encoded("qwen2_5", CONVERSATIONS["thoughts"]).notes[1]
    assert note == "2 turns have thoughts that the template leaves out"


@pytest.mark.parametrize("join", ["+", "~"])
def test_a_template_that_joins_arguments_to_text_gets_them_as_text(join):
    """`+` fails on an object (DeepSeek's form), `~` would write Python's form of one."""
    text = (
        LOOP + "{{ m.role }}: {{ m.content }}{% for c in m.tool_calls %}[{{ c.function.name + ' ' " + join
        + " c.function.arguments }}]{% endfor %}{{ eos_token }}" + END
        + "{% if add_generation_prompt %}assistant: {% endif %}"
    )  # fmt: skip
    for arguments in ({"city": "Köln"}, '{"city":"K\\u00f6ln"}'):
        call = {"role": "assistant", "tool_calls": [{"function": {"name": "weather", "arguments": arguments}}]}
        (sample,), _ = shown(text, [MULTI[0], call])
        assert sample == 'user: Hi<eos>assistant: [[weather {"city": "Köln"}]<eos>]'


def test_tags_that_do_not_hold_an_answer_are_refused():
    def tagged(said):
        return (
            LOOP + "{% if m.role == 'user' %}U:{{ m.content }}{% else %}A:" + said + "{% endif %}" + END
        )  # fmt: skip

    inside = "{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}"
    (sample,), _ = shown(tagged(inside))
    assert sample.count("[") == 3 and sample.endswith("A:[Red.<eos>]")
    assert shown(tagged(inside), turns="last")[0][0].count("[") == 1
    with pytest.raises(UserError, match="tags mark nothing of turn 2"):
        shown(tagged("{% if loop.index > 2 %}" + inside + "{% else %}{{ m.content }}{% endif %}"))
    with pytest.raises(UserError, match="leaves out or rewrites a part of turn 2"):
        shown(tagged("{{ m.content }}{% generation %}{{ eos_token }}{% endgeneration %}"))
    with pytest.raises(UserError, match="mark earlier turns differently once turn 4 is there"):
        shown(tagged(inside.replace("{{ eos", "{{ messages | length }}{{ eos")))


def test_the_date_is_what_the_task_says():
    text = (
        "\n{% macro day() %}{{ strftime_now('%d %b %Y') }} {{ strftime_now(\"%Y-%m-%d\") }}{% endmacro %}{{ day() }};"
        + LOOP + "{{ m.content }}{{ eos_token if m.role != 'user' }}" + END
    )  # fmt: skip
    samples, _ = shown(text, date=DATE)
    assert samples[0].startswith("\n21 Nov 2026 2026-11-21;Hi")
    with pytest.raises(UserError, match="writes today's date in a form that is not a literal"):
        shown("{% set f = '%Y' %}{{ strftime_now(f) }}", date=DATE)


# ------------------------------------------------------------------------------------------------- tokens


def merging_tokenizer():
    """Byte-level, with the merges ' a' and 'nn' over edges of answers: ": " + "a", and line ends in a row."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<pad>", "<eos>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator([": answer"] * 9 + ["\n\n"] * 9, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def test_an_edge_inside_a_token_is_tokenised_in_pieces():
    """So that generation continues from the very prompt that was trained."""
    tokenizer = merging_tokenizer()
    text = "user:\n\nassistant: answer<eos>\n\n"
    at = text.index("answer")
    assert len(tokenizer("assistant: answer")["input_ids"]) < len(tokenizer("assistant: ")["input_ids"]) + 6
    tokens = ConversationTokeniser(tokenizer)
    whole = tokenizer(text, add_special_tokens=False)["input_ids"]
    (inside,) = tokens.samples([RenderedConversation(text, ((at, at + len("answer<eos>")),), at)])
    assert inside.cut and inside.ids != whole
    assert inside.ids[: inside.last] == tokenizer(text[:at])["input_ids"]
    assert tokenizer.decode(inside.ids) == text
    on = [token for token, yes in zip(inside.ids, inside.supervised, strict=True) if yes]
    assert tokenizer.decode(on) == "answer<eos>" and sum(inside.sizes) == len(text) - len("<eos>")
    (clean,) = tokens.samples([RenderedConversation(text, ((at - len(": "), at + len("answer<eos>")),), at - 2)])
    assert not clean.cut and clean.ids == whole


def test_a_tokenizer_that_does_not_tell_places():
    """ByT5 is written in Python and has no offsets: places come from decoding ever longer beginnings."""
    tokenizer = ByT5Tokenizer()
    assert not tokenizer.is_fast
    template = (
        LOOP + "{{ m.role }}: {{ m.content }}{{ eos_token if m.role == 'assistant' }}" + END
        + "{% if add_generation_prompt %}assistant: {% endif %}"
    )  # fmt: skip
    told = [{"role": "user", "content": "größe 🙂"}, {"role": "assistant", "content": "naïve 🙂"}]
    tokenizer.chat_template = template
    answers = AssistantSpans(ChatTemplate(tokenizer, Chat()), ConversationTokeniser(tokenizer).token_spans)
    samples = answers.samples(read_conversation(row(messages=told)), last_only=False)
    (found,) = ConversationTokeniser(tokenizer).samples(samples)
    on = [token for token, yes in zip(found.ids, found.supervised, strict=True) if yes]
    assert tokenizer.decode(on) == "naïve 🙂</s>"
    assert sum(size for size, yes in zip(found.sizes, found.supervised, strict=True) if yes) == len("naïve 🙂".encode())


def test_two_beginnings_of_sequence_are_refused():
    with pytest.raises(UserError, match="writes '<bos>' twice at the beginning"):
        shown("{{ bos_token }}" + LLAMA_2)
