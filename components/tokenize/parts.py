"""Tokens in the store, part by part: what is done stays done when the stage is killed.

    <prefix>/files-1/<side>/<number>-<writer>.arrow    rows of a segment, under a name of its writer's own
    <prefix>/files-1/parts/<side>-<number>.json        which file counts, and its figures: put-if-absent
    <prefix>/files-1/tokenizer/…                       put-if-absent
    <prefix>/manifest.json                             a bundle like any other, once all parts are there

A writer who is late finds the part taken, and its file counts for nobody. The folder `files-1` belongs to all writers;
where a reader finds it damaged, the next ones begin `files-2`.
"""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from typing import Any, NoReturn

from baton.components.shared.core.document import Json, load_object
from baton.components.shared.core.errors import DamagedError
from baton.components.shared.store import bundles
from baton.components.shared.store.bundles import BundleWriter, Manifest
from baton.components.shared.store.manifests import check_files
from baton.components.shared.store.storage import Storage
from baton.components.tokenize.lengths import Lengths
from baton.components.tokenize.refusals import Refusals
from baton.components.tokenize.segments import Made

TOKENIZER = "tokenizer"
COUNTED = ("tokens", "truncated", "dropped")
"""What a segment counts beside its rows."""


class Parts:
    """The parts of one tokenized split.

    Args:
        storage: The store.
        prefix: Path of the bundle.
    """

    def __init__(self, storage: Storage, prefix: str) -> None:
        self.storage = storage
        self.prefix = prefix
        # A folder that was marked is never gone back to: its parts name files that are missing or differ.
        names = storage.list(prefix)
        number = 1
        while {f"{mark}files-{number}" for mark in (bundles.DAMAGED, bundles.REMOVED)} & set(names):
            number += 1
        self.folder = f"files-{number}"
        self._writer = uuid.uuid4().hex[:8]

    def done(self) -> dict[str, dict[str, Any]]:
        """Returns what each part that is there says about itself, by name."""
        names = self.storage.list(self._path("parts"))
        documents = bundles.each(self._read, names)
        return {name.removesuffix(".json"): part for name, part in zip(sorted(names), documents, strict=True)}

    def add(self, made: Made) -> dict[str, Any]:
        """Sends a segment's files, removes them here, and returns the part that counts: ours, or who was first."""
        side, _, number = made.name.rpartition("-")
        files = {}
        for kind, local in made.files.items():
            folder = side if kind == "arrow" else kind
            beginning = "" if kind == "arrow" else f"{side}-"
            name = f"{folder}/{beginning}{number}-{self._writer}.{local.rpartition('.')[2]}"
            size = os.path.getsize(local)
            files[name] = {"size": size, "sha256": self.storage.upload(local, self._path(name))}
            # The disk needs room for the segments under way alone.
            os.unlink(local)
        return self._claim(made.name, {"files": files, **made.figures})

    def put_tokenizer(self, folder: str) -> dict[str, Any]:
        """Sends a tokenizer's files, at any depth; where another writer's are there, those count."""
        files = {}
        for parent, _, names in os.walk(folder):
            for local in (os.path.join(parent, name) for name in names):
                name = f"{TOKENIZER}/{os.path.relpath(local, folder)}".replace(os.sep, "/")
                files[name] = self.put_file(name, local)
        return self._claim(TOKENIZER, {"files": files})

    def put_file(self, name: str, local_path: str) -> bundles.FileEntry:
        """Sends a small file that all writers would write alike, and returns size and hash of the one that is there."""
        with open(local_path, "rb") as file:
            self.storage.create(self._path(name), file.read())
        data = self.storage.read(self._path(name))
        return {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}

    def fetch_tokenizer(self, part: dict[str, Any], folder: str) -> str:
        """Brings the tokenizer that counts to a local folder and returns that.

        Raises:
            DamagedError: a file is missing or differs.
        """
        for name, entry in part["files"].items():
            try:
                digest = self.storage.download(self._path(name), f"{folder}/{name.removeprefix(f'{TOKENIZER}/')}")
            except FileNotFoundError:
                digest = None
            if digest != entry["sha256"]:
                self._give_up(name)
        return folder

    def commit(self, files: dict[str, bundles.FileEntry], meta: Json) -> Manifest:
        """Makes the parts a bundle and returns what is committed.

        Raises:
            DamagedError: a file of a part that was there is gone.
        """
        # Sizes by one listing; the bytes were hashed as they were sent, by this process or one before.
        present = self.storage.find(self._path(""))
        for name, entry in files.items():
            if name not in present or present[name][0] != entry["size"]:
                self._give_up(name)
        writer = BundleWriter(self.storage, self.prefix, kind="tokens")
        # Nothing is sent again: the manifest names the files where their writers, this one or earlier ones, have put
        # them.
        writer.folder, writer.files = self.folder, files
        return writer.commit(meta)[0]

    def _claim(self, name: str, part: dict[str, Any]) -> dict[str, Any]:
        document = f"{name}.json"
        # Its files are up by now. A crash before this leaves files under this writer's name that no part names, and the
        # segment is made again.
        self.storage.create(self._path(f"parts/{document}"), json.dumps(part, sort_keys=True).encode())
        return self._read(document)

    def _read(self, document: str) -> dict[str, Any]:
        """Returns what a part says about itself, once it could be what `add` has written."""
        name = f"parts/{document}"
        try:
            part = load_object(self.storage.read(self._path(name)), name)
            check_files(part["files"])
            if document != f"{TOKENIZER}.json":
                Lengths(0).merge(part["lengths"])
                Refusals().merge(part.get("refused") or Refusals().to_json())
                sum(part[count] for count in ("rows", *COUNTED))
        except (DamagedError, ValueError, TypeError, KeyError, AttributeError):
            self._give_up(name)
        return part

    def _path(self, name: str) -> str:
        return f"{self.prefix}/{self.folder}/{name}".rstrip("/")

    def _give_up(self, name: str) -> NoReturn:
        """Marks the folder, so that the next attempt begins another."""
        self.storage.write(f"{self.prefix}/{bundles.DAMAGED}{self.folder}", b"")
        raise DamagedError(
            f"{self.storage.uri(self._path(name))}, which was written before, is missing or damaged.",
            remedy="Run again: the tokens will be made anew.",
        )
