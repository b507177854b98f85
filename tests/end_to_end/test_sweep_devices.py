"""A sweep of shared devices as Kubeflow runs it: the compiled file through kfp's own engine, a pod of a rung killed."""

from __future__ import annotations

import collections
import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
from typer.testing import CliRunner

from baton import events
from baton.checkpoint.store import CheckpointStore
from baton.cli.app import app
from baton.compiler.pipeline_file import Pipeline, packaged
from baton.events import Event
from baton.local import engine
from baton.recipe import load
from baton.recipe.recipe import Recipe
from baton.runs.documents import ProofPart
from baton.runs.run import Run, Sweep
from baton.signing import KEY_FILE, Signer
from baton.store.storage import Storage
from tests.local.test_sweep import BEST, RATES, SECOND, _alone, _digest, _loaded, _write_recipe


class Pods:
    """A compiled sweep on this machine, its pods processes; notes each stage that begins."""

    def __init__(self, recipe: Recipe, name: str) -> None:
        self.recipe, self.sweep = recipe, Sweep(Storage(recipe.store.uri), name)
        self.started: collections.Counter[str] = collections.Counter()
        self.trained: list[tuple[str, int]] = []

    def run(self) -> None:
        with packaged(self.recipe, "sweep", Pipeline.sweep) as package:
            engine.run(package, self.sweep.name, {"sweep_name": self.sweep.name}, on_event=self.heard)

    def heard(self, event: Event) -> None:
        if isinstance(event, events.Stage) and event.state == "started":
            self.started[event.stage] += 1
        elif isinstance(event, events.Scored):
            self.trained.append((event.trial, event.chunk))

    def pods(self) -> list[psutil.Process]:
        """Returns the processes in which trials take turns now, inside their pods."""
        address = f"{self.sweep.storage.uri()}/runs/{self.sweep.name}-"
        found = []
        for process in psutil.process_iter(["cmdline"]):
            words = process.info["cmdline"] or []
            if "take_turns" in words and any(word.startswith(address) for word in words):
                found.append(process)
        return found


class Killed(Pods):
    """Kills the pod of a trial with `kill -9` at a step of its chunk, once."""

    def __init__(self, recipe: Recipe, name: str, trial: str, step: int) -> None:
        super().__init__(recipe, name)
        self._trial, self._step = trial, step
        self._turn = ""
        self.killed: list[psutil.Process] = []

    def heard(self, event: Event) -> None:
        super().heard(event)
        if isinstance(event, events.Stage) and event.stage.startswith(f"{self._trial}: train chunk"):
            self._turn = event.state
        if isinstance(event, events.Step) and event.step == self._step and self._turn == "started" and not self.killed:
            for process in self.pods():
                if any(word.endswith(f"-{self._trial}") for word in process.cmdline()):
                    self.killed = [process.parent(), process]
                    os.kill(self.killed[0].pid, signal.SIGKILL)


def _recipe(folder: Path, **sweep: Any) -> Recipe:
    recipe = _loaded(_write_recipe(folder, device="shared", parallel=2, **sweep))
    return recipe.model_copy(update={"resources": recipe.resources.model_copy(update={"retries": 2})})


@pytest.mark.slow
def test_trials_of_a_rung_share_two_pods_one_is_killed_and_each_ends_on_the_bits_it_has_alone(tmp_path: Path) -> None:
    recipe = _recipe(tmp_path)
    pods = Killed(recipe, "s", BEST, step=2)
    pods.run()
    assert len(pods.killed) == 2
    assert not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in pods.killed)
    # Two pods in the first rung and one of them again, then two of a trial each, then one.
    rungs = {name: count for name, count in pods.started.items() if name.startswith("train rung")}
    assert rungs == {"train rung 1": 3, "train rung 2": 2, "train rung 3": 1}
    assert sorted(pods.trained) == sorted(
        [("t000", 1), ("t001", 1), ("t002", 1), ("t003", 1), (BEST, 2), (SECOND, 2), (BEST, 3), (BEST, 4)]
    )
    assert [(rung.chunk, rung.kept) for rung in pods.sweep.rungs()] == [(1, [BEST, SECOND]), (2, [BEST]), (4, [BEST])]
    digests = {}
    for trial, rate in zip(pods.sweep.document().trials, RATES, strict=True):
        run, alone = pods.sweep.run(trial), _alone(recipe, {"training.learning_rate": rate}, f"alone-{trial.id}")
        last = max(CheckpointStore(run).steps())
        digests[trial.id] = _digest(run, last)
        assert digests[trial.id] == _digest(alone, last)
        assert run.read(ProofPart, run.plan().targets.index(last) + 1)
        assert run.storage.exists(run.path("report.html"))
    assert len(set(digests.values())) == len(RATES)  # equal digests of other trials would show nothing
    assert Run(pods.sweep.storage, f"s-{BEST}").raw("export.json")


@pytest.mark.slow
def test_pods_of_a_signed_sweep_keep_within_its_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = Signer.new("p256")
    (tmp_path / "own.key").write_bytes(key.pem())
    (tmp_path / "own.pub").write_bytes(key.public.pem)
    monkeypatch.setenv(KEY_FILE, str(tmp_path / "own.key"))

    def under(limit: float, name: str) -> Sweep:
        budget = {"limit": f"{limit:.2f} USD", "price": 3600.0, "reserve": "1s"}  # 1 USD a second
        changes = {"budget": budget, "chunks.signing": {"public_key": key.public.line}}
        pods = Pods(load.with_values(_loaded(_write_recipe(tmp_path)), changes), name)
        pods.run()
        return pods.sweep

    def spent(sweep: Sweep, rung: int) -> float:
        return float(sweep.rungs()[rung].spent.split()[0])

    rich = under(1000.0, "rich")
    best, second = rich.rungs()[0].kept
    limit = 1.6 * spent(rich, 0)  # of four chunks; two trials to the end take eight
    poor = under(limit, "poor")
    first = poor.rungs()[0]
    assert first.kept == [best]
    assert "pays for 1" in {entry.id: entry.why for entry in first.stopped}[second]
    assert limit < spent(rich, -1)
    assert spent(poor, -1) < 1.3 * limit
    winner = poor.run(poor.trial(best))
    assert winner.raw("export.json")
    done = CliRunner().invoke(app, ["verify", "run", winner.uri, "--key", str(tmp_path / "own.pub")])
    assert done.exit_code == 0, done.output
    done = CliRunner().invoke(app, ["verify", "decisions", poor.uri, "--key", str(tmp_path / "own.pub")])
    assert done.exit_code == 0, done.output
    poor.put("control/t000.json", {"state": "go"})
    done = CliRunner().invoke(app, ["verify", "decisions", poor.uri, "--key", str(tmp_path / "own.pub")])
    assert (done.exit_code, "CHANGED: control/t000.json: it is not signed" in done.output) == (1, True)
