"""Segments of a side, each tokenized to one Arrow file, in as many processes as memory allows.

A segment's bounds depend on the file alone: finished work survives a killed stage, and any number of workers gives the
same files. Each file keeps the lines of its rows, so that a step's rows are found by file and line.
"""

from __future__ import annotations

import functools
import gc
import json
import math
import multiprocessing
import os
import threading
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from baton import machine
from baton.data import encoding, preview
from baton.data.encoding import Row
from baton.data.fitting import Fitting, TemplateErrors
from baton.errors import BatonError, RowError
from baton.models import loading, train_rows
from baton.recipe.data import Data
from baton.recipe.recipe import Recipe
from baton.runs.versions import FORMATS

if TYPE_CHECKING:
    import pyarrow as pa
    from transformers import PreTrainedTokenizerBase


class Written(NamedTuple):
    """Sequences of a written file, and tokens of all its columns of tokens."""

    rows: int = 0
    tokens: int = 0


def write_rows(path: str, batches: Iterable[list[Row]], *, wide: bool = False) -> Written:
    """Writes rows as an Arrow stream that `datasets` maps from disk, all with the same columns; no file without rows.

    `wide` prompts may hold more than messages of role and content: see `train_rows.message_kind`.
    """
    batches = ([train_rows.stored(row) for row in batch] for batch in batches) if wide else batches
    return _stream(path, (_table(batch, wide=wide) for batch in batches))


def write_packed(path: str, batches: Iterable[list[Row]], data: Data, *, is_all: bool) -> Written:
    import pyarrow as pa

    tables = [_table([{name: row[name] for name in ("input_ids", "labels")} for row in batch]) for batch in batches]
    return _stream(path, [train_rows.pack_rows(pa.concat_tables(tables), data, is_all=is_all)]) if tables else Written()


def _stream(path: str, tables: Iterable[pa.Table]) -> Written:
    import pyarrow as pa

    rows = tokens = 0
    writer: pa.RecordBatchStreamWriter | None = None
    try:
        for table in tables:
            writer = writer or pa.ipc.new_stream(path, table.schema)
            writer.write_table(table, max_chunksize=1000)
            rows += len(table)
            tokens += _tokens(table)
    finally:
        if writer:
            writer.close()
    return Written(rows, tokens)


def _tokens(table: pa.Table) -> int:
    import pyarrow.compute as pc

    if "length" in table.column_names:
        return int(pc.sum(table["length"]).as_py())
    ids = [name for name in table.column_names if name.endswith("_ids")]
    return sum(int(pc.sum(pc.list_value_length(table[name])).as_py() or 0) for name in ids)


def _table(rows: Sequence[Row], *, wide: bool = False) -> pa.Table:
    import pyarrow as pa

    kinds = {name: _kind(name, value, wide=wide) for name, value in rows[0].items()}
    return pa.table({name: pa.array([row[name] for row in rows], type=kind) for name, kind in kinds.items()})


def _kind(name: str, value: Any, *, wide: bool) -> pa.DataType:
    """Returns a column's type by its name and first value: an empty list does not show its members' type."""
    import pyarrow as pa

    if name.endswith("_ids") or name == "labels":
        return pa.list_(pa.int32())
    if isinstance(value, list):
        return pa.list_(train_rows.message_kind(wide=wide))
    if wide and name == train_rows.TOOLS:
        return pa.string()
    return {str: pa.string(), bool: pa.bool_(), int: pa.int32()}[type(value)]


class Origins:
    """Lines of a segment's rows in the split, and their lengths before `packing`: they lead from a step to rows."""

    def __init__(self, first_line: int) -> None:
        self._first_line = first_line
        self._lines, self._lengths = array("l"), array("l")

    def add(self, line: int, row: Row) -> None:
        self._lines.append(line)
        self._lengths.append(len(row.get("input_ids", ())))

    @property
    def are_plain(self) -> bool:
        """Whether each row's place is that of its line."""
        return all(line == place for place, line in enumerate(self._lines, self._first_line))

    def save(self, path: str) -> str:
        """Writes a line's number and a length for each row, and returns the file."""
        import numpy as np

        np.save(path, np.array([self._lines, self._lengths], dtype=np.int64).T)
        return path


