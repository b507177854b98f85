"""A sealed run: every change of any of its objects is found with the key, and no stage obeys one."""

from __future__ import annotations

import collections
import hashlib
import json
import logging
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from baton.checkpoint.chain import ChainCheck, verify_export
from baton.checkpoint.store import CheckpointStore
from baton.cli.app import app
from baton.signing import Signer
from baton.store.manifest import Manifest, read_manifest
from tests.support.sealed import RunPlanter, SealedRun, copied, obeyed

logger = logging.getLogger("baton")


@pytest.fixture(scope="module")
def sealed(tmp_path_factory: pytest.TempPathFactory) -> SealedRun:
    sealed = SealedRun(tmp_path_factory.mktemp("sealed"))
    sealed.finish()
    return sealed


@pytest.fixture(scope="module")
def planter(sealed: SealedRun, tmp_path_factory: pytest.TempPathFactory) -> RunPlanter:
    older = copied(sealed, tmp_path_factory.mktemp("older") / "copy")
    sealed.finish("resources.gpus=0", 'evaluation.gate={loss: "<= 101"}')
    return RunPlanter(sealed, older.store, seed=1)


@pytest.fixture
def as_stage(sealed: SealedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in sealed.environment.items():
        monkeypatch.setenv(name, value)


def check(sealed: SealedRun, planter: RunPlanter, count: int) -> collections.Counter[str]:
    assert sealed.is_unchanged(), sealed.check()
    kinds: collections.Counter[str] = collections.Counter()
    missed = []
    for number in range(count):
        with planter.planted(number) as change:
            kinds[change.kind] += 1
            where = f"{change.kind}: {', '.join(str(path.relative_to(sealed.store)) for path in change.paths)}"
            if sealed.is_unchanged():
                missed.append(f"not found: {where}")
            if told := obeyed(sealed, change, planter.kept):
                missed.append(f"obeyed: {where}: {told}")
    assert missed == []
    assert sealed.is_unchanged()
    return kinds


def test_changes_of_random_objects_are_found_and_not_obeyed(
    sealed: SealedRun, planter: RunPlanter, as_stage: None
) -> None:
    assert len(check(sealed, planter, 52)) >= 8


@pytest.mark.slow
def test_a_thousand_changes_of_random_objects_are_found_and_not_obeyed(
    sealed: SealedRun, planter: RunPlanter, as_stage: None
) -> None:
    kinds = check(sealed, planter, 1000)
    logger.warning("1000 changes: %s", dict(kinds))
    assert sum(kinds.values()) == 1000


def test_without_the_key_the_same_changes_are_obeyed(
    sealed: SealedRun, planter: RunPlanter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control: a process that asks for no signature takes what nobody has sealed."""
    for name in sealed.environment:
        monkeypatch.delenv(name, raising=False)
    taken = []
    for number in range(130):
        with planter.planted(number) as change:
            taken += [change.kind] if obeyed(sealed, change, planter.kept) else []
    assert "planted" in taken


Change = Callable[[SealedRun], None]


def rewritten(name: str, **fields: object) -> Change:
    """A document of the run with other values, written as Baton writes it."""

    def change(sealed: SealedRun) -> None:
        path = sealed.store / sealed.run.path(name)
        document = json.loads(path.read_text()) if path.exists() else {}
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps({**document, **fields}, indent=1, sort_keys=True))

    return change


def loosened(sealed: SealedRun) -> None:
    path = sealed.store / sealed.run.path("recipe.json")
    document = json.loads(path.read_text())
    document["recipe"]["evaluation"]["gate"] = {"loss": "<= 1000"}
    path.write_text(json.dumps(document, indent=1, sort_keys=True))


def appended(name: str) -> Change:
    def change(sealed: SealedRun) -> None:
        with (sealed.store / sealed.run.path(name)).open("ab") as file:
            file.write(b" ")

    return change


def rehashed(place: str, ending: str) -> Change:
    """A file of a bundle with one bit changed, and its hash in the manifest."""

    def change(sealed: SealedRun) -> None:
        (path,) = (each for each in sealed.store.glob(place) if each.name == "manifest.json")
        document = json.loads(path.read_text())
        name = next(each for each in sorted(document["files"]) if each.endswith(ending))
        data = bytearray((path.parent / document["folder"] / name).read_bytes())
        data[-9] ^= 1
        (path.parent / document["folder"] / name).write_bytes(bytes(data))
        document["files"][name]["sha256"] = hashlib.sha256(bytes(data)).hexdigest()
        path.write_bytes(Manifest(**document).as_written().encode())

    return change


def without(name: str) -> Change:
    return lambda sealed: shutil.rmtree(sealed.store / sealed.run.path(name))


SKIP = rewritten("skips/step-00000002.json", step=2, chunk=1, reason="loss", message="step 2 has the loss 9")
UNNOTICED: dict[str, dict[str, Change]] = {
    "documents": {
        "figures": rewritten("evaluation.json", after={"loss": 0.1}),
        "verdict": rewritten("evaluation.json", gate={"passed": False, "lines": []}),
        "loosened gate": loosened,
        "proof page": rewritten("proof/chunk-001.json", digest="0" * 64),
        "newest checkpoint": rewritten("promoted.json", newest={"step": 2, "uri": "x"}),
        "report": appended("report.html"),
        "findings": rewritten("quality.json", checks={}),
        "page of rows": appended("data-quality.html"),
        "examples": appended("examples.jsonl"),
        "address of the model": rewritten("export.json", model_uri="elsewhere"),
        "plan": rewritten("plan.json", num_steps=3, targets=[2, 3]),
    },
    "skip": {"a skipped step": SKIP, "a batch size": rewritten("micro_batch.json", micro_batch_size=1)},
    "export": {"weights of the export": rehashed("runs/whole/export/*", "model.safetensors")},
    "tokens": {"tokens": rehashed("data/*/tokens*/*", ".arrow")},
    "rows": {"rows": rehashed("data/*/split/*", "train.jsonl")},
}
RETRAINED = ("skip", "tokens")
"""Changes after which all checkpoints are deleted, so that the run trains again."""


@pytest.mark.parametrize(("group", "name"), [(group, name) for group, changes in UNNOTICED.items() for name in changes])
def test_a_change_that_went_unnoticed_is_found(group: str, name: str, sealed: SealedRun, tmp_path: Path) -> None:
    copy = copied(sealed, tmp_path / "copy")
    assert copy.is_unchanged()
    UNNOTICED[group][name](copy)
    assert not copy.is_unchanged()


@pytest.mark.slow
@pytest.mark.parametrize("group", UNNOTICED)
def test_one_start_ends_on_the_same_bits(group: str, sealed: SealedRun, tmp_path: Path) -> None:
    copy = copied(sealed, tmp_path / "copy")
    before = results(copy)
    for change in UNNOTICED[group].values():
        change(copy)
    if group in RETRAINED:
        without("checkpoints")(copy)
    copy.finish()
    assert results(copy) == before
    # What nobody sealed stays where it was planted, unused, and is told.
    planted = ("skips/step-00000002.json", "micro_batch.json") if group == "skip" else ()
    assert copy.check()["problems"] == [f"{name}: no seal has it" for name in sorted(planted)]


@pytest.mark.slow
def test_without_a_key_a_planted_skip_gives_other_weights(tmp_path: Path) -> None:
    """The negative control of the table."""
    plain = SealedRun(tmp_path, None)
    plain.finish()
    before = results(plain)
    SKIP(plain)
    without("checkpoints")(plain)
    plain.finish()
    assert results(plain)["digest"] != before["digest"]


@pytest.mark.slow
def test_a_run_whose_seals_are_gone(sealed: SealedRun, tmp_path: Path) -> None:
    copy = copied(sealed, tmp_path / "copy")
    before = results(copy)
    without("seals")(copy)
    done = copy.start()
    assert done.returncode == 1
    assert "its seals in" in done.stderr
    assert "Put them back from a copy of the store" in " ".join(done.stderr.split())
    # With the checkpoints gone too nothing is trained yet: all is made anew from the source.
    without("checkpoints")(copy)
    UNNOTICED["tokens"]["tokens"](copy)
    copy.finish()
    assert results(copy) == before


def test_a_rollback_of_the_whole_run_is_found_by_a_noted_seal(
    sealed: SealedRun, planter: RunPlanter, tmp_path: Path
) -> None:
    noted = sealed.check()["head"]
    older = copied(sealed, tmp_path / "copy")
    shutil.rmtree(older.store)
    shutil.copytree(planter.older, older.store)
    assert older.is_unchanged(), "every object of it was signed"
    assert any("rolled back" in problem for problem in ChainCheck(older.run, older.public).verdict(noted)["problems"])
    assert ChainCheck(sealed.run, sealed.public).verdict(older.check()["head"])["ok"], "the newer one continues it"


def verified(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["verify", *map(str, arguments)])
    return result.exit_code, result.output


def test_the_command_takes_a_run_or_an_export(sealed: SealedRun, exported: Path) -> None:
    key = sealed.folder / "run.key.pub"
    code, text = verified(sealed.run.uri, "--key", key)
    assert (code, "objects are as signed" in text, "newest seal" in text) == (0, True, True)
    code, text = verified("run", sealed.run.uri)
    assert (code, "malice is not" in text) == (0, True)
    code, text = verified(exported, "--key", key)
    assert (code, "as signed" in text) == (0, True), text
    code, text = verified(exported, "--key", key, "--output", "json")
    told = json.loads(text)
    assert told["origin"]["rows"] == {
        "train": 33,
        "eval": 12,
        "test": 0,
        "digest": sealed.run.require("data.json")["digest"],
    }
    assert told["origin"]["gate"]["passed"] is True
    assert list(told["origin"]["chunks"]) == ["train-chunk-001", "train-chunk-002"]
    assert told["origin"]["plan"] == [2, 4]
    assert told["origin"]["state"] == results(sealed)["digest"]


@pytest.fixture
def exported(sealed: SealedRun, tmp_path: Path) -> Path:
    """A copy of the export, and nothing else of its run."""
    manifest = read_manifest(sealed.run.storage, sealed.run.path("export"))
    assert manifest
    return Path(shutil.copytree(sealed.run.storage.key(manifest.path(sealed.run.path("export"))), tmp_path / "model"))


def test_a_changed_export_is_found_by_its_folder_alone(sealed: SealedRun, exported: Path) -> None:
    """Each kind of change: `tests/checkpoint/test_chain.py`. Without the key a file is not compared."""
    assert verify_export(str(exported), sealed.public)["ok"]
    assert not verify_export(str(exported), Signer.new("p256").public)["ok"]
    (exported / "model.safetensors").write_bytes(b"x")
    assert not verify_export(str(exported), sealed.public)["ok"]
    assert verify_export(str(exported), None)["ok"]


def test_an_image_of_the_export_carries_its_chain(sealed: SealedRun, tmp_path: Path) -> None:
    manifest = read_manifest(sealed.run.storage, sealed.run.path("exports/oci"))
    assert manifest
    blobs = Path(sealed.run.storage.key(manifest.path(sealed.run.path("exports/oci")))) / "blobs/sha256"
    for layer in (path for path in blobs.iterdir() if tarfile.is_tarfile(path)):
        with tarfile.open(layer) as archive:
            archive.extractall(tmp_path, filter="data")
    assert verify_export(str(tmp_path / "models"), sealed.public)["ok"]


def results(sealed: SealedRun) -> dict[str, str]:
    """Returns the digest of the state, and the SHA-256 of the exported weights."""
    newest = CheckpointStore(sealed.run, sealed.public).newest()
    manifest = read_manifest(sealed.run.storage, sealed.run.path("export"))
    assert newest
    assert manifest
    return {"digest": newest.digest, "weights": manifest.files["model.safetensors"]["sha256"]}
