"""One attempt at training a chunk, in each rank: resumption, checks, callbacks, and the last commit.

`RestoreCheck` is a trainer's first callback, and compares the state before any other changes it. `SaveAndStop` is the
last, and sees what all others have decided. `Pace` spaces continuous checkpoints so that training loses little.
"""

import contextlib
import json
import logging
import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from statistics import median, median_low

import torch
from transformers import PrinterCallback, TrainerCallback, TrainerControl, TrainerState, set_seed

from baton import events
from baton.checkpoint.digest import tree_digest
from baton.checkpoint.restore import FetchedCheckpoint
from baton.checkpoint.staging import PendingCheckpoint, Staging
from baton.checkpoint.store import CheckpointMeta, Restoration, evaluation_losses
from baton.errors import BatonError, ExactnessError, UserError
from baton.models.loading import count_parameters
from baton.recipe.recipe import Recipe
from baton.runs.documents import PARTS, OwnState, RunEnd, StagePhase
from baton.runs.plan import Plan
from baton.runs.versions import Fingerprint
from baton.train import build, guard, reshard, state, user_state
from baton.train.checkpointer import Checkpointer, Committer
from baton.train.context import TrainContext
from baton.train.distributed import Ranks, Watchdog
from baton.train.fork import ForkOverrides
from baton.train.inputs import ChunkInputs
from baton.train.live import LiveReport, attach_observers
from baton.train.preemption import PreemptionWatch
from baton.train.protocol import ChunkTrainer, Resumption, StateDict
from baton.train.score import Score, Scoring
from baton.train.trainer import seed_of

logger = logging.getLogger("baton")

STALL = 0.02  # share of the time for which checkpoints may hold training
COST = 0.05  # share of the time that they may cost in all: stalls, and slower steps during uploads
KNOWN = 2  # steps of each kind that must be measured before an upload's cost is known
AGAIN = 16  # checkpoints after which one waits for a step without an upload: steps change in the course of training
RECENT = 16  # steps and stalls of each kind that are kept


class Pace:
    """Spaces checkpoints by the cost of earlier ones in this process.

    An upload costs the difference between the median steps during one and without.
    """

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._idle: deque[float] = deque(maxlen=RECENT)
        self._beside: deque[float] = deque(maxlen=RECENT)
        self._ended: float | None = None  # the first step is not measured: it warms up
        self._was_free = True
        self._began = monotonic()
        self._stalls: deque[float] = deque(maxlen=RECENT)
        self._uploading = 0.0
        self._saves = self._idle_since = 0

    def step(self, *, is_free: bool) -> None:
        """Notes a step's end, and whether no checkpoint is on its way."""
        now = self._monotonic()
        if self._ended is not None:
            seconds = now - self._ended
            (self._idle if self._was_free else self._beside).append(seconds)
            self._idle_since += self._was_free
            self._uploading += seconds * (not self._was_free)
        self._ended, self._was_free = now, is_free

    def saving(self) -> None:
        self._began = self._monotonic()

    def saved(self) -> None:
        now = self._monotonic()
        self._stalls.append(now - self._began)
        self._uploading = 0.0
        self._ended, self._was_free = now, False
        self._saves += 1
        self._idle_since = 0

    def is_due(self) -> bool:
        """Tells whether a checkpoint taken now keeps within the allowed cost."""
        if len(self._idle) < KNOWN or (self._saves % AGAIN == AGAIN - 1 and not self._idle_since):
            return False
        return self._monotonic() - self._began >= self.interval

    @property
    def interval(self) -> float:
        """Least seconds from one checkpoint to the next."""
        # The lower median: other work on this machine makes times longer, never shorter.
        stall, slower = median_low(self._stalls) if self._stalls else 0.0, 0.0
        if min(len(self._beside), len(self._idle)) >= KNOWN:
            slower = max(0.0, 1 - median(self._idle) / median_low(self._beside))
        return max(stall / STALL, (stall + slower * self._uploading) / COST)


class EvaluationsPerEpoch(TrainerCallback):
    stateless = True

    def __init__(self, plan: Plan, per_epoch: int) -> None:
        self._plan = plan
        self._per_epoch = per_epoch

    def on_step_end(self, args: object, state: TrainerState, control: TrainerControl, **_: object) -> None:
        control.should_evaluate = control.should_evaluate or self._plan.is_due(state.global_step, self._per_epoch)


