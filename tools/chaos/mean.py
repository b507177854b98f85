"""Run after run, each stage of each killed again and again, until the time is over."""

from __future__ import annotations

import json
import os
import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from baton import events
from baton.checkpoint import retention
from baton.checkpoint.store import CheckpointStore
from baton.events import Event
from baton.kfp import processes
from baton.local.forkserver import ForkedProcess
from baton.recipe.recipe import Recipe
from baton.runs.run import Run
from baton.store.cache import NodeCache
from tests.exactness import matrix
from tests.exactness.matrix import Cell
from tests.faults.proxy import FaultyProxy
from tools.chaos import check, plan
from tools.chaos.attempt import Attempt, Ended
from tools.chaos.machine import Machine
from tools.chaos.plan import Plan

CHUNKS = {"count": 3, "checkpoint_every": 2, "wait_for_commit": False, "keep": {"last": 2}}
STEPS = 31
CACHE_BYTES = 4_000_000
PATIENCE_S = 30
"""How long a stage waits for its store: longer than it is ever away."""


class ChaosError(Exception):
    """A run did not come to what an undisturbed one comes to."""


@dataclass
class Told:
    """What happened when: `at` is seconds since the beginning."""

    at: float
    what: str
    run: str
    stage: str = ""
    detail: str = ""
    seconds: float = 0.0
    steps: int = 0


@dataclass
class Result:
    """A run that came to its end."""

    run: str
    cell: str
    kills: dict[str, int] = field(default_factory=dict)
    outages: int = 0
    full: int = 0
    seconds: float = 0.0
    trained: int = 0
    useful: int = 0
    rows: int = 0
    digest: str = ""
    problems: list[str] = field(default_factory=list)


