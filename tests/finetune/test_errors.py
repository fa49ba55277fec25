"""Inputs that once hung, crashed or trained nothing: each is refused in one sentence that says where."""

from __future__ import annotations

import io
import json
import os
import time
from pathlib import Path

import numpy as np
import pytest

from flatshift.experiments.recipe import load_recipe
from flatshift.experiments.recipe.tree import parse
from flatshift.experiments.studies.sweep.axes import generate_points, parse_grid
from flatshift.finetune.adapters.saved import SavedAdapter
from flatshift.finetune.atomic import read_json_object
from flatshift.finetune.config import Adapter, Mesh, Optimizer
from flatshift.finetune.data import formats
from flatshift.finetune.data.files import describe_files, expand_files
from flatshift.finetune.data.rows import read_rows
from flatshift.finetune.errors import UserError
from flatshift.finetune.models.backbone import open_backbone
from flatshift.finetune.models.checkpoint import SINGLE, read_index
from flatshift.finetune.models.load import load_backbone
from flatshift.finetune.run_directory import read_metrics
from flatshift.finetune.tasks import LanguageModel
from flatshift.selection.errors import SelectionError
from flatshift.selection.features.matrix import load_features
from tests.support.finetune_models import save_backbone

GENEROUS_S = 10.0
"""CPU-seconds for what took minutes, and takes a fraction of one."""


def refused(text: str) -> str:
    with pytest.raises(UserError) as caught:
        from flatshift.experiments.recipe.build import build_settings
        from flatshift.experiments.recipe.schema import Recipe

        build_settings(Recipe, parse(text, "r.yaml"))
    return str(caught.value)


# --------------------------------------------------------------------------------------------------------- recipes


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("train:\n  steps: !!int abc", "r.yaml:2: 'abc' is no int"),
        ("train:\n  steps: !!bool 3", "r.yaml:2: '3' is no bool"),
        ("train: !!set {steps}", "r.yaml:1: the tag"),
        ("train:\n  steps: " + "9" * 400, "above 2^63 - 1"),
        ("train:\n  steps: " + "9" * 5000, "above 2^63 - 1"),
        ("train:\n  steps: 1e400", "train.steps must be a whole number, got inf"),
        ("optimizer:\n  lr: .inf", "optimizer.lr must be a finite number"),
        ("train: &t\n  steps: *t", "nested deeper than 32"),
        ("train: " + "[" * 100_000, "r.yaml:1: nested deeper than 32"),
        ("train:\n" + "- " * 100_000 + "a", "r.yaml:2: nested deeper than 32"),
        ('backbone: "\\U00110000"', "r.yaml:1: not valid YAML"),
        ('backbone: "\\ud800"', "r.yaml:1: backbone '\\ud800' is not valid UTF-8"),
        ("backbone: x\x07", "r.yaml:1: U+0007 cannot stand in YAML"),
        (f"{'k' * 900}: 1", "unknown key"),
        (f"train: {{{'k' * 500_000}: 1}}", "r.yaml:1"),
    ],
)
def test_yaml_that_hung_or_crashed(text: str, words: str) -> None:
    before = time.process_time()
    told = refused(text)
    assert words in told and len(told) < 400
    assert time.process_time() - before < GENEROUS_S


def test_a_billion_laughs_are_counted_and_not_written_out() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 20)]
    before = time.process_time()
    assert "more than 100,000 values" in refused("\n".join(lines))
    assert time.process_time() - before < GENEROUS_S


