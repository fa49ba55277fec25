"""Addresses with secrets, texts that steer a terminal, and templates and tokenizers of strangers."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks._harness import ROOT
from benchmarks.faults.doors import SECRET, STEERS, Case, Place, Said, as_command, check_sentence, holders, write_rows

SIGNED = (
    "X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Credential=AKIA%2F2026&X-Amz-Date=20261126T000000Z&X-Amz-Expires=3600"
    "&X-Amz-SignedHeaders=host&X-Amz-Security-Token=s3cret&X-Amz-Signature=s3cret"
)
ADDRESSES = {
    f"https://h/a.jsonl?{SIGNED}": "https://h/a.jsonl",
    "https://ann:s3cret@h/a.jsonl": "https://h/a.jsonl",
    "https://s3cret@h/a.jsonl": "https://h/a.jsonl",
    "HTTPS://ann:s3cret@h:8080/a.jsonl": "HTTPS://h:8080/a.jsonl",
    "https://ann:s3@cret@h/a@b.jsonl": "https://h/a@b.jsonl",
    "https://ann:s3/s3cret@h/a.jsonl": "https://h/a.jsonl",
    "https://ann:s3?s3cret#@h/a.jsonl": "https://h/a.jsonl",
    "https://ann:s3%40s3cret@[::1]:80/a": "https://[::1]:80/a",
    "s3://AKIA:s3cret@bucket/key": "s3://bucket/key",
    "ftp://ann:s3cret@h/a": "ftp://h/a",
    "abfs://container@account.dfs.core.windows.net/a": "abfs://container@account.dfs.core.windows.net/a",
    "abfs://container:s3cret@account/a": "abfs://container@account/a",
    "https://h/a?sv=2024&sp=r&se=2026-01-01&sr=b&sig=s3cret%3D": "https://h/a",
    "https://h/a?part=1&sig=s3cret": "https://h/a?part=1",
    "https://h/a?sig=s3cret&part=1": "https://h/a?part=1",
    "https://h/a?part=1&token=s3cret&of=2#top": "https://h/a?part=1&of=2#top",
    "https://h/a?key=s3cret": "https://h/a",
    "https://h/a?api_key=s3cret": "https://h/a",
    "https://h/a?apikey=s3cret": "https://h/a",
    "https://h/a?apiKey=s3cret": "https://h/a",
    "https://h/a?access_token=s3cret": "https://h/a",
    "https://h/a?accesstoken=s3cret": "https://h/a",
    "https://h/a?ACCESS_TOKEN=s3cret": "https://h/a",
    "https://h/a?auth=s3cret": "https://h/a",
    "https://h/a?jwt=s3cret": "https://h/a",
    "https://h/a?password=s3cret&user=ann": "https://h/a?user=ann",
    "https://h/a?client_secret=s3cret": "https://h/a",
    "https://h/a?X%2DAmz%2DSignature=s3cret": "https://h/a",
    "https://h/a?x-amz-signature=s3cret": "https://h/a",
    "https://h/a?Expires=9&Signature=s3cret&Key-Pair-Id=s3cret&Policy=s3cret": "https://h/a",
    "https://h/a?AWSAccessKeyId=s3cret&Signature=s3cret&Expires=9": "https://h/a",
    "https://h/a?GoogleAccessId=me&Expires=9&Signature=s3cret": "https://h/a",
    "https://h/a?X-Goog-Credential=s3cret&X-Goog-Signature=s3cret&generation=7": "https://h/a?generation=7",
    "https://h/a?OSSAccessKeyId=s3cret&Expires=9&Signature=s3cret": "https://h/a",
    "https://h/a?q-ak=s3cret&q-signature=s3cret": "https://h/a",
    "https://h/a?a=1;token=s3cret": "https://h/a?a=1",
    "https://h/a?a=1&amp;token=s3cret": "https://h/a?a=1",
    "https://h/a#access_token=s3cret": "https://h/a",
    "https://h/a?session=s3cret": "https://h/a",
    "https://h/a?code=s3cret": "https://h/a",
    "simplecache::https://ann:s3cret@h/a": "simplecache::https://h/a",
    "https:/ann:s3cret@h/a": "https:/h/a",  # as pathlib writes it
}
"""Addresses, and what may be written of them."""
ESCAPES = "\x1b[31m\x1b[2J\x1b]8;;http://evil\x07\x1b]52;c;ZXZpbA==\x07\r\x08\x9b\u202e\u2066\u200f\u061c"
EVIL = "\x1b]0;x\x07\x9b31m\u202e\u2066\x7f\r"
"""What may stand in the name of a file."""
STORE = "memory://strange/rows.jsonl?X-Amz-Expires=60&X-Amz-Signature=s3cret"
SMALL = [
    *("--train.steps", "1", "--train.batch_size", "4", "--train.max_length", "64", "--train.eval_every", "0"),
    *("--train.precision", "fp32", "--eval.bootstrap", "2", "--train.threads", "1", "--eval.train_limit", "0"),
    *("--data.checks.copies", "warn", "--regularizer.kind", "plain", "--train.device", "cpu", "--adapter.rank", "2"),
]

# ------------------------------------------------------------------------------------------------------------ secrets

COMMANDS: dict[str, tuple[str, ...]] = {
    "select": ("select", "--pool", "{}", "--target", "sample:snips/train", "--budget", "2", "--out", "o"),
    "select, target": ("select", "--pool", "sample:snips/train", "--target", "{}", "--budget", "2", "--out", "o"),
    "train --data": ("train", "classify", "--data", "{}", "--out", "o"),
    "train, a key": ("train", "classify", "--data.train.files={}", "--out", "o"),
    "train, a list": ("train", "classify", "--data.train.files", "['{}', '{}']", "--out", "o"),
    "train, the recipe": ("train", "{}", "--out", "o"),
    "train --out": ("train", "classify", "--out", "{}"),
    "train --backbone": ("train", "classify", "--backbone", "{}", "--out", "o"),
    "train --resume": ("train", "--resume", "{}"),
    "train, adapter.start": ("train", "classify", "--adapter.start", "{}", "--out", "o"),
    "train, a number": ("train", "classify", "--train.steps", "{}", "--out", "o"),
    "sweep --grid": ("sweep", "classify", "--grid", "data.train.files={},{}", "--out", "o"),
    "predict": ("predict", "{}", "--data", "{}", "--out", "o.csv"),
    "eval": ("eval", "flatshift-5m", "--data", "{}"),
    "generate": ("generate", "{}", "--prompt", "x"),
    "generate, the prompt": ("generate", "nowhere", "--prompt", "{}"),
    "chat": ("chat", "{}"),
    "serve": ("serve", "{}"),
    "serve --allow-origin": ("serve", "nowhere", "--allow-origin", "{}"),
    "serve --host": ("serve", "nowhere", "--host", "{}"),
    "report": ("report", "{}"),
    "merge": ("merge", "{}"),
    "export": ("export", "nowhere", "--out", "{}"),
    "tokenizer": ("tokenizer", "flatshift-5m", "--data", "{}"),
    "push": ("push", "nowhere", "{}"),
    "runs": ("runs", "{}"),
    "doctor": ("doctor", "{}"),
    "plan": ("plan", "--model", "{}"),
    "compare": ("compare", "{}", "--out", "o"),
    "recipes": ("recipes", "show", "{}"),
    "an unknown command": ("{}",),
    "an unknown flag": ("train", "--{}", "1"),
}
"""Command lines that end with exit code 2, wherever the address stands in them."""
GIVEN = (f"ftp://ann:s3cret@127.0.0.1:9/a.jsonl?{SIGNED}", "http://127.0.0.1:9/a.jsonl?sig=s3cret")


def _redacted(address: str) -> Callable[[Place], str]:
    def open_by(place: Place) -> str:
        from flatshift.finetune.redaction import hide_secrets, redact_urls, reveal_secrets

        for text in ("{}", "see {} now", "('{}', status=403)", "[{}, 1]", '{{"a":"{}"}}', "`{}`: no", "{}."):
            if (result := redact_urls(text.format(address))) != text.format(ADDRESSES[address]):
                return f"writes {result}"
        if "://" not in address:  # nobody can open it
            return ""
        hidden = hide_secrets(address)
        return "" if SECRET not in hidden and reveal_secrets(hidden) == address else f"keeps {hidden}"

    return open_by


def _refused(words: tuple[str, ...], address: str) -> Callable[[Place], str]:
    def open_by(place: Place) -> str:
        folder = place.folder()
        answer = place.flatshift(*(word.replace("{}", address) for word in words), cwd=folder)
        if answer.code != 2:
            return f"exit code {answer.code}: {answer.text[-300:]}"
        return answer.faults() or ", ".join(holders(folder))

    return open_by


@contextlib.contextmanager
def _stored() -> Iterator[None]:
    """Put a stranger's rows at STORE, in this process's own memory."""
    import fsspec

    rows = [
        {
            "id": f"={i}+1",
            "text": f"card {i} {ESCAPES} {'lost' if i % 2 else 'here'}",
            "label": f"a{i % 2}\x1b[5m</script>",
        }
        for i in range(24)
    ]
    content = "".join(json.dumps(row) + "\n" for row in rows).encode()
    fsspec.filesystem("memory").pipe_file(STORE, content)
    with as_command():
        yield


def _train(place: Place) -> tuple[Path, Said]:
    """Return a run of the stranger's rows in a folder of an evil name, and what its training printed."""
    if "strange" not in place.kept:
        (place.root / "strange").mkdir()
        out = place.root / "strange" / "run\x1b]0;evil\x07"
        files = ["--data", STORE, "--data.dev.files", "[]", "--data.test.files", f"['{STORE}']"]
        backbone = str(place.sandbox / "backbone")
        argv = ["train", "classify", "--backbone", backbone, *files, *SMALL, "--verbose", "--out", str(out)]
        place.kept["strange"] = out, place.flatshift(*argv, cwd=place.root / "strange", around=_stored)
    run, output = place.kept["strange"]
    return run, output