LEAST, MOST, SHARE = 2**20, 2**24, 64
"""Bytes of text in a segment: a 64th of the file, at least 1 MiB, at most 16 MiB, which give 16 to 64 MiB of tokens."""
BATCH_ROWS, BATCH_BYTES = 1000, 2**22  # lines, and their bytes, tokenized at once


@dataclass(frozen=True, kw_only=True)
class SideSegment:
    """Lines of a file."""

    side: str
    index: int  # within the side, from 0
    path: str
    start: int  # in bytes
    end: int
    first_line: int  # from 1

    @property
    def name(self) -> str:
        return f"{self.side}-{self.index:05d}"

    @property
    def is_all(self) -> bool:
        return self.start == 0 and self.end == os.path.getsize(self.path)


@dataclass(frozen=True, kw_only=True)
class Made:
    """A tokenized segment: its local files and counts.

    Files, by kind: `arrow` where rows are left, `dropped` where some are not, `lines` where the rows' places do not
    tell their lines, and of a side's first segment `seen`, its first rows as the model sees them. Figures, as plain
    values: `first_line`, the counts `rows`, `tokens`, `truncated` and `dropped`, `refused`, `lengths`, and of a side's
    first segment the `first` sequences.
    """

    name: str
    files: dict[str, str]
    figures: dict[str, object]


