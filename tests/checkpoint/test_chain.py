"""A finished run in small, with its seals and its export: each change of its files is told by the file's name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from baton import signing
from baton.checkpoint import chain, seals
from baton.checkpoint.chain import CHAIN_FILE, SIGNATURE_FILE, ChainCheck, follows, verify_export
from baton.checkpoint.store import CheckpointMeta, CheckpointStore
from baton.errors import DamagedError, UserError
from baton.runs import objects
from baton.runs.documents import SplitData
from baton.runs.run import Run
from baton.signing import SIGNATURE, PublicKey, SignatureError, Signer
from baton.store import bundle
from baton.store.manifest import FileEntry, Manifest, mark_damaged, read_manifest
from baton.store.storage import Storage
from tests.checkpoint.test_seals import SIGNER, path, statement, use_key

SPLIT, TOKENS, EXPORT = "data/d/split", "data/d/tokens", "export"
SKIP = "skips/step-00000003.json"
DOCUMENTS: dict[str, dict[str, dict[str, Any]]] = {
    objects.SPLIT: {
        "recipe.json": {"recipe": {"name": "x"}, "created": ""},
        "data.json": {"digest": "d", "rows": 3},
        "split.json": {"train": 2, "eval": 1, "test": 0},
        "code.json": {"prefix": "data/c/code"},
    },
    objects.TOKENIZE: {
        "tokens.json": {"prefix": TOKENS, "train": 2},
        "model.json": {"base_sha256": "b"},
        "plan.json": {"rows": 2, "steps_per_epoch": 6, "num_steps": 6, "targets": [4, 6]},
    },
}
NOTES = ("records/split.json", "restarts/one.json", "progress.json")


def here() -> PublicKey | None:
    """The key of the run that a test is about."""
    return SIGNER.public if signing.trusted_here() else None


def folder_with(folder: Path, **files: str) -> str:
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)
    return str(folder)


def beside(run: Run) -> Path:
    return Path(run.storage.key("runs")).parents[1]


def publish(run: Run, prefix: str, folder: str, kind: str) -> Manifest:
    return bundle.publish(run.storage, prefix, folder, kind=kind, meta={})[0]


def commit(run: Run, *steps: int) -> None:
    store = CheckpointStore(run, here())
    for step in steps:
        writer = store.open_writer(step)
        writer.send(folder_with(beside(run) / f"step-{step}", weights=f"{step}"))
        store.commit(step, writer, CheckpointMeta(digest=f"state of {step}"))


def tokens(run: Run, folder: Path) -> None:
    """Tokens with a part, as their writers claim it."""
    writer = bundle.BundleWriter(run.storage, TOKENS, kind="tokens")
    writer.folder = "files-1"
    writer.send(folder_with(folder, **{"train-0-0123abcd__arrow": "tokens", "state__json": "{}"}))
    place = f"{TOKENS}/files-1/parts/train-0.json"
    part: dict[str, Any] = {"files": dict(writer.files), "rows": 2}
    signature = seals.attestation(place, seals.parsed_part(part))
    run.storage.write(place, json.dumps(part | ({SIGNATURE: signature} if signature else {})).encode())
    signature = seals.attestation(TOKENS, writer.manifest({}))
    writer.commit({SIGNATURE: signature} if signature else {})


def finished(folder: Path) -> Run:
    run = Run(Storage(str(folder / "store")), "r")
    for name in NOTES:
        run.put(name, {"note": name})
    with seals.stage(run, objects.SPLIT):
        publish(run, SPLIT, folder_with(folder / "split", train__jsonl="rows", eval__jsonl="row"), "split")
        for name, document in DOCUMENTS[objects.SPLIT].items():
            run.put(name, document)
    with seals.stage(run, objects.TOKENIZE):
        tokens(run, folder / "tokens")
        for name, document in DOCUMENTS[objects.TOKENIZE].items():
            run.put(name, document)
    with seals.stage(run, objects.CHUNK, 1):
        run.need(SplitData)
        run.put(SKIP, {"step": 3, "chunk": 1, "reason": "loss", "message": "m"})  # sealed at once
        commit(run, 2, 4)
    with seals.stage(run, objects.CHUNK, 2):
        commit(run, 6)
    with seals.stage(run, objects.GATE) as ledger:
        run.put("evaluation.json", {"after": {"loss": 1.0}})
        ledger.facts = {"gate": {"passed": True}}
    with seals.stage(run, objects.EXPORT):
        model = folder_with(folder / "model", config__json="{}", model__safetensors="weights")
        chain.write_export(run, model, here(), step=6, digest="state of 6")
        publish(run, run.path(EXPORT), model, "model")
        run.put("export.json", {"uri": "u"})
    with seals.stage(run, objects.REPORT) as ledger:
        run.storage.write(run.path("report.html"), b"page")
        ledger.read_notes()
    return run


@pytest.fixture(scope="module")
def templates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {}
    for kind in ("unsigned", "signed"):
        made[kind] = tmp_path_factory.mktemp(kind)
        with pytest.MonkeyPatch.context() as patch:
            if kind == "signed":
                use_key(SIGNER, made[kind], patch)
            finished(made[kind])
    return made


@pytest.fixture(params=["unsigned", "signed"])
def run(
    request: pytest.FixtureRequest, templates: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Run:
    """A finished run of a test's own."""
    if request.param == "signed":
        use_key(SIGNER, tmp_path, monkeypatch)
    return Run(Storage(str(shutil.copytree(templates[request.param] / "store", tmp_path / "store"))), "r")