JOURNEY: dict[str, tuple[tuple[str, ...], tuple[int, ...]]] = {
    "report": (("report", "{run}", "--out", "page.html"), (0,)),
    "runs": (("runs", "{home}"), (0,)),
    "runs --json": (("runs", "{home}", "--json"), (0,)),
    "doctor": (("doctor", "{run}"), (0,)),
    "doctor --json": (("doctor", "{run}", "--json"), (0,)),
    "eval": (("eval", "{run}", "--data", STORE), (0,)),
    "eval --json": (("eval", "{run}", "--data", STORE, "--json"), (0,)),
    "eval --group-by": (("eval", "{run}", "--data", STORE, "--group-by", "text"), (0, 2)),
    "eval of absent rows": (("eval", "{run}", "--data", STORE.replace("rows", "absent")), (2,)),
    "predict to CSV": (("predict", "{run}", "--data", STORE, "--out", "p.csv"), (0,)),
    "predict to TSV": (("predict", "{run}", "--data", STORE, "--out", "p.tsv"), (0,)),
    "predict to JSONL": (("predict", "{run}", "--data", STORE, "--out", "p.jsonl"), (0,)),
    "predict --raw to JSONL": (("predict", "{run}", "--data", STORE, "--out", "p.jsonl", "--raw"), (2,)),
    "train --resume": (("train", "--resume", "{run}", "--data.train.files", STORE), (0,)),
    "merge": (("merge", "{run}", "--out", "merged"), (0,)),
    "export": (("export", "{run}", "--out", "export"), (0,)),
    "select": (("select", "--pool", STORE, "--target", STORE, "--budget", "3", "--out", "chosen",
                "--select.embedder.dim", "4", "--select.checks", "false"), (0, 2)),
    "tokenizer": (("tokenizer", "flatshift-5m", "--data", STORE), (0, 2)),
    "generate": (("generate", "{run}", "--data", STORE), (2,)),
    "push": (("push", "{run}", "me/name"), (2,)),
}  # fmt: skip
"""Commands on that run and its rows, and their exit codes."""
KEPT = ("manifest.json", "recipe.resolved.yaml", "command.txt", "report.html")
"""Files of a run that hold the address without its secrets."""


