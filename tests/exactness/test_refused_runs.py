"""What a Baton that this one does not continue has made is refused before any work, with what to do."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from baton import fork
from baton.checkpoint import seals
from baton.data.split import split_data
from baton.data.tokenize import tokenize_run
from baton.errors import FormatError, UserError
from baton.models import prompts, trained
from baton.recipe import load
from baton.runs import objects
from baton.runs.run import Run
from baton.source import prepare
from baton.train import lr_find
from baton.train.chunk import run_chunk

ASSET = Path(__file__).parents[1] / "assets/formats-1/sft.tar.xz"
BATON = str(Path(sys.executable).parent / "baton")
RUN = "store/runs/sft"
FUTURE = {"baton": "9.0", "formats": {"draws": 2, "checkpoint": 2}}
PAST = {"baton": "0.0.9", "formats": {"rows": 0, "tokens": 0, "draws": 0, "digest": 0, "checkpoint": 0}}


class Old:
    """A run after the first of two chunks, in the current folder."""

    run = Run.open(RUN)

    @property
    def checkpoint(self) -> Path:
        """The manifest of its checkpoint."""
        return Path(RUN, "checkpoints/step-00000004/manifest.json")

    def state(self, made: dict[str, Any], *, of_run: bool = True, of_checkpoint: bool = True) -> None:
        """Has the run, its checkpoint, or both state what they were made with."""
        if of_run:
            self.run.put("recipe.json", {**self.run.require("recipe.json"), "made": made})
        if of_checkpoint:
            manifest = json.loads(self.checkpoint.read_text(encoding="utf-8"))
            manifest["meta"]["made"] = made
            self.checkpoint.write_text(json.dumps(manifest), encoding="utf-8")

    def model(self) -> str:
        """Address of its checkpoint's files."""
        (weights,) = Path(RUN).rglob("model.safetensors")
        return str(weights.parent)

    def files(self) -> dict[str, bytes]:
        """Everything in the store, without what notes attempts at stages."""
        paths = (path for path in Path("store").rglob("*") if path.is_file() and "records" not in path.parts)
        return {str(path): path.read_bytes() for path in paths}


@pytest.fixture
def old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Old:
    """The asset, unpacked."""
    with tarfile.open(ASSET) as archive:
        archive.extractall(tmp_path, filter="data")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Old, "run", Run.open(RUN))
    return Old()


WORK: dict[str, Callable[[Old], object]] = {
    "data split": lambda old: split_data(old.run.recipe(), "sft"),
    "tokenize": lambda old: tokenize_run(RUN),
    "learning rate": lambda old: lr_find.find(RUN),
    "chunk": lambda old: run_chunk(RUN, 2),
    "baton run": lambda old: prepare.check_resumable(old.run.recipe(), old.run.storage, "sft"),
    "baton submit": lambda old: prepare.run_name_for_pods(old.run.recipe(), "sft"),
}
"""Work on a run that must be as the run was begun."""
READING: dict[str, Callable[[Old], object]] = {
    "chunk": lambda old: run_chunk(RUN, 2),
    "baton run": lambda old: prepare.check_resumable(old.run.recipe(), old.run.storage, "sft"),
    "baton submit": lambda old: prepare.run_name_for_pods(old.run.recipe(), "sft"),
    "warm fork": lambda old: fork.fork(old.run, None, "child"),
    "cold fork": lambda old: fork.fork(old.run, None, "child", warm=False),
    "evaluate, export": lambda old: (old.run.resolved_recipe(), trained.chosen_checkpoint(old.run)),
    "generate": lambda old: prompts.require_readable(old.model()),
}
"""Work that reads a checkpoint."""


@pytest.mark.parametrize("work", (WORK | READING).values(), ids=WORK | READING)
def test_what_a_newer_baton_began(work: Callable[[Old], object], old: Old) -> None:
    old.state(FUTURE, of_checkpoint=False)
    before = old.files()
    with pytest.raises(FormatError) as caught:
        work(old)
    assert "run 'sft' has checkpoint of format 2, made by Baton 9.0; this Baton, " in str(caught.value)
    assert str(caught.value).endswith("Use baton-llm==9.0 or a newer one, in the image of the pods too.")
    assert old.files() == before


@pytest.mark.parametrize("work", READING.values(), ids=READING)
def test_a_checkpoint_that_a_newer_baton_wrote(work: Callable[[Old], object], old: Old) -> None:
    old.state(FUTURE, of_run=False)
    _end_at_its_checkpoint(old, work)
    before = old.files()
    with pytest.raises(FormatError, match="the checkpoint of step 4 of run 'sft' has checkpoint of format 2"):
        work(old)
    assert old.files() == before


@pytest.mark.parametrize("work", WORK.values(), ids=WORK)
def test_a_run_that_is_no_longer_continued(work: Callable[[Old], object], old: Old) -> None:
    for name, remedy in {
        "draws": "or fork the run, which from there on draws as this Baton does: `baton runs fork NAME`.",
        "tokens": "or start the run under another name.",
        "rows": "or start the run under another name.",
    }.items():
        old.state({"baton": "0.0.9", "formats": {name: 0}}, of_checkpoint=False)
        before = old.files()
        with pytest.raises(FormatError) as caught:
            work(old)
        assert f"run 'sft' has {name} of format 0 (" in str(caught.value)
        assert f"Resume with baton-llm==0.0.9, in the image of the pods too, {remedy}" in str(caught.value)
        assert old.files() == before