def test_a_file_of_megabytes_is_no_recipe(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text("# x\n" * 400_000)
    with pytest.raises(UserError, match="too many for a recipe"):
        load_recipe(str(tmp_path / "r.yaml"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("optimizer: {clip: 0}", "elsewhere 0 switches clipping off, here write null"),
        ("optimizer: {lr: 0}", "the adapter would stay as it begins"),
        ("optimizer: {eps: 0}", "0/0"),
        ("optimizer: {betas: [1, 1]}", "below 1"),
        ("optimizer: {betas: [0.9, 1]}", "below 1"),
        ("adapter: {alpha: 0}", "multiplied by 0"),
        ("adapter: {alphas: {q_proj: 0}}", "adapter.alphas.q_proj must be above 0"),
        ("adapter: {alphas: {q_proj: .inf}}", "adapter.alphas.q_proj must be above 0 and finite"),
        ("adapter: {layers: []}", "adapter.layers must hold numbers ≥ 0, got []; null: all blocks"),
        ("warmup: {lr: 0}", "leave the `warmup` block out"),
        ("train: {steps: 1000000000000}", "≤ 1000000000"),
        ("train: {max_length: 1000000000}", "≤ 16777216"),
        ("train: {threads: 1000000}", "between 1 and 4096"),
        ("eval: {bootstrap: 10000000000}", "1000000"),
        ("comparison: {seeds: 1000000000}", "between 2 and 10000"),
    ],
)
def test_settings_that_train_nothing_or_never_end(text: str, words: str) -> None:
    told = refused(text)
    assert told.startswith("r.yaml:1: ") and words in told


def test_what_0_and_infinity_may_still_mean() -> None:
    assert Optimizer(clip=None).clip is None and Optimizer(clip=float("inf")).clip == float("inf")
    assert Optimizer(weight_decay=0, warmup=0).weight_decay == 0 and Adapter(dropout=0).dropout == 0


# ------------------------------------------------------------------------------------------------------------ rows


def test_one_long_line_is_read_in_linear_time(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(formats, "_CHUNK", 64)
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "a" * 4_000_000}) + "\n" + '{"text": "b"}')
    before = time.process_time()
    assert [len(row.values["text"]) for row in read_rows([str(tmp_path / "a.jsonl")])] == [4_000_000, 1]
    assert time.process_time() - before < GENEROUS_S


@pytest.mark.parametrize("suffix", ["", ".gz", ".xz"])
@pytest.mark.parametrize(
    ("begin", "fix"), [(b"{", "cut the record"), (b"[", "an array of objects is read from a file named")]
)
def test_a_line_without_end_is_refused_where_it_begins(tmp_path: Path, monkeypatch, suffix, begin, fix) -> None:
    import gzip
    import lzma

    monkeypatch.setattr(formats, "LONGEST_LINE", 1 << 20)
    path = tmp_path / f"a.jsonl{suffix}"
    pack = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress}[suffix]
    path.write_bytes(pack(b'{"text": "a"}\n\n' + begin + b" " * (3 << 20)))
    with pytest.raises(UserError, match=rf"a\.jsonl{suffix}:3: a line of more than 1,048,576 bytes; .*{fix}"):
        list(read_rows([str(path)]))


def test_a_header_of_many_columns_is_read_in_linear_time(tmp_path: Path) -> None:
    names = [f"c{i}" for i in range(40_000)]
    (tmp_path / "a.csv").write_text(",".join(["text", *names]) + "\n" + "x" + ",1" * len(names) + "\n")
    before = time.process_time()
    (row,) = read_rows([str(tmp_path / "a.csv")])
    assert row.values["text"] == "x" and time.process_time() - before < GENEROUS_S
    (tmp_path / "a.csv").write_text(",".join([*names, "c7"]) + "\n")
    with pytest.raises(UserError, match=r"a\.csv:1: the header has the column 'c7' twice"):
        list(read_rows([str(tmp_path / "a.csv")]))


