"""Retention that dies half way, sleeps, or is not alone."""

import contextlib
import os
import re
import shutil
import threading
from collections.abc import Callable
from typing import Any

import pytest

from baton.checkpoint import retention
from baton.checkpoint.store import CheckpointStore
from baton.errors import DamagedError
from baton.recipe.run import Keep
from baton.runs.run import Run
from baton.store.protocol import ObjectInfo
from baton.store.storage import Storage

ONE = Keep(last=1, best=0)


class Died(BaseException):
    """What a killed process is to this one."""


class Mortal(Storage):
    """A store whose client dies once so many changes are made, and does nothing more."""

    def __init__(self, uri: str, *, changes: float) -> None:
        super().__init__(uri)
        self.changes = changes
        self.lock = threading.Lock()

    def _change(self, make: Callable[[], Any]) -> Any:
        with self.lock:
            if self.changes <= 0:
                raise Died
            self.changes -= 1
            return make()

    def write(self, path: str, data: bytes) -> None:
        self._change(lambda: super(Mortal, self).write(path, data))

    def remove(self, path: str, is_still_so: Callable[[], bool] = lambda: True) -> bool:
        return bool(self._change(lambda: super(Mortal, self).remove(path, is_still_so)))

    def tidy(self, path: str) -> None:
        self._change(lambda: super(Mortal, self).tidy(path))


def wear(made: Any) -> Any:
    """Give a run a whole old checkpoint, a damaged one, and as the newest one that was replaced after damage."""
    made.commit_all(10, 20, 30)
    made.damage(20)
    made.damage(30)
    made.commit(30)
    return made


LEFT = {
    *(f"step-000000{step}/{mark}" for step in (10, 20, 30) for mark in ("damaged", "removed")),
    *(f"step-00000030/{manifest}.json" for manifest in ("manifest", "manifest-2")),
}
"""What no attempt's files are, and may be there after the removal that another one began: the newest has two."""


@pytest.mark.slow
def test_a_removal_may_die_after_any_of_its_changes(store: str, checkpoints_at: Any):
    finished, changes = False, 0
    while not finished:
        made = wear(checkpoints_at(store, f"r-{changes}"))
        newest = made.store.read(30)
        mortal = CheckpointStore(Run(Mortal(store, changes=changes), made.store.run.name))
        try:
            retention.prune(mortal, ONE)
            finished = True
        except Died:
            assert changes < 60

        assert made.newest() == 30, changes
        assert made.store.read(30) == newest
        assert set(made.whole) <= {10, 30}
        retention.prune(made.store, ONE)
        assert made.whole == [30], changes
        left = [name for name in made.objects() if f"/{newest and newest.manifest.folder}/" not in name]
        assert {re.sub("-[0-9a-f]{12}$", "", name) for name in left} <= LEFT
        assert retention.prune(made.store, ONE) == []
        changes += 1
    assert changes > 12


def test_a_removal_that_died_hides_what_it_had_begun_to_take(store: str, checkpoints_at: Any):
    """Once marked, a checkpoint is absent rather than torn."""
    for changes in range(1, 8):
        made = checkpoints_at(store, f"r-{changes}")
        made.commit_all(10, 20)
        mortal = CheckpointStore(Run(Mortal(store, changes=changes), made.store.run.name))
        with contextlib.suppress(Died):
            retention.prune(mortal, ONE)

        assert [found.step for found in made.store.committed()] == [20]


def test_of_one_that_was_replaced_the_removal_takes_the_older_manifest_first(in_a_folder: Any):
    """Else a reader between the two would find the older one, which is damaged, where there is none any more."""
    made = in_a_folder
    made.commit(10)
    made.damage(10)
    made.commit_all(10, 20)
    mortal = CheckpointStore(Run(Mortal(made.storage.base_uri, changes=2), "r"))
    with pytest.raises(Died):
        retention.prune(mortal, ONE)

    assert {name for name in made.objects(10) if name.startswith("manifest")} == {"manifest-2.json"}
    assert made.store.read(10) is None


@pytest.mark.parametrize(("times", "passes"), [(4, True), (5, False)])
def test_work_that_others_disturb_is_repeated_four_times(times: int, passes: bool, in_a_folder: Any):
    in_a_folder.commit_all(10, 20)
    disturbed = iter([FileNotFoundError] * times)

    class Disturbed(Storage):
        def find(self, path: str) -> dict[str, ObjectInfo]:
            if error := next(disturbed, None):
                raise error
            return super().find(path)

    store = CheckpointStore(Run(Disturbed(in_a_folder.storage.base_uri), "r"))
    if passes:
        assert [removal.step for removal in retention.removals(store, ONE)] == [10]
    else:
        with pytest.raises(FileNotFoundError):
            retention.removals(store, ONE)


@pytest.mark.parametrize("repeat", range(3))
def test_many_at_once_take_the_same(repeat: int, store: str, checkpoints: Any):
    made = wear(checkpoints)
    made.commit_all(40, 50, 60)
    barrier, failures = threading.Barrier(4), []

    def work(keep: Keep) -> None:
        mine = CheckpointStore(Run(Storage(store), "r"))
        barrier.wait()
        try:
            retention.prune(mine, keep)
        except BaseException as error:
            failures.append(error)

    keeps = [ONE, ONE, Keep(last=2, best=0), Keep(last=1, best=1)]
    threads = [threading.Thread(target=work, args=(keep,)) for keep in keeps]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert failures == []
    assert made.whole == [60]
    retention.prune(made.store, ONE)
    assert [name for name in made.objects() if "removed-" not in name and "damaged-" not in name] == [
        name for name in made.objects() if name.startswith("step-00000060/")
    ]


