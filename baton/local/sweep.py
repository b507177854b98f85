"""A sweep on one machine: trials in turns, each chunk or rung a fork of one warm server, and the best exported.

The stages are those of `pipelines.sweep`; only their caller differs. Chunks of a rung go round all trials. During
one chunk, the next process fetches its files and builds its trainer.
"""

import logging
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import TypeVar

from baton import events
from baton.compiler.pipeline_file import compile_pipeline
from baton.errors import BatonError, UserError
from baton.kfp import processes
from baton.local import begun, engine, forkserver
from baton.pipelines.sweep import winners
from baton.recipe import load
from baton.recipe.recipe import Recipe
from baton.recipe.sharing import share
from baton.runs.documents import ProofPart, TokenizedRows
from baton.runs.outcomes import TrialFailure, TrialInfo
from baton.runs.plan import Plan
from baton.runs.run import ORIGIN, Run, Sweep, now
from baton.runtime import through_skips
from baton.source import credentials
from baton.store.manifest import usable_manifest
from baton.sweep.search import PlannedRung, brackets


def export_best_trial(run: Run, sweep: str, on_event: Callable[[events.Event], None]) -> None:
    """Runs the stages after the last chunk on the best trial's run, as the compiled pipeline does."""
    with tempfile.TemporaryDirectory(prefix="baton-compile-") as folder:
        package = os.path.join(folder, "winner.yaml")
        compile_pipeline(winners(run.recipe()), package)
        engine.run(package, sweep, {"run_uri": run.uri}, on_event=on_event)


def is_prepared(run: Run) -> bool:
    """Tells whether the data of a run is still there."""
    tokens = run.read(TokenizedRows)
    if run.read(Plan) is None or tokens is None:
        return False
    return usable_manifest(run.storage, tokens.prefix) is not None


logger = logging.getLogger("baton")
BESIDE = 2  # stages in parallel with a training chunk, at most: checking a checkpoint, writing the page
TRIES = 2  # starts of a chunk that fails for another reason than the user's, as of a pod
Answer = TypeVar("Answer", bound=events.Event)


