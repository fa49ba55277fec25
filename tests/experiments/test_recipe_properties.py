"""Properties of what reads a user's input, over inputs that Hypothesis makes: nothing is lost on the way through a
file, and what cannot be read is refused in one sentence."""

from __future__ import annotations

import dataclasses
import json
import string
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flatshift.experiments.recipe.build import build_settings
from flatshift.experiments.recipe.resolve import Resolved
from flatshift.experiments.recipe.schema import Recipe
from flatshift.experiments.recipe.tree import parse
from flatshift.experiments.studies.sweep.axes import count_points, generate_points, parse_grid
from flatshift.finetune.config import Adapter, Optimizer, Train
from flatshift.finetune.data.chat.conversation import read_conversation
from flatshift.finetune.data.chat.template import ChatTemplate, TemplateRenderError
from flatshift.finetune.data.config import Columns, Data, Files, Source, TrainFiles
from flatshift.finetune.data.rows import read_rows
from flatshift.finetune.errors import SENTENCE, UserError, format_error_message, shorten
from flatshift.finetune.tasks import Chat, Classify, Completion

shortly = settings(
    max_examples=60,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
SIGNS = [
    "\x85",
    "\u2028",
    "\u2029",
    "\x00",
    "\x1b",
    "\x7f",
    "\ufeff",
    "\xa0",
    "😀",
    "\\",
    '"',
    "'",
    "#",
    ":",
    "\n",
    "\r",
    "\t",
]
any_text = st.text(st.one_of(st.sampled_from(SIGNS), st.characters()), max_size=40)  # halves of pairs are among them
a_text = any_text.filter(lambda text: text.isascii() or not any("\ud800" <= sign <= "\udfff" for sign in text))
plain_text = a_text.map(lambda text: text.replace("\0", "0") or "0")  # an empty one is refused
numbers = st.floats(allow_nan=False, allow_infinity=False, min_value=1e-300, max_value=1e300)
scalars = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | any_text
values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(any_text, inner, max_size=4))


@st.composite
def recipes(draw: st.DrawFn) -> Recipe:
    """Recipes whose every text, key and number is another one."""
    sources = draw(st.dictionaries(a_text, st.builds(Source, files=st.tuples(plain_text)), min_size=1, max_size=3))
    files = draw(st.lists(plain_text, max_size=2))
    train = TrainFiles(sources=sources) if not files else TrainFiles(files=tuple(files))
    rate = draw(numbers)
    return Recipe(
        backbone=draw(plain_text),
        task=draw(
            st.builds(Classify, labels=st.lists(plain_text.filter(bool), unique=True, max_size=3).map(tuple))
            | st.builds(Completion, prompt=plain_text)
        ),
        data=Data(train=train, test=Files(files=(draw(plain_text),)), columns=Columns(text=draw(plain_text))),
        adapter=Adapter(
            targets=tuple(draw(st.lists(plain_text, max_size=3))),
            ranks=draw(st.none() | st.dictionaries(a_text, st.integers(1, 9), max_size=2)),
            start=draw(st.none() | plain_text),
        ),
        optimizer=Optimizer(lr=rate, clip=draw(st.sampled_from([None, 0.5, float("inf")]))),
        train=Train(device=draw(plain_text), seed=draw(st.integers(0, 2**63 - 1))),
    )


@shortly
@given(recipes(), any_text)
def test_a_recipe_survives_its_own_writing(recipe: Recipe, place: str) -> None:
    origins = {"backbone": place, "optimizer.lr": place, "data.train.sources": place}
    written = Resolved(recipe, "r", origins).to_yaml()
    written.encode("utf-8")  # a file can hold it
    assert build_settings(Recipe, parse(written, "again")) == recipe


@shortly
@given(any_text)
def test_a_file_name_of_any_bytes_survives_as_text(name: str) -> None:
    """Halves of pairs, which Python puts in place of bytes that are no UTF-8, are written too; reading refuses them."""
    recipe = Recipe(backbone=name)
    written = Resolved(recipe, "r", {}).to_yaml()
    tree = parse(written, "again")
    assert tree.children["backbone"].value == name
    if any("\ud800" <= sign <= "\udfff" for sign in name):
        with pytest.raises(UserError, match="not valid UTF-8"):
            build_settings(Recipe, tree)


@shortly
@given(st.text(max_size=200) | st.text(string.printable, max_size=200))
def test_any_text_is_a_recipe_or_refused_by_line(text: str) -> None:
    try:
        build_settings(Recipe, parse(text, "r.yaml"))
    except UserError as error:
        told = format_error_message(str(error))
        assert told.startswith("r.yaml:") and len(told) <= SENTENCE and "\n" not in told


