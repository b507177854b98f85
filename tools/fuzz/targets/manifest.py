"""What a chunk reads from a store: manifests, signatures, documents of a run, and files that the trainer gets.

The first byte of an input says what the rest stands for in a run with two checkpoints: mostly the manifest of the
second. A chunk goes on from the second, from the first, or there is a message.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
import json
import logging
import os
import pickle
from collections.abc import Iterator
from dataclasses import replace
from random import Random

from baton import signing
from baton.checkpoint import sharded, signatures, zero_format
from baton.checkpoint.restore import is_proven
from baton.checkpoint.sharded import code_in
from baton.errors import DamagedError
from baton.recipe import load
from baton.runs.run import Run, state_identity
from baton.signing import PublicKey, Signer
from baton.store.manifest import Manifest
from tools.fuzz import trees
from tools.fuzz.house import DOCUMENTS, SECOND, House, refused
from tools.fuzz.target import Mutate, Target, scratch

OTHER = {"name": "r", "model": {"base": "x"}, "data": {"source": "y"}}
"""Another run's recipe."""


@functools.cache
def _signer() -> Signer:
    path = scratch() / "key.pem"
    signer = Signer.new("ed25519")
    path.write_bytes(signer.pem())
    os.environ[signing.KEY_FILE] = str(path)
    return signer


@functools.cache
def _house(*, signed: bool, in_memory: bool = False) -> House:
    uri = f"memory://fuzz-{signed}" if in_memory else str(scratch() / f"store-{signed}")
    return House(uri, _signer() if signed else None)


def _manifest(data: bytes) -> None:
    _restore(_house(signed=False), data)


def _manifest_of_a_cloud(data: bytes) -> None:
    _restore(_house(signed=False, in_memory=True), data)


def _signed_manifest(data: bytes) -> None:
    _restore(_house(signed=True), data)


def _manifest_signed_anew(data: bytes) -> None:
    """Signs what a manifest says, as if it had been written so."""
    house = _house(signed=True)
    with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError, RecursionError):
        manifest = signatures.unsigned(Manifest(**json.loads(data)))
        assert house.signer
        bundle = house.signer.sign(signatures.statement(manifest))
        data = replace(manifest, meta={**manifest.meta, signing.SIGNATURE: bundle}).as_written().encode()
    _restore(house, data)


def _statement(data: bytes) -> None:
    """Signs bytes that should be a statement."""
    house = _house(signed=True)
    assert house.signer
    signature = signing._signed(house.signer._key, signing._encoding(data))
    document = json.loads(house.before[house.path])
    document["meta"][signing.SIGNATURE] = signing._bundle(data, signature, house.signer.public)
    _restore(house, json.dumps(document).encode())


def _restore(house: House, data: bytes) -> None:
    with house.holding({house.path: data}):
        house.restore()
        house.look()


def _document(data: bytes) -> None:
    """Reads a document of a run by all who read it; its name is chosen by the first byte."""
    house = _house(signed=True)
    names, run, store = list(DOCUMENTS), house.run, house.store
    with house.holding({run.path(names[data[:1].ljust(1, b"\0")[0] % len(names)]): data[1:]}):
        for look in (
            run.require_continued,
            run.resolved_recipe,
            run.skips,
            run.records,
            run.attempts,
            run.restarts,
            store.run.verified_step,
            lambda: run.require_same(load.validate(OTHER, origin="r")),
            lambda: _plan(run),
            lambda: state_identity(run, run.resolved_recipe(), run.plan()),
            lambda: signatures.sources_of(run),
            lambda: [is_proven(store, checkpoint) for checkpoint in store.committed()],
            lambda: [skip.rows_in_words for skip in run.skips()],
            lambda: [record.total for record in run.records()],
        ):
            refused(look)
        refused(house.restore)  # what a checkpoint was made of is not there: the chunk says so, and does not go on


def _plan(run: Run) -> None:
    plan = run.plan()
    for look in (plan.target(2), plan.target(9), plan.is_due(3, 2), plan.passes(3), plan.slots(1)):
        assert look is not None


def _logs(data: bytes) -> None:
    """Reads a checkpoint's log as a report does."""
    house = _house(signed=False)
    manifest = json.loads(house.before[house.path])
    manifest["files"]["trainer_state.json"] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    path = f"{house.store.prefix(SECOND)}/{manifest['folder']}/trainer_state.json"
    with house.holding({path: data, house.path: json.dumps(manifest).encode()}):
        checkpoint = house.store.read(SECOND)
        assert checkpoint
        refused(lambda: house.store.evaluation_losses(checkpoint))


def _state(data: bytes) -> None:
    """Reads a file of ZeRO's state: safetensors with a header of ours."""
    path = scratch() / "optimizer_0.zero"
    path.write_bytes(data)
    for lazily in (False, True):
        with contextlib.suppress(DamagedError):
            zero_format.read(str(path), lazily=lazily)


