"""A sweep in the store: its configurations, what each rung decided, and what people ask of it, by name.

sweeps/<name>/sweep.json           recipe, metric, rungs, and the trials it began with
sweeps/<name>/trials/<id>.json     trials that came later: of a later bracket, or forked
sweeps/<name>/rungs/rung-001.json  scores, who was kept, who was stopped and why
sweeps/<name>/control/<id>.json    the newest wish: `stop` or `go`
sweeps/<name>/page.html            leaderboard and curves
runs/<run>/trial.json              makes a run a trial: the sweep, its id, the values that are its own
runs/<run>/scores/chunk-001.json   how well it does behind each chunk
runs/<run>/failure.json            what a chunk of it failed with
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, TypeVar

from components.shared.errors import UserError
from components.shared.runs import Run, now
from components.shared.storage import Storage

TRIAL = "trial.json"
"""The document of a run that makes it a trial."""

FAILURE = "failure.json"
"""What a trial's run knows of the chunk that failed last: `chunk`, `message` and `at`."""

State = Literal["stop", "go"]
T = TypeVar("T")
R = TypeVar("R")

PARALLEL = 16
"""Calls to the store at a time."""


class Sweep:
    """One sweep, addressed by the store and its name.

    Args:
        storage: The store.
        name: The sweep's name.
    """

    def __init__(self, storage: Storage, name: str) -> None:
        self.storage = storage
        self.name = name

    @classmethod
    def of(cls, run: Run) -> Sweep | None:
        """Returns the sweep that a run is a trial of, None where it is none."""
        trial = run.get(TRIAL)
        return cls(run.storage, trial["sweep"]) if trial else None

    @classmethod
    def open(cls, sweep_uri: str) -> Sweep:
        """Opens a sweep by `<store>/sweeps/<name>`.

        Raises:
            UserError: the URI is not of that form.
        """
        store, separator, name = sweep_uri.rstrip("/").rpartition("/sweeps/")
        if not separator or not name or "/" in name:
            raise UserError(f"sweep URI {sweep_uri!r} is not of the form STORE/sweeps/NAME.")
        return cls(Storage(store), name)

    def path(self, name: str = "") -> str:
        """Returns a path of this sweep in the store."""
        return f"sweeps/{self.name}/{name}".rstrip("/")

    @property
    def uri(self) -> str:
        """Address of the sweep."""
        return self.storage.uri(self.path())

    def create(self, document: dict[str, Any]) -> bool:
        """Writes `sweep.json` where there is none, and tells whether this call did."""
        return self.storage.create(self.path("sweep.json"), _json({"name": self.name, "created": now(), **document}))

    def find(self) -> dict[str, Any] | None:
        """Returns the sweep with all its trials, None before it has begun."""
        document = self._get("sweep.json")
        if document is None:
            return None
        added = each(lambda name: self._require(f"trials/{name}"), self.storage.list(self.path("trials")))
        return {**document, "trials": sorted([*document["trials"], *added], key=lambda trial: str(trial["id"]))}

    def document(self) -> dict[str, Any]:
        """Returns the sweep: `name`, `created`, `recipe`, `metric`, `mode`, `rungs` and all `trials`.

        Raises:
            UserError: there is no such sweep.
        """
        document = self.find()
        if document is None:
            raise UserError(f"{self.uri}/sweep.json does not exist.", remedy="Check the sweep's name and the store.")
        return document

    def trials(self) -> list[dict[str, Any]]:
        """Returns all trials in their order: `id`, `run`, `bracket`, `values` and `parent`."""
        trials: list[dict[str, Any]] = self.document()["trials"]
        return trials

    def trial(self, trial_id: str) -> dict[str, Any]:
        """Returns one trial.

        Raises:
            UserError: there is none of this id.
        """
        trials = {trial["id"]: trial for trial in self.trials()}
        if trial_id not in trials:
            raise UserError(f"sweep {self.name!r} has no trial {trial_id!r}.", remedy=f"It has {', '.join(trials)}.")
        return trials[trial_id]

    def add(self, trial: dict[str, Any]) -> bool:
        """Adds a trial, and tells whether this call did; of two of one id, the first stands."""
        return self.storage.create(self.path(f"trials/{trial['id']}.json"), _json(trial))

    def run(self, trial: dict[str, Any]) -> Run:
        """Returns the run of a trial."""
        return Run(self.storage, trial["run"])

    def rungs(self) -> list[dict[str, Any]]:
        """Returns what each rung that is over has decided, in their order."""
        return [self._require(f"rungs/{name}") for name in self.storage.list(self.path("rungs"))]

    def rung(self, number: int) -> dict[str, Any] | None:
        """Returns what a rung has decided, None before it has."""
        return self._get(_rung(number))

    def keep_rung(self, document: dict[str, Any]) -> None:
        """Writes what a rung has decided."""
        self._put(_rung(document["rung"]), document)

    def scores(self, run: str | Run) -> list[dict[str, Any]]:
        """Returns how a run of this sweep did behind each chunk that is scored: `chunk`, `step`, `value`, …"""
        found = run if isinstance(run, Run) else Run(self.storage, run)
        names = self.storage.list(found.path("scores"))
        return [found.require(f"scores/{name}") for name in names]

    def control(self, trial_id: str) -> dict[str, Any] | None:
        """Returns the newest wish for a trial: `state`, `why` and `at`; None where nobody asked for anything."""
        return self._get(f"control/{trial_id}.json")

    def ask(self, trial_id: str, state: State, why: str) -> None:
        """Notes a wish for a trial, taken up at its next chunk boundary."""
        self._put(f"control/{trial_id}.json", {"state": state, "why": why, "at": now()})

    def get(self, name: str) -> dict[str, Any] | None:
        """Returns another document of the sweep, or None."""
        return self._get(name)

    def put(self, name: str, document: dict[str, Any]) -> None:
        """Writes another document of the sweep, replacing the one before."""
        self._put(name, document)

    def _get(self, name: str) -> dict[str, Any] | None:
        try:
            document: dict[str, Any] = json.loads(self.storage.read(self.path(name)))
        except FileNotFoundError:
            return None
        return document

    def _require(self, name: str) -> dict[str, Any]:
        document = self._get(name)
        if document is None:
            raise UserError(f"{self.storage.uri(self.path(name))} does not exist.", remedy="Check name and store.")
        return document

    def _put(self, name: str, document: dict[str, Any]) -> None:
        self.storage.write(self.path(name), _json(document))


def each(work: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """Does something with each trial, several at a time, and returns the results in the trials' order."""
    with ThreadPoolExecutor(PARALLEL) as pool:
        return list(pool.map(work, items))


def score_name(chunk: int) -> str:
    """Returns the name of a run's document with its score behind a chunk."""
    return f"scores/chunk-{chunk:03d}.json"


def _rung(number: int) -> str:
    return f"rungs/rung-{number:03d}.json"


def _json(document: dict[str, Any]) -> bytes:
    return json.dumps(document, indent=1, sort_keys=True).encode()