@dataclass(frozen=True, kw_only=True)
class SaveSchedule:
    """Schedule of checkpoints before the target; `keep_best` also saves at the lowest evaluation loss so far."""

    target: int
    plan: Plan
    every_steps: int | None = None
    per_epoch: int | None = None
    every_seconds: float | None = None
    pace: Pace | None = None
    keep_best: bool = False

    def is_due(self, step: int) -> bool:
        if self.per_epoch:
            return self.plan.is_due(step, self.per_epoch)
        return bool(self.every_steps and step % self.every_steps == 0)

    def is_late(self, seconds: float) -> bool:
        return bool(self.every_seconds and seconds >= self.every_seconds) or bool(self.pace and self.pace.is_due())


def ends_epoch(trainer_state: TrainerState) -> bool:
    return float(trainer_state.epoch).is_integer()


class RestoreCheck(TrainerCallback):
    """Restores what `Trainer` does not, and compares the whole state with the checkpoint before the first step.

    The trainer's other callbacks must be complete. `replicated`: each rank has the whole state.
    """

    stateless = True

    def __init__(self, trainer: ChunkTrainer, checkpointer: Checkpointer, *, replicated: bool) -> None:
        self._trainer, self._checkpointer, self._replicated = trainer, checkpointer, replicated
        self._ranks = trainer.ranks
        self._is_first_step = True
        trainer.callback_handler.callbacks.insert(0, self)
        self.own = user_state.OwnStates(trainer)
        self.checked: dict[str, str] = {}  # part of the state → result of its comparison
        self._saved_callbacks: StateDict = {}
        self._own_restored: dict[str, str] = {}
        self._callbacks_restored: str | None = None

    def restore(self, trainer_state: TrainerState) -> None:
        """Restores what `Trainer` does not, after all callbacks' `on_train_begin`, which may reset their state."""
        resumption, rank = self._trainer.resumption, self._ranks.rank
        folder = resumption.folder
        if folder is None:
            self.own.begin(None, rank)
            # Else dropout would drop the same places in all ranks. With virtual workers each pass is seeded.
            if rank and not self._trainer.recipe.parallel.virtual_workers:
                set_seed(seed_of(self._trainer.args.seed, rank))
            return
        if resumption.takeover:  # `Trainer` has restored the parent's intervals of logs and evaluations
            trainer_state.compute_steps(self._trainer.args, trainer_state.max_steps)
        if not os.path.isfile(os.path.join(folder, state.extra_file(rank))):
            rank = 0  # another number of ranks made the checkpoint
        # Tensors and plain values alone: a checkpoint may come from elsewhere, and must not run code here.
        extra = torch.load(os.path.join(folder, state.extra_file(rank)), weights_only=True)
        self._trainer.load_skipped(tuple(extra.get("skipped", ())))
        state.restore_log_window(self._trainer, extra["log_window"])
        self._trainer.load_method_state(extra["method"])
        self.own.begin(folder, rank)
        self._saved_callbacks = extra["callbacks"]
        self._restore_own()

    def _restore_own(self) -> None:
        """Restores the state of callbacks and of the user's other code, and keeps its digests."""
        try:
            state.restore_callbacks(self._trainer, self._saved_callbacks)
        except KeyError as error:
            raise ExactnessError(f"callbacks cannot be restored: {error.args[0]}.") from None
        self._own_restored = self.own.restore(partly=self._trainer.resumption.takeover is not None)
        self._callbacks_restored = tree_digest(state.callback_states(self._trainer))

    def on_step_begin(self, args: object, trainer_state: TrainerState, control: TrainerControl, **_: object) -> None:
        if not self._is_first_step:
            return
        self._is_first_step = False
        resumption, watchdog = self._trainer.resumption, self._trainer.watchdog
        if resumption.folder is not None:
            if not ends_epoch(trainer_state):
                # Again: callbacks have just seen the epoch begin a second time, as they would not without a resume.
                self._restore_own()
            self.prove()
            # After the proof: it compares what the parent saved, not what the fork makes of it.
            if resumption.takeover:
                resumption.takeover.apply(self._trainer)
        watchdog.start(trainer_state.global_step + 1)
        if not self._trainer.recipe.training.compile:  # the compiler would trace into what follows it
            watchdog.follow(self._trainer.model_wrapped)
        self._checkpointer.on_first_step(resumption.folder)

    def digests(self) -> dict[str, str]:
        """Gathers and joins all ranks' digests of the state in memory."""
        return self._joined(state.digests_of(self._trainer))

    def _joined(self, ours: dict[str, str]) -> dict[str, str]:
        rows = self._ranks.gather(ours)
        return state.merge_rank_digests(rows, replicated=self._replicated, per_rank_parts=self._trainer.per_rank_parts)

    def prove(self) -> None:
        """Compares the state in memory with the checkpoint's; `ExactnessError` in all ranks if a part differs."""
        trainer, resumption = self._trainer, self._trainer.resumption
        ours = state.digests_of(trainer)
        # Both as right after their restore: random numbers are drawn before the first step, and an epoch's begin may
        # change callbacks.
        ours["rng"] = trainer.restored_rng or "not restored"
        ours["callbacks"] = self._callbacks_restored or ours["callbacks"]
        if resumption.max_steps:
            now = trainer.state
            ours["position"] = tree_digest([now.global_step, now.epoch, resumption.max_steps, *trainer.skipped])
        if resumption.takeover:
            ours |= resumption.takeover.expected_digests(trainer, trainer.skipped)
        # Gathers before the verdict: all ranks fail or none does, as one that trained on alone would hang.
        digests, expected = self._joined(ours), resumption.digests
        if resumption.is_reshaped:
            digests |= reshard.digests_as_saved(trainer)
        for part in PARTS:
            if part in resumption.left_out:
                self.checked[part] = "left out"
            # A part by rank from another number of ranks has nothing to compare it with.
            elif resumption.is_reshaped and part in trainer.per_rank_parts:
                self.checked[part] = "of other processes"
            elif digests[part] != expected[part]:
                self.checked[part] = "mismatch"
            elif part == "scaler" and getattr(trainer.accelerator, "scaler", None) is None:
                self.checked[part] = "absent"
            else:
                self.checked[part] = "match"
        if user_state.PART in expected:
            self.checked[user_state.PART] = self._own_verdict()
        step = trainer.state.global_step
        wrong = [part for part, verdict in self.checked.items() if verdict == "mismatch"]
        events.emit(events.Restored(step=step, wrong=wrong))
        if wrong:
            raise ExactnessError(
                f"after restoring step {step}, {', '.join(wrong)} in memory differ from the saved state; the chunk "
                "stops before it trains on.",
                remedy="Check that image and recipe are those that wrote the checkpoint.",
            )

    def _own_verdict(self) -> str:
        """Compares the state of the user's code with the checkpoint's; all ranks must call it, as it gathers."""
        resumption = self._trainer.resumption
        if user_state.PART in resumption.left_out:
            return "left out"
        rows = self._ranks.gather(OwnState(carried=self._own_restored))
        if resumption.ranks != self._ranks.size:
            return "of other processes"
        shared = not self._trainer.recipe.parallel.virtual_workers
        carried = user_state.merge_rank_states(rows, each_writes=shared).carried
        return "match" if carried.items() <= resumption.carried.items() and carried else "mismatch"