def parquet(path: Path, names: list[str], texts: list[bytes]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    unread = pa.Array.from_buffers(pa.string(), len(texts), pa.array(texts, pa.binary()).buffers())
    pq.write_table(pa.Table.from_arrays([unread] * len(names), names=names), path)


def test_parquet_that_is_no_utf_8_is_a_bad_row(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    parquet(path, ["text"], [b"one", b"\xff\xfe", b"three"])
    with pytest.raises(UserError, match=r"a\.parquet:2: not valid UTF-8"):
        list(read_rows([str(path)]))
    skipped: list[str] = []
    kept = [row.index for row in read_rows([str(path)], bad_rows="skip", skipped=skipped)]
    assert kept == [0, 2] and skipped == [f"{path}:2: not valid UTF-8"]


def test_parquet_with_a_column_twice_or_a_foreign_name(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    parquet(path, ["text", "text"], [b"one"])
    with pytest.raises(UserError, match="has the column 'text' twice"):
        list(read_rows([str(path)]))
    parquet(path, ["text", "naem"], [b"one"])
    path.write_bytes(path.read_bytes().replace(b"naem", b"na\xffm"))
    with pytest.raises(UserError, match=r"a\.parquet: not a valid Parquet file"):
        list(read_rows([str(path)]))
    assert describe_files([str(path)])[0]["rows"] is None, "a manifest says of it that nobody knows how many"


def test_pipes_links_and_other_encodings_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.jsonl")
    with pytest.raises(UserError, match="a pipe, socket or device"):
        expand_files([str(tmp_path / "a.jsonl")])
    with pytest.raises(UserError, match="a pipe, socket or device"):
        load_recipe(str(tmp_path / "a.jsonl"))
    (tmp_path / "gone.jsonl").symlink_to(tmp_path / "nowhere.jsonl")
    with pytest.raises(UserError, match="a link to a file that is not there"):
        expand_files([str(tmp_path / "gone.jsonl")])
    with pytest.raises(UserError, match="no name of a file"):
        expand_files([""])
    with pytest.raises(UserError, match="no user of this name"):
        expand_files(["~nonesuch-user/a.jsonl"])
    try:
        (tmp_path / "caf").mkdir()
        for place in (b"", b"/caf"):
            Path(os.fsdecode(os.fsencode(tmp_path) + place + b"/caf\xe9.jsonl")).write_bytes(b"{}\n")
    except OSError:  # a file system of text alone
        return
    for name in (tmp_path / "caf*.jsonl", tmp_path / "caf"):
        with pytest.raises(UserError, match=r"caf\\udce9\.jsonl': a file whose name is not valid UTF-8; rename it"):
            expand_files([str(name)])


# -------------------------------------------------------------------------------------------------------- features


def npy(header: bytes) -> bytes:
    padded = header + b" " * (-(len(header) + 11) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(padded).to_bytes(2, "little") + padded + bytes(96)


@pytest.mark.parametrize(
    "data",
    [
        b"hello",
        b"\x93NUMPY",
        npy(b"{'descr': '<f8', 'fortran_order': False, 'shape': (-3, 4), }"),
        npy(b"{'descr': '<f8', 'fortran_order': False, 'shape': (3, " + b"9" * 400 + b"), }"),
        npy(b"{'descr': '<f8', 'fortran_order': False, 'shape': (3, " + b"9" * 5000 + b"), }"),
        npy(b"{'descr': '<f8', 'fortran_order': False, 'shape': (3.0, 4), }"),
        npy(b"(" * 5000),
        npy(bytes(range(128, 250)) * 3),
        npy(b"\0" * 200),
        npy(b"open('/etc/passwd')"),
    ],
)
def test_damaged_features_are_named(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "x.npy").write_bytes(data)
    with pytest.raises(SelectionError, match=r"--pool-features: .*x\.npy is no") as caught:
        load_features(tmp_path / "x.npy", flag="--pool-features")
    assert len(str(caught.value).removeprefix(str(tmp_path))) < 300 and "unsafely" not in str(caught.value)


def test_features_in_a_pipe_are_refused_and_good_ones_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.npy")
    with pytest.raises(SelectionError, match="is no file"):
        load_features(tmp_path / "x.npy")
    sink = io.BytesIO()
    np.save(sink, np.eye(3))
    (tmp_path / "y.npy").write_bytes(sink.getvalue())
    assert load_features(tmp_path / "y.npy").shape == (3, 3)


# ------------------------------------------------------------------------------------------------- what a run keeps


@pytest.mark.parametrize("data", [b"", b"[]", b"3", b'{"a"', b"[" * 100_000, b"9" * 5000, b"\xff", b'{"other": 1}'])
def test_a_record_of_a_run_is_an_object_with_its_keys(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "done.json").write_bytes(data)
    with pytest.raises(UserError, match=r"done\.json.*; restore it"):
        read_json_object(tmp_path / "done.json", "target_steps")


@pytest.mark.parametrize(
    "step", ["Infinity", "1e400", "NaN", "-1", "1.5", '"3"', "null", "9" * 30, "9" * 400, "9" * 5000, "[1]"]
)
def test_a_step_of_metrics_is_a_whole_number(tmp_path: Path, step: str) -> None:
    from flatshift.experiments.results.run import read_metrics as read_back

    good = '{"stage": "s", "split": "train", "step": 1, "loss": 2.0}\n'
    (tmp_path / "m.jsonl").write_text(good + f'{{"stage": "s", "split": "train", "step": {step}}}\n' + good)
    with pytest.raises(UserError, match=r"m\.jsonl:2: not a JSON object with a stage and a whole step"):
        read_metrics(tmp_path / "m.jsonl")
    found = read_back(tmp_path / "m.jsonl")
    assert found.unreadable == 1 and found.series("s", "train", "loss") == [(1, 2.0)]


def test_settings_of_an_adapter_are_an_object(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("[]")
    with pytest.raises(UserError, match=r"--add: .*adapter_config\.json: not a JSON object"):
        SavedAdapter.find(str(tmp_path), context="--add")


# ------------------------------------------------------------------------------------------------------- backbones


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return save_backbone("llama", tmp_path / "backbone")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"auto_map": ["a"]}, r"auto_map \[\"a\"\], not an object"),
        ({"model_type": 3}, "model_type 3"),
        ({"hidden_size": "abc"}, r"config\.json does not fit its architecture: .*hidden_size"),
        ({"hidden_size": 33}, r"config\.json does not fit its architecture: .*hidden size"),
        ({"num_attention_heads": 0}, r"config\.json does not fit its architecture"),
        ({"num_hidden_layers": 10**9}, r"config\.json has num_hidden_layers 1000000000, not a whole number"),
        ({"vocab_size": -1}, r"config\.json has vocab_size -1"),
    ],
)
def test_a_bad_config_blames_no_tokenizer(llama: Path, changes: dict, words: str) -> None:
    config = json.loads((llama / "config.json").read_text())
    (llama / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(UserError, match=words) as caught:
        assert open_backbone(llama).tokenizer
    assert "its tokenizer" not in str(caught.value)


def test_a_config_of_other_sizes_than_the_weights_is_named(llama: Path) -> None:
    from flatshift.finetune.tasks import Classify

    config = json.loads((llama / "config.json").read_text())
    (llama / "config.json").write_text(json.dumps({**config, "hidden_size": 64}))
    with pytest.raises(UserError, match=r"config\.json makes .* and the weights have"):
        load_backbone(llama, task=Classify(), num_labels=2)
    with pytest.raises(UserError):
        load_backbone(llama, task=LanguageModel())


@pytest.mark.parametrize(
    "header",
    [
        b"[]",
        b"[" * 50_000,
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}}',
        b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [4, 0]}}',
        b'{"a": {"dtype": "F32", "shape": [1.0], "data_offsets": [0.0, 4.0]}}',
        b'{"a": {"dtype": "F32", "shape": [' + b"9" * 400 + b'], "data_offsets": [0, 4]}}',
    ],
)
def test_a_damaged_header_is_named(llama: Path, header: bytes) -> None:
    (llama / SINGLE).write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(UserError, match=r"model\.safetensors has a damaged header"):
        read_index(llama)


