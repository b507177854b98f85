"""Verification of a run's chain of seals, and of an export that carries it, by anybody, offline.

With the public key every change to an object of a run is found: each seal must be signed, name the previous one, and
agree with the bytes that are there. Without a key the same comparison finds damage. It does not find malice: whoever
can write to the store can write seals too.

An export has two more files: `baton-chain.json` with all seals up to it, and `model.sig`, a signature of all its other
files in the form of sigstore's model-signing, which names the newest seal.

Decisions about runs, of a sweep and of a retrained model, are documents with a signature each.
"""

import contextlib
import json
import os
import re
from collections.abc import Iterator
from typing import Any, TypedDict

from baton import signing
from baton.checkpoint import signatures
from baton.checkpoint.seals import (
    FOLDER,
    STEP,
    Entry,
    Seal,
    as_bytes,
    is_attested,
    numbers,
    parsed_part,
    read_seal,
    sha256,
)
from baton.checkpoint.store import CheckpointStore
from baton.documents import load_object
from baton.errors import BatonError, DamagedError, UserError
from baton.runs import objects
from baton.runs.documents import RunInfo
from baton.runs.lineage import Models
from baton.runs.objects import Mend
from baton.runs.run import Run, Sweep, as_json
from baton.signing import PublicKey, SignatureError
from baton.store import bundle
from baton.store.manifest import FileEntry, Manifest, manifest_name, read_manifest
from baton.store.protocol import OWN
from baton.store.storage import Storage

_OF_RUN = re.compile(r"runs/([a-z0-9-]+)/(export|export-[0-9a-f]+|exports/[^/]+|start/[^/]+)/([0-9a-f]{12})")
CHAIN_FILE, SIGNATURE_FILE = "baton-chain.json", "model.sig"


class SealRow(TypedDict):
    number: int
    stage: str
    digest: str
    written: list[str]


class ChainReport(TypedDict):
    """Seals, oldest first; problems, notes, and the number of objects that agree with a seal."""

    ok: bool
    seals: list[SealRow]
    head: str  # digest of the newest seal
    objects: int
    problems: list[str]
    notes: list[str]


