"""Changes planted in the checkpoints of a signed run, one at a time, each of which must be found.

Those of all other objects are in `tests/support/sealed.py`.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

from baton.checkpoint import signatures
from baton.checkpoint.proof import SignatureReport, Verification
from baton.checkpoint.store import CheckpointStore
from baton.runs.run import Run
from baton.signing import SIGNATURE, Signer
from baton.store.manifest import Manifest


@dataclass(frozen=True)
class Planted:
    """A change.

    Attributes:
        kind: What was done.
        what: Where.
        needs_record: Whether nobody can see it who has not written down where the run had come to.
    """

    kind: str
    what: str
    needs_record: bool = False


class Planter:
    """Plants changes in a run and takes them back.

    Args:
        run: The run, in a folder.
        others: Folders of the same shape of other runs, all signed by the same key.
        stranger: A key that is not the run's.
        seed: Decides where.
    """

    def __init__(self, run: Run, others: list[Path], stranger: Signer, seed: int) -> None:
        self.run = run
        self.folder = Path(run.storage.key(run.path()))
        self.others = others
        self.stranger = stranger
        self.random = Random(seed)
        self.kept = {path: path.read_bytes() for path in _files(self.folder)}
        self.seen = {path: _seen(path) for path in self.kept}
        self.steps = sorted(path.name for path in (self.folder / "checkpoints").iterdir())
        self.kinds: list[Callable[[], Planted | None]] = [
            *(self.flip, self.flip, self.flip_in_manifest, self.field, self.field, self.swap, self.remove),
            *(self.truncate, self.add, self.exchange, self.exchange_with_other, self.other_key, self.unsigned),
            *(self.signed_by_stranger, self.weights_by_stranger, self.roll_back, self.replay, self.mark),
            *(self.signature_of_other, self.newest_as_older),
        ]

    @contextmanager
    def planted(self, number: int) -> Iterator[Planted]:
        """Plants the change of a number, and takes it back."""
        change = None
        while change is None:  # where one came to nothing, as with two files that are the same
            change = self.kinds[number % len(self.kinds)]()
            if change is None:
                self.restore()
        try:
            yield change
        finally:
            self.restore()

    def restore(self) -> None:
        """Puts everything back."""
        for path in _files(self.folder):
            if path not in self.kept:
                path.unlink()
        for path, data in self.kept.items():
            if not path.is_file() or _seen(path) != self.seen[path]:
                path.parent.mkdir(parents=True, exist_ok=True)
                _put(path, data)
                self.seen[path] = _seen(path)

    def flip(self) -> Planted:
        """Flips a bit of any file."""
        return self._flip(self._any(), "bit")

    def flip_in_manifest(self) -> Planted:
        """Flips a bit of a manifest."""
        return self._flip(self._manifest(self._step()), "bit of a manifest")

    def field(self) -> Planted:
        """Changes, adds or removes a field of a manifest, at any depth."""
        path = self._manifest(self._step())
        document = json.loads(path.read_bytes())
        node, key = self.random.choice(list(_leaves(document)))
        action = self.random.choice(("change", "remove", "add"))
        if action == "change":
            node[key] = self._other(node[key])
        elif action == "remove":
            del node[key]
        else:
            node["more" if isinstance(node, dict) else slice(0, 0)] = ["x"]
        self._write_manifest(path, document)
        return Planted(f"field of a manifest: {action}", f"{path.parent.name} {key}")

    def swap(self) -> Planted | None:
        """Exchanges two files."""
        first, second = self._file(), self._file()
        a, b = first.read_bytes(), second.read_bytes()
        if a == b:
            return None
        _put(first, b)
        _put(second, a)
        return Planted("files exchanged", f"{first.name}, {second.name}")

    def remove(self) -> Planted:
        """Removes a file."""
        path = self._file()
        path.unlink()
        return Planted("file removed", path.name)

    def truncate(self) -> Planted | None:
        """Cuts a file off, or makes it longer."""
        path = self._file()
        data = path.read_bytes()
        if not data:
            return None
        longer = self.random.random() < 0.3
        _put(path, data + b"\0" if longer else data[: self.random.randrange(len(data))])
        return Planted("file longer" if longer else "file cut off", path.name)

    def add(self) -> Planted:
        """Adds a file that `from_pretrained` would read."""
        folder = self._attempt(self._step())
        name = self.random.choice(("model.safetensors.index.json", "pytorch_model.bin", "adapter_config.json", "x/y"))
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        if path.exists():
            path = folder / "more.json"
        path.write_bytes(b"{}")
        return Planted("file added", name)

    def exchange(self) -> Planted:
        """Exchanges the manifests of two steps."""
        first, second = (self._manifest(step) for step in self.random.sample(self.steps, 2))
        a, b = first.read_bytes(), second.read_bytes()
        _put(first, b)
        _put(second, a)
        return Planted("manifests of two steps exchanged", f"{first.parent.name}, {second.parent.name}")

    def exchange_with_other(self) -> Planted:
        """Puts the manifest of the same step of another run here, with or without its files."""
        step, other = self._step(), self.random.choice(self.others)
        _put(self._manifest(step), (other / "checkpoints" / step / "manifest.json").read_bytes())
        return Planted("another run's manifest", f"{step} of {other.name}")

    def replay(self) -> Planted:
        """Puts a whole step of another run of the same name and key in its place."""
        step, other = self._step(), self.random.choice(self.others)
        here = self.folder / "checkpoints" / step
        shutil.rmtree(here)
        shutil.copytree(other / "checkpoints" / step, here)
        return Planted("another run's whole step", f"{step} of {other}", needs_record=step == self.steps[-1])

    def other_key(self) -> Planted:
        """Puts the signature of another key over the same statement."""
        path = self._manifest(self._step())
        manifest = Manifest(**json.loads(path.read_bytes()))
        _put(path, self._by_stranger(manifest).as_written().encode())
        return Planted("signature of another key", path.parent.name)

    def unsigned(self) -> Planted:
        """Takes the signature away."""
        path = self._manifest(self._step())
        _put(path, signatures.unsigned(Manifest(**json.loads(path.read_bytes()))).as_written().encode())
        return Planted("signature removed", path.parent.name)

    def signature_of_other(self) -> Planted:
        """Puts the signature of another checkpoint, by the right key, into a manifest."""
        first, second = (self._manifest(step) for step in self.random.sample(self.steps, 2))
        document = json.loads(first.read_bytes())
        document["meta"]["signature"] = json.loads(second.read_bytes())["meta"]["signature"]
        self._write_manifest(first, document)
        return Planted("signature of another step", first.parent.name)

    def signed_by_stranger(self) -> Planted:
        """Changes what a manifest says, and signs it anew with another key."""
        path = self._manifest(self._step())
        manifest = Manifest(**json.loads(path.read_bytes()))
        changed = replace(manifest, meta={**manifest.meta, "digest": "0" * 64})
        _put(path, self._by_stranger(changed).as_written().encode())
        return Planted("changed, and signed by another key", path.parent.name)

    def weights_by_stranger(self) -> Planted:
        """Changes a file, gives its manifest the new SHA-256, and keeps the signature or makes another."""
        step = self._step()
        path, folder = self._manifest(step), self._attempt(step)
        manifest = Manifest(**json.loads(path.read_bytes()))
        name = self.random.choice(sorted(manifest.files))
        data = bytearray((folder / name).read_bytes() or b"\0")
        data[self.random.randrange(len(data))] ^= 1
        _put(folder / name, bytes(data))
        digest = hashlib.sha256(bytes(data)).hexdigest()
        files = {**manifest.files, name: {"size": len(data), "sha256": digest}}
        changed = replace(manifest, files=files)
        keeps = self.random.random() < 0.5
        _put(path, (changed if keeps else self._by_stranger(changed)).as_written().encode())
        return Planted(f"file and manifest rewritten, {'same signature' if keeps else 'another key'}", name)

    def roll_back(self) -> Planted:
        """Takes the newest steps away."""
        number = self.random.randrange(1, len(self.steps))
        for step in self.steps[-number:]:
            target = self.folder / "checkpoints" / step
            self._manifest(step).unlink() if self.random.random() < 0.5 else shutil.rmtree(target)
        return Planted("rolled back", f"{number} step(s)", needs_record=True)

    def newest_as_older(self) -> Planted:
        """Puts an older step under the newest one's name."""
        newest, older = self.folder / "checkpoints" / self.steps[-1], self.random.choice(self.steps[:-1])
        shutil.rmtree(newest)
        shutil.copytree(self.folder / "checkpoints" / older, newest)
        return Planted("older step under the newest name", older)

    def mark(self) -> Planted:
        """Hides the newest step by a mark, or calls one damaged."""
        newest = self.random.random() < 0.5
        step = self.steps[-1] if newest else self._step()
        word = "removed" if newest else "damaged"
        (self.folder / "checkpoints" / step / f"{word}-{self._attempt(step).name}").write_bytes(b"")
        return Planted(f"mark: {word}", step)

    def _flip(self, path: Path, kind: str) -> Planted:
        data = bytearray(path.read_bytes())
        if not data:
            data = bytearray(1)
        place = self.random.randrange(len(data))
        data[place] ^= 1 << self.random.randrange(8)
        _put(path, bytes(data))
        return Planted(kind, f"{path.name} byte {place}")

    def _by_stranger(self, manifest: Manifest) -> Manifest:
        bare = signatures.unsigned(manifest)
        bundle = self.stranger.sign(signatures.statement(bare))
        return replace(bare, meta={**bare.meta, SIGNATURE: bundle})

    def _other(self, value: Any) -> Any:
        if isinstance(value, bool) or value is None:
            return not value
        if isinstance(value, int | float):
            return value + 1
        if isinstance(value, str):
            place = self.random.randrange(len(value) + 1)
            return value[:place] + self.random.choice("abc019") + value[place:]
        return [value]

    def _write_manifest(self, path: Path, document: Any) -> None:
        _put(path, json.dumps(document, indent=1, sort_keys=True).encode())

    def _step(self) -> str:
        return self.random.choice(self.steps)

    def _manifest(self, step: str) -> Path:
        return self.folder / "checkpoints" / step / "manifest.json"

    def _attempt(self, step: str) -> Path:
        return self.folder / "checkpoints" / step / json.loads(self.kept[self._manifest(step)])["folder"]

    def _file(self) -> Path:
        return self.random.choice(sorted(_files(self._attempt(self._step()))))

    def _any(self) -> Path:
        return self.random.choice(sorted(path for path in self.kept if self.folder / "checkpoints" in path.parents))


