"""Resolves sources of rows to files, before anything is paid for.

fsspec reads files that are not Baton's: in a folder, in the clouds, and wherever else it knows the scheme.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from baton.errors import UserError, suggest, suggest_path
from baton.store import protocol
from baton.store.clouds import ANY_SOURCE, CloudStore
from baton.store.folder import FileSystem
from baton.store.storage import Storage

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

# Member of a recipe's `data.source`: an address, or a mapping with its own settings.
Value: TypeAlias = str | dict[str, object]
BUILTIN = "builtin:stdlib-docs"  # signatures and docstrings of Python's standard library, on every machine with Python
# Rows in Baton's own package.
FOLDER = os.path.join(os.path.dirname(os.path.dirname(__file__)), "data", "builtin")
BUNDLED = {
    "builtin:support": "support.jsonl",  # messages of customers, and the team for each as JSON
    "builtin:replies": "replies.jsonl",  # a good and a bad reply to a customer
    "builtin:tool-calls": "tools.jsonl",  # requests that take one call of four tools
}
# File types whose rows have columns.
TABLES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".arrow", ".feather")
# File types of plain text; in a folder with tables they only describe those, and are passed over.
TEXTS = (".txt", ".md", ".text")
SUFFIXES = (*TABLES, *TEXTS)  # file types of rows in a folder; one of `COMPRESSED` may follow
COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
# Files that `datasets` writes with the rows.
NOT_ROWS = ("dataset_info.json", "dataset_infos.json", "state.json", "dataset_dict.json")


@dataclass(frozen=True)
class SourceFile:
    """A file that is not Baton's: a store and a path in it, so that folders and clouds read alike."""

    storage: Storage
    path: str

    @property
    def uri(self) -> str:
        return self.storage.uri(self.path)

    @property
    def suffix(self) -> str:
        return suffix(self.path)

    @contextlib.contextmanager
    def open(self, **options: object) -> Iterator[Any]:
        """Opens the file for reading, with options of its file system."""
        fs, key = file_system(self.storage), self.storage.key(self.path)
        with self.storage.translated(self.path), fs.open(key, "rb", **options) as file:
            yield file

    def info(self) -> dict[str, Any]:
        with self.storage.translated(self.path):
            return dict(file_system(self.storage).info(self.storage.key(self.path)))


def file_system(storage: Storage) -> AbstractFileSystem:
    """Returns the fsspec file system of a store; paths in it are the store's `key`s."""
    from fsspec.implementations.local import LocalFileSystem

    client = storage.client
    if isinstance(client, CloudStore):
        return client.cloud.file_system(client.address)
    return client.fs if isinstance(client, FileSystem) else LocalFileSystem()


def suffix(path: str) -> str:
    """Returns a file's type without compression, such as `.jsonl`."""
    name = path.lower()
    for compressed in COMPRESSED:
        name = name.removesuffix(compressed)
    return os.path.splitext(name)[1]


def parse(parameter: str) -> list[Value]:
    """Returns `data.source` from a pipeline's parameter: addresses joined by commas, or a JSON list."""
    if not parameter.lstrip().startswith("["):
        return [part.strip() for part in parameter.split(",")]
    try:
        return list(json.loads(parameter))
    except ValueError as error:
        raise UserError(f"source {parameter!r} is not a JSON list: {error}.") from None


def as_parameter(source: Sequence[Value]) -> str:
    """Returns `data.source` as one parameter, which `parse` reads."""
    addresses = [part for part in source if isinstance(part, str)]
    return ",".join(addresses) if len(addresses) == len(source) else json.dumps(source)


def is_dataset_id(source: str) -> bool:
    """Tells a hub dataset (`hf://datasets/org/name?split=train`) from files on the hub."""
    return source.startswith("hf://datasets/") and source.partition("?")[0].count("/") <= 4 and "*" not in source


def resolve(source: str, *, base_dir: str) -> str:
    """Returns a source with a local path made absolute, from `base_dir` or the current folder, where it must match."""
    if source.startswith("builtin:") and source not in (known := (BUILTIN, *BUNDLED)):
        raise UserError(
            f"data.source {source!r} is unknown.{suggest(source, known)}", remedy=f"Bundled are {', '.join(known)}."
        )
    if "://" in source or source.startswith("builtin:"):
        return source
    tried = [os.path.abspath(os.path.join(folder, os.path.expanduser(source))) for folder in (base_dir, os.getcwd())]
    for path in tried:
        if os.path.exists(path) or next(glob.iglob(_at_any_depth(path), recursive=True), None):
            return path
    near = None if any(sign in source for sign in "*?[") else suggest_path(source, (base_dir, os.getcwd()))
    raise UserError(
        f"data.source {source!r} matches no file (looked for {' and '.join(dict.fromkeys(tried))}).",
        remedy=(f"Did you mean {near!r}? " if near else "")
        + f"Give a file, folder, glob, or an address at {ANY_SOURCE} that exists.",
    )


def files(sources: Sequence[str]) -> list[SourceFile]:
    """Returns the files of sources, except hub datasets and the builtin, in a stable order."""
    return [file for source in sources if source != BUILTIN and not is_dataset_id(source) for file in _expand(source)]


def _expand(source: str) -> list[SourceFile]:
    if source in BUNDLED:
        return [SourceFile(Storage(FOLDER), BUNDLED[source])]
    is_pattern = any(sign in source for sign in "*?[") and not os.path.exists(source)
    address = source.rstrip("/")
    parent = address.rpartition("/")[0]
    if is_pattern:
        parent = address[: min(address.index(sign) for sign in "*?[" if sign in address)].rpartition("/")[0]
    elif parent.endswith(":/"):  # a whole bucket
        parent = address
    storage, paths = Storage(parent or "/"), list[str]()
    path, fs = storage.key(address[len(parent) + 1 :]), file_system(storage)
    with contextlib.suppress(FileNotFoundError), storage.translated(address[len(parent) + 1 :]):
        if is_pattern:
            paths = fs.glob(_at_any_depth(path))
        elif parent == address or _is_folder(fs, path):
            rows = [each for each in fs.find(path) if _holds_rows(each[len(path) + 1 :])]
            paths = [each for each in rows if suffix(each) in TABLES] or rows
        else:
            paths = [path] if fs.exists(path) else []
    if not paths:
        storage.list("")  # raises an error of its own for a bucket that does not exist
        raise UserError(
            f"data.source {source!r} matches no file.",
            remedy=f"Expected files ending in {', '.join(SUFFIXES)}.",
        )
    return [SourceFile(storage, path[len(storage.root) + 1 :]) for path in sorted(paths) if not path.endswith("/")]


def _is_folder(fs: AbstractFileSystem, path: str) -> bool:
    try:
        return bool(fs.isdir(path))
    except Exception as error:
        if protocol.answer(error).status == 403:
            return False  # without the right to list, a file may still be read
        raise


def _at_any_depth(pattern: str) -> str:
    """Returns a pattern with `**/**/` written once: a search would look through all pairs."""
    return re.sub(r"(\*\*/)+", "**/", pattern)


def _holds_rows(path: str) -> bool:
    """Tells whether a file in a folder holds rows: neither hidden nor a note or cache of `datasets`."""
    *folders, name = path.split("/")
    hidden = any(part.startswith(".") for part in (*folders, name))
    return not hidden and name not in NOT_ROWS and not name.startswith("cache-") and suffix(name) in SUFFIXES