class ChainCheck:
    """Compares the objects of a run with its seals, which a key must have signed, if given."""

    def __init__(self, run: Run, public: PublicKey | None) -> None:
        self._run, self._public, self._storage = run, public, run.storage
        self._problems: list[str] = []
        self._notes: list[str] = []
        self._agreeing = 0

    def verdict(self, expected: str | None = None) -> ChainReport:
        """Reads everything back; `expected` is the digest of a seal, as noted elsewhere, that the chain must have."""
        seals = list(self._seals())
        if seals:
            self._compare(seals)
        elif not self._problems:
            self._without_seals()
        if expected is not None and expected not in (seal.digest for seal in seals):
            self._problems.append(f"the chain has no seal {expected}: the run was rolled back, or its seals are gone")
        return {
            "ok": not self._problems,
            "seals": [
                {"number": seal.number, "stage": seal.stage, "digest": seal.digest, "written": sorted(seal.written)}
                for seal in seals
            ],
            "head": seals[-1].digest if seals else "",
            "objects": self._agreeing,
            "problems": self._problems,
            "notes": self._notes,
        }

    def _without_seals(self) -> None:
        try:
            checkpoints = list(CheckpointStore(self._run, self._public).committed(lambda *_: None))
        except BatonError as error:
            self._problems.append(error.message)
            return
        if any(each.meta.seal for each in checkpoints):
            self._problems.append("the run's checkpoints name seals, and all seals are gone")
        elif self._public and not checkpoints:
            self._problems.append(f"nothing of the run is signed by the key {self._public.name}")
        else:
            self._notes.append("the run has no seals: an older Baton began it, and changes are not found here")

    def _seals(self) -> Iterator[Seal]:
        there = numbers(self._run)
        before: Seal | None = None
        for number in range(1, max(there, default=0) + 1):
            try:
                seal = read_seal(self._run, number, self._public)
            except FileNotFoundError:
                self._problems.append(f"seal {number} is gone")
                before = None
                continue
            except (DamagedError, SignatureError) as error:
                self._problems.append(f"seal {number}: {error.message}")
                before = None
                continue
            self._problems += follows(seal, before)
            before = seal
            yield seal

    def _compare(self, seals: list[Seal]) -> None:
        state, run = seals[-1].state, self._run
        notes = next((seal.read for seal in reversed(seals) if seal.stage == objects.REPORT), {})
        listing = self._storage.find(run.path())
        bundles = {name for name in state if (known := objects.find(name)) and known.is_bundle}
        unsealed: list[str] = []
        for name in listing:
            if name.startswith((f"{FOLDER}/", "checkpoints/")) or name.rpartition("/")[2].startswith(OWN):
                continue
            if any(name.startswith(f"{each}/") for each in bundles):
                continue
            known = objects.find(name)
            digest = notes.get(name, "") if known and known.mend is Mend.NOTE else state.get(name, Entry("")).sha256
            if known is None and not _is_in_bundle(name):  # else of a killed upload
                self._problems.append(f"{name}: no stage writes it")
            elif known is None:
                unsealed.append(name)
            elif not digest and (known.readers or known.mend is not Mend.NOTE) and objects.REPORT in seals[-1].stages:
                self._problems.append(f"{name}: no seal has it")
            elif not digest:
                unsealed.append(name)
            elif self._storage.sha256(run.path(name))[1] != digest:
                self._problems.append(f"{name}: it differs from the run's seal")
            else:
                self._agreeing += 1
        self._problems += [
            f"{name}: it is gone" for name in (*state, *notes) if name not in bundles and self._is_lost(name, listing)
        ]
        if unsealed:
            shown = ", ".join(unsealed[:5]) + (f" and {len(unsealed) - 5} more" if len(unsealed) > 5 else "")
            self._notes.append(f"in no seal yet: {shown}")
        for name in sorted(bundles):
            found = list(
                self._of_checkpoint(name, seals) if name.startswith(STEP) else self._of_bundle(name, state[name])
            )
            self._problems += [f"{name}: {problem}" for problem in found]
            self._agreeing += not found
        for name in sorted({name for seal in seals for name in seal.written if name.startswith(STEP)} - bundles):
            self._problems += [f"{name}: {problem}" for problem in self._of_checkpoint(name, seals)]

    def _is_lost(self, name: str, listing: object) -> bool:
        known = objects.find(name)
        if known is None or known.is_bundle or name in listing:  # type: ignore[operator]
            return False
        return known.mend is not Mend.NOTE or known.pattern.startswith(("records/", "restarts/"))

    def _of_bundle(self, name: str, entry: Entry) -> Iterator[str]:
        prefix = name if name.startswith("data/") else self._run.path(name)
        try:
            manifest = read_manifest(self._storage, prefix)
            if manifest is None:
                yield "it is gone"
                return
        except BatonError as error:
            yield error.message
            return
        is_same = sha256(manifest.as_written().encode()) == entry.sha256
        known = objects.find(name)
        if not is_same and not (known and known.is_shared and entry.is_remade(prefix, manifest, self._public)):
            yield "its manifest differs from the run's seal"
            return
        yield from self._bytes_of_manifest(prefix, manifest)
        yield from bundle.verify(self._storage, prefix, manifest)
        present = self._storage.find(manifest.path(prefix))
        for extra in sorted(set(present) - manifest.files.keys()):
            if not (manifest.kind == "tokens" and extra.startswith("parts/")):
                yield f"{extra}: not in the manifest"
            elif self._public and not self._is_part(manifest.path(prefix, extra)):
                yield f"{extra}: not as it was signed"

    def _is_part(self, path: str) -> bool:
        try:
            part = parsed_part(load_object(self._storage.read(path), path))
        except (BatonError, KeyError, TypeError):
            return False
        return is_attested(path, part, self._public)

    def _of_checkpoint(self, name: str, seals: list[Seal]) -> Iterator[str]:
        """Yields how a sealed checkpoint's manifest has changed; one that retention removed has not."""
        prefix, number = self._run.path(name), int(name.removeprefix(STEP))
        written = (seal.written[name] for seal in reversed(seals) if name in seal.written)
        if (digest := next(written, None)) is None:  # its seal cannot be read
            digest = seals[-1].state[name].sha256
        try:
            manifest = read_manifest(self._storage, prefix)
        except BatonError as error:
            yield error.message
            return
        if manifest is None:
            if name in seals[-1].state and not any(CheckpointStore(self._run, self._public).committed(after=number)):
                yield "it is gone, and nothing newer is there"
        elif sha256(manifest.as_written().encode()) != digest:
            yield "its manifest differs from the run's seal"
        else:
            yield from self._bytes_of_manifest(prefix, manifest)

    def _bytes_of_manifest(self, prefix: str, manifest: Manifest) -> Iterator[str]:
        names = [name for name in self._storage.list(prefix) if name.startswith("manifest")]
        newest = max(names, key=len) if names else manifest_name(1)
        newest = max((name for name in names if len(name) == len(newest)), default=newest)
        if self._storage.read(f"{prefix}/{newest}") != manifest.as_written().encode():
            yield "its manifest is not in the form in which it was written"


