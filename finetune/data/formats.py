"""Readers of file formats as streams of records: JSONL, CSV and TSV (also .gz .xz .zst), Parquet, `datasets`.

Every reader yields `FileRecord(line, place, values, problem)`: one object of the file, or what is wrong with it. Memory
is constant in the number of records. Only problems of a whole file (missing, corrupt, unknown format) are raised; the
caller refuses or skips bad records.
"""

from __future__ import annotations

import codecs
import contextlib
import csv
import gzip
import itertools
import json
import lzma
import re
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from ..errors import UserError, first_error_line, shorten
from .remote import DataFile, RemoteFile

JSONL = (".jsonl", ".ndjson", ".json")
DELIMITED = (".csv", ".tsv")
TEXTS = (".txt", ".md")
COMPRESSIONS = (".gz", ".xz", ".zst")
SUPPORTED = (
    "JSONL (.jsonl .ndjson .json), an array of objects (.json), .csv, .tsv, one document a file (.txt .md) (each also "
    ".gz .xz .zst) and .parquet"
)
SAMPLE = "sample:"
HUB = "hub:"
HUB_FORM = "hub:NAME[CONFIG]@REVISION:SPLIT"

SAVED_DATASET = ("state.json", "dataset_dict.json")
"""Files that identify a directory saved by `datasets`."""
_ABOUT = ("dataset_info.json", "dataset_infos.json")
"""Files about the data next to them, of `datasets`, of the hub and of LLaMA-Factory."""
LONGEST_LINE = 1 << 26
"""Maximum bytes per line: 64 MiB, about ten million words."""
DEEPEST = 64
_CHUNK = 1 << 18
_File = TypeVar("_File", Path, RemoteFile)
_BLANK = re.compile(r"[ \t\r\n]*")
_WRAPPED = re.compile(r'\{\s*"data"\s*:\s*\[\s*\{')
"""Start of a file whose rows are an array under `data`. It needs an object in the array, so that a JSONL line with
another column `data` does not match."""
_OPEN = re.compile(r'\[|\{\s*"data"\s*:\s*\[')


class BrokenFile(UserError):
    """A file that is truncated, corrupt or unreadable. With `bad_rows: skip`, the rest of it counts as one bad row."""


class FileRecord(NamedTuple):
    """A record of a file."""

    line: int
    """0-based line of a JSONL record (blank lines count), or ordinal of any other record; part of its automatic id."""
    place: int
    """1-based line at which the record starts (JSONL, CSV), or its ordinal; for messages."""
    values: dict[str, Any]
    problem: str | None = None
    """Error in this record, whose `values` are then empty."""
    nulls: int = 0
    """Number of null-valued keys, added by Arrow to objects inside lists, that were removed from `values`."""


def iter_records(path: DataFile) -> Iterator[FileRecord]:
    """Return an iterator over the records of `path` in file order. Raises UserError if the file is missing, unreadable,
    corrupt or truncated, or of an unknown format."""
    kind, _ = split_suffix(path)
    if kind == "datasets":
        return _read_dataset(path)
    if kind == ".parquet":
        return _read_parquet(path)
    if kind in DELIMITED:
        return _read_csv(path, kind)
    if kind in TEXTS:
        return _read_document(path)
    return _read_json_array(path) if _is_json_array(path, kind) else _read_jsonl(path)


def count_records(path: DataFile) -> int:
    """Count the records of `path`, including bad ones, without parsing them if possible."""
    kind, _ = split_suffix(path)
    if kind == ".parquet":
        with _open_parquet(path) as file:
            return int(file.metadata.num_rows)
    if kind in TEXTS:
        return 1
    if kind in JSONL and not _is_json_array(path, kind):
        return sum(1 for line in _read_lines(path) if line.strip(b" \t\r\n\xef\xbb\xbf"))
    return sum(1 for _ in iter_records(path))


def split_suffix(path: DataFile) -> tuple[str, str]:
    """Return format and compression of a path: `('.jsonl', '.xz')`, `('.csv', '')`, `('datasets', '')`. Raises
    UserError for neither a known suffix nor a saved `datasets` directory."""
    if isinstance(path, Path):
        if str(path).startswith(HUB) or (path.is_dir() and is_saved_dataset(path)):
            return "datasets", ""
        if path.is_dir():
            raise UserError(f"{path} is a directory; name its files, for example {path}/*.jsonl")
    suffixes = [suffix.lower() for suffix in path.suffixes]
    compression = suffixes.pop() if suffixes and suffixes[-1] in COMPRESSIONS else ""
    kind = suffixes[-1] if suffixes else ""
    if kind not in (*JSONL, *TEXTS, *DELIMITED) and (kind != ".parquet" or compression):
        raise UserError(f"{path}: unknown format {(kind + compression) or 'without a suffix'!r}; known are {SUPPORTED}")
    return kind, compression


