"""A signed run: trained and continued as any other, and no change to what it has committed goes unnoticed."""

from __future__ import annotations

import json
import logging
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from baton import fork, signing
from baton.checkpoint import signatures
from baton.checkpoint.store import CheckpointStore
from baton.cli.app import app
from baton.errors import BatonError
from baton.kfp import processes
from baton.local import forkserver
from baton.recipe import load
from baton.recipe.recipe import Recipe
from baton.runs.run import Run
from baton.signing import Signer
from baton.source import credentials
from baton.store.manifest import Manifest
from baton.store.storage import Storage
from tests.support.planting import Planter, check, look

SCRATCH = str(Path(__file__).parents[1] / "recipes/scratch.yaml")
SETTINGS = ("training.epochs=null", "training.max_steps=8", "evaluation={every: null}")


class House:
    """Runs of one recipe, all signed by one key."""

    def __init__(self, folder: Path, kind: signing.Kind = "ed25519") -> None:
        forkserver.start()  # with this environment, and not that of a signed stage, which other tests' would have too
        self.folder = folder
        self.signer = Signer.new(kind)
        self.key = folder / "key"
        self.key.write_bytes(self.signer.pem())
        (folder / "key.pub").write_bytes(self.signer.public.pem)

    def recipe(self, store: str, *settings: str) -> Recipe:
        signs = {"public_key": self.signer.public.line}
        fixed = [f"store.uri={self.folder / store}", f"chunks.signing={signs}", "chunks.keep.last=9"]
        every = ["chunks.checkpoint_every=2", "chunks.wait_for_commit=true"]
        return load.load(SCRATCH, [*SETTINGS, *fixed, *every, *settings])

    def prepare(self, store: str, name: str, *settings: str) -> Run:
        recipe = self.recipe(store, *settings)
        with pytest.MonkeyPatch.context() as patch:
            self.give(patch, recipe)
            return processes.prepare(recipe, name, print, forkserver.launcher())

    def give(self, patch: pytest.MonkeyPatch, recipe: Recipe) -> None:
        """Gives a stage of a signed run both keys, as an engine does."""
        for name, value in credentials.signing_environment(recipe).items():
            patch.setenv(name, value)
            patch.setenv(signing.KEY_FILE, str(self.key))

    def chunk(self, run: Run, index: int) -> None:
        with pytest.MonkeyPatch.context() as patch:
            self.give(patch, run.recipe())
            processes.run(processes.TRAIN_CHUNK, [run.uri, str(index)], print, forkserver.launcher())

    def train(self, store: str, name: str, *settings: str) -> Run:
        run = self.prepare(store, name, *settings)
        self.chunk(run, 1)
        return run


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> House:
    return House(tmp_path_factory.mktemp("signed"))


@pytest.fixture(scope="module")
def run(house: House) -> Run:
    return house.train("store", "r")


@pytest.fixture(scope="module")
def cut(house: House) -> Run:
    """The same in two chunks, in a store of its own."""
    cut = house.prepare("cut", "r", "chunks.count=2")
    house.chunk(cut, 1)
    house.chunk(cut, 2)
    return cut


def planter_of(run: Run, *others: Run) -> Planter:
    folders = [Path(other.storage.key(other.path())) for other in others]
    return Planter(run, folders, Signer.new("ed25519"), seed=1)


@pytest.fixture(scope="module")
def planter(run: Run, cut: Run) -> Planter:
    return planter_of(run, cut)


def verify(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["verify", "checkpoints", *map(str, arguments)])
    return result.exit_code, result.output


def test_what_is_unchanged_passes(house: House, run: Run) -> None:
    verdict = look(run, house.signer)
    assert verdict["ok"], verdict
    assert [row["step"] for row in verdict["checkpoints"]] == [2, 4, 6, 8]
    assert verdict["notes"] == []
    code, text = verify(run.uri, "--key", house.folder / "key.pub")
    assert (code, text.count("signed, whole")) == (0, 4)
    head = verdict["head"]
    assert head
    assert head["manifest"] in text
    assert verify(run.uri, "--key", house.key, "--expect-step", 8, "--expect-digest", head["manifest"])[0] == 0
    # Without a key it is a run like any other.
    assert verify(run.uri)[0] == 0


def test_each_names_the_manifest_before_it(run: Run) -> None:
    checkpoints = {each.step: each for each in CheckpointStore(run).committed()}
    for step in (4, 6, 8):
        parent = checkpoints[step].meta.parent
        assert parent
        assert parent.manifest == signatures.manifest_digest(checkpoints[step - 2].manifest)


