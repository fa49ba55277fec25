"""`flatshift predict` beside transformers' pipeline over the merged model: CPU time, and whether both say the same.

    python -m benchmarks.predict

A classifier with an adapter of rank 8 on the shipped encoder, trained for a few steps, asked about 800 texts of the
shipped samples, in float32 on one thread. The peer is `pipeline("text-classification")` over what `flatshift merge`
writes, row by row as its documentation begins, and in batches of 32 in the order of the rows. Both have their model
loaded; rounds A B B A in one process.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from transformers import pipeline

from benchmarks._harness import Benchmark, limit_threads
from flatshift.experiments.workflows.predict import Predictor
from flatshift.finetune.data.rows import read_rows

ROWS, BATCH, ROUNDS = 800, 32, 2
FLAGS = f"""--backbone flatshift-encoder-3m --train.steps 60 --train.precision fp32 --train.threads 1
    --regularizer.kind plain --train.eval_every 0 --data.train.limit 400 --data.test.limit 20
    --train.max_length 128 --eval.bootstrap 20 --eval.batch_size {BATCH}"""


def texts() -> list[str]:
    """Texts of many lengths: requests to a bank, and sentences of articles."""
    half = ROWS // 2
    return [
        row.values["text"] for name in ("banking", "scicite") for row in list(read_rows([f"sample:{name}/test"]))[:half]
    ]


def main() -> None:
    """Run and write benchmarks/results/predict.json."""
    from flatshift.cli import run

    limit_threads(1)
    bench = Benchmark("predict", packages=("torch", "transformers", "peft"))
    with tempfile.TemporaryDirectory() as name:
        trained, merged = Path(name) / "run", Path(name) / "merged"
        if run(["train", "classify", *FLAGS.split(), "--out", str(trained)]) or run(
            ["merge", str(trained), "--dtype", "float32", "--out", str(merged)]
        ):
            raise SystemExit("the run to be asked could not be made")
        limit_threads(1)
        asked = texts()
        ours, theirs = Predictor(trained), pipeline("text-classification", str(merged), device="cpu")
        limit_threads(1)
        results: dict[str, Any] = {}

        def peer(batch: int) -> Any:
            return lambda: results.update(theirs=theirs(asked, batch_size=batch, truncation=True, max_length=128))

        def mine() -> None:
            results.update(ours=ours(asked))

        for how, batch, bar in (("row by row", 1, 1 / 3), (f"in batches of {BATCH}", BATCH, 1.0)):
            mine(), peer(batch)()
            bench.compare(
                f"labels of {ROWS} texts, beside the pipeline {how}",
                "CPU-s",
                mine,
                peer(batch),
                "transformers pipeline on the merged model",
                rounds=ROUNDS,
                maximum=bar,
            )
        pairs = list(zip(results["ours"], results["theirs"], strict=True))
        what = f"other labels than the pipeline's, of {ROWS}"
        bench.row(what, "labels", ours=sum(a["label"] != b["label"] for a, b in pairs), exactly=0)
        what = "largest difference of a label's probability"
        bench.row(what, "probability", ours=max(abs(a["probability"] - b["score"]) for a, b in pairs), maximum=1e-4)
    bench.finish()


if __name__ == "__main__":
    main()