def select_known_format(directory: str, entries: Sequence[_File]) -> list[_File]:
    """Return the `entries` of a directory that are files in a known format; hidden files and those about the data are
    ignored, as are text files next to files of records.

    Raises UserError if there is none, or there are several formats (one of them may not be data).
    """
    groups: dict[str, list[_File]] = {}
    for path in entries:
        if path.is_file() and not path.name.startswith((".", "_")) and path.name not in _ABOUT:
            with contextlib.suppress(UserError):
                kind, _ = split_suffix(path)
                group = "JSONL" if kind in JSONL else "text" if kind in TEXTS else kind
                groups.setdefault(group, []).append(path)
    if len(groups) > 1:
        groups.pop("text", None)  # a README next to the data
    if len(groups) > 1:
        raise UserError(
            f"{directory} holds {' and '.join(sorted(groups))} files; name those that are meant, as {directory}/*.jsonl"
        )
    files = next(iter(groups.values()), [])
    if all(path.name.lower().startswith("readme") for path in files):  # of a data set whose files are in folders
        fix = f"known are {SUPPORTED}; a pattern, as {directory}/**/*.parquet, names files further down"
        raise UserError(f"{directory} is a directory without a file to read; {fix}")
    return files


def is_document_file(path: DataFile) -> bool:
    """Return True if the file is a single document, by its name."""
    with contextlib.suppress(UserError):
        return split_suffix(path)[0] in TEXTS
    return False


def is_saved_dataset(path: Path) -> bool:
    """Return True if the directory was saved by `datasets`."""
    return any((path / name).is_file() for name in SAVED_DATASET)


@contextlib.contextmanager
def _translate_read_errors(path: DataFile) -> Iterator[None]:
    try:
        yield
    except (EOFError, gzip.BadGzipFile, lzma.LZMAError, zlib.error) as error:
        raise BrokenFile(f"{path}: corrupt or truncated file ({error}); fetch or compress it again") from error
    except MemoryError as error:
        raise UserError(
            f"{path}: unpacking it takes more memory than there is; compress it again at a lower level"
        ) from error
    except OSError as error:
        raise BrokenFile(f"{path}: cannot be read ({error.strerror or error})") from error


def _read_chunks(path: DataFile) -> Iterator[bytes]:
    _, compression = split_suffix(path)
    if compression == ".zst":
        yield from _read_zstd_chunks(path)
        return
    openers: dict[str, Any] = {".gz": gzip.open, ".xz": lzma.open}
    unpack = openers.get(compression, contextlib.nullcontext)
    with _translate_read_errors(path), path.open("rb") as packed, unpack(packed) as handle:
        while chunk := handle.read(_CHUNK):
            yield chunk


def _read_zstd_chunks(path: DataFile) -> Iterator[bytes]:
    try:
        import zstandard
    except ImportError as error:
        raise UserError(f"{path}: reading .zst needs the zstandard package: pip install 'flatshift[zstd]'") from error
    # stream_reader would treat a truncated frame as the end of the file; decompressobj reports it.
    with _translate_read_errors(path), path.open("rb") as handle:
        decompressor = None
        while data := handle.read(_CHUNK):
            while data:
                if decompressor is None:
                    decompressor = zstandard.ZstdDecompressor().decompressobj()
                try:
                    out = decompressor.decompress(data)
                except zstandard.ZstdError as error:
                    raise EOFError(str(error)) from error
                if out:
                    yield out
                data = decompressor.unused_data if decompressor.eof else b""
                if decompressor.eof:
                    decompressor = None
        if decompressor is not None:
            raise EOFError("it ends inside a zstd frame")


