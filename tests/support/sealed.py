"""A run with a chain of seals, changes planted in any of its objects, and what its stages would make of them."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from baton import signing
from baton.checkpoint import seals
from baton.checkpoint.chain import ChainCheck, ChainReport
from baton.checkpoint.proof import Verification
from baton.checkpoint.store import CheckpointStore
from baton.errors import BatonError
from baton.runs import objects
from baton.runs.objects import Mend
from baton.runs.run import Run
from baton.signing import PublicKey, Signer
from baton.store import bundle
from baton.store.manifest import Manifest, parsed, read_manifest
from baton.store.storage import Storage

RECIPE = str(Path(__file__).parents[1] / "recipes/scratch.yaml")
BATON = str(Path(sys.executable).parent / "baton")
SETTINGS = (
    *("training.epochs=null", "training.max_steps=4", "chunks.count=2", "tracking.mlflow=null"),
    *("training.guard={}", 'evaluation.gate={loss: "<= 100"}', "evaluation.samples=1"),
    "export.formats=[safetensors, oci]",
)


class SealedRun:
    """A finished run in a folder, signed where it has a key."""

    def __init__(self, folder: Path, kind: signing.Kind | None = "ed25519", name: str = "whole") -> None:
        self.folder = folder
        self.signer = Signer.new(kind) if kind else None
        self.public = self.signer.public if self.signer else None
        self.key = folder / "run.key"
        if self.signer:
            self.key.write_bytes(self.signer.pem())
            (folder / "run.key.pub").write_bytes(self.signer.public.pem)
        self.store = folder / "store"
        self.run = Run(Storage(str(self.store)), name)

    @property
    def environment(self) -> dict[str, str]:
        """What a stage of the run has in its environment."""
        return {signing.KEY_FILE: str(self.key), signing.SIGNED_BY: self.public.line} if self.public else {}

    def start(self, *settings: str) -> subprocess.CompletedProcess[str]:
        """Runs it, again where it was."""
        command = [BATON, "run", RECIPE, "--run", self.run.name, "--store", str(self.store), "--output", "json"]
        signs = [f"chunks.signing={{public_key: {self.public.line}}}"] if self.public else []
        command += [word for setting in (*SETTINGS, *signs, *settings) for word in ("--set", setting)]
        environment = {**os.environ, signing.KEY_FILE: str(self.key)}
        return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)

    def finish(self, *settings: str) -> dict[str, Any]:
        """Runs it to its end, and returns what it printed."""
        done = self.start(*settings)
        assert done.returncode == 0, done.stdout + done.stderr
        result: dict[str, Any] = json.loads(done.stdout)
        return result

    def check(self, public: PublicKey | None = None) -> ChainReport:
        """Compares all objects with the chain, by default with the run's key."""
        return ChainCheck(self.run, public or self.public).verdict()

    def is_unchanged(self) -> bool:
        """Whether nobody finds a change: what `baton verify run` looks at."""
        found = self.check()["ok"]
        if found and self.public:
            return Verification(CheckpointStore(self.run, self.public), self.public).verdict()["ok"]
        return found


@dataclass(frozen=True)
class Planted:
    """A change of an object: its kind, and the paths of changed files."""

    kind: str
    paths: tuple[Path, ...]


