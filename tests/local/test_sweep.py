"""`baton sweep`: trials in turns on this machine, their bits, and what stopping, resuming and forking make of them."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from baton import events
from baton import fork as forking
from baton.checkpoint.store import CheckpointStore
from baton.compiler.pipeline_file import Pipeline
from baton.events import Event
from baton.kfp import processes
from baton.local import engine, forkserver, results
from baton.local.sweep import LocalSweep, run_sweep
from baton.recipe import load
from baton.recipe.recipe import Recipe
from baton.runs.documents import ProofPart
from baton.runs.outcomes import StoppedTrial, TrialScore
from baton.runs.run import Run, Sweep
from baton.source import prepare
from baton.store.storage import Storage
from baton.sweep import search
from tests.support import tiny
from tests.support.pages import read

BATON = str(Path(sys.executable).parent / "baton")
WORDS = ["the", "run", "goes", "on", "from", "where", "every", "pod", "hands", "what", "it", "knows", "to", "next"]
RATES = [1e-4, 3e-2, 1e-2, 1e-3]
BEST, SECOND = "t001", "t002"
"""By the learning rate, which is all that differs: the higher ones learn more in so few steps."""


def _write_recipe(folder: Path, **sweep: Any) -> Path:
    draw = random.Random(1)
    rows = [{"text": " ".join(draw.choice(WORDS) for _ in range(12))} for _ in range(120)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    document = {
        "name": "swept",
        "seed": 5,
        "store": "store",
        "model": {
            "from_scratch": {"architecture": "llama", **shape, "num_key_value_heads": 2},
            "tokenizer": {"train": {"vocab_size": 300}},
        },
        "data": {"source": "rows.jsonl", "max_length": 32, "split": {"eval": 0.2}},
        "training": {"method": "pretrain", "batch_size": 8, "max_steps": 12, "learning_rate": 1e-3},
        "chunks": {"count": 4},
        "evaluation": {"samples": 1, "max_new_tokens": 4},
        "tracking": {"mlflow": None},
        "sweep": {
            "method": "grid",
            "parameters": {"training.learning_rate": RATES},
            "halving": {"eta": 2},
            **sweep,
        },
    }
    path = folder / "sweep.yaml"
    path.write_text(yaml.safe_dump(document), encoding="utf-8")
    return path


def _loaded(path: Path) -> Recipe:
    return prepare.load(str(path), store=str(path.parent / "store")).localised()


class Watched(LocalSweep):
    """A sweep that notes what its stages tell."""

    def __init__(self, recipe: Recipe, name: str, on_event: Callable[[Event], None] = lambda event: None):
        self.events: list[Event] = []

        def heard(event: Event) -> None:
            self.events.append(event)
            on_event(event)

        super().__init__(recipe, name, heard)

    def started(self) -> list[str]:
        """Returns the stages, in their order."""
        return [event.stage for event in self.events if isinstance(event, events.Stage) and event.state == "started"]

    def trained(self) -> list[tuple[str, int]]:
        """Returns trial and chunk of each score, in their order."""
        return [(event.trial, event.chunk) for event in self.events if isinstance(event, events.Scored)]


def _digest(run: Run, step: int) -> str:
    checkpoint = CheckpointStore(run).read(step)
    assert checkpoint is not None
    return checkpoint.digest


def _alone(recipe: Recipe, values: dict[str, Any], name: str) -> Run:
    """Trains a configuration to its end in two chunks, as a run that knows of no sweep."""
    document = search.configured(recipe, values, name).model_dump(mode="json")
    own = load.validate(document, origin=name)
    run = processes.prepare(own, name, lambda event: None, forkserver.launcher())
    for index in range(1, own.chunks.count + 1):
        processes.run(processes.TRAIN_CHUNK, [run.uri, str(index)], lambda event: None, forkserver.launcher())
    return run


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Recipe, Watched, Run]:
    """A finished sweep of four learning rates in 4 chunks, two continuing after the first, one after the second."""
    folder = tmp_path_factory.mktemp("swept")
    recipe = _loaded(_write_recipe(folder))
    watched = Watched(recipe, "s")
    return recipe, watched, watched.run()


def test_the_trials_take_turns_and_the_worse_ones_stop(swept: tuple[Recipe, Watched, Run]) -> None:
    _, watched, winner = swept
    assert winner.name == f"s-{BEST}"
    assert watched.trained() == [
        ("t000", 1), ("t001", 1), ("t002", 1), ("t003", 1),
        (BEST, 2), (SECOND, 2), (BEST, 3), (BEST, 4),
    ]  # fmt: skip
    rungs = watched.sweep.rungs()
    assert [(rung.chunk, rung.kept) for rung in rungs] == [(1, [BEST, SECOND]), (2, [BEST]), (4, [BEST])]
    assert [CheckpointStore(Run(winner.storage, f"s-t00{at}")).steps()[-1] for at in range(4)] == [3, 12, 6, 3]
    assert (watched.sweep.raw("winner.json") or {})["id"] == BEST
    page = read(winner.storage.read(watched.sweep.path("page.html")).decode())
    trials = {entry.id: watched.sweep.run(entry) for entry in watched.sweep.document().trials}
    assert {f"../../runs/{run.name}/report.html" for run in trials.values()} <= set(page.links), "also in a local sweep"
    for trial, run in trials.items():
        report = read(run.storage.read(run.path("report.html")).decode())
        assert ("Trained: all 12 steps" if trial == BEST else "Stopped: step ") in report.text


@pytest.mark.slow
def test_a_sweep_keeps_within_its_budget(tmp_path: Path) -> None:
    """Half or twice the pace changes nothing: machines vary."""

    def under(limit: float, name: str) -> Watched:
        budget = {"limit": f"{limit:.2f} USD", "price": 3600.0, "reserve": "1s"}  # 1 USD a second
        changes = {"budget": budget, "training.max_steps": 48, "chunks.count": 16}
        watched = Watched(load.with_values(_loaded(_write_recipe(tmp_path)), changes), name)
        assert watched.run().name.startswith(f"{name}-")
        return watched

    def spent(watched: Watched, rung: int) -> float:
        return float(watched.sweep.rungs()[rung].spent.split()[0])

    rich = under(1000.0, "rich")
    best, second = rich.sweep.rungs()[0].kept
    limit = 2.5 * spent(rich, 0)  # of four chunks; two trials to the end take twenty
    poor = under(limit, "poor")
    first = poor.sweep.rungs()[0]
    assert first.kept == [best]
    assert "pays for 1" in {entry.id: entry.why for entry in first.stopped}[second]
    assert spent(poor, -1) < 1.3 * limit < spent(rich, -1)


def test_data_is_split_and_tokenized_once_for_all(swept: tuple[Recipe, Watched, Run]) -> None:
    _, watched, winner = swept
    stages = watched.started()
    assert stages.count("data split") == 1
    assert stages.count("tokenize") == 1
    written = winner.storage.find("data")
    assert sum(name.endswith("/tokens/manifest.json") for name in written) == 1
    assert sum(name.endswith("/split/manifest.json") for name in written) == 1
    assert {
        winner.require("tokens.json")["digest"],
        Run(winner.storage, "s-t000").require("tokens.json")["digest"],
    } == {name.partition("/")[0] for name in written if name.endswith("/tokens/manifest.json")}


def test_a_trial_ends_on_the_bits_of_its_recipe_alone(swept: tuple[Recipe, Watched, Run]) -> None:
    recipe, _, winner = swept
    alone = _alone(recipe, {"training.learning_rate": 3e-2}, "alone")
    for step in (9, 12):
        assert _digest(winner, step) == _digest(alone, step)
    assert alone.raw(TrialScore.file_name(1)) is None


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Watched:
    """The same sweep, its trials in turns inside one process for a rung."""
    watched = Watched(_loaded(_write_recipe(tmp_path_factory.mktemp("shared"), device="shared")), "s")
    watched.run()
    return watched


def test_trials_that_share_a_process_end_on_the_same_bits(swept: tuple[Recipe, Watched, Run], shared: Watched) -> None:
    _, watched, _ = swept
    assert shared.trained() == watched.trained()
    assert [rung.kept for rung in shared.sweep.rungs()] == [rung.kept for rung in watched.sweep.rungs()]
    assert shared.started() == watched.started()
    assert not [event for event in shared.events if isinstance(event, events.NoEffect)]
    for trial in watched.sweep.document().trials:
        runs = [each.sweep.run(trial) for each in (watched, shared)]
        last = max(CheckpointStore(runs[0]).steps())
        assert _digest(runs[1], last) == _digest(runs[0], last)
        assert runs[1].read(ProofPart, runs[1].plan().targets.index(last) + 1)


@pytest.mark.slow
def test_a_finished_rung_has_no_turns(shared: Watched) -> None:
    again = Watched(shared.recipe, "s")
    again.run()
    assert again.trained() == []
    assert not [stage for stage in again.started() if "chunk" in stage]


def _note_turns(watched: Watched, begun: list[processes.Process]) -> None:
    """Notes each process in which trials take turns."""
    launch = watched._trainer._launch

    def noted(program: str, arguments: Any) -> processes.Process:
        process = launch(program, arguments)
        if program == processes.TAKE_TURNS:
            begun.append(process)
        return process

    watched._trainer._launch = noted


@pytest.mark.slow
def test_a_killed_process_loses_one_turn(swept: tuple[Recipe, Watched, Run], tmp_path: Path) -> None:
    _, watched, _ = swept
    begun: list[processes.Process] = []

    def kill(event: Event) -> None:
        if isinstance(event, events.Step) and event.step in (2, 5) and len(killed) < 2 and event.step not in killed:
            killed.append(event.step)
            begun[-1].kill()

    killed: list[int] = []
    disturbed = Watched(_loaded(_write_recipe(tmp_path, device="shared")), "s", kill)
    _note_turns(disturbed, begun)
    winner = disturbed.run()
    assert killed == [2, 5]
    assert disturbed.trained() == watched.trained()
    assert _digest(winner, 12) == _digest(watched.sweep.run(watched.sweep.trial(BEST)), 12)


class Killer:
    """Kills the process of turns at random moments, five times, in each turn once."""

    def __init__(self, begun: list[processes.Process]) -> None:
        self.killed: list[str] = []
        self._begun, self._random, self._timer = begun, random.Random(12), threading.Timer(0, lambda: None)
        self._seen: set[str] = set()
        self._started, self._took = time.monotonic(), 1.0

    def __call__(self, event: Event) -> None:
        if not isinstance(event, events.Stage) or "train chunk" not in event.stage:
            return
        self._timer.cancel()
        if event.state == "done":
            self._took = time.monotonic() - self._started
        elif event.state == "started" and event.stage not in self._seen:
            self._seen.add(event.stage)
            self._started = time.monotonic()
            if len(self.killed) < 5 and self._random.random() < 0.5:
                moment = self._random.uniform(0, self._took)
                self._timer = threading.Timer(moment, self._kill, [event.stage])
                self._timer.start()

    def _kill(self, stage: str) -> None:
        self.killed.append(stage)
        self._begun[-1].kill()


@pytest.mark.slow
def test_eight_adapters_end_on_the_bits_they_have_alone_whenever_they_are_killed(tmp_path: Path) -> None:
    path = _write_recipe(
        tmp_path,
        device="shared",
        halving=None,
        parameters={"training.learning_rate": RATES, "adapter.r": [4, 8]},
    )
    base = {"model": {"base": tiny.make_base(tmp_path / "base")}}
    document = {**yaml.safe_load(path.read_text()), **base, "adapter": {"type": "lora", "r": 4, "dropout": 0.1}}
    path.write_text(yaml.safe_dump(document), encoding="utf-8")
    begun: list[processes.Process] = []
    killer = Killer(begun)
    recipe = _loaded(path)
    watched = Watched(recipe, "s", killer)
    _note_turns(watched, begun)
    watched.run()
    assert len(set(killer.killed)) == len(killer.killed) == 5
    assert not [event for event in watched.events if isinstance(event, events.NoEffect)]
    digests = set()
    for trial in watched.sweep.document().trials:
        digest = _digest(_alone(recipe, trial.values, f"alone-{trial.id}"), 12)
        assert _digest(watched.sweep.run(trial), 12) == digest
        digests.add(digest)
    assert len(digests) == 8


def test_the_score_is_the_loss_of_the_checkpoint(swept: tuple[Recipe, Watched, Run]) -> None:
    """A chunk whose checkpoint stands and whose score is lost measures it again, without training."""
    _, _, winner = swept
    score = winner.require(TrialScore.file_name(4))
    winner.storage.remove(winner.path(TrialScore.file_name(4)))
    heard: list[Event] = []
    processes.run(processes.TRAIN_CHUNK, [winner.uri, "4"], heard.append, forkserver.launcher())
    measured = winner.require(TrialScore.file_name(4))["value"]
    assert measured == pytest.approx(score["value"], rel=1e-5)  # of a model that was loaded from files
    assert not [event for event in heard if isinstance(event, events.Step | events.CheckpointCommitted)]
    assert winner.attempts(4)[-1].outcome == "already_done"


@pytest.mark.slow
def test_a_sweep_done_twice_does_nothing_the_second_time(swept: tuple[Recipe, Watched, Run]) -> None:
    recipe, watched, winner = swept
    before = watched.sweep.rungs()
    again = Watched(recipe, "s")
    assert again.run().name == winner.name
    assert again.trained() == []
    assert watched.sweep.rungs() == before


@pytest.mark.slow
def test_a_stopped_trial_that_is_resumed_ends_on_the_bits_it_would_have_had(
    swept: tuple[Recipe, Watched, Run], tmp_path: Path
) -> None:
    recipe, _, winner = swept
    copied = _copied(recipe, winner.storage, tmp_path)
    sweep = Sweep(Storage(copied.store.uri), "s")
    sweep.ask("t000", "go", "to see where it ends")
    again = Watched(copied, "s")
    assert again.run().name == f"s-{BEST}"
    assert [chunk for trial, chunk in again.trained() if trial == "t000"] == [2, 3, 4]
    assert {trial for trial, _ in again.trained()} == {"t000"}
    alone = _alone(copied, {"training.learning_rate": 1e-4}, "never-stopped")
    assert _digest(sweep.run(sweep.trial("t000")), 12) == _digest(alone, 12)


def _copied(recipe: Recipe, storage: Storage, folder: Path) -> Recipe:
    """Returns the recipe in a copy of its store."""
    shutil.copytree(storage.uri(), folder / "store")
    document = recipe.model_dump(mode="json")
    document["store"]["uri"] = str(folder / "store")
    return load.validate(document, origin="copy")


@pytest.mark.slow
@pytest.mark.parametrize("device", ["own", "shared"])
def test_a_wish_is_taken_up_at_the_next_chunk(device: str, tmp_path: Path) -> None:
    rates = {"training.learning_rate": [1e-3, 1e-2]}
    recipe = _loaded(_write_recipe(tmp_path, halving=None, parameters=rates, device=device))
    sweep = Sweep(Storage(recipe.store.uri), "w")

    def ask(event: Event) -> None:
        if isinstance(event, events.Scored) and (event.trial, event.chunk) == ("t001", 2):
            sweep.ask("t001", "stop", "seen enough")

    watched = Watched(recipe, "w", ask)
    assert watched.run().name == "w-t000"
    assert watched.trained() == [("t000", 1), ("t001", 1), ("t000", 2), ("t001", 2), ("t000", 3), ("t000", 4)]
    assert watched.sweep.rungs()[0].stopped == [
        StoppedTrial(id="t001", why="asked to stop: seen enough", cause="asked")
    ]
    heard: list[Event] = []
    stopped = sweep.run(sweep.trial("t001"))
    processes.run(processes.TRAIN_CHUNK, [stopped.uri, "3"], heard.append, forkserver.launcher())  # as a pod would
    assert CheckpointStore(stopped).steps()[-1] == 6
    assert [event.kind for event in heard if isinstance(event, events.Stopped | events.Step)] == ["stopped"]
    processes.run(processes.CHECKPOINT, [stopped.uri, "3"], heard.append, forkserver.launcher())


@pytest.mark.slow
def test_a_trial_that_fails_in_a_shared_process_is_out_and_the_others_go_on(tmp_path: Path) -> None:
    groups = {"training.groups": [[{"pattern": "nowhere", "learning_rate": 0.1}], []]}
    watched = Watched(_loaded(_write_recipe(tmp_path, halving=None, parameters=groups, device="shared")), "f")
    assert watched.run().name == "f-t001"
    (stopped,) = watched.sweep.rungs()[0].stopped
    assert (stopped.id, stopped.cause) == ("t000", "failed")
    assert stopped.why.startswith("chunk 1 failed: train chunk 1: training.groups: pattern 'nowhere' fits no")
    assert watched.trained() == [("t001", chunk) for chunk in (1, 2, 3, 4)]


@pytest.mark.slow
def test_trials_that_cannot_share_a_process_are_named(tmp_path: Path) -> None:
    parameters = {"training.threads": [1, 2], "training.compile_optimizer": [False, True]}
    recipe = _loaded(_write_recipe(tmp_path, halving=None, parameters=parameters, device="shared"))
    watched = Watched(recipe, "g")
    watched.run()
    told = [event.text for event in watched.events if isinstance(event, events.NoEffect)]
    assert told == [
        "sweep.device: shared: t002 trains each chunk in a process of its own: training.compile keeps compiled code",
        "sweep.device: shared: t003 trains each chunk in a process of its own: training.compile keeps compiled code",
        "sweep.device: shared: another process than t000's trains t001: training.threads: 1 → 2",
    ]
    assert [trial for trial, chunk in watched.trained() if chunk == 4] == ["t000", "t001", "t002", "t003"]
    assert watched.trained()[4] == ("t001", 1)  # after the other process's last turn
    alone = _alone(recipe, {"training.threads": 2, "training.compile_optimizer": False}, "two-threads")
    assert _digest(watched.sweep.run(watched.sweep.trial("t001")), 12) == _digest(alone, 12)


@pytest.mark.slow
def test_a_trial_that_fails_is_out_and_the_others_go_on(tmp_path: Path) -> None:
    trained = {"training.trainable": [None, {"patterns": ["nowhere"]}]}
    recipe = _loaded(_write_recipe(tmp_path, halving=None, parameters=trained))
    watched = Watched(recipe, "f")
    assert watched.run().name == "f-t000"
    (stopped,) = watched.sweep.rungs()[0].stopped
    assert stopped.id == "t001"
    assert stopped.why.startswith("chunk 1 failed: train chunk 1: training.trainable ['nowhere'] fits no parameter.")


def _command(folder: Path, *more: str) -> list[str]:
    return [BATON, "sweep", *more, "--store", str(folder / "store"), "--output", "json"]


@pytest.mark.slow
def test_a_sweep_killed_in_a_chunk_goes_on_to_the_same_winner_and_bits(
    swept: tuple[Recipe, Watched, Run], tmp_path: Path
) -> None:
    _, _, winner = swept
    recipe = _write_recipe(tmp_path)
    command = _command(tmp_path, "run", str(recipe), "--run", "k")
    with open(tmp_path / "errors", "w", encoding="utf-8") as errors:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors, cwd=tmp_path, process_group=0)
    second = tmp_path / "store" / "runs" / f"k-{BEST}" / "checkpoints" / "step-00000006"
    while not second.exists():  # the winner is about to commit its second chunk
        assert process.poll() is None, (tmp_path / "errors").read_text()
        time.sleep(0.01)
    children = [int(line) for line in subprocess.run(
        ["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=False
    ).stdout.split()]  # fmt: skip
    for pid in (process.pid, *children):
        os.kill(pid, signal.SIGKILL)
    process.wait()
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["winner"]["id"] == BEST
    assert found["winner_run"]["state"] == "succeeded"
    assert found["winner_run"]["checkpoints"][-1]["digest"] == _digest(winner, 12)
    assert Path(found["winner_run"]["model_uri"], "model.safetensors").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("device", ["own", "shared"])
def test_a_damaged_checkpoint_of_the_best_trial_is_trained_again(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATON_CACHE", str(tmp_path / "cache"))
    path = _write_recipe(tmp_path, device=device, parameters={"training.learning_rate": [3e-2, 1e-3]})
    recipe = load.with_values(_loaded(path), {"chunks.count": 2})
    best = run_sweep(recipe, "d", lambda event: None)
    digest = _digest(best, 12)
    weights = next((tmp_path / "store/runs" / best.name / "checkpoints/step-00000012").rglob("model.safetensors"))
    weights.write_bytes(bytes([weights.read_bytes()[0] ^ 1]) + weights.read_bytes()[1:])
    for num_repaired in (1, 0):
        heard: list[Event] = []
        assert run_sweep(recipe, "d", heard.append).name == best.name
        assert sum(isinstance(event, processes.StageRepaired) for event in heard) == num_repaired
        assert sum(isinstance(event, events.Scored) for event in heard) == num_repaired, "one chunk, of the best trial"
        assert _digest(best, 12) == digest
        assert results.result(best)["state"] == "succeeded"


@pytest.mark.slow
def test_the_compiled_pipeline_comes_to_the_same_winner_and_bits(
    swept: tuple[Recipe, Watched, Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a cluster runs, by kfp's own local engine: loops over what the judges keep, two trials at a time."""
    monkeypatch.setenv("BATON_CACHE", str(tmp_path / "cache"))
    printing = print
    _, _, winner = swept
    recipe = _loaded(_write_recipe(tmp_path))
    arguments = {"sweep_name": "c"}
    heard: list[Event] = []
    engine.run_recipe(
        recipe, "c", pipeline=Pipeline.sweep, arguments=arguments, on_event=heard.append, containers=False
    )
    found = Sweep(Storage(recipe.store.uri), "c")
    assert [rung.kept for rung in found.rungs()] == [[BEST, SECOND], [BEST], [BEST]]
    assert _digest(found.run(found.trial(BEST)), 12) == _digest(winner, 12)
    assert results.result(found.run(found.trial(BEST)))["state"] == "succeeded"
    assert print is printing  # kfp's tasks in parallel leave it indented