def verdict(run: Run, expected: str | None = None) -> chain.ChainReport:
    return ChainCheck(run, here()).verdict(expected)


STAGES = [
    (objects.SPLIT, ["code.json", "data.json", SPLIT, "recipe.json", "split.json"]),
    (objects.TOKENIZE, [TOKENS, "model.json", "plan.json", "tokens.json"]),
    ("train-chunk-001", [SKIP]),
    ("train-chunk-001", ["checkpoints/step-00000004"]),
    ("train-chunk-002", ["checkpoints/step-00000006"]),
    (objects.GATE, ["evaluation.json"]),
    (objects.EXPORT, [EXPORT, "export.json"]),
    (objects.REPORT, ["report.html"]),
]
LAST = len(STAGES)


def test_an_unchanged_run(run: Run) -> None:
    told = verdict(run)
    assert [(row["stage"], row["written"]) for row in told["seals"]] == [
        (stage, sorted(names)) for stage, names in STAGES
    ]
    assert [row["number"] for row in told["seals"]] == list(range(1, LAST + 1))
    digests = [seals.read_seal(run, number, here()).digest for number in range(1, LAST + 1)]
    assert [row["digest"] for row in told["seals"]] == digests
    written = {name for _, names in STAGES for name in names} - {"checkpoints/step-00000004"}
    assert told == {
        "ok": True,
        "seals": told["seals"],
        "head": digests[-1],
        "objects": len(written) + len(NOTES),
        "problems": [],
        "notes": [],
    }
    assert all(verdict(run, digest) == told for digest in digests)


def test_a_statement_in_full(run: Run) -> None:
    """The form that verifiers of in-toto and SLSA read, and later Batons."""
    second, release = statement(run, 2), statement(run, 2)["predicate"]["runDetails"]["builder"]["id"]
    state = {name: values[0] for name, values in _inner(second)["state"].items()}
    bundles = {name: read_manifest(run.storage, name) for name in (SPLIT, TOKENS)}
    written = sorted(STAGES[1][1])
    assert second == {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": name, "digest": {"sha256": state[name]}} for name in written],
        "predicateType": "https://slsa.dev/provenance/v1",
        "predicate": {
            "buildDefinition": {
                "buildType": signing.BUILD_TYPE,
                "externalParameters": {"run": "r", "stage": "tokenize"},
                "internalParameters": {
                    "number": 2,
                    "previous": seals.read_seal(run, 1, here()).digest,
                    "adopted": False,
                    "stages": {"data-split": 1, "tokenize": 2},
                    "state": {
                        name: [
                            seals.sha256(each.as_written().encode() if each else path(run, name).read_bytes()),
                            1 if name in STAGES[0][1] else 2,
                            seals.content_digest(each) if each else "",
                            each.folder if each else "",
                        ]
                        for name in sorted(STAGES[0][1] + written)
                        for each in [bundles.get(name)]
                    },
                    "facts": {},
                    "contents": {name: path(run, name).read_text() for name in DOCUMENTS[objects.TOKENIZE]},
                },
                "resolvedDependencies": [],
            },
            "runDetails": {"builder": {"id": release}},
        },
    }
    assert release.startswith(f"{signing.BUILD_TYPE}?baton=")
    read = statement(run, 3)["predicate"]["buildDefinition"]["resolvedDependencies"]
    assert {"name": "data.json", "digest": {"sha256": seals.sha256(path(run, "data.json").read_bytes())}} in read


