"""The report page: whole, offline, escaped, themed, the same bytes twice, and a clear word for what is no run."""

import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flatshift.experiments.report.page import build_report
from flatshift.finetune.errors import UserError
from tests.support import report_runs

VOID = {"meta", "link", "br", "img", "input", "hr"}


class Page(HTMLParser):
    """Tags, attributes, ids and text of a page; fails on a tag that does not close."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.text, self._open = [], [], [], []
        self.feed(text)
        assert not self._open

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self._open and self._open.pop() == tag

    def handle_data(self, data):
        if self._open and self._open[-1] not in ("style", "script"):
            self.text.append(data)

    @property
    def words(self):
        return re.sub(r"\s+", " ", " ".join(self.text))


def page_of(tmp_path, *paths):
    text = build_report(list(paths), out=tmp_path / "report.html").read_text(encoding="utf-8")
    return text, Page(text)


def plots_of(run):
    """The charts of a run directory as files, written beside its page."""
    build_report([run], out=run / "report.html", plots=True)
    return sorted((run / "plots").glob("*"))


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "demo"
    report_runs.demo(folder)
    return folder


def test_demo_page_shows_every_section(demo, tmp_path):
    text, page = page_of(tmp_path, demo)
    for title in (
        "Evaluation",
        "The warm-up's shift",
        "Training",
        "Selection",
        "First choices",
        "Sweep",
        "Time",
        "Inputs",
        "Environment",
        "Recipe, resolved",
        "Primary endpoint",
        "Equal trials",
        "Map of the selection",
        "What the selection is made of",
        "Loss during warm-up",
    ):
        assert title in page.words, title
    # Three chapters; the finding of the comparison is the headline.
    assert page.tags.count("article") == 3 and page.tags.count("h1") == 1
    assert re.search(r"<h1>After Holm&#39;s correction .* from plain", text)
    assert "cd" * 32 in page.words  # input hashes in full
    assert "majority baseline" in page.words and "t-interval" in page.words


def test_a_comparison_without_a_result_is_no_headline(demo, tmp_path):
    runs = tmp_path / "runs"
    shutil.copytree(demo, runs)
    (file,) = [path for path in runs.rglob("*.json") if '"confirmatory"' in path.read_text(encoding="utf-8")]
    document = json.loads(file.read_text(encoding="utf-8"))
    for method in document["methods"].values():
        method["primary"] = None
    file.write_text(json.dumps(document), encoding="utf-8")
    text, page = page_of(tmp_path, runs)
    assert "No informative task" in page.words and not re.search(r"<h1>(After Holm|No informative)", text)


def test_page_is_offline_and_themed(demo, tmp_path):
    text, page = page_of(tmp_path, demo)
    for name, value in page.attributes:
        if name in ("src", "href", "xlink:href", "action", "data", "srcset", "poster"):
            assert value.startswith(("#", "data:")), (name, value)
    # No address is left anywhere that a browser could fetch.
    assert not re.search(r"@import|url\((?!#)|https?://", text)
    assert "default-src 'none'" in text
    assert "prefers-color-scheme: dark" in text and '[data-theme="dark"]' in text and "@media print" in text
    assert "var(--blue)" in text and "--blue: #0b6bb0" in text and "--blue: #62b2ee" in text
    ids = [value for name, value in page.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    for value in re.findall(r'(?:href="|url\()#([^")]+)', text):
        assert value in ids
    assert page.tags.count("figure") == page.tags.count("svg") == page.tags.count("figcaption")
    for labels in (value.split() for name, value in page.attributes if name == "aria-labelledby"):
        assert set(labels) <= set(ids)


def test_no_colour_of_the_light_theme_is_left_in_inline_charts(demo, tmp_path):
    text, _ = page_of(tmp_path, demo)
    for svg in re.findall(r"<svg.*?</svg>", text, flags=re.S):
        for style in re.findall(r'style="[^"]*"', svg):
            assert not re.search(r"#[0-9a-fA-F]{3,6}\b", style), style


def test_same_files_same_bytes(demo, tmp_path):
    first = build_report([demo], out=tmp_path / "a.html").read_bytes()
    copy = tmp_path / "elsewhere" / "demo"
    shutil.copytree(demo, copy)
    assert build_report([copy], out=tmp_path / "b.html").read_bytes() == first
    before = {p: p.read_bytes() for p in plots_of(copy / "sweep")}
    assert before and {p: p.read_bytes() for p in plots_of(copy / "sweep")} == before


def test_plots_are_files_of_their_own(demo, tmp_path):
    import xml.etree.ElementTree as ET

    run = tmp_path / "run"
    shutil.copytree(demo / "warmup", run)
    written = plots_of(run)
    assert {p.name for p in written} >= {
        "loss-warm-up.svg",
        "loss-fine-tune.svg",
        "selection-scores.svg",
        "selection-map.svg",
    }
    for path in written:
        assert path.parent == run / "plots"
        root = ET.fromstring(path.read_text(encoding="utf-8"))
        assert root.tag == "{http://www.w3.org/2000/svg}svg" and "var(" not in path.read_text(encoding="utf-8")


EVIL = '<script>alert(1)</script><img src=x onerror="alert(2)">&"\'{{ 7*7 }}'


def test_everything_from_outside_is_escaped(tmp_path):
    run = tmp_path / "run"
    report_runs.training(run, steps=5)
    chosen = run / "selection" / "selected.jsonl"
    rows = [json.loads(line) for line in chosen.read_text().splitlines()]
    rows[0] |= {"text": EVIL + " first", "id": EVIL, "domain": EVIL}
    chosen.write_text("".join(json.dumps(r) + "\n" for r in rows))
    table = pq.read_table(run / "selection" / "scores.parquet")
    names = pa.array([EVIL if i % 3 else "$x^2$ \\frac" for i in range(table.num_rows)])
    table = table.set_column(table.schema.get_field_index("domain"), "domain", names)
    pq.write_table(table.set_column(4, "nearest_target", names), run / "selection" / "scores.parquet")
    (run / "command.txt").write_text(f"flatshift train '{EVIL}'")
    (run / "recipe.resolved.yaml").write_text(f"extends: '{EVIL.replace(chr(39), '')}'\nbackbone: \"</pre>{'<b>'}\"\n")
    for name in ("environment.json", "manifest.json"):
        (run / name).write_text(
            json.dumps({EVIL: EVIL, "versions": {"flatshift": EVIL}, "inputs": [{"path": EVIL, "sha256": EVIL}]})
        )
    (run / "eval.json").write_text(
        json.dumps({EVIL: {"loss": report_runs.cell(1, 0.1, 5), EVIL: report_runs.cell(1, 0.1, 5)}})
    )
    lines = [{"stage": EVIL, "split": "train", "step": s, "loss": 1.0 + s, "lr": s, EVIL: s} for s in range(3)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    _, page = page_of(tmp_path, run)
    assert page.tags.count("script") == 1 and "img" not in page.tags and "b" not in page.tags
    assert not any(name.startswith("on") for name, _ in page.attributes)
    assert "alert(1)" in page.words and "{{ 7*7 }}" in page.words  # shown as text
    plots = plots_of(run)
    assert plots and not any("<script" in path.read_text(encoding="utf-8") for path in plots)


@pytest.mark.parametrize(
    "gone",
    [
        "metrics.jsonl",
        "eval.json",
        "selection",
        "stages",
        "environment.json",
        "command.txt",
        "manifest.json",
        "recipe.resolved.yaml",
        "timings.json",
        "selection/scores.parquet",
        "selection/selected.jsonl",
        "selection/map.parquet",
        "selection/judged_domains.tsv",
        "selection/manifest.json",
    ],
)
def test_a_missing_piece_is_left_out(demo, tmp_path, gone):
    run = tmp_path / "run"
    shutil.copytree(demo / "warmup", run)
    victim = run / gone
    shutil.rmtree(victim) if victim.is_dir() else victim.unlink()
    _, page = page_of(tmp_path, run)
    assert page.tags.count("article") == 1
    assert ("Training" in page.words) == (gone != "metrics.jsonl")


def test_empty_pieces(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").write_text("")
    (run / "eval.json").write_text("{}")
    schema = {
        "id": pa.string(),
        "score": pa.float64(),
        "rank": pa.int64(),
        "selected": pa.bool_(),
        "domain": pa.string(),
    }
    pq.write_table(pa.table({k: pa.array([], t) for k, t in schema.items()}), run / "scores.parquet")
    (run / "selected.jsonl").write_text("")
    pq.write_table(
        pa.table({"x": pa.array([], pa.float32()), "y": pa.array([], pa.float32()), "kind": pa.array([], pa.string())}),
        run / "map.parquet",
    )
    (run / "cells").mkdir()
    text, page = page_of(tmp_path, run)
    assert "<svg" not in text and "Nothing was chosen from 0 records" in page.words
    assert plots_of(run) == []


def test_torn_lines_and_resumed_steps(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    line = '{"stage": "fine-tune", "attempt": %d, "step": %d, "split": "train", "loss": %s, "lr": 1e-3}\n'
    text = "".join(line % (1, s, s) for s in range(1, 6)) + '{"stage": "fine-tu' + "\n"
    text += "".join(line % (2, s, 100 + s) for s in range(4, 7)) + '{"stage": "fine-tune", "st'
    (run / "metrics.jsonl").write_text(text)
    from flatshift.experiments.results.run import read_run

    metrics = read_run(run).metrics
    assert metrics.series("fine-tune", "train", "loss") == [(1, 1), (2, 2), (3, 3), (4, 104), (5, 105), (6, 106)]
    assert metrics.unreadable == 2
    _, page = page_of(tmp_path, run)
    assert "2 torn lines" in page.words and "2 attempts" in page.words


def test_values_that_are_not_finite_do_not_break_a_chart(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    rows = [
        {"stage": "s", "split": "train", "step": i, "loss": v}
        for i, v in enumerate((1.0, float("nan"), float("inf"), 0.5), 1)
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    _, page = page_of(tmp_path, run)
    assert "2 values that were not finite" in page.words


def test_runs_of_a_comparison_are_not_chapters(demo, tmp_path):
    folder = tmp_path / "comparison"
    shutil.copytree(demo / "comparison", folder)
    for hidden in ("cells", "runs"):
        shutil.copytree(demo / "warmup", folder / hidden / "0a1b")
    _, page = page_of(tmp_path, folder)
    assert page.tags.count("article") == 1
    _, page = page_of(tmp_path, folder, folder / "runs" / "0a1b")  # unless named
    assert page.tags.count("article") == 2


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda p: p / "nowhere", "no such run directory"),
        (lambda p: (p / "empty").mkdir() or p / "empty", "not a run directory"),
        (lambda p: (p / "file").write_text("x") and p / "file", "a file, not a run directory"),
    ],
)
def test_what_is_no_run_directory_is_refused_with_the_nearest(tmp_path, make, said):
    report_runs.sweep(tmp_path / "nowhere-else")
    path = make(tmp_path)
    with pytest.raises(UserError, match=said) as error:
        build_report([path], out=tmp_path / "out.html")
    assert "nowhere-else" in str(error.value) or "give its folder" in str(error.value)
    assert not (tmp_path / "out.html").exists() and "\n" not in str(error.value)


def test_inside_a_run_the_run_is_named(demo, tmp_path):
    with pytest.raises(UserError, match=r"did you mean .*warmup\?"):
        build_report([demo / "warmup" / "stages" / "fine-tune"], out=tmp_path / "out.html")


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("eval.json", '{"test": {"loss": 3}}', r"eval.json: test.loss has no number"),
        ("eval.json", '{"test": {\n"loss"', r"eval.json:2: not valid JSON"),
        ("manifest.json", "[1]", "not a JSON object"),
        ("scores.parquet", "not parquet", "not a readable Parquet file"),
        ("cells.parquet", "not parquet", "not a readable Parquet file"),
        ("selected.jsonl", '{"id": 1}\n{"id"', r"selected.jsonl:2: not valid JSON"),
    ],
)
def test_a_broken_file_is_named(tmp_path, name, content, said):
    run = tmp_path / "run"
    run.mkdir()
    (run / "recipe.resolved.yaml").write_text("backbone: x\n")
    (run / name).write_text(content)
    with pytest.raises(UserError, match=said):
        build_report([run], out=tmp_path / "out.html")
    assert list(tmp_path.glob("*.html")) == []


def test_a_hidden_temporary_is_shown_under_its_own_name(demo, tmp_path):
    run = tmp_path / ".chosen.0123abcd.tmp"
    shutil.copytree(demo / "warmup" / "selection", run)
    _, page = page_of(tmp_path, run)
    assert "selection chosen" in page.words and ".tmp" not in page.words


def test_the_directory_of_a_comparison_is_a_chapter_of_its_own(tmp_path):
    document = Path(__file__).resolve().parents[3] / "benchmarks" / "results" / "flat_comparison" / "comparison.json"
    folder = tmp_path / "flat"
    (folder / "cells").mkdir(parents=True)  # its cells are no grid
    shutil.copyfile(document, folder / "comparison.json")
    text = build_report([folder], out=tmp_path / "page.html").read_text(encoding="utf-8")
    assert "comparison flat" in text and "Primary endpoint" in text and "Equal trials" in text
    assert "cells finished" not in text


def test_every_chapter_is_one_file_with_a_part():
    from flatshift.experiments.report import chapters

    others = {"__init__", "sweep_verdicts", "plan"}  # a plan is asked for, and lies in no directory
    files = {path.stem for path in Path(chapters.__file__).parent.glob("*.py")} - others
    assert {part.__module__.rpartition(".")[2] for part in chapters.PARTS} == files
