"""What Baton wrote before is resumed by today's code: runs, a split, a sweep and an export.

The stores are in `tests/assets`, a set for each time; `write_old_runs.py` there made them, and says how. Their
documents hold addresses relative to the case's folder, so that stages here run in it. The restored state is compared
with its manifest by Baton itself before the first step. Beside each run its recipe is run through here, from the same
rows and never interrupted. On any machine the resumed run ends with that one's random state, schedule, position and
callbacks, digest by digest. Their weights differ by what two processors round, far less than without the part of the
state that the negative control leaves out. On the machine that wrote the run, everything has the digest it had there.
"""

from __future__ import annotations

import hashlib
import json
import os
import runpy
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

ASSETS = Path(__file__).parents[1] / "assets"
BEFORE = "before-rooms"
WHOLE = (BEFORE, "before-house")
"""Sets with a case of each kind."""
QUICK = {BEFORE: ("full", "grpo"), "before-house": ("lora", "ddp")}
"""Cases of each set that `make test` runs."""
SETS = (*WHOLE, "before-formats", "formats-1")
EXPECTED: dict[str, dict[str, Any]] = {
    name: json.loads((ASSETS / name / "expected.json").read_text(encoding="utf-8")) for name in (*SETS, "loss-1")
}
CONTROLS = {"full": "rng", "lora": "rng", "ddp": "rng", "grpo": "method", "orpo": "optimizer"}
"""Runs in the middle, and the part of the state without which each ends on other bits."""
ROUNDED = ("weights", "optimizer", "log", "method")
"""Parts of a state that hold what a processor rounds; the digests of all others are the same on any."""
BATON = str(Path(sys.executable).parent / "baton")


@dataclass(frozen=True)
class Case:
    """An unpacked case.

    Attributes:
        name: Its name, which its run or sweep has too.
        folder: Where it lies.
        of: The set that it is of.
    """

    name: str
    folder: Path
    of: str = BEFORE

    @property
    def expected(self) -> dict[str, Any]:
        """How its recipe ended where nobody interrupted it."""
        return EXPECTED[self.of][self.name]

    def document(self, path: str) -> Any:
        """Returns a document of its store."""
        return json.loads((self.folder / "store" / path).read_text(encoding="utf-8"))

    def newest(self, run: str | None = None) -> dict[str, Any]:
        """Returns what the manifest of a run's newest checkpoint says of it, its step included."""
        folder = f"runs/{run or self.name}/checkpoints"
        step = max(path.parent.name for path in (self.folder / "store" / folder).glob("step-*/manifest.json"))
        meta: dict[str, Any] = self.document(f"{folder}/{step}/manifest.json")["meta"]
        return {**meta, "step": int(step.removeprefix("step-"))}

    def files(self, step: int) -> set[str]:
        """Returns the names of a checkpoint's files."""
        return set(self.document(f"runs/{self.name}/checkpoints/step-{step:08d}/manifest.json")["files"])

    def weights(self) -> np.ndarray[Any, np.dtype[Any]]:
        """Returns all trained numbers of the newest checkpoint, side by side."""
        path = max((self.folder / f"store/runs/{self.name}/checkpoints").rglob("*model.safetensors"))
        return np.concatenate([values.ravel() for _, values in sorted(load_file(path).items())])

    def is_at_home(self, meta: dict[str, Any]) -> bool:
        """Whether this is the machine, with the software, on which the recipe was run through."""
        here = runpy.run_path(str(ASSETS / "write_old_runs.py"))["processor"]()
        named = self.expected["fingerprint"]  # fewer libraries than by now
        same = {name: meta["fingerprint"].get(name) for name in named} == named
        return bool(same and self.expected["processor"] == here)


@pytest.fixture
def unpacked(tmp_path: Path) -> Callable[..., Case]:
    """Unpacks a case, as often as it is asked to."""

    def unpack(name: str, copy: str = "first", of: str = BEFORE) -> Case:
        case = Case(name, tmp_path / copy, of)
        with tarfile.open(ASSETS / of / f"{name}.tar.xz") as archive:
            archive.extractall(case.folder, filter="data")
        return case

    return unpack


@pytest.fixture
def staged(legs: Any) -> Callable[..., None]:
    """Runs a stage in a case's folder, as a process of its own."""

    def run(case: Case, stage: Callable[..., None], *arguments: Any) -> None:
        code, printed = legs.leg(legs.at, str(case.folder), stage, *arguments)
        assert code == 0, printed

    return run


