"""Seals: a chain of statements, one a stage, of the objects of a run that the stage has read and written.

    runs/<run>/seals/000003.json    put-if-absent; names its stage and the digest of the previous one

A seal is an in-toto statement with SLSA's provenance in a DSSE envelope, signed where the run has a key. Its `state`
has the digest of every object so far: the newest seal alone tells which hold. `contents` has the small documents that
the stage wrote; a damaged one is written again from there. While a stage is open, its reads and writes through any
`Storage` are seen here: reads are compared with the newest seal, and writes go into the stage's own.
"""

import base64
import contextlib
import functools
import hashlib
import json
import logging
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, ParamSpec, Self, TypeVar

from baton.checkpoint.signatures import manifest_digest, signature_problem
from baton.documents import load_object
from baton.errors import BatonError, DamagedError
from baton.runs import objects
from baton.runs.documents import OwnCode, SplitData, TokenizedRows
from baton.runs.objects import Mend, RunObject
from baton.runs.run import Run
from baton.runs.versions import release
from baton.signing import (
    BUILD_TYPE,
    MEDIA_TYPE,
    PAYLOAD_TYPE,
    SIGNATURE,
    STATEMENT_TYPE,
    Bundle,
    PublicKey,
    SignatureError,
    signer_here,
    signer_of,
    statement_of,
    trusted_here,
)
from baton.store.manifest import Manifest, manifest_name, parsed, read_manifest
from baton.store.storage import Storage

logger = logging.getLogger("baton")
P = ParamSpec("P")
T = TypeVar("T")
_watching = threading.Lock()

FOLDER = "seals"
PREDICATE_TYPE = "https://slsa.dev/provenance/v1"
STEP = "checkpoints/step-"
_NAME = re.compile(r"(\d{6,})\.json")
_MANIFEST = re.compile(r"(.+)/manifest(?:-[1-9]\d*)?\.json")
_WRITER = re.compile(r"-[0-9a-f]{8}(?=\.[a-z]+$)")  # part of the name of a file of tokens


class Entry(NamedTuple):
    """An object's SHA-256, the number of its seal, and of a bundle the attempt and SHA-256 of its content."""

    sha256: str
    seal: int = 0
    content: str = ""
    folder: str = ""

    def is_remade(self, place: str, manifest: Manifest, public: PublicKey | None) -> bool:
        """Tells whether a manifest of another run holds the same content, committed again."""
        if manifest.kind == "tokens":  # all attempts share a folder
            return content_digest(manifest) == self.content and is_attested(place, manifest, public)
        return content_digest(manifest) == self.content and manifest.folder != self.folder


