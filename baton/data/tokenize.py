"""Tokenizes a run's split into the store, part by part, once for all runs with the same address.

<prefix>/files-1/<side>/<number>-<writer>.arrow   a segment's rows, under the writer's own name
<prefix>/files-1/parts/<side>-<number>.json       the file that counts: put-if-absent, so a late writer's is ignored
<prefix>/manifest.json                            once all parts are there; see `find_address` for the prefix
A killed stage loses no finished part. Readers that find `files-1` damaged have the next writers begin `files-2`.

Segments of a side are tokenized to one Arrow file each, in as many processes as memory allows. A segment's bounds
depend on the file alone: any number of workers gives the same files. Each file keeps the lines of its rows, so that a
step's rows are found by file and line.
"""

from __future__ import annotations

import functools
import gc
import hashlib
import json
import math
import multiprocessing
import os
import threading
import time
import uuid
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any, NamedTuple, NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from transformers import PreTrainedTokenizerBase

from baton import events, machine
from baton.checkpoint import chain, seals
from baton.data import encoding, fitting, preview
from baton.data.fitting import Fitting, Lengths, TemplateErrors
from baton.data.rows import SIDES
from baton.documents import Json, load_object
from baton.errors import BatonError, DamagedError, FormatError, RewritableDamageError, RowError, UserError
from baton.models import chat, loading, pinned, prompts, train_rows
from baton.pages import quality_page
from baton.recipe.data import Data
from baton.recipe.recipe import Recipe
from baton.runs import objects
from baton.runs.documents import PinnedModels, RunInfo, SplitData, TokenizedRows, TokensMeta
from baton.runs.plan import Plan, make_plan
from baton.runs.run import Run
from baton.runs.versions import FORMATS, release
from baton.runtime import SYSTEM
from baton.scratch import scratch_folder
from baton.signing import SIGNATURE, trusted_here
from baton.store import bundle
from baton.store.manifest import (
    DAMAGED,
    REMOVED,
    FileEntry,
    Manifest,
    check_files,
    manifest_name,
    newest_usable,
    read_manifest,
    usable_manifest,
)
from baton.store.storage import Storage


class Written(NamedTuple):
    """Sequences of a written file, and tokens of all its columns of tokens."""

    rows: int = 0
    tokens: int = 0


def write_rows(path: str, batches: Iterable[list[encoding.Row]], *, wide: bool = False) -> Written:
    """Writes rows as an Arrow stream that `datasets` maps from disk, all with the same columns; no file without rows.

    `wide` prompts may hold more than messages of role and content: see `train_rows.message_kind`.
    """
    batches = ([train_rows.stored(row) for row in batch] for batch in batches) if wide else batches
    return _stream(path, (_table(batch, wide=wide) for batch in batches))


def write_packed(path: str, batches: Iterable[list[encoding.Row]], data: Data, *, is_all: bool) -> Written:

    tables = [_table([{name: row[name] for name in ("input_ids", "labels")} for row in batch]) for batch in batches]
    return _stream(path, [train_rows.pack_rows(pa.concat_tables(tables), data, is_all=is_all)]) if tables else Written()


def _stream(path: str, tables: Iterable[pa.Table]) -> Written:

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

    if "length" in table.column_names:
        return int(pc.sum(table["length"]).as_py())
    ids = [name for name in table.column_names if name.endswith("_ids")]
    return sum(int(pc.sum(pc.list_value_length(table[name])).as_py() or 0) for name in ids)


def _table(rows: Sequence[encoding.Row], *, wide: bool = False) -> pa.Table:

    kinds = {name: _kind(name, value, wide=wide) for name, value in rows[0].items()}
    return pa.table({name: pa.array([row[name] for row in rows], type=kind) for name, kind in kinds.items()})


def _kind(name: str, value: Any, *, wide: bool) -> pa.DataType:
    """Returns a column's type by its name and first value: an empty list does not show its members' type."""

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

    def add(self, line: int, row: encoding.Row) -> None:
        self._lines.append(line)
        self._lengths.append(len(row.get("input_ids", ())))

    @property
    def are_plain(self) -> bool:
        """Whether each row's place is that of its line."""
        return all(line == place for place, line in enumerate(self._lines, self._first_line))

    def save(self, path: str) -> str:
        """Writes a line's number and a length for each row, and returns the file."""
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
    gc.freeze()  # each collection would scan all imported objects, and batches of rows make many
    return tokenizer


