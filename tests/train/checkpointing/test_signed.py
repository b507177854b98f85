"""What a chunk of a signed run restores, and what it refuses."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from baton import signing
from baton.checkpoint import retention, signatures
from baton.checkpoint.proof import Verification
from baton.checkpoint.restore import Restorer
from baton.checkpoint.store import CheckpointMeta, CheckpointStore, Parent
from baton.errors import UserError
from baton.recipe import load
from baton.recipe.run import Keep
from baton.runs.run import Run, state_identity
from baton.signing import SignatureError, Signer
from baton.store import bundle as bundles
from baton.store.manifest import Manifest, read_manifest
from baton.store.storage import Storage


class Signed:
    """A run whose checkpoints are signed."""

    def __init__(self, folder: Path, signer: Signer, store: str | None = None) -> None:
        self.folder = folder
        recipe = {"name": "r", "model": {"base": "x"}, "data": {"source": "x"}}
        recipe |= {"chunks": {"signing": {"public_key": signer.public.line}}}
        self.recipe = load.validate(recipe, origin="r")
        self.run = Run(Storage(store or str(folder / "store")), "r")
        self.run.create(self.recipe)
        rows = folder / "rows"
        rows.mkdir()
        (rows / "tokens").write_bytes(b"1 2 3")
        bundles.publish(self.run.storage, "data/x/tokens", str(rows), kind="tokens", meta={})
        self.run.put("tokens.json", {"prefix": "data/x/tokens"})
        self.store = CheckpointStore.of(self.run, self.recipe)

    def commit(self, step: int, content: bytes = b"weights") -> None:
        local = self.folder / f"local-{step}"
        local.mkdir(exist_ok=True)
        (local / "weights").write_bytes(content)
        writer = self.store.open_writer(step)
        writer.send(str(local))
        self.store.commit(step, writer, self.meta(step))

    def meta(self, step: int) -> CheckpointMeta:
        return CheckpointMeta(digest=f"of {step}", identity="this")

    def restorer(self) -> Restorer:
        return Restorer(self.store, 9, "this", None, lambda _: str(self.folder))

    def manifest_path(self, step: int) -> Path:
        return Path(self.run.storage.key(f"{self.store.prefix(step)}/manifest.json"))

    def rewrite(self, step: int, **changes: Any) -> Manifest:
        path = self.manifest_path(step)
        before = Manifest(**json.loads(path.read_bytes()))
        after = replace(before, meta={**before.meta, **changes})
        path.write_text(after.as_written())
        return after


@pytest.fixture
def signer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Signer:
    signer = Signer.new("ed25519")
    (tmp_path / "key").write_bytes(signer.pem())
    monkeypatch.setenv(signing.KEY_FILE, str(tmp_path / "key"))
    return signer


@pytest.fixture
def signed(tmp_path: Path, signer: Signer) -> Signed:
    run = Signed(tmp_path, signer)
    run.commit(2)
    run.commit(4)
    return run


def test_what_is_signed_is_restored(signed: Signed) -> None:
    restored = signed.restorer().fetch()
    assert restored
    assert restored.step == 4
    assert signed.store.read(2)


def test_the_statement_names_what_the_state_was_made_of(signed: Signed, signer: Signer) -> None:
    checkpoint = signed.store.read(4)
    assert checkpoint
    statement = signer.public.open(checkpoint.manifest.meta["signature"])
    assert statement["predicateType"] == "https://model_signing/signature/v1.0"
    told = statement["predicate"]["baton"]
    assert (told["run"], told["step"], told["identity"], told["digest"]) == ("r", 4, "this", "of 4")
    assert told["manifest"] == signatures.manifest_digest(checkpoint.manifest)
    assert {name for name, value in told["sources"].items() if value} == {"recipe", "tokens"}
    names = {each["name"]: each["digest"] for each in statement["predicate"]["resources"]}
    assert names == {name: entry["sha256"] for name, entry in checkpoint.manifest.files.items()}


def test_no_second_object_is_written_for_the_signature(signed: Signed) -> None:
    names = signed.run.storage.list(signed.store.prefix(4))
    checkpoint = signed.store.read(4)
    assert checkpoint
    assert sorted(names) == sorted([checkpoint.manifest.folder, "manifest.json"])


@pytest.mark.parametrize("step", [4, 2], ids=["newest", "older"])
def test_unsigned_is_refused_and_not_passed_over(signed: Signed, step: int) -> None:
    path = signed.manifest_path(step)
    path.write_text(signatures.unsigned(Manifest(**json.loads(path.read_bytes()))).as_written())
    with pytest.raises(SignatureError, match=f"step {step} .*not signed.*remove its manifests by hand"):
        list(signed.store.committed())
    if step == 4:
        with pytest.raises(SignatureError, match="step 4"):
            signed.restorer().fetch()
    assert signed.store.storage.list(signed.store.prefix(step)) != []  # and nothing was marked or taken


def test_wrongly_signed_is_refused(signed: Signed) -> None:
    signed.rewrite(4, digest="another")
    with pytest.raises(SignatureError, match="differs from the signed state"):
        signed.restorer().fetch()


def test_signed_by_a_stranger_is_refused(signed: Signed) -> None:
    manifest = Manifest(**json.loads(signed.manifest_path(4).read_bytes()))
    bundle = Signer.new("ed25519").sign(signatures.statement(signatures.unsigned(manifest)))
    signed.rewrite(4, signature=bundle)
    with pytest.raises(SignatureError, match="another key"):
        signed.restorer().fetch()


def test_a_signed_one_in_the_place_of_another_is_refused(signed: Signed) -> None:
    signed.manifest_path(4).write_bytes(signed.manifest_path(2).read_bytes())
    with pytest.raises(SignatureError, match="'r', 2"):
        signed.restorer().fetch()


def test_a_file_that_was_not_signed_is_refused(signed: Signed) -> None:
    checkpoint = signed.store.read(4)
    assert checkpoint
    signed.run.storage.write(checkpoint.manifest.path(signed.store.prefix(4), "model.safetensors.index.json"), b"{}")
    with pytest.raises(SignatureError, match=r"model\.safetensors\.index\.json was not signed"):
        signed.restorer().fetch()


def test_other_tokens_than_those_signed_are_refused(signed: Signed, tmp_path: Path) -> None:
    (tmp_path / "rows" / "tokens").write_bytes(b"1 2 4")
    bundles.publish(signed.run.storage, "data/y/tokens", str(tmp_path / "rows"), kind="tokens", meta={})
    signed.run.put("tokens.json", {"prefix": "data/y/tokens"})
    with pytest.raises(SignatureError, match="signed with other tokens"):
        signed.restorer().fetch()


def test_torn_files_are_passed_over_as_ever(signed: Signed) -> None:
    checkpoint = signed.store.read(4)
    assert checkpoint
    signed.run.storage.write(checkpoint.manifest.path(signed.store.prefix(4), "weights"), b"torn")
    restorer = signed.restorer()
    restored = restorer.fetch()
    assert restored
    assert restored.step == 2
    assert "step 4" in restorer.skipped[0] or "step-00000004" in restorer.skipped[0]


def test_retention_takes_nothing_beside_what_is_refused(signed: Signed) -> None:
    signed.rewrite(4, digest="another")
    with pytest.raises(SignatureError):
        retention.prune(signed.store, Keep(last=1))
    assert signed.manifest_path(2).exists()


def test_a_recipe_that_somebody_changed_in_the_store_changes_nothing(
    signed: Signed, signer: Signer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(signing.SIGNED_BY, signer.public.line)
    path = signed.manifest_path(4)
    path.write_text(signatures.unsigned(Manifest(**json.loads(path.read_bytes()))).as_written())
    bare = load.validate({**signed.recipe.model_dump(mode="json"), "chunks": {}}, origin="r")
    with pytest.raises(SignatureError):  # who asks is the process, and not the recipe in the store
        CheckpointStore.of(signed.run, bare).newest()
    theirs = {"chunks": {"signing": {"public_key": Signer.new("ed25519").public.line}}}
    other = load.validate({**signed.recipe.model_dump(mode="json"), **theirs}, origin="r")
    with pytest.raises(UserError, match="names the signing key"):
        CheckpointStore.of(signed.run, other)


def test_who_has_not_the_key_is_told_before_it_trains(signed: Signed, monkeypatch: pytest.MonkeyPatch) -> None:
    signed.store.require_signer()
    monkeypatch.delenv(signing.KEY_FILE)
    with pytest.raises(UserError, match=f"{signing.KEY_FILE} is not set"):
        signed.store.require_signer()
    CheckpointStore(Run(signed.run.storage, "unsigned")).require_signer()


def test_who_has_not_the_key_cannot_commit(signed: Signed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(signing.KEY_FILE)
    with pytest.raises(UserError, match=f"{signing.KEY_FILE} is not set"):
        signed.commit(6)
    (tmp_path / "other").write_bytes(Signer.new("ed25519").pem())
    monkeypatch.setenv(signing.KEY_FILE, str(tmp_path / "other"))
    with pytest.raises(UserError, match="Give it the private key that belongs to"):
        signed.commit(8)
    assert [checkpoint.step for checkpoint in signed.store.committed()] == [4, 2]


def test_who_asks_for_no_signature_reads_a_signed_run_as_any(signed: Signed) -> None:
    plain = CheckpointStore(signed.run)
    assert [checkpoint.step for checkpoint in plain.committed()] == [4, 2]


class Chain(Signed):
    """A signed run of three checkpoints, each of which names the one before it."""

    def __init__(self, folder: Path, signer: Signer, store: str | None = None) -> None:
        super().__init__(folder, signer, store)
        self.run.put("plan.json", {"rows": 8, "steps_per_epoch": 2, "num_steps": 6, "targets": [2, 4, 6]})
        self.run.put("data.json", {"digest": "of rows"})
        self.run.put("model.json", {"base_sha256": None})
        for step in (2, 4, 6):
            self.commit(step)

    def meta(self, step: int) -> CheckpointMeta:
        before = self.store.newest()
        manifest = signatures.manifest_digest(before.manifest) if before else ""
        parent = Parent(step=step - 2, digest=f"of {step - 2}", manifest=manifest) if before else None
        identity = state_identity(self.run, self.recipe, self.run.plan())
        return CheckpointMeta(digest=f"of {step}", identity=identity, parent=parent)

    def manifest(self, step: int) -> Manifest:
        return Manifest(**json.loads(self.manifest_path(step).read_bytes()))

    def sign_again(self, step: int, name: str = "manifest.json", **changes: Any) -> None:
        """Puts another state under a step, signed by the run's own key."""
        bare = signatures.unsigned(self.manifest(step))
        files = changes.pop("files", bare.files)
        changed = replace(bare, files=files, meta={**bare.meta, **changes})
        signed = replace(changed, meta={**changed.meta, "signature": signatures.sign(changed, self.key)})
        self.write(step, name, signed.as_written().encode())

    @property
    def key(self) -> signing.PublicKey:
        assert self.store.signed_by
        return self.store.signed_by

    def mark(self, word: str, step: int) -> None:
        self.write(step, f"{word}-{self.manifest(step).folder}", b"")

    def write(self, step: int, name: str, data: bytes) -> None:
        self.run.storage.write(f"{self.store.prefix(step)}/{name}", data)

    def add(self, step: int, name: str, data: bytes) -> None:
        self.write(step, f"{self.manifest(step).folder}/{name}", data)

    def take(self, *steps: int) -> None:
        for step in steps:
            shutil.rmtree(self.run.storage.key(self.store.prefix(step)))

    def verdict(self, step: int | None = None, digest: str | None = None) -> list[str]:
        """Returns everything that a verification tells, a line each."""
        report = Verification(CheckpointStore(Run.open(self.run.uri)), self.key).verdict(step, digest)
        lines = [f"step {row['step']}: {each}" for row in report["checkpoints"] for each in row["problems"]]
        lines += [f"run: {each}" for each in report["problems"]]
        assert report["ok"] == (not lines)
        assert [row["ok"] for row in report["checkpoints"]] == [not row["problems"] for row in report["checkpoints"]]
        lines += [f"note: {each}" for each in report["notes"]]
        return [re.sub("[0-9a-f]{64}", "SHA", line.replace(self.run.storage.uri(), "STORE")) for line in lines]

    def digest(self, step: int) -> str:
        return signatures.manifest_digest(self.manifest(step))