def test_one_that_slept_over_its_list_takes_only_what_was_old_then(checkpoints: Any):
    checkpoints.commit_all(10, 20)
    slept = retention.removals(checkpoints.store, ONE)
    checkpoints.commit(30)
    retention.prune(checkpoints.store, ONE)

    for removal in slept:
        retention._take(checkpoints.store, removal)

    assert checkpoints.whole == [30]
    assert checkpoints.store.steps() == [30]


def _copy(checkpoints: Any, step: int, name: str) -> None:
    """Writes another manifest of a step, as whoever trains it again commits one."""
    prefix = checkpoints.store.prefix(step)
    checkpoints.storage.write(f"{prefix}/{name}", checkpoints.storage.read(f"{prefix}/manifest.json"))


def _mark(checkpoints: Any, step: int, word: str, folder: str | None = None) -> None:
    folder = folder or checkpoints.store.read(step).manifest.folder
    checkpoints.storage.write(f"{checkpoints.store.prefix(step)}/{word}-{folder}", b"")


def _again(checkpoints: Any, step: int) -> None:
    path = f"{checkpoints.store.prefix(step)}/manifest.json"
    os.utime(checkpoints.storage.key(path), (1.0, 1.0))


def _lose(checkpoints: Any, step: int, name: str = "weights.bin") -> None:
    checkpoint = checkpoints.store.read(step)
    checkpoints.storage.remove(checkpoint.manifest.path(checkpoints.store.prefix(step), name))


def _add(checkpoints: Any, step: int) -> None:
    checkpoint = checkpoints.store.read(step)
    checkpoints.storage.write(checkpoint.manifest.path(checkpoints.store.prefix(step), "late.bin"), b"1")


CHANGES: dict[str, tuple[Callable[[Any], Any], bool]] = {
    "nothing": (lambda made: None, True),
    "a newer one is committed": (lambda made: made.commit(30), True),
    "an upload beside the newest": (lambda made: made.send(20), True),
    "an upload beside the one to remove": (lambda made: made.send(10), True),
    "a mark of another attempt": (lambda made: _mark(made, 20, "damaged", "other"), True),
    "a file more in the newest": (lambda made: _add(made, 20), True),
    "the newest is found damaged": (lambda made: _mark(made, 20, "damaged"), False),
    "the newest is being removed": (lambda made: _mark(made, 20, "removed"), False),
    "the newest is committed again": (lambda made: _copy(made, 20, "manifest-2.json"), False),
    "the newest's manifest is another": (lambda made: _again(made, 20), False),
    "the newest loses a file": (lambda made: _lose(made, 20), False),
    "a file of the newest is cut off": (lambda made: made.truncate(20), False),
    "the newest is gone": (lambda made: shutil.rmtree(made.storage.key(made.store.prefix(20))), False),
    "the one to remove is committed again": (lambda made: _copy(made, 10, "manifest-2.json"), False),
    "its manifest is another": (lambda made: _again(made, 10), False),
    "it gets a file": (lambda made: _add(made, 10), False),
    "a file of it is written again": (lambda made: made.truncate(10), False),
    "a file of it is gone": (lambda made: _lose(made, 10), True),
    "another process has removed it": (lambda made: shutil.rmtree(made.storage.key(made.store.prefix(10))), True),
}
"""What happens between a listing of 10 and 20, of which 10 is to go, and the removal → whether 10 still goes."""


@pytest.mark.parametrize(("change", "goes"), CHANGES.values(), ids=CHANGES)
def test_a_removal_looks_again_before_it_takes_anything(
    change: Callable[[Any], Any], goes: bool, in_a_folder: Any
) -> None:
    made = in_a_folder
    made.commit_all(10, 20)
    (removal,) = retention.removals(made.store, ONE)
    folder = removal.attempts[0]
    change(made)
    before = set(made.objects(10))

    assert retention._take(made.store, removal) == goes

    left = set(made.objects(10))
    assert left == (
        {name for name in before if name.partition("/")[0] not in (folder, "manifest.json")} if goes else before
    )


def test_a_reader_in_the_middle_of_a_removal_is_told_so(checkpoints: Any):
    checkpoint = checkpoints.commit(10)
    checkpoints.commit(20)
    retention.prune(checkpoints.store, ONE)

    with pytest.raises(DamagedError, match="was removed or replaced while it was read"):
        checkpoints.store.fetch(checkpoint, str(checkpoints.folder / "back"))
    assert checkpoints.objects(10) == []  # nobody marked what is gone


def test_a_dry_run_takes_nothing(store: str, checkpoints: Any):
    made = wear(checkpoints)
    before = made.objects()
    unable = CheckpointStore(Run(Mortal(store, changes=0), "r"))

    listed = retention.removals(unable, ONE)

    assert made.objects() == before
    assert retention.summary(listed) == retention.summary(retention.prune(made.store, ONE))
    assert listed[0].step == 10
    assert listed[0].bytes > 100