def _journey(words: tuple[str, ...], codes: tuple[int, ...]) -> Callable[[Place], str]:
    def open_by(place: Place) -> str:
        run, _ = _train(place)
        folder = place.folder()
        named = [word.replace("{run}", str(run)).replace("{home}", str(run.parent)) for word in words]
        answer = place.flatshift(*named, cwd=folder, around=_stored)
        if wrong := answer.faults() or ", ".join([*holders(folder), *holders(run)]):
            return wrong
        if answer.code not in codes:
            return f"exit code {answer.code}: {answer.text[-300:]}"
        return _formulas(folder)

    return open_by


def _formulas(folder: Path) -> str:
    """Return the cells of tables that a spreadsheet would compute."""
    for file in (*folder.glob("*.csv"), *folder.glob("*.tsv")):
        with file.open(newline="", encoding="utf-8") as stream:
            cells = [cell for row in csv.reader(stream, delimiter=",\t"[file.suffix == ".tsv"]) for cell in row]
        if results := [cell for cell in cells if cell[:1] in ("=", "+", "@", "\t", "\r")]:
            return f"{file.name} has the cell {results[0]!r}"
    return ""


def _trained(place: Place) -> str:
    run, output = _train(place)
    if wrong := output.faults() or ", ".join(holders(run.parent)):
        return wrong
    return "" if output.code == 0 and "lost" in output.text else f"exit code {output.code}: {output.text[-300:]}"


