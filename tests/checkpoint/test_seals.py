"""Seals of a run's stages: what a stage takes of an object, by the newest seal, and how seals follow each other."""

from __future__ import annotations

import base64
import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from baton import signing
from baton.checkpoint import seals
from baton.checkpoint.chain import ChainCheck
from baton.checkpoint.signatures import sign
from baton.checkpoint.store import CheckpointMeta, CheckpointStore
from baton.errors import BatonError, DamagedError, UserError
from baton.recipe.budget import Budget
from baton.runs import documents, objects
from baton.runs.documents import PinnedModels, Skip, SplitData, TokenizedRows
from baton.runs.outcomes import EvaluationResult
from baton.runs.run import Run
from baton.signing import SignatureError, Signer
from baton.store.manifest import REMOVED, Manifest, mark_damaged
from baton.store.storage import Storage

SIGNER = Signer.new("ed25519")


@pytest.fixture(params=["unsigned", "signed"])
def run(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """A run whose first two stages are sealed."""
    if request.param == "signed":
        use_key(SIGNER, tmp_path, monkeypatch)
    return begun(tmp_path)


@pytest.fixture
def signed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    use_key(SIGNER, tmp_path, monkeypatch)
    return begun(tmp_path)


def use_key(signer: Signer, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "key").write_bytes(signer.pem())
    monkeypatch.setenv(signing.KEY_FILE, str(folder / "key"))
    monkeypatch.setenv(signing.SIGNED_BY, signer.public.line)


def begun(folder: Path) -> Run:
    run = Run(Storage(str(folder / "store")), "r")
    with seals.stage(run, objects.SPLIT):
        run.write(SplitData(digest="d", rows=3))
    with seals.stage(run, objects.TOKENIZE):
        run.write(TokenizedRows(prefix="data/d/tokens", train=3))
        run.write(PinnedModels(base_sha256="b"))
    return run


def path(run: Run, name: str) -> Path:
    return Path(run.storage.key(run.path(name)))


def statement(run: Run, number: int) -> dict[str, Any]:
    bundle = json.loads(path(run, f"seals/{number:06d}.json").read_text())
    payload: dict[str, Any] = json.loads(base64.b64decode(bundle["dsseEnvelope"]["payload"]))
    return payload


DAMAGE: dict[str, Callable[[Path], object]] = {
    "flipped": lambda file: file.write_bytes(bytes([file.read_bytes()[0] ^ 1]) + file.read_bytes()[1:]),
    "emptied": lambda file: file.write_bytes(b""),
    "cut": lambda file: file.write_bytes(file.read_bytes()[:-3]),
    "deleted": lambda file: file.unlink(),
    "another value": lambda file: file.write_text(json.dumps({"digest": "other", "rows": 9}, indent=1)),
    "null": lambda file: file.write_bytes(b"null"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_small_document_is_written_again_from_its_seal(damage: str, run: Run) -> None:
    before = path(run, "data.json").read_bytes()
    DAMAGE[damage](path(run, "data.json"))
    with seals.stage(run, objects.CHUNK, 1):
        assert run.need(SplitData).digest == "d"
    assert path(run, "data.json").read_bytes() == before
    assert any("written again" in warning.text for warning in run.warnings())
    assert ChainCheck(run, SIGNER.public if signing.trusted_here() else None).verdict()["ok"]


@pytest.mark.parametrize("damage", DAMAGE)
def test_outside_of_a_stage_it_is_read_as_it_is(damage: str, run: Run) -> None:
    """The negative control: nothing is compared, nor written again."""
    DAMAGE[damage](path(run, "data.json"))
    try:
        found = run.read(SplitData)
    except DamagedError:
        return
    assert found is None or found.digest == "other"


def test_what_no_seal_has(run: Run) -> None:
    """A signed run does not obey it, whoever reads it; an unsigned run does."""
    is_signed = signing.trusted_here() is not None
    skip = Skip(step=2, chunk=1, reason="loss", message="planted")
    run.write(skip, 2)
    run.write(EvaluationResult(after={"loss": 1.0}))
    run.write(documents.LearningRate(learning_rate=1.0))
    with seals.stage(run, objects.CHUNK, 1):
        assert [each.step for each in run.skips()] == ([] if is_signed else [2])  # its own output: passed over
        if is_signed:
            with pytest.raises(SignatureError, match=r"lr_find\.json is refused: no seal .* has it"):
                run.read(documents.LearningRate)
    with seals.stage(run, objects.GATE):
        if is_signed:
            with pytest.raises(SignatureError, match=r"evaluation\.json is refused"):
                run.need(EvaluationResult)
        else:
            assert run.need(EvaluationResult).after == {"loss": 1.0}


def test_a_stage_that_was_killed_writes_its_output_again(run: Run) -> None:
    run.write(documents.LearningRate(learning_rate=1.0))  # no seal: the process died before
    with seals.stage(run, objects.LR_FIND):
        if run.read(documents.LearningRate) is None:
            run.write_once(documents.LearningRate(learning_rate=2.0))
    with seals.stage(run, objects.CHUNK, 1):
        assert run.need(documents.LearningRate).learning_rate == (2.0 if signing.trusted_here() else 1.0)


def test_a_stage_that_fails_seals_nothing(run: Run) -> None:
    with contextlib.suppress(UserError), seals.stage(run, objects.EVALUATE):
        run.write(EvaluationResult(after={"loss": 1.0}))
        raise UserError("stopped.")
    assert seals.numbers(run) == [1, 2]


def test_a_skip_is_sealed_at_once(run: Run) -> None:
    skip = Skip(step=2, chunk=1, reason="loss", message="a bad step")
    with contextlib.suppress(UserError), seals.stage(run, objects.CHUNK, 1):
        assert run.note_skip(skip)
        raise UserError("its process ends here.")
    with seals.stage(run, objects.CHUNK, 1):
        assert run.skips() == [skip]


def test_a_planted_end_is_not_obeyed_and_gives_way(run: Run) -> None:
    budget = Budget(limit="1h")
    planted, ours = (
        documents.RunEnd(stable_until=step, last_step=step + 4, is_decayed=True, reason="budget.limit", budget=budget)
        for step in (1, 5)
    )
    run.write(planted, 1)
    info = documents.RunInfo(recipe={}, created="2026-11-27T00:00:00Z")
    is_signed = signing.trusted_here() is not None
    with seals.stage(run, objects.CHUNK, 1):
        assert run.end(info) == (None if is_signed else planted)
        first = run.decide_end(info, ours)
        assert first == (ours if is_signed else planted)
        assert run.decide_end(info, planted) == first
    with seals.stage(run, objects.CHUNK, 2):
        assert run.end(info) == first


@pytest.mark.parametrize("is_killed", [False, True])
@pytest.mark.parametrize("why", ["withdrawn", "damaged"])
def test_a_sealed_checkpoint_that_is_trained_again_is_sealed_again(
    why: str, is_killed: bool, run: Run, tmp_path: Path
) -> None:
    store = CheckpointStore(run, signing.trusted_here())

    def commit(*steps: int) -> None:
        for step in steps:
            local = tmp_path / f"local-{len(list(tmp_path.iterdir()))}"
            local.mkdir()
            (local / "weights").write_text(local.name)
            writer = store.open_writer(step)
            writer.send(str(local))
            store.commit(step, writer, CheckpointMeta(digest=local.name))

    with seals.stage(run, objects.CHUNK, 1):
        commit(8, 10)
    first = store.read(10)
    assert first
    if why == "withdrawn":  # for a larger budget
        run.storage.write(f"{store.prefix(10)}/{REMOVED}{first.manifest.folder}", b"")
    else:
        mark_damaged(run.storage, store.prefix(10), first.manifest)
    with contextlib.suppress(UserError), seals.stage(run, objects.CHUNK, 2):
        commit(10, *([] if is_killed else [12]))
        if is_killed:
            raise UserError("its process ends here.")
    with seals.stage(run, objects.CHUNK, 2):
        newest = next(store.committed())
        assert newest.step == (10 if is_killed else 12)
        if is_killed:
            assert newest.manifest != first.manifest
            commit(12)
    assert ChainCheck(run, SIGNER.public if signing.trusted_here() else None).verdict()["ok"]


def test_seals_follow_each_other(run: Run) -> None:
    first, second = statement(run, 1), statement(run, 2)
    assert [each["name"] for each in second["subject"]] == ["model.json", "tokens.json"]
    inner = second["predicate"]["buildDefinition"]["internalParameters"]
    payload = json.dumps(first, sort_keys=True).encode()
    assert inner["previous"] == seals.sha256(payload)
    assert set(inner["state"]) == {"data.json", "model.json", "tokens.json"}
    assert set(inner["contents"]) == {"model.json", "tokens.json"}
    assert inner["stages"] == {"data-split": 1, "tokenize": 2}
    with seals.stage(run, objects.TOKENIZE):  # again, with the same result
        run.write(PinnedModels(base_sha256="b"))
    assert seals.numbers(run) == [1, 2]


def test_stages_at_once_append_one_after_the_other(run: Run) -> None:
    both = threading.Barrier(2)

    def work(index: int) -> None:
        other = Run(Storage(run.storage.uri()), "r")
        ledger = seals.Ledger(other, objects.CHECKPOINT, f"checkpoint-{index:03d}")
        ledger.writes[f"proof/chunk-{index:03d}.json"] = seals.Entry(f"{index:064d}")
        both.wait()
        ledger.append()

    threads = [threading.Thread(target=work, args=(index,)) for index in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seals.numbers(run) == [1, 2, 3, 4]
    newest = seals.Ledger(run, objects.REPORT, objects.REPORT).head
    assert newest
    assert {"proof/chunk-001.json", "proof/chunk-002.json"} <= newest.state.keys()


def test_what_a_neighbour_seals_meanwhile_counts(run: Run) -> None:
    with seals.stage(run, objects.GATE):
        storage = Storage(run.storage.uri())
        ledger = seals.Ledger(Run(storage, "r"), objects.EVALUATE, objects.EVALUATE)
        storage.client.write(run.path("evaluation.json"), b'{"after": {"loss": 1.0}}')
        ledger.wrote(storage, run.path("evaluation.json"), seals.sha256(b'{"after": {"loss": 1.0}}'), b"{}")
        ledger.append()
        assert run.need(EvaluationResult).after == {"loss": 1.0}


@pytest.mark.parametrize("damage", [name for name in DAMAGE if name != "deleted"])
def test_a_broken_newest_seal_is_passed_over_and_its_number_written_again(damage: str, run: Run) -> None:
    DAMAGE[damage](path(run, "seals/000002.json"))
    public = SIGNER.public if signing.trusted_here() else None
    assert not ChainCheck(run, public).verdict()["ok"]
    with seals.stage(run, objects.TOKENIZE) as ledger:
        assert ledger.head
        assert ledger.head.number == 1
        run.write(TokenizedRows(prefix="data/d/tokens", train=3))
        run.write(PinnedModels(base_sha256="b"))
    assert seals.numbers(run) == [1, 2]
    assert ChainCheck(run, public).verdict()["ok"]


def test_a_stage_takes_three_requests_more_and_reads_a_document_once(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    client = type(run.storage.client)
    for name in ("read", "list", "create", "write"):
        original = getattr(client, name)

        def count(self: Any, place: str, *rest: Any, _of: Any = original, _name: str = name) -> Any:
            asked.append(f"{_name} {place}")
            return _of(self, place, *rest)

        monkeypatch.setattr(client, name, count)
    with seals.stage(run, objects.CHUNK, 1):
        for _ in range(3):
            run.need(SplitData)
    assert asked == [
        "list runs/r/seals",
        "read runs/r/seals/000002.json",
        "read runs/r/data.json",
        "create runs/r/seals/000003.json",
    ]


def other_key(run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_key(Signer.new("p256"), folder, monkeypatch)


def no_key(run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (signing.KEY_FILE, signing.SIGNED_BY):
        monkeypatch.delenv(name)


@pytest.mark.parametrize("change", [other_key, no_key])
def test_what_another_key_or_none_has_sealed_does_not_count(
    change: Callable[..., None], signed: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change(signed, tmp_path, monkeypatch)
    with seals.stage(signed, objects.EVALUATE):
        signed.write(EvaluationResult(after={"loss": 0.0}))
    use_key(SIGNER, tmp_path, monkeypatch)
    with seals.stage(signed, objects.GATE), pytest.raises(SignatureError):
        signed.need(EvaluationResult)


def test_a_stage_without_the_private_key_does_not_begin(signed: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(signing.KEY_FILE)
    told = r"must be signed by .*KEY_FILE is not set.*compile the pipeline again"
    with pytest.raises(UserError, match=told), seals.stage(signed, objects.GATE):
        pass


@pytest.fixture
def old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """A signed run of a Baton without seals."""
    use_key(SIGNER, tmp_path, monkeypatch)
    run = Run(Storage(str(tmp_path / "store")), "r")
    run.write(SplitData(digest="d"))
    committed(run)
    return run


def committed(run: Run) -> None:
    store, folder = CheckpointStore(run), Path(run.storage.key("files"))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "weights").write_bytes(b"w")
    # A run's own sources: the recipe is asked for.
    run.put("recipe.json", {"recipe": {"name": "x"}, "created": ""})
    writer = store.open_writer(2)
    writer.send(str(folder))
    store.commit(2, writer, CheckpointMeta(digest="d"))


def test_an_older_signed_run_goes_on_and_says_so(old: Run) -> None:
    with seals.stage(old, objects.CHUNK, 1):
        assert old.need(SplitData).digest == "d"
    with seals.stage(old, objects.CHUNK, 2) as ledger:
        assert ledger.is_adopted
        assert old.need(SplitData).digest == "d"
    assert any("was begun by a Baton without seals" in warning.text for warning in old.warnings())


def test_a_run_that_only_seems_older_is_strict(old: Run) -> None:
    """A checkpoint that nobody signed makes no older run, nor does one that names a seal."""
    manifest = path(old, "checkpoints/step-00000002/manifest.json")
    document = json.loads(manifest.read_text())
    del document["meta"]["signature"]
    manifest.write_text(Manifest(**document).as_written())
    with seals.stage(old, objects.CHUNK, 1), pytest.raises(SignatureError, match=r"data\.json is refused"):
        old.need(SplitData)
    for number in seals.numbers(old):
        path(old, f"seals/{number:06d}.json").unlink()
    document["meta"]["seal"] = "0" * 64
    document["meta"]["signature"] = sign(Manifest(**document), SIGNER.public)
    manifest.write_text(Manifest(**document).as_written())
    with pytest.raises(SignatureError, match=r"its seals in .* are gone"), seals.stage(old, objects.CHUNK, 1):
        pass


def test_an_older_unsigned_run_goes_on_and_says_so(tmp_path: Path) -> None:
    run = Run(Storage(str(tmp_path)), "r")
    run.write(SplitData(digest="d"))
    assert "the run has no seals" in ChainCheck(run, None).verdict()["notes"][0]
    with seals.stage(run, objects.CHUNK, 1):
        assert run.need(SplitData).digest == "d"
    assert seals.numbers(run) == [1]


def test_a_run_of_which_nothing_is_signed_does_not_pass(signed: Run) -> None:
    for number in seals.numbers(signed):
        path(signed, f"seals/{number:06d}.json").unlink()
    assert ChainCheck(signed, SIGNER.public).verdict()["problems"] == [
        f"nothing of the run is signed by the key {SIGNER.public.name}"
    ]
    assert ChainCheck(signed, None).verdict()["ok"]


def test_files_of_a_killed_upload_are_told_and_no_problem(run: Run) -> None:
    for name in ("export/0123456789ab/model.safetensors", "strange/file"):
        run.storage.write(run.path(name), b"x")
    told = ChainCheck(run, SIGNER.public if signing.trusted_here() else None).verdict()
    assert told["problems"] == ["strange/file: no stage writes it"]
    assert "export/0123456789ab/model.safetensors" in told["notes"][0]


def test_unsigned_seals_that_disagree_are_found(tmp_path: Path) -> None:
    """Each seal alone is consistent: the next one names another."""
    run = begun(tmp_path)
    changed = statement(run, 1)
    changed["predicate"]["buildDefinition"]["internalParameters"]["state"]["data.json"][0] = "0" * 64
    changed["subject"][0]["digest"]["sha256"] = "0" * 64
    path(run, "seals/000001.json").write_bytes(seals.as_bytes(seals.enveloped(changed, signs=False)))
    problems = ChainCheck(run, None).verdict()["problems"]
    assert any("continues another seal 1" in problem for problem in problems)


def test_malice_without_a_key_is_not_found(tmp_path: Path) -> None:
    """The negative control: all seals written again, with an object, are one consistent chain."""
    run = begun(tmp_path)
    for number in seals.numbers(run):
        path(run, f"seals/{number:06d}.json").unlink()
    with seals.stage(run, objects.SPLIT):
        run.write(SplitData(digest="forged"))
        for name in ("tokens.json", "model.json"):
            run.put(name, run.require(name))
    assert ChainCheck(run, None).verdict()["ok"]


def test_messages_of_errors_end_in_a_remedy(signed: Run) -> None:
    signed.write(documents.LearningRate(learning_rate=1.0))
    path(signed, "data.json").unlink()
    path(signed, "seals/000001.json").unlink()
    told = []
    for read in (documents.LearningRate, SplitData):
        with seals.stage(signed, objects.GATE), pytest.raises(BatonError) as caught:
            signed.read(read)
        told.append(caught.value)
    assert all(error.remedy for error in told)
