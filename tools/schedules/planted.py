"""Faults planted in the real code, one at least for each invariant: what the schedules must find."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

from baton.checkpoint import retention
from baton.checkpoint.restore import Restorer
from baton.checkpoint.store import CheckpointStore
from baton.errors import DamagedError
from baton.runs.documents import Promoted
from baton.runs.run import Run
from baton.store import bundle
from baton.store import storage as lease
from baton.store.bundle import MAX_COPY_DEPTH, BundleWriter, CopySource, CopySources, origin
from baton.store.storage import Storage
from tools.schedules import explore
from tools.schedules.explore import Result
from tools.schedules.scenarios import SCENARIOS


@dataclass(frozen=True)
class Planted:
    """A fault.

    Attributes:
        name: What is wrong.
        invariant: Number of the one that it breaks.
        scenario: Where that shows.
        where: Object and name that are replaced.
        fault: What stands there instead; called with what was there.
    """

    name: str
    invariant: tuple[int, ...]
    scenario: str
    where: tuple[Any, str]
    fault: Callable[[Any], Any]

    @property
    def soon(self) -> bool:
        """Whether a few schedules do: no process has to be stopped at one place, for a time of its own."""
        return not self.name.startswith("lease")

    @contextmanager
    def switched_on(self) -> Iterator[None]:
        """Puts it in place."""
        owner, name = self.where
        with mock.patch.object(owner, name, self.fault(getattr(owner, name))):
            yield


def _manifest_first(real: Any) -> Any:
    def send(self: BundleWriter, local_dir: str) -> None:
        names = ("trainer_state.json", "weights.bin")
        for name in names:
            path = f"{local_dir}/{name}"
            with open(path, "rb") as file:
                data = file.read()
            self.files[name] = {"size": len(data), "sha256": bundle.file_sha256(path)}
        self.commit({"run": "r", "step": int(self.prefix[-8:]), "digest": f"state {int(self.prefix[-8:])}"})
        self.files.clear()
        real(self, local_dir)

    return send


def _plain_put(real: Any) -> Any:
    def create(self: Storage, path: str, data: bytes) -> bool:
        if self.exists(path):
            return False
        self.write(path, data)
        return True

    return create


def _common_name(real: Any) -> Any:
    def begin(self: BundleWriter, storage: Any, prefix: str, **more: Any) -> None:
        real(self, storage, prefix, **more)
        self.folder = "000000000all"

    return begin


def _files_first(real: Any) -> Any:
    def take(store: CheckpointStore, removal: Any) -> bool:
        for path in removal.files:
            store.storage.remove(path)
        return bool(real(store, removal))

    return take


def _unmarked(real: Any) -> Any:
    def take(store: CheckpointStore, removal: Any) -> bool:
        removal.forget = True
        return bool(real(store, removal))

    return take


def _no_bytes(real: Any) -> Any:
    def problem(
        storage: Any, prefix: str, manifest: Any, name: str, present: Any, local_path: str | None
    ) -> str | None:
        try:
            if local_path:
                storage.download(manifest.path(prefix, name), local_path, manifest.files[name]["size"])
        except FileNotFoundError:
            return f"{name}: missing"
        return None

    return problem


def _not_its_own(real: Any) -> Any:
    def commit(self: BundleWriter, meta: Any) -> Any:
        manifest, _ = real(self, meta)
        return manifest, False

    return commit


def _beside(real: Any) -> Any:
    return lambda storage, prefix: (None, real(storage, prefix)[1])


def _newest_alone(real: Any) -> Any:
    def staying(store: Any, whole: Any, keep: Any, targets: Any) -> set[int]:
        return set(sorted(whole)[-keep.last :])

    return staying


def _oldest(real: Any) -> Any:
    def staying(store: Any, whole: Any, keep: Any, targets: Any) -> set[int]:
        return set(sorted(whole)[: keep.last])

    return staying


def _forgetful_wait(real: Any) -> Any:
    def acquire(client: Any, path: str, name: str, owner: bytes, runtime: Any) -> float | None:
        for _ in range(3000):
            if client.size(path) is not None:
                return None
            if not lease._content(client, name):
                client.write(name, owner)
                runtime.sleep(lease.LEASE_SETTLE_S)
                if lease._content(client, name) == owner:
                    return float(runtime.monotonic()) + lease.LEASE_S / 4
            runtime.sleep(lease.LEASE_SETTLE_S)
        return None

    return acquire


def _unsettled(real: Any) -> Any:
    def acquire(client: Any, path: str, name: str, owner: bytes, runtime: Any) -> float | None:
        for _ in range(300):
            if client.size(path) is not None:
                return None
            if not lease._content(client, name):
                client.write(name, owner)
                return float(runtime.monotonic()) + lease.LEASE_S / 4
            runtime.sleep(lease.LEASE_SETTLE_S)
        return None

    return acquire


def _hasty(real: Any) -> Any:
    def acquire(client: Any, path: str, name: str, owner: bytes, runtime: Any) -> Any:
        hasty = SimpleNamespace(
            monotonic=runtime.monotonic,
            uniform=runtime.uniform,
            sleep=lambda seconds: runtime.sleep(min(seconds, lease.LEASE_SETTLE_S)),
        )
        return real(client, path, name, owner, hasty)

    return acquire


def _never_expires(real: Any) -> Any:
    return lambda *args: None if real(*args) is None else float("inf")


def _listing_says(real: Any) -> Any:
    def torn(storage: Any, prefix: str, manifest: Any) -> list[str]:
        present = storage.find(manifest.path(prefix))
        return [f"{name}: missing" for name in manifest.files if name not in present]

    return torn


def _fatal(real: Any) -> Any:
    def skip(self: Restorer, step: int, error: DamagedError) -> None:
        raise error

    return skip


def _promoted_alone(real: Any) -> Any:
    def verified(self: Run) -> int:
        promoted = self.read(Promoted)
        return promoted.newest.step if promoted else 0

    return verified


def _from_the_newest(real: Any) -> Any:
    def sources(self: CopySources, name: str, size: int) -> list[CopySource]:
        return [
            CopySource(manifest.path(prefix, name), manifest.files[name]["sha256"], origin(manifest, name))
            for prefix, manifest in self.bundles
            if name in manifest.files and manifest.files[name]["size"] == size
        ]

    return sources


def _size_alone(real: Any) -> Any:
    def copied(self: BundleWriter, name: str, local_path: str, sources: list[CopySource]) -> bool:
        with mock.patch.object(bundle, "file_sha256", return_value=sources[0].sha256):
            return bool(real(self, name, local_path, sources))

    return copied


def _no_other_way(real: Any) -> Any:
    def copied(self: BundleWriter, name: str, local_path: str, sources: list[CopySource]) -> bool:
        if not real(self, name, local_path, sources):
            raise FileNotFoundError(name)
        return True

    return copied


def _whatever_was_damaged(real: Any) -> Any:
    def ancestors(self: CheckpointStore, step: int) -> CopySources:
        found = [(self.prefix(entry.step), entry.manifest) for entry in self.committed() if entry.step < step]
        return CopySources(found[:MAX_COPY_DEPTH])

    return ancestors


def _copies_first(real: Any) -> Any:
    def send(self: BundleWriter, local_dir: str) -> None:
        each = self.storage.runtime.each
        later: list[Any] = []

        def reordered(work: Any, items: Any) -> Any:
            if not later:
                later.append((work, items))
                return []
            each(work, items)
            return each(*later[0])

        with mock.patch.object(self.storage.runtime, "each", reordered):
            real(self, local_dir)

    return send


def _nothing(real: Any) -> Any:
    return real * 0


def _always(value: object) -> Callable[[Any], Any]:
    return lambda real: lambda *args, **more: value


PLANTED = [
    Planted("plain put in place of put-if-absent", (1,), "two writers", (Storage, "create"), _plain_put),
    Planted("a second manifest beside a good one", (1,), "two writers", (bundle, "newest_usable"), _beside),
    Planted("bytes are not compared at the restore", (2,), "damage and repair", (bundle, "_problem"), _no_bytes),
    Planted("manifest before the files", (3,), "two writers", (BundleWriter, "send"), _manifest_first),
    Planted("files go before their manifest", (3,), "two removals and a reader", (retention, "_take"), _files_first),
    Planted("the oldest stay", (4,), "two removals and a reader", (retention, "_staying"), _oldest),
    Planted("what was read back does not stay", (4,), "stages at once", (retention, "_staying"), _newest_alone),
    Planted("a removal trusts its list", (4,), "a cut file and a removal", (retention, "_is_still_so"), _always(True)),
    Planted("promoted.json alone", (4,), "proof out of turn", (Run, "verified_step"), _promoted_alone),
    Planted("what a listing lacks is damage", (4,), "listings that lag", (bundle, "torn_files"), _listing_says),
    Planted("all upload under one name", (5,), "a zombie", (BundleWriter, "__init__"), _common_name),
    Planted("uploads aged by the local clock", (5,), "clocks and long pauses", (retention, "CLOCKS_DIFFER"), _nothing),
    Planted("no second look at the restore", (6,), "stages at once", (Restorer, "_is_newer_there"), _always(False)),
    Planted("a skipped checkpoint is fatal", (6,), "damage and repair", (Restorer, "_skip"), _fatal),
    Planted("a commit does not know its own", (7,), "two writers, faults", (BundleWriter, "commit"), _not_its_own),
    Planted("nothing is ever abandoned", (8,), "a zombie", (retention, "_is_abandoned"), _always(False)),
    Planted(
        "copies of the newest", (9,), "copies of what changed after all", (CopySources, "sources"), _from_the_newest
    ),
    Planted("a size is trusted", (2,), "copies of what changed after all", (BundleWriter, "_copied"), _size_alone),
    Planted(
        "a source that is gone ends it",
        (6,),
        "a copy and the removal of its source",
        (BundleWriter, "_copied"),
        _no_other_way,
    ),
    Planted(
        "damage is copied again",
        (6,),
        "links, damage of what they share",
        (CheckpointStore, "ancestors"),
        _whatever_was_damaged,
    ),
    Planted(
        "what is left shares its bytes",
        (9,),
        "links, kept with holes",
        (retention, "_independent_copy"),
        _always(set()),
    ),
    Planted("links before what is sent", (5,), "links and long pauses", (BundleWriter, "send"), _copies_first),
    Planted("lease: no wait for its expiry", (6,), "lease, three writers", (lease, "_acquire_lease"), _forgetful_wait),
    Planted("lease: its holder ignores its expiry", (1,), "lease", (lease, "_acquire_lease"), _never_expires),
    Planted("lease: a late name is read back at once", (1,), "lease", (lease, "_acquire_lease"), _hasty),
    Planted("lease: nobody waits for the others", (1,), "lease", (lease, "_acquire_lease"), _unsettled),
]


def search(planted: Planted, most: int) -> int | None:
    """Returns after how many schedules a fault is found, None where it is not."""
    scenario = next(scenario for scenario in SCENARIOS if scenario.name == planted.scenario)

    def is_hit(result: Result) -> bool:
        return any(number in planted.invariant for _, broken in result.broken for number, _ in broken)

    explore.before(scenario)  # by code that is whole
    with planted.switched_on(), explore.nothing_remembered():
        result = explore.explore(scenario, range(most), until=is_hit)
    return result.schedules if is_hit(result) else None