def check(run: Run, signer: Signer, planter: Planter, number: int) -> tuple[list[Planted], dict[str, int]]:
    """Plants so many changes, and returns those that were not found, and how often each kind was planted."""
    honest = look(run, signer)
    assert honest["ok"], honest
    head = honest["head"]
    assert head is not None
    missed, kinds = list[Planted](), dict[str, int]()
    for count in range(number):
        with planter.planted(count) as change:
            record = (head["step"], head["manifest"]) if change.needs_record else (None, None)
            if look(run, signer, *record)["ok"]:
                missed.append(change)
        kinds[change.kind] = kinds.get(change.kind, 0) + 1
        if count % 50 == 0:  # and nothing is found where nothing was changed
            assert look(run, signer, head["step"], head["manifest"])["ok"]
    assert look(run, signer, head["step"], head["manifest"])["ok"]
    return missed, kinds


def look(run: Run, signer: Signer, step: int | None = None, digest: str | None = None) -> SignatureReport:
    """Verifies a run as `baton verify checkpoints --key` does."""
    return Verification(CheckpointStore(Run.open(run.uri)), signer.public).verdict(step, digest)


def _files(root: Path) -> list[Path]:
    return [Path(parent) / name for parent, _, names in os.walk(root) for name in names]


def _seen(path: Path) -> tuple[int, int, int]:
    """Returns what tells that a file was written since: every change here makes a new one."""
    stat = path.stat()
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


def _put(path: Path, data: bytes) -> None:
    path.unlink(missing_ok=True)  # files may share their bytes with another checkpoint's
    path.write_bytes(data)


def _leaves(node: Any) -> Iterator[tuple[Any, Any]]:
    for key in list(node) if isinstance(node, dict) else range(len(node)):
        value = node[key]
        if isinstance(value, dict | list) and value:
            yield from _leaves(value)
        yield node, key