@pytest.mark.parametrize("name", READING)
def test_a_checkpoint_that_is_no_longer_continued(name: str, old: Old) -> None:
    old.state(PAST, of_run=False)
    _end_at_its_checkpoint(old, READING[name])
    before = old.files()
    with pytest.raises(FormatError, match=r"the checkpoint of step 4 of run 'sft' has (digest|checkpoint) of format 0"):
        READING[name](old)
    assert old.files() == before


@pytest.mark.parametrize("name", ["evaluate, export", "generate", "cold fork"])
def test_weights_are_read_whatever_else_is_no_longer_continued(name: str, old: Old) -> None:
    old.state({**PAST, "formats": {**PAST["formats"], "checkpoint": 1}})
    _end_at_its_checkpoint(old, READING[name])
    before = old.files()
    READING[name](old)
    after = old.files()
    assert {path: after.get(path) for path in before} == before, "reading changes nothing of what was there"


def _end_at_its_checkpoint(old: Old, work: Callable[[Old], object]) -> None:
    """Has the run end at its checkpoint, for work that only a run that has ended sees."""
    if work is READING["evaluate, export"]:
        old.run.put("plan.json", {**old.run.require("plan.json"), "num_steps": 4, "targets": [2, 4]})


def test_the_remedy_for_draws_is_one(old: Old, legs: Any) -> None:
    old.state(PAST | {"formats": {"draws": 0}}, of_checkpoint=False)
    fork.fork(old.run, None, "child")
    child = Run.open("store/runs/child")
    assert child.require("recipe.json")["made"]["formats"] == {"rows": 1, "tokens": 1, "draws": 1, "loss": 2}
    code, printed = legs.leg(legs.at, os.getcwd(), legs.chunk, child.uri, 2)
    assert code == 0, printed
    assert set(legs.final(child).meta.restored.checked.values()) <= {"match", "absent"}


def test_the_command_says_it_before_a_stage_runs(old: Old) -> None:
    old.state(PAST, of_checkpoint=False)
    recipe = old.run.require("recipe.json")["recipe"]
    Path("recipe.json").write_text(json.dumps(recipe), encoding="utf-8")
    before = old.files()
    done = subprocess.run(
        [BATON, "run", "recipe.json", "--run", "sft", "--store", "store"],
        env={**os.environ, "BATON_CACHE": os.path.abspath("cache")}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "Resume with baton-llm==0.0.9" in done.stderr
    assert "Traceback" not in done.stderr
    assert old.files() == before


def test_a_store_that_this_machine_has_no_credentials_for_is_not_asked(
    old: Old, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    recipe = load.with_overrides(old.run.recipe(), ["store.uri=s3://nowhere/store"])
    assert prepare.run_name_for_pods(recipe, "sft") == "sft"
    assert prepare.run_name_for_pods(recipe, None).startswith(f"{recipe.name}-20")
    with pytest.raises(UserError, match="is not lower-case letters"):
        prepare.run_name_for_pods(recipe, "No name")


def test_a_run_keeps_its_tokens_where_others_would_be_made_by_now(old: Old, legs: Any) -> None:
    own = _addressed_by_another_release(old)
    code, printed = legs.leg(legs.at, os.getcwd(), legs.split_and_tokenize, _recipe(old), "sft")
    assert code == 0, printed
    assert "run 'sft' keeps its tokens" in printed
    assert old.run.require("tokens.json") == own
    assert len(list(Path("store/data").glob("*/tokens"))) == 1
    code, printed = legs.leg(legs.at, os.getcwd(), legs.chunk, RUN, 2)
    assert code == 0, printed
    assert legs.final(old.run).step == 8


def test_tokens_that_are_gone_are_made_anew_in_the_same_format_alone(old: Old) -> None:
    own = _addressed_by_another_release(old)
    shutil.rmtree(Path("store") / own["prefix"])
    tokenize_run(RUN)
    made = old.run.require("tokens.json")
    assert made["digest"] != own["digest"]
    # As it was before rows of texts could become turns: a run from then has other tokens than would be made now.
    with seals.stage(old.run, objects.ADOPT):
        old.run.put("tokens.json", own | {"rendered": "as turns"})
    with pytest.raises(FormatError, match=r"its tokens, .*, are gone, and this Baton, .*, makes other ones\. Start"):
        tokenize_run(RUN)


def _recipe(old: Old) -> str:
    return json.dumps(old.run.require("recipe.json")["recipe"])


def _addressed_by_another_release(old: Old) -> dict[str, Any]:
    """Has the run's tokens lie where another release would look for them."""
    own = old.run.require("tokens.json")
    prefix = f"data/{'0' * 64}/tokens"
    Path("store", prefix).parent.mkdir()
    shutil.move(Path("store", own["prefix"]), Path("store", prefix))
    own |= {"prefix": prefix, "digest": "0" * 64}
    with seals.stage(old.run, objects.ADOPT):
        old.run.put("tokens.json", own)
    return own
