"""Writer of one feature shard per file of documents, for any data engine; a step of a datatrove pipeline.

    LocalPipelineExecutor([JsonlReader("pool"), ShardWriter("features", HashedNgrams())], tasks=files, …).run()
    seal("features")

datatrove takes any callable of (documents, rank, world_size) as a step; it is not imported here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from flatshift.selection.errors import SelectionError
from flatshift.selection.features.cache import atomic_file

_TEXTS = 512


class Document(Protocol):
    """Document as given by datatrove's readers."""

    text: str
    id: str
    metadata: dict[str, Any]


class ShardWriter:
    """Writes `part-<rank>.npy` and `part-<rank>.ids` into a directory for `seal`, and passes the documents on.

    directory: of the shards. embed: texts → (n, dim), the same in every task; it is pickled for them. dtype: of the
    stored rows. ids: also write ids, so that a shuffled shard can be matched later.

    The rows of one task are held in memory. Both files are written atomically, rows last; a task that runs again writes
    the same files again. If several tasks share the work, each has to read one file, so that the order of shards is
    that of the files.

    Raises SelectionError for a task that reads a second file while there are other tasks, an id with a line break, and
    features of another number of rows.
    """

    def __init__(
        self,
        directory: str | Path,
        embed: Callable[[Sequence[str]], np.ndarray],
        *,
        dtype: Literal["float16", "float32", "float64"] = "float32",
        ids: bool = True,
    ):
        self.directory, self.embed, self.dtype, self.ids = Path(directory).absolute(), embed, dtype, ids

    def __call__(self, documents: Iterable[Document], rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        """Yield the documents of a task, and write its shard at their end."""
        rows: list[np.ndarray] = []
        names: list[str] = []
        file: str | None = None
        stream = iter(documents)
        while some := list(islice(stream, _TEXTS)):
            for document in some:
                here = document.metadata.get("file_path")
                if world_size > 1 and file is not None and here != file:
                    raise SelectionError(
                        f"task {rank} of {world_size} reads {file} and {here}; give the executor as many tasks as "
                        "there are files, so that shards follow one another as the files do"
                    )
                file = here
                if self.ids and "\n" in document.id:
                    raise SelectionError(f"{here}: the id {document.id!r} has a line break; write ids without one")
            made = np.asarray(self.embed([document.text for document in some]), dtype=self.dtype)
            if made.ndim != 2 or len(made) != len(some):
                raise SelectionError(f"embed gave {made.shape} for {len(some)} texts; it must give a row for each")
            rows.append(made)
            names += [document.id for document in some]
            yield from some
        if rows:
            self._write(f"part-{rank:05d}", np.concatenate(rows), names)

    def _write(self, name: str, rows: np.ndarray, names: list[str]) -> None:
        if self.ids:
            with atomic_file(self.directory / f"{name}.ids") as handle:
                handle.write("".join(f"{one}\n" for one in names).encode())
        with atomic_file(self.directory / f"{name}.npy") as handle:
            np.save(handle, rows, allow_pickle=False)