def _kept(name: str) -> Callable[[Place], str]:
    def open_by(place: Place) -> str:
        text = (_train(place)[0] / name).read_text(encoding="utf-8")
        return "" if STORE.partition("?")[0] in text and SECRET not in text else "holds the secret, or no address"

    return open_by


def _logged(place: Place) -> str:
    match = STEERS.search((_train(place)[0] / "log.txt").read_bytes().decode())
    return "" if match is None else f"log.txt holds {match[0]!r}"


def _page(place: Place) -> str:
    text = (_train(place)[0] / "report.html").read_text(encoding="utf-8")
    return "report.html closes its own script" if "5m</script>" in text else ""


def _old(place: Place) -> str:
    """Return what `doctor` and `push` overlook in a directory of an earlier version."""
    folder = place.folder()
    (folder / "README.md").write_text(f"made by\n`flatshift train --data {GIVEN[0]}`\n", encoding="utf-8")
    for words, code in (("doctor",), 1), (("push", "me/name"), 2):
        answer = place.flatshift(words[0], str(folder), *words[1:], cwd=folder)
        if answer.code != code or answer.faults() or "README.md:2" not in answer.text:
            return f"{words[0]}: exit code {answer.code}: {answer.text[-300:]}"
    return ""


# ------------------------------------------------------------------------------------------------------------ console