@dataclass(frozen=True)
class Seal:
    number: int
    stage: str
    statement: dict[str, Any]
    digest: str  # SHA-256 of the statement's bytes, by which the next seal names it
    bundle: Bundle

    @cached_property
    def _internal(self) -> dict[str, Any]:
        internal: dict[str, Any] = self.statement["predicate"]["buildDefinition"]["internalParameters"]
        return internal

    @cached_property
    def state(self) -> dict[str, Entry]:
        return {name: Entry(*values) for name, values in self._internal["state"].items()}

    @property
    def stages(self) -> dict[str, int]:
        """The stages so far, each with the number of its newest seal."""
        return dict(self._internal["stages"])

    @property
    def contents(self) -> dict[str, str]:
        return dict(self._internal["contents"])

    @property
    def previous(self) -> str:
        return str(self._internal["previous"])

    @property
    def facts(self) -> dict[str, Any]:
        return dict(self._internal["facts"])

    @property
    def is_adopted(self) -> bool:
        """Whether the run was begun by a Baton without seals."""
        return bool(self._internal["adopted"])

    @property
    def written(self) -> dict[str, str]:
        return {each["name"]: each["digest"]["sha256"] for each in self.statement["subject"]}

    @property
    def read(self) -> dict[str, str]:
        given = self.statement["predicate"]["buildDefinition"]["resolvedDependencies"]
        return {each["name"]: each["digest"]["sha256"] for each in given}

    @classmethod
    def parse(cls, data: bytes, where: str, run: str, public: PublicKey | None) -> Self:
        """Reads a seal; `DamagedError` if it is not this run's in this place, `SignatureError` if the key differs."""
        bundle = load_object(data, where)
        match = _NAME.fullmatch(where.rpartition("/")[2])
        try:
            payload = base64.b64decode(bundle["dsseEnvelope"]["payload"], validate=True)
            digest = sha256(payload)
            statement = public.open(bundle) if public else load_object(payload, where)
            given = statement["predicate"]["buildDefinition"]
            outer, inner = given["externalParameters"], given["internalParameters"]
            seal = cls(int(inner["number"]), str(outer["stage"]), statement, digest, bundle)
            if match is None or (int(match[1]), run) != (seal.number, outer["run"]):
                raise ValueError(f"it is seal {seal.number} of run {outer['run']!r}")
            if data != as_bytes(bundle) or bundle["verificationMaterial"].get("sha256", digest) != digest:
                raise ValueError("its bytes have changed")
            _ = (
                seal.state,
                seal.stages,
                seal.contents,
                seal.facts,
                seal.previous,
                seal.is_adopted,
                seal.written,
                seal.read,
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DamagedError(f"{where} is not the seal that was written: {error}.") from None
        return seal


def sha256(data: bytes) -> str:
    """Returns the SHA-256 of some bytes."""
    return hashlib.sha256(data).hexdigest()


def as_bytes(bundle: Mapping[str, Any]) -> bytes:
    """Returns a seal's bytes."""
    return json.dumps(bundle, indent=1, sort_keys=True).encode()


def enveloped(statement: Mapping[str, Any], *, signs: bool) -> Bundle:
    """Returns a statement in an envelope, signed by this process's key, or with its SHA-256 alone."""
    if signs:
        signer = signer_here()
        assert signer
        return signer.sign(statement)
    payload = json.dumps(statement, sort_keys=True).encode()
    envelope = {"payload": base64.b64encode(payload).decode(), "payloadType": PAYLOAD_TYPE, "signatures": []}
    return {"mediaType": MEDIA_TYPE, "verificationMaterial": {"sha256": sha256(payload)}, "dsseEnvelope": envelope}


def content_digest(manifest: Manifest) -> str:
    """Returns the SHA-256 of a bundle's files: the same for the same content, whoever sent it."""
    named = {
        _WRITER.sub("", name): entry["sha256"]
        for name, entry in manifest.files.items()
        # A side's `state.json` names its files by their writers.
        if not (manifest.kind == "tokens" and name.endswith("/state.json"))
    }
    return sha256(json.dumps([manifest.kind, named], sort_keys=True).encode())


def attestation(place: str, manifest: Manifest) -> Bundle | None:
    """Returns this process's signature of a bundle at a place in the store, None without a key."""
    return enveloped(statement_of(place, manifest_digest(manifest)), signs=True) if trusted_here() else None


def is_attested(place: str, manifest: Manifest, public: PublicKey | None = None) -> bool:
    """Tells whether a key, by default this process's if it has one, has signed a bundle for its place in the store."""
    public = public or trusted_here()
    if public is None:
        return True
    try:
        return public.open(manifest.meta.get(SIGNATURE)) == statement_of(place, manifest_digest(manifest))
    except SignatureError:
        return False


def parsed_part(part: Mapping[str, Any]) -> Manifest:
    """Returns a part of tokens as a bundle, to be signed as one."""
    rest = {name: value for name, value in part.items() if name != "files"}
    return Manifest(kind="part", folder="", files=part["files"], meta=rest)


def numbers(run: Run) -> list[int]:
    """Returns the numbers of a run's seals, ascending."""
    return sorted(int(match[1]) for name in run.storage.list(run.path(FOLDER)) if (match := _NAME.fullmatch(name)))


def path_of(run: Run, number: int) -> str:
    """Returns a seal's place in the store."""
    return run.path(f"{FOLDER}/{number:06d}.json")


def read_seal(run: Run, number: int, public: PublicKey | None) -> Seal:
    """Reads a seal as `Seal.parse` does; a missing one is a `FileNotFoundError`."""
    path = path_of(run, number)
    return Seal.parse(run.storage.read(path), run.storage.uri(path), run.name, public)


@dataclass(eq=False)
class Ledger:
    """A stage's view of its run's chain; `appends` tells whether its end writes a seal: not in ranks but the first."""

    run: Run
    kind: str  # such as `train-chunk`
    stage: str  # such as `train-chunk-003`
    appends: bool = True
    head: Seal | None = None  # the newest seal
    reads: dict[str, str] = field(default_factory=dict)  # name → SHA-256
    writes: dict[str, Entry] = field(default_factory=dict)
    contents: dict[str, str] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)  # plain results, for those who have nothing but the seals
    is_adopted: bool = False
    public: PublicKey | None = field(default_factory=trusted_here)

    def __post_init__(self) -> None:
        self.process = self.run.storage.runtime.process()
        self._lock = threading.RLock()
        self._held: dict[str, bytes] = {}
        if self.public and self.appends:
            signer_of(self.public, f"stage {self.stage!r}")
        self.reload()
        if self.head is None and self.public:
            self.is_adopted = self._is_older(self.public)

    def _is_older(self, public: PublicKey) -> bool:
        """Tells whether a run without seals is one of an older Baton; `SignatureError` if its seals are gone."""
        for name in sorted(self.run.storage.list(self.run.path("checkpoints")), reverse=True):
            with contextlib.suppress(BatonError):
                manifest = read_manifest(self.run.storage, self.run.path(f"checkpoints/{name}"))
                if manifest is None or signature_problem(manifest, public):
                    continue
                if manifest.meta.get("seal"):
                    break
                self.run.warn(
                    f"run {self.run.name!r} was begun by a Baton without seals: they begin here, and earlier changes "
                    "are not found"
                )
                return True
        else:
            return False
        raise SignatureError(
            f"run {self.run.name!r} has signed checkpoints, and its seals in {self.run.uri}/{FOLDER} are gone.",
            remedy="Put them back from a copy of the store, or start the run under another name.",
        )

    def reload(self) -> None:
        """Takes the newest seal; broken ones above it are passed over."""
        for number in reversed(numbers(self.run)):
            try:
                self.head = read_seal(self.run, number, self.public)
            except (DamagedError, SignatureError, FileNotFoundError) as error:
                logger.warning("a seal is passed over: %s", error)
                continue
            self.is_adopted = self.head.is_adopted
            return

    @property
    def is_strict(self) -> bool:
        """Whether an object that is not in the chain is not obeyed."""
        return self.public is not None and not self.is_adopted

    def expected(self, name: str) -> Entry | None:
        return self.writes.get(name) or (self.head.state.get(name) if self.head else None)

    def name_of(self, storage: Storage, path: str) -> str:
        """Returns an object's name in seals, a bundle's of its manifest; empty for one of another run or process."""
        # A fork of this process has a copy of the ledger.
        if storage.base_uri != self.run.storage.base_uri or storage.runtime.process() != self.process:
            return ""
        own = self.run.path() + "/"
        name = path.removeprefix(own) if path.startswith(own) else path if path.startswith("data/") else ""
        if name.startswith(f"{FOLDER}/"):
            return ""
        match = _MANIFEST.fullmatch(name)
        return match[1] if match else name

    def held(self, storage: Storage, path: str) -> bytes | None:
        """Returns a document that this stage has read as sealed, or written; None for any other object."""
        return self._held.get(self.name_of(storage, path))

    def read(self, storage: Storage, path: str, data: bytes | None) -> bytes | None:
        """Returns the content to use in place of an object's that was read, None for none."""
        name = self.name_of(storage, path)
        known = objects.find(name) if name else None
        if known is None:
            return data
        with self._lock:
            if self.kind in known.readers:
                data = self._checked(name, known, path, data)
            if data is None:
                return None
            self.reads[name] = sha256(data)
            if known.mend is Mend.SEAL and not known.is_keyed and self.expected(name):
                self._held[name] = data
            if known.mend is Mend.BUNDLE and self.kind == known.writers[0] and name not in self.writes:
                with contextlib.suppress(BatonError):  # its stage takes it as it is
                    self.writes[name] = _entry(data, parsed(data, path))
        return data

    def _checked(self, name: str, known: RunObject, path: str, data: bytes | None) -> bytes | None:
        for is_last in (False, True):
            entry = self.expected(name)
            # Checkpoints have signatures of their own; the state has the newest alone.
            if entry is None and (data is None or not self.is_strict or known.mend is Mend.STEPS):
                return data
            if entry and data is not None and self._is_same(known, path, data, entry):
                return data
            if not is_last:
                self.reload()  # another process may have sealed it since
        where = self.run.storage.uri(path)
        if entry is None and (self._is_own(known) or known.is_keyed):
            if known.is_bundle and data is not None:
                manifest = parsed(data, where)
                if known.is_shared and is_attested(path.rpartition("/")[0], manifest):
                    return data
                raise DamagedError(f"{where} is in no seal of the run.")
            self.run.warn(f"{where} is not used: no seal of the run has it")
            return None
        if entry is None:
            raise SignatureError(
                f"{where} is refused: no seal of run {self.run.name!r} has it, so its writer lacks the key.",
                remedy="Find out who wrote it, and remove it. If it is the run's own, run again from the first stage.",
            )
        if known.mend is Mend.SEAL:
            return self._mended(name, path, entry)
        if known.is_bundle and data is not None:
            raise DamagedError(f"{where} differs from seal {entry.seal} of the run.", remedy="Run again.")
        if data is None or known.is_bundle:
            return None
        if not self._is_own(known):
            raise DamagedError(
                f"{where} differs from seal {entry.seal} of the run.",
                remedy=f"Run again: {known.writers[0]} writes it again.",
            )
        self.run.warn(f"{where} is not used: it differs from seal {entry.seal} of the run")
        return None

    def _is_own(self, known: RunObject) -> bool:
        """Tells whether this stage writes an object: of a killed attempt, an unsealed one may be there."""
        return self.kind == known.writers[0] or (self.kind in objects.BEGINS and self.kind in known.writers)

    def _is_same(self, known: RunObject, path: str, data: bytes, entry: Entry) -> bool:
        if sha256(data) == entry.sha256:
            return True
        if not known.is_shared:
            return False
        try:
            return entry.is_remade(path.rpartition("/")[0], parsed(data, path), self.public)
        except BatonError:
            return False

    def _mended(self, name: str, path: str, entry: Entry) -> bytes:
        """Writes a document again from its seal."""
        where, text = self.run.storage.uri(path), self.contents.get(name)
        with contextlib.suppress(DamagedError, SignatureError, FileNotFoundError):
            text = text or read_seal(self.run, entry.seal, self.public).contents.get(name)
        if text is None or sha256(text.encode()) != entry.sha256:
            raise DamagedError(
                f"{where} is lost or differs from seal {entry.seal} of the run, which does not hold its content.",
                remedy="Put it back from a copy of the store, or start the run under another name.",
            )
        self.run.warn(f"{where} differed from seal {entry.seal} of the run, and was written again from it")
        self.run.storage.write(path, text.encode())
        return text.encode()

    def wrote(self, storage: Storage, path: str, digest: str, data: bytes | None) -> None:
        """Notes an object that this process has written; `data` is None for an uploaded file."""
        name = self.name_of(storage, path)
        known = objects.find(name) if name else None
        if known is None or known.mend is Mend.NOTE:
            return
        with self._lock:
            if known.is_bundle:
                assert data is not None
                self.writes[name] = _entry(data, parsed(data, path))
            else:
                self.writes[name] = Entry(digest)
            if known.mend is Mend.SEAL and data is not None:
                self.contents[name] = data.decode()
                self._held[name] = data
            # A checkpoint above an earlier one of its step: seals name that, and later ones only the newest step.
            is_again = known.mend is Mend.STEPS and not path.endswith(f"/{manifest_name(1)}")
            if (known.is_urgent or is_again) and self.appends:
                self.append()

    def read_notes(self) -> None:
        """Takes the digests of all notes of the run, such as records, that the stage has not read."""
        for name in self.run.storage.find(self.run.path()):
            known = objects.find(name)
            if known and known.mend is Mend.NOTE and name not in self.reads:
                self.reads[name] = self.run.storage.sha256(self.run.path(name))[1]

    def shared(self) -> dict[str, Entry]:
        """Returns the bundles that the run shares, for a run with the same data: as sealed, else as they are."""
        if self.head:
            known = ((name, entry, objects.find(name)) for name, entry in self.head.state.items())
            return {name: entry for name, entry, kind in known if kind and kind.is_shared}
        split, tokens, code = (self.run.read(SplitData), self.run.read(TokenizedRows), self.run.read(OwnCode))
        prefixes = [document.prefix for document in (split, tokens, code) if document]
        manifests = ((prefix, read_manifest(self.run.storage, prefix)) for prefix in prefixes)
        return {prefix: _entry(each.as_written().encode(), each) for prefix, each in manifests if each}

    def note(self, name: str, manifest: Manifest) -> None:
        """Notes a bundle as the stage's output, whichever process has committed it."""
        data = manifest.as_written().encode()
        with self._lock:
            self.writes[name] = _entry(data, manifest)

    def append(self) -> None:
        """Writes the stage's seal, unless it would state only what the chain has."""
        with self._lock:
            while True:
                state = self.head.state if self.head else {}
                changed = {
                    name: entry
                    for name, entry in self._results().items()
                    if state.get(name, Entry("")).sha256 != entry.sha256
                }
                if not changed and self.head and self.stage in self.head.stages:
                    return
                number = self.head.number + 1 if self.head else 1
                statement = self._statement(number, {k: v._replace(seal=number) for k, v in changed.items()})
                bundle = enveloped(statement, signs=self.public is not None)
                path, data = path_of(self.run, number), as_bytes(bundle)
                if not self.run.storage.create(path, data):
                    with contextlib.suppress(DamagedError, SignatureError, FileNotFoundError):
                        self.head = read_seal(self.run, number, self.public)
                        continue
                    self.run.storage.write(path, data)  # no seal was there, or a broken one
                self.head = Seal.parse(data, path, self.run.name, self.public)
                return

    def _results(self) -> dict[str, Entry]:
        """Returns the stage's outputs: of its checkpoints the newest."""
        last = max((name for name in self.writes if name.startswith(STEP)), default=None)
        return {name: entry for name, entry in self.writes.items() if not name.startswith(STEP) or name == last}

    def _statement(self, number: int, changed: Mapping[str, Entry]) -> dict[str, Any]:
        head = self.head
        state = head.state if head else {}
        if any(name.startswith(STEP) for name in changed):  # the newest checkpoint alone
            state = {name: entry for name, entry in state.items() if not name.startswith(STEP)}
        return {
            "_type": STATEMENT_TYPE,
            "subject": [_named(name, entry.sha256) for name, entry in sorted(changed.items())],
            "predicateType": PREDICATE_TYPE,
            "predicate": {
                "buildDefinition": {
                    "buildType": BUILD_TYPE,
                    "externalParameters": {"run": self.run.name, "stage": self.stage},
                    "internalParameters": {
                        "number": number,
                        "previous": head.digest if head else "",
                        "adopted": self.is_adopted,
                        "stages": {**(head.stages if head else {}), self.stage: number},
                        "state": {name: list(entry) for name, entry in sorted({**state, **changed}.items())},
                        "facts": self.facts,
                        "contents": {name: text for name, text in self.contents.items() if name in changed},
                    },
                    "resolvedDependencies": [_named(name, digest) for name, digest in sorted(self.reads.items())],
                },
                "runDetails": {"builder": {"id": f"{BUILD_TYPE}?baton={release()}"}},
            },
        }