def _read_lines(path: DataFile) -> Iterator[bytes]:
    """Yield physical lines with their line endings. A UTF-8 byte-order mark is removed; UTF-16 is refused."""
    begun: list[bytes] = []
    number, size = 1, 0
    for index, chunk in enumerate(_read_chunks(path)):
        *lines, remainder = (_remove_bom(chunk, path) if index == 0 else chunk).split(b"\n")
        if lines:
            yield b"".join((*begun, lines[0], b"\n"))
            for line in lines[1:]:
                yield line + b"\n"
            number, begun, size = number + len(lines), [], 0
        if remainder:  # join once the line is complete; joining per chunk would take quadratic time
            begun.append(remainder)
            size += len(remainder)
        if size > LONGEST_LINE:
            array = begun[0].lstrip().startswith(b"[")
            fix = "an array of objects is read from a file named .json" if array else "cut the record into several"
            raise UserError(f"{path}:{number}: a line of more than {LONGEST_LINE:,} bytes; {fix}")
    if begun:
        yield b"".join(begun)


def _remove_bom(content: bytes, path: DataFile) -> bytes:
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise UserError(f"{path}: is UTF-16; save it as UTF-8")
    return content.removeprefix(codecs.BOM_UTF8)


def _read_jsonl(path: DataFile) -> Iterator[FileRecord]:
    repeated: list[str] = []
    build_object = partial(_build_object, repeated)
    for number, line in enumerate(_read_lines(path)):
        if line.isspace():
            continue
        problem = None
        value: Any = None
        repeated.clear()
        try:
            value = json.loads(line.rstrip(b"\r\n").decode("utf-8"), object_pairs_hook=build_object)
            if repeated:
                problem = repeated[0]
            elif line.count(b"[") + line.count(b"{") > DEEPEST and is_too_deep(value):
                problem = _TOO_DEEP
        except UnicodeDecodeError as error:
            problem = f"not valid UTF-8 (byte {error.start + 1} of the line)"
        except json.JSONDecodeError as error:
            start = line.strip() if number == 0 else b""
            if start == b"{" or start.startswith(b"["):
                kind = "object over several lines;" if start == b"{" else "array; name the file .json, or"
                raise UserError(f"{path}:1: a JSON {kind} write one object a line") from error
            problem = f"not valid JSON ({error.msg.removesuffix(' at')} at column {error.colno})"
        except RecursionError:
            problem = _TOO_DEEP
        except ValueError:  # the only other error of json.loads
            problem = "a number of more than 4,300 digits"
        if problem is None and not isinstance(value, dict):
            problem = _describe_json(value)
        yield FileRecord(number, number + 1, {} if problem else value, problem)


def _read_document(path: DataFile) -> Iterator[FileRecord]:
    """Yield a plain text file as one record with column `text`, with line endings normalised and the last one
    removed."""
    parts: list[bytes] = []
    for chunk in _read_chunks(path):
        parts.append(chunk)
        if sum(map(len, parts)) > LONGEST_LINE:
            raise UserError(f"{path}: a document of more than {LONGEST_LINE:,} bytes; cut it into several files")
    content = _remove_bom(b"".join(parts), path)
    try:
        text = content.decode("utf-8").replace("\r\n", "\n").removesuffix("\n")
    except UnicodeDecodeError as error:
        yield FileRecord(0, 1, {}, f"not valid UTF-8 (byte {error.start + 1} of the file)")
        return
    yield FileRecord(0, 1, {"text": text})


def _is_json_array(path: DataFile, kind: str) -> bool:
    """Return True if a `.json` file holds one array, or `{"data": […]}`, not one object per line."""
    if kind != ".json":
        return False
    head = b""
    for chunk in _read_chunks(path):
        head += chunk
        if len(head.removeprefix(codecs.BOM_UTF8).strip()) >= 1 << 10:
            break
    bare = head.removeprefix(codecs.BOM_UTF8).lstrip()
    return bare.startswith(b"[") or _WRAPPED.match(bare.decode("utf-8", errors="replace")) is not None


