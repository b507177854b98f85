"""A chunk is a target, not a delta: bring the run to step T from the newest valid checkpoint there is."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import tempfile
from dataclasses import dataclass
from typing import Any

from components.shared import events, fingerprint, models, trained
from components.shared.bundles import Manifest
from components.shared.checkpoint_store import CheckpointStore
from components.shared.clock import Clock
from components.shared.errors import BatonError, DamagedError, ExactnessError, UserError
from components.shared.plan import Plan
from components.shared.recipe import Recipe
from components.shared.runs import Run, identity, now

logger = logging.getLogger("baton")

ENOUGH_MEMORY = 8 * 1024**3
"""Bytes free in `/dev/shm` below which a chunk stages its checkpoints on disk."""


@dataclass(frozen=True)
class Restored:
    """A checkpoint brought to this machine."""

    step: int
    manifest: Manifest
    folder: str


class Chunk:
    """One attempt at one chunk.

    Args:
        run_uri: Address of the run.
        index: Number of the chunk, from 1.
        leave_out: Parts of the state not to restore: a negative control for tests of exactness.
    """

    def __init__(self, run_uri: str, index: int, leave_out: tuple[str, ...] = ()) -> None:
        self.clock = Clock()
        self.run = Run.open(run_uri)
        self.recipe: Recipe = self.run.recipe()
        self.plan: Plan = self.run.plan()
        if not 1 <= index <= len(self.plan.targets):
            raise UserError(f"chunk {index} does not exist; the plan has {len(self.plan.targets)}.")
        self.index = index
        self.target = self.plan.targets[index - 1]
        self.leave_out = leave_out
        self.store = CheckpointStore(self.run)
        self.identity = self._identity()
        self.parent: tuple[int, Manifest] | None = None
        self.level = "bitwise"
        self.checked: dict[str, str] | None = None
        self.skipped: list[str] = []
        self.start_step = 0

    def bring(self) -> dict[str, Any]:
        """Trains to the target, unless it is committed already.

        Returns:
            `uri`, `step`, `digest` and `outcome` (`done` or `already_done`).

        Raises:
            BatonError: the state restored differs from the state saved, or the store fails for good.
        """
        self.clock.enter("fetch", chunk=self.index, target=self.target)
        if standing := self._standing():
            step, manifest = standing
            events.emit("already_done", chunk=self.index, step=step)
            self._record("already_done", step, step)
            return self._result(step, manifest, "already_done")
        staging = _staging()
        try:
            restored = self._restore(staging)
            self._train(staging, restored)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
        if self.parent is None or self.parent[0] < self.target:
            raise BatonError(f"chunk {self.index} ended before its target, step {self.target}.")
        self._record("done", self.start_step, self.target)
        return self._result(*self.parent, "done")

    def _identity(self) -> str:
        """Digest of what must be the same for a checkpoint to be continued: recipe, data, model, plan."""
        parts = [
            identity(self.recipe),
            self.plan.to_json(),
            *(self.run.require(f"{x}.json") for x in ("data", "model")),
        ]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    def _standing(self) -> tuple[int, Manifest] | None:
        """Returns a committed checkpoint at the target or beyond, if its files are there."""
        for step, manifest in self.store.committed():
            if step < self.target:
                return None
            if isinstance(manifest, Manifest) and self.store.is_whole(step, manifest):
                return step, manifest
        return None

    def _restore(self, staging: str) -> Restored | None:
        """Fetches the newest checkpoint before the target whose every byte is as committed."""
        for step, manifest in self.store.committed():
            if step >= self.target:
                continue
            try:
                if isinstance(manifest, DamagedError):
                    raise manifest
                self._require_same(step, manifest)
                folder = self.store.fetch(step, manifest, os.path.join(staging, f"from-{step}"))
            except DamagedError as error:
                logger.warning("checkpoint of step %d is not used: %s", step, error)
                events.emit("skipped", step=step, reason=str(error))
                self.skipped.append(str(error))
                continue
            self.parent, self.start_step = (step, manifest), step
            return Restored(step, manifest, folder)
        return None

    def _require_same(self, step: int, manifest: Manifest) -> None:
        if manifest.meta.get("identity") != self.identity:
            raise ExactnessError(
                f"the checkpoint of step {step} was made from another recipe, data, model or plan.",
                remedy="Start a run under another name.",
            )

    def _compare_fingerprint(self, restored: Restored) -> None:
        changed = fingerprint.differences(fingerprint.fingerprint(), restored.manifest.meta["fingerprint"])
        if not changed:
            return
        if self.recipe.chunks.exactness == "bitwise":
            raise ExactnessError(
                f"chunks.exactness is bitwise, but this machine differs from the checkpoint's: {'; '.join(changed)}.",
                remedy="Run on the same kind of machine and image, or set chunks.exactness to consistent.",
            )
        self.level = "consistent"
        logger.warning("this machine differs from the checkpoint's, so bits may differ: %s", "; ".join(changed))
        events.emit("consistent", changed=changed)

    def _train(self, staging: str, restored: Restored | None) -> None:
        self.clock.enter("import")
        from components.train_chunk import arguments, methods
        from components.train_chunk.reporting import LiveReport
        from components.train_chunk.resume import Handover

        threads = restored.manifest.meta["fingerprint"]["threads"] if restored else self.recipe.training.threads
        arguments.make_deterministic(threads, self.recipe.training.deterministic)
        if restored:
            self._compare_fingerprint(restored)
        self.clock.enter("build")
        train, held_out, tokenizer, base = self._inputs(staging)
        model = models.start_model(self.recipe, tokenizer, base)
        settings = arguments.training_arguments(self.recipe, self.plan, staging)
        trainer = methods.build_trainer(self.recipe, settings, model, tokenizer, train, held_out)
        report = LiveReport(self.run)
        trainer.add_callback(report)
        handover = Handover(
            trainer,
            self.target,
            self._save,
            every_steps=self.recipe.chunks.every_steps,
            every_seconds=self.recipe.chunks.every_seconds,
            resume_from=restored.folder if restored else None,
            expected=restored.manifest.meta["state"] if restored else None,
            leave_out=self.leave_out,
        )
        self.handover = handover
        handover.on_first_step = lambda: self.clock.enter("train")
        self.clock.enter("restore", step=self.start_step)
        try:
            trainer.train(resume_from_checkpoint=restored.folder if restored else None)
        finally:
            report.close()

    def _inputs(self, staging: str) -> tuple[Any, Any, Any, str | None]:
        """Returns the tokenized training and held-out rows, the tokenizer, and the base model's folder."""
        import datasets

        folder = trained.tokens_folder(self.run, staging)
        train = datasets.load_from_disk(f"{folder}/train")
        held_out = datasets.load_from_disk(f"{folder}/eval") if self.recipe.evaluation.every else None
        trust = self.recipe.model.trust_remote_code
        tokenizer = models.load_tokenizer(f"{folder}/tokenizer", trust_remote_code=trust)
        return train, held_out, tokenizer, self._base()

    def _base(self) -> str | None:
        """Returns the base model's folder, if it still is the model that the run began with."""
        if self.recipe.model.base is None:
            return None
        folder = models.local_model(self.recipe.model.base, self.recipe.model.revision)
        if models.model_identity(folder) != self.run.require("model.json")["base_sha256"]:
            raise ExactnessError(
                f"model.base {self.recipe.model.base!r} is not the model that this run began with.",
                remedy="Put it back, pin model.revision, or start another run.",
            )
        return folder

    def _save(self, step: int, folder: str, digests: dict[str, str]) -> None:
        """Commits a checkpoint folder; called by the trainer between two steps."""
        self.clock.enter("save", step=step)
        if self.handover.checked:
            self.checked = self.handover.checked
        parent = self.parent
        chain = hashlib.sha256(f"{parent[1].meta['chain'] if parent else ''}{digests['state']}".encode()).hexdigest()
        meta = {
            "digest": digests["state"],
            "state": digests,
            "parent": {"step": parent[0], "digest": parent[1].meta["digest"]} if parent else None,
            "chain": chain,
            "restored": {
                "step": self.start_step,
                "checked": self.checked,
                "level": self.level,
                "skipped": self.skipped,
            },
            "identity": self.identity,
            "fingerprint": fingerprint.fingerprint(),
            "trainable_parameters": self.handover.num_trainable(),
            "chunk": self.index,
            "created": now(),
            "seconds": self.clock.split(),
        }
        events.emit("phase", phase="upload", step=step)
        manifest, won = self.store.commit(
            step, folder, meta, before_commit=lambda: events.emit("phase", phase="commit", step=step)
        )
        if not won:
            self._meet_other(step, manifest, digests)
        self.parent = (step, manifest)
        events.emit("checkpoint", step=step, uri=self.store.uri(step, manifest), digest=manifest.meta["digest"])
        self.clock.enter("train")

    def _meet_other(self, step: int, manifest: Manifest, digests: dict[str, str]) -> None:
        if manifest.meta["digest"] != digests["state"]:
            raise ExactnessError(
                f"another process committed step {step} with digest {manifest.meta['digest'][:12]}…, this one has "
                f"{digests['state'][:12]}…; this one stops.",
                remedy="Give each run a name of its own; if this is one run, the hardware differs.",
            )
        logger.warning("another process committed step %d first, with the same state; going on", step)

    def _record(self, outcome: str, from_step: int, to_step: int) -> None:
        self.run.record(
            f"train-chunk-{self.index:03d}",
            {
                "chunk": self.index,
                "from_step": from_step,
                "to_step": to_step,
                "outcome": outcome,
                "seconds": self.clock.split(),
                "total_seconds": self.clock.total(),
                "tokens": self.run.require("tokens.json")["tokens"],
            },
        )

    def _result(self, step: int, manifest: Manifest, outcome: str) -> dict[str, Any]:
        uri = self.store.uri(step, manifest)
        return {"uri": uri, "step": step, "digest": manifest.meta["digest"], "outcome": outcome}


def _staging() -> str:
    """Returns a new folder in memory where there is plenty, else on disk."""
    memory = "/dev/shm"
    plenty = os.access(memory, os.W_OK) and shutil.disk_usage(memory).free >= ENOUGH_MEMORY
    return tempfile.mkdtemp(prefix="baton-", dir=memory if plenty else None)
