"""What a chunk looks at whose target is committed: sizes always, bytes where no proof says that they were read."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from baton.checkpoint.restore import require_usable
from baton.errors import DamagedError, RewritableDamageError, UserError


def _path(checkpoints: Any) -> str:
    return str(checkpoints._weights(10))


def _flip(checkpoints: Any) -> None:
    data = checkpoints.storage.read(_path(checkpoints))
    checkpoints.storage.write(_path(checkpoints), bytes([data[0] ^ 1]) + data[1:])


def _prove(checkpoints: Any, uri: str) -> None:
    checkpoints.store.run.put("proof/chunk-000.json", {"step": 10, "digest": "state of 10", "uri": uri})


DAMAGE: dict[str, Callable[[Any], object]] = {
    "flipped": _flip,
    "truncated": lambda checkpoints: checkpoints.truncate(10),
    "missing": lambda checkpoints: checkpoints.storage.remove(_path(checkpoints)),
}


@pytest.mark.parametrize("proven", [False, True], ids=["never-read", "read-back"])
@pytest.mark.parametrize("kind", DAMAGE)
def test_what_is_damaged_is_marked_and_can_be_committed_again(kind: str, proven: bool, checkpoints: Any) -> None:
    checkpoint = checkpoints.commit(10)
    if proven:
        _prove(checkpoints, checkpoints.store.uri(checkpoint))
    DAMAGE[kind](checkpoints)
    if proven and kind == "flipped":
        require_usable(checkpoints.store, checkpoint)  # a matter of seconds: the stage that loads it will see
        return
    with pytest.raises(RewritableDamageError, match=r"weights\.bin: "):
        require_usable(checkpoints.store, checkpoint)
    with pytest.raises(DamagedError, match="was found damaged before"):
        checkpoints.store.read(10)
    again = checkpoints.commit(10)
    require_usable(checkpoints.store, again)
    assert checkpoints.store.read(10) == again


def test_the_proof_of_files_that_were_replaced_proves_nothing(checkpoints: Any) -> None:
    checkpoint = checkpoints.commit(10)
    _prove(checkpoints, checkpoints.store.uri(checkpoint) + "0")
    _flip(checkpoints)
    with pytest.raises(RewritableDamageError):
        require_usable(checkpoints.store, checkpoint)


def test_a_manifest_of_another_version_of_the_meta_is_named(checkpoints: Any) -> None:
    from baton.checkpoint.store import CheckpointMeta

    with pytest.raises(UserError, match=r"s3://x is of version 2, and this Baton reads version 1\."):
        CheckpointMeta.read({"digest": "d", "version": 2}, "s3://x")
    with pytest.raises(DamagedError, match=r"s3://x is not readable: digest: "):
        CheckpointMeta.read({"digest": 1}, "s3://x")


LOGS = {
    "no JSON": b"{",
    "too deep": b"[" * 100_000,
    "a list": b"[]",
    "no log": b"{}",
    "log is a number": b'{"log_history": 1}',
    "an entry is a number": b'{"log_history": [1.5]}',
    "no step": b'{"log_history": [{"loss": 1.5}]}',
    "step in words": b'{"log_history": [{"step": "1"}]}',
}


@pytest.mark.parametrize("data", LOGS.values(), ids=LOGS)
def test_a_log_that_is_none_is_damaged(data: bytes, checkpoints: Any) -> None:
    checkpoint = checkpoints.commit(10)
    path = checkpoint.manifest.path(checkpoints.store.prefix(10), "trainer_state.json")
    checkpoints.storage.write(path, data)
    with pytest.raises(DamagedError, match=r"trainer_state\.json"):
        checkpoints.store.evaluation_losses(checkpoint)


def test_a_checkpoint_without_files_is_none_and_one_without_a_log_has_no_losses(checkpoints: Any) -> None:
    checkpoint = checkpoints.commit(10)
    path = f"{checkpoints.store.prefix(10)}/manifest.json"
    manifest = json.loads(checkpoints.storage.read(path))
    del manifest["files"]["trainer_state.json"]
    checkpoints.storage.write(path, json.dumps(manifest).encode())
    with pytest.raises(DamagedError, match=r"trainer_state\.json is not there, and its manifest does not name it"):
        checkpoints.store.evaluation_losses(checkpoints.store.read(10))
    checkpoints.storage.write(path, json.dumps({**manifest, "files": {}}).encode())
    with pytest.raises(DamagedError, match="its manifest names no files"):
        checkpoints.store.read(10)
    assert checkpoint.step == 10


def test_a_loss_that_is_no_number_is_none(checkpoints: Any) -> None:
    checkpoint = checkpoints.commit(10)
    path = checkpoint.manifest.path(checkpoints.store.prefix(10), "trainer_state.json")
    losses = ["1.5", "NaN", "1e999", "null", '"a"', "{}", "[1]", "true"]
    entries = ", ".join(f'{{"step": {step}, "eval_loss": {loss}}}' for step, loss in enumerate(losses))
    checkpoints.storage.write(path, f'{{"log_history": [{entries}]}}'.encode())
    assert checkpoints.store.evaluation_losses(checkpoint) == {0: 1.5}


def test_keys_of_another_baton_are_kept_and_absent_ones_stay_absent() -> None:
    from baton.checkpoint.store import CheckpointMeta

    document = {"digest": "d", "later": [1], "fingerprint": {"torch": "2", "new": True}, "work": {"goodput": 0.5}}
    meta = CheckpointMeta.read(document, "here")
    assert meta.to_json() == document
    assert (meta.finished, meta.fingerprint.world_size, meta.fingerprint.strategy) == (False, 1, "ddp")


def test_what_an_older_manifest_does_not_say_has_its_meaning() -> None:
    from baton.checkpoint.store import CheckpointMeta, Restoration

    meta = CheckpointMeta.read({"digest": "d"}, "here")
    assert (meta.run, meta.step, meta.chain, meta.identity, meta.created) == ("", 0, "", "", "")
    assert (meta.state, meta.parent, meta.seconds, meta.forked_from) == ({}, None, {}, None)
    assert (meta.finished, meta.trainable_parameters, meta.chunk) == (False, 0, 0)
    restored = Restoration.read({}, "here")
    assert (restored.step, restored.checked, restored.level, restored.skipped) == (0, None, "bitwise", [])