def _rewrite(path: Path, change: Callable[[Any], Any]) -> None:
    document = json.loads(path.read_bytes())
    path.write_text(json.dumps(change(document)))


def _document(name: str, **changes: Any) -> Callable[[Chain], None]:
    return lambda chain: chain.run.put(name, {**chain.run.require(name), **changes})


def _recipe(**changes: Any) -> Callable[[Chain], None]:
    def change(chain: Chain) -> None:
        stored = chain.run.require("recipe.json")
        chain.run.put("recipe.json", {**stored, "recipe": {**stored["recipe"], **changes}})

    return change


def _forget(name: str) -> Callable[[Chain], object]:
    return lambda chain: chain.run.storage.remove(chain.run.path(name))


def _unsigned(name: str) -> Callable[[Chain], None]:
    return lambda chain: chain.write(6, name, signatures.unsigned(chain.manifest(6)).as_written().encode())


def _with_code(chain: Chain) -> None:
    (chain.folder / "local-8").mkdir()
    torch.save({"state": Path("/")}, chain.folder / "local-8/optimizer.pt")
    chain.commit(8)


def _several(*changes: Callable[[Chain], object]) -> Callable[[Chain], object]:
    return lambda chain: [change(chain) for change in changes]


OTHERS = [f"run: recipe, data, model, code or plan are not those that step {step} was made from" for step in (2, 4, 6)]
VERDICTS: dict[str, tuple[Callable[[Chain], object], list[str]]] = {
    "nothing": (lambda chain: None, []),
    "no checkpoint": (lambda chain: chain.take(2, 4, 6), []),
    "older steps gone": (lambda chain: chain.take(2), []),
    "parent gone": (
        lambda chain: chain.take(4),
        ["note: step 4, which step 6 continues, is not here: retention may have removed it"],
    ),
    "parent gone, of a fork's first step": (
        _several(
            lambda chain: chain.sign_again(6, forked_from={"run_uri": "p", "step": 4, "digest": "d", "changed": {}}),
            lambda chain: chain.take(4),
        ),
        [],
    ),
    "newest gone": (lambda chain: chain.take(6), []),
    "newest gone that was read back": (
        _several(lambda chain: chain.run.put("promoted.json", {"newest": {"step": 6}}), lambda chain: chain.take(6)),
        ["run: step 6 was read back once, and the newest here is step 4"],
    ),
    "newest being removed": (
        lambda chain: chain.mark("removed", 6),
        ["run: step 6 is marked as being removed, and nothing newer is here"],
    ),
    "all being removed": (
        lambda chain: [chain.mark("removed", step) for step in (2, 4, 6)],
        ["run: step 6 is marked as being removed, and nothing newer is here"],
    ),
    "older being removed": (lambda chain: chain.mark("removed", 2), []),
    "older of which the manifest is gone": (
        lambda chain: chain.manifest_path(2).unlink(),
        ["step 4: continues step 2, whose files are here and whose manifest is gone"],
    ),
    "older being removed, its manifest gone": (
        _several(lambda chain: chain.mark("removed", 2), lambda chain: chain.manifest_path(2).unlink()),
        [],
    ),
    "older of which the manifest is unreadable": (
        lambda chain: chain.manifest_path(2).write_bytes(b"{}"),
        ["step 2: STORE/runs/r/checkpoints/step-00000002/manifest.json is not a manifest of version 1: 'version'."],
    ),
    "older of which the manifest and the files are gone": (
        _several(lambda chain: chain.write(2, "damaged-x", b""), lambda chain: chain.manifest_path(2).unlink()),
        ["step 4: continues step 2, whose files are here and whose manifest is gone"],
    ),
    "older with another state": (
        lambda chain: chain.sign_again(2, digest="another"),
        ["step 4: continues another checkpoint of step 2 than this store's"],
    ),
    "older with another state in a second generation": (
        lambda chain: chain.sign_again(2, "manifest-2.json", digest="another"),
        [],
    ),
    "second generation that is not signed": (
        _unsigned("manifest-2.json"),
        ["step 6: manifest 2: it is not signed."],
    ),
    "not signed": (_unsigned("manifest.json"), ["step 6: it is not signed."]),
    "older found damaged": (lambda chain: chain.mark("damaged", 4), ["step 4: it was found damaged before"]),
    "another attempt found damaged": (lambda chain: chain.write(4, "damaged-other", b""), []),
    "manifest laid out otherwise": (
        lambda chain: _rewrite(chain.manifest_path(4), lambda it: it),
        ["step 4: its manifest has changed since it was signed"],
    ),
    "manifest of another step": (
        lambda chain: chain.manifest_path(4).write_bytes(chain.manifest_path(2).read_bytes()),
        [
            "step 4: its manifest belongs to step 2 of run 'r'",
            "step 6: continues another checkpoint of step 4 than this store's",
        ],
    ),
    "manifest of another run": (
        lambda chain: chain.sign_again(6, run="other"),
        ["step 6: its manifest belongs to step 6 of run 'other'"],
    ),
    "manifest of no files": (
        _several(
            lambda chain: chain.run.storage.remove(chain.manifest(6).path(chain.store.prefix(6), "weights")),
            lambda chain: chain.sign_again(6, files={}),
        ),
        ["step 6: STORE/runs/r/checkpoints/step-00000006: its manifest names no files."],
    ),
    "file changed": (
        lambda chain: chain.add(6, "weights", b"weighTs"),
        ["step 6: weights: SHA-256 is SHA, committed was SHA"],
    ),
    "file changed, and the one before with another state": (
        _several(
            lambda chain: chain.add(6, "weights", b"weighTs"),
            lambda chain: chain.sign_again(4, digest="another"),
        ),
        ["step 6: weights: SHA-256 is SHA, committed was SHA"],
    ),
    "files added": (
        lambda chain: [chain.add(6, name, b"{}") for name in ("more/config.json", "a.py")],
        ["step 6: a.py: not in the manifest", "step 6: more/config.json: not in the manifest"],
    ),
    "pickle with code": (_with_code, ["step 8: optimizer.pt: a pickle that holds code (pathlib.PosixPath)"]),
    "upload under way": (lambda chain: chain.write(8, "other/weights", b""), []),
    "unrelated objects": (
        lambda chain: [
            chain.run.storage.write(chain.run.path(f"checkpoints/{name}"), b"") for name in ("notes", "step-6/x")
        ],
        [],
    ),
    "unrelated objects, and a file changed": (
        _several(
            lambda chain: chain.run.storage.write(chain.run.path("checkpoints/a-note"), b""),
            lambda chain: chain.add(6, "weights", b"weighTs"),
        ),
        ["step 6: weights: SHA-256 is SHA, committed was SHA"],
    ),
    "plan": (_document("plan.json", rows=9), ["run: plan: not what step 6 was signed with", *OTHERS]),
    "data": (_document("data.json", digest="of others"), ["run: data: not what step 6 was signed with", *OTHERS]),
    "models": (_document("model.json", base_sha256="x"), ["run: models: not what step 6 was signed with", *OTHERS]),
    "code": (
        lambda chain: chain.run.put("code.json", {"prefix": "code/x"}),
        ["run: code: not what step 6 was signed with", *OTHERS],
    ),
    "setting that changes bits": (_recipe(seed=9), OTHERS),
    "setting that changes none": (
        _recipe(tracking={"mlflow": None}),
        ["note: recipe.json has changed since step 6 was signed, in settings that change no bits"],
    ),
    "recipe gone": (
        _forget("recipe.json"),
        ["run: STORE/runs/r/recipe.json does not exist. Check store and run name."],
    ),
    "plan gone": (
        _forget("plan.json"),
        [
            "run: plan: not what step 6 was signed with",
            "run: STORE/runs/r/plan.json does not exist. Check store and run name.",
        ],
    ),
    "tokens changed": (
        lambda chain: chain.run.storage.write(
            read_manifest(chain.run.storage, "data/x/tokens").path("data/x/tokens", "tokens"),
            b"1 2 4",  # type: ignore[union-attr]
        ),
        ["run: tokens: tokens: SHA-256 is SHA, committed was SHA"],
    ),
    "tokens gone": (
        lambda chain: shutil.rmtree(chain.run.storage.key("data/x/tokens")),
        ["run: tokens: not what step 6 was signed with", "run: tokens: they are gone"],
    ),
}
"""Change to the store → everything that a verification tells of it."""


