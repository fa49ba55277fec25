"""Everything that needs a GPU: that it works, that it is right, speed, memory, regularizers, transport, 4 bits.

    python -m benchmarks.gpu --minutes 8                  # as far as eight minutes reach; the same again goes on
    python -m benchmarks.gpu                              # what is missing; about 25 minutes of one H200 in all
    python -m benchmarks.gpu --rows 'speed/8b/*' --fresh  # these again, whatever is kept of them
    python -m benchmarks.gpu --list                       # the names, and what is kept
    python -m benchmarks.gpu --rehearse                   # all of it on the CPU at toy size, kept nowhere

The order is that of worth: a minute that shows that each part works, results beside the CPU's, then 8 B shapes at 4,096
tokens, regularizers, transport, other shapes. Each result is kept (benchmarks/results/gpu/measured.jsonl) as soon as
there is one, and the results file written, so that a run may be killed at any moment. A measurement that fails is kept
with its traceback; the run continues, and the next one tries it again. Nothing is fetched: backbones are the shipped
ones, or Llama shapes of 1 B, 3 B and 8 B with random weights that are made on the device. Packages that are not there
(trl with datasets, bitsandbytes, pykeops) leave rows without a figure and with the reason.

Rates are those of whole updates: batches, forward, backward, clipping, AdamW and the line in metrics.jsonl. MFU counts
the operations that LoRA takes and nothing that is computed again: a frozen weight 4 a token (it has no gradient), a
trained one 6, attention its causal half. Its bar is on the data sheet's dense bf16 peak, which is the harder of the
two; the share of the best product that was measured stands beside it.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

from benchmarks._harness import RESULTS, ROOT, limit_threads
from benchmarks.gpu.measurements import Measurement, Store, failure, still_holds
from benchmarks.gpu.runner import Run, matches
from flatshift.finetune.compute.memory import cublas_workspace_env, expandable_segments_env

KEPT = RESULTS / "gpu" / "measured.jsonl"


def main() -> None:
    """Measure what is missing and write benchmarks/results/gpu.json."""
    os.environ |= expandable_segments_env(os.environ) | cublas_workspace_env(os.environ)  # before torch reads them
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))  # a bundle's wheels are on it
    os.environ |= {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    from benchmarks.gpu.plan import plan, rehearsed

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="*", metavar="PATTERN", help="of the names of the measurements to make")
    parser.add_argument("--minutes", type=float, help="begin nothing that would not be over by then, and end then")
    parser.add_argument("--rehearse", action="store_true", help="at toy size on the CPU, into a temporary folder")
    parser.add_argument(
        "--fresh", action="store_true", help="forget what is kept of the measurements that --rows names"
    )
    parser.add_argument("--list", action="store_true", help="only print the names and what is kept")
    parser.add_argument("--kept", type=Path, help="file that keeps what was measured, if not the committed one")
    parser.add_argument("--out", type=Path, help="results file, if not the committed one")
    parser.add_argument("--device", help="cuda (the default) or cuda:N")
    parser.add_argument("--commit", help="of this tree, where it is a copy without its repository")
    chosen = parser.parse_args()
    entries, kept_in, out, device = plan(), chosen.kept or KEPT, chosen.out, chosen.device or "cuda"
    if chosen.rehearse:
        folder = Path(tempfile.mkdtemp(prefix="flatshift-gpu-"))
        if device != "cuda" or any(path and path.resolve().is_relative_to(RESULTS) for path in (chosen.kept, out)):
            parser.error("--rehearse runs on the CPU and keeps nothing among the results; leave the other flag out")
        entries, device = rehearsed(entries), "cpu"
        limit_threads(1)  # at toy sizes threads that wait for one another cost more than they compute
        kept_in, out = chosen.kept or folder / "measured.jsonl", out or folder / "gpu.json"
    store = Store(kept_in)
    if chosen.list:
        previous = store.read()
        for m in entries:
            if isinstance(m, Measurement) and matches(m.name, chosen.rows):
                held = f"kept, {previous[m.name].device}" if still_holds(m, previous, None) else "missing"
                if failure(m, previous, None) is not None:
                    held = f"failed, {previous[m.name].device}"
                print(f"{m.name:45} about {m.seconds:4.0f} s  {held}")
        return
    run = Run(entries, store, device, chosen.rows, chosen.minutes, out, chosen.commit)
    run.all(fresh=chosen.fresh)
    if chosen.rehearse:
        print("rehearsed at toy size on the CPU: figures and bars mean nothing, only that nothing failed")
        raise SystemExit(1 if run.failed("cpu") else 0)


if __name__ == "__main__":
    main()
