"""Features of rows: read, checked with their file:line, kept in columns, and handed to batches as they were."""

from __future__ import annotations

import numpy as np
import pytest

from flatshift.finetune.config import Projector
from flatshift.finetune.data.batches import TrainingDataLoader
from flatshift.finetune.data.columns import ColumnarExamples, ExampleWriter, open_examples
from flatshift.finetune.data.encoding import encode
from flatshift.finetune.data.eval_batching import EvalBatching
from flatshift.finetune.errors import UserError
from flatshift.finetune.tasks import Completion, LanguageModel
from tests.support.data_models import byte_tokenizer, row

TOKENIZER = byte_tokenizer()
TWO = Projector(features="clip", width=3, vectors=2)


def rows(count: int = 7) -> tuple[list, np.ndarray]:
    values = np.random.default_rng(0).standard_normal((count, 2, 3)).astype(np.float32)
    return [row(i, text="the cat " * (i % 3 + 1), label="good", clip=values[i].tolist()) for i in range(count)], values


def encoded(given, projector=TWO, **more):
    task = more.pop("task", Completion(pack=False))
    return encode(given, task=task, tokenizer=TOKENIZER, max_length=32, features=projector, **more)


@pytest.mark.parametrize("task", [Completion(pack=False), LanguageModel(pack=False)], ids=lambda task: task.kind)
def test_batches_have_each_rows_own_vectors(task, tmp_path):
    given, values = rows()
    examples = encoded(given, task=task).examples
    writer = ExampleWriter(["rows.jsonl"], tmp_path)
    writer.add(examples[:4])
    writer.add(examples[4:])
    for held in (ColumnarExamples.of(examples), writer.close(), open_examples(tmp_path, 7, ["rows.jsonl"])):
        assert list(held) == examples
        assert list(held[4:1:-1]) == examples[4:1:-1]
        for part, places in ((held, range(7)), (held[1::2], range(1, 7, 2))):
            for micro in EvalBatching(3, 0).batches(part, task):
                index = [list(places)[i] for (i,) in micro.rows]
                assert np.array_equal(micro.inputs["features"].numpy(), values[index])
    batches = TrainingDataLoader(examples, task=task, batch_size=4, seed=0, max_length=32, pad_id=0)
    for step in range(3):
        (micro,) = batches.at(step)
        assert micro.inputs["features"].dtype.is_floating_point and micro.inputs["features"].shape == (4, 2, 3)
        assert np.array_equal(micro.inputs["features"].numpy(), values[[i for (i,) in micro.rows]])


def test_one_vector_may_be_a_plain_list():
    one = Projector(features="clip", width=2)
    found = encoded([row(0, text="a", label="x", clip=[1, 2.5]), row(1, text="a", label="x", clip=[[3, 4]])], one)
    assert [list(map(list, example.features)) for example in found.examples] == [[[1.0, 2.5]], [[3.0, 4.0]]]


BAD = {
    "null": (None, "column 'clip' is null"),
    "text": ("0.1 0.2", "column 'clip' is a str, not a list of numbers"),
    "flat": ([1.0, 2.0, 3.0], r"column 'clip' is one list, not 2 vectors \(adapter\.projector\.vectors\)"),
    "many": ([[1.0, 2.0, 3.0]] * 3, r"column 'clip' holds 3 vectors, not 2 \(adapter\.projector\.vectors\)"),
    "short": ([[1.0, 2.0, 3.0], [1.0]], r"holds a vector of 1 numbers, not 3 \(adapter\.projector\.width\)"),
    "empty": ([], "is one list, not 2 vectors"),
    "mixed": ([[1.0, 2.0, 3.0], 4.0], "holds a float among lists"),
    "words": ([[1.0, 2.0, 3.0], [1.0, "2", 3.0]], "holds a str among its numbers"),
    "bool": ([[1.0, 2.0, 3.0], [1.0, True, 3.0]], "holds a bool among its numbers"),
    "hole": ([[1.0, 2.0, 3.0], [1.0, None, 3.0]], "holds null among its numbers"),
    "nan": ([[1.0, 2.0, 3.0], [1.0, float("nan"), 3.0]], "holds a number that is not finite in float32"),
    "large": ([[1.0, 2.0, 3.0], [1.0, 1e39, 3.0]], "holds a number that is not finite in float32"),
    "huge": ([[1.0, 2.0, 3.0], [1.0, 10**400, 3.0]], "holds a number that is not finite in float32"),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_vectors_are_refused_or_skipped_with_their_line(kind):
    value, message = BAD[kind]
    given, _ = rows(3)
    given[1] = row(1, text="the dog", label="good", clip=value)
    with pytest.raises(UserError, match=rf"^rows\.jsonl:2: .*{message}.*data\.bad_rows: skip"):
        encoded(given)
    found = encoded(given, bad_rows="skip")
    assert [example.where for example in found.examples] == ["rows.jsonl:1", "rows.jsonl:3"]
    assert len(found.skipped) == 1 and found.skipped[0].startswith("rows.jsonl:2: ")


def test_a_row_without_the_column_is_told_of_the_nearest():
    given, _ = rows(2)
    message = r"rows\.jsonl:1: no column 'clips'; did you mean 'clip'\? \(set adapter\.projector\.features\)"
    with pytest.raises(UserError, match=message):
        encoded(given, Projector(features="clips", width=3, vectors=2))
    by_block = Projector(features="clip", width=3, inject=(4, 5, 6))
    with pytest.raises(UserError, match=r"holds 2 vectors, not 3 \(adapter\.projector\.inject\)"):
        encoded(given, by_block)
