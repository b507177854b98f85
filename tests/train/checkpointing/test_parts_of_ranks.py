"""The part of each rank and machine in a checkpoint: who finds room, who sends, whose files the manifest names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerCallback

from baton.checkpoint.staging import PendingCheckpoint, Staging
from baton.checkpoint.store import CheckpointMeta, CheckpointStore
from baton.recipe.run import Preemption
from baton.train.checkpointer import Checkpointer
from baton.train.distributed import Ranks, Watchdog
from baton.train.preemption import PreemptionWatch
from tests.support import tiny
from tests.train.resuming import Chunks

SETTINGS = {"optimizer": "sgd", "max_steps": 6, "learning_rate": 0.01}
THEIRS = {"of-another-machine.pt": {"size": 3, "sha256": "0" * 64}}


@pytest.fixture
def make(tiny_base: str, tmp_path: Path) -> Callable[..., Chunks]:
    def made(name: str, **chunks: Any) -> Chunks:
        given = tiny.recipe(tiny_base, training=SETTINGS, evaluation={"samples": 0}, chunks=chunks)
        return Chunks(given, tmp_path, name)

    return made


class Told(Ranks):
    """A rank that is told what the others have done, in place of asking them."""

    def gather(self, value: Any) -> list[Any]:
        """Returns what this one has sent, and what another machine has."""
        is_files = isinstance(value, dict) and all(isinstance(entry, dict) for entry in value.values())
        return [value, THEIRS] if is_files and not self.node else [value]

    def on_first(self, work: Any) -> Any:
        """Returns the first one's attempt."""
        return work() if self.is_first else "attempt-of-the-first"

    def on_node_leaders(self, work: Any) -> Any:
        """Does this machine's."""
        return work()


@pytest.fixture
def part(make: Callable[..., Chunks]) -> Iterator[Callable[[Ranks], Checkpointer]]:
    """Returns what makes the part of a rank that is not the first."""
    chunks = make("parts")
    with PreemptionWatch(Preemption()) as watch, Staging() as staging:

        def made(ranks: Ranks) -> Checkpointer:
            context = chunks.context(1, ranks=ranks)
            return Checkpointer(context, staging, watch, Watchdog())

        yield made


def test_one_rank_of_a_machine_finds_room(part: Any) -> None:
    leading, following = (part(Told(rank=rank, size=2, local_rank=rank)) for rank in (0, 1))
    assert next(leading.stage(3, 10)).folder
    assert list(following.stage(3, 10)) == []


@pytest.mark.parametrize(
    ("ranks", "sends"),
    [
        (Told(rank=2, size=4, local_rank=0, node=1, nodes=2), True),
        (Told(rank=3, size=4, local_rank=1, node=1, nodes=2), False),
        (Told(rank=1, size=4, local_rank=1, node=0, nodes=2), False),
        (Told(rank=1, size=2, local_rank=1, node=0, nodes=1), False),
    ],
)
def test_one_rank_of_each_other_machine_sends_into_the_firsts_attempt(
    ranks: Ranks, sends: bool, part: Any, tmp_path: Path
) -> None:
    staged = tmp_path / "staged"
    staged.mkdir()
    (staged / "shard").write_bytes(b"123")
    checkpointer = part(ranks)
    checkpointer.save(PendingCheckpoint(3, str(staged)), CheckpointMeta(digest="s"))
    store: CheckpointStore = checkpointer.context.store
    assert list(store.storage.find(store.prefix(3))) == (["attempt-of-the-first/shard"] if sends else [])


def test_a_machine_without_a_part_sends_nothing(part: Any, tmp_path: Path) -> None:
    checkpointer = part(Told(rank=2, size=4, local_rank=0, node=1, nodes=2))
    checkpointer.save(PendingCheckpoint(3, str(tmp_path / "was never written")), CheckpointMeta(digest="s"))
    assert checkpointer.context.store.steps() == []


def test_the_manifest_names_what_other_machines_have_sent(make: Callable[..., Chunks]) -> None:
    chunks = make("machines")
    chunks.train(1, ranks=Told(nodes=2))
    files = chunks.at().manifest.files
    assert files["of-another-machine.pt"] == THEIRS["of-another-machine.pt"]
    assert "model.safetensors" in files


class Looking(TrainerCallback):
    """Notes as each step begins what is committed, and whether the last snapshot was one to stay."""

    stateless = True

    def __init__(self, chunks: Chunks) -> None:
        self.chunks = chunks
        self.committed: list[list[int]] = []
        self.wanted: dict[int, bool] = {}

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Notes it."""
        self.committed.append(self.chunks.steps)
        self.look()

    def look(self) -> None:
        """Looks at the last snapshot."""
        committer = self.chunks.checkpointer.committer
        if committer and (pending := committer.uploader._newest):
            self.wanted[pending.step] = pending.must_keep


def looked(chunks: Chunks) -> Looking:
    """Trains a run of one chunk, looking on."""
    looking = Looking(chunks)
    chunks.train(1, callbacks=(lambda: looking,))
    looking.look()
    return looking


def test_a_chunk_that_waits_has_each_checkpoint_before_it_trains_on(make: Callable[..., Chunks]) -> None:
    looking = looked(make("waits", checkpoint_every=2, wait_for_commit=True, keep={"last": 9}))
    assert looking.committed == [[], [], [2], [2], [2, 4], [2, 4]]


def test_what_is_to_stay_is_not_given_up_for_a_newer_one(make: Callable[..., Chunks]) -> None:
    looking = looked(make("wanted", checkpoint_every=1, wait_for_commit=True, keep={"last": 9, "every": 3}))
    assert looking.wanted == {1: False, 2: False, 3: True, 4: False, 5: False, 6: True}
    looking = looked(make("unwanted", checkpoint_every=3, wait_for_commit=True, keep={"last": 9}))
    assert looking.wanted == {3: False, 6: False}


def test_the_best_so_far_is_not_given_up_either(tiny_base: str, tmp_path: Path) -> None:
    settings = {"evaluation": {"samples": 0, "every": 2}, "export": {"checkpoint": "best"}}
    kept = {"checkpoint_every": 1, "wait_for_commit": True, "keep": {"last": 9}}
    looking = looked(Chunks(tiny.recipe(tiny_base, training=SETTINGS, chunks=kept, **settings), tmp_path, "best"))
    assert (looking.wanted[1], looking.wanted[2], looking.wanted[3]) == (False, True, False)