class RunPlanter:
    """Plants changes in any object of a run, one at a time; `older` is a copy of the store from before."""

    def __init__(self, sealed: SealedRun, older: Path, seed: int) -> None:
        self.sealed, self.older, self.random = sealed, older, Random(seed)
        self.kept = {path: path.read_bytes() for path in _files(sealed.store)}
        self.paths = sorted(self.kept)
        self.kinds: list[Callable[[Path], Planted | None]] = [
            *(self.flip, self.flip, self.empty, self.cut, self.delete, self.swap, self.go_back, self.field),
            *(self.rehash, self.rehash, self.plant, self.mark, self.by_stranger),
        ]

    @contextlib.contextmanager
    def planted(self, number: int) -> Iterator[Planted]:
        """Plants the change of a number, and takes it back with all that came of it."""
        change = None
        while change is None:  # where one came to nothing
            change = self.kinds[number % len(self.kinds)](self.random.choice(self.paths))
        try:
            yield change
        finally:
            self.restore()

    def restore(self) -> None:
        """Puts everything back."""
        for path in _files(self.sealed.store):
            if path not in self.kept:
                path.unlink()
        for path, data in self.kept.items():
            if not path.is_file() or path.read_bytes() != data:
                path.parent.mkdir(parents=True, exist_ok=True)
                _put(path, data)

    def flip(self, path: Path) -> Planted | None:
        data = bytearray(self.kept[path])
        if not data:
            return None
        data[self.random.randrange(len(data))] ^= 1 << self.random.randrange(8)
        return self._put("bit", path, bytes(data))

    def empty(self, path: Path) -> Planted | None:
        return self._put("emptied", path, b"")

    def cut(self, path: Path) -> Planted | None:
        data = self.kept[path]
        return self._put("cut", path, data[: self.random.randrange(len(data))] if data else b"")

    def delete(self, path: Path) -> Planted | None:
        if self._is_loose(path):
            return None
        path.unlink()
        return Planted("deleted", (path,))

    def swap(self, path: Path) -> Planted | None:
        other = self.random.choice([each for each in self.paths if each.parent == path.parent])
        if self.kept[other] == self.kept[path]:
            return None
        _put(other, self.kept[path])
        _put(path, self.kept[other])
        return Planted("swapped", (path, other))

    def go_back(self, path: Path) -> Planted | None:
        older = self.older / path.relative_to(self.sealed.store)
        return self._put("older", path, older.read_bytes()) if older.is_file() else None

    def field(self, path: Path) -> Planted | None:
        """Another value in a document that is written as Baton writes it."""
        if path.suffix != ".json" or "tokenizer" in path.name:
            return None
        document = json.loads(self.kept[path])
        leaves = list(_leaves(document))
        if not leaves:
            return None
        node, key = self.random.choice(leaves)
        node[key] = node[key] + 1 if type(node[key]) in (int, float) else f"{node[key]}x"
        return self._put("field", path, json.dumps(document, indent=1, sort_keys=True).encode())

    def rehash(self, path: Path) -> Planted | None:
        """Another file of a bundle, and its hash in the manifest."""
        for manifest_path in (each for each in self.paths if each.name.startswith("manifest")):
            document = json.loads(self.kept[manifest_path])
            folder = manifest_path.parent / document["folder"]
            if not path.is_relative_to(folder) or str(path.relative_to(folder)) not in document["files"]:
                continue
            data = self.kept[path] + b" "
            entry = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
            document["files"][str(path.relative_to(folder))] = entry
            _put(path, data)
            _put(manifest_path, Manifest(**document).as_written().encode())
            return Planted("file and manifest", (path, manifest_path))
        return None

    def plant(self, path: Path) -> Planted:
        """An object that no stage wrote, where one would be read."""
        run = self.sealed.store / self.sealed.run.path()
        end = {"stable_until": 1, "last_step": 2, "is_decayed": True, "reason": "", "budget": {"limit": "1h"}}
        skip = {"step": 2, "chunk": 1, "reason": "loss", "message": "step 2 has the loss 9"}
        name, document = self.random.choice(
            [
                ("skips/step-00000002.json", skip),
                ("micro_batch.json", {"micro_batch_size": 1}),
                ("ends/end-001.json", end),
                ("lr_find.json", {"learning_rate": 0.5}),
                ("fork.json", {"parent": "x", "step": 1, "warm": False}),
                ("trial.json", {"sweep": "s", "id": "t000", "metric": "loss"}),
                ("code.json", {"prefix": "data/00/code"}),
                ("scores/chunk-001.json", {"chunk": 1, "step": 2, "value": 0.0}),
                ("strange.json", {}),
                (f"seals/{len(list((run / 'seals').iterdir())) + 1:06d}.json", {"dsseEnvelope": {}}),
            ]
        )
        target = run / name
        target.parent.mkdir(exist_ok=True)
        target.write_text(json.dumps(document, indent=1, sort_keys=True))
        return Planted("planted", (target,))

    def mark(self, path: Path) -> Planted:
        manifest_path = self.random.choice([each for each in self.paths if each.name.startswith("manifest")])
        target = manifest_path.parent / f"damaged-{json.loads(self.kept[manifest_path])['folder']}"
        target.write_bytes(b"")
        return Planted("marked", (target,))

    def by_stranger(self, path: Path) -> Planted | None:
        """A seal with another statement, signed by another key or by none."""
        if path.parent.name != "seals" or not self.sealed.signer:
            return None
        statement = self.sealed.signer.public.open(json.loads(self.kept[path]))
        state = statement["predicate"]["buildDefinition"]["internalParameters"]["state"]
        state[self.random.choice(sorted(state))][0] = "0" * 64
        is_signed = self.random.random() < 0.5
        signed = Signer.new("ed25519").sign(statement) if is_signed else seals.enveloped(statement, signs=False)
        return self._put("seal by a stranger", path, seals.as_bytes(signed))

    def _put(self, kind: str, path: Path, data: bytes) -> Planted | None:
        if data == self.kept[path]:
            return None
        _put(path, data)
        return Planted(kind, (path,))

    def _is_loose(self, path: Path) -> bool:
        """Whether a loss harms nothing, and is not told: notes of a pace, and parts that a manifest has joined."""
        name = str(path.relative_to(self.sealed.store / self.sealed.run.path(""))) if "runs" in path.parts else ""
        known = objects.find(name)
        is_note = known is not None and known.mend is Mend.NOTE and not name.startswith(("records/", "restarts/"))
        return is_note or path.parent.name == "parts"


