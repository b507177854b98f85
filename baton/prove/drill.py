"""`baton verify kills`: a recipe killed again and again, in every phase, compared with an undisturbed run.

Phases come from events and are dealt like cards, so that each is hit about as often.
"""

import contextlib
import math
import signal
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import cycle
from random import Random
from typing import TypedDict

from baton import events
from baton.checkpoint.store import CheckpointStore
from baton.errors import DamagedError, SkipError
from baton.kfp import processes
from baton.kfp.processes import CHECKPOINT, TRAIN_CHUNK, FreshProcess, Launcher
from baton.local import begun, results
from baton.prove import prove
from baton.recipe import load
from baton.recipe.recipe import Recipe
from baton.runs.documents import StagePhase
from baton.runs.run import Run, now
from baton.runtime import through_skips

MISSES = 3
"""Whole runs without a kill until a phase counts as unreachable; a loaded machine passes a short one by."""
PHASES = ("start-up", "restore", "first-step", "training", "snapshot", "upload", "commit", "prune")
"""In the order of a chunk; the last three run parallel to training."""
AT_ONCE = 0.001
"""Seconds below which a kill does not wait for a timer."""
ONCE = ("start-up", "restore", "first-step")
PASSED_BY = 0.3
"""Chance that a kill lets a phase pass once, if a process enters it again and again."""
UNKNOWN = 0.005
"""Seconds of a phase that was never measured."""


class PhaseTracker:
    """Tracks the phases of a process by its events."""

    def __init__(self, begins: str = "start-up") -> None:
        self.step = 0
        # Step of the newest removal that began, and seconds of each phase, once for each time that is known.
        self.pruned: int | None = None
        self.seconds: dict[str, list[float]] = {}
        self._lanes = {"main": (begins, time.monotonic()), "beside": ("", 0.0)}
        self._came_from = 0
        self._imports = self._trains = False

    @property
    def phases(self) -> list[str]:
        """Its phases: first on the training thread, then on others."""
        return [phase for phase, _ in self._lanes.values() if phase]

    def since(self, phase: str) -> float | None:
        """Returns the beginning of a phase that the process is in."""
        return next((began for name, began in self._lanes.values() if name == phase), None)

    def heard(self, event: events.Event) -> str | None:
        """Notes an event and returns the phase that begins with it, if one does."""
        self.step = max(self.step, getattr(event, "step", None) or 0)
        match event:
            case events.Phase(phase, step):
                return self._phase(phase, step)
            case events.Step() if self.since("first-step"):
                return self._enter("main", "training")
            case events.CheckpointCommitted() | events.Superseded():
                return self._enter("beside", "")
            case events.Verified() | events.AlreadyDone():
                self._enter("main", "end")
                return self._enter("beside", "")
        return None

    def _phase(self, name: str, step: int | None) -> str | None:
        match name:
            case "import":
                self._imports = True
            case "fetch" | "build" if self._imports:
                return self._enter("main", "build")
            case "restore":
                self._came_from = step or 0
                return self._enter("main", "restore" if step else "build")
            case "train":
                entered, self._trains = "training" if self._trains else "first-step", True
                return self._enter("main", entered)
            case "save":
                return self._enter("main", "snapshot")
            case "upload" if step is None:
                return self._enter("main", "end")
            case "upload":
                if self.since("snapshot"):
                    self._enter("main", "")
                return self._enter("beside", "upload")
            case "commit":
                return self._enter("beside", "commit")
            case "prune":
                self.pruned = step
                return self._enter("beside", "prune")
        return None

    def _enter(self, lane: str, phase: str) -> str | None:
        before, began = self._lanes[lane]
        now = time.monotonic()
        if before == phase != "prune":
            return None
        if before and not (before == "prune" and phase == "upload"):  # no event ends a chunk's removals
            # Losses are told every few steps only, so the first step as timed may be several.
            steps = max(1, self.step - self._came_from) if before == "first-step" else 1
            self.seconds.setdefault(before, []).append((now - began) / steps)
        self.seconds.setdefault(phase, [])
        self._lanes[lane] = (phase, now)
        return phase or None


class KillSchedule:
    """Phases in random order, again and again, so that each is asked for about as often.

    `usual` has the seconds of each, once for each time that one of so many undisturbed processes was in it.
    """

    def __init__(
        self, phases: Sequence[str], usual: Mapping[str, Sequence[float]], processes: int, random: Random
    ) -> None:
        self.phases = list(phases)
        self._random = random
        self._longest = {phase: statistics.median(usual.get(phase) or [UNKNOWN]) for phase in phases}
        self._often = {phase for phase in phases if len(usual.get(phase, ())) >= 3 * processes}
        self._cards: list[str] = []

    def top(self) -> str:
        if not self._cards:
            self._cards = self._random.sample(self.phases, len(self.phases))
        return self._cards[-1]

    def done(self, *, hit: bool) -> None:
        """Takes the top card off; after a kill that came too late for its phase it stays, to be tried again."""
        if hit:
            self._cards.pop()
        else:
            self.late(self._cards[-1])

    def late(self, phase: str) -> None:
        """Kills sooner after the phase begins, the next time."""
        self._longest[phase] /= 2

    def drop(self) -> str:
        phase = self.top()
        self.phases.remove(phase)
        self._cards = [card for card in self._cards if card != phase]
        return phase

    def passes(self, phase: str) -> bool:
        """Decides whether a kill lets a phase that begins now pass."""
        return phase in self._often and self._random.random() < PASSED_BY

    def delay(self, phase: str) -> float:
        """Returns the seconds from a phase's beginning to its kill."""
        return self._random.uniform(0, self._longest[phase])


