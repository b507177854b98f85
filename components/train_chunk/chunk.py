"""A chunk is a target, not a delta: bring the run to step T from the newest valid checkpoint there is."""

from __future__ import annotations

import hashlib
import json
import logging
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from components.shared import code, events, fingerprint, models
from components.shared.bundles import Manifest
from components.shared.cache import NodeCache
from components.shared.checkpoint_store import CheckpointStore
from components.shared.clock import Clock
from components.shared.errors import BatonError, ExactnessError, UserError
from components.shared.plan import Plan
from components.shared.preemption import Watch
from components.shared.recipe import Recipe
from components.shared.runs import Run, identity
from components.train_chunk.keeping import CheckpointKeeper
from components.train_chunk.restoring import Restored, Restorer
from components.train_chunk.slices import Tokens
from components.train_chunk.staging import Staging

if TYPE_CHECKING:
    from components.train_chunk.chunked import Setup

logger = logging.getLogger("baton")


class Chunk:
    """One attempt at one chunk.

    Args:
        run_uri: Address of the run.
        index: Number of the chunk, from 1; those behind the plan's last are spare and have its target.
        leave_out: Parts of the state not to restore: a negative control for tests of exactness.
    """

    def __init__(self, run_uri: str, index: int, leave_out: tuple[str, ...] = ()) -> None:
        self.clock = Clock()
        self.run = Run.open(run_uri)
        self.recipe: Recipe = self.run.settled_recipe()
        self.plan: Plan = self.run.plan()
        slots = len(self.plan.targets) + self.recipe.chunks.spare
        if not 1 <= index <= slots:
            raise UserError(f"chunk {index} does not exist; the run has {slots}, spare ones included.")
        self.index = index
        self.target = self.plan.target(index)
        self.leave_out = leave_out
        self.store = CheckpointStore(self.run)
        self.cache = NodeCache.of(self.recipe.store)
        self.restorer = Restorer(self.store, self.target, self._identity(), self.cache)
        self.staging = Staging()
        self.tokens = Tokens(self.run, self.recipe, self.plan, self.staging.folder, self.cache)
        self.level = "bitwise"

    def bring(self) -> dict[str, Any]:
        """Trains to the target, unless it is committed already.

        Returns:
            `uri`, `step`, `digest` and `outcome`: `done`, `already_done`, `finished` where early stopping ended the
            run, or `partial` where the machine is taken away.

        Raises:
            BatonError: the state restored differs from the state saved, or the store fails for good.
        """
        self.clock.enter("fetch", chunk=self.index, target=self.target)
        if standing := self.restorer.standing():
            step, manifest = standing
            events.emit("already_done", chunk=self.index, step=step)
            self._record("already_done", step, step)
            return self._result(step, manifest, "already_done")
        with Watch(self.recipe.chunks.preemption) as watch:
            try:
                keeper = self._train(watch)
            finally:
                self.staging.close()
        outcome = self._outcome(keeper, watch)
        self._record(outcome, keeper.start_step, keeper.reached, keeper)
        if keeper.parent is None:  # taken away before the first step
            return {"uri": self.run.uri, "step": 0, "digest": "", "outcome": outcome}
        return self._result(*keeper.parent, outcome)

    def _outcome(self, keeper: CheckpointKeeper, watch: Watch) -> str:
        if keeper.handover.finished:
            logger.info("evaluation has stopped improving at step %d: the run ends here", keeper.reached)
            events.emit("finished", chunk=self.index, step=keeper.reached)
            return "finished"
        if keeper.overtaken:
            return "already_done"
        if keeper.reached >= self.target:
            return "done"
        if watch.notice is None:
            raise BatonError(f"chunk {self.index} ended before its target, step {self.target}.")
        logger.warning("%s: step %d of %d is saved, the next chunk goes on", watch.notice, keeper.reached, self.target)
        events.emit("partial", chunk=self.index, step=keeper.reached, of=self.target, notice=watch.notice)
        return "partial"

    def _identity(self) -> str:
        """Digest of what must be the same for a checkpoint to be continued: recipe, data, model, plan."""
        parts = [
            identity(self.recipe),
            self.plan.to_json(),
            *(self.run.require(f"{x}.json") for x in ("data", "model")),
            self.run.get("code.json"),
        ]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

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

    def _train(self, watch: Watch) -> CheckpointKeeper:
        with ThreadPoolExecutor(4) as pool:
            fetching = pool.submit(self.restorer.fetch, self.staging.folder)
            tokens = pool.submit(self._tokens)
            base = pool.submit(self._base)
            own_code = pool.submit(code.fetch, self.run, self.staging.folder(0))
            self.clock.enter("import")
            from components.train_chunk import arguments, methods
            from components.train_chunk.reporting import LiveReport
            from components.train_chunk.resume import Handover

            method = methods.load(self.recipe.training.method)
            self.clock.enter("fetch")
            restored = self.restorer.require_no_code(fetching.result(), self.staging.folder)
            if tokens.result()[1] != (start := restored.step if restored else 0):
                self.tokens.fetch(start, self.target)
        threads = restored.manifest.meta["fingerprint"]["threads"] if restored else self.recipe.training.threads
        arguments.make_deterministic(threads, self.recipe.training.deterministic)
        if restored:
            self._compare_fingerprint(restored)
        self.clock.enter("build")
        code.install(own_code.result())
        whole_weights = restored is not None and self.recipe.adapter is None
        trainer = method.build(self.setup(tokens.result()[0], base.result(), start_weights=not whole_weights))
        report = LiveReport(self.run, self.recipe, self.staging.folder(0))
        trainer.add_callback(report)
        if self.recipe.evaluation.write_every:
            from components.train_chunk.writing import Writing

            trainer.add_callback(Writing(self.run, self.recipe, trainer.processing_class, report))
        keeper = CheckpointKeeper(self, trainer, restored, watch)
        keeper.handover = Handover(
            trainer,
            self.target,
            keeper,
            every_steps=self.recipe.chunks.every_steps,
            every_seconds=self.recipe.chunks.every_seconds,
            resume_from=restored.folder if restored else None,
            expected=restored.manifest.meta["state"] if restored else None,
            leave_out=self.leave_out,
            keep_best=self.recipe.export.checkpoint == "best",
        )
        report.expose(keeper)
        self.clock.enter("restore", step=keeper.start_step)
        try:
            if watch.notice:
                return keeper  # taken away before it began: there is nothing to save
            trainer.train(resume_from_checkpoint=restored.folder if restored else None)
            keeper.finish()
        finally:
            keeper.close()
            report.close()
        return keeper

    def setup(self, tokens: str, base: str | None, *, start_weights: bool, recipe: Recipe | None = None) -> Setup:
        """Returns what the method's trainer is built from.

        Args:
            tokens: Folder of the tokenized rows and the tokenizer.
            base: Folder of the base model.
            start_weights: Whether the model needs its own; left undefined where a checkpoint is loaded over them.
            recipe: In place of the run's, for a trial.
        """
        import datasets

        from components.train_chunk import arguments, micro_batch, parameters
        from components.train_chunk.chunked import Setup

        if recipe is None and self.recipe.training.micro_batch_size == "auto":
            micro_batch.settle(self, tokens, base)
        recipe = recipe or self.recipe
        tokenizer = models.load_tokenizer(f"{tokens}/tokenizer", trust_remote_code=recipe.model.trust_remote_code)
        model = models.start_model(recipe, tokenizer, base, weights=start_weights)
        if recipe.training.trainable:
            parameters.freeze(model, recipe.training.trainable)
        return Setup(
            recipe=recipe,
            arguments=arguments.training_arguments(recipe, self.plan, self.staging.folder(0)),
            model=model,
            tokenizer=tokenizer,
            train=self.tokens.train(),
            held_out=datasets.load_from_disk(f"{tokens}/eval") if recipe.evaluation.every else None,
            reference=lambda: models.start_model(recipe, tokenizer, base),
        )

    def settle(self) -> None:
        """Takes over what was found out for the run since it was opened."""
        self.recipe = self.run.settled_recipe()
        self.restorer.identity = self._identity()

    def _tokens(self) -> tuple[str, int]:
        """Fetches the tokens behind the newest checkpoint that seems usable, and returns their folder and its step."""
        committed = (step for step, found in self.store.committed() if isinstance(found, Manifest))
        start = next((step for step in committed if step < self.target), 0)
        return self.tokens.fetch(start, self.target), start

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

    def _record(self, outcome: str, from_step: int, to_step: int, keeper: CheckpointKeeper | None = None) -> None:
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
                "bytes_sent": self.run.storage.sent,
                "bytes_received": self.run.storage.received,
                **(keeper.figures() if keeper else {}),
            },
        )

    def _result(self, step: int, manifest: Manifest, outcome: str) -> dict[str, Any]:
        uri = self.store.uri(step, manifest)
        return {"uri": uri, "step": step, "digest": manifest.meta["digest"], "outcome": outcome}