class Mean:
    """A mean hour.

    Args:
        folder: Where what it notes lies.
        store: Address of the store, reached through the proxy.
        proxy: In front of the store.
        seed: Decides all that is drawn.
        kills: How many there are to be at least.
        seconds: How long it goes on at least.
        cells: What runs are made of, one after the other and again.
        say: Called with a line for people.
    """

    def __init__(
        self,
        folder: Path,
        store: str,
        proxy: FaultyProxy,
        *,
        seed: int,
        kills: int,
        seconds: float,
        cells: Sequence[Cell] = plan.CELLS,
        say: Callable[[str], None] = print,
    ) -> None:
        self.folder, self.seed, self.wanted, self.seconds = folder, seed, kills, seconds
        self.machine = Machine(folder / "machine")
        self.told: list[Told] = []
        self.results: list[Result] = []
        self.kills = 0
        self._store, self._proxy, self._say = store, proxy, say
        self._source = matrix.write_rows(folder)
        self._base = str(folder / "base")
        self._undisturbed: dict[str, check.Finished] = {}
        self._usual: dict[tuple[str, str], float] = {}
        self._best = 0
        self._cells = cells
        self._committed: dict[str, set[int]] = defaultdict(set)
        os.environ["BATON_STORE_PATIENCE"] = str(PATIENCE_S)
        self._began = time.monotonic()

    def run(self) -> None:
        """Runs until both the time is over and there were enough kills.

        Raises:
            ChaosError: a run is not as the undisturbed one.
        """
        processes.run("tools.chaos.stage", ["base", self._base], lambda event: None, ForkedProcess)
        self._began = time.monotonic()
        number = 0
        while not self._is_over():
            number += 1
            cell = self._cells[(number - 1) % len(self._cells)]
            if cell.name not in self._undisturbed:
                self._leave_alone(cell)
            result = self._disturb(cell, number)
            self.results.append(result)
            self._note(Told(self._now(), "end", result.run))
            if result.problems:
                raise ChaosError(
                    f"seed {self.seed}, run {result.run}: " + "; ".join(result.problems[:5]) + f" ({self.folder})"
                )

    def _is_over(self) -> bool:
        return self._now() >= self.seconds and self.kills >= self.wanted

    def _now(self) -> float:
        return time.monotonic() - self._began

    def _note(self, told: Told) -> None:
        self.told.append(told)
        with (self.folder / "told.jsonl").open("a") as file:
            file.write(json.dumps(asdict(told)) + "\n")

    def _recipe(self, cell: Cell) -> Recipe:
        formats = {"kto": ["adapter", "safetensors"], "sft": ["adapter"], "dpo": ["adapter"]}
        exported = formats[cell.method] if cell.weights == "lora" else ["safetensors"]
        changes: Mapping[str, Any] = {
            "chunks": CHUNKS,
            "store": {"uri": self._store, "cache_dir": str(self.machine.cache), "cache_size": str(CACHE_BYTES)},
            "evaluation": {"samples": 2, "max_new_tokens": 6},
            "export": {"formats": exported, "check_tokens": 4},
        }
        whole = Cell(cell.method, cell.weights, cell.feature, {**cell.changes}, steps=STEPS)
        recipe = matrix.recipe(whole, self._store, self._base, self._source)
        document = recipe.model_dump(mode="json")
        matrix.merge(document, dict(changes))
        return type(recipe).model_validate(document)

    def _stages(self) -> list[tuple[str, int]]:
        chunks = [(stage, index) for index in (1, 2, 3) for stage in ("train_chunk", "checkpoint")]
        return [*chunks, ("evaluate", 0), ("export", 0)]

    def _leave_alone(self, cell: Cell) -> None:
        """Runs a cell as it should go: what its disturbed runs are compared with, and how long its stages take."""
        began, self._best = self._now(), 0
        run = processes.prepare(self._recipe(cell), f"{cell.name}-undisturbed", lambda event: None, ForkedProcess)
        notes = self.folder / f"{run.name}.rows"
        for stage, index in self._stages():
            ended = self._attempt(run, stage, index, Plan(), cell, notes)
            self._require(ended.code == 0, run, stage, ended)
            # The least of its chunks: later is after its end, and nothing is struck.
            self._usual[cell.name, stage] = min(ended.seconds, self._usual.get((cell.name, stage), ended.seconds))
        self._undisturbed[cell.name] = check.finished(run, notes)
        self._note(Told(began, "alone", run.name, seconds=self._now() - began, steps=STEPS))
        self._say(f"{run.name}: state {self._undisturbed[cell.name].outcome['state_digest'][:16]}")

    def _disturb(self, cell: Cell, number: int) -> Result:
        """Brings a run to its end through all that happens to it, and compares it."""
        began, self._best = self._now(), 0
        run = processes.prepare(self._recipe(cell), f"{cell.name}-{number:03d}", lambda event: None, ForkedProcess)
        notes = self.folder / f"{run.name}.rows"
        notes.touch()
        result = Result(run.name, f"{cell.method} {cell.weights}, {cell.feature}")
        for stage, index in self._stages():
            self._bring_through(run, cell, number, stage, index, result, notes)
        result.seconds = self._now() - began
        done = Counter(told.what for told in self.told if told.run == run.name)
        result.outages, result.full = done["outage"], done["full"]
        self._judge(run, cell, notes, result)
        kills = ", ".join(f"{stage} {count}" for stage, count in result.kills.items())
        self._say(
            f"{run.name}: {kills}; {result.outages} outages, {result.full} full disks; {result.seconds:.0f} s; "
            f"state {result.digest[:16]} {'as undisturbed' if not result.problems else result.problems}"
        )
        return result

    def _bring_through(
        self, run: Run, cell: Cell, number: int, stage: str, index: int, result: Result, notes: Path
    ) -> None:
        left, tries = plan.kills_of(self.seed, number, stage, index), 0
        while True:
            tries += 1
            # Each stage once even where there were kills enough before it.
            kill = left > 0 and not (self._is_over() and stage in result.kills)
            drawn = plan.attempt(self.seed, number, stage, index, tries, kill=kill)
            ended = self._attempt(run, stage, index, drawn, cell, notes)
            if ended.killed:
                left -= 1
                self.kills += 1
                result.kills[stage] = result.kills.get(stage, 0) + 1
                where = f"{ended.died_at} ({', '.join(ended.phases)})" if ended.phases else ended.died_at
                self._note(Told(self._now(), "kill", run.name, stage, where, ended.seconds))
                continue
            if ended.code == 0:
                if kill and tries < 12 and stage != "train_chunk":
                    continue  # it was done before it could be killed: done again, it finds all as it is
                return
            no_room = (
                bool(drawn.full) and re.search("o space left|no room", f"{ended.error} {ended.printed}") is not None
            )
            self._require(no_room and tries < 40, run, stage, ended)
            self._note(Told(self._now(), "no room", run.name, stage, ended.error))

    def _attempt(self, run: Run, stage: str, index: int, drawn: Plan, cell: Cell, notes: Path) -> Ended:
        def heard(event: Event) -> None:
            if isinstance(event, events.Step):
                self._note(Told(self._now(), "step", run.name, steps=event.step))
            elif isinstance(event, events.CheckpointCommitted):
                self._committed[run.name].add(event.step)
                if event.step > self._best:
                    self._note(Told(self._now(), "committed", run.name, steps=event.step - self._best))
                    self._best = event.step

        def acted(what: str, kind: str, seconds: float) -> None:
            self._note(Told(self._now() - seconds, what, run.name, stage, kind, seconds))

        usual = self._usual.get((cell.name, stage), 1.0)
        arguments = [stage, run.uri, str(index), "--rows", str(notes)]
        return Attempt(arguments, drawn, usual, self._proxy, self.machine, heard, acted).run()

    def _require(self, true: bool, run: Run, stage: str, ended: Ended) -> None:
        if not true:
            raise ChaosError(
                f"seed {self.seed}, run {run.name}: {stage} ended with {ended.code} after {ended.seconds:.0f} s: "
                f"{ended.error or ended.printed} ({self.folder})"
            )

    def _judge(self, run: Run, cell: Cell, notes: Path, result: Result) -> None:
        undisturbed, found = self._undisturbed[cell.name], check.finished(run, notes)
        result.problems = [*self.problems(run, cell, found), *self.machine.left()]
        result.digest = found.outcome["state_digest"]
        result.useful = STEPS
        result.trained = sum(len(attempts) for attempts in found.rows.values())
        result.rows = sum(count for attempts in undisturbed.rows.values() for count, _ in next(iter(attempts.values())))

    def problems(self, run: Run, cell: Cell, found: check.Finished) -> list[str]:
        """Returns a line for all in which a run, or what lies in the store, is not as without kills."""
        undisturbed = self._undisturbed[cell.name]
        return [
            *check.differences(undisturbed, found),
            *check.steps_logged_twice(run),
            *check.damaged(run),
            *check.left_behind(run, undisturbed, _an_hour_later),
            *check.checkpoints_left(run, self._committed[run.name]),
            *check.cache_left(NodeCache(str(self.machine.cache), CACHE_BYTES), self.folder / "young"),
        ]


def _an_hour_later(run: Run) -> None:
    """What any later look at a run's checkpoints and exports takes away."""
    recipe, planned = run.recipe(), run.plan()
    retention.prune(CheckpointStore(run), recipe.chunks.keep, targets=planned.targets)