def _is_in_bundle(name: str) -> bool:
    parts = name.split("/")
    kinds = (objects.find("/".join(parts[:size])) for size in range(1, len(parts)))
    return any(kind is not None and kind.is_bundle for kind in kinds)


def follows(seal: Seal, before: Seal | None) -> Iterator[str]:
    """Yields how a seal does not continue the previous one; nothing where that cannot be read."""
    if before is None and seal.number > 1:
        return
    if before is None and seal.previous:
        yield "seal 1 names one before it"
    elif before and seal.previous != before.digest:
        yield f"seal {seal.number} continues another seal {before.number} than this store's"
    changed = {name: entry.sha256 for name, entry in seal.state.items() if entry.seal == seal.number}
    kept = {name: entry for name, entry in seal.state.items() if name not in changed}
    if not (kept.items() <= (before.state.items() if before else set()) and changed.items() <= seal.written.items()):
        yield f"seal {seal.number} states what no stage wrote"


def write_export(run: Run, folder: str, public: PublicKey | None, **facts: object) -> None:
    """Writes the run's seals so far into an export's folder, and with a key the signature of all its files."""
    seals = list(_readable(run, public))
    if not seals:
        return
    document = {"run": run.name, "seals": [seal.bundle for seal in seals]}
    with open(f"{folder}/{CHAIN_FILE}", "w", encoding="utf-8") as file:
        json.dump(document, file, indent=1, sort_keys=True)
    if public:
        meta = {"run": run.name, "seal": seals[-1].digest, **facts}
        manifest = Manifest(kind="model", folder="", files=_files(folder), meta=meta)
        with open(f"{folder}/{SIGNATURE_FILE}", "w", encoding="utf-8") as file:
            json.dump(signatures.sign(manifest, public), file)


def _readable(run: Run, public: PublicKey | None) -> Iterator[Seal]:
    for number in numbers(run):
        with contextlib.suppress(DamagedError, SignatureError, FileNotFoundError):
            yield read_seal(run, number, public)


def _files(folder: str) -> dict[str, FileEntry]:
    files: dict[str, FileEntry] = {}
    for place, _, names in os.walk(folder):
        for path in (os.path.join(place, name) for name in names):
            name = os.path.relpath(path, folder).replace(os.sep, "/")
            files[name] = {"size": os.path.getsize(path), "sha256": bundle.file_sha256(path)}
    return files