@pytest.fixture
def chain(tmp_path: Path, signer: Signer) -> Chain:
    return Chain(tmp_path, signer)


@pytest.mark.parametrize(("change", "told"), VERDICTS.values(), ids=VERDICTS)
def test_a_verification_tells_of_each_change(change: Callable[[Chain], object], told: list[str], chain: Chain) -> None:
    change(chain)
    assert chain.verdict() == told


EXPECTED: dict[str, tuple[int | None, Callable[[Chain], str | None], tuple[int, ...], list[str]]] = {
    "the newest step": (6, lambda chain: None, (), []),
    "an older step": (4, lambda chain: None, (), []),
    "a newer step": (
        8,
        lambda chain: None,
        (),
        ["run: the newest is step 6, and step 8 was expected: rolled back, or its end is missing"],
    ),
    "a newer step with a digest": (
        8,
        lambda chain: chain.digest(6),
        (),
        ["run: the newest is step 6, and step 8 was expected: rolled back, or its end is missing"],
    ),
    "the newest digest": (None, lambda chain: chain.digest(6), (), []),
    "an older digest": (
        None,
        lambda chain: chain.digest(4),
        (),
        ["run: step 6 does not have the expected manifest, SHA"],
    ),
    "an older step and its digest": (4, lambda chain: chain.digest(4), (), []),
    "an older step and another's digest": (
        4,
        lambda chain: chain.digest(2),
        (),
        ["run: step 4 does not have the expected manifest, SHA"],
    ),
    "a step that has gone, by its child": (2, lambda chain: chain.digest(2), (2,), []),
    "a step that has gone with its child": (
        2,
        lambda chain: chain.digest(2),
        (2, 4),
        [
            "run: step 2 does not have the expected manifest, SHA",
            "note: step 4, which step 6 continues, is not here: retention may have removed it",
        ],
    ),
}
"""Expectation → step, digest, steps that are gone, and everything that a verification tells."""