def _inner(document: dict[str, Any]) -> dict[str, Any]:
    inner: dict[str, Any] = document["predicate"]["buildDefinition"]["internalParameters"]
    return inner


def file_of(run: Run, prefix: str, name: str = "") -> Path:
    """A file of a bundle, its manifest without a name."""
    place = prefix if prefix.startswith("data/") else run.path(prefix)
    manifest = read_manifest(run.storage, place)
    assert manifest
    return Path(run.storage.key(manifest.path(place, name) if name else f"{place}/manifest.json"))


def write(name: str, text: str = "{}") -> Callable[[Run], object]:
    return lambda run: run.storage.write(run.path(name), text.encode())


def remove(name: str) -> Callable[[Run], object]:
    return lambda run: path(run, name).unlink()


def write_file(prefix: str, name: str, text: str) -> Callable[[Run], object]:
    return lambda run: file_of(run, prefix, name).write_text(text)


def remove_file(prefix: str, name: str = "") -> Callable[[Run], object]:
    return lambda run: file_of(run, prefix, name).unlink()


def in_another_form(prefix: str) -> Callable[[Run], object]:
    """The same manifest without its line breaks."""

    def change(run: Run) -> None:
        file = file_of(run, prefix)
        file.write_text(json.dumps(json.loads(file.read_text()), sort_keys=True))

    return change


def with_meta(prefix: str, **meta: str) -> Callable[[Run], object]:
    def change(run: Run) -> None:
        file = file_of(run, prefix)
        document = json.loads(file.read_text())
        file.write_text(Manifest(**{**document, "meta": {**document["meta"], **meta}}).as_written())

    return change


def committed_again(prefix: str, **files: str) -> Callable[[Run], object]:
    def change(run: Run) -> None:
        place = prefix if prefix.startswith("data/") else run.path(prefix)
        shutil.rmtree(run.storage.key(place))
        publish(run, place, folder_with(beside(run) / "again", **files), place.split("/")[-1])

    return change


def all_of(*changes: Callable[[Run], object]) -> Callable[[Run], object]:
    return lambda run: [change(run) for change in changes]


