"""Which run comes from which."""

from __future__ import annotations

import json
from typing import Any

import pytest

import baton
from baton.errors import UserError
from baton.runs import lineage
from baton.runs.run import Run
from baton.store.manifest import FileEntry, Manifest
from baton.store.storage import Storage

PLAN = {"rows": 60, "steps_per_epoch": 60, "num_steps": 60, "targets": [60]}
FILES: dict[str, FileEntry] = {
    "weights": {"size": 1, "sha256": "50e721e49c013f00c62cf59f2163542a9d8df02464efeb615d31051b0fddc326"}
}


def _manifest(**meta: Any) -> bytes:
    return Manifest(kind="checkpoint", folder="a", files=FILES, meta=meta).as_written().encode()


@pytest.fixture
def storage(tmp_path: Any) -> Storage:
    """A store with a run, its forks, a phase that goes on, a retraining, a trial, and an orphan."""
    store = Storage(str(tmp_path / "store"))

    def add(name: str, hour: int, base: str | None = None, **documents: Any) -> None:
        run = Run(store, name)
        recipe = {"name": "made", "model": {"base": base}}
        run.put("recipe.json", {"recipe": recipe, "created": f"2026-11-21T{hour:02d}:00:00.000Z", "name": name})
        for document, content in documents.items():
            run.put(f"{document}.json", content)

    def forked(parent: str, step: int, *, warm: bool = True, **changed: Any) -> dict[str, Any]:
        return {"parent": store.uri(f"runs/{parent}"), "step": step, "digest": "d", "warm": warm, "changed": changed}

    add("first", 1, plan=PLAN, export={})
    add("child", 2, fork=forked("first", 40, **{"training.learning_rate": [1e-4, 5e-5]}), plan=PLAN)
    store.write("runs/child/checkpoints/step-00000050/manifest.json", _manifest())
    add("grandchild", 3, fork=forked("child", 50))
    add("cold", 4, fork=forked("first", 60, warm=False))
    add("second-phase", 5, base=store.uri("runs/first/export/abc"))
    add("next", 6, evaluation={"gate": {"passed": False}}, report={})
    add("trial", 7, trial={"sweep": "s", "id": "t000", "values": {"seed": 1}})
    add("orphan", 8, fork=forked("deleted", 10))
    for number, run in enumerate(("first", "next"), 1):
        store.write(f"models/made/accepted/{number:06d}.json", json.dumps({"run": run, "model_uri": "m"}).encode())
    return store