_ROWS = "rows.jsonl"
NAMES: dict[str, tuple[str, ...]] = {
    "a recipe": ("train", f"{EVIL}.yaml", "--out", "o"),
    "a flag": ("train", "classify", f"--{EVIL}", "1"),
    "a flag's value": ("train", "classify", "--train.steps", EVIL),
    "a backbone": ("train", "classify", "--backbone", EVIL, "--out", "o"),
    "an adapter": ("train", "classify", "--adapter.start", EVIL, "--out", "o"),
    "a file of rows": ("train", "classify", "--data", f"{EVIL}.jsonl", "--out", "o"),
    "a column": ("train", "classify", "--data", _ROWS, "--data.columns.text", EVIL, "--out", "o"),
    "an output": ("train", "classify", "--out", f"{_ROWS}/{EVIL}"),
    "a run to resume": ("train", "--resume", EVIL),
    "a command": (EVIL,),
    "a report's run": ("report", EVIL),
    "a page": ("report", ".", "--out", EVIL),
    "a folder of runs": ("runs", EVIL),
    "a folder to push": ("push", EVIL, "me/x"),
    "a place to push to": ("push", ".", EVIL),
    "a directory to search": ("doctor", EVIL),
    "a run to merge": ("merge", EVIL),
    "a run to export": ("export", EVIL),
    "a run to chat with": ("chat", EVIL),
    "a run to serve": ("serve", EVIL),
    "a host": ("serve", ".", "--host", EVIL),
    "a run that writes": ("generate", EVIL, "--prompt", "x"),
    "a model to plan": ("plan", "--model", EVIL),
    "GPUs": ("plan", "--gpus", EVIL),
    "a recipe to show": ("recipes", "show", EVIL),
    "a run to evaluate": ("eval", EVIL, "--data", _ROWS),
    "rows to evaluate": ("eval", "flatshift-5m", "--data", EVIL),
    "a prompt": ("eval", "flatshift-5m", "--data", _ROWS, "--prompt", EVIL),
    "a pool": ("select", "--pool", EVIL, "--target", _ROWS, "--budget", "1", "--out", "o"),
    "a tokenizer": ("tokenizer", EVIL, "--data", _ROWS),
    "a grid": ("sweep", "classify", "--grid", f"{EVIL}=1", "--out", "o"),
    "a study": ("compare", EVIL, "--out", "o"),
    "a forecast": ("forecast", EVIL),
}
"""Command lines with an evil name, which no file has: refused."""
FILES: dict[str, tuple[dict[str, str], tuple[str, ...]]] = {
    "a recipe's key": ({"r.yaml": '"\\e]0;x\\a": 1\n'}, ("train", "r.yaml", "--out", "o")),
    "a recipe's value": ({"r.yaml": 'train: {steps: "\\e]0;x\\a"}\n'}, ("train", "r.yaml", "--out", "o")),
    "a recipe's base": ({"r.yaml": 'extends: "\\e]0;x\\a"\n'}, ("train", "r.yaml", "--out", "o")),
    "a recipe that is none": ({"r.yaml": f"a: [{EVIL}\n"}, ("train", "r.yaml", "--out", "o")),
    "columns of JSON": (
        {"r.jsonl": json.dumps({EVIL: "x"}) + "\n"},
        ("train", "classify", "--data", "r.jsonl", "--out", "o"),
    ),
    "columns of CSV": ({"r.csv": f"{EVIL},b\nx,y\n"}, ("train", "classify", "--data", "r.csv", "--out", "o")),
    "a row that is no JSON": ({"r.jsonl": f"{EVIL}\n"}, ("train", "classify", "--data", "r.jsonl", "--out", "o")),
    "a label": (
        {"r.jsonl": json.dumps({"text": "x", "label": EVIL}) + "\n"},
        ("train", "regress", "--data", "r.jsonl", "--out", "o"),
    ),
    "an architecture": (
        {"m/config.json": json.dumps({"model_type": EVIL, "architectures": [EVIL]})},
        ("plan", "--model", "m"),
    ),
    "a class of a repository": (
        {"m/config.json": json.dumps({"model_type": "llama", "auto_map": {"AutoModel": EVIL}}), "m/a.safetensors": ""},
        ("train", "language-model", "--backbone", "./m", "--out", "o"),
    ),
    "weights": (
        {"m/config.json": '{"model_type": "llama"}', f"m/{EVIL}.bin": "", "m/pytorch_model.bin": ""},
        ("train", "language-model", "--backbone", "./m", "--out", "o"),
    ),
    "a prompt's key": (
        {"p.yaml": '"\\e]0;x\\a": 1\ntext: "{text} {label}"\nlabels: {a: b, b: c}\n'},
        ("eval", "flatshift-5m", "--data", _ROWS, "--prompt", "p.yaml"),
    ),
    "a template": (
        {"t.jinja": "{{ raise_exception('" + EVIL + "') }}"},
        ("train", "chat", "--data", _ROWS, "--task.template", "t.jinja", "--out", "o"),
    ),
    "a sweep's record": ({"s/sweep.json": f'"{EVIL}'}, ("sweep", "classify", "--grid", "adapter.rank=1", "--out", "s")),
    "an evaluation's record": ({"s/eval.json": json.dumps({EVIL: {EVIL: EVIL}})}, ("report", "s")),
    "a manifest": ({"s/manifest.json": json.dumps([EVIL]), "s/eval.json": "{}"}, ("report", "s")),
}
"""Files of a stranger's, and commands that read them."""