class SaveAndStop(TrainerCallback):
    """Captures checkpoints and ends training at the target; `finished` if early stopping ends the run."""

    stateless = True

    def __init__(
        self,
        trainer: ChunkTrainer,
        schedule: SaveSchedule,
        checkpointer: Checkpointer,
        check: RestoreCheck,
        end: RunEnd | None = None,
    ) -> None:
        self.finished = False
        self._end = end
        self._ends_stable = False  # the last step before a decay, which is to be kept
        self._trainer, self._schedule = trainer, schedule
        self._checkpointer, self._check = checkpointer, check
        self._is_best = False
        self._saved_step = -1
        self._saved_at = time.monotonic()
        self._stopping = self._overdue = self._due_by_time = False
        self._uploader_idle = True
        self._named: set[str] = set()
        # The manifest has each file's SHA-256; a CRC-32 as well takes a third of the writing time.
        torch.serialization.set_crc32_options(False)
        trainer.add_callback(self)

    def on_train_begin(self, args: object, trainer_state: TrainerState, control: TrainerControl, **_: object) -> None:
        # Here and not in `RestoreCheck`, which is first: other callbacks' `on_train_begin` may reset their state.
        self._check.restore(trainer_state)

    def on_step_end(self, args: object, trainer_state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Decides whether to save and to stop; at an epoch's end saving waits for `on_epoch_end`."""
        step, watchdog = trainer_state.global_step, self._trainer.watchdog
        # Before the gather: a rank that hangs in its step then has one sign of life less than those that wait for it.
        watchdog.heartbeat("end")
        late = self._schedule.is_late(time.monotonic() - self._saved_at)
        decision = self._checkpointer.agree(step, late, self._trainer.figures)
        if self._schedule.pace:
            self._schedule.pace.step(is_free=decision.uploader_idle)
        self._trainer.judge(decision.figures)  # first: a step to skip must leave nothing in a checkpoint
        self._due_by_time, self._uploader_idle = decision.due_by_time, decision.uploader_idle
        if decision.ends:
            self._decide_end(step)
        if self._end:
            self.finished = step >= self._end.last_step
            self._ends_stable = step == self._end.stable_until
        watchdog.heartbeat("rows", step + 1)
        # The same in all ranks: one that saved alone would wait for the others forever.
        self._stopping = decision.stop or step >= self._schedule.target
        # If this step is evaluated, the evaluation must first decide whether the whole run ends: see `on_evaluate`.
        control.should_training_stop = control.should_training_stop or (self._stopping and not control.should_evaluate)
        if not ends_epoch(trainer_state) and self._is_due(step):
            control.should_save = True

    def _decide_end(self, step: int) -> None:
        """Has the run end in time for its budget; all ranks must call it."""
        checkpointer, plan = self._checkpointer, self._schedule.plan
        decide = checkpointer.committer.decide_end if checkpointer.committer else None
        end = self._trainer.ranks.on_first(lambda: decide(step) if decide else None)
        if end is None:
            return
        self._end = end
        self._schedule = replace(self._schedule, target=min(self._schedule.target, end.last_step))
        self._trainer.end_at(end.last_step, -(-end.last_step // plan.steps_per_epoch))

    def on_epoch_end(self, args: object, trainer_state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Saves what waited for the epoch's end, and ignores an end that is only the chunk's."""
        if ends_epoch(trainer_state):
            due = self._is_due(trainer_state.global_step) and self._saved_step != trainer_state.global_step
            control.should_save = control.should_save or due
        else:
            control.should_save = control.should_evaluate = control.should_log = False

    def on_evaluate(self, args: object, trainer_state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Saves at an evaluation that ends the run or, with `keep_best`, has the lowest loss so far."""
        losses = evaluation_losses(trainer_state.log_history)
        # None for a loss that is not finite.
        newest = losses.pop(trainer_state.global_step, None)
        if self._schedule.keep_best and newest is not None and newest < min(losses.values(), default=math.inf):
            self._is_best = control.should_save = True
        at_end = trainer_state.global_step >= trainer_state.max_steps
        if control.should_training_stop and not at_end:
            # `on_step_end` does not set the flag before an evaluation: early stopping or another callback has, and ends
            # the run.
            self.finished = self._stopping = control.should_save = True
        control.should_training_stop = self._stopping or at_end

    def on_save(self, args: object, trainer_state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Completes the folder that `Trainer` wrote, and passes it on with the digests of the state."""
        trainer, ranks, pending = self._trainer, self._trainer.ranks, self._checkpointer.pending
        assert pending
        extra: StateDict = {
            "log_window": state.log_window(trainer),
            "callbacks": state.callback_states(trainer),
            "method": trainer.method_state(),
        }
        if trainer.skipped:
            extra["skipped"] = list(trainer.skipped)
        document, arrays, ours = self._check.own.capture()
        if trainer.writes_part:
            torch.save(extra, os.path.join(pending.folder, state.extra_file(ranks.rank)))
            user_state.save(pending.folder, ranks.rank, document, arrays)
        each_writes = not trainer.recipe.parallel.virtual_workers
        own = user_state.merge_rank_states(ranks.gather(ours), each_writes=each_writes)
        if new := {name: why for name, why in own.lost.items() if name not in self._named}:
            self._named |= new.keys()
            if ranks.is_first:
                events.emit(events.NotCarried(step=trainer_state.global_step, lost=new))
        # The gather is also the barrier before the commit: every rank has written its files before it takes part.
        pending.digests = self._check.digests()
        if own.carried:
            pending.digests[user_state.PART] = user_state.digest(own.carried)
        pending.must_keep = self._is_best or self._ends_stable
        meta = CheckpointMeta(
            digest=pending.digests["state"],
            state=pending.digests,
            restored=Restoration(checked=self._check.checked or None),
            finished=self.finished,
            trainable_parameters=count_parameters(x for x in trainer.model.parameters() if x.requires_grad),
            hooks=own,
        )
        if trainer.skipped:
            meta = meta.model_copy(update={"skips": list(trainer.skipped)})
        if self._end:
            meta = meta.model_copy(update={"end": self._end.span})
        self._checkpointer.save(pending, meta)
        self._is_best, self._ends_stable, self._saved_step = False, False, trainer_state.global_step
        self._saved_at, self._overdue, self._due_by_time = time.monotonic(), False, False
        if self._schedule.pace:
            self._schedule.pace.saved()

    def on_log(
        self, args: object, trainer_state: TrainerState, *_: object, logs: dict[str, float], **__: object
    ) -> None:
        if "loss" in logs:
            events.emit(events.Step(step=trainer_state.global_step, of=trainer_state.max_steps, loss=logs["loss"]))

    def stage(self) -> Iterator[PendingCheckpoint]:
        """Yields the current step's checkpoint in each place to write it to, best first."""
        if self._schedule.pace:
            self._schedule.pace.saving()
        return self._checkpointer.stage(self._trainer.state.global_step, state.num_bytes(self._trainer))

    def _is_due(self, step: int) -> bool:
        """Tells whether to save now; a checkpoint that becomes due during an upload waits for its end."""
        if self._stopping or self._ends_stable:
            return True
        self._overdue = self._overdue or self._due_by_time or self._schedule.is_due(step)
        return self._overdue and self._uploader_idle


OTHERS = "another number of processes kept it"


def resumption(restored: FetchedCheckpoint | None, context: TrainContext) -> Resumption:
    """Returns a trainer's resumption; all ranks must call it."""
    # One rank asks the store for all: all must skip the same steps.
    guards = context.recipe.training.guard
    skips = context.ranks.on_first(lambda: guard.known_skips(context, restored)) if guards else ()
    if restored is None:
        return Resumption(skips=skips)
    theirs = restored.meta.fingerprint
    return Resumption(
        folder=restored.folder,
        digests=restored.meta.state,
        carried=restored.meta.hooks.carried if restored.meta.hooks else {},
        left_out=restored.left_out,
        takeover=ForkOverrides.of(restored.folder, restored.meta),
        ranks=theirs.world_size,
        strategy=theirs.strategy,
        max_steps=saved_max_steps(restored) if restored.meta.end != context.store.end else None,
        # With virtual workers a checkpoint is as of one process, whatever the number of ranks.
        is_reshaped=theirs.world_size != context.ranks.size and not context.recipe.parallel.virtual_workers,
        skips=skips,
    )


def saved_max_steps(restored: FetchedCheckpoint) -> int:
    with open(os.path.join(restored.folder, "trainer_state.json"), encoding="utf-8") as file:
        return int(json.load(file)["max_steps"])


def adapt_machine(restored: FetchedCheckpoint | None, ranks: Ranks, recipe: Recipe) -> str:
    """Makes this process deterministic, and returns the exactness of a resume here.

    That is `bitwise`, or `consistent` if the machine differs or state of the user's code is not restored.

    Raises:
        BatonError: other machines resume from another step.
        UserError: these ranks cannot read the checkpoint's split.
        ExactnessError: bits may differ, and the recipe requires bitwise.
    """
    # A checkpoint may have been committed between the machines' searches.
    steps = ranks.gather(restored.step if restored else 0)
    if len(set(steps)) > 1:
        raise BatonError(f"the machines found different newest checkpoints: {steps}.", remedy="Run again.")
    # The first chunk's number of threads holds for the whole run, as it decides the order of sums.
    threads = restored.meta.fingerprint.threads if restored else recipe.training.threads
    workers = recipe.parallel.virtual_workers
    if workers and not threads:  # the same number in one process as in several, each with its share of the cores
        threads = max(1, (os.cpu_count() or 1) // workers)
    build.make_deterministic(threads, recipe.training.deterministic, tf32=build.uses_tf32(recipe))
    if restored is None:
        return "bitwise"
    theirs = restored.meta.fingerprint
    bnb = recipe.uses_bitsandbytes
    here = Fingerprint.here(ranks.size, recipe.parallel.strategy, workers, uses_bitsandbytes=bnb)
    changed = here.differences(theirs)
    own = restored.meta.hooks or OwnState()
    lost = own.lost if theirs.world_size == ranks.size else {**dict.fromkeys(own.carried, OTHERS), **own.lost}
    if lost:
        if recipe.chunks.exactness == "bitwise":
            raise ExactnessError(
                "chunks.exactness is bitwise, but "
                f"{'; '.join(f'state of `{name}` is not carried: {why}' for name, why in lost.items())}.",
                remedy=f"{events.NotCarried.REMEDY} Or set chunks.exactness to consistent.",
            )
        events.emit(events.NotCarried(step=restored.step, lost=lost))
    if not changed:
        return "consistent" if lost else "bitwise"
    _require_readable(restored.step, theirs, ranks, recipe)
    if recipe.chunks.exactness == "bitwise":
        raise ExactnessError(
            f"chunks.exactness is bitwise, but this machine differs from the checkpoint's: {'; '.join(changed)}.",
            remedy="Run on the same kind of machine and image, or set chunks.exactness to consistent.",
        )
    logger.warning("this machine differs from the checkpoint's, so bits may differ: %s", "; ".join(changed))
    events.emit(events.Consistent(changed=changed))
    return "consistent"


def _require_readable(step: int, theirs: Fingerprint, ranks: Ranks, recipe: Recipe) -> None:
    """Raises `UserError` if these ranks cannot read how a checkpoint is split.

    One rank reads every split, FSDP also a checkpoint of one process, all others only their own strategy.
    """
    now = recipe.parallel.strategy if ranks.size > 1 else "ddp"
    was_alone = theirs.world_size == 1
    if ranks.size > 1 and theirs.strategy != now and not (was_alone and now == "fsdp"):
        how = "by one process" if was_alone else f"with training.parallel.strategy {theirs.strategy}"
        raise UserError(
            f"the checkpoint of step {step} was written {how}, and this chunk has {now}.",
            remedy="Set training.parallel back, train on in one process, or fork the run's exported model.",
        )


@dataclass(frozen=True)
class Assembly:
    """Parts that make a trainer resume, save and, in the first rank, report."""

    checkpointer: Checkpointer
    check: RestoreCheck
    save: SaveAndStop
    report: LiveReport | None

    def close(self) -> None:
        self.checkpointer.close()
        if self.report:
            self.report.close()


def assemble(
    context: TrainContext,
    trainer: ChunkTrainer,
    restored: FetchedCheckpoint | None,
    staging: Staging,
    watch: PreemptionWatch,
    *,
    level: str,
    skipped: list[str],
    reports: bool,
) -> Assembly:
    """Makes a trainer resume at the level of `adapt_machine`, save and report."""
    recipe, ranks, chunks = context.recipe, context.ranks, context.recipe.chunks
    watchdog = Watchdog(ranks, recipe.parallel.hang_seconds)
    committer = Committer(context, restored, level=level, skipped=skipped) if ranks.is_first else None
    checkpointer = Checkpointer(context, staging, watch, watchdog, committer)
    # A lambda, as `save` is made below; the trainer calls it at its first save.
    trainer.begin_chunk(ranks, watchdog, resumption(restored, context), lambda: save.stage())
    if recipe.evaluation.per_epoch:
        trainer.add_callback(EvaluationsPerEpoch(context.plan, recipe.evaluation.per_epoch))
    report = None
    # Before `SaveAndStop`: its checkpoint is captured after these callbacks have done their work at a step's end.
    if committer and reports:
        live, newest = committer.live, lambda: committer.parent
        report = attach_observers(context, trainer, staging.folder(0), live, newest=newest)
    schedule = SaveSchedule(
        target=context.target,
        plan=context.plan,
        every_steps=chunks.every_steps,
        per_epoch=chunks.checkpoints_per_epoch,
        every_seconds=chunks.every_seconds,
        pace=Pace() if chunks.is_continuous else None,
        keep_best=recipe.export.checkpoint == "best",
    )
    check = RestoreCheck(trainer, checkpointer, replicated=not recipe.parallel.is_sharded)
    save = SaveAndStop(trainer, schedule, checkpointer, check, context.end)
    return Assembly(checkpointer, check, save, report)


def train_chunk(
    context: TrainContext,
    restored: FetchedCheckpoint | None,
    skipped: list[str],
    staging: Staging,
    watch: PreemptionWatch,
    build_trainer: Callable[[], tuple[TrainContext, ChunkTrainer]],
    *,
    scoring: Scoring | None = None,
    is_script: bool = False,
) -> Checkpointer:
    """Trains to a chunk's target, or until a preemption, and waits for the last commit.

    `build_trainer` returns the chunk as resolved again, and its trainer; `skipped` holds why newer checkpoints were
    passed over. With `is_script` a script has built the trainer, and itself reports and handles errors of devices.
    """
    level = adapt_machine(restored, context.ranks, context.recipe)
    if context.recipe.training.compile or context.recipe.training.compile_optimizer:
        build.discard_unfinished_kernels()
    context, trainer = build_trainer()
    made = assemble(context, trainer, restored, staging, watch, level=level, skipped=skipped, reports=not is_script)
    checkpointer = made.checkpointer
    context.clock.enter(StagePhase.RESTORE, step=restored.step if restored else 0)
    try:
        # All ranks decide together; with a notice before the first step there is nothing to save.
        if not checkpointer.is_preempted():
            if restored is None or not restored.is_target:
                with contextlib.nullcontext() if is_script else guard.watch_for_skips(trainer, checkpointer):
                    trainer.train(resume_from_checkpoint=restored.folder if restored else None)
            # From here ranks only wait for the store, which has its own time limits.
            checkpointer.watchdog.stop()
            try:
                score = _score(trainer, made, restored, scoring, context.target) if scoring else None
            finally:
                # Also after a failed score: the checkpoint on its way is the chunk's result.
                checkpointer.finish()
            if score and scoring:
                # After the commit: a crash in between costs a score, and no score lacks its state.
                scoring.keep(score)
    finally:
        made.close()
    return checkpointer


def _score(
    trainer: ChunkTrainer, made: Assembly, restored: FetchedCheckpoint | None, scoring: Scoring, target: int
) -> Score | None:
    """Scores a sweep's trial after the chunk; None in all ranks but the first."""
    trainer.remove_callback(made.save)  # it would save and stop by the score's evaluation
    if restored and restored.is_target:
        check = made.check
        return scoring.measure_again(trainer, restored.step, restored.folder, restore=check.restore, prove=check.prove)
    step = trainer.state.global_step
    return scoring.measure(trainer, step) if step >= target or made.save.finished else None


def train_recipe(
    context: TrainContext, fetched: ChunkInputs, staging: Staging, watch: PreemptionWatch, scoring: Scoring | None
) -> Checkpointer:
    """Trains a chunk of a recipe's run with its downloads; see `train_chunk`."""

    def build_trainer() -> tuple[TrainContext, ChunkTrainer]:
        context.clock.enter(StagePhase.BUILD)
        found, trainer = build.prepare(
            context,
            fetched.tokens,
            fetched.models,
            staging.folder(0),
            code_folder=fetched.code,
            start_weights=fetched.restored is None or context.recipe.adapter is not None,
            evaluates=True if scoring else None,
        )
        trainer.remove_callback(PrinterCallback)
        return found, trainer

    return train_chunk(context, fetched.restored, fetched.skipped, staging, watch, build_trainer, scoring=scoring)