@pytest.fixture
def uninterrupted(legs: Any, staged: Callable[..., None], tmp_path: Path) -> Callable[[Case], Case]:
    """Runs a case's recipe through in one chunk, by the code of now and from the same rows."""

    def through(case: Case) -> Case:
        whole = Case(case.name, tmp_path / f"whole-{case.of}-{case.name}", case.of)
        shutil.copytree(case.folder, whole.folder, ignore=shutil.ignore_patterns("store"))
        recipe = case.document(f"runs/{case.name}/recipe.json")["recipe"]
        recipe["chunks"]["count"] = 1
        staged(whole, legs.split_and_tokenize, json.dumps(recipe), case.name)
        path = whole.folder / f"store/runs/{case.name}/recipe.json"
        begun = whole.document(f"runs/{case.name}/recipe.json")
        # Rows and tokens come out the same; a loss is summed in the way in which the run began.
        began = case.document(f"runs/{case.name}/recipe.json").get("made", {}).get("formats", {})
        begun["made"]["formats"]["loss"] = began.get("loss", 1)
        path.write_text(json.dumps(begun), encoding="utf-8")
        shutil.rmtree(path.parent / "seals")  # else the chunk writes the document again from its seal
        staged(whole, legs.chunk, f"store/runs/{case.name}", 1)
        assert whole.newest()["step"] == 8
        return whole

    return through


@pytest.fixture
def resumed(legs: Any, staged: Callable[..., None]) -> Callable[..., dict[str, Any]]:
    """Trains the second chunk of a run, and returns what its last checkpoint's manifest says."""

    def resume(case: Case, *leave_out: str) -> dict[str, Any]:
        assert case.newest()["step"] == 4
        staged(case, legs.chunk, f"store/runs/{case.name}", 2, leave_out)
        staged(case, legs.verify_chunk, f"store/runs/{case.name}", 2)
        made = case.newest()
        assert made["step"] == case.expected["step"] == 8
        assert made["restored"]["step"] == 4
        return made

    return resume


