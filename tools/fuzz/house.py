"""A run with two checkpoints, of which others than a trainer may write one."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from baton.checkpoint import proof, retention, signatures
from baton.checkpoint.proof import Verification
from baton.checkpoint.restore import Restorer, committed_at_target, usable_at_target
from baton.checkpoint.staging import Staging
from baton.checkpoint.store import CheckpointMeta, CheckpointStore
from baton.errors import BatonError, ExactnessError, FormatError
from baton.recipe import load
from baton.recipe.run import Keep
from baton.runs.run import Run
from baton.runs.versions import Fingerprint
from baton.signing import SignatureError, Signer
from baton.store import bundle
from baton.store.storage import Storage
from tools.fuzz.target import require_message, scratch

FIRST, SECOND, NEXT = 4, 8, 12
"""Steps of the two checkpoints, and the one that the chunk trains to."""
ROWS = [{"file": "rows.jsonl", "line": 1}]
ATTEMPT = "train-chunk-001"
DOCUMENTS: dict[str, dict[str, Any]] = {
    "recipe.json": {},
    "plan.json": {"rows": 12, "steps_per_epoch": 3, "num_steps": NEXT, "targets": [FIRST, SECOND, NEXT]},
    "data.json": {"digest": "ab", "rows": 12},
    "tokens.json": {"prefix": "data/ab/tokens", "train": 12, "tokens": 99},
    "model.json": {"base_sha256": None},
    "code.json": {"prefix": "data/ab/code", "digest": "cd", "modules": ["m"]},
    "lr_find.json": {"learning_rate": 0.1},
    "micro_batch.json": {"micro_batch_size": 2},
    "promoted.json": {"newest": {"step": SECOND, "eval_loss": 1.5}, "best": {"step": FIRST}},
    "progress.json": {"step": 3, "chunk": 1, "seconds_per_step": 0.5},
    "proof/chunk-001.json": {"step": FIRST, "digest": "of 4", "attempts": [{"seconds": {"train": 1.0}}]},
    "skips/step-00000003.json": {"step": 3, "chunk": 1, "reason": "nan", "message": "m", "rows": ROWS},
    f"records/{ATTEMPT}-0000000000001-abcdef.json": {"stage": ATTEMPT, "chunk": 1, "seconds": {"a": 1.5}},
    "restarts/001-0000000000001-abcdef.json": {"chunk": 1, "reason": "killed"},
    "fork.json": {"parent": "s3://b/runs/x", "step": 3, "warm": True, "changed": {"seed": [1, 2]}},
}
"""Documents of a run that are read by a chunk or by who shows what it does."""


class House:
    """A run with two checkpoints.

    Args:
        uri: Its store.
        signer: Who signs its checkpoints, None for nobody.
    """

    def __init__(self, uri: str, signer: Signer | None) -> None:
        self.signer = signer
        recipe: dict[str, Any] = {"name": "r", "model": {"base": "x"}, "data": {"source": "x"}}
        recipe["training"] = {"lr_find": {}, "micro_batch_size": "auto"}
        if signer:
            recipe["chunks"] = {"signing": {"public_key": signer.public.line}}
        self.run = Run(Storage(uri), "r")
        for name, document in DOCUMENTS.items():
            self.run.put(name, document)
        self.run.storage.remove(self.run.path("recipe.json"))
        self.run.create(load.validate(recipe, origin="r"))
        self.store = CheckpointStore(self.run, signer.public if signer else None)
        rows = Path(tempfile.mkdtemp(dir=scratch()))
        (rows / "tokens").write_bytes(b"1 2 3")
        bundle.publish(self.run.storage, "data/ab/tokens", str(rows), kind="tokens", meta={})
        for step in (FIRST, SECOND):
            self._commit(step)
        self._staging = Staging()
        self._place = functools.partial(self._staging.incoming, alone=not self.run.storage.is_local)
        self.path = f"{self.store.prefix(SECOND)}/manifest.json"
        self.before = {name: self.run.storage.read(name) for name in self.run.storage.find("")}

    def _commit(self, step: int) -> None:
        local = Path(tempfile.mkdtemp(dir=scratch()))
        log = [{"step": at, "loss": 1.0, "eval_loss": 2.0} for at in range(1, step + 1)]
        (local / "trainer_state.json").write_text(json.dumps({"log_history": log}))
        (local / "weights").write_bytes(b"w" * step)
        writer = self.store.open_writer(step)
        writer.send(str(local))
        parent = {"step": FIRST, "digest": f"of {FIRST}"} if step > FIRST else None
        meta = {"digest": f"of {step}", "identity": "this", "state": {"model": "ab", "state": f"of {step}"}}
        more = {"parent": parent, "chain": "ab", "fingerprint": {"device": "cpu", "threads": 1}, "skips": [2]}
        made = {"baton": "0.1.0", "formats": {"digest": 1, "checkpoint": 1}}
        self.store.commit(step, writer, CheckpointMeta.read({**meta, **more, "made": made}, "here"))

    @contextlib.contextmanager
    def holding(self, objects: dict[str, bytes]) -> Iterator[None]:
        """Has other objects in the store in the block; puts back what was there."""
        storage = self.run.storage
        for name, data in objects.items():
            storage.write(name, data)
        try:
            yield
        finally:
            shutil.rmtree(self._staging.folder(0), ignore_errors=True)
            os.mkdir(self._staging.folder(0))
            for name in storage.find("").keys() - self.before.keys():
                storage.remove(name)
            for name, data in self.before.items():
                with contextlib.suppress(FileNotFoundError):
                    if storage.read(name) == data:
                        continue
                storage.write(name, data)

    def restore(self) -> None:
        """Restores as a chunk does."""
        restorer = Restorer(self.store, NEXT, "this", None, self._place)
        try:
            restored = restorer.fetch()
        except (FormatError, ExactnessError, SignatureError) as error:
            require_message(error)
        else:
            assert restored, "a chunk would begin anew"
            assert restored.step in (FIRST, SECOND)
            storage = self.run.storage
            below = storage.key(self.store.prefix(restored.step)) if storage.is_local else self._staging.folder(0)
            assert os.path.realpath(restored.folder).startswith(os.path.realpath(below)), restored.folder
            if restored.step == FIRST:
                assert restorer.skipped, "a checkpoint was passed over without a word"
            for look in (
                lambda: proof.proof_part(self.store, restored.checkpoint).to_json(),
                lambda: _fingerprint().differences(restored.meta.fingerprint),
                lambda: signatures.manifest_digest(restored.checkpoint.manifest),
                lambda: restored.meta.to_json(),
            ):
                refused(look)

    def look(self) -> None:
        """Does what else reads manifests."""
        for other in (
            lambda: committed_at_target(self.store, SECOND),
            lambda: usable_at_target(self.store, SECOND),
            lambda: self.store.ancestors(NEXT),
            lambda: retention.removals(self.store, Keep()),
        ):
            refused(other)
        if self.signer:
            public = self.signer.public
            verdict = refused(lambda: Verification(self.store, public).verdict())
            json.dumps(verdict)


def refused(work: Callable[[], Any]) -> Any:
    """Does something; there may be a message instead."""
    try:
        return work()
    except BatonError as error:
        require_message(error)
        return None


@functools.cache
def _fingerprint() -> Fingerprint:
    return Fingerprint.here()