def test_each_run_has_its_parent_and_how_it_came_from_it(storage: Storage) -> None:
    found = lineage.family(storage)
    assert {name: (member.parent, member.words) for name, member in found.items()} == {
        "first": (None, ""),
        "child": ("first", "fork at step 40; learning_rate 5e-05"),
        "grandchild": ("child", "fork at step 50"),
        "cold": ("first", "cold fork of step 60"),
        "second-phase": ("first", "starts from its model"),
        "next": ("first", "took its place"),
        "trial": (None, "trial t000 of sweep s"),
        "orphan": ("deleted", "fork at step 10"),
        "deleted": (None, ""),
    }
    assert found["first"].children == ["child", "cold", "second-phase", "next"]
    states = {name: member.state for name, member in found.items()}
    assert states == {
        "first": "succeeded", "child": "interrupted", "grandchild": "new", "cold": "new", "second-phase": "new",
        "next": "rejected", "trial": "new", "orphan": "new", "deleted": "gone",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("objects", "expected"),
    [
        pytest.param({"60": {"a/weights": b"w"}}, (0, "interrupted"), id="an upload that was never committed"),
        pytest.param(
            {"40": {"manifest.json": {}}, "60": {"a/weights": b"w"}}, (40, "interrupted"),
            id="an upload above a checkpoint",
        ),
        pytest.param({"60": {"manifest.json": {}}}, (60, "interrupted"), id="the last step"),
        pytest.param(
            {"60": {"manifest.json": {}, "removed-a": b""}}, (0, "interrupted"), id="one that is being removed"
        ),
        pytest.param(
            {"40": {"manifest.json": {}}, "60": {"manifest.json": {}, "damaged-a": b""}},
            (40, "interrupted"), id="one that was found damaged",
        ),
        pytest.param({"60": {"manifest.json": b"{"}}, (0, "interrupted"), id="half a manifest"),
        pytest.param(
            {"40": {"manifest.json": {"finished": True}}}, (40, "interrupted"), id="early stopping has ended it"
        ),
        pytest.param({"100000000": {"manifest.json": {}}}, (10**8, "interrupted"), id="nine digits"),
    ],
)  # fmt: skip
def test_what_is_committed_alone_counts(
    objects: dict[str, dict[str, Any]], expected: tuple[int, str], tmp_path: Any
) -> None:
    store = Storage(str(tmp_path / "store"))
    run = Run(store, "r")
    run.put(
        "recipe.json", {"recipe": {"name": "made", "model": {}}, "created": "2026-11-21T00:00:00.000Z", "name": "r"}
    )
    run.put("plan.json", PLAN)
    for step, entries in objects.items():
        for name, data in entries.items():
            if isinstance(data, dict):
                data = _manifest(run="r", step=int(step), digest="d", **data)
            store.write(run.path(f"checkpoints/step-{int(step):08d}/{name}"), data)
    member = lineage.family(store)["r"]
    assert (member.step, member.state) == expected
    # Elsewhere too: the newest that can be opened is the newest that is committed.
    is_damaged = any(
        name.startswith("damaged") or data == b"{" for row in objects.values() for name, data in row.items()
    )
    if not is_damaged and expected[0]:
        assert baton.checkpoints(run.uri).open().step == expected[0]
    elif not is_damaged:
        with pytest.raises(UserError, match=r"has no checkpoint\.$"):
            baton.checkpoints(run.uri).open()


def test_a_walk_comes_by_each_run_once_below_its_parent(storage: Storage) -> None:
    walked = [(depth, member.name) for depth, member, _ in lineage.walk(lineage.family(storage))]
    assert walked == [
        (0, "deleted"), (1, "orphan"),
        (0, "first"), (1, "child"), (2, "grandchild"), (1, "cold"), (1, "second-phase"), (1, "next"),
        (0, "trial"),
    ]  # fmt: skip


def test_relatives_are_those_with_a_common_ancestor(storage: Storage) -> None:
    members = lineage.family(storage)
    everybody = {"first", "child", "grandchild", "cold", "second-phase", "next"}
    assert set(lineage.relatives(members, "grandchild")) == everybody
    assert set(lineage.relatives(members, "trial")) == {"trial"}
    assert set(lineage.related_runs(Run(storage, "cold"))) == everybody


def test_in_a_large_store_a_run_knows_its_ancestors_alone(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lineage, "MOST", 2)
    found = lineage.related_runs(Run(storage, "grandchild"))
    assert [member.name for _, member, _ in lineage.walk(found)] == ["first", "child", "grandchild"]


def test_a_folder_that_no_run_of_ours_is_stands_in_nobodys_way(storage: Storage) -> None:
    storage.write("runs/foreign/recipe.json", b'{"model": "x"}')
    storage.write("runs/torn/recipe.json", b'{"recipe": {"na')
    storage.write("runs/empty/notes.txt", b"")
    found = lineage.family(storage)
    assert not {"foreign", "torn", "empty"} & set(found)
    assert found["child"].parent == "first"


@pytest.mark.s3
def test_a_bucket_shows_the_same_family(s3_store: str) -> None:
    store = Storage(s3_store)
    for name, base in (("first", None), ("second", f"{s3_store}/runs/first/export/abc")):
        recipe = {"name": "made", "model": {"base": base}}
        Run(store, name).put("recipe.json", {"recipe": recipe, "created": "2026-11-21", "name": name})
        store.write(f"runs/{name}/checkpoints/step-00000040/manifest.json", _manifest())
    found = lineage.family(store)
    assert [(member.name, member.parent, member.step) for member in found.values()] == [
        ("first", None, 40),
        ("second", "first", 40),
    ]