def _entry(data: bytes, manifest: Manifest) -> Entry:
    return Entry(sha256(data), 0, content_digest(manifest), manifest.folder)


def _named(name: str, digest: str) -> dict[str, Any]:
    return {"name": name, "digest": {"sha256": digest}}


def ledger_of(run: Run) -> Ledger | None:
    """Returns the ledger of the stage that this process runs, None outside of one."""
    here = (run.storage.runtime.process(), run.uri)
    ledgers = (each for each in Storage.watches if isinstance(each, Ledger))
    return next((each for each in ledgers if (each.process, each.run.uri) == here), None)


@contextlib.contextmanager
def stage(
    run: Run, kind: str, index: int | None = None, *, appends: bool = True, public: PublicKey | None = None
) -> Iterator[Ledger]:
    """Compares the reads of a stage with its run's seals, and seals its writes at the end, unless it fails.

    A stage inside another of the same run belongs to that. `public` is the key, by default this process's.
    """
    if outer := ledger_of(run):
        yield outer
        return
    name = kind if index is None else f"{kind}-{index:03d}"
    ledger = Ledger(run, kind, name, appends, public=public or trusted_here())
    with _watching:  # replaced, not changed: other threads go through it
        Storage.watches = (*Storage.watches, ledger)
    try:
        yield ledger
        if ledger.appends:
            ledger.append()
    finally:
        with _watching:
            Storage.watches = tuple(each for each in Storage.watches if each is not ledger)


def sealed(kind: str, *, appends: bool = True) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Makes a function a stage: its first argument is a run or its address, the second may be a chunk's number."""

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def work(*args: P.args, **kwargs: P.kwargs) -> T:
            run = args[0] if isinstance(args[0], Run) else Run.open(str(args[0]))
            index = args[1] if len(args) > 1 and isinstance(args[1], int) else None
            with stage(run, kind, index, appends=appends):
                return function(*args, **kwargs)

        return work

    return decorate