class PlannedKill:
    """One kill, waiting for its phase in one process; a process that enters it does not get away."""

    def __init__(self, deck: KillSchedule, tracker: PhaseTracker, kill: Callable[[], None]) -> None:
        self.phase = deck.top()
        self.struck_at: float | None = None
        self._deck, self._tracker, self._kill = deck, tracker, kill
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None
        self._passed = self._late = False
        if tracker.since(self.phase) is not None:
            self._aim()

    def heard(self, event: events.Event) -> None:
        with self._lock:
            if self._tracker.heard(event) == self.phase and self._timer is None and self.struck_at is None:
                self._aim()

    def end(self) -> None:
        with self._lock:
            if self._timer:
                self._timer.cancel()

    def _aim(self) -> None:
        if not self._passed and self._deck.passes(self.phase):
            self._passed = True
            return
        delay, began = 0.0 if self._late else self._deck.delay(self.phase), self._tracker.since(self.phase)
        if delay < AT_ONCE:
            self._strike()
            return
        self._timer = threading.Timer(delay, self._fire, [began])
        self._timer.daemon = True
        self._timer.start()

    def _fire(self, began: float) -> None:
        with self._lock:
            self._timer = None
            if self._tracker.since(self.phase) == began or self.phase in ONCE:
                self._strike()
            else:  # over before the kill came: it waits for the next time
                self._late = True
                self._deck.late(self.phase)

    def _strike(self) -> None:
        self._kill()
        self.struck_at = time.monotonic()


class Kill(TypedDict):
    """A killed process: the phase asked for, its actual phases, and the steps committed then."""

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


class KilledRun(prove.RunSummary):
    """A run whose processes were killed, compared with the undisturbed one."""

    kills: int
    difference: prove.Difference | None
    checkpoints: list[int]
    problems: list[str]


class DrillReport(TypedDict):
    """Result of a drill: `phases` has how often each was asked for and hit, `unreachable` those never entered."""

    recipe: str
    created: str
    leave_out: list[str]
    exact: bool
    wanted: int
    kills: list[Kill]
    phases: dict[str, dict[str, int]]
    unreachable: list[str]
    undisturbed: prove.RunSummary
    runs: list[KilledRun]