@pytest.mark.parametrize(("step", "digest", "gone", "told"), EXPECTED.values(), ids=EXPECTED)
def test_a_verification_expects_a_step_and_a_digest(
    step: int | None, digest: Callable[[Chain], str | None], gone: tuple[int, ...], told: list[str], chain: Chain
) -> None:
    expected = digest(chain)
    chain.take(*gone)
    assert chain.verdict(step, expected) == told


def test_a_verification_expects_a_digest_beside_damage(chain: Chain) -> None:
    chain.mark("damaged", 4)
    assert chain.verdict(6, chain.digest(6)) == ["step 4: it was found damaged before"]


@pytest.mark.s3
def test_a_pickle_with_code_is_found_in_a_bucket_too(tmp_path: Path, signer: Signer, s3_store: str) -> None:
    chain = Chain(tmp_path, signer, s3_store)
    _with_code(chain)
    assert chain.verdict() == VERDICTS["pickle with code"][1]


def test_a_verification_names_each_state_and_the_newest(chain: Chain) -> None:
    report = Verification(chain.store, chain.key).verdict()
    assert report["checkpoints"] == [
        {"step": step, "ok": True, "problems": [], "manifest": chain.digest(step), "digest": f"of {step}"}
        for step in (2, 4, 6)
    ]
    assert report["head"] == report["checkpoints"][-1]
    chain.take(2, 4, 6)
    empty = Verification(chain.store, chain.key).verdict()
    assert empty == {"ok": True, "checkpoints": [], "head": None, "problems": [], "notes": []}