@pytest.mark.slow
def test_a_forked_trial_begins_from_anothers_checkpoint_and_trains_to_the_end(
    swept: tuple[Recipe, Watched, Run], tmp_path: Path
) -> None:
    recipe, _, winner = swept
    copied = _copied(recipe, winner.storage, tmp_path)
    fork = ["fork", "s", SECOND, "--set", "training.learning_rate=0.02"]
    done = subprocess.run(_command(tmp_path, *fork), capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    made = json.loads(done.stdout)
    assert made["id"] == "f000"
    assert made["parent"] == {"run": f"s-{SECOND}", "step": 6}
    assert made["values"] == {"training.learning_rate": 0.02}
    again = Watched(copied, "s")
    again.run()
    assert {trial for trial, _ in again.trained()} == {"f000"}
    assert CheckpointStore(Run(again.sweep.storage, "s-f000")).steps()[-1] == 12
    shown = subprocess.run(_command(tmp_path, "status", "s"), capture_output=True, text=True, check=False)
    rows = {row["id"]: row for row in json.loads(shown.stdout)["trials"]}
    assert rows["f000"]["state"] == "ended"
    assert rows["t000"]["state"] == "stopped"


@pytest.mark.slow
def test_a_fork_joins_a_shared_process_before_its_next_chunk(tmp_path: Path) -> None:
    path = _write_recipe(tmp_path, halving=None, device="shared")
    document = yaml.safe_load(path.read_text())
    path.write_text(yaml.safe_dump({**document, "chunks": {"count": 4, "keep": {"last": 9}}}))
    recipe = _loaded(path)
    begun: list[processes.Process] = []

    def fork(event: Event) -> None:
        if isinstance(event, events.Scored) and (event.trial, event.chunk) == ("t003", 1):
            os.kill(begun[0].pid, signal.SIGSTOP)  # else tiny trials are at their end before the command
            command = ["fork", "s", SECOND, "--step", "3", "--set", "training.learning_rate=0.02"]
            subprocess.run(_command(tmp_path, *command), check=True, capture_output=True, cwd=tmp_path)
            os.kill(begun[0].pid, signal.SIGCONT)

    watched = Watched(recipe, "s", fork)
    _note_turns(watched, begun)
    watched.run()
    assert len(begun) == 1
    assert {chunk for trial, chunk in watched.trained() if trial == "f000"} <= {2, 3, 4}
    assert watched.trained()[-1] == ("f000", 4)
    parent = watched.sweep.run(watched.sweep.trial(SECOND))
    forked = forking.fork(parent, 3, "alone", ["training.learning_rate=0.02"], warm=True).run
    for index in (2, 3, 4):
        processes.run(processes.TRAIN_CHUNK, [forked.uri, str(index)], lambda event: None, forkserver.launcher())
    assert _digest(watched.sweep.run(watched.sweep.trial("f000")), 12) == _digest(forked, 12)


@pytest.mark.slow
def test_brackets_follow_each_other_and_optuna_draws_the_second_by_the_first(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    parameters = {"training.learning_rate": {"min": 1e-5, "max": 3e-2, "log": True}, "data.max_length": [24, 32]}
    more = {"method": "optuna", "trials": 4, "brackets": 2, "parameters": parameters}
    watched = Watched(_loaded(_write_recipe(tmp_path, **more)), "o")
    winner = watched.run()
    trials = watched.sweep.document().trials
    assert [(trial.id, trial.bracket) for trial in trials] == [
        ("t000", 1), ("t001", 1), ("t002", 2), ("t003", 2),
    ]  # fmt: skip
    stages = watched.started()
    lengths = {trial.values["data.max_length"] for trial in trials}
    assert stages.count("tokenize") == len(lengths)  # once for each different data, over both brackets
    final = {rung.kept[0]: rung.scores[rung.kept[0]].value for rung in watched.sweep.rungs() if rung.chunk == 4}
    assert winner.name == f"o-{min(final, key=final.__getitem__)}"