def _read_json_array(path: DataFile) -> Iterator[FileRecord]:
    """Yield the objects of one JSON array, or of one under `data`, decoded one by one in constant memory. Malformed
    JSON breaks off the whole file, not only a record, because where the next record starts is unknown."""
    unicode = codecs.getincrementaldecoder("utf-8-sig")()
    repeated: list[str] = []
    decoder = json.JSONDecoder(object_pairs_hook=partial(_build_object, repeated))
    chunks = _read_chunks(path)
    text, at, line, ended = "", 0, 1, False

    def read(size: int) -> None:
        """Read at least `size` more characters, or the rest of the file, and discard what was consumed."""
        nonlocal text, at, ended
        parts, length = [text[at:]], 0
        while length < size and not ended:
            chunk = next(chunks, b"")
            ended = not chunk
            try:
                parts.append(unicode.decode(chunk, ended))
            except UnicodeDecodeError:
                raise BrokenFile(f"{path}:{line}: not valid UTF-8; save it as UTF-8") from None
            length += len(parts[-1])
        text, at = "".join(parts), 0

    def token() -> str:
        """Return the next non-blank character without consuming it; "" at the end of the file."""
        nonlocal at, line
        while True:
            start, at = at, _BLANK.match(text, at).end()  # type: ignore[union-attr]
            line += text.count("\n", start, at)
            if at < len(text) or ended:
                return text[at : at + 1]
            read(1)

    def element() -> tuple[Any, int, str | None]:
        """Return the value at `at`, the index after it, and its problem."""
        while True:
            try:
                repeated.clear()
                value, end = decoder.raw_decode(text, at)
                if end < len(text) or ended:  # otherwise a number may continue in the next chunk
                    return value, end, repeated[0] if repeated else None
            except json.JSONDecodeError as error:
                if ended:
                    position = line + text.count("\n", at, error.pos)
                    raise BrokenFile(f"{path}:{position}: not valid JSON ({error.msg})") from None
            except (RecursionError, ValueError):
                reason = "an object nested too deep, or a number of more than 4,300 digits"
                raise BrokenFile(f"{path}:{line}: {reason}") from None
            if len(text) - at > LONGEST_LINE:
                raise UserError(f"{path}:{line}: an object that does not end within {LONGEST_LINE:,} characters")
            read(max(_CHUNK, len(text) - at))  # double the buffer, so that a long object is decoded only a few times

    token()
    while (opening := _OPEN.match(text, at)) is None and not ended:
        read(_CHUNK)
    wrapped = text[at : at + 1] == "{"
    at = opening.end()  # type: ignore[union-attr]
    for ordinal in itertools.count():
        if (following := token()) == "]" and not ordinal:
            break
        if not following:
            raise BrokenFile(f"{path}:{line}: the JSON array does not end; fetch the file again")
        value, end, problem = element()
        if problem is None and not isinstance(value, dict):
            problem = _describe_json(value)
        elif problem is None and is_too_deep(value):
            problem = _TOO_DEEP
        yield FileRecord(ordinal, line, {} if problem else value, problem)
        line += text.count("\n", at, end)
        at = end
        if (following := token()) == "]":
            break
        if following != ",":
            raise BrokenFile(f"{path}:{line}: not valid JSON (a comma or ] is missing between objects)")
        at += 1
    at += 1
    if wrapped:
        while not ended:
            read(_CHUNK)
        try:
            remainder = text[at:].lstrip()
            json.loads("{" + (remainder if remainder.startswith("}") else remainder.removeprefix(",")))
        except ValueError:
            raise BrokenFile(f"{path}:{line}: not valid JSON behind the rows of 'data'") from None
        return
    if token():
        raise BrokenFile(f"{path}:{line}: something follows the JSON array; keep one array in a file")


_TOO_DEEP = f"nested deeper than {DEEPEST} levels"


