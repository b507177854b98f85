"""Retention: what must stay stays, and what nobody needs goes."""

import os
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest

from baton.checkpoint import retention
from baton.checkpoint.store import CheckpointMeta
from baton.recipe.run import Keep
from baton.runs.documents import Skip
from baton.store.bundle import BundleWriter
from baton.store.manifest import read_manifest
from baton.store.storage import Storage

ONE = Keep(last=1, best=0)


def prune(checkpoints: Any, keep: Keep = ONE, targets: Sequence[int] = ()) -> list[int]:
    """Apply retention and return the steps it took something from."""
    return [removal.step for removal in retention.prune(checkpoints.store, keep, targets=targets)]


LOSSES: dict[int, float | None] = {10: 3.0, 20: 1.0, 30: 2.0, 40: 2.5}

KEPT: dict[str, tuple[Keep, list[int]]] = {
    "last": (Keep(last=2, best=0), [30, 40]),
    "one": (ONE, [40]),
    "more than there are": (Keep(last=9, best=0), [10, 20, 30, 40]),
    "best": (Keep(last=1, best=1), [20, 40]),
    "best two": (Keep(last=1, best=2), [20, 30, 40]),
    "every": (Keep(last=1, best=0, every=20), [20, 40]),
    "every, of none": (Keep(last=1, best=0, every=25), [40]),
    "all three": (Keep(last=2, best=1, every=10_000), [20, 30, 40]),
}


@pytest.mark.parametrize(("keep", "staying"), KEPT.values(), ids=KEPT)
def test_what_is_to_be_kept_stays(keep: Keep, staying: list[int], checkpoints: Any):
    checkpoints.commit_all(10, 20, 30, 40, losses=LOSSES)

    taken = prune(checkpoints, keep)

    assert checkpoints.whole == staying
    assert taken == [step for step in LOSSES if step not in staying]
    assert checkpoints.store.steps() == staying
    assert len(checkpoints.objects()) == 3 * len(staying)
    assert prune(checkpoints, keep) == []


def test_which_steps_are_skipped_is_known_without_their_checkpoints(checkpoints: Any):
    checkpoints.commit_all(10, 20, 30)
    run = checkpoints.store.run
    run.note_skip(Skip(step=15, chunk=1, reason="nan", message="step 15 has no loss."))

    assert prune(checkpoints) == [10, 20]

    assert [skip.step for skip in run.skips()] == [15]


def test_a_loss_that_is_no_number_is_not_the_best(checkpoints: Any):
    checkpoints.commit_all(10, 20, 30, losses={10: float("nan"), 20: 1.0, 30: float("inf")})

    prune(checkpoints, Keep(last=1, best=1))

    assert checkpoints.whole == [20, 30]


def test_without_evaluation_the_newest_stay(checkpoints: Any):
    checkpoints.commit_all(10, 20, losses={10: None})

    prune(checkpoints, Keep(last=1, best=1))

    assert checkpoints.whole == [20]


def prove(checkpoints: Any, number: int, step: int) -> None:
    """Leave what the checkpoint stage leaves behind a chunk."""
    checkpoints.store.run.put(f"proof/chunk-{number:03d}.json", {"step": step, "digest": f"state of {step}", "uri": ""})
    checkpoints.store.run.put("promoted.json", {"newest": {"step": step}})


def test_a_chunks_end_stays_until_it_has_been_read_back(checkpoints: Any):
    checkpoints.commit_all(5, 10, 15, 20, 25)
    targets = [10, 20, 30]

    assert prune(checkpoints, targets=targets) == [5, 15]
    assert checkpoints.whole == [10, 20, 25]

    prove(checkpoints, 1, 10)
    assert prune(checkpoints, targets=targets) == []  # the last one read back stays
    prove(checkpoints, 2, 20)
    assert prune(checkpoints, targets=targets) == [10]
    assert checkpoints.whole == [20, 25]


def test_the_one_a_running_chunk_came_from_stays(checkpoints: Any):
    checkpoints.commit_all(7, 9, 12, 14)

    taken = retention.prune(checkpoints.store, ONE, targets=[20], in_use=7)

    assert [removal.step for removal in taken] == [9, 12]
    assert checkpoints.whole == [7, 14]


def test_the_last_target_always_stays(checkpoints: Any):
    checkpoints.commit_all(10, 20)
    for number, step in enumerate((10, 20), 1):
        prove(checkpoints, number, step)

    assert prune(checkpoints, targets=[10, 20]) == [10]
    checkpoints.commit(30)  # as a run does whose recipe asks for more
    prove(checkpoints, 3, 30)

    assert prune(checkpoints, targets=[10, 20]) == []
    assert checkpoints.whole == [20, 30]


