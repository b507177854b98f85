"""Chunks of a rung on one device: trials take turns inside one process; some need a process for each chunk.

A sweep on one machine trains all its trials so, a pod of a cluster its share of them.
"""

import functools
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

from baton import events
from baton.checkpoint import proof
from baton.errors import BatonError, UserError
from baton.kfp import processes
from baton.recipe.sharing import share
from baton.runs.outcomes import TrialFailure, TrialInfo
from baton.runs.run import Run, Sweep, now
from baton.runtime import through_skips

logger = logging.getLogger("baton")
BESIDE = 2  # stages in parallel with a training chunk, at most: checking a checkpoint, writing the page
TRIES = 2  # starts of a chunk that fails for another reason than the user's


class RungTrainer:
    """Trains chunks of a sweep's trials, each in processes that `launch` starts, and checks their checkpoints."""

    def __init__(self, sweep: Sweep, on_event: Callable[[events.Event], None], launch: processes.Launcher) -> None:
        self.sweep = sweep
        self._on_event, self._launch = on_event, launch
        self._beside = ThreadPoolExecutor(BESIDE, "baton-beside")
        self._pending: list[tuple[processes.Process, Future[None]]] = []
        self._notice = ""  # of a preemption
        self._is_lost = False  # the newest process has ended without an error of its own
        self._lost: list[str] = []  # trials whose processes were lost since the last trained chunk

    def train(self, runs: Sequence[Run], first: int, last: int, *, shared: bool, device: Sequence[str] = ()) -> str:
        """Trains chunks of trials, each for all of them before the next one, and returns a notice of a preemption.

        Args:
            runs: The trials' runs.
            first: First chunk.
            last: Last chunk.
            shared: Whether trials take turns inside one process if they may.
            device: Arguments of `take_turns` that tell devices apart; empty for the only one. Of several, one that
                loses two trials in a row, or its only one, is a BatonError: another may train them.
        """
        self._notice, self._lost = "", []
        by_trial = {run.need(TrialInfo).id: run for run in runs}
        if shared:
            sharing = share({trial: run.resolved_recipe() for trial, run in by_trial.items()})
            for reason in sharing.reasons:
                self._on_event(events.NoEffect(f"sweep.device: shared: {reason}"))
            for group in sharing.groups:
                self._take_turns({trial: by_trial[trial] for trial in group}, first, last, device)
            runs = [by_trial[trial] for trial in sharing.apart]
        for index in range(first, last + 1):
            runs = [run for run in runs if self._one(run, index)]
        self.finish_beside()
        if device and len(self._lost) >= min(2, len(by_trial)):
            raise BatonError(
                f"processes of {', '.join(self._lost)} were lost one after the other; none has trained since.",
                remedy="See the log. Another pod goes on at their newest checkpoints: `baton retry` the run.",
            )
        return self._notice

    def later(self, program: str, *arguments: str) -> None:
        """Runs a stage in parallel with the next ones, unseen."""
        while sum(not ended.done() for _, ended in self._pending) >= BESIDE:
            next(ended for _, ended in self._pending if not ended.done()).result()
        process = self._launch(program, arguments)
        self._pending.append((process, self._beside.submit(_ended, program, arguments, process)))

    def finish_beside(self) -> None:
        """Waits for parallel stages, and raises their errors."""
        pending, self._pending = self._pending, []
        for _, ended in pending:
            ended.result()

    def close(self) -> None:
        """Ends the parallel stages that an error left; another start does their work again."""
        for process, _ in self._pending:
            process.kill()
        self._beside.shutdown()

    def _take_turns(self, trials: dict[str, Run], first: int, last: int, device: Sequence[str]) -> None:
        """Trains the chunks of a rung inside one process, begun again after a failure, at last without its trial."""
        turn: events.Turn | None = None
        failed: Counter[events.Turn] = Counter()
        trained: list[events.Turn] = []  # their checkpoints are checked together, once all have had their turn

        def heard(event: events.Event) -> None:
            nonlocal turn
            self._hear(event)
            if isinstance(event, events.Turn):
                turn = event
                if event.trial not in trials:  # has joined
                    trials[event.trial] = self.sweep.run(self.sweep.trial(event.trial))
                if trained and trained[0].chunk != event.chunk:
                    check()
                if event.state == "done":
                    trained.append(event)
                    self._done(trials[event.trial])
                event = events.Stage(f"{event.trial}: train chunk {event.chunk}", event.state)
            elif isinstance(event, events.Error) and turn:
                event = replace(event, stage=f"{turn.trial}: train chunk {turn.chunk}")
            elif isinstance(event, events.Stage):  # the process's
                return
            self._on_event(event)

        def check() -> None:
            chunk, uris = str(trained[0].chunk), [trials[each.trial].uri for each in trained]
            trained.clear()
            self.later(processes.CHECK_TURNS, chunk, *uris)

        def train() -> None:
            nonlocal turn
            turn, self._is_lost = None, True
            uris = [run.uri for run in trials.values()]
            process = self._launch(processes.TAKE_TURNS, [str(first), str(last), *uris, *device])
            failure = processes.follow(process, heard)
            if trained:
                check()
            chunk = str(turn.chunk if turn else first)
            failure = failure and replace(failure, stage=f"train chunk {chunk}")
            processes.require_success(processes.TRAIN_CHUNK, ["", chunk], process, failure)

        while trials and not self._notice:
            try:
                through_skips(train)
                return
            except BatonError as error:
                if self._notice:
                    return
                if turn is None or turn.state == "done":  # of no trial
                    raise
                failed[turn] += 1
                if self._is_out(trials[turn.trial], turn.chunk, failed[turn], error):
                    del trials[turn.trial]

    def _one(self, run: Run, index: int) -> bool:
        """Trains a chunk of a trial, and tells whether the trial continues with the next one."""
        trial = run.need(TrialInfo).id
        request = self.sweep.request(trial)
        if self._notice or (request is not None and request.state == "stop"):
            return False
        # Without a check of its checkpoint a chunk is entered again: it finds all done, or repairs damage.
        if proof.has_ended(run, index):
            return True
        for attempt in range(1, TRIES + 1):
            try:
                self._is_lost = True
                processes.train_chunk(run.uri, index, self._named(trial), self._launch)
                break
            except BatonError as error:
                if self._is_out(run, index, attempt, error):
                    return False
        self.later(processes.CHECKPOINT, run.uri, str(index))
        self._done(run)
        return True

    def _hear(self, event: events.Event) -> None:
        if isinstance(event, events.Partial):
            self._notice = event.notice
        elif isinstance(event, events.Error):
            self._is_lost = bool(event.lost)

    def _done(self, run: Run) -> None:
        # The failure is of an earlier attempt at this chunk, or of one that a resumed trial has got past.
        run.remove(TrialFailure)
        self._lost.clear()

    def _is_out(self, run: Run, index: int, attempt: int, error: BatonError) -> bool:
        """Tells whether a trial has failed for good, and notes it."""
        trial = run.need(TrialInfo).id
        if attempt < TRIES and not isinstance(error, UserError):
            logger.warning("trial %s failed in chunk %d and is tried again: %s", trial, index, error)
            return False
        if self._is_lost:
            self._lost.append(trial)
        run.write(TrialFailure(chunk=index, message=error.message, at=now()))
        self._on_event(processes.TrialFailed(trial, index, error.message))
        return True

    def _named(self, trial: str) -> Callable[[events.Event], None]:
        """Returns the handler of a chunk's events, which puts the trial's name in front."""

        def heard(event: events.Event) -> None:
            self._hear(event)
            if isinstance(event, events.Stage | events.Error):
                event = replace(event, stage=f"{trial}: {event.stage}")
            self._on_event(event)

        return heard