def _fitted(
    segment: SideSegment,
    encode: encoding.BatchEncoder,
    tokenizer: PreTrainedTokenizerBase,
    fitting: Fitting,
    refused: TemplateErrors,
    dropped: list[dict[str, object]],
    origins: Origins,
) -> Iterator[list[encoding.Row]]:
    """Yields batches of usable rows, and notes the others."""
    number = segment.first_line

    def drop(line: int, error: RowError) -> None:
        dropped.append({"file": os.path.basename(segment.path), "line": line, "reason": str(error)})

    for rows in _batches(segment):
        encoding.require_template(tokenizer, rows[0])
        batch: list[encoding.Row] = []
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


def _batches(segment: SideSegment) -> Iterator[list[encoding.Row]]:
    with open(segment.path, "rb") as file:
        file.seek(segment.start)
        batch: list[encoding.Row] = []
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
PRELOADED = ["baton.data.tokenize", "transformers", "transformers.models.auto.tokenization_auto", "pyarrow"]
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
                "a process that tokenizes was killed, probably out of memory.",
                remedy="Lower data.workers, or give the tokenize stage more memory; finished parts are kept.",
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


class Address(NamedTuple):
    """Address of a run's tokens, and its causes other than recipe and rows."""

    digest: str
    rendered: str  # in words, turns that rows get; see `rendering_note`
    today: str | None  # day for the chat template, None where it does not ask


def find_address(run: Run, recipe: Recipe, split: str, base: str | None, base_digest: str | None) -> Address:
    """Returns the address of a run's tokens, which stay even where Baton or its libraries would make others by now.

    Raises:
        FormatError: they would, and the run's are gone or not made yet.
    """
    own = run.read(TokenizedRows)
    tokenizer = None if learns_tokenizer(recipe) else loading.build_tokenizer(recipe, base)
    words = rendering_note(run, recipe, split, tokenizer)
    day = _day(run, recipe, split, tokenizer, own)
    other = loading.tokenizer_identity(recipe)
    number = run.need(RunInfo).made.number("tokens")
    digest = tokens_digest(recipe, split, base_digest, other, is_rendered=bool(words), today=day, number=number)
    if own and own.digest == digest:
        return Address(digest, words, day)
    # A run's recipe, rows and base model cannot have changed; the libraries and Baton itself can.
    if own and usable_manifest(run.storage, own.prefix):
        run.warn(f"run {run.name!r} keeps its tokens, {run.storage.uri(own.prefix)}; a new run would get other ones")
        return Address(own.digest, own.rendered, own.today)
    if own and bool(own.rendered) != bool(words):
        raise FormatError(
            f"run {run.name!r} was begun by another release, its tokens, {run.storage.uri(own.prefix)}, are gone, and "
            f"this Baton, {release()}, makes other ones.",
            remedy="Start the run under another name, or run its tokenize stage with the release that began it.",
        )
    return Address(digest, words, day)


def tokens_digest(
    recipe: Recipe,
    split: str,
    base_digest: str | None,
    other_digest: str | None,
    *,
    is_rendered: bool = False,
    today: str | None = None,
    number: int = FORMATS["tokens"].number,
) -> str:
    """Returns the address of a tokenized split.

    Digests are those of the split, of the base model's files and of `model.tokenizer.base`. `is_rendered`: in another
    way than before `data.render_as` and `data.system`. `today`: the chat template's day, where it asks.
    """
    data = recipe.data
    made_from: dict[str, object] = {
        "split": split,
        "base": base_digest,
        "other": other_digest,
        "tokenizer": recipe.model.tokenizer.model_dump() if recipe.model.tokenizer else None,
        "template": chat.own_template(recipe),
        "settings": [
            data.max_length,
            data.packing,
            *data.older_train_on.values(),
            data.separator,
            data.extra_columns,
            data.quality.truncation == "fix",
        ],
        "method": recipe.training.method,
        # Another release may make other tokens, which get a folder of their own.
        "libraries": [version("tokenizers"), version("transformers"), version("trl") if data.packing else None],
        # The cuts of a file decide which rows are packed together, and the names of parts.
        "segments": [LEAST, MOST, SHARE],
    }
    if number > 1:
        made_from["format"] = number
    if is_rendered:
        made_from["turns"] = {"system": data.system}
    if today:
        made_from["today"] = today
    return hashlib.sha256(json.dumps(made_from, sort_keys=True).encode()).hexdigest()