def require_sealed_model(storage: Storage, uri: str, folder: str, public: PublicKey | None) -> None:
    """Compares a local copy of another run's model with the seals of that run, if there is a key.

    Raises:
        SignatureError: no seal of that run has it.
    """
    match = _OF_RUN.fullmatch(uri.removeprefix(f"{storage.uri()}/"))
    if public is None or match is None:
        return
    run, prefix = Run(storage, match[1]), f"runs/{match[1]}/{match[2]}"
    seals = list(_readable(run, public))
    entry = seals[-1].state.get(match[2]) if seals else None
    manifest = read_manifest(storage, prefix)
    written = manifest.as_written().encode() if manifest else b""
    is_sealed = manifest and entry and (sha256(written), manifest.folder) == (entry.sha256, match[3])
    named = {name: each["sha256"] for name, each in manifest.files.items()} if manifest else {}
    here = {name: each["sha256"] for name, each in _files(folder).items() if not name.startswith(".")}
    if not is_sealed or not here.items() <= named.items():
        raise SignatureError(
            f"the model {uri} is refused: it is not as run {match[1]!r} sealed it with the key {public.name}.",
            remedy=f"Run {match[1]!r} again, which exports it again. To use a model without seals, copy it elsewhere.",
        )


class DecisionsReport(TypedDict):
    """Documents that are as signed, files without a signature, which no stage obeys, and problems."""

    ok: bool
    uri: str
    documents: list[str]
    unsigned: list[str]
    problems: list[str]


def verify_decisions(folder: Sweep | Models, public: PublicKey, *, signs: bool = False) -> DecisionsReport:
    """Compares the documents of a sweep and all its trials, or of accepted models and their runs, with a key.

    Args:
        folder: The sweep, or the models.
        public: The key.
        signs: Whether documents that have no signature get one, of this process.

    Raises:
        UserError: nothing is there.
    """
    storage, problems, agreeing, unsigned = folder.storage, [], [], []
    runs: dict[str, None] = {}
    if not (there := sorted(storage.find(folder.path()))):
        raise UserError(f"{folder.uri} does not exist.", remedy="Check store and name.")
    for name in there:
        path = folder.path(name)
        if name.rpartition("/")[2].startswith(OWN):
            continue
        is_note = not name.endswith(".json") or name.startswith(Sweep.NOTES)
        if is_note or (isinstance(folder, Models) and not name.startswith("accepted/")):
            unsigned.append(name)
            continue
        try:
            data = storage.read(path)
            document = load_object(data, storage.uri(path))
            if signs and signing.SIGNATURE not in document:
                document = signing.stamped(path, document, public)
                storage.write(path, data := as_json(document))
            plain = signing.opened(path, document, public)
            if data != as_json(document):
                raise SignatureError("it is not in the form in which it was written.")
        except (DamagedError, SignatureError) as error:
            problems.append(f"{name}: {error.message}")
            continue
        agreeing.append(name)
        trials = plain.get("trials", []) if name == "sweep.json" else [plain]
        runs |= {str(trial["run"]): None for trial in trials if "run" in trial}
    if not agreeing:
        problems.append(f"nothing of {folder.uri} is signed by the key {public.name}")
    for run in (Run(storage, name) for name in runs):
        own = storage.list(run.path())
        if FOLDER in own or RunInfo.NAME in own:
            problems += [f"run {run.name}: {problem}" for problem in ChainCheck(run, public).verdict()["problems"]]
        elif not own and isinstance(folder, Sweep):  # a trial that has not begun has its values
            problems.append(f"run {run.name}: it is gone")
    return {
        "ok": not problems,
        "uri": folder.uri,
        "documents": agreeing,
        "unsigned": unsigned,
        "problems": problems,
    }


class ExportReport(TypedDict):
    """An export's origin, as its seals state it, and its problems."""

    ok: bool
    folder: str
    is_signed: bool
    run: str
    origin: dict[str, Any]
    seals: list[SealRow]
    problems: list[str]
    notes: list[str]


def is_export(folder: str) -> bool:
    """Tells whether a local folder is an export that carries its chain."""
    return os.path.isfile(f"{folder}/{CHAIN_FILE}")


