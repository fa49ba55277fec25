"""`flatshift plan`: exact sizes of known models, what fits where, the terms of a step, and a sentence per mistake."""

from __future__ import annotations

import dataclasses
import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from flatshift.cli import run
from flatshift.experiments.recipe import from_override
from flatshift.experiments.workflows import mesh_plan
from flatshift.experiments.workflows.mesh_plan import plan_mesh
from flatshift.finetune.config import Adapter, Mesh, Optimizer, Train
from flatshift.finetune.errors import UserError
from flatshift.finetune.planner import calibration
from flatshift.finetune.planner.devices import Cluster, Devices
from flatshift.finetune.planner.footprint import predict_footprint
from flatshift.finetune.planner.layouts import price_layout, resolve_mesh
from flatshift.finetune.planner.rules import RuleSettings
from flatshift.finetune.planner.sizes import KNOWN, BackboneSizes, read_sizes
from flatshift.finetune.planner.throughput import DEVICES, RooflineConstants, StepLayout, predict_seconds
from flatshift.finetune.tasks import LanguageModel
from flatshift.regularizers import Plain


@pytest.fixture(autouse=True)
def nothing_measured_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whatever `--calibrate` has left on this machine."""
    monkeypatch.setenv("FLATSHIFT_CACHE", str(tmp_path / "cache"))


# Elements of the published weights (without rotary buffers), and of LoRA r = 16 on all linear layers of the blocks.
PUBLISHED = {
    "llama-2-7b": (6_738_415_616, 39_976_960),
    "llama-2-13b": (13_015_864_320, None),
    "llama-2-70b": (68_976_648_192, None),
    "llama-3.1-8b": (8_030_261_248, 41_943_040),
    "llama-3.1-70b": (70_553_706_496, 207_093_760),
    "llama-3.1-405b": (405_853_388_800, None),
    "qwen2.5-0.5b": (494_032_768, None),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_sizes_of_published_models_are_exact(name: str) -> None:
    sizes = read_sizes(name, Adapter(rank=16))
    elements, adapter = PUBLISHED[name]
    assert sizes.elements == elements
    assert adapter is None or sizes.adapter == adapter


@pytest.mark.parametrize(
    ("targets", "rank", "elements"),
    [(("q_proj", "v_proj"), 32, 9_175_040), (("gate_proj", "up_proj", "down_proj"), 10, 9_461_760)],
)
def test_adapters_of_some_layers(targets: tuple[str, ...], rank: int, elements: int) -> None:
    assert read_sizes("llama-3.2-3b", Adapter(rank=rank, targets=targets)).adapter == elements


def test_a_bare_config_is_enough_and_says_what_its_weights_would(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(dict(KNOWN["llama-3.2-3b"])), encoding="utf-8")
    known = read_sizes("llama-3.2-3b", Adapter())
    assert read_sizes(tmp_path, Adapter()) == read_sizes(tmp_path / "config.json", Adapter()) == known
    from_weights = read_sizes("flatshift-5m", Adapter())
    assert isinstance(from_weights, BackboneSizes) and from_weights.elements > 5e6


@pytest.mark.parametrize(
    ("names", "head"),
    [
        ({"dim": 96, "n_heads": 4, "hidden_dim": 320}, 24),  # DistilBERT
        ({"d_model": 96, "encoder_attention_heads": 4, "encoder_ffn_dim": 320}, 24),  # BART, Marian, Pegasus
        ({"d_model": 96, "attention_heads": 4, "ffn_dim": 320}, 24),  # XGLM
        ({"d_model": 96, "num_heads": 4, "d_ff": 320, "d_kv": 64}, 64),  # T5, whose heads may be wider than d_model
    ],
)
def test_other_names_of_the_same_sizes(names: dict[str, int], head: int) -> None:
    sizes = BackboneSizes.of({"model_type": "any", **names}, {"layers.0.q.weight": (96, 96)}, Adapter())
    assert (sizes.hidden, sizes.heads, sizes.feed_forward, sizes.head) == (96, 4, 320, head)


def test_the_warm_up_divides_among_the_planned_ranks_too(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "warmup", "--gpus", "4xH100-80", "--warmup.batch_size", "6"]
    assert run([*words, "--json"]) == 0
    layouts = json.loads(capsys.readouterr().out)["layouts"]
    assert {each["mesh"].get("replicate", 1) * each["mesh"].get("dp", 1) for each in layouts} == {1, 2}


@pytest.mark.parametrize(("tied", "elements"), [(True, 222_903_552), (False, 247_577_856)])
def test_an_output_layer_is_counted_if_config_json_says_it_is_not_tied(
    tied: bool, elements: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Flan-T5-base is not tied, whatever T5's configuration makes of that."""
    config = {**KNOWN["flan-t5-base"], "tie_word_embeddings": tied}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert run(["plan", "seq2seq", "--model", str(tmp_path), "--gpus", "1xH100-80", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["frozen"] == elements


def test_what_recomputed_blocks_begin_with_is_split_with_the_sequence() -> None:
    """70 B, tp 8, 8k tokens: 1.25 GiB of block inputs and one block of 0.35 GiB, not 10.4 GiB."""
    sizes = read_sizes("llama-3.1-70b", Adapter(rank=16))
    train = Train(precision="bf16", checkpointing="full", max_length=8192, batch_size=1)
    whole, split = (
        predict_footprint(
            sizes, mesh=Mesh(tp=8, sequence_parallel=on), adapter=Adapter(rank=16), train=train
        ).activations
        for on in (False, True)
    )
    inputs = 80 * 8192 * 8192 * 2
    assert split < inputs / 8 + 1.5 * 2**30 and whole > inputs
    # norms in float32 and bf16; query, key, value and output of 64 + 8 heads; four tensors of 28,672 between the layers
    block = 8192 * (2 * (4 + 2) * 8192 + 2 * 2 * (64 + 8) * 128 + 4 * 2 * 28_672) / 8
    assert split == pytest.approx(inputs / 8 + block, rel=0.01)


def test_one_device_holds_what_it_should() -> None:
    small = plan_mesh("language-model", model="llama-3.1-8b", gpus="1xA100-80")
    assert small["fits"] and small["layouts"][0]["mesh"] == {}
    large = plan_mesh("language-model", model="llama-3.1-70b", gpus="1xA100-80")
    assert not large["fits"] and large["hours"] is None and large["layouts"][0]["short_gib"] > 60
    assert large["layouts"][0]["bytes"]["weights"] == pytest.approx(2 * 70_553_706_496, rel=1e-3)


def test_many_devices_and_the_lines_to_paste() -> None:
    flags = {"max_length": "4096", "batch_size": "256"}
    from flatshift.experiments.recipe import from_override

    overrides = [from_override(f"train.{key}", value) for key, value in flags.items()]
    found = plan_mesh("language-model", overrides, model="llama-3.1-70b", gpus="256xH100-80", price=2.0, tokens=1e9)
    times = [layout["update_s"] for layout in found["layouts"] if layout["fits"]]
    assert found["fits"] and times == sorted(times) and len(found["layouts"]) > 20
    best = found["layouts"][found["best"]]
    assert best["update_s"] <= 1.02 * times[0] and best["batch_size"] * best["accumulate"] == 256
    ranks = 1
    for width in best["mesh"].values():
        ranks *= width
    assert ranks == 256 and f"batch_size: {best['batch_size']}" in found["recipe"]
    assert found["cost"] == pytest.approx(found["hours"] * 256 * 2.0, rel=0.01)
    assert 0.1 < best["mfu"] < 0.7 and sum(best["seconds"].values()) == pytest.approx(best["update_s"], rel=0.01)


def test_a_cpu_is_one_process_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `mesh.auto` and `train.precision: auto` have it, and with narrow weights where wide ones do not fit."""
    seconds = []
    for cores in (7, 1):
        monkeypatch.setattr(mesh_plan, "detect_devices", lambda cores=cores: Devices("cpu", cores, 16 << 30))
        (layout,) = plan_mesh("classify", gpus="here", tokens=1e4)["layouts"]
        assert layout["mesh"] == {}
        seconds.append(layout["seconds"]["products"])
    assert seconds[1] == pytest.approx(7 * seconds[0], rel=0.01)
    axes = [from_override("mesh.dp", "2")]
    (layout,) = plan_mesh("classify", axes, gpus="here", tokens=1e4)["layouts"]
    assert layout["mesh"] == {"dp": 2}
    wide, narrow = (plan_mesh("qwen3-1.7b-chat-laptop", gpus=f"CPU@{memory}", tokens=1e4) for memory in (12, 7))
    assert wide["layouts"][0]["bytes"]["weights"] == 4 * wide["frozen"] and wide["hours"] > 0
    assert narrow["layouts"][0]["bytes"]["weights"] == 2 * narrow["frozen"] and narrow["fits"]
    assert "bf16 (train.backbone_precision)" in " ".join(narrow["notes"])


def test_packed_weights_are_gathered_packed() -> None:
    sizes, cluster = read_sizes("llama-3.1-8b", Adapter()), Cluster.parse("2xL4", link=0.1)
    wide, packed = (
        price_layout(
            RuleSettings(Mesh(dp=2), Train(precision="bf16", quantization=kind), Adapter(), LanguageModel()),
            sizes,
            cluster,
        ).time.gathers
        for kind in (None, "nf4")
    )
    assert packed < wide / 3


def test_offloaded_shards_are_in_host_memory(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--model", "llama-3.1-70b", "--gpus", "2xH100-80", "--mesh.dp", "2", "--train.batch_size", "2"]
    assert run([*words, "--train.max_length", "1024", "--mesh.offload", "true"]) == 0
    assert "GiB of weights and adapter in host memory" in capsys.readouterr().out
    for more, offload in (("65536", "true"), ("1024", "false")):
        assert run([*words, "--train.max_length", more, "--mesh.offload", offload]) == 1
        assert ("nf4" in capsys.readouterr().out) == (offload == "false")
    sizes, train = read_sizes("llama-3.1-8b", Adapter()), Train(precision="bf16", batch_size=8)
    held, moved = (
        predict_footprint(sizes, mesh=Mesh(dp=8, offload=on), adapter=Adapter(), train=train) for on in (False, True)
    )
    assert moved.adapter == 0 and moved.weights == moved.gathered // 8 < held.weights / 5


def test_what_was_priced_is_what_the_recipe_gets(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--model", "llama-3.2-3b", "--gpus", "4xH100-80", "--mesh.pp", "2", "--mesh.dp", "2"]
    words += ["--mesh.schedule", "interleaved", "--mesh.virtual", "2", "--mesh.zero", "1", "--mesh.stall", "90"]
    assert run([*words, "--mesh.microbatches", "2", "--train.batch_size", "8", "--json"]) == 0
    first = json.loads(capsys.readouterr().out)["recipe"].splitlines()[0]
    assert first == "mesh: {dp: 2, pp: 2, zero: 1, schedule: interleaved, virtual: 2, microbatches: 2, stall: 90.0}"


def test_two_ways_to_say_what_is_recomputed_may_not_contradict_each_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["plan", "chat", "--model", "llama-3.2-1b", "--gpus", "1xH100-80", "--checkpointing", "none", "--json"]
    assert run([*words, "--train.checkpointing", "full"]) == 2
    assert "--checkpointing none contradicts --train.checkpointing full; keep one" in capsys.readouterr().err
    assert run([*words, "--train.checkpointing", "none"]) == 0
    (tmp_path / "own.yaml").write_text("extends: chat\ntrain: {checkpointing: full}\n", encoding="utf-8")
    words[1] = str(tmp_path / "own.yaml")
    assert run(words) == 0, "a flag over a file"
    capsys.readouterr()
    words[words.index("none")] = "any"
    assert run(words) == 0
    assert {layout["checkpointing"] for layout in json.loads(capsys.readouterr().out)["layouts"]} == {"none"}


def test_no_plan_splits_tokens_or_blocks_that_training_does_not() -> None:
    short = [from_override("train.max_length", "64")]
    found = plan_mesh("seq2seq", short, model="flan-t5-base", gpus="2xH100-80")
    assert "tp 2" in {layout["name"] for layout in found["layouts"]} and not any(
        "sequence" in layout["name"] for layout in found["layouts"]
    )
    loop = [*short, from_override("mesh.schedule", "zbv")]
    found = plan_mesh("language-model", loop, gpus="6xH100-80")  # six blocks, two stages a rank
    assert {layout["mesh"]["pp"] for layout in found["layouts"]} <= {2, 3}


def _work(**changed: object) -> StepLayout:
    plain = StepLayout(
        layers=32, hidden=4096, heads=32, products=12 * 4096**2, head=32000 * 4096, sequence=2048, rows=1, micro=8
    )
    return dataclasses.replace(plain, **changed)  # type: ignore[arg-type]


def test_the_terms_of_a_step() -> None:
    device = DEVICES["A100-80"]
    plain = predict_seconds(_work(), device, network=25e9)
    assert plain.tensor == plain.gathers == plain.bubble == plain.pipeline == plain.gradients == 0
    frozen, whole = (predict_seconds(_work(whole=on), device, network=25e9).products for on in (False, True))
    assert whole / frozen == pytest.approx(1.47, abs=0.03), "no weight gradients: two passes of three, attention apart"
    again = predict_seconds(_work(recompute="full"), device, network=25e9).products
    assert again / plain.products == pytest.approx(1.5, abs=0.03)
    staged = predict_seconds(_work(pp=4, micro=8), device, network=25e9)
    staged_twice = predict_seconds(_work(pp=4, micro=8, virtual=2), device, network=25e9)
    assert staged.bubble == pytest.approx(2 * staged_twice.bubble), "(p − 1)/(v·m)"
    hidden = predict_seconds(_work(gathered=1e6), device, network=25e9)
    waits = predict_seconds(_work(gathered=1e11, gathered_inside=False), device, network=25e9)
    assert hidden.gathers < 0.01 * hidden.total and waits.gathers > 0.8 * waits.total


def test_clusters_are_read() -> None:
    cluster = Cluster.parse("64xH100-80")
    assert (cluster.count, cluster.node, cluster.name) == (64, 8, "H100-80")
    assert Cluster.parse("8xl4@22").device.memory == 22e9
    assert Cluster.parse("A100").count == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--gpus", "8xH10"], "H100-80"),
        (["--gpus", "0xT4"], "give 1 to 1,000,000 devices"),
        (["--gpus", "10xT4", "--node", "4"], "--node 4"),
        (["--model", "nowhere-7b"], "nowhere-7b"),
        (["--price", "-1"], "above 0"),
        (["--gpus", "7xT4"], "no mesh of 7 devices"),
        (["--gpus", "8xT4", "--optimizer.kind", "adamw-8bit"], "paged-adamw-8bit or gauss-newton needs one rank"),
        (["--gpus", "8xT4", "--adapter.init", "pissa"], "adapter.init other than default needs one rank"),
        (["--gpus", "8xT4", "--mesh.dp", "2", "--regularizer.kind", "sam"], "regularizer.kind: sam does not go with s"),
        (["--gpus", "7xT4", "--regularizer.kind", "sam"], "no mesh of 7 devices"),
        (["--adapter.layers", "99"], "adapter.layers: there is no block 99; this backbone has 6, from 0 to 5"),
        (["--adapter.layers", "[5, 6]"], "adapter.layers: there is no block 6; this"),
        (["--mesh.tp", "3"], "nearest that does: 2"),
        (
            ["--gpus", "4xT4", "--mesh.pp", "4", "--mesh.schedule", "interleaved"],
            "mesh.pp: 4 × 2 stages are more than the 6 blocks of this backbone; take at most 3",
        ),
        (
            ["--model", "flan-t5-base", "--gpus", "2xT4", "--mesh.tp", "2", "--mesh.sequence_parallel", "true"],
            "mesh.sequence_parallel: the tokens of model type 't5' cannot be split",
        ),
        (["--gpus", "1xT4", "--train.precision", "bf16"], "T4 has no bf16 instructions; take auto or fp16"),
        (["--gpus", "CPU@12", "--train.precision", "fp16"], "train.precision: fp16 does not go with"),
        (["--gpus", "2xCPU@12", "--mesh.dp", "2", "--mesh.offload", "true"], "a CUDA device"),
        (["--model", "bert-base-uncased"], "bert-base-uncased is an encoder (bert)"),
        (["--model", "flan-t5-small"], "transformers has no causal language modelling class"),
        (["--model", "flan-t5-base", "--adapter.layers", "[1, 15]"], "no block 15; this backbone has 12, from 0 to 11"),
        (["--gpus", "2xT4", "--mesh.dp", "2", "--mesh.ep", "2"], "cannot share the 0 experts of a block of llama"),
        (
            ["--model", "qwen2.5-0.5b", "--gpus", "7xT4", "--mesh.tp", "7", "--train.quantization", "nf4"],
            "mesh.tp: 7 ranks would cut blocks of 64 values",
        ),
    ],
)
def test_mistakes(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "language-model", "--tokens", "1e6", *words]) == 2  # without counting rows
    error = capsys.readouterr().err.strip()
    assert said in error and len(error.splitlines()) == 1 and len(error) <= 340


def test_exit_codes_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "language-model", "--gpus", "1xT4", "--json", "--out", str(tmp_path / "plan.json")]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads((tmp_path / "plan.json").read_text(encoding="utf-8")) and printed["fits"]
    assert run(["plan", "language-model", "--model", "llama-3.1-405b", "--gpus", "8xT4"]) == 1
    assert "does not fit" in capsys.readouterr().out


def test_epochs_are_counted_from_the_recipes_own_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "classify", "--train.epochs", "2", "--gpus", "1xT4", "--json"]
    assert run(words) == 0
    found = json.loads(capsys.readouterr().out)
    best, data = found["layouts"][found["best"]], found["data"]
    update = best["batch_size"] * best["accumulate"]
    assert data["updates"] == -(-2 * data["rows"] // update) and data["tokens"] > data["rows"]
    assert found["hours"] == pytest.approx(data["updates"] * best["update_s"] / 3600, rel=0.02, abs=0.001)
    assert run([*words, "--model", "llama-3.2-3b"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["tokens"] is found["hours"] is found["data"] is None, "nobody trains that on the sample"
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"text": "row {i}", "label": "{i % 2}"}}\n' for i in range(50)))
    own = ["--model", "llama-3.2-3b", "--data", str(tmp_path / "rows.jsonl")]
    assert run([*words, *own]) == 0
    data = json.loads(capsys.readouterr().out)["data"]
    assert (data["rows"], data["by"], data["updates"]) == (40, "flatshift-5m", 5), "a tenth of them is dev, one test"


def test_rows_of_ones_own_take_what_their_batches_are_padded_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The plan counted each row as one of train.max_length; here the longest of eight is drawn often."""
    import numpy as np

    short, long = '{"text": "card", "label": "a"}\n', f'{{"text": "{"card " * 40}", "label": "b"}}\n'
    (tmp_path / "rows.jsonl").write_text((short * 3 + long) * 10, encoding="utf-8")
    words = ["plan", "classify", "--data.train.files", str(tmp_path / "rows.jsonl"), "--data.dev.files", "[]"]
    words += ["--data.test.files", "[]", "--data.holdout", "0", "--train.max_length", "256", "--train.batch_size", "8"]
    assert run([*words, "--train.epochs", "1", "--gpus", "CPU@12", "--train.accumulate", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["data"]["rows"] == 40 and found["layouts"][found["best"]]["batch_size"] == 8
    one = (found["data"]["tokens"] - 30 * 3) / 10  # a short row has three tokens
    tokens = found["tokens"] / found["data"]["updates"] / 8
    rng = np.random.default_rng(0)
    drawn = np.mean([rng.choice([3] * 30 + [one] * 10, 8).max() for _ in range(20_000)])
    assert tokens == pytest.approx(drawn, rel=0.02)


def test_context_and_nccl_are_causes_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--model", "llama-3.2-3b", "--regularizer.kind", "ggpo", "--train.batch_size", "8", "--json"]
    for gpus, outside in (("1xH100-80", {"context"}), ("2xH100-80", {"context", "nccl"})):
        assert run([*words, "--gpus", gpus]) == 0
        layout = json.loads(capsys.readouterr().out)["layouts"][0]
        assert set(layout["outside_gib"]) == outside and layout["bytes"]["regularizer"] > 0
        low, high = (sum(ends) for ends in zip(*layout["outside_gib"].values(), strict=True))
        shown = [layout["reserved_gib"][0] + low, layout["reserved_gib"][1] + high]
        assert layout["nvidia_smi_gib"] == pytest.approx(shown, abs=0.02)


def test_a_broken_config_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        '{"model_type": "llama", "hidden_size": 64, "num_attention_heads": 0}', encoding="utf-8"
    )
    with pytest.raises(UserError, match=r"config\.json"):
        read_sizes(tmp_path, Adapter())


DOCS = Path(__file__).resolve().parents[2] / "docs"


def plans(page: str) -> list[list[str]]:
    """The words of every `flatshift plan` of a page."""
    blocks = (DOCS / page).read_text(encoding="utf-8").split("```bash\n")[1:]
    lines = [line for block in blocks for line in block.split("```")[0].splitlines()]
    return [shlex.split(line)[1:] for line in lines if line.startswith("flatshift plan ")]


def test_the_commands_of_the_page_run(capsys: pytest.CaptureFixture[str]) -> None:
    commands = plans("does-it-fit.md")
    for words in commands:
        assert run(words) == 0, words
    said = capsys.readouterr().out
    assert len(commands) == 3 and said.count("for the recipe:") == len(commands) and "and cost" in said


def test_real_models_fit_as_their_page_says(capsys: pytest.CaptureFixture[str]) -> None:
    for words, told in zip(plans("real-models.md"), ("14.5 GiB", "11.6 GiB", "14.0 GiB", "dp 2 × tp 4"), strict=True):
        assert run(words) == 0, words
        assert told in capsys.readouterr().out.splitlines()[2], words


def test_their_trainings_parse_and_take_the_planned_mesh() -> None:
    from flatshift.command_line import split_overrides
    from flatshift.commands.train import Flags
    from flatshift.experiments.recipe import load_recipe

    page = (DOCS / "real-models.md").read_text(encoding="utf-8")
    lines = [line for block in page.split("```console\n")[1:] for line in block.split("```")[0].splitlines()]
    for line in (line for line in lines if line.startswith("flatshift train ")):
        _, overrides = split_overrides(shlex.split(line)[3:], Flags)
        recipe = load_recipe("chat", overrides).recipe
        assert "70B" not in recipe.backbone or (recipe.mesh.dp, recipe.mesh.tp, recipe.train.batch_size) == (2, 4, 2)


def _config(folder: Path, **changed: object) -> Path:
    """A config.json of a known model with other fields; None: without that field."""
    folder.mkdir()
    fields = {**KNOWN["llama-3.2-3b"], **changed}
    kept = {name: value for name, value in fields.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(kept), encoding="utf-8")
    return folder


_MIXTRAL = {
    "model_type": "mixtral", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 256, "num_local_experts": 8,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "words", "said"),
    [
        ({}, ["--adapter.targets", "[no_such_proj]"], "names no linear layer of llama"),
        ({}, ["--train.max_length", "200000"], "more than the 131072 positions"),
        ({}, ["--adapter.soft_tokens", "4"], "adapter.soft_tokens is not counted yet"),
        ({}, ["--adapter.train_whole", "[embed_tokens]"], "adapter.train_whole is not counted yet"),
        ({}, ["--adapter.bias", "all"], "adapter.bias is not counted yet"),
        ({}, ["--adapter.experts", "4"], "adapter.experts: this backbone has no mixture of experts"),
        ({}, ["--mesh.tp", "16", "--gpus", "16xH100-80"], "16 does not divide the 24 attention heads"),
        ({}, ["--mesh.pp", "32", "--gpus", "32xH100-80"], "32 × 1 stages are more than the 28 blocks"),
        (
            {**_MIXTRAL, "model_type": "gpt_oss"},
            ["--mesh.tp", "2", "--train.max_length", "64"],
            "mesh.tp: model type 'gpt_oss' cannot be split: transformers has no plan for its blocks",
        ),
        (
            _MIXTRAL,
            ["--mesh.dp", "4", "--mesh.tp", "2", "--mesh.ep", "2", "--train.max_length", "64"],
            "mesh.ep > 1 does not go with mesh.tp > 1",
        ),
        (
            _MIXTRAL | {"num_experts_per_tok": 2},
            ["--mesh.dp", "6", "--mesh.ep", "3", "--train.max_length", "64"],
            "mesh.ep: 3 ranks cannot share the 8 experts of a block of mixtral; nearest: 2",
        ),
        ({"model_type": "bloom"}, ["--mesh.cp", "2"], "mesh.cp: bloom models cannot be split by tokens"),
        ({"model_type": "stablelm"}, ["--mesh.pp", "2"], "mesh.pp: stablelm models cannot be cut into pipeline stages"),
        ({"hidden_size": None}, [], "it lacks hidden_size"),
        ({"num_attention_heads": None}, [], "config.json lacks num_attention_heads"),
        ({"num_attention_heads": 7}, [], "not a multiple of the number of attention heads (7)"),
        ({"vocab_size": None}, [], "config.json lacks vocab_size"),
        ({"intermediate_size": None}, [], "config.json lacks intermediate_size"),
        ({"num_hidden_layers": None}, [], "config.json lacks num_hidden_layers"),
        ({"model_type": "nosuch"}, [], "no model_type that transformers knows"),
    ],
)
def test_it_never_fits_on_a_guess(
    changed: dict[str, object], words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = _config(tmp_path / "model", **changed)
    assert run(["plan", "--model", str(model), "--gpus", "8xH100-80", *words]) == 2
    error = capsys.readouterr().err
    assert said in error and len(error) < 400


def test_a_known_name_is_only_its_makers(tmp_path: Path) -> None:
    assert read_sizes("meta-llama/Llama-3.1-8B", Adapter()) == read_sizes("llama-3.1-8b", Adapter())
    for name in ("somebody/llama-3.1-8b", str(tmp_path / "llama-3.1-8b")):
        with pytest.raises(UserError, match=r"llama-3\.1-8b"):
            read_sizes(name, Adapter())


def test_float32_has_no_hours(capsys: pytest.CaptureFixture[str]) -> None:
    """The rates of devices are those of bf16 products."""
    words = ["plan", "--model", "llama-3.2-3b", "--gpus", "8xH100-80", "--price", "2", "--tokens", "1e6"]
    words += ["--train.precision"]
    assert run([*words, "fp32", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["fits"] and document["hours"] is None and document["cost"] is None
    assert document["evaluation"]["rows_at_once"] == 32 and document["evaluation"]["gib"] > 0
    assert document["evaluation"]["updates_per_1000_rows"] > 0
    assert run([*words, "fp32"]) == 0
    assert "no hours" in (said := capsys.readouterr().out) and "evaluation: 32 rows at once take " in said
    assert run([*words, "bf16"]) == 0 and "and cost" in capsys.readouterr().out


def test_experts_are_planned_and_said_to_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All weights are held, a token meets those of the experts it is sent to; sharing experts out is not trained."""
    (tmp_path / "config.json").write_text(json.dumps(_MIXTRAL), encoding="utf-8")
    sizes = read_sizes(tmp_path, Adapter())
    experts, attention = 8 * 3 * 64 * 128, 2 * 64 * 64 + 2 * 64 * 32
    assert (sizes.experts, sizes.routed, sizes.expert_elements) == (8, 2, experts)
    assert sizes.products == attention + 8 * 64 + experts * 2 // 8 and sizes.feed_forward == 2 * 128
    assert sizes.elements == 2 * (experts + attention + 8 * 64 + 2 * 64) + 2 * 256 * 64 + 64
    words = ["plan", "--model", str(tmp_path), "--gpus", "8xH100-80", "--train.max_length", "64", "--json"]
    assert run(words) == 0
    document = json.loads(capsys.readouterr().out)
    shared = [layout for layout in document["layouts"] if "ep" in layout["mesh"]]
    assert {layout["mesh"]["ep"] for layout in shared} == {2, 4, 8} and all(
        layout["mesh"]["dp"] % layout["mesh"]["ep"] == 0 and "tp" not in layout["mesh"] for layout in shared
    )
    assert all(layout["seconds"]["experts"] > 0 for layout in shared)
    assert "no trace has checked" in " ".join(document["notes"])


def test_adapters_on_experts_are_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(_MIXTRAL), encoding="utf-8")
    words = ["plan", "--model", str(tmp_path), "--gpus", "1xH100-80", "--train.max_length", "64", "--json"]
    documents = []
    for more in ([], ["--adapter.experts", "4"]):
        assert run([*words, *more]) == 0
        documents.append(json.loads(capsys.readouterr().out)["layouts"][0])
    frozen, adapted = documents
    # factors, gradients and moments in float32; A and B of gate and up together, and of down
    factors = 2 * 8 * 4 * ((256 + 64) + (64 + 128))
    assert adapted["bytes"]["adapter"] - frozen["bytes"]["adapter"] == 16 * factors
    assert adapted["bytes"]["activations"] > frozen["bytes"]["activations"]
    assert adapted["seconds"]["products"] > frozen["seconds"]["products"]


def test_auto_divides_experts_where_that_is_faster(tmp_path: Path) -> None:
    config = _MIXTRAL | {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
    config |= {"num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 32000, "num_experts_per_tok": 2}
    folder = _weightless(tmp_path / "mixtral", config)
    train = Train(precision="bf16", batch_size=8, max_length=512, checkpointing="full")
    settings: dict[str, Any] = {"adapter": Adapter(), "train": train, "task": LanguageModel()}
    settings |= {"regularizer": Plain(), "optimizer": Optimizer()}
    devices = Devices("cuda", 8, 78 * 2**30, row="H100-80")
    mesh, reasons = resolve_mesh(Mesh(auto=True, tp=1), backbone=folder, devices=devices, **settings)
    assert mesh.ep > 1 and any(f"ep {mesh.ep}: a step is predicted to take" in reason for reason in reasons)
    quantized = settings | {"train": dataclasses.replace(train, quantization="nf4")}
    mesh, _ = resolve_mesh(Mesh(auto=True), backbone=folder, devices=devices, **quantized)
    assert mesh.ep == 1


def _weightless(folder: Path, config: dict[str, Any]) -> Path:
    """A backbone whose weight file is all header."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[config["model_type"]].from_dict(config))
    header = {name: {"dtype": "BF16", "shape": list(p.shape)} for name, p in model.named_parameters()}
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    return folder


def test_a_pipeline_that_frees_its_weights_is_planned_where_they_do_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--model", "llama-3.1-70b", "--gpus", "8xA100-40", "--mesh.pp", "2", "--mesh.dp", "4"]
    words += ["--train.max_length", "1024", "--train.batch_size", "16"]
    assert run(words) == 0 and "reshard: true" in capsys.readouterr().out
    words.append("--json")
    assert run(words) == 0
    (layout,) = json.loads(capsys.readouterr().out)["layouts"]
    assert layout["fits"] and layout["mesh"] == {"pp": 2, "dp": 4} and layout["bytes"]["gathered"] < 5 * 2**30
    assert run([*words, "--mesh.reshard", "false"]) == 1
    (layout,) = json.loads(capsys.readouterr().out)["layouts"]
    assert not layout["fits"] and layout["bytes"]["gathered"] > 60 * 2**30


def test_experts_that_are_shared_out_are_not_gathered(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(_MIXTRAL), encoding="utf-8")
    sizes, cluster = read_sizes(tmp_path, Adapter()), Cluster.parse("8xH100-80")
    train = Train(precision="bf16", batch_size=8, max_length=64)
    whole, shared = (
        price_layout(RuleSettings(Mesh(dp=8, ep=number), train, Adapter(), LanguageModel()), sizes, cluster)
        for number in (1, 8)
    )
    assert whole.needs.weights == shared.needs.weights
    block = max(sizes.blocks)
    assert whole.needs.gathered == 2 * 2 * block
    assert shared.needs.gathered == 2 * 2 * max(block - sizes.expert_elements * 7 // 8, 256 * 64)
    assert shared.time.gathers < whole.time.gathers and whole.time.experts == 0 < shared.time.experts


@pytest.mark.parametrize("model", ["llama-3.1-8b", "llama-3.1-70b", "flatshift-5m"])
@pytest.mark.parametrize("gpus", ["1xH100-80", "8xH100-80", "64xH100-80", "8xA100-40", "here"])
def test_every_ordinary_plan_has_a_page(model: str, gpus: str, tmp_path: Path) -> None:
    out = tmp_path / "plan.html"
    assert run(["plan", "--model", model, "--gpus", gpus, "--out", str(out)]) in (0, 1)
    assert "Time by cause" in out.read_text(encoding="utf-8")


def test_the_page_has_causes_and_meshes(tmp_path: Path) -> None:
    out = tmp_path / "plan.html"
    words = ["plan", "--model", "llama-3.1-70b", "--gpus", "8xA100-80", "--train.batch_size", "8", "--out", str(out)]
    assert run(words) == 0
    text = out.read_text(encoding="utf-8")
    for part in ("It fits: ", "Memory by cause", "frozen weights", "Time by cause", "(chosen)", "short of GiB"):
        assert part in text
    assert "<script src" not in text and 'href="http' not in text


def test_what_was_measured_here_is_kept_and_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a device that reaches half of the published rates with its products, and nothing was said of links."""
    device, probe = DEVICES["A100-80"], calibration._PROBES["cuda"]
    rate = 0.5 * RooflineConstants().products * device.flops
    plain = predict_seconds(calibration._probe_layout(probe), device, network=1.0)
    monkeypatch.setattr(calibration, "_measure_product_rate", lambda kind, probe: rate)
    monkeypatch.setattr(
        calibration, "_measure_block_seconds", lambda kind, probe: 2 * plain.products + 3 * plain.elements
    )
    monkeypatch.setattr(calibration, "_measure_launch_seconds", lambda: 6e-6)
    assert Cluster.parse("8xA100-80").constants == RooflineConstants()
    found, said = calibration.calibrate("A100-80", "cuda", 1)
    assert (
        found.products == pytest.approx(0.5 * RooflineConstants().products)
        and found.fast_link == RooflineConstants().fast_link
    )
    assert found.elements == pytest.approx(3 * RooflineConstants().elements)
    assert found.launch == 6e-6
    assert "one device only, not measured" in "\n".join(said) and Cluster.parse("8xA100-80").constants == found
    assert Cluster.parse("8xH100-80").constants == RooflineConstants()
    (tmp_path / "cache" / "plan-A100-80.json").write_text("{", encoding="utf-8")
    assert Cluster.parse("8xA100-80").constants == RooflineConstants(), "a torn file is as good as none"
    assert run(["plan", "--gpus", "here", "--nvlink", "3"]) == 2
    assert "--nvlink: --gpus here is one machine as it is" in capsys.readouterr().err


@pytest.mark.slow
def test_this_machine_is_measured() -> None:
    found, said = calibration.calibrate(None, "cpu", 2)
    assert (
        calibration.cached_constants("CPU") == found
        and 0.001 < found.products < 10
        and said[0].startswith("matrix products: ")
    )


@pytest.mark.parametrize(("targets", "adapted"), [("all-linear", 7), (["q_proj", "v_proj"], 2)])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_kernels_of_a_block_are_those_that_dispatch_counts(targets: Any, adapted: int, recompute: str) -> None:
    import peft
    import torch
    import transformers
    from torch.utils._python_dispatch import TorchDispatchMode

    from flatshift.finetune.parallel.activation_checkpoint import checkpoint_activations
    from flatshift.finetune.planner.throughput import kernels_per_block

    views = {"view", "t", "transpose", "expand", "detach", "unsqueeze", "slice", "_unsafe_view", "alias", "permute"}

    class Counted(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            self.count += func.overloadpacket.__name__ not in views
            return func(*args, **(kwargs or {}))

    def counted(blocks: int) -> int:
        config = transformers.LlamaConfig(
            hidden_size=32, intermediate_size=64, num_hidden_layers=blocks, num_attention_heads=2, vocab_size=16
        )
        model: Any = peft.get_peft_model(
            transformers.LlamaModel(config), peft.LoraConfig(r=4, target_modules=targets)
        ).train()
        checkpoint_activations(model, recompute)  # type: ignore[arg-type]
        with Counted() as mode:
            model(input_ids=torch.zeros(2, 8, dtype=torch.long)).last_hidden_state.sum().backward()
        return mode.count

    assert (counted(4) - counted(2)) / 2 == pytest.approx(kernels_per_block(adapted, recompute=recompute), rel=0.1)


def test_a_small_model_waits_for_its_host_and_a_large_one_does_not() -> None:
    small = plan_mesh("language-model", gpus="1xH100-80")
    best = small["layouts"][small["best"]]
    assert best["seconds"]["host"] > 0.9 * best["update_s"]
    assert "The device waits for its host" in small["notes"][2]
    compiled = plan_mesh("language-model", [from_override("train.compile", "true")], gpus="1xH100-80")
    assert compiled["layouts"][compiled["best"]]["seconds"]["host"] == 0
    rows = [from_override("train.max_length", "4096")]
    large = plan_mesh("language-model", rows, model="llama-3.1-8b", gpus="1xH100-80")
    assert large["layouts"][large["best"]]["seconds"]["host"] == 0


def _planned(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    """The document of a plan of an 8 B Llama on one H100 with recomputed blocks."""
    steps = ["--train.epochs", "null", "--train.steps", "100", "--checkpointing", "full", "--json"]
    assert run(["plan", *words, "--model", "llama-3.1-8b", *steps]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def test_both_answers_of_a_pair_are_tokens_of_a_step(capsys: pytest.CaptureFixture[str]) -> None:
    rows = ["--train.batch_size", "16", "--train.accumulate", "1", "--train.max_length", "1024"]
    pairs = _planned(capsys, "preference", *rows, "--task.loss", "orpo")
    turns = _planned(capsys, "chat", *rows, "--train.batch_size", "32")
    assert pairs["tokens"] == turns["tokens"] == 100 * 32 * 1024
    best, same = pairs["layouts"][0], turns["layouts"][0]
    assert best["batch_size"] * best["accumulate"] == 16 and best["tokens_per_s"] == same["tokens_per_s"]
    assert pairs["evaluation"]["updates_per_1000_rows"] == pytest.approx(1000 / 16 / 2, rel=0.01)


@pytest.mark.parametrize(
    ("recipe", "words", "ratio"),
    [
        ("preference", ["--task.loss", "dpo"], 4 / 3),  # forward, recomputed, backward, and the reference's forward
        ("preference", ["--task.loss", "kto"], 6 / 3),  # and two about answers to other prompts
        ("chat", ["--regularizer.kind", "sam"], 2),
        ("chat", ["--regularizer.kind", "lora-sam"], 2),
        ("chat", ["--regularizer.kind", "asam"], 2),
        ("chat", ["--regularizer.kind", "msam"], 1),
    ],
)
def test_a_step_takes_as_long_as_all_its_passes(
    recipe: str, words: list[str], ratio: float, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = ["--train.batch_size", "1", "--train.accumulate", "8", "--train.max_length", "1024"]
    plain = _planned(capsys, recipe, *rows, *(["--task.loss", "orpo"] if recipe == "preference" else []))["layouts"][0]
    found = _planned(capsys, recipe, *rows, *words)["layouts"][0]
    assert found["accumulate"] == plain["accumulate"] and found["tokens_per_s"] < plain["tokens_per_s"] * 1.001
    for cause in ("products", "elements"):
        assert found["seconds"][cause] == pytest.approx(ratio * plain["seconds"][cause], rel=0.01)
    forward = {"dpo": 1.5, "kto": 2.5}.get(words[-1], ratio)  # nothing of the head is recomputed
    assert found["seconds"]["head"] == pytest.approx(forward * plain["seconds"]["head"], rel=0.01)


@pytest.mark.parametrize(
    ("kind", "saved"),
    [("riemannian", 0), ("adamw-8bit", 6 - 8 / 256), ("paged-adamw", 8), ("paged-adamw-8bit", 8)],
)
def test_moments_take_what_their_optimizer_keeps_on_the_device(
    kind: str, saved: float, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = ["--train.batch_size", "8", "--adapter.rank", "256"]
    plain = _planned(capsys, "chat", *rows)
    found = _planned(capsys, "chat", *rows, "--optimizer.kind", kind)
    before, after = (document["layouts"][0]["bytes"]["adapter"] for document in (plain, found))
    assert before == 16 * plain["trained"] and before - after == pytest.approx(saved * plain["trained"], abs=1)
