"""A sweep in the store: its trials, the verdicts of its rungs, and people's requests.

sweeps/<name>/sweep.json           recipe, metric, rungs, and the first bracket's trials
sweeps/<name>/trials/<id>.json     later trials: of a later bracket, or forked
sweeps/<name>/rungs/rung-001.json  scores, kept trials, stopped trials with the reason
sweeps/<name>/control/<id>.json    newest request: `stop` or `go`
sweeps/<name>/page.html            leaderboard and curves
runs/<run>/trial.json              makes a run a trial: the sweep, its id, its own values
runs/<run>/scores/chunk-001.json   score after each chunk
runs/<run>/failure.json            error of a chunk
"""

from __future__ import annotations

from baton.errors import UserError
from baton.runs.outcomes import RungVerdict, SweepHead, TrialEntry, TrialRequest, TrialScore, TrialState
from baton.runs.run import DocumentFolder, Run, now


class Sweep(DocumentFolder):
    KIND = "sweep"

    def find(self) -> SweepHead | None:
        """Returns the sweep with all its trials, None before it has begun."""
        head = self.read(SweepHead)
        if head is None:
            return None
        trials = [*head.trials, *self.read_all(TrialEntry, "trials")]
        return head.model_copy(update={"trials": sorted(trials, key=lambda trial: trial.id)})

    def document(self) -> SweepHead:
        head = self.find()
        if head is None:
            raise UserError(f"{self.uri}/sweep.json does not exist.", remedy="Check the sweep's name and the store.")
        return head

    def trial(self, trial_id: str) -> TrialEntry:
        trials = {trial.id: trial for trial in self.document().trials}
        if trial_id not in trials:
            raise UserError(f"sweep {self.name!r} has no trial {trial_id!r}.", remedy=f"It has {', '.join(trials)}.")
        return trials[trial_id]

    def add(self, trial: TrialEntry) -> bool:
        """Adds a trial, and tells whether this call did; the first of one id stays."""
        return self.write_new(trial, trial.id)

    def run(self, trial: TrialEntry) -> Run:
        return Run(self.storage, trial.run)

    def rungs(self) -> list[RungVerdict]:
        return self.read_all(RungVerdict, "rungs")

    def rung(self, number: int) -> RungVerdict | None:
        return self.read(RungVerdict, number)

    def scores(self, run: str | Run) -> list[TrialScore]:
        return (run if isinstance(run, Run) else Run(self.storage, run)).read_all(TrialScore, "scores")

    def request(self, trial_id: str) -> TrialRequest | None:
        return self.read(TrialRequest, trial_id)

    def ask(self, trial_id: str, state: TrialState, why: str) -> None:
        """Writes a request, taken up at the trial's next chunk boundary."""
        self.write(TrialRequest(state=state, why=why, at=now()), trial_id)