DIFFERS, GONE = "it differs from the run's seal", "it is gone"
MANIFEST, FORM = (
    "its manifest differs from the run's seal",
    "its manifest is not in the form in which it was written",
)
NEWEST, OLDER = "checkpoints/step-00000006", "checkpoints/step-00000004"
ROWS = {"train__jsonl": "rows", "eval__jsonl": "row"}
# Change → the problems that are told, beginnings where a path or a digest follows.
CHANGES: dict[str, tuple[Callable[[Run], object], list[str]]] = {
    "a document": (write("evaluation.json"), [f"evaluation.json: {DIFFERS}"]),
    "a document that is gone": (remove("plan.json"), [f"plan.json: {GONE}"]),
    "a page": (write("report.html", "other"), [f"report.html: {DIFFERS}"]),
    "a page that is gone": (remove("report.html"), [f"report.html: {GONE}"]),
    "a record": (write("records/split.json"), [f"records/split.json: {DIFFERS}"]),
    "a record that is gone": (remove("records/split.json"), [f"records/split.json: {GONE}"]),
    "a restart that is gone": (remove("restarts/one.json"), [f"restarts/one.json: {GONE}"]),
    "another note": (write("progress.json"), [f"progress.json: {DIFFERS}"]),
    "another note that is gone": (remove("progress.json"), []),
    "a planted document": (write("lr_find.json"), ["lr_find.json: no seal has it"]),
    "a planted page": (write("data-quality.html"), ["data-quality.html: no seal has it"]),
    "a later note": (write("warnings/one.json"), []),
    "a strange file": (write("strange/file"), ["strange/file: no stage writes it"]),
    "a file of a killed upload": (write("exports/oci/0123456789ab/index.json"), []),
    "a temporary file": (write(".baton-1234"), []),
    "a file of the export": (
        write_file(EXPORT, "model.safetensors", "Weights"),
        ["export: model.safetensors: SHA-256 is "],
    ),
    "a cut file of the export": (
        write_file(EXPORT, "model.safetensors", "weight"),
        ["export: model.safetensors: 6 bytes, committed were 7"],
    ),
    "a lost file of the export": (remove_file(EXPORT, "config.json"), ["export: config.json: missing"]),
    "a file more in the export": (
        write_file(EXPORT, "pytorch_model.bin", "x"),
        ["export: pytorch_model.bin: not in the manifest"],
    ),
    "the export's manifest": (with_meta(EXPORT, run="other"), [f"export: {MANIFEST}"]),
    "the export's manifest in another form": (in_another_form(EXPORT), [f"export: {FORM}"]),
    "the export's manifest that is gone": (remove_file(EXPORT), [f"export: {GONE}"]),
    "an export made again": (
        committed_again(EXPORT, config__json="{}", model__safetensors="weights"),
        [f"export: {MANIFEST}"],
    ),
    "an export marked as damaged": (
        lambda run: mark_damaged(run.storage, run.path(EXPORT), _manifest(run, run.path(EXPORT))),
        ["export: "],
    ),
    "rows": (write_file(SPLIT, "train.jsonl", "Rows"), [f"{SPLIT}: train.jsonl: SHA-256 is "]),
    "the same rows, made again": (committed_again(SPLIT, **ROWS), []),
    "other rows, made again": (committed_again(SPLIT, **ROWS | {"eval__jsonl": "Row"}), [f"{SPLIT}: {MANIFEST}"]),
    "rows with other facts": (with_meta(SPLIT, run="other"), [f"{SPLIT}: {MANIFEST}"]),
    "a file more beside the tokens": (
        write_file(TOKENS, "more.arrow", "x"),
        [f"{TOKENS}: more.arrow: not in the manifest"],
    ),
    "the newest checkpoint's manifest": (with_meta(NEWEST, digest="other"), [f"{NEWEST}: {MANIFEST}"]),
    "the newest checkpoint's manifest in another form": (in_another_form(NEWEST), [f"{NEWEST}: {FORM}"]),
    "the newest checkpoint that is gone": (remove_file(NEWEST), [f"{NEWEST}: it is gone, and nothing newer is there"]),
    "both checkpoints that are gone": (
        all_of(remove_file(NEWEST), remove_file(OLDER)),
        [f"{NEWEST}: it is gone, and nothing newer is there"],
    ),
    "a checkpoint marked as damaged": (
        lambda run: mark_damaged(run.storage, run.path(NEWEST), _manifest(run, run.path(NEWEST))),
        [f"{NEWEST}: "],
    ),
    "an older checkpoint's manifest": (with_meta(OLDER, digest="other"), [f"{OLDER}: {MANIFEST}"]),
    "an older checkpoint's manifest in another form": (in_another_form(OLDER), [f"{OLDER}: {FORM}"]),
    "an older checkpoint that retention took": (remove_file(OLDER), []),
    "the newest checkpoint below a newer one": (all_of(lambda run: commit(run, 8), remove_file(NEWEST)), []),
    "a seal that is gone": (remove("seals/000002.json"), ["seal 2 is gone"]),
    "two changes": (
        all_of(write("evaluation.json"), remove("plan.json")),
        [f"evaluation.json: {DIFFERS}", f"plan.json: {GONE}"],
    ),
}


def is_told(line: str, expected: str) -> bool:
    """Tells whether a problem is the expected one, whose end may be left open after a blank."""
    return line.startswith(expected) if expected.endswith(" ") else line == expected


def _manifest(run: Run, prefix: str) -> Manifest:
    manifest = read_manifest(run.storage, prefix)
    assert manifest
    return manifest


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_told_and_nothing_else(change: str, run: Run) -> None:
    before = verdict(run)["objects"]
    made, problems = CHANGES[change]
    made(run)
    told = verdict(run)
    assert len(told["problems"]) == len(problems), told["problems"]
    assert all(map(is_told, told["problems"], problems)), told["problems"]
    assert told["ok"] is not bool(problems)
    is_counted = [not line.startswith(("lr_find", "data-quality", "strange", "seal", OLDER)) for line in problems]
    assert told["objects"] == before - sum(is_counted) - (change == "another note that is gone")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("parts/train-0.json", '{"files": {}, "rows": 3}'),
        ("parts/more.json", '{"files": {}, "rows": 3}'),
        ("parts/more.json", '{"rows": 3}'),
        ("parts/more.json", "[]"),
    ],
)
def test_a_part_of_tokens_counts_as_it_was_signed(name: str, text: str, run: Run) -> None:
    """Without a key any is taken: parts are of no seal."""
    write_file(TOKENS, name, text)(run)
    assert verdict(run)["problems"] == ([f"{TOKENS}: {name}: not as it was signed"] if here() else [])


def test_tokens_committed_again_count_as_they_were_signed(run: Run) -> None:
    """Without a key the same content of any writer is taken."""
    with_meta(TOKENS, run="other")(run)
    assert verdict(run)["problems"] == ([f"{TOKENS}: {MANIFEST}"] if here() else [])