class LocalSweep:
    """One sweep on this machine, of a recipe whose paths are absolute; one that exists resumes where it stopped."""

    def __init__(self, recipe: Recipe, name: str, on_event: Callable[[events.Event], None]) -> None:
        self.recipe = recipe
        self.sweep = Sweep.open(f"{recipe.store.uri}/sweeps/{name}")
        self._on_event = on_event
        self._launch = forkserver.launcher()
        self._beside = ThreadPoolExecutor(BESIDE, "baton-beside")
        self._pending: list[tuple[processes.Process, Future[None]]] = []

    def run(self) -> Run:
        """Runs the sweep to its last rung, and returns the run of the best trial."""
        with processes.environment(**credentials.signing_environment(self.recipe)):
            return self._run()

    def _run(self) -> Run:
        best = ""
        try:
            for bracket in brackets(self.recipe):
                survivors = self._begun(bracket.number)
                for rung in bracket.rungs:
                    self._train(rung, survivors)
                    verdict = self._stage(events.Verdict, "judge", self.sweep.uri, str(rung.number))
                    self._later("baton.kfp.process page", self.sweep.uri, str(rung.number))
                    survivors, best = verdict.kept, verdict.winner
            self._finish_beside()
        finally:
            for process, _ in self._pending:
                # Only after an error are some left. The resumed sweep does their work again.
                process.kill()
            self._beside.shutdown()
        return Run.open(best)

    def _begun(self, bracket: int) -> list[str]:
        """Draws the trials of a bracket, makes their data, and returns the addresses of their runs."""
        with tempfile.NamedTemporaryFile("w", suffix=".json", encoding="utf-8") as file:
            file.write(load.dumps(self.recipe))
            file.flush()
            arguments = [file.name, self.sweep.name, self.recipe.store.uri, str(bracket)]
            preparations = self._stage(events.Prepares, "begin", *arguments).preparations
        for preparation in preparations:
            if not is_prepared(Run(self.sweep.storage, preparation["run"])):
                prepared = load.loads(preparation["recipe"])
                with processes.environment(**{ORIGIN["until"]: "data"}):
                    processes.prepare(prepared, preparation["run"], self._on_event, self._launch)
        runs = self._stage(events.Entered, "enter", self.sweep.uri, str(bracket)).runs
        for uri in runs:
            begun.note_here(uri.rpartition("/")[2], uri, [])
        return runs

    def _train(self, rung: PlannedRung, survivors: list[str]) -> None:
        """Trains the chunks of a rung, each for all trials that are left before the next one."""
        runs = [Run.open(uri) for uri in survivors]
        if self.recipe.sweep and self.recipe.sweep.device == "shared":
            by_trial = {run.need(TrialInfo).id: run for run in runs}
            sharing = share({trial: run.resolved_recipe() for trial, run in by_trial.items()})
            for reason in sharing.reasons:
                self._on_event(events.NoEffect(f"sweep.device: shared: {reason}"))
            for group in sharing.groups:
                self._take_turns({trial: by_trial[trial] for trial in group}, rung)
            runs = [by_trial[trial] for trial in sharing.apart]
        for index in range(rung.first, rung.chunk + 1):
            runs = [run for run in runs if self._one(run, index)]
        self._finish_beside()

    def _take_turns(self, trials: dict[str, Run], rung: PlannedRung) -> None:
        """Trains the chunks of a rung inside one process, begun again after a failure, at last without its trial."""
        turn: events.Turn | None = None
        failed: Counter[events.Turn] = Counter()
        trained: list[events.Turn] = []  # their checkpoints are checked together, once all have had their turn

        def heard(event: events.Event) -> None:
            nonlocal turn
            if isinstance(event, events.Turn):
                turn = event
                if event.trial not in trials:  # has joined
                    trials[event.trial] = self.sweep.run(self.sweep.trial(event.trial))
                if trained and trained[0].chunk != event.chunk:
                    check()
                if event.state == "done":
                    trained.append(event)
                    trials[event.trial].remove(TrialFailure)
                event = events.Stage(f"{event.trial}: train chunk {event.chunk}", event.state)
            elif isinstance(event, events.Error) and turn:
                event = replace(event, stage=f"{turn.trial}: train chunk {turn.chunk}")
            elif isinstance(event, events.Stage):  # the process's
                return
            self._on_event(event)

        def check() -> None:
            chunk, uris = str(trained[0].chunk), [trials[each.trial].uri for each in trained]
            trained.clear()
            self._later(processes.CHECK_TURNS, chunk, *uris)

        def train() -> None:
            nonlocal turn
            turn = None
            uris = [run.uri for run in trials.values()]
            process = self._launch(processes.TAKE_TURNS, [str(rung.first), str(rung.chunk), *uris])
            failure = processes.follow(process, heard)
            if trained:
                check()
            chunk = str(turn.chunk if turn else rung.first)
            failure = failure and replace(failure, stage=f"train chunk {chunk}")
            processes.require_success(processes.TRAIN_CHUNK, ["", chunk], process, failure)

        while trials:
            try:
                through_skips(train)
                return
            except BatonError as error:
                if turn is None or turn.state == "done":  # of no trial
                    raise
                failed[turn] += 1
                if self._is_out(trials[turn.trial], turn.chunk, failed[turn], error):
                    del trials[turn.trial]

    def _one(self, run: Run, index: int) -> bool:
        """Trains a chunk of a trial, and tells whether the trial continues with the next one."""
        trial = run.need(TrialInfo).id
        request = self.sweep.request(trial)
        if request is not None and request.state == "stop":
            return False
        # The last chunk after which the trial has a score.
        scored = max((score.chunk for score in self.sweep.scores(run)), default=0)
        if index < scored:
            return True
        if index == scored:
            if run.read(ProofPart, index) is None:
                self._later(processes.CHECKPOINT, run.uri, str(index))
            return True
        for attempt in range(1, TRIES + 1):
            try:
                processes.train_chunk(run.uri, index, self._named(trial), self._launch)
                break
            except BatonError as error:
                if self._is_out(run, index, attempt, error):
                    return False
        self._later(processes.CHECKPOINT, run.uri, str(index))
        # Of an earlier attempt at this chunk, or of one that a resumed trial has got past.
        run.remove(TrialFailure)
        return True

    def _is_out(self, run: Run, index: int, attempt: int, error: BatonError) -> bool:
        """Tells whether a trial has failed for good, and notes it."""
        trial = run.need(TrialInfo).id
        if attempt < TRIES and not isinstance(error, UserError):
            logger.warning("trial %s failed in chunk %d and is tried again: %s", trial, index, error)
            return False
        run.write(TrialFailure(chunk=index, message=error.message, at=now()))
        self._on_event(processes.TrialFailed(trial, index, error.message))
        return True

    def _later(self, program: str, *arguments: str) -> None:
        """Runs a stage in parallel with the next ones, unseen."""
        while sum(not ended.done() for _, ended in self._pending) >= BESIDE:
            next(ended for _, ended in self._pending if not ended.done()).result()
        process = self._launch(program, arguments)
        self._pending.append((process, self._beside.submit(_ended, program, arguments, process)))

    def _finish_beside(self) -> None:
        """Waits for parallel stages, and raises their errors."""
        pending, self._pending = self._pending, []
        for _, ended in pending:
            ended.result()

    def _named(self, trial: str) -> Callable[[events.Event], None]:
        """Returns the handler of a chunk's events, which puts the trial's name in front."""

        def heard(event: events.Event) -> None:
            if isinstance(event, events.Stage | events.Error):
                event = replace(event, stage=f"{trial}: {event.stage}")
            self._on_event(event)

        return heard

    def _stage(self, answer: type[Answer], stage: str, *arguments: str) -> Answer:
        """Runs a stage of the sweep itself and returns the event of its answer."""
        answers: list[Answer] = []

        def heard(event: events.Event) -> None:
            answers.extend([event] if isinstance(event, answer) else [])
            self._on_event(event)

        processes.run(f"baton.kfp.process {stage}", arguments, heard, self._launch)
        return answers[-1]


def _ended(program: str, arguments: Sequence[str], process: processes.Process) -> None:
    processes.require_success(program, arguments, process, processes.follow(process, lambda event: None))