def _named(words: tuple[str, ...], files: dict[str, str]) -> Callable[[Place], str]:
    def open_by(place: Place) -> str:
        folder = place.folder()
        write_rows(folder / _ROWS, [{"text": f"row {i}", "label": "ab"[i % 2]} for i in range(8)])
        for name, text in files.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(text, encoding="utf-8", newline="")
        answer = place.flatshift(*words, cwd=folder)
        return answer.faults() or (
            "" if answer.code == 2 or files else f"exit code {answer.code}: {answer.text[-200:]}"
        )

    return open_by


LIBRARIES = {
    "warnings": "import warnings; warnings.warn(text)",
    "the root logger": "import logging; logging.warning(text)",
    "transformers' logger": "from transformers.utils import logging; logging.get_logger('transformers').error(text)",
    "a logger of its own": (
        "import logging; logging.getLogger('x').addHandler(logging.StreamHandler()); logging.getLogger('x').error(text)"
    ),
    "a print": "import sys; print(text, file=sys.stderr)",
}
"""What a library does with a stranger's text while a command works."""


def _library(code: str) -> Callable[[Place], str]:
    def open_by(place: Place) -> str:
        program = (
            "import sys\nfrom flatshift import cli, commands\n"
            f"def act(name, argv):\n    text = {EVIL + ' ' + GIVEN[1]!r}\n    {code}\n    return 0\n"
            "commands.run = act\nsys.exit(cli.run(['runs']))\n"
        )
        command = [sys.executable, "-W", "always", "-c", program]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, encoding="utf-8", check=False)
        answer = Said(done.returncode, done.stdout + done.stderr)
        return answer.faults() or ("" if "u001b" in answer.text else f"prints nothing: {answer.text[-200:]}")

    return open_by


# ------------------------------------------------------------------------------------------- templates and tokenizers

LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}"
LOOPS += "{% endfor %}{% endfor %}"
TEMPLATES = {
    "loops": LOOPS,
    "constant": "{{ 'a' * 3000000000 }}",
    "text": "{{ messages[0].content * 3000000000 }}",
    "percent": "{{ '%3000000000d' % 1 }}",
    "format": "{{ '{:>3000000000}'.format(1) }}",
    "join": "{{ (['a' * 1000000] * 5000) | join }}",
    "power": "{{ 9 ** (9 ** 9) }}",
    "digits": "{{ (7 ** 9999999) | string }}",
    "list": "{{ ([0] * 3000000000) | length }}",
    "range": "{% for i in range(99999) %}{% set x = range(99999) | list %}{% endfor %}",
    "macro": "{% macro f(x) %}{{ f(x) }}{{ f(x) }}{% endmacro %}{{ f(1) }}",
    "doubling": "{% set n = namespace(x='ab') %}{% for i in range(64) %}{% set n.x = n.x + n.x %}{% endfor %}{{ n.x }}",
    "batch": "{{ range(99999) | batch(1) | list | batch(1) | list | pprint * 99999 }}",
    "indent": "{{ ('a\\n' * 9999999) | indent(99999) }}",
    "center": "{{ 'a' | center(3000000000) }}",
    "replace": "{{ ('a' * 99999) | replace('a', 'b' * 99999) }}",
    "wordwrap": "{{ ('a ' * 9999999) | wordwrap(1) | wordwrap(1) | length }}" + LOOPS,
    "tojson": "{{ ([[[1] * 9999] * 9999] * 9) | tojson }}",
    "many": "{% for i in range(99999) %}{{ 'a' * 9999 }}{% endfor %}",
    "class": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals": "{{ cycler.__init__.__globals__.os.system('touch canary') }}",
    "include": "{% include '/etc/passwd' %}",
    "import": "{% import 'os' as os %}{{ os }}",
}