def test_notes_that_no_seal_has(run: Run) -> None:
    for number in range(6):
        write(f"warnings/{number}.json")(run)
    told = verdict(run)
    assert told["problems"] == []
    assert told["notes"] == [
        f"in no seal yet: {', '.join(f'warnings/{number}.json' for number in range(5))} and 1 more"
    ]
    path(run, "warnings/5.json").unlink()
    assert verdict(run)["notes"] == [f"in no seal yet: {', '.join(f'warnings/{number}.json' for number in range(5))}"]


def test_an_object_that_a_stage_of_a_run_under_way_has_written(run: Run) -> None:
    """Without the seal of the report the run is not finished: what no seal has may come into the next one."""
    head = verdict(run)["head"]
    remove(f"seals/{LAST:06d}.json")(run)
    told = verdict(run)
    assert told["problems"] == []
    assert told["notes"] == ["in no seal yet: progress.json, records/split.json, report.html, restarts/one.json"]
    assert verdict(run, head)["problems"] == [
        f"the chain has no seal {head}: the run was rolled back, or its seals are gone"
    ]


def test_a_run_without_seals(run: Run) -> None:
    shutil.rmtree(path(run, "seals"))
    told = verdict(run)
    assert (told["seals"], told["head"], told["objects"]) == ([], "", 0)
    if here():
        assert told["problems"] == ["the run's checkpoints name seals, and all seals are gone"]
    else:
        assert told["problems"] == []
        assert told["notes"] == ["the run has no seals: an older Baton began it, and changes are not found here"]


def test_all_seals_broken(run: Run) -> None:
    for number in seals.numbers(run):
        path(run, f"seals/{number:06d}.json").write_text("{}")
    told = verdict(run)
    assert all(map(is_told, told["problems"], [f"seal {number}: " for number in range(1, LAST + 1)]))
    assert (len(told["problems"]), told["notes"]) == (LAST, [])


def test_a_broken_seal_is_told_by_its_number(run: Run) -> None:
    (path(run, "seals/000003.json")).write_text("{}")
    (problem,) = verdict(run)["problems"]
    assert problem.startswith("seal 3: ")


# How a seal is changed → what it is said not to be.
BROKEN: dict[str, Callable[[dict[str, Any]], object]] = {
    "it is seal 5 of run 'r'": lambda document: _inner(document).update(number=5),
    "it is seal 2 of run 'other'": lambda document: document["predicate"]["buildDefinition"][
        "externalParameters"
    ].update(run="other"),
    "'number'": lambda document: _inner(document).pop("number"),
    "'state'": lambda document: _inner(document).pop("state"),
    "'stages'": lambda document: _inner(document).pop("stages"),
    "'contents'": lambda document: _inner(document).pop("contents"),
    "'facts'": lambda document: _inner(document).pop("facts"),
    "'previous'": lambda document: _inner(document).pop("previous"),
    "'adopted'": lambda document: _inner(document).pop("adopted"),
    "'subject'": lambda document: document.pop("subject"),
    "'resolvedDependencies'": lambda document: document["predicate"]["buildDefinition"].pop("resolvedDependencies"),
}


def changed_seal(run: Run, number: int, change: Callable[[dict[str, Any]], object]) -> bytes:
    """Returns a seal's bytes after a change, signed where the run is."""
    document = statement(run, number)
    change(document)
    return seals.as_bytes(seals.enveloped(document, signs=here() is not None))


@pytest.mark.parametrize("told", BROKEN)
def test_a_seal_that_is_none(told: str, run: Run) -> None:
    data = changed_seal(run, 2, BROKEN[told])
    with pytest.raises(DamagedError) as caught:
        seals.Seal.parse(data, "runs/r/seals/000002.json", "r", here())
    assert caught.value.message == f"runs/r/seals/000002.json is not the seal that was written: {told}."


def test_a_seal_in_another_form(run: Run) -> None:
    data = path(run, "seals/000002.json").read_bytes()
    parse = partial(seals.Seal.parse, run="r", public=here())
    assert parse(data, "000002.json").number == 2
    for other, where in ((data + b"\n", "000002.json"), (data, "elsewhere.json"), (b"{}", "000002.json")):
        with pytest.raises((DamagedError, SignatureError)):
            parse(other, where)


