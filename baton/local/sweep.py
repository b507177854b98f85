"""A sweep on one machine: trials in turns, each chunk or rung a fork of one warm server, and the best exported.

The stages are those of `pipelines.sweep`; only their caller differs. Chunks of a rung go round all trials. During
one chunk, the next process fetches its files and builds its trainer.
"""

import os
import tempfile
from collections.abc import Callable
from typing import TypeVar

from baton import events
from baton.compiler.pipeline_file import compile_pipeline
from baton.errors import BatonError
from baton.kfp import processes
from baton.kfp.rung import RungTrainer
from baton.local import begun, engine, forkserver
from baton.pipelines.sweep import winners
from baton.recipe import load
from baton.recipe.recipe import Recipe
from baton.runs.run import ORIGIN, Run, Sweep
from baton.source import credentials
from baton.sweep.search import brackets


def run_sweep(recipe: Recipe, name: str, on_event: Callable[[events.Event], None]) -> Run:
    """Runs a sweep to its end, exports its best trial as a compiled pipeline does, and returns that trial's run."""

    def trained() -> Run:
        return LocalSweep(recipe, name, on_event).run()

    best = trained()
    with tempfile.TemporaryDirectory(prefix="baton-compile-") as folder:
        package = os.path.join(folder, "winner.yaml")
        compile_pipeline(winners(engine.at_once(recipe)), package)
        engine.run(package, name, {"run_uri": best.uri}, on_event=on_event, repair=trained)
    return best


Answer = TypeVar("Answer", bound=events.Event)


class LocalSweep:
    """One sweep on this machine, of a recipe whose paths are absolute; one that exists resumes where it stopped."""

    def __init__(self, recipe: Recipe, name: str, on_event: Callable[[events.Event], None]) -> None:
        self.recipe = recipe
        self.sweep = Sweep.open(f"{recipe.store.uri}/sweeps/{name}")
        self._on_event = on_event
        self._prepared: set[str] = set()  # runs whose data this start has made, or found whole
        self._launch = forkserver.launcher()
        self._trainer = RungTrainer(self.sweep, on_event, self._launch)

    def run(self) -> Run:
        """Runs the sweep to its last rung, and returns the run of the best trial."""
        with processes.environment(**credentials.signing_environment(self.recipe)):
            return self._run()

    def _run(self) -> Run:
        assert self.recipe.sweep
        best = ""
        try:
            for bracket in brackets(self.recipe):
                survivors = self._begun(bracket.number)
                for rung in bracket.rungs:
                    runs, shared = [Run.open(uri) for uri in survivors], self.recipe.sweep.device == "shared"
                    if notice := self._trainer.train(runs, rung.first, rung.chunk, shared=shared):
                        raise BatonError(
                            f"this machine is preempted ({notice}); the trials are saved.",
                            remedy="Start the sweep again under its name.",
                        )
                    verdict = self._stage(events.Verdict, "judge", self.sweep.uri, str(rung.number))
                    self._trainer.later("baton.kfp.process page", self.sweep.uri, str(rung.number))
                    survivors, best = verdict.kept, verdict.winner
            self._trainer.finish_beside()
        finally:
            self._trainer.close()
        return Run.open(best)

    def _begun(self, bracket: int) -> list[str]:
        """Draws the trials of a bracket, makes their data, and returns the addresses of their runs."""
        with tempfile.NamedTemporaryFile("w", suffix=".json", encoding="utf-8") as file:
            file.write(load.dumps(self.recipe))
            file.flush()
            arguments = [file.name, self.sweep.name, self.recipe.store.uri, str(bracket)]
            preparations = self._stage(events.Prepares, "begin", *arguments).preparations
        for preparation in preparations:
            if preparation["run"] not in self._prepared:
                prepared = load.loads(preparation["recipe"])
                with processes.environment(**{ORIGIN["until"]: "data"}):
                    processes.prepare(prepared, preparation["run"], self._on_event, self._launch)
                self._prepared.add(preparation["run"])
        runs = self._stage(events.Entered, "enter", self.sweep.uri, str(bracket)).runs
        for uri in runs:
            begun.note_here(uri.rpartition("/")[2], uri, [])
        return runs

    def _stage(self, answer: type[Answer], stage: str, *arguments: str) -> Answer:
        """Runs a stage of the sweep itself and returns the event of its answer."""
        answers: list[Answer] = []

        def heard(event: events.Event) -> None:
            answers.extend([event] if isinstance(event, answer) else [])
            self._on_event(event)

        processes.run(f"baton.kfp.process {stage}", arguments, heard, self._launch)
        return answers[-1]