def test_every_planted_change_is_found(house: House, run: Run, planter: Planter) -> None:
    missed, kinds = check(run, house.signer, planter, 100)
    assert missed == []
    assert len(kinds) >= 20


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ed25519", "p256"])
def test_a_thousand_planted_changes_are_found(tmp_path: Path, kind: signing.Kind) -> None:
    house = House(tmp_path, kind)
    run = house.train("store", "r")
    planter = planter_of(run, house.train("again", "r"), house.train("other", "q", "seed=5"))
    spent = time.process_time()
    missed, kinds = check(run, house.signer, planter, 1000)
    told = json.dumps(kinds, indent=1)
    logging.getLogger("baton").warning("1000 changes in %.1f s of a core: %s", time.process_time() - spent, told)
    assert missed == []
    assert sum(kinds.values()) == 1000


def test_a_run_that_was_rolled_back(house: House, run: Run, planter: Planter) -> None:
    before = look(run, house.signer)["head"]
    assert before
    try:
        planter._manifest(planter.steps[-1]).unlink()
        assert verify(run.uri, "--key", house.key)[0] == 0  # what is left was signed, every byte of it
        expected = ("--expect-step", before["step"], "--expect-digest", before["manifest"])
        code, text = verify(run.uri, "--key", house.key, *expected)
        assert code == 1
        assert "the newest is step 6, and step 8 was expected" in text
        code, text = verify(run.uri, "--key", house.key, "--expect-digest", before["manifest"])
        assert code == 1
        assert "step 6 does not have the expected manifest" in text
    finally:
        planter.restore()


def test_mistakes_on_the_command_line(house: House, run: Run, tmp_path: Path) -> None:
    assert verify(run.uri, "--expect-step", 8)[0] == 2
    assert verify(run.uri, "--key", tmp_path / "none")[0] == 2
    assert verify(run.uri, "--key", house.key, "--expect-digest", "abc")[0] == 2
    other = tmp_path / "other.pub"
    other.write_bytes(Signer.new("p256").public.pem)
    code, text = verify(run.uri, "--key", other, "--output", "json")
    assert code == 1
    assert all("signed by another key" in row["problems"][0] for row in json.loads(text)["checkpoints"])


def test_chunks_continue_to_the_same_bits_as_without_signatures(house: House, run: Run, cut: Run) -> None:
    plain = house.prepare("plain", "r", "chunks.signing=null", "chunks.checkpoint_every=null")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(signing.KEY_FILE, raising=False)
        processes.run(processes.TRAIN_CHUNK, [plain.uri, "1"], print, forkserver.launcher())
    ends = {str(r.uri): CheckpointStore(r).newest() for r in (run, cut, plain)}
    assert {end.digest for end in ends.values() if end} == {ends[run.uri].digest}  # type: ignore[union-attr]
    assert all(ends.values())
    assert look(cut, house.signer)["ok"]


def test_a_chunk_refuses_what_nobody_signed(house: House, cut: Run, tmp_path: Path) -> None:
    shutil.copytree(cut.storage.key(""), tmp_path / "store")
    run = Run(Storage(str(tmp_path / "store")), "r")
    for step in (6, 8):
        shutil.rmtree(run.storage.key(CheckpointStore(run).prefix(step)))
    path = Path(run.storage.key(f"{CheckpointStore(run).prefix(4)}/manifest.json"))
    manifest = Manifest(**json.loads(path.read_bytes()))
    path.unlink()
    path.write_text(signatures.unsigned(manifest).as_written())
    with pytest.raises(BatonError, match=r"step 4 .* is refused: it is not signed.*remove its manifests by hand"):
        house.chunk(run, 2)
    assert CheckpointStore(run).steps() == [2, 4]


def test_a_fork_signs_what_it_begins_with(house: House, cut: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(signing.KEY_FILE, str(house.key))
    signs = {"public_key": house.signer.public.line}
    bare = fork.fork(cut, 4, "bare", ["chunks.signing=null"]).run
    assert look(bare, house.signer)["ok"] is False
    again = fork.fork(bare, 4, "again", [f"chunks.signing={signs}"]).run
    assert look(again, house.signer)["ok"]
    house.chunk(again, 2)
    verdict = look(again, house.signer)
    assert verdict["ok"], verdict
    ends = [CheckpointStore(run).newest() for run in (cut, again)]
    assert ends[0]
    assert ends[1]
    assert ends[0].digest == ends[1].digest


def test_the_private_key_is_in_nothing_that_a_run_leaves(house: House, run: Run) -> None:
    body = house.signer.pem().splitlines()[1]
    for parent, _, names in os.walk(house.folder / "store"):
        assert not [name for name in names if body in Path(parent, name).read_bytes()]
    told: dict[str, Any] = run.recipe().model_dump(mode="json")["chunks"]["signing"]
    assert told["public_key"] == house.signer.public.line