def test_weights_in_a_pipe_are_none(llama: Path) -> None:
    (llama / SINGLE).unlink()
    os.mkfifo(llama / SINGLE)
    with pytest.raises(UserError, match="no weights"):
        open_backbone(llama)


# ----------------------------------------------------------------------------------------------- plans without end


def test_a_range_that_is_used_up_is_refused() -> None:
    axes = parse_grid(["optimizer.lr=1..1.0000001"])
    with pytest.raises(UserError, match="--points 50: the axes gave only 1 different points"):
        list(generate_points(axes, "random", count=50, seed=0))
    with pytest.raises(UserError, match="goes beyond"):
        parse_grid(["optimizer.lr=1..1e400"])


def test_ranks_beyond_memory_are_refused_before_any_begins(monkeypatch) -> None:
    from flatshift.finetune.launch import spawn

    monkeypatch.setattr(spawn, "_start_ranks", lambda *arguments: pytest.fail("ranks were started"))
    with pytest.raises(UserError, match=r"mesh: 1,000,000 ranks"):
        spawn.spawn(["-c", "pass"], ranks=Mesh(tp=1_000_000).size)


def test_a_solve_says_how_far_it_is(monkeypatch) -> None:
    from flatshift.selection.transport import dense
    from flatshift.selection.transport.settings import ITERATIONS
    from flatshift.selection.transport.solver import sinkhorn_potentials

    monkeypatch.setattr(dense, "_REPORT_EVERY", 1)
    generator = np.random.default_rng(0)
    said: list[tuple[str, int, int]] = []
    sinkhorn_potentials(
        generator.normal(size=(60, 4)), generator.normal(size=(24, 4)), epsilon=1e-3,
        progress=lambda stage, done, total: said.append((stage, done, total)),
    )  # fmt: skip
    steps = [(done, total) for stage, done, total in said if stage == ITERATIONS]
    assert len(steps) > 10 and all(0 < done < total == 20_000 for done, total in steps)
    assert [done for done, _ in steps] == sorted(done for done, _ in steps)