def verify_export(folder: str, public: PublicKey | None) -> ExportReport:
    """Compares an export's files with its signature and its chain, offline, by the folder alone.

    Without a key only the chain's own consistency is checked: files that were changed are not found.
    """
    problems: list[str] = []
    with open(f"{folder}/{CHAIN_FILE}", "rb") as file:
        document = load_object(file.read(), CHAIN_FILE)
    run, seals, before = str(document.get("run")), [], None
    for number, given in enumerate(document.get("seals", ()), 1):
        try:
            seal = Seal.parse(as_bytes(given), f"{number:06d}.json", run, public)
        except (DamagedError, SignatureError) as error:
            problems.append(f"seal {number}: {error.message}")
            before = None
            continue
        problems += follows(seal, before)
        before = seal
        seals.append(seal)
    stated: dict[str, Any] = {}
    if public:
        try:
            stated = _signed(folder, public, problems)
        except (OSError, BatonError, KeyError, TypeError) as error:
            problems.append(f"{SIGNATURE_FILE}: {getattr(error, 'message', error)}")
        if seals and stated and (stated.get("run"), stated.get("seal")) != (run, seals[-1].digest):
            problems.append("the signature names another chain than the export has")
    if not seals:
        problems.append("the chain has no seal")
    return {
        "ok": not problems,
        "folder": folder,
        "is_signed": bool(stated),
        "run": run,
        "origin": origin(seals) | {"step": stated.get("step"), "state": stated.get("digest")} if seals else {},
        "seals": [
            {"number": seal.number, "stage": seal.stage, "digest": seal.digest, "written": sorted(seal.written)}
            for seal in seals
        ],
        "problems": problems,
        "notes": [] if public else ["without a key: damage to the chain is found, and malice is not"],
    }


def _signed(folder: str, public: PublicKey, problems: list[str]) -> dict[str, Any]:
    """Returns the facts that an export was signed with, and adds how its files differ."""
    with open(f"{folder}/{SIGNATURE_FILE}", "rb") as file:
        statement = public.open(load_object(file.read(), SIGNATURE_FILE))
    resources = {each["name"]: each["digest"] for each in statement["predicate"]["resources"]}
    here = {name: entry["sha256"] for name, entry in _files(folder).items() if name != SIGNATURE_FILE}
    for name in sorted(resources.keys() | here.keys()):
        if name not in here:
            problems.append(f"{name}: it is gone")
        elif name not in resources:
            problems.append(f"{name}: it was not signed")
        elif here[name] != resources[name]:
            problems.append(f"{name}: it has changed since it was signed")
    told: dict[str, Any] = statement["predicate"]["baton"]
    return told


def origin(seals: list[Seal]) -> dict[str, Any]:
    """Returns where a model comes from, as the seals of its run state it."""
    texts: dict[str, str] = {}
    for seal in seals:
        texts |= seal.contents
    documents = {name: json.loads(text) for name, text in texts.items() if name.endswith(".json")}
    state, split = seals[-1].state, documents.get("split.json", {})
    chunks = {
        seal.stage: {name.removeprefix(STEP): digest for name, digest in seal.written.items() if name.startswith(STEP)}
        for seal in seals
        if seal.stage.startswith(f"{objects.CHUNK}-")
    }
    facts = {key: value for seal in seals for key, value in seal.facts.items()}
    return {
        "rows": {
            **{name: split.get(name) for name in ("train", "eval", "test")},
            "digest": documents.get("data.json", {}).get("digest"),
        },
        "tokens": next((entry.content for name, entry in state.items() if "/tokens" in name), None),
        "recipe": state["recipe.json"].sha256 if "recipe.json" in state else None,
        "base": documents.get("model.json", {}).get("base_sha256"),
        "code": documents.get("code.json", {}).get("prefix", "").removeprefix("data/").removesuffix("/code") or None,
        "plan": documents.get("plan.json", {}).get("targets"),
        "chunks": chunks,
        "skips": sorted(name for name in state if name.startswith("skips/")),
        **facts,
    }


def require_folder(folder: str) -> str:
    """Returns the folder of an export; `UserError` if it carries no chain."""
    if not is_export(folder):
        raise UserError(
            f"{folder!r} holds no {CHAIN_FILE}.",
            remedy="Name a run, or the folder of an export that a sealed run wrote.",
        )
    return folder
