"""The promise under fire: a recipe killed again and again, compared with a run that nobody disturbs."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import cycle
from random import Random
from typing import TypedDict

from baton.components.shared.checkpoints.store import CheckpointStore
from baton.components.shared.core import events
from baton.components.shared.core.errors import DamagedError, SkipError
from baton.components.shared.core.events import Event
from baton.components.shared.core.patience import through_skips
from baton.components.shared.core.state import Phase
from baton.components.shared.recipe import Recipe, recipe_file
from baton.components.shared.runs.run import Run, now
from baton.pipelines.local import processes, results
from baton.pipelines.local.processes import CHECKPOINT, TRAIN_CHUNK, Fresh, Launcher
from baton.pipelines.proving import prove, turns
from baton.pipelines.proving.drill_phases import PHASES, Deck, Strike, Tracker


class Kill(TypedDict):
    """A process that was killed: the phase that was asked for, those that it was in, and what was committed then."""

    number: int
    run: str
    asked: str
    found: list[str]
    hit: bool
    stage: str
    chunk: int
    step: int
    committed: list[int]
    seconds_to_training: float | None


class Disturbed(prove.Told):
    """A run whose processes were killed, compared with the undisturbed one."""

    kills: int
    difference: prove.Difference | None
    checkpoints: list[int]
    problems: list[str]


class Report(TypedDict):
    """Result of a drill: `phases` tells how often each was asked for and hit, `unreachable` which none came to."""

    recipe: str
    created: str
    exact: bool
    wanted: int
    kills: list[Kill]
    phases: dict[str, dict[str, int]]
    unreachable: list[str]
    undisturbed: prove.Told
    runs: list[Disturbed]


class Drill:
    """One drill.

    Args:
        recipe: The recipe, its paths absolute.
        kills: How many processes to kill.
        seed: Decides in which phases, and how long after they begin.
        name: Prefix of the runs' names.
        leave_out: Parts of the state not to restore in the disturbed runs, as a negative control.
        processes: Numbers of processes that take turns in the disturbed runs, another one after each kill; the recipe's
            when left out.
        launch: Starts a process.
        on_event: Called with each event of the processes.
        on_kill: Called with each kill.

    Attributes:
        kills: What has been killed so far.
        usual: Seconds that each phase took in the undisturbed run, once for each time.
    """

    def __init__(
        self,
        recipe: Recipe,
        *,
        kills: int,
        seed: int,
        name: str,
        leave_out: Sequence[str] = (),
        processes: Sequence[int] = (),
        launch: Launcher = Fresh,
        on_event: Callable[[Event], None] = lambda event: None,
        on_kill: Callable[[Kill], None] = lambda kill: None,
    ) -> None:
        document = recipe.model_dump(mode="json")
        document["tracking"]["mlflow"] = None
        self.recipe = recipe_file.validate(document, origin=recipe.name)
        self.wanted = kills
        self.name = name
        self.launch = launch
        self.kills: list[Kill] = []
        self.usual: dict[str, list[float]] = {}
        self._random = Random(seed)
        self._turns = cycle(processes)
        self._left_out = [word for part in leave_out for word in ("--leave-out", part)]
        self._on_event, self._on_kill = on_event, on_kill
        self._waiting: list[tuple[Kill, float]] = []
        self._verified: set[str] = set()
        self._problems: list[str] = []

    def run(self) -> Report:
        """Runs the recipe undisturbed, then as often as it takes to use up all kills.

        Raises:
            BatonError: a process failed that was not killed, with its message.
        """
        created = now()
        undisturbed = self._undisturbed()
        seen = set(self.usual)
        if len(self.usual.get("upload", ())) > 1:
            seen.add("restore")  # one chunk with checkpoints inside restores them once it is killed
        deck = Deck([phase for phase in PHASES if phase in seen], self.usual, self.recipe.num_chunks, self._random)
        unreachable = [phase for phase in PHASES if phase not in deck.phases]
        runs: list[Disturbed] = []
        while deck.phases and len(self.kills) < self.wanted:
            before = len(self.kills)
            ordinal = "" if not runs else f"-{len(runs) + 1}"
            runs.append(self._disturbed(f"{self.name}-killed{ordinal}", deck, undisturbed))
            if len(self.kills) == before:  # a whole run went by without it
                unreachable.append(deck.drop())
        return {
            "recipe": self.recipe.name,
            "created": created,
            "exact": bool(runs) and not any(found["difference"] or found["problems"] for found in runs),
            "wanted": self.wanted,
            "kills": self.kills,
            "phases": {phase: self._count(phase) for phase in PHASES},
            "unreachable": unreachable,
            "undisturbed": prove.told(undisturbed),
            "runs": runs,
        }

    def _count(self, phase: str) -> dict[str, int]:
        asked = [kill for kill in self.kills if kill["asked"] == phase]
        return {"asked": len(asked), "hit": sum(kill["hit"] for kill in asked)}

    def _undisturbed(self) -> prove.Outcome:
        """Runs the recipe as it should go, and learns how long each phase takes."""
        run = processes.prepare(self.recipe, f"{self.name}-undisturbed", self._on_event, self.launch)
        for index in range(1, self.recipe.num_chunks + 1):
            for module, begins in ((TRAIN_CHUNK, "start-up"), (CHECKPOINT, "verifying")):
                through_skips(partial(self._learn, module, [run.uri, str(index)], begins))
        return prove.outcome(run, self.recipe.num_chunks)

    def _learn(self, module: str, arguments: Sequence[str], begins: str) -> None:
        tracker = Tracker(begins)

        def heard(event: Event) -> None:
            tracker.heard(event)
            self._on_event(event)

        try:
            processes.run(module, arguments, heard, self.launch)
        finally:
            for phase, seconds in tracker.seconds.items():
                self.usual.setdefault(phase, []).extend(seconds)

    def _disturbed(self, name: str, deck: Deck, undisturbed: prove.Outcome) -> Disturbed:
        """Brings a run to its end, however often its processes are killed, and compares it."""
        began, chunks = len(self.kills), self.recipe.num_chunks
        self._problems = []
        run = processes.prepare(self.recipe, name, self._on_event, self.launch)
        for index in range(1, chunks + 1):
            until = began + math.ceil((self.wanted - began) * index / chunks)
            for module in (TRAIN_CHUNK, CHECKPOINT):
                while not self._attempt(run, module, index, deck, until):
                    pass
        self._waiting = []
        rows = results.verify_checkpoints(run)
        damaged = [f"step {row['step']}: {problem}" for row in rows for problem in row["problems"]]
        outcome = prove.outcome(run, self.recipe.num_chunks)
        return {
            **prove.told(outcome),
            "kills": len(self.kills) - began,
            "difference": prove.difference(undisturbed, outcome),
            "checkpoints": [row["step"] for row in rows],
            "problems": list(dict.fromkeys([*self._problems, *damaged])),
        }

    def _attempt(self, run: Run, module: str, index: int, deck: Deck, until: int) -> bool:
        """Runs a stage of a chunk once.

        Args:
            run: The run.
            module: The stage.
            index: The chunk, from 1.
            deck: Says in which phase to kill it.
            until: Kills in all, up to which it may be killed: each chunk leaves the next ones their share.

        Returns:
            Whether it ended by itself, and not to skip a step that it has found.
        """
        try:
            return self._attempted(run, module, index, deck, until)
        except SkipError:  # the undisturbed run has ended, so this one, which finds the same, does
            return False

    def _attempted(self, run: Run, module: str, index: int, deck: Deck, until: int) -> bool:
        arguments = [run.uri, str(index), *(self._left_out if module == TRAIN_CHUNK else ())]
        if module == TRAIN_CHUNK and (number := next(self._turns, None)):
            turns.share(run, self.recipe, number)
        strikes = bool(deck.phases) and len(self.kills) < until
        if not strikes or (module == CHECKPOINT and deck.top() != "prune"):
            processes.run(module, arguments, self._follow, self.launch)
            return True
        tracker = Tracker("start-up" if module == TRAIN_CHUNK else "verifying")
        process = self.launch(module, arguments)
        strike = Strike(deck, tracker, process.kill)

        def heard(event: Event) -> None:
            strike.heard(event)
            self._follow(event)

        failure = processes.follow(process, heard)
        strike.end()
        if strike.struck_at is None or process.wait() != -signal.SIGKILL:
            processes.require_success(module, arguments, process, failure)
            return True
        process.output()
        processes.clear_staging(process.pid)
        self._killed(run, module, index, strike, tracker, deck)
        return False

    def _follow(self, event: Event) -> None:
        if isinstance(event, events.Phase) and event.phase == Phase.TRAIN:
            for kill, at in self._waiting:
                kill["seconds_to_training"] = time.monotonic() - at
            self._waiting = []
        self._on_event(event)

    def _killed(self, run: Run, module: str, index: int, strike: Strike, tracker: Tracker, deck: Deck) -> None:
        """Notes a kill, and what it left in the store."""
        phases = [phase for phase in tracker.phases if phase != "prune" or _is_unfinished(run, tracker.pruned)]
        kill: Kill = {
            "number": len(self.kills) + 1,
            "run": run.name,
            "asked": strike.phase,
            "found": phases,
            "hit": strike.phase in phases,
            "stage": module.rpartition(".")[2],
            "chunk": index,
            "step": tracker.step,
            "committed": self._committed(run),
            "seconds_to_training": None,
        }
        deck.done(hit=kill["hit"])
        self.kills.append(kill)
        assert strike.struck_at is not None
        self._waiting.append((kill, strike.struck_at))
        self._on_kill(kill)

    def _committed(self, run: Run) -> list[int]:
        """Returns the steps that are committed, ascending; reads back each that was not there at the last kill."""
        store, steps = CheckpointStore(run), []

        def note_damaged(step: int, error: DamagedError) -> None:
            steps.append(step)
            self._problems.append(f"step {step}: {error}")

        for checkpoint in store.committed(note_damaged):
            steps.append(checkpoint.step)
            if checkpoint.manifest.folder not in self._verified:
                self._problems += [f"step {checkpoint.step}: {problem}" for problem in store.verify(checkpoint)]
                self._verified.add(checkpoint.manifest.folder)
        return steps[::-1]


def _is_unfinished(run: Run, step: int | None) -> bool:
    """Tells whether a removal left something; only the step of the last one is known, not whose files it took."""
    assert step is not None
    names = run.storage.find(CheckpointStore(run).prefix(step))
    return any("/" in name or name.startswith("manifest") for name in names)