def _template(text: str) -> Callable[[Place], str]:
    def open_by(place: Place) -> str:
        folder = place.folder()
        write_rows(folder / _ROWS, [{"instruction": "Hi", "output": f"Hello {i}"} for i in range(24)])
        (folder / "own.jinja").write_text("{{ messages[0].content }}" + text + "{{ eos_token }}", encoding="utf-8")
        words = ["train", "chat", "--data", _ROWS, "--task.template", "own.jinja", "--data.bad_rows", "skip"]
        before = os.times()
        answer = place.flatshift(
            *words, "--backbone", "flatshift-5m", "--out", "run", "--train.precision", "fp32", cwd=folder
        )
        used = os.times().children_user - before.children_user
        if (folder / "canary").exists() or used > 60:
            return f"ran a command, or took {used:.0f} CPU-s"
        return check_sentence(answer, "task.template")

    return open_by


_A_TO_50: dict[str, Any] = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 50}
_RUNAWAY: dict[str, Any] = {"type": "Split", "pattern": {"Regex": "^(a+)+$"}, "behavior": "Isolated", "invert": False}
TOKENIZERS: dict[str, Any] = {
    "growth": {"normalizer": {"type": "Sequence", "normalizers": [_A_TO_50] * 8}},
    "growth by a regex": {
        "normalizer": {"type": "Sequence", "normalizers": [{**_A_TO_50, "pattern": {"Regex": "[a-f]"}}] * 8}
    },
    "decoder": {"decoder": {"type": "Sequence", "decoders": [_A_TO_50] * 8}},
    "runaway": {"pre_tokenizer": _RUNAWAY},
    "runaway alternatives": {"pre_tokenizer": {**_RUNAWAY, "pattern": {"Regex": "(b|bb|b+)+c"}}},
    "no regex": {"pre_tokenizer": {**_RUNAWAY, "pattern": {"Regex": "(a"}}},
}


def _tokenizer(changes: dict[str, Any]) -> Callable[[Place], str]:
    def open_by(place: Place) -> str:
        folder = place.folder()
        shutil.copytree(place.sandbox / "backbone", folder / "own")
        file = folder / "own" / "tokenizer.json"
        file.write_text(json.dumps({**json.loads(file.read_text(encoding="utf-8")), **changes}), encoding="utf-8")
        write_rows(folder / _ROWS, [{"text": f"a banana of {i}"} for i in range(24)])
        words = ["train", "language-model", "--backbone", "./own", "--data", _ROWS, "--out", "run"]
        return check_sentence(place.flatshift(*words, "--train.precision", "fp32", cwd=folder), "tokenizer")

    return open_by


def cases() -> Iterator[Case]:
    """Yield a case for each row of the tables."""
    secrets, console = partial(Case, "secrets"), partial(Case, "console")
    for address in ADDRESSES:
        yield secrets(address, _redacted(address))
    for name, words in COMMANDS.items():
        for address in GIVEN:
            yield secrets(f"{name}: {address[:4]}", _refused(words, address))
    for name in KEPT:
        yield secrets(f"{name} of a run", _kept(name))
    yield secrets("directories of earlier versions", _old)
    yield console("train", _trained)
    for name, (words, codes) in JOURNEY.items():
        yield console(f"a stranger's rows: {name}", _journey(words, codes))
    yield console("log.txt", _logged)
    yield console("report.html", _page)
    for name, words in NAMES.items():
        yield console(f"the name of {name}", _named(words, {}))
    for name, (files, words) in FILES.items():
        yield console(f"the content of {name}", _named(words, files))
    for name, code in LIBRARIES.items():
        yield console(f"libraries: {name}", _library(code))
    for name, text in TEMPLATES.items():
        yield Case("templates", name, _template(text))
    for name, changes in TOKENIZERS.items():
        yield Case("templates", f"tokenizer: {name}", _tokenizer(changes))
