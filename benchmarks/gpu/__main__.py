"""Everything that needs a GPU: parity, speed, memory, regularizers, transport, stacked cells, 4 bits.

    python -m benchmarks.gpu                              # what is missing; about 25 minutes of one H200 in all
    python -m benchmarks.gpu --minutes 9                  # as far as nine minutes reach; the same again goes on
    python -m benchmarks.gpu --rows 'speed/8b/*' --fresh  # these again, whatever is kept of them
    python -m benchmarks.gpu --list                       # the names, and what is kept

Each result is kept (benchmarks/results/gpu/measured.jsonl) as soon as there is one, and the results file written anew,
so that a run may be killed at any moment and goes on where it stopped. Nothing is fetched: backbones are the shipped
ones, or Llama shapes of 1 B, 3 B and 8 B with random weights that are made on the device. Packages that are not there
(trl with datasets, bitsandbytes, pykeops) leave rows without a figure and with the reason.

Rates are those of whole updates: batches, forward, backward, clipping, AdamW and the line in metrics.jsonl. MFU counts
the operations that LoRA takes and nothing that is computed again: a frozen weight 4 a token (it has no gradient), a
trained one 6, attention its causal half. Its bar is on the data sheet's dense bf16 peak, which is the harder of the
two; the share of the best product that was measured stands beside it.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks._harness import RESULTS
from benchmarks.gpu.measurements import Measurement, Store, still_holds
from benchmarks.gpu.runner import Run, matches

KEPT = RESULTS / "gpu" / "measured.jsonl"


def main() -> None:
    """Measure what is missing and write benchmarks/results/gpu.json."""
    from benchmarks.gpu.plan import plan

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="*", metavar="PATTERN", help="of the names of the measurements to make")
    parser.add_argument("--minutes", type=float, help="begin nothing that would not be over by then")
    parser.add_argument(
        "--fresh", action="store_true", help="forget what is kept of the measurements that --rows names"
    )
    parser.add_argument("--list", action="store_true", help="only print the names and what is kept")
    parser.add_argument("--kept", type=Path, default=KEPT, help="file that keeps what was measured")
    parser.add_argument("--out", type=Path, help="results file, if not the committed one")
    parser.add_argument("--device", default="cuda", help="cuda or cuda:N")
    parser.add_argument("--commit", help="of this tree, where it is a copy without its repository")
    chosen = parser.parse_args()
    store = Store(chosen.kept)
    if chosen.list:
        kept = store.read()
        for m in plan():
            if isinstance(m, Measurement) and matches(m.name, chosen.rows):
                held = f"kept, {kept[m.name].device}" if still_holds(m, kept, None) else "missing"
                print(f"{m.name:45} about {m.seconds:4.0f} s  {held}")
        return
    run = Run(
        plan(),
        store,
        device=chosen.device,
        pattern=chosen.rows,
        minutes=chosen.minutes,
        out=chosen.out,
        commit=chosen.commit,
    )
    run.all(fresh=chosen.fresh)


if __name__ == "__main__":
    main()
