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

from typing import Any, Literal

from components.shared.documents import Documents
from components.shared.errors import UserError
from components.shared.runs import Run, now
from components.shared.store.bundles import each

TRIAL = "trial.json"
"""The document of a run that makes it a trial."""

FAILURE = "failure.json"
"""What a trial's run knows of the chunk that failed last: `chunk`, `message` and `at`."""

State = Literal["stop", "go"]


class Sweep(Documents):
    """One sweep, addressed by the store and its name."""

    KIND = "sweep"

    def create(self, document: dict[str, Any]) -> bool:
        """Writes `sweep.json` where there is none, and tells whether this call did."""
        return self.put_new("sweep.json", {"name": self.name, "created": now(), **document})

    def find(self) -> dict[str, Any] | None:
        """Returns the sweep with all its trials, None before it has begun."""
        document = self.get("sweep.json")
        if document is None:
            return None
        added = each(lambda name: self.require(f"trials/{name}"), self.storage.list(self.path("trials")))
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
        return self.put_new(f"trials/{trial['id']}.json", trial)

    def run(self, trial: dict[str, Any]) -> Run:
        """Returns the run of a trial."""
        return Run(self.storage, trial["run"])

    def rungs(self) -> list[dict[str, Any]]:
        """Returns what each rung that is over has decided, in their order."""
        return [self.require(f"rungs/{name}") for name in self.storage.list(self.path("rungs"))]

    def rung(self, number: int) -> dict[str, Any] | None:
        """Returns what a rung has decided, None before it has."""
        return self.get(_rung(number))

    def keep_rung(self, document: dict[str, Any]) -> None:
        """Writes what a rung has decided."""
        self.put(_rung(document["rung"]), document)

    def scores(self, run: str | Run) -> list[dict[str, Any]]:
        """Returns how a run of this sweep did behind each chunk that is scored: `chunk`, `step`, `value`, …"""
        found = run if isinstance(run, Run) else Run(self.storage, run)
        names = self.storage.list(found.path("scores"))
        return [found.require(f"scores/{name}") for name in names]

    def control(self, trial_id: str) -> dict[str, Any] | None:
        """Returns the newest wish for a trial: `state`, `why` and `at`; None where nobody asked for anything."""
        return self.get(f"control/{trial_id}.json")

    def ask(self, trial_id: str, state: State, why: str) -> None:
        """Notes a wish for a trial, taken up at its next chunk boundary."""
        self.put(f"control/{trial_id}.json", {"state": state, "why": why, "at": now()})


def score_name(chunk: int) -> str:
    """Returns the name of a run's document with its score behind a chunk."""
    return f"scores/chunk-{chunk:03d}.json"


def _rung(number: int) -> str:
    return f"rungs/rung-{number:03d}.json"