def rendering_note(run: Run, recipe: Recipe, split: str, tokenizer: PreTrainedTokenizerBase | None) -> str:
    """Returns in words which turns or system message rows get that the split does not give them, nothing for none.

    The split's rows are of one shape, so that the first represents all. A tokenizer still to be learned from them is
    None.

    Raises:
        UserError: they should, and there is no template for it, or no conversation to put the message into.
    """
    is_chat = recipe.data.render_as == "chat"
    if tokenizer and (recipe.model.base or is_chat):
        chat.require_template(recipe, tokenizer)
        is_chat = chat.uses_chat(recipe, tokenizer)
    if not is_chat and recipe.data.system is None:
        return ""
    return chat.rendering_changes(_first_row(run, split), recipe, chat=is_chat)


def learns_tokenizer(recipe: Recipe) -> bool:
    return bool(recipe.model.tokenizer and recipe.model.tokenizer.train)


def _day(
    run: Run, recipe: Recipe, split: str, tokenizer: PreTrainedTokenizerBase | None, own: TokenizedRows | None
) -> str | None:
    """Returns the chat template's day, None where it does not ask, or no row goes through it.

    A run that has tokens, a fork's among them, keeps their day.
    """
    if not chat.asks_for_date(tokenizer.chat_template if tokenizer else chat.own_template(recipe)):
        return None
    if tokenizer and not prompts.format_of_row(_first_row(run, split), recipe, tokenizer).is_chat:
        return None
    if own and own.today:
        return own.today
    return str(recipe.data.today or run.need(RunInfo).created[: len("2026-11-24")])


def _split_manifest(run: Run, split: str) -> Manifest:
    manifest = read_manifest(run.storage, f"data/{split}/split")
    if manifest is None:
        uri = run.storage.uri(f"data/{split}/split")
        raise UserError(f"{uri} is gone.", remedy="Start the run again from its first stage.")
    return manifest


def _first_row(run: Run, split: str) -> dict[str, Any]:
    (line,) = run.storage.first_lines(_split_manifest(run, split).path(f"data/{split}/split", "train.jsonl"), 1)
    return json.loads(line) if line else {"text": ""}


TOKENIZER = "tokenizer"
COUNTED = ("tokens", "truncated", "dropped")  # counts of a segment, apart from its rows