class Drill:
    """One drill of a recipe whose paths are absolute.

    `seed` decides the phases and the delays in them, `name` begins the runs' names. The disturbed runs do not restore
    parts in `leave_out`, a negative control, and numbers of `processes` take turns, another after each kill.
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
        launch: Launcher = FreshProcess,
        on_event: Callable[[events.Event], None] = lambda event: None,
        on_kill: Callable[[Kill], None] = lambda kill: None,
    ) -> None:
        self.recipe = load.with_values(recipe, {"tracking.mlflow": None})
        self.wanted, self.name, self.launch = kills, name, launch
        self.kills: list[Kill] = []
        self.usual: dict[str, list[float]] = {}  # seconds of each phase, as `PhaseTracker.seconds`
        self._random = Random(seed)
        self._turns = cycle(processes)
        self._left_out = [word for part in leave_out for word in ("--leave-out", part)]
        self._on_event, self._on_kill = on_event, on_kill
        self._waiting: list[tuple[Kill, float]] = []
        self._verified: set[str] = set()
        self._problems: list[str] = []

    def run(self) -> DrillReport:
        """Runs the recipe undisturbed, then until all kills are used up; a process that fails by itself ends it."""

        def count(phase: str) -> dict[str, int]:
            asked = [kill for kill in self.kills if kill["asked"] == phase]
            return {"asked": len(asked), "hit": sum(kill["hit"] for kill in asked)}

        created = now()
        undisturbed = self._undisturbed()
        seen = set(self.usual)
        if len(self.usual.get("upload", ())) > 1:
            seen.add("restore")  # one chunk with checkpoints inside restores them once it is killed
        deck = KillSchedule(
            [phase for phase in PHASES if phase in seen], self.usual, self.recipe.num_chunks, self._random
        )
        unreachable = [phase for phase in PHASES if phase not in deck.phases]
        runs: list[KilledRun] = []
        missed = 0  # whole runs in succession without a kill
        while deck.phases and len(self.kills) < self.wanted:
            before = len(self.kills)
            ordinal = "" if not runs else f"-{len(runs) + 1}"
            runs.append(self._disturbed(f"{self.name}-killed{ordinal}", deck, undisturbed))
            missed = missed + 1 if len(self.kills) == before else 0
            if missed == MISSES:
                unreachable.append(deck.drop())
                missed = 0
        return {
            "recipe": self.recipe.name,
            "created": created,
            "leave_out": self._left_out[1::2],
            "exact": bool(runs) and not any(found["difference"] or found["problems"] for found in runs),
            "wanted": self.wanted,
            "kills": self.kills,
            "phases": {phase: count(phase) for phase in PHASES},
            "unreachable": unreachable,
            "undisturbed": prove.summary(undisturbed),
            "runs": runs,
        }

    def _undisturbed(self) -> prove.FinishedRun:
        run = begun.begin(self.recipe, f"{self.name}-undisturbed", self._on_event, self.launch)
        for index in range(1, self.recipe.num_chunks + 1):
            for module, begins in ((TRAIN_CHUNK, "start-up"), (CHECKPOINT, "verifying")):
                through_skips(partial(self._learn, module, [run.uri, str(index)], begins))
        return prove.outcome(run, self.recipe.num_chunks)

    def _learn(self, module: str, arguments: Sequence[str], begins: str) -> None:
        tracker = PhaseTracker(begins)

        def heard(event: events.Event) -> None:
            tracker.heard(event)
            self._on_event(event)

        try:
            processes.run(module, arguments, heard, self.launch)
        finally:
            for phase, seconds in tracker.seconds.items():
                self.usual.setdefault(phase, []).extend(seconds)

    def _disturbed(self, name: str, deck: KillSchedule, undisturbed: prove.FinishedRun) -> KilledRun:
        """Brings a run to its end, however often its processes are killed, and compares it."""
        began, chunks = len(self.kills), self.recipe.num_chunks
        self._problems = []
        run = begun.begin(self.recipe, name, self._on_event, self.launch)
        for index in range(1, chunks + 1):
            until = began + math.ceil((self.wanted - began) * index / chunks)
            for module in (TRAIN_CHUNK, CHECKPOINT):
                has_ended = False
                while not has_ended:
                    with contextlib.suppress(SkipError):  # it ends as the undisturbed run has, which finds the same
                        has_ended = self._attempt(run, module, index, deck, until)
        self._waiting = []
        rows = results.verify_checkpoints(run)
        damaged = [f"step {row['step']}: {problem}" for row in rows for problem in row["problems"]]
        outcome = prove.outcome(run, self.recipe.num_chunks)
        return {
            **prove.summary(outcome),
            "kills": len(self.kills) - began,
            "difference": prove.difference(undisturbed, outcome),
            "checkpoints": [row["step"] for row in rows],
            "problems": list(dict.fromkeys([*self._problems, *damaged])),
        }

    def _attempt(self, run: Run, module: str, index: int, deck: KillSchedule, until: int) -> bool:
        """Runs a stage of a chunk once, and tells whether it ended by itself; raises `SkipError` for a step to skip."""
        arguments = [run.uri, str(index), *(self._left_out if module == TRAIN_CHUNK else ())]
        if module == TRAIN_CHUNK and (number := next(self._turns, None)):
            prove.set_num_processes(run, self.recipe, number)
        # Each chunk keeps kills for the next ones: it stops at `until` in all.
        strikes = bool(deck.phases) and len(self.kills) < until
        if not strikes or (module == CHECKPOINT and deck.top() != "prune"):
            processes.run(module, arguments, self._follow, self.launch)
            return True
        tracker = PhaseTracker("start-up" if module == TRAIN_CHUNK else "verifying")
        process = self.launch(module, arguments)
        strike = PlannedKill(deck, tracker, process.kill)

        def heard(event: events.Event) -> None:
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

    def _follow(self, event: events.Event) -> None:
        if isinstance(event, events.Phase) and event.phase == StagePhase.TRAIN:
            for kill, at in self._waiting:
                kill["seconds_to_training"] = time.monotonic() - at
            self._waiting = []
        self._on_event(event)

    def _killed(
        self, run: Run, module: str, index: int, strike: PlannedKill, tracker: PhaseTracker, deck: KillSchedule
    ) -> None:
        phases = tracker.phases
        if "prune" in phases and tracker.pruned is not None:
            # Only the step of the last removal is known, not whose files it took: it has left something, or is over.
            names = run.storage.find(CheckpointStore(run).prefix(tracker.pruned))
            if not any("/" in name or name.startswith("manifest") for name in names):
                phases.remove("prune")
        kill: Kill = {
            "number": len(self.kills) + 1,
            "run": run.name,
            "asked": strike.phase,
            "found": phases,
            "hit": strike.phase in phases,
            "stage": module.rpartition(" ")[2],
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
        """Returns the committed steps, ascending; reads back each that is new since the last kill."""
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