def baton(case: Case, *arguments: str) -> str:
    """Runs the command in a case's folder, and returns what it printed."""
    environment = {**os.environ, "BATON_CACHE": str(case.folder / "cache")}
    done = subprocess.run(
        [BATON, *arguments], cwd=case.folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def compare(case: Case, made: dict[str, Any], whole: Case, control: Case) -> None:
    """Compares a resumed run with the uninterrupted one, and both with the one that lacks a part of its state."""
    assert set(made["restored"]["checked"].values()) <= {"match", "absent"}
    seals = case.folder / f"store/runs/{case.name}/seals"
    assert len(list(seals.iterdir())) == 2, "a run without seals goes on, and begins them: chunk and checkpoint"
    ended = whole.newest()
    parts = made["state"].keys() - {*ROUNDED, "state"}
    assert {part: made["state"][part] for part in parts} == {part: ended["state"][part] for part in parts}
    apart, astray = (float(np.linalg.norm(each.weights() - whole.weights())) for each in (case, control))
    assert astray > 0
    assert apart < astray / 100, "a resumed run is as far from the uninterrupted one as one without its state"
    if case.is_at_home(made):
        assert made["restored"]["level"] == "bitwise"
        assert made["state"] == ended["state"] == case.expected["state"]
        assert made["digest"] == ended["digest"] == case.expected["digest"]


@pytest.mark.parametrize(
    ("of", "name"),
    [
        pytest.param(of, name, marks=() if name in QUICK[of] else pytest.mark.slow)
        for of in WHOLE
        for name in CONTROLS
        if (of, name) != (BEFORE, "orpo")
    ],
)
def test_a_run_ends_where_it_would_have_ended(
    of: str,
    name: str,
    unpacked: Callable[..., Case],
    resumed: Callable[..., dict[str, Any]],
    uninterrupted: Callable[[Case], Case],
) -> None:
    case, control = unpacked(name, of=of), unpacked(name, "control", of)
    whole, made = uninterrupted(case), resumed(case)
    lost = resumed(control, CONTROLS[name])
    assert lost["restored"]["checked"][CONTROLS[name]] == "left out"
    compare(case, made, whole, control)


@pytest.mark.parametrize("name", ["sft", "lora"])
@pytest.mark.parametrize("of", ["before-formats", pytest.param("formats-1", marks=pytest.mark.slow)])
def test_a_run_of_before_is_continued(
    of: str,
    name: str,
    unpacked: Callable[..., Case],
    resumed: Callable[..., dict[str, Any]],
    uninterrupted: Callable[[Case], Case],
) -> None:
    case, control = unpacked(name, of=of), unpacked(name, "control", of)
    before, began = case.newest(), case.document(f"runs/{name}/recipe.json")
    whole, made = uninterrupted(case), resumed(case)
    resumed(control, "rng" if name == "lora" else "optimizer")  # without dropout nothing draws
    compare(case, made, whole, control)
    assert made["parent"] == {"step": 4, "digest": before["digest"]}
    assert made["chain"] == hashlib.sha256(f"{before['chain']}{made['digest']}".encode()).hexdigest()
    assert case.files(8) == case.files(4)
    # A run says what it was begun with, a checkpoint what it was written with.
    assert made["made"]["formats"] == {"digest": 1, "checkpoint": 1}
    assert case.document(f"runs/{name}/recipe.json").get("made") == began.get("made")
    if of == "before-formats":
        assert ("made" in before, "made" in began) == (False, False)
    else:
        assert before["made"] == made["made"]
        assert began["made"]["formats"] == {"rows": 1, "tokens": 1, "draws": 1}


def test_a_run_of_before_counts_its_rows_and_tokens_as_it_began(
    unpacked: Callable[..., Case], resumed: Callable[..., dict[str, Any]]
) -> None:
    """ORPO on micro-batches of other lengths, an evaluation in batches of 5, 5 and 3, and a step of three rows: in each
    batches counted alike, so today's way gives other figures from the first step on."""
    log = runpy.run_path(str(ASSETS / "write_old_runs.py"))["log"]
    logged = {}
    for copy, changed in (("first", {}), ("now", {"loss": 2})):
        case = unpacked("orpo", copy, "loss-1")
        began = case.document("runs/orpo/recipe.json")
        began["made"]["formats"] |= changed
        (case.folder / "store/runs/orpo/recipe.json").write_text(json.dumps(began), encoding="utf-8")
        made = resumed(case)
        assert set(made["restored"]["checked"].values()) <= {"match", "absent"}
        if not changed and case.is_at_home(made):
            assert made["state"] == case.expected["state"]
        logged[copy] = log(case.folder, "orpo")
    assert len(logged["first"]) == len(case.expected["log"]) == 11
    for ours, theirs, now in zip(logged["first"], case.expected["log"], logged["now"], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)
        assert (now == pytest.approx(theirs, rel=1e-5)) == (now["step"] <= 4)


def test_on_another_machine_a_run_is_resumed_and_says_so(
    unpacked: Callable[..., Case], resumed: Callable[..., dict[str, Any]]
) -> None:
    digests = set()
    for copy in ("first", "again"):
        case = unpacked("full", copy)
        (path,) = (case.folder / "store/runs/full/checkpoints").glob("*/manifest.json")
        manifest = json.loads(path.read_text(encoding="utf-8"))
        manifest["meta"]["fingerprint"]["cpu"] = "another"
        path.write_text(json.dumps(manifest), encoding="utf-8")
        made = resumed(case)
        assert set(made["restored"]["checked"].values()) <= {"match", "absent"}
        assert made["restored"]["level"] == "consistent"
        digests.add(made["digest"])
    assert len(digests) == 1


@pytest.mark.parametrize("of", WHOLE)
def test_a_split_has_the_same_rows_on_the_same_sides(
    of: str, unpacked: Callable[..., Case], staged: Callable[..., None], legs: Any, tmp_path: Path
) -> None:
    case = unpacked("split", of=of)
    sides = _sides(case)
    assert {name: len(lines) for name, lines in sides.items()} == {name: case.expected[name] for name in sides}
    recipe = json.dumps(case.document("runs/split/recipe.json")["recipe"])
    staged(case, legs.split_and_tokenize, recipe, "split")
    assert _sides(case) == sides
    assert case.document("runs/split/data.json")["digest"] == case.expected["digest"]
    assert case.document("runs/split/plan.json")["rows"] == case.expected["train"]
    fresh = Case("split", tmp_path / "fresh")
    fresh.folder.mkdir()
    shutil.copy(case.folder / "rows.jsonl", fresh.folder)
    staged(fresh, legs.split_and_tokenize, recipe, "split")
    # The number of rows is 2 by now, and addresses hold it: such rows, and so their tokens, are the same.
    assert _sides(fresh) == sides
    assert _tokens(fresh) == _tokens(case)
    staged(fresh, legs.split_and_tokenize, json.dumps({**json.loads(recipe), "seed": 8}), "other")
    other = fresh.document("runs/other/data.json")["digest"]
    assert other not in (case.expected["digest"], fresh.document("runs/split/data.json")["digest"])


def _tokens(case: Case) -> dict[str, str]:
    """Returns the digests of the files with the case's tokens."""
    prefix = case.document(f"runs/{case.name}/tokens.json")["prefix"]
    files: dict[str, dict[str, str]] = case.document(f"{prefix}/manifest.json")["files"]
    return {name.partition("/")[0]: entry["sha256"] for name, entry in files.items() if name.endswith(".arrow")}


def _sides(case: Case) -> dict[str, list[bytes]]:
    """Returns the rows of each side of the case's split, of which there is one."""
    digest = case.document(f"runs/{case.name}/data.json")["digest"]
    folder = case.folder / f"store/data/{digest}/split"
    (rows,) = (path for path in folder.iterdir() if path.is_dir())
    return {side: (rows / f"{side}.jsonl").read_bytes().splitlines() for side in ("train", "eval", "test")}


@pytest.mark.slow
@pytest.mark.parametrize("of", WHOLE)
def test_a_sweep_comes_to_the_winner_it_would_have_had(of: str, unpacked: Callable[..., Case]) -> None:
    case = unpacked("sweep", of=of)
    (rung,) = (case.folder / "store/sweeps/sweep/rungs").iterdir()
    judged = rung.read_bytes()
    baton(case, "sweep", "run", "recipe.json", "--run", "sweep", "--store", str(case.folder / "store"))
    assert rung.read_bytes() == judged
    winner = case.document("sweeps/sweep/winner.json")
    assert winner["id"] == case.expected["winner"]
    made = case.newest(winner["run"])
    assert made["step"] == case.expected["step"]
    assert made["restored"]["step"] == 4
    if case.is_at_home(made):
        assert made["digest"] == case.expected["digest"]
    for trial in ("t000", "t001", "t002"):
        records = [
            path for path in (case.folder / f"store/runs/sweep-{trial}/records").iterdir() if "chunk-001" in path.name
        ]
        assert len(records) == 1, "no trial trains its first chunk again"


@pytest.mark.slow
@pytest.mark.parametrize("of", WHOLE)
def test_an_exported_model_is_opened(of: str, unpacked: Callable[..., Case]) -> None:
    case = unpacked("export", of=of)
    (weights,) = (case.folder / "store/runs/export/export").rglob("model.safetensors")
    trained = max((case.folder / "store/runs/export/checkpoints").rglob("model.safetensors"))
    ours, theirs = load_file(weights), load_file(trained)
    assert ours.keys() == theirs.keys()
    assert all((ours[name] == theirs[name]).all() for name in ours)
    listed = json.loads(baton(case, "checkpoints", "verify", "store/runs/export", "--output", "json"))["checkpoints"]
    assert [(row["step"], row["ok"]) for row in listed] == [(2, True), (4, True)]
    written = baton(
        case, "generate", str(weights.parent), "--prompt", "1 quick", "--max-new-tokens", "3", "--output", "json"
    )
    assert json.loads(written)


@pytest.mark.slow
@pytest.mark.parametrize("of", WHOLE)
def test_a_run_that_has_ended_trains_nothing_again(of: str, unpacked: Callable[..., Case]) -> None:
    case = unpacked("export", of=of)
    before = case.newest()
    baton(case, "run", "recipe.json", "--run", "export", "--store", str(case.folder / "store"))
    assert case.newest() == before
    records = sorted((case.folder / "store/runs/export/records").glob("train-chunk-*"))
    outcomes = [json.loads(path.read_text(encoding="utf-8"))["outcome"] for path in records]
    assert sorted(outcomes) == ["already_done", "already_done", "done", "done"]


@pytest.mark.slow
@pytest.mark.parametrize("of", WHOLE)
def test_baton_run_takes_a_run_up_where_it_stopped(of: str, unpacked: Callable[..., Case]) -> None:
    case = unpacked("full", of=of)
    recipe = case.folder / "recipe.json"
    recipe.write_text(json.dumps(case.document("runs/full/recipe.json")["recipe"]), encoding="utf-8")
    baton(case, "run", "recipe.json", "--run", "full", "--store", str(case.folder / "store"))
    made = case.newest()
    assert (made["step"], made["restored"]["step"]) == (8, 4)
    if case.is_at_home(made):
        assert made["digest"] == case.expected["digest"]