class Parts:
    """The parts of one tokenized split.

    A writer who is late finds a part taken: its file does not count. The folder `files-1` belongs to all writers.
    """

    def __init__(self, storage: Storage, prefix: str) -> None:
        self.storage = storage
        self.prefix = prefix
        # A folder that was marked is never gone back to: its parts name files that are missing or differ.
        names = storage.list(prefix)
        number = 1
        while {f"{mark}files-{number}" for mark in (DAMAGED, REMOVED)} & set(names):
            number += 1
        self.folder = f"files-{number}"
        self._writer = uuid.uuid4().hex[:8]

    def is_committed(self, generation: int) -> bool:
        """Tells whether a manifest names this folder; one that cannot be read may."""
        path = f"{self.prefix}/{manifest_name(generation)}"
        try:
            return bool(json.loads(self.storage.client.read(path))["folder"] == self.folder)
        except (ValueError, KeyError, TypeError, FileNotFoundError):
            return True

    def done(self) -> dict[str, dict[str, Any]]:
        """Returns the documents of the parts that are there, by name."""
        names = self.storage.list(self._path("parts"))
        documents = SYSTEM.each(self._read, names)
        parts = zip(sorted(names), documents, strict=True)
        return {name.removesuffix(".json"): part for name, part in parts if self._is_attested(name, part)}

    def add(self, made: Made) -> dict[str, Any]:
        """Uploads a segment's files, removes them here, and returns the part that counts: the first writer's."""
        side, _, number = made.name.rpartition("-")
        files = {}
        for kind, local in made.files.items():
            folder = side if kind == "arrow" else kind
            beginning = "" if kind == "arrow" else f"{side}-"
            name = f"{folder}/{beginning}{number}-{self._writer}.{local.rpartition('.')[2]}"
            files[name] = self.send(name, local)
            # The disk needs room for the segments under way alone.
            os.unlink(local)
        return self._claim(made.name, {"files": files, **made.figures})

    def send(self, name: str, local_path: str) -> FileEntry:
        return {"size": os.path.getsize(local_path), "sha256": self.storage.upload(local_path, self._path(name))}

    def put_tokenizer(self, folder: str) -> dict[str, Any]:
        """Uploads a tokenizer's files, at any depth; where another writer's are there, those count."""
        files = {}
        for parent, _, names in os.walk(folder):
            for local in (os.path.join(parent, name) for name in names):
                name = f"{TOKENIZER}/{os.path.relpath(local, folder)}".replace(os.sep, "/")
                files[name] = self.put_file(name, local)
        return self._claim(TOKENIZER, {"files": files})

    def put_file(self, name: str, local_path: str) -> FileEntry:
        """Uploads a small file that all writers would write alike, and returns size and hash of the one there."""
        with open(local_path, "rb") as file:
            data = file.read()
        if not self.storage.create(self._path(name), data) and self.storage.read(self._path(name)) != data:
            self.storage.write(self._path(name), data)
        return {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}

    def fetch_tokenizer(self, part: dict[str, Any], folder: str) -> str:
        """Downloads the tokenizer that counts to a local folder and returns that."""
        for name, entry in part["files"].items():
            try:
                digest = self.storage.download(self._path(name), f"{folder}/{name.removeprefix(f'{TOKENIZER}/')}")
            except FileNotFoundError:
                digest = None
            if digest != entry["sha256"]:
                self._give_up(name)
        return folder

    def commit(self, files: dict[str, FileEntry], meta: Json) -> Manifest:
        """Commits the parts as a bundle and returns its manifest."""
        # Sizes by one listing; the bytes were hashed as they were sent, by this process or one before.
        present = self.storage.find(self._path(""))
        for name, entry in files.items():
            if name not in present or present[name][0] != entry["size"]:
                self._give_up(name)
        writer = bundle.BundleWriter(self.storage, self.prefix, kind="tokens")
        # Nothing is sent again: the manifest names the files where their writers, this one or earlier ones, have put
        # them.
        writer.folder, writer.files = self.folder, files
        signature = seals.attestation(self.prefix, writer.manifest(meta))
        return writer.commit({**meta, **({SIGNATURE: signature} if signature else {})})[0]

    def _is_attested(self, document: str, part: dict[str, Any]) -> bool:
        return seals.is_attested(self._path(f"parts/{document}"), seals.parsed_part(part))

    def _claim(self, name: str, part: dict[str, Any]) -> dict[str, Any]:
        document = f"{name}.json"
        # Its files are up by now. Files of a crash before this have this writer's name, and no part names them, and the
        # segment is made again.
        path = self._path(f"parts/{document}")
        if signature := seals.attestation(path, seals.parsed_part(part)):
            part[SIGNATURE] = signature
        data = json.dumps(part, sort_keys=True).encode()
        if not self.storage.create(path, data) and not self._is_attested(document, self._read(document)):
            self.storage.write(path, data)
        return self._read(document)

    def _read(self, document: str) -> dict[str, Any]:
        """Returns a part's document, once it has all that `add` writes."""
        name = f"parts/{document}"
        try:
            part = load_object(self.storage.read(self._path(name)), name)
            check_files(part["files"])
            if document != f"{TOKENIZER}.json":
                Lengths(0).merge(part["lengths"])
                TemplateErrors().merge(part.get("refused") or TemplateErrors().to_json())
                sum(part[count] for count in ("rows", *COUNTED))
        except (DamagedError, ValueError, TypeError, KeyError, AttributeError):
            self._give_up(name)
        return part

    def _path(self, name: str) -> str:
        return f"{self.prefix}/{self.folder}/{name}".rstrip("/")

    def _give_up(self, name: str) -> NoReturn:
        """Marks the folder, so that the next attempt begins another, and raises RewritableDamageError."""
        self.storage.write(f"{self.prefix}/{DAMAGED}{self.folder}", b"")
        raise RewritableDamageError(
            f"{self.storage.uri(self._path(name))}, which was written before, is missing or damaged.",
            remedy="Run again: the tokens will be rebuilt.",
        )


BLOCKS_FROM = 2**30  # bytes of training tokens from which `data.order: auto` takes blocks


@dataclass(frozen=True, kw_only=True)
class TokenizeJob:
    """A run whose split, by its digest, is tokenized; base is the folder of the base model's files."""

    run: Run
    recipe: Recipe
    split: str
    base: str | None
    address: Address

    @property
    def prefix(self) -> str:
        # A signed run uses tokens that its own key has signed.
        public = trusted_here()
        return f"data/{self.address.digest}/tokens{f'-{public.name}' if public else ''}"