@shortly
@given(st.dictionaries(st.sampled_from([f.name for f in dataclasses.fields(Recipe)]), values, max_size=4))
def test_any_values_are_a_recipe_or_refused_by_line(tree: dict) -> None:
    try:
        build_settings(Recipe, parse(json.dumps(tree), "r.yaml"))
    except UserError as error:
        assert str(error).startswith("r.yaml:")


@shortly
@given(st.lists(st.dictionaries(st.sampled_from(["text", "label", "id", "more"]), values, max_size=4), max_size=4))
def test_rows_of_any_values_are_read_whole_or_skipped(tmp_path: Path, records: list[dict]) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    skipped: list[str] = []
    try:
        rows = list(read_rows([str(file)], required=("text", "label"), bad_rows="skip", skipped=skipped))
    except UserError as error:  # an id that is there twice is no bad row of its own
        assert "already given" in str(error)
        return
    assert len(rows) + len(skipped) == len(records)
    for row in rows:
        assert json.dumps(row.record) == json.dumps(records[row.index])  # NaN is not itself
        assert row.values["text"] == records[row.index]["text"]


@shortly
@given(st.binary(max_size=300), st.sampled_from(["r.jsonl", "r.csv", "r.tsv", "r.parquet", "r.jsonl.gz"]))
def test_any_bytes_are_rows_or_refused(tmp_path: Path, data: bytes, name: str) -> None:
    file = tmp_path / name
    file.write_bytes(data)
    try:
        list(read_rows([str(file)], bad_rows="skip", skipped=[]))
    except UserError as error:
        assert str(error).startswith(str(file))


roles = st.sampled_from(["system", "developer", "user", "assistant", "tool", "human", "gpt", ""]) | any_text
turns = st.fixed_dictionaries({}, optional={"role": roles, "from": roles, "content": values, "tool_calls": values})


@shortly
@given(st.lists(turns | values, max_size=4), st.none() | plain_text)
def test_conversations_of_any_turns_are_read_or_refused(tmp_path: Path, messages: list, system: str | None) -> None:
    file = tmp_path / "chat.jsonl"
    file.write_text(json.dumps({"messages": messages}) + "\n", encoding="utf-8")
    for row in read_rows([str(file)], required=("messages",), bad_rows="skip", skipped=[]):
        try:
            read_conversation(row, system=system)
        except ValueError as error:
            assert str(error)


pieces = st.sampled_from([
    "{{", "}}", "{%", "%}", " for m in messages ", " endfor ", " if true ", " endif ", "m.content", "m", "+",
    "|length", "raise_exception('x')", "generation", " endgeneration ", "x", "{#", "#}", " set x = 1 ", "loop.index",
])  # fmt: skip


@shortly
@given(st.lists(pieces | plain_text, max_size=10).map("".join))
def test_any_template_text_writes_or_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "own.jinja"
    file.write_text(text, encoding="utf-8", newline="")
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    tokenizer = SimpleNamespace(special_tokens_map={}, get_chat_template=lambda given, tools: given)
    try:
        written = ChatTemplate(tokenizer, Chat(template=str(file))).render(messages, None)
    except (UserError, TemplateRenderError) as error:
        assert "template" in str(error) or str(error).startswith("task.date")
    else:
        assert isinstance(written, str)


axis_values = st.sampled_from(["1", "2", "3", "0.5", "a", "1..3", "1e-4..1e-2:log", "{kind: sam, rho: 1}", "", "1..1"])


@shortly
@given(
    st.lists(st.tuples(st.sampled_from(["a.b", "a.c", "d", ""]), st.lists(axis_values, max_size=3)), max_size=3),
    st.sampled_from(["grid", "paired", "random"]),
    st.none() | st.integers(-1, 9),
    st.integers(0, 2**63 - 1),
)
def test_a_grid_has_the_points_that_were_counted(grid: list, design: str, count: int | None, seed: int) -> None:
    try:
        axes = parse_grid([f"{key}={','.join(several)}" for key, several in grid])
        points = list(generate_points(axes, design, count=count, seed=seed))
    except UserError as error:
        assert "--" in str(error)
        return
    assert len(points) <= count_points(axes, design, count)
    assert len({repr(point) for point in points}) == len(points)
    assert all(point.keys() == axes.keys() for point in points)


@shortly
@given(st.text(max_size=900), st.integers(50, 300))
def test_a_sentence_is_one_line_of_so_many_characters(text: str, most: int) -> None:
    told = format_error_message(text, most)
    assert len(told) <= most and len(told.splitlines()) <= 1
    assert told == text or not text.isprintable() or "  " in text or text != text.strip() or len(text) > most
    assert len(shorten(text, most)) <= most