def test_the_digest_of_an_unsigned_seal_is_compared(tmp_path: Path, templates: dict[str, Path]) -> None:
    bundle_ = json.loads((templates["unsigned"] / "store/runs/r/seals/000002.json").read_text())
    bundle_["verificationMaterial"]["sha256"] = "0" * 64
    with pytest.raises(DamagedError, match="its bytes have changed"):
        seals.Seal.parse(seals.as_bytes(bundle_), "000002.json", "r", None)


def state_of(document: dict[str, Any], name: str, digest: str) -> None:
    _inner(document)["state"][name][0] = digest


# A change of seal 2 by whoever has the key → how it fails to follow seal 1.
NOT_FOLLOWING: dict[str, tuple[Callable[[dict[str, Any]], object], list[str]]] = {
    "none": (lambda document: None, []),
    "another previous one": (
        lambda document: _inner(document).update(previous="0" * 64),
        ["seal 2 continues another seal 1 than this store's"],
    ),
    "another object of seal 1": (
        lambda document: state_of(document, "data.json", "0" * 64),
        ["seal 2 states what no stage wrote"],
    ),
    "another object of its own": (
        lambda document: state_of(document, "tokens.json", "0" * 64),
        ["seal 2 states what no stage wrote"],
    ),
    "an object of neither": (
        lambda document: _inner(document)["state"].update({"lr_find.json": ["0" * 64, 2, "", ""]}),
        ["seal 2 states what no stage wrote"],
    ),
    "an object that is left out": (lambda document: _inner(document)["state"].pop("data.json"), []),
    "both": (
        lambda document: [_inner(document).update(previous=""), state_of(document, "data.json", "0" * 64)],
        ["seal 2 continues another seal 1 than this store's", "seal 2 states what no stage wrote"],
    ),
}


@pytest.mark.parametrize("change", NOT_FOLLOWING)
def test_seals_that_do_not_follow_each_other(change: str, run: Run) -> None:
    made, problems = NOT_FOLLOWING[change]
    first = seals.read_seal(run, 1, here())
    second = seals.Seal.parse(changed_seal(run, 2, made), "000002.json", "r", here())
    assert list(follows(second, first)) == problems
    assert list(follows(first, None)) == list(follows(second, None)) == []
    forged = changed_seal(run, 1, lambda document: _inner(document).update(previous="0" * 64))
    head = seals.Seal.parse(forged, "000001.json", "r", here())
    assert list(follows(head, None)) == ["seal 1 names one before it"]
    none = {"lr_find.json": ["0" * 64, 0, "", ""]}
    forged = changed_seal(run, 1, lambda document: _inner(document)["state"].update(none))
    head = seals.Seal.parse(forged, "000001.json", "r", here())
    assert list(follows(head, None)) == ["seal 1 states what no stage wrote"]


@pytest.fixture
def exported(run: Run, tmp_path: Path) -> Path:
    """A copy of the export's folder, and nothing else of its run."""
    place = run.path(EXPORT)
    return Path(shutil.copytree(run.storage.key(_manifest(run, place).path(place)), tmp_path / "exported"))


ORIGIN = {
    "rows": {"train": 2, "eval": 1, "test": 0, "digest": "d"},
    "base": "b",
    "code": "c",
    "plan": [4, 6],
    "skips": [SKIP],
    "gate": {"passed": True},
}


def test_an_unchanged_export(run: Run, exported: Path) -> None:
    told = verify_export(str(exported), here())
    rows = verdict(run)["seals"][:-2]  # up to the gate
    assert told == {
        "ok": True,
        "folder": str(exported),
        "is_signed": here() is not None,
        "run": "r",
        "origin": {
            **ORIGIN,
            "tokens": seals.content_digest(_manifest(run, TOKENS)),
            "recipe": seals.sha256(path(run, "recipe.json").read_bytes()),
            "chunks": {
                "train-chunk-001": {"00000004": _step_digest(run, 4)},
                "train-chunk-002": {"00000006": _step_digest(run, 6)},
            },
            "step": 6 if here() else None,
            "state": "state of 6" if here() else None,
        },
        "seals": rows,
        "problems": [],
        "notes": [] if here() else ["without a key: damage to the chain is found, and malice is not"],
    }
    assert (exported / SIGNATURE_FILE).exists() is (here() is not None)


def _step_digest(run: Run, step: int) -> str:
    return seals.sha256(_manifest(run, run.path(f"{seals.STEP}{step:08d}")).as_written().encode())


def chained(change: Callable[[list[Any]], object]) -> Callable[[Path], object]:
    def made(folder: Path) -> None:
        document = json.loads((folder / CHAIN_FILE).read_text())
        change(document["seals"])
        (folder / CHAIN_FILE).write_text(json.dumps(document))

    return made


