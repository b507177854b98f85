"""What a chunk of a signed run restores, and what it refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from baton import signing
from baton.checkpoint import retention, signatures
from baton.checkpoint.restore import Restorer
from baton.checkpoint.store import CheckpointMeta, CheckpointStore
from baton.errors import UserError
from baton.recipe import load
from baton.recipe.run import Keep
from baton.runs.run import Run
from baton.signing import SignatureError, Signer
from baton.store import bundle as bundles
from baton.store.manifest import Manifest
from baton.store.storage import Storage


class Signed:
    """A run whose checkpoints are signed."""

    def __init__(self, folder: Path, signer: Signer) -> None:
        self.folder = folder
        recipe = {"name": "r", "model": {"base": "x"}, "data": {"source": "x"}}
        recipe |= {"chunks": {"signing": {"public_key": signer.public.line}}}
        self.recipe = load.validate(recipe, origin="r")
        self.run = Run(Storage(str(folder / "store")), "r")
        self.run.create(self.recipe)
        rows = folder / "rows"
        rows.mkdir()
        (rows / "tokens").write_bytes(b"1 2 3")
        bundles.publish(self.run.storage, "data/x/tokens", str(rows), kind="tokens", meta={})
        self.run.put("tokens.json", {"prefix": "data/x/tokens"})
        self.store = CheckpointStore.of(self.run, self.recipe)

    def commit(self, step: int, content: bytes = b"weights") -> None:
        local = self.folder / f"local-{step}"
        local.mkdir()
        (local / "weights").write_bytes(content)
        writer = self.store.open_writer(step)
        writer.send(str(local))
        self.store.commit(step, writer, CheckpointMeta(digest=f"of {step}", identity="this"))

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
