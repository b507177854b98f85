"""A chunk is a target, not a delta: bring the run to step T from the newest valid checkpoint there is."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from components.shared import code, events, fingerprint, forking, models, standby
from components.shared.checkpoint_store import CheckpointStore
from components.shared.clock import Clock
from components.shared.errors import BatonError, ExactnessError, UserError
from components.shared.plan import Plan
from components.shared.preemption import Watch
from components.shared.recipe import Preemption, Recipe
from components.shared.runs import Run, state_identity
from components.shared.store.bundles import Manifest
from components.shared.store.cache import NodeCache
from components.train_chunk import launching, pulse, trainjob
from components.train_chunk.attempt import Attempt
from components.train_chunk.keeping import CheckpointKeeper
from components.train_chunk.ranks import Ranks
from components.train_chunk.restoring import Fetched, Restorer
from components.train_chunk.scoring import Scoring
from components.train_chunk.slices import Tokens
from components.train_chunk.staging import Staging

if TYPE_CHECKING:
    from types import ModuleType

    from components.train_chunk.chunked import Setup

logger = logging.getLogger("baton")


class Chunk:
    """One attempt at one chunk.

    Args:
        run_uri: Address of the run.
        index: Number of the chunk, from 1; those behind the plan's last are spare and have its target.
        leave_out: Parts of the state not to restore: a negative control for tests of exactness.
        standby: File to wait for before it takes the machine, see `components.shared.standby`.
    """

    def __init__(
        self, run_uri: str, index: int, leave_out: tuple[str, ...] = (), *, standby: str | None = None
    ) -> None:
        self.clock = Clock()
        self.ranks = Ranks.here()
        self.run = Run.open(run_uri)
        self.recipe: Recipe = self.run.settled_recipe()
        self.plan: Plan = self.run.plan()
        slots = len(self.plan.targets) + self.recipe.chunks.spare
        if not 1 <= index <= slots:
            raise UserError(f"chunk {index} does not exist; the run has {slots}, spare ones included.")
        self.index = index
        self.target = self.plan.target(index)
        self.leave_out = leave_out
        self.standby = standby
        self.store = CheckpointStore(self.run)
        self.cache = NodeCache.of(self.recipe.store)
        self.restorer = Restorer(self.store, self.target, self._identity(), self.cache)
        self.staging = Staging()
        self.tokens = Tokens(self.run, self.recipe, self.plan, self.staging.folder, self.cache)
        self.level = "bitwise"
        self.scoring = Scoring.of(self.run)

    def bring(self) -> dict[str, Any]:
        """Trains to the target, unless it is committed already.

        Returns:
            `uri`, `step`, `digest` and `outcome`: `done`, `already_done`, `finished` where early stopping ended the
            run, `partial` where the machine is taken away, or `stopped` where a sweep's trial was asked to stop.

        Raises:
            BatonError: the state restored differs from the state saved, or the store fails for good.
        """
        if self.ranks.launched:
            pulse.join(self.ranks, self.recipe)
        self.clock.enter("fetch", chunk=self.index, target=self.target)
        if (found := self.ranks.first_says(self._without_training)) is not None:
            return found
        if trainjob.is_wanted(self.recipe):
            return trainjob.bring(self)
        if self.recipe.world_size > 1 and not self.ranks.launched:
            return launching.bring(self)
        with Watch(self.recipe.chunks.preemption if self.ranks.leads_node else Preemption()) as watch:
            try:
                keeper = Attempt(self, watch).train()
            finally:
                self.staging.close()
        self.ranks.leave()
        if keeper is None:  # the first process speaks for all
            return {}
        outcome = self._outcome(keeper)
        self._record(outcome, keeper.start_step, keeper.reached, keeper)
        if keeper.parent is None:  # taken away before the first step
            return {"uri": self.run.uri, "step": 0, "digest": "", "outcome": outcome}
        return self._result(*keeper.parent, outcome)

    def _without_training(self) -> dict[str, Any] | None:
        """Returns what the chunk has come to where there is nothing to train, None where there is."""
        if self.scoring and self.scoring.is_stopped():
            return self._stopped()
        standing = self.restorer.standing()
        if standing is None or not self.has_score(standing[0]):
            return None
        step, manifest = standing
        events.emit("already_done", chunk=self.index, step=step)
        self._record("already_done", step, step)
        return self._result(step, manifest, "already_done")

    def has_score(self, step: int) -> bool:
        """Tells whether nothing is missing behind the checkpoint of a step: a sweep's trial has its score there."""
        return self.scoring is None or self.scoring.is_kept(self, step)

    def take_machine(self) -> None:
        """Waits until the chunk before this one on this machine is done with it, if there is one."""
        if self.standby:
            standby.wait(self.standby)
            self.standby = None
            self.clock.restart()

    def _outcome(self, keeper: CheckpointKeeper) -> str:
        if keeper.handover.finished:
            logger.info("evaluation has stopped improving at step %d: the run ends here", keeper.reached)
            events.emit("finished", chunk=self.index, step=keeper.reached)
            return "finished"
        if keeper.overtaken:
            return "already_done"
        if keeper.reached >= self.target:
            return "done"
        if keeper.notice is None:
            raise BatonError(f"chunk {self.index} ended before its target, step {self.target}.")
        logger.warning("%s: step %d of %d is saved, the next chunk goes on", keeper.notice, keeper.reached, self.target)
        events.emit("partial", chunk=self.index, step=keeper.reached, of=self.target, notice=keeper.notice)
        return "partial"

    def _stopped(self) -> dict[str, Any]:
        """Returns where a trial of a sweep stays that somebody has asked to stop."""
        found = next(
            ((at, manifest) for at, manifest in self.store.committed() if isinstance(manifest, Manifest)), None
        )
        step = found[0] if found else 0
        events.emit("stopped", chunk=self.index, step=step)
        self._record("partial", step, step)
        if found is None:
            return {"uri": self.run.uri, "step": 0, "digest": "", "outcome": "stopped"}
        return self._result(*found, "stopped")

    def _identity(self) -> str:
        return state_identity(self.run, self.recipe, self.plan)

    def fingerprint(self) -> dict[str, Any]:
        """Returns what bits depend on besides recipe and data."""
        return fingerprint.fingerprint(self.ranks.size, self.recipe.parallel.strategy)

    def fetch(self) -> Fetched:
        """Brings to this machine what training needs, and imports meanwhile."""
        with ThreadPoolExecutor(4) as pool:
            fetching = pool.submit(self.restorer.fetch, self.staging.folder, to_score=self.scoring is not None)
            tokens = pool.submit(self._tokens)
            base = pool.submit(self.base)
            own_code = pool.submit(code.fetch, self.run, self.staging.folder(0))
            self.clock.enter("import")
            self.method()
            self.clock.enter("fetch")
            restored = self.restorer.require_no_code(fetching.result(), self.staging.folder)
            start = restored.step if restored else 0
            if tokens.result()[1] != start < self.target:
                self.tokens.fetch(start, self.target)
        if restored is None:
            forking.require_start(self.run)
        return Fetched(restored, tokens.result()[0], base.result(), own_code.result())

    def method(self) -> ModuleType:
        """Returns the module that builds the method's trainer."""
        from components.train_chunk import methods

        return methods.load(self.recipe.training.method)

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
            held_out=datasets.load_from_disk(f"{tokens}/eval") if recipe.evaluation.every or self.scoring else None,
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

    def base(self) -> str | None:
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