def train_share(sweep: Sweep, number: int, trials: str, spare: int) -> str:
    """Trains a rung's chunks for one device's trials in this pod, and returns the trials that another has to end.

    Args:
        sweep: The sweep.
        number: Number of the rung, from 1.
        trials: Ids of the trials, between spaces, the same for a pod that is started again.
        spare: Number of pods that may go on after a preemption; without one that is a BatonError.
    """
    if not trials:
        return ""
    head, own = sweep.document(), trials.split()
    known = {trial.id: sweep.run(trial) for trial in head.trials}
    runs = [known[trial] for trial in own]
    device = ["--rung", str(number), "--device", own[0]]
    first, last = head.chunks(number)
    trainer = RungTrainer(sweep, events.emit, functools.partial(processes.FreshProcess, ends_with_this=True))
    try:
        notice = trainer.train(runs, first, last, shared=True, device=device)
        trainer.later(processes.PAGES, *(run.uri for run in runs))
        trainer.finish_beside()
    finally:
        trainer.close()
    if notice and not spare:
        raise BatonError(
            f"this machine is preempted ({notice}); the trials are saved.",
            remedy="Another pod goes on: `baton retry` the run, or set chunks.extra.",
        )
    return trials if notice else ""


def share_as_markdown(sweep: Sweep, trials: str) -> str:
    """Returns a device's trials with their newest scores."""
    head = sweep.document()
    lines = [f"| trial | chunk | step | {head.metric} |", "|---|---|---|---|"]
    for trial in head.trials:
        if trial.id in trials.split():
            scores = sweep.scores(trial.run)
            newest = max(scores, key=lambda score: score.chunk) if scores else None
            cells = (newest.chunk, newest.step, newest.value) if newest else ("—", "—", "—")
            lines.append(f"| {' | '.join(map(str, (trial.id, *cells)))} |")
    return "\n".join(lines) + "\n"


def _ended(program: str, arguments: Sequence[str], process: processes.Process) -> None:
    processes.require_success(program, arguments, process, processes.follow(process, lambda event: None))