@seals.sealed(objects.TOKENIZE)
def tokenize_run(run_uri: str) -> dict[str, Any]:
    """Tokenizes a run's split, unless the same split was tokenized the same way before.

    Returns:
        `data_uri`, the counts `train`, `eval`, `test`, `tokens`, `truncated`, `dropped`, `steps`, the `lengths` of all
        rows before cutting, the `bytes` of training tokens, the `order` of their rows, the `digest`, the `address` of
        the files, the `first` sequences of each side and settings with `no_effect`; `dropped_uri`, the list of dropped
        rows, if there are any, and `rendered`, how texts became turns, if they did.

    Raises:
        UserError: the tokenizer cannot be had or does not fit, no sequence is left, too many are too long, or the run
            was begun by a Baton that this one does not continue.
    """
    started = time.time()
    job = _job(run_uri)
    run, recipe, prefix, (digest, note, day) = job.run, job.recipe, job.prefix, job.address
    # Chunks read slices of larger ones, and every byte of a slice is compared.
    manifest = bundle.undamaged(run.storage, prefix, most_bytes=BLOCKS_FROM)
    reused = manifest is not None
    if manifest is None:
        parts, (_, generation) = Parts(run.storage, prefix), newest_usable(run.storage, prefix)
        if generation and parts.is_committed(generation):  # its files may differ, as its manifest does
            run.storage.write(f"{prefix}/{DAMAGED}{parts.folder}", b"")
            parts = Parts(run.storage, prefix)
        with scratch_folder("tokens") as scratch:
            manifest = _commit(parts, _make(job, parts, scratch), recipe, scratch)
    meta = TokensMeta.read(manifest.meta, run.storage.uri(prefix))
    facts = meta.model_dump(mode="json", exclude={"files", "first", "first_lines"}, exclude_unset=True)
    facts["order"] = order(recipe, meta.bytes)
    facts |= {name: value for name, value in (("rendered", note), ("today", day)) if value}
    if meta.dropped:
        facts["dropped_uri"] = run.storage.uri(manifest.path(prefix, "dropped"))
    run.put(TokenizedRows.NAME, {"prefix": prefix, "digest": digest, **facts})
    fitting.judge_truncation(recipe, meta.lengths)
    fitting.TemplateErrors.tell(meta.left_out)
    plan = make_plan(recipe, meta.train)
    run.write_once(plan)
    quality_page.refresh(run)  # the split could not count tokens yet
    run.record("tokenize", {"seconds": time.time() - started, "reused": reused})
    pad_is_end = False
    if recipe.training.method == "reward" and not learns_tokenizer(recipe):
        tokenizer = loading.build_tokenizer(recipe, job.base)
        pad_is_end = tokenizer.pad_token_id == tokenizer.eos_token_id
    no_effect = without_effect(recipe, plan, pad_is_end=pad_is_end)
    for text in no_effect:
        events.emit(events.NoEffect(text=text))
    told = {"reused": reused, "steps": plan.num_steps, "targets": list(plan.targets), **facts}
    if note and recipe.tracking.cards == "rows":
        told["rendered_row"] = next(iter(meta.first.get("train", ())), None)
    events.emit(events.Tokens.read(told))  # another Baton may have written the facts
    places = {"data_uri": run.storage.uri(prefix), "address": run.storage.uri(manifest.path(prefix))}
    found = {**places, "digest": digest, "steps": plan.num_steps, "first": meta.first, "no_effect": no_effect}
    return {**found, **facts}