def test_of_targets_that_were_read_back_only_the_last_stays(checkpoints: Any):
    checkpoints.commit_all(10, 20, 30, 40)
    for number, step in enumerate((10, 20, 30), 1):
        prove(checkpoints, number, step)

    assert prune(checkpoints, targets=[10, 20, 30]) == [10, 20]
    assert checkpoints.whole == [30, 40]


@pytest.mark.parametrize("harm", ["truncate", "damage"])
def test_the_newest_that_is_whole_never_goes(harm: str, checkpoints: Any):
    checkpoints.commit_all(10, 20, 30, 40)
    for step in (30, 40):
        getattr(checkpoints, harm)(step)

    assert prune(checkpoints) == [10]

    assert checkpoints.whole == [20]
    assert checkpoints.newest() == 20
    assert prune(checkpoints) == []


def test_where_none_is_whole_nothing_goes(checkpoints: Any):
    checkpoints.commit_all(10, 20)
    for step in (10, 20):
        checkpoints.truncate(step)
    before = checkpoints.objects()

    assert retention.removals(checkpoints.store, ONE) == []
    assert prune(checkpoints) == []
    assert checkpoints.objects() == before


def test_a_manifest_that_is_none_does_not_count_as_whole(checkpoints: Any):
    checkpoints.commit_all(10, 20)
    checkpoints.storage.write(f"{checkpoints.store.prefix(20)}/manifest.json", b"{")

    assert prune(checkpoints) == []
    assert checkpoints.newest() == 10


@pytest.mark.parametrize("harm", ["truncate", "damage"])
def test_damaged_ones_below_the_newest_are_no_longer_seen(harm: str, checkpoints: Any):
    checkpoints.commit_all(10, 20, 30)
    getattr(checkpoints, harm)(20)

    prune(checkpoints, Keep(last=2, best=0))

    assert [found.step for found in checkpoints.store.committed()] == [30, 10]
    assert [name for name in checkpoints.objects(20) if name.startswith("manifest")] == []


def test_a_damaged_one_that_was_replaced_goes_and_its_successor_stays(checkpoints: Any):
    first = checkpoints.commit(10)
    checkpoints.damage(10)
    second = checkpoints.commit(10)

    prune(checkpoints)

    assert checkpoints.store.read(10) == second
    assert checkpoints.whole == [10]
    assert [name for name in checkpoints.objects() if f"/{first.manifest.folder}/" in name] == []


def make_old(storage: Storage, writer: BundleWriter, age: timedelta) -> None:
    """Set the files of an upload back in time."""
    for name in writer.files:
        at = time.time() - age.total_seconds()
        os.utime(storage.key(f"{writer.prefix}/{writer.folder}/{name}"), (at, at))


def files_of(checkpoints: Any, writer: BundleWriter) -> list[str]:
    """List what is there of an upload."""
    return [name for name in checkpoints.objects() if f"/{writer.folder}/" in name]


def test_abandoned_uploads_go_and_fresh_ones_stay(in_a_folder: Any):
    checkpoints = in_a_folder
    checkpoints.commit(20)
    ages = (timedelta(hours=2), timedelta(minutes=50))
    uploads = {(step, age): checkpoints.send(step) for step in (10, 20, 30) for age in ages}
    for (_, age), upload in uploads.items():
        make_old(checkpoints.storage, upload, age)

    prune(checkpoints)

    gone = [where for where, upload in uploads.items() if files_of(checkpoints, upload) == []]
    assert gone == [(10, ages[0]), (20, ages[0])]  # above the newest whole one nobody takes anything
    assert checkpoints.whole == [20]


AGES: dict[str, tuple[timedelta, timedelta, bool]] = {
    "an hour": (timedelta(hours=1), timedelta(minutes=1), False),
    "more than an hour": (timedelta(hours=1, seconds=1), timedelta(minutes=1), True),
    "none, and all is a day old": (timedelta(0), timedelta(hours=24), False),
    "none, and all is older": (timedelta(0), timedelta(hours=26), True),
}
"""Age of an upload as another process commits, how long ago that was, and whether the upload goes."""


@pytest.mark.parametrize(("age", "since", "goes"), AGES.values(), ids=AGES)
def test_an_upload_is_abandoned_after_an_hour_by_the_stores_clock(
    age: timedelta, since: timedelta, goes: bool, in_a_folder: Any
):
    upload = in_a_folder.send(10)
    in_a_folder.commit(20)
    newest = int(time.time()) - since.total_seconds()
    for name in in_a_folder.objects():
        at = newest - age.total_seconds() * (upload.folder in name)
        os.utime(in_a_folder.storage.key(in_a_folder.store.run.path(f"checkpoints/{name}")), (at, at))

    assert prune(in_a_folder) == [10] * goes
    assert (files_of(in_a_folder, upload) == []) == goes