def cut(path: str, side: str) -> list[SideSegment]:
    # A function of the file alone: a stage that was started again cuts the same segments, and finds by name which of
    # them are made.
    size = min(max(os.path.getsize(path) // SHARE, LEAST), MOST)
    segments: list[SideSegment] = []
    start, line = 0, 1
    with open(path, "rb") as file:
        while block := file.read(size):
            rest = b"" if block.endswith(b"\n") else file.readline()
            end = start + len(block) + len(rest)
            segments.append(
                SideSegment(side=side, index=len(segments), path=path, start=start, end=end, first_line=line)
            )
            line += block.count(b"\n") + rest.count(b"\n")
            start = end
    return segments


def make(
    segment: SideSegment,
    recipe: Recipe,
    tokenizer_folder: str,
    folder: str,
    *,
    wide: bool = False,
    number: int = FORMATS["tokens"].number,
) -> Made:
    """Tokenizes a segment into files below a folder; `wide` as for `write_rows`.

    Raises:
        UserError: there are conversations and no chat template, or an unusable tokenizer.
    """
    tokenizer = _tokenizer(tokenizer_folder, recipe.model.trust_remote_code)
    fitting, refused = Fitting(recipe), TemplateErrors()
    dropped: list[dict[str, object]] = []
    encode = encoding.BatchEncoder(recipe, tokenizer, number)
    origins = Origins(segment.first_line)
    batches = _fitted(segment, encode, tokenizer, fitting, refused, dropped, origins)
    path = f"{folder}/{segment.name}.arrow"
    is_packed = train_rows.packs_rows(recipe.data, segment.side)
    if is_packed:
        written = write_packed(path, batches, recipe.data, is_all=segment.is_all)
    else:
        written = write_rows(path, batches, wide=wide)
    files = {"arrow": path} if written.rows else {}
    if dropped:
        files["dropped"] = f"{folder}/{segment.name}.jsonl"
        with open(files["dropped"], "w", encoding="utf-8") as file:
            file.writelines(json.dumps(entry) + "\n" for entry in dropped)
    if segment.side == "train" and written.rows and (is_packed or not origins.are_plain):
        files["lines"] = origins.save(f"{folder}/{segment.name}.npy")
    figures: dict[str, object] = {
        "first_line": segment.first_line,
        "rows": written.rows,
        "tokens": written.tokens,
        "truncated": fitting.truncated,
        "dropped": fitting.dropped + refused.rows,
        "refused": replace(refused, told=Counter(encode.told)).to_json(),
        "lengths": fitting.lengths.to_json(),
    }
    if segment.index == 0:
        files["seen"] = f"{folder}/{segment.name}.seen.jsonl"
        with open(files["seen"], "w", encoding="utf-8") as file:
            file.writelines(
                row.model_dump_json() + "\n"
                for row in preview.first_previews(segment.path, segment.side, recipe, tokenizer, number)
            )
    if segment.index == 0 and written.rows:
        figures["first"] = preview.first_sequences(path, tokenizer)
    return Made(name=segment.name, files=files, figures=figures)


@functools.cache
def _tokenizer(folder: str, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    tokenizer = loading.load_tokenizer(folder, trust_remote_code=trust_remote_code)
    gc.freeze()  # each collection would look at all that is imported, and batches of rows make many
    return tokenizer


def _fitted(
    segment: SideSegment,
    encode: encoding.BatchEncoder,
    tokenizer: PreTrainedTokenizerBase,
    fitting: Fitting,
    refused: TemplateErrors,
    dropped: list[dict[str, object]],
    origins: Origins,
) -> Iterator[list[Row]]:
    """Yields batches of usable rows, and notes the others."""
    number = segment.first_line

    def drop(line: int, error: RowError) -> None:
        dropped.append({"file": os.path.basename(segment.path), "line": line, "reason": str(error)})

    for rows in _batches(segment):
        encoding.require_template(tokenizer, rows[0])
        batch: list[Row] = []
        for line, made in enumerate(encode(rows), number):
            if isinstance(made, RowError):
                refused.add(os.path.basename(segment.path), line, str(made))
                drop(line, made)
                continue
            for row in made:
                try:
                    batch.append(fitting.fit(row))
                    origins.add(line, batch[-1])
                except RowError as error:
                    drop(line, error)
        number += len(rows)
        refused.of += len(rows)
        if batch:
            yield batch


def _batches(segment: SideSegment) -> Iterator[list[Row]]:
    with open(segment.path, "rb") as file:
        file.seek(segment.start)
        batch: list[Row] = []
        began = at = segment.start
        while at < segment.end:
            line = file.readline()
            batch.append(json.loads(line))
            at += len(line)
            if len(batch) == BATCH_ROWS or at - began >= BATCH_BYTES:
                yield batch
                batch, began = [], at
        if batch:
            yield batch


WORKER_BYTES = 2**30  # memory counted for a worker
WORTHWHILE = 2**22  # bytes of text worth a worker: it begins with some seconds of imports
PRELOADED = ["baton.data.segments", "transformers", "transformers.models.auto.tokenization_auto", "pyarrow"]
"""Modules imported once, by the process that workers are forked from."""


def make_each(
    segments: Sequence[SideSegment], make: Callable[[SideSegment], Made], workers: int | None
) -> Iterator[tuple[SideSegment, Made]]:
    """Yields segments as they are made, by up to `workers` processes; None means as many as cores and memory allow.

    Little text is made in this process. `make` must be picklable. Raises BatonError where a worker was killed.
    """
    text = sum(segment.end - segment.start for segment in segments)
    count = min(workers or usable_workers(), len(segments), text // WORTHWHILE)
    if count <= 1:
        yield from ((segment, make(segment)) for segment in segments)
        return
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with ProcessPoolExecutor(count, mp_context=context, initializer=_begin) as pool:
        waiting = iter(segments)
        running: dict[Future[Made], SideSegment] = {}
        try:
            while True:
                for segment in waiting:
                    running[pool.submit(make, segment)] = segment
                    # One more than there are workers, so that none of them waits while the caller uploads.
                    if len(running) > count:
                        break
                if not running:
                    return
                for done in wait(running, return_when=FIRST_COMPLETED).done:
                    yield running.pop(done), done.result()
        except BrokenProcessPool:
            raise BatonError(
                "a process that tokenizes was killed, most likely for want of memory.",
                remedy="Lower data.workers, or give the tokenize stage more memory; what is done stays done.",
            ) from None
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def usable_workers() -> int:
    """Returns how many workers this machine, or its container, has cores and memory for."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, _quota() or cores, machine.available_memory() // WORKER_BYTES))


def _quota() -> int | None:
    """Returns the cores that a container may use, None where there is no limit."""
    try:
        quota, period = (machine.CGROUP / "cpu.max").read_text(encoding="ascii").split()
        return max(1, math.ceil(int(quota) / int(period)))
    except (OSError, ValueError):
        return None


def _begin() -> None:
    """Keeps a worker to its core, where the tokenizer would take all, and ends it with its parent process."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ["OMP_NUM_THREADS"] = "1"
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent
    parent.join()
    os._exit(1)