def _shards(data: bytes) -> None:
    """Reads what lies where of a checkpoint in shards: a pickle of harmless classes."""
    folder = scratch() / "shards" / sharded.WEIGHTS
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "__0_0.distcp").write_bytes(b"x" * 100)
    (folder / sharded.METADATA).write_bytes(data)
    assert all(line for line in sharded.code_in_shards(str(folder.parent)))
    with contextlib.suppress(DamagedError):
        sharded.tensors(str(folder.parent))


def _pickle(data: bytes) -> None:
    """Looks through a pickle for code."""
    folder = scratch() / "pickles"
    folder.mkdir(exist_ok=True)
    (folder / "optimizer.pt").write_bytes(data)
    assert all(line for line in code_in(str(folder)))


def _key(data: bytes) -> None:
    """Reads a public key, as a recipe or a pod's environment names it."""
    with contextlib.suppress(ValueError):
        key = PublicKey.parse(data.decode("utf-8", "surrogateescape"))
        assert PublicKey.parse(key.line) == key


KINDS = (
    *(_manifest, _manifest_of_a_cloud, _signed_manifest, _manifest_signed_anew, _statement, _document, _logs, _state),
    *(_shards, _pickle, _key),
)
"""What the rest of an input stands for, by its first byte."""


def run(data: bytes) -> None:
    """Reads an input as its first byte says."""
    logging.disable()
    KINDS[data[:1].ljust(1, b"\0")[0] % len(KINDS)](data[1:])


def seeds() -> Iterator[bytes]:
    """Yields what Baton itself writes of each kind."""
    signed, unsigned = _house(signed=True), _house(signed=False)
    for kind, house in enumerate((unsigned, _house(signed=False, in_memory=True), signed, signed)):
        yield bytes([kind]) + house.before[house.path]
    signature = json.loads(signed.before[signed.path])["meta"][signing.SIGNATURE]
    yield bytes([4]) + base64.b64decode(signature["dsseEnvelope"]["payload"])
    for number, name in enumerate(DOCUMENTS):
        yield bytes([5, number]) + signed.before[signed.run.path(name)]
    yield bytes([6]) + json.dumps({"log_history": [{"step": 1, "eval_loss": 2.0}, {"step": 2, "loss": 1.0}]}).encode()
    yield from (bytes([kind]) + data for kind, data in _files())
    yield bytes([10]) + signed.signer.public.line.encode()
    yield bytes([10]) + signed.signer.public.pem


def _files() -> Iterator[tuple[int, bytes]]:
    """Yields files as the trainer writes them."""
    import torch
    import torch.distributed.checkpoint as dcp

    path = scratch() / "seed"
    zero_format.write(str(path), {"a": [torch.ones(3), 1, None], 2: ({"b": 0.5}, "x")})
    yield 7, path.read_bytes()
    dcp.save({"model": {"w": torch.ones(3), "n": 3}}, checkpoint_id=str(scratch() / "dcp"), no_dist=True)
    yield 8, (scratch() / "dcp" / ".metadata").read_bytes()
    yield 8, pickle.dumps({"a": torch.Size([2, 3])})
    for state in ({"a": torch.ones(3)}, {"a": [1, "b"]}):
        torch.save(state, path)
        yield 9, path.read_bytes()
        torch.save(state, path, _use_new_zipfile_serialization=False)
        yield 9, path.read_bytes()


def mutate(data: bytes, rng: Random, by_bytes: Mutate) -> bytes:
    """Changes what is JSON by its values, and anything by its bytes."""
    head = 2 if data[:1] and data[0] % len(KINDS) == KINDS.index(_document) else 1
    if rng.random() < 0.03:
        return bytes([rng.randrange(len(KINDS))]) + data[1:]
    if rng.random() < 0.75:
        return data[:head] + _in_values(data[head:], rng)
    return data[:head] + by_bytes(data[head:], len(data) + 64)


NAMES = [
    *("weights", "weights/x", "../x", "x/../../y", "/x", "\ud800", "\0", "x" * 300, "a/b"),
    *("step", "run", "digest", "meta", "files", "folder", "kind", "version", "made", "formats", "size", "sha256"),
]


def _in_values(data: bytes, rng: Random) -> bytes:
    values = (*trees.VALUES, "0" * 64, "z" * 64, "é" * 64, hashlib.sha256(b"").hexdigest().upper(), SECOND)
    document = trees.mutate(json.loads(data), rng, lambda: rng.choice(values), NAMES)
    return trees.dumps(document, sort_keys=rng.random() < 0.5).encode("utf-8", "surrogatepass")


TARGET = Target(run=run, seeds=seeds, mutate=mutate)