def test_an_upload_with_one_fresh_file_is_not_abandoned(in_a_folder: Any):
    upload = in_a_folder.send(10)
    make_old(in_a_folder.storage, upload, timedelta(hours=2))
    in_a_folder.storage.write(f"{upload.prefix}/{upload.folder}/more.bin", b"1")
    in_a_folder.commit(20)

    assert prune(in_a_folder) == []
    assert len(files_of(in_a_folder, upload)) == 3


def test_who_commits_after_its_upload_was_taken_is_not_read(in_a_folder: Any):
    checkpoints = in_a_folder
    late = checkpoints.send(10)
    make_old(checkpoints.storage, late, timedelta(hours=2))
    checkpoints.commit(20)
    prune(checkpoints)

    checkpoints.store.commit(10, late, CheckpointMeta(digest="late"))

    assert checkpoints.store.read(10) is None
    assert [found.step for found in checkpoints.store.committed()] == [20]
    assert checkpoints.commit(10).manifest.folder != late.folder  # the place is free for one that is whole
    assert checkpoints.whole == [10, 20]
    prune(checkpoints)
    assert checkpoints.whole == [20]
    assert [name for name in checkpoints.objects(10) if not name.startswith("removed-")] == []


def test_who_commits_again_what_was_taken_is_passed_over(checkpoints: Any):
    """A writer whose answer was lost tries again, and meanwhile others have gone on and cleaned up."""
    late = checkpoints.send(10)
    checkpoints.store.commit(10, late, CheckpointMeta(digest="late"))
    checkpoints.commit(20)
    prune(checkpoints)

    checkpoints.store.commit(10, late, CheckpointMeta(digest="late"))

    assert checkpoints.whole == [20]
    torn = checkpoints.store.read(10)
    assert torn is not None
    assert not checkpoints.store.is_whole(torn)
    assert prune(checkpoints) == [10]
    assert checkpoints.objects(10) == []


def test_another_upload_under_a_step_that_goes_can_still_be_committed(checkpoints: Any):
    checkpoints.commit(10)
    late = checkpoints.send(10)
    checkpoints.commit(20)
    prune(checkpoints)

    committed, ours = checkpoints.store.commit(10, late, CheckpointMeta(digest="late"))

    assert ours
    assert checkpoints.store.read(10) == committed
    assert checkpoints.whole == [10, 20]


def test_what_is_none_of_a_checkpoint_is_left_alone(checkpoints: Any):
    strangers = ["checkpoints/notes.txt", "checkpoints/step-1/x", "checkpoints/step-00000010/notes.txt", "plan.json"]
    checkpoints.commit_all(10, 20)
    for name in strangers:
        checkpoints.storage.write(checkpoints.store.run.path(name), b"mine")

    prune(checkpoints)

    assert [checkpoints.storage.read(checkpoints.store.run.path(name)) for name in strangers] == [b"mine"] * 4
    assert read_manifest(checkpoints.storage, checkpoints.store.prefix(10)) is None


def test_each_removal_has_its_reason(in_a_folder: Any):
    """The page of a run shows it."""
    made = in_a_folder
    abandoned = made.send(5)
    make_old(made.storage, abandoned, timedelta(hours=2))
    made.commit_all(1, 2, 3)
    made.truncate(2)
    removals = retention.prune(made.store, ONE)
    assert [(each.step, each.reason) for each in retention.summary(removals)] == [
        (1, "not among those to keep"),
        (2, "not whole"),
    ]
    made.commit(6)
    removals = retention.prune(made.store, ONE)
    assert [(each.step, each.reason) for each in retention.summary(removals)] == [
        (3, "not among those to keep"),
        (5, "never committed, or not whole"),
    ]


@pytest.mark.s3
def test_where_nothing_goes_no_right_to_remove_is_asked_for(checkpoints_at: Any, faulty_s3: Any):
    checkpoints = checkpoints_at(faulty_s3.store)
    checkpoints.commit(10)
    asked = faulty_s3.proxy.status(403, "AccessDenied", methods="DELETE")
    assert retention.prune(checkpoints.store, ONE) == []
    assert asked.hits == 0


@pytest.mark.s3
def test_where_nothing_may_be_removed_all_stays_usable(checkpoints_at: Any, faulty_s3: Any, caplog: Any):
    checkpoints = checkpoints_at(faulty_s3.store)
    checkpoints.commit_all(10, 20, 30)
    before = checkpoints.objects()
    denied = faulty_s3.proxy.status(403, "AccessDenied", methods="DELETE")

    assert prune(checkpoints) == prune(checkpoints) == []

    assert checkpoints.objects() == before  # no mark among them, below which nobody would read
    assert checkpoints.store.steps() == checkpoints.whole == [10, 20, 30]
    assert denied.hits == 1
    assert [record.message for record in caplog.records if "s3:DeleteObject" in record.message]
    denied.remove()
    later = type(checkpoints)(Storage(faulty_s3.store), checkpoints.folder)  # as another process sees it
    assert prune(later) == [10, 20]