CHANGED, OTHER_CHAIN = "it has changed since it was signed", "the signature names another chain than the export has"
# Change → problems told with a key, and without one.
EXPORTS: dict[str, tuple[Callable[[Path], object], list[str], list[str]]] = {
    "weights": (
        lambda folder: (folder / "model.safetensors").write_text("Weights"),
        [f"model.safetensors: {CHANGED}"],
        [],
    ),
    "a file more": (
        lambda folder: folder_with(folder / "more", x="x"),
        ["more/x: it was not signed"],
        [],
    ),
    "a file less": (lambda folder: (folder / "config.json").unlink(), ["config.json: it is gone"], []),
    "a shorter chain": (chained(lambda each: each.pop()), [f"{CHAIN_FILE}: {CHANGED}", OTHER_CHAIN], []),
    "a chain without its third": (
        chained(lambda each: each.pop(2)),
        [f"seal {number}: " for number in (3, 4, 5)] + [f"{CHAIN_FILE}: {CHANGED}", OTHER_CHAIN],
        [f"seal {number}: " for number in (3, 4, 5)],
    ),
    "no seals": (
        chained(lambda each: each.clear()),
        [f"{CHAIN_FILE}: {CHANGED}", "the chain has no seal"],
        ["the chain has no seal"],
    ),
    "no signature": (lambda folder: (folder / SIGNATURE_FILE).unlink(missing_ok=True), [f"{SIGNATURE_FILE}: "], []),
    "an empty signature": (lambda folder: (folder / SIGNATURE_FILE).write_text("{}"), [f"{SIGNATURE_FILE}: "], []),
    "a signature that is none": (lambda folder: (folder / SIGNATURE_FILE).write_text("x"), [f"{SIGNATURE_FILE}: "], []),
}


@pytest.mark.parametrize("change", EXPORTS)
def test_a_change_of_an_export_is_told_by_its_folder_alone(change: str, run: Run, exported: Path) -> None:
    made, with_key, without = EXPORTS[change]
    made(exported)
    told = verify_export(str(exported), here())
    problems = with_key if here() else without
    assert len(told["problems"]) == len(problems), told["problems"]
    assert all(map(is_told, told["problems"], problems)), told["problems"]
    assert told["ok"] is not bool(problems)
    assert told["is_signed"] is (here() is not None and "signature" not in change)


def test_a_folder_without_a_chain_is_no_export(run: Run, exported: Path) -> None:
    assert chain.require_folder(str(exported)) == str(exported)
    (exported / CHAIN_FILE).unlink()
    assert not chain.is_export(str(exported))
    with pytest.raises(UserError, match=f"holds no {CHAIN_FILE}"):
        chain.require_folder(str(exported))


# Change of a local copy, or of the store → whether the model is refused.
COPIES: dict[str, tuple[Callable[[Run, Path], object], bool]] = {
    "none": (lambda run, folder: None, False),
    "weights": (lambda run, folder: (folder / "model.safetensors").write_text("Weights"), True),
    "a file more": (lambda run, folder: (folder / "pytorch_model.bin").write_text("x"), True),
    "a hidden file more": (lambda run, folder: (folder / ".lock").write_text("x"), False),
    "a file less": (lambda run, folder: (folder / "config.json").unlink(), False),
    "the manifest in the store": (lambda run, folder: with_meta(EXPORT, run="other")(run), True),
    "no manifest in the store": (lambda run, folder: remove_file(EXPORT)(run), True),
    "no seals": (lambda run, folder: shutil.rmtree(path(run, "seals")), True),
    "no seal of the export": (
        lambda run, folder: [remove(f"seals/{LAST:06d}.json")(run), remove(f"seals/{LAST - 1:06d}.json")(run)],
        True,
    ),
}


@pytest.mark.parametrize("change", COPIES)
def test_a_model_of_another_run_is_as_that_has_sealed_it(change: str, run: Run, exported: Path) -> None:
    made, is_refused = COPIES[change]
    uri = run.storage.uri(_manifest(run, run.path(EXPORT)).path(run.path(EXPORT)))
    made(run, exported)
    chain.require_sealed_model(run.storage, uri, str(exported), None)
    chain.require_sealed_model(run.storage, "elsewhere/model", str(exported), here())
    if is_refused and here():
        with pytest.raises(SignatureError, match="is refused: it is not as run 'r' sealed it with the key") as caught:
            chain.require_sealed_model(run.storage, uri, str(exported), here())
        assert "Run 'r' again" in str(caught.value.remedy)
    else:
        chain.require_sealed_model(run.storage, uri, str(exported), here())