def without_effect(recipe: Recipe, plan: Plan, *, pad_is_end: bool = False) -> list[str]:
    """Returns settings of a recipe without effect, now that the number of steps is known.

    `pad_is_end`: rows are filled up with the token that ends them.
    """
    training, evaluation, last = recipe.training, recipe.evaluation, plan.num_steps
    told = []
    if training.warmup_steps >= max(last, 1):
        told.append(
            f"training.warmup_steps is {training.warmup_steps:g} and the run has {last:,} steps; the learning "
            "rate never reaches its peak: give a share such as 0.1"
        )
    if training.early_stopping and evaluation.in_training:
        per_epoch = evaluation.per_epoch
        count = (
            sum(plan.is_due(step, per_epoch) for step in range(1, last + 1))
            if per_epoch
            else last // (evaluation.every or 1)
        )
        patience = training.early_stopping.patience
        if count <= patience:
            told.append(
                f"training.early_stopping cannot end the run: there are {count:,} evaluations in {last:,} steps, and "
                f"patience is {patience:,}: evaluate more often, or lower it"
            )
    elif evaluation.every and evaluation.every > last:
        told.append(f"evaluation.every is {evaluation.every:,}, and the run has {last:,} steps: nothing is evaluated")
    for name, step in (
        ("training.log_every", training.log_every),
        ("chunks.checkpoint_every", recipe.chunks.every_steps or 0),
    ):
        if step > last:
            told.append(f"{name} is {step:,}, and the run has {last:,} steps")
    if training.guard and (after := [step for step in training.guard.skip if step > last]):
        told.append(f"training.guard.skip has step {after[0]:,}, and the run has {last:,}")
    if pad_is_end and training.method == "reward":
        told.append(
            "rows are filled up with the token that ends them, so that a reward model reads its score before the end: "
            "set model.tokenizer.special_tokens.pad_token"
        )
    return told


@seals.sealed(objects.SHARD, appends=False)
def tokenize_shard(run_uri: str, index: int, of: int) -> None:
    """Makes the missing parts of a run's tokens for process `index` (from 1; 0 makes the tokenizer alone) of several.

    The others may run at the same time or have died: `tokenize_run` makes the missing parts, and commits all.
    """
    started = time.time()
    job = _job(run_uri)
    reused = bundle.undamaged(job.run.storage, job.prefix, most_bytes=BLOCKS_FROM) is not None
    if not reused:
        with scratch_folder("tokens") as scratch:
            _make(job, Parts(job.run.storage, job.prefix), scratch, index=index, of=of)
    # A number in the name, as of a chunk: a finished one does not represent the others.
    job.run.record(
        f"{objects.SHARD}-{index:03d}", {"stage": objects.SHARD, "seconds": time.time() - started, "reused": reused}
    )


def dealt(wanted: Sequence[SideSegment], index: int, of: int) -> Sequence[SideSegment]:
    """Returns the segments of one of several processes: a function of the files and these two numbers alone."""
    return wanted[index - 1 :: of] if index else []


def order(recipe: Recipe, num_bytes: int) -> str:
    """Returns the order of training rows: `data.order`, and for `auto` a choice by their bytes."""
    if recipe.data.order != "auto":
        return recipe.data.order
    # As the recipe's own rule has it: of several processes only the fetching one knows a slice's files.
    is_alone = recipe.world_size == 1 and not recipe.parallel.virtual_workers
    return "blocks" if num_bytes >= BLOCKS_FROM and is_alone and recipe.needs_all_rows is None else "uniform"


def _job(run_uri: str) -> TokenizeJob:
    run = Run.open(run_uri)
    run.require_continued()
    recipe = run.recipe()
    folders = pinned.fetch(recipe)
    pinned.check_second_model(recipe, folders)
    known = run.read(PinnedModels)
    for role, origin in pinned.origins(recipe).items() if known is None else ():
        chain.require_sealed_model(run.storage, origin.base, folders[role], trusted_here())
    base, pins = folders.get(pinned.BASE), pinned.document(recipe, folders, known)
    run.write_once(pins)
    split = run.need(SplitData).digest
    found = find_address(run, recipe, split, base, pins.base_sha256)
    chat.set_template_date(found.today)
    return TokenizeJob(run=run, recipe=recipe, split=split, base=base, address=found)