def obeyed(sealed: SealedRun, change: Planted, kept: dict[Path, bytes]) -> str | None:
    """Returns what a stage of the run would use of a change, None where nothing."""
    run, storage = sealed.run, sealed.run.storage
    manifests = [path for path in kept if path.name.startswith("manifest")]
    places = {str(path.parent.relative_to(sealed.store)): path for path in manifests}
    for path in change.paths:
        inside = str(path.relative_to(sealed.store))
        prefix = next((each for each in places if inside.startswith(f"{each}/")), None)
        name = inside.removeprefix(f"{run.path()}/")
        if name.startswith("seals/"):
            whole = [data for each, data in kept.items() if each.parent.name == "seals"]
            with seals.stage(run, objects.REPORT, appends=False) as ledger:
                head = ledger.head
            if head and seals.as_bytes(head.bundle) not in whole:
                return f"seal {name}"
            continue
        known = objects.find(prefix.removeprefix(f"{run.path()}/") if prefix else name)
        for kind in known.readers if known else ():
            with contextlib.suppress(BatonError, FileNotFoundError), seals.stage(run, kind, 1, appends=False):
                if prefix is None:
                    if storage.read(inside) != kept.get(path):
                        return f"{name} in {kind}"
                    continue
                manifest = read_manifest(storage, prefix)
                original = parsed(kept[places[prefix]], prefix)
                if manifest is None:
                    continue
                if prefix.startswith(f"{run.path()}/checkpoints/"):
                    step = int(prefix.rpartition("-")[2])
                    checkpoint = CheckpointStore(run, sealed.public).read(step)
                    manifest = checkpoint.manifest if checkpoint else original
                bundle.fetch(storage, prefix, manifest, "", names=manifest.files)
                if manifest.files != original.files:
                    return f"{name} in {kind}"
    return None


def _files(root: Path) -> list[Path]:
    return [Path(parent, name) for parent, _, names in os.walk(root) for name in names]


def _put(path: Path, data: bytes) -> None:
    # A new file: checkpoints of a folder share files by links.
    scratch = path.with_name(path.name + ".new")
    scratch.write_bytes(data)
    os.replace(scratch, path)


def _leaves(document: Any) -> Iterator[tuple[Any, Any]]:
    pairs = (
        document.items() if isinstance(document, dict) else enumerate(document) if isinstance(document, list) else ()
    )
    for key, value in pairs:
        if isinstance(value, dict | list):
            yield from _leaves(value)
        elif isinstance(value, str | int | float) and not isinstance(value, bool):
            yield document, key


def copied(sealed: SealedRun, folder: Path) -> SealedRun:
    """Returns a copy of a run and its store, with the same key."""
    shutil.copytree(sealed.folder, folder)
    copy = SealedRun.__new__(SealedRun)
    copy.folder, copy.signer, copy.public = folder, sealed.signer, sealed.public
    copy.key, copy.store = folder / "run.key", folder / "store"
    copy.run = Run(Storage(str(copy.store)), sealed.run.name)
    return copy