def entries(*names: str) -> dict[str, FileEntry]:
    return {name: {"size": 1, "sha256": f"{number:064d}"} for number, name in enumerate(names)}


@pytest.mark.parametrize(
    ("kind", "names", "is_same"),
    [
        ("tokens", ("train-0-89abcdef.arrow", "train/state.json"), True),  # by another writer
        ("tokens", ("train-1-01234567.arrow", "train/state.json"), False),
        ("tokens", ("train-0-01234567.arrow",), True),  # a side's state names its writers
        ("tokens", ("train-0-01234567.arrow", "train/state.json", "more.arrow"), False),
        ("split", ("train-0-01234567.arrow", "train/state.json"), False),
    ],
)
def test_the_same_content_of_another_writer(kind: str, names: tuple[str, ...], is_same: bool) -> None:
    ours = Manifest(kind="tokens", folder="a", files=entries("train-0-01234567.arrow", "train/state.json"))
    other = Manifest(kind=kind, folder="b", files=entries(*names))
    assert (seals.content_digest(ours) == seals.content_digest(other)) is is_same


def test_the_state_of_other_bundles_is_content() -> None:
    first, second = (
        Manifest(kind="split", folder="a", files={"x/state.json": {"size": 1, "sha256": digest * 64}})
        for digest in "12"
    )
    assert seals.content_digest(first) != seals.content_digest(second)


def test_a_bundle_is_attested_for_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Manifest(kind="tokens", folder="a", files=entries("x"))
    assert seals.attestation("data/d/tokens", plain) is None
    assert seals.is_attested("data/d/tokens", plain)
    use_key(SIGNER, tmp_path, monkeypatch)
    signature = seals.attestation("data/d/tokens", plain)
    signed = Manifest(kind="tokens", folder="a", files=entries("x"), meta={SIGNATURE: signature})
    assert seals.is_attested("data/d/tokens", signed)
    assert not seals.is_attested("data/d/tokens", plain)
    assert not seals.is_attested("data/e/tokens", signed)
    assert not seals.is_attested("data/d/tokens", signed, Signer.new("p256").public)
    monkeypatch.delenv(signing.SIGNED_BY)
    assert seals.is_attested("data/e/tokens", signed), "without a key anything is taken"
    assert not seals.is_attested("data/e/tokens", signed, SIGNER.public)


def test_bundles_that_a_run_shares(run: Run) -> None:
    ledger = seals.Ledger(run, objects.REPORT, objects.REPORT, appends=False)
    assert ledger.head
    sealed = ledger.shared()
    assert sealed == {name: ledger.head.state[name] for name in (TOKENS, SPLIT)}
    ledger.head = None  # as of a run without seals
    assert ledger.shared() == {name: entry._replace(seal=0) for name, entry in sealed.items()}


def test_stages_and_their_names(run: Run) -> None:
    other = Run(run.storage, "other")
    assert seals.ledger_of(run) is None
    with seals.stage(run, objects.CHUNK, 7) as outer:
        assert (outer.stage, outer.kind, outer.appends) == ("train-chunk-007", "train-chunk", True)
        with seals.stage(run, objects.EVALUATE) as inner:
            assert inner is outer
        assert seals.ledger_of(run) is outer
        assert seals.ledger_of(other) is None
        with seals.stage(other, objects.EVALUATE) as beside:
            assert (beside.stage, seals.ledger_of(run), seals.ledger_of(other)) == ("evaluate", outer, beside)
    assert seals.ledger_of(run) is None
    assert seals.numbers(run)[-1] == LAST + 1
    assert seals.read_seal(run, LAST + 1, here()).stage == "train-chunk-007"


def test_a_function_that_is_a_stage(run: Run) -> None:
    seen: list[tuple[str | None, int]] = []

    def work(given: Run | str, index: object = None, *, by_name: int = 0) -> int:
        ledger = seals.ledger_of(run)
        seen.append((ledger.stage if ledger else None, by_name))
        return 3

    assert seals.sealed(objects.CHUNK)(work)(run, 12) == 3
    assert seals.sealed(objects.GATE)(work)(run.uri, "text", by_name=4) == 3
    before = seals.numbers(run)
    assert seals.sealed(objects.EVALUATE, appends=False)(work)(run) == 3
    assert seen == [("train-chunk-012", 0), ("gate", 4), ("evaluate", 0)]
    assert seals.numbers(run) == before