def _build_object(repeated: list[str], pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object; append a message to `repeated` if it has a key twice, so that its value is ambiguous."""
    values = dict(pairs)
    if len(values) < len(pairs):
        counts = Counter(key for key, _ in pairs)
        key = next(key for key, _ in pairs if counts[key] > 1)
        repeated.append(f"the key {shorten(key)!r} is there twice in one object; keep one of them")
    return values


def is_too_deep(value: Any) -> bool:
    """Return True if lists and objects are nested deeper than `DEEPEST` levels."""
    level = [value]
    for _ in range(DEEPEST + 1):
        inner: list[Any] = []
        for node in level:
            inner.extend(node.values() if isinstance(node, dict) else node if isinstance(node, list) else ())
        level = [node for node in inner if isinstance(node, dict | list)]
        if not level:
            return False
    return True


def _describe_json(value: Any) -> str:
    names = {list: "array", str: "string", bool: "boolean", int: "number", float: "number"}
    return f"a JSON {names.get(type(value), 'null')}, not an object with columns"


def _find_delimiter(header: str) -> str:
    """Return what separates a header: a comma, else a semicolon, as many spreadsheets write, else a tab."""
    return next((mark for mark in ",;\t" if mark in re.sub('"[^"]*"', "", header)), ",")


def _read_csv(path: DataFile, kind: str) -> Iterator[FileRecord]:
    # Undecodable bytes become lone surrogates, so that one bad record does not end the file.
    lines, ahead = itertools.tee(line.decode("utf-8", errors="surrogateescape") for line in _read_lines(path))
    delimiter = "\t" if kind == ".tsv" else _find_delimiter(next(filter(str.strip, ahead), ""))
    del ahead  # `tee` would keep the whole file for it
    csv.field_size_limit(LONGEST_LINE)  # the csv module's default of 128 KiB is too small for documents
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    header: list[str] | None = None
    ordinal = 0
    while True:
        line_number = reader.line_num + 1
        try:
            fields = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            if header is None:
                raise UserError(f"{path}:{line_number}: not a valid header row ({error})") from error
            yield FileRecord(ordinal, line_number, {}, f"not valid CSV ({error})")
            ordinal += 1
            continue
        if not fields:
            continue
        if header is None:
            header = fields
            _check_unique_columns(header, f"{path}:{line_number}: the header")
            continue
        problem = None
        if len(fields) != len(header):
            problem = f"{len(fields)} fields where the header has {len(header)}"
        elif any(has_lone_surrogate(value) for value in fields):
            problem = "not valid UTF-8"
        yield FileRecord(ordinal, line_number, {} if problem else dict(zip(header, fields, strict=True)), problem)
        ordinal += 1


def has_lone_surrogate(text: str) -> bool:
    """Return True if the string has a lone surrogate, which UTF-8 cannot encode and no tokenizer accepts."""
    try:  # a quarter of the time of a search; every text that is read comes here
        return not text.isascii() and not text.encode("utf-8")
    except UnicodeEncodeError:
        return True


def _read_parquet(path: DataFile) -> Iterator[FileRecord]:
    with _open_parquet(path) as file:
        _check_unique_columns(file.schema_arrow.names, f"{path}: the table")
        ordinal = 0
        # One row group at a time; over several row groups Arrow would keep all their bytes in memory.
        for group in range(file.num_row_groups):
            for batch in file.iter_batches(batch_size=1024, row_groups=[group]):
                for values in _read_arrow_rows(batch):
                    if isinstance(values, str):
                        yield FileRecord(ordinal, ordinal + 1, {}, values)
                    else:
                        yield _build_arrow_record(ordinal, values)
                    ordinal += 1


@contextlib.contextmanager
def _open_parquet(path: DataFile) -> Iterator[Any]:
    """Open a Parquet file. Raises UserError if it is invalid, also while it is read."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    # Arrow opens a path itself, or for an object of a store a handle that reads the requested parts.
    source: Any = path.open("rb") if isinstance(path, RemoteFile) else contextlib.nullcontext(path)
    try:
        with _translate_read_errors(path), source as file, pq.ParquetFile(file) as parquet:
            yield parquet
    except UserError:
        raise
    except (pa.ArrowException, ValueError, LookupError, ArithmeticError) as error:  # e.g. bad column names
        raise BrokenFile(f"{path}: not a valid Parquet file ({first_error_line(error)})") from error


def _read_arrow_rows(batch: Any) -> Iterator[Any]:
    """Yield the rows of a batch; instead of a row that Python cannot represent, a message."""
    try:
        yield from batch.to_pylist()
        return
    except (ValueError, ArithmeticError):  # invalid UTF-8, a date before year 1 or a bad decimal: find the rows below
        pass
    for row in range(batch.num_rows):
        try:
            yield from batch.slice(row, 1).to_pylist()
        except UnicodeDecodeError:
            yield "not valid UTF-8"
        except (ValueError, ArithmeticError) as error:
            yield f"holds a value that cannot be read ({first_error_line(error)})"


def _check_unique_columns(names: Sequence[str], context: str) -> None:
    if len(set(names)) < len(names):
        repeated = min(name for name, count in Counter(names).items() if count > 1)
        raise UserError(f"{context} has the column {shorten(repeated)!r} twice; rename one")


def _build_arrow_record(ordinal: int, values: dict[str, Any]) -> FileRecord:
    """Return a record with decimals as plain numbers, and without the null-valued keys of objects in its lists (turns,
    tools). Arrow gives every object of a column the keys of all others, so an argument of one tool appears, as null, in
    the calls of all tools. Original nulls cannot be distinguished from these."""
    nulls = 0
    for name, value in values.items():
        if isinstance(value, Decimal):
            values[name] = int(value) if value == value.to_integral_value() else float(value)
        elif isinstance(value, list) and isinstance(next((item for item in value if item is not None), None), dict):
            values[name], removed = _remove_nulls(value)
            # null keys of a turn itself (`tool_calls`, `name`) are expected, so they are not counted
            nulls += removed - sum(field is None for item in value if item is not None for field in item.values())
    return FileRecord(ordinal, ordinal + 1, values, nulls=nulls)


def _remove_nulls(value: Any) -> tuple[Any, int]:
    """Return `value` without null-valued keys in any of its objects, and the number of these keys."""
    if isinstance(value, dict):
        items = {key: _remove_nulls(item) for key, item in value.items() if item is not None}
        removed = len(value) - len(items) + sum(count for _, count in items.values())
        return {key: item for key, (item, _) in items.items()}, removed
    if isinstance(value, list):
        parts = [_remove_nulls(item) for item in value]
        return [item for item, _ in parts], sum(count for _, count in parts)
    return value, 0


class HubName(NamedTuple):
    """Parts of `hub:NAME[CONFIG]@REVISION:SPLIT`; all but NAME are optional."""

    source: str
    config: str | None = None
    revision: str | None = None
    split: str | None = None

    @classmethod
    def read(cls, name: str) -> HubName:
        """Parse `name`. Raises UserError if it does not have this form."""
        match = _HUB_NAME.fullmatch(name)
        if match is None:
            raise UserError(f"{name}: not the name of a hub data set; write {HUB_FORM}, all but NAME may be left out")
        return cls(match["source"], match["config"], match["revision"] or None, match["split"] or None)

    def __str__(self) -> str:
        config = f"[{self.config}]" if self.config else ""
        revision = f"@{self.revision}" if self.revision else ""
        return f"{HUB}{self.source}{config}{revision}" + (f":{self.split}" if self.split else "")


_HUB_NAME = re.compile(
    r"hub:(?P<source>[^\[\]@:]+)(?:\[(?P<config>[^\[\]]+)\])?(?:@(?P<revision>[^:]*))?(?::(?P<split>.*))?"
)


def _read_dataset(path: DataFile) -> Iterator[FileRecord]:
    name = str(path)
    hub_name = HubName.read(name) if name.startswith(HUB) else None
    try:
        import datasets
    except ImportError as error:
        raise UserError(f"{path}: needs the datasets package: pip install 'flatshift[hf]'") from error
    if hub_name is not None:
        rows: Any = _open_hub_dataset(datasets, hub_name)
    else:
        try:
            rows = datasets.load_from_disk(name)
        except Exception as error:  # missing or truncated parts raise many exception types
            raise UserError(
                f"{name}: this saved data set cannot be read ({first_error_line(error)}); save it again"
            ) from error
    if isinstance(rows, dict):
        splits = ", ".join(f"{name}{':' if hub_name is not None else '/'}{split}" for split in rows)
        raise UserError(f"{name} has several splits; name one: {splits}")
    stream = iter(rows)
    for ordinal in itertools.count():
        try:
            values = next(stream)
        except StopIteration:
            return
        except Exception as error:  # network errors may end a stream at any record
            reason = first_error_line(error)
            raise UserError(f"{name}: the data set breaks off at record {ordinal + 1} ({reason})") from error
        yield _build_arrow_record(ordinal, dict(values))


def _open_hub_dataset(package: Any, name: HubName) -> Any:
    config = {} if name.config is None else {"name": name.config}
    try:
        return package.load_dataset(name.source, split=name.split, revision=name.revision, streaming=True, **config)
    except Exception as error:  # offline, unknown name, unknown split: many exception types
        first, second = first_error_line(error), "".join(str(error).splitlines()[1:2])
        configs = re.findall(r"'([^']+)'", second) if first.startswith("Config name is missing") else []
        if configs:
            names = ", ".join(str(name._replace(config=config)) for config in configs)
            raise UserError(f"{name} has several configurations; name one: {names}") from error
        raise UserError(f"{name}: this hub data set cannot be opened ({first})") from error