def _make(job: TokenizeJob, parts: Parts, scratch: str, *, index: int = 1, of: int = 1) -> dict[str, dict[str, Any]]:
    """Makes the missing parts of one of several processes; returns all of its parts in order."""
    recipe, storage = job.recipe, job.run.storage
    manifest = _split_manifest(job.run, job.split)
    sides = [side for side in SIDES if f"{side}.jsonl" in manifest.files]
    names = [f"{side}.jsonl" for side in sides]
    source = bundle.fetch(storage, f"data/{job.split}/split", manifest, f"{scratch}/split", names=names)
    done = parts.done()
    if TOKENIZER not in done:
        encoding.run_tokenizer(recipe, job.base, f"{source}/train.jsonl").save_pretrained(f"{scratch}/own")
        done[TOKENIZER] = parts.put_tokenizer(f"{scratch}/own")
    # The committed one, which may be another writer's: all segments must be made by it.
    tokenizer = parts.fetch_tokenizer(done[TOKENIZER], f"{scratch}/{TOKENIZER}")
    # Cut before they are dealt: where a segment begins does not depend on how many processes there are.
    wanted = dealt([segment for side in sides for segment in cut(f"{source}/{side}.jsonl", side)], index, of)
    missing = [segment for segment in wanted if segment.name not in done]
    if len(missing) < len(wanted):
        events.emit(events.Resumed(parts=len(wanted) - len(missing), of=len(wanted)))
    # Of all files: all segments have the same columns.
    may_be_wide = bool(missing) and recipe.training.spec.rows == "prompts"
    wide = may_be_wide and train_rows.hold_more(f"{source}/{name}" for name in names)
    number = job.run.need(RunInfo).made.number("tokens")
    work = functools.partial(make, recipe=recipe, tokenizer_folder=tokenizer, folder=scratch, wide=wide, number=number)
    left = len(missing)
    for segment, made in make_each(missing, work, recipe.data.workers):
        done[segment.name] = parts.add(made)
        left -= 1
        events.emit(events.Tokenized(part=segment.name, done=len(wanted) - left, of=len(wanted)))
    return {name: done[name] for name in (TOKENIZER, *(segment.name for segment in wanted))}


def _commit(parts: Parts, done: dict[str, dict[str, Any]], recipe: Recipe, scratch: str) -> Manifest:
    files: dict[str, FileEntry] = {}
    rows: dict[str, list[tuple[str, int]]] = {side: [] for side in SIDES}
    counts = dict.fromkeys(COUNTED, 0)
    longest = fitting.Lengths(recipe.data.max_length)
    first: dict[str, list[str]] = {}
    refused = fitting.TemplateErrors()
    for name, part in done.items():
        files |= part["files"]
        if name == TOKENIZER:
            continue
        side = name.rpartition("-")[0]
        rows[side] += [(file, part["rows"]) for file in part["files"] if file.endswith(".arrow")]
        counts["tokens"] += part["tokens"] if side == "train" else 0
        counts["truncated"] += part["truncated"]
        counts["dropped"] += part["dropped"]
        if "refused" in part:  # a segment made by an older Baton lacks it, and the next
            refused.merge(part["refused"])
        if "of" not in part.get("refused", {}):  # an older one counted the rows after encoding
            refused.of += part["lengths"]["rows"] + part.get("refused", {"rows": 0})["rows"]
        longest.merge(part["lengths"])
        first |= {side: part["first"]} if "first" in part else {}
    counts |= {side: sum(count for _, count in parts_of_side) for side, parts_of_side in rows.items()}
    refused.judge(recipe)
    fitting.require_sequences(recipe, counts)
    for side, parts_of_side in rows.items():
        if parts_of_side:
            files |= _describe(parts, side, [name for name, _ in parts_of_side], scratch)
    counts["bytes"] = sum(files[name]["size"] for name, _ in rows["train"])
    trained = [part for name, part in done.items() if name.startswith("train-") and part["rows"]]
    meta = TokensMeta(
        **counts,
        left_out=dict(refused.told),
        lengths=longest.to_json(),
        files=rows,
        first=first,
        refused=refused.rows,
        # Segments made by an older Baton do not note where they begin: then no line is known.
        first_lines=[part["first_line"] for part in trained] if all("first_line" in part for part in trained) else [],
    )
    return parts.commit(files, meta.to_json())


def _describe(parts: Parts, side: str, names: list[str], scratch: str) -> dict[str, FileEntry]:
    """Writes the files that make a side's folder readable by `datasets.load_from_disk`."""
    state: dict[str, object] = {
        "_data_files": [{"filename": name.removeprefix(f"{side}/")} for name in names],
        "_fingerprint": hashlib.sha256("\n".join(names).encode()).hexdigest()[:16],
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": None,
    }
    entries = {}
    for name, document in (("state.json", state), ("dataset_info.json", {})):
        path = os.path.join(scratch, name)
        with open(path, "w", encoding="utf-8") as file:
            json.dump(document, file, indent=1, sort_keys=True)
        # Over one of an attempt whose commit was lost, which may be damaged: all writers of these parts send the same.
        entries[f"{side}/{name}"] = parts.send(f"{side}/{name}", path)
    return entries
