"""Kubeflow's cache between two submissions of a run: what is there is skipped, a hit on what is gone hurts nobody.

kfp's local engine has the cluster's cache. It differs in one thing, that it looks for the files of a stage's outputs
before it trusts an entry; that is turned off here, so that it believes everything, as the cluster does.
"""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import kfp.local
import pytest

from baton import events
from baton.compiler.pipeline_file import write_package
from baton.local import engine, results
from baton.runs.run import Run
from baton.source import prepare
from baton.store.storage import Storage

RECIPE = str(Path(__file__).parents[1] / "recipes/scratch.yaml")
ALWAYS = {"data split", "train chunk 2", "checkpoint 1", "checkpoint 2", "evaluate", "export", "report"}
CACHED = {"tokenize", "train chunk 1"}

Submitted = Callable[[], tuple[set[str], str]]


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def submitted(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Submitted:
    """Runs the pipeline of a run with two chunks, and returns the stages that ran and the last state's digest."""
    package = str(tmp_path / "scratch.yaml")
    loaded = prepare.load(RECIPE, store=str(store), chunks=2)
    write_package(loaded.localised(), package)
    monkeypatch.setattr("kfp.local.cache._is_remote_uri", lambda uri: True)
    cached = functools.partial(kfp.local.init, enable_caching=True, cache_root=str(tmp_path / "cache"))
    monkeypatch.setattr(kfp.local, "init", cached)

    def submit() -> tuple[set[str], str]:
        ran: list[str] = []

        def heard(event: events.Event) -> None:
            if isinstance(event, events.Stage) and event.state == "started":
                ran.append(event.stage)

        engine.run(package, "mine", {"run_name": "mine"}, on_event=heard)
        found = results.result(Run(Storage(str(store)), "mine"))
        assert found["state"] == "succeeded"
        return set(ran), str(found["checkpoints"][-1]["digest"])

    return submit


@pytest.mark.slow
def test_a_run_that_is_submitted_again_skips_what_is_there_and_makes_what_is_gone(submitted: Submitted, store: Path):
    ran, digest = submitted()
    assert ran == ALWAYS | CACHED
    assert submitted() == (ALWAYS, digest)

    shutil.rmtree(store / "runs/mine/checkpoints")
    for folder in ("records", "proof"):  # so that the first stage cannot know, as if they went after its look
        shutil.rmtree(store / "runs/mine" / folder)
    os.remove(store / "runs/mine/promoted.json")
    assert submitted() == (ALWAYS, digest)

    shutil.rmtree(store / "runs/mine/checkpoints")
    for folder in store.glob("data/*/tokens/*/"):
        shutil.rmtree(folder)
    assert submitted() == (ALWAYS | CACHED, digest)
