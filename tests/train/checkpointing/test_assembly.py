"""What is attached to a trainer: in the first rank what commits and reports, in the others their part."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import set_seed

from baton.checkpoint.digest import tree_digest
from baton.checkpoint.restore import FetchedCheckpoint
from baton.checkpoint.staging import Staging
from baton.checkpoint.store import Checkpoint, CheckpointMeta
from baton.models import rng
from baton.recipe import load
from baton.recipe.run import Preemption
from baton.runs.documents import RunCost
from baton.runs.versions import Fingerprint
from baton.store.manifest import Manifest
from baton.train import attempt, state
from baton.train.attempt import EvaluationsPerEpoch, SaveSchedule
from baton.train.distributed import Ranks, Watchdog
from baton.train.preemption import PreemptionWatch
from baton.train.protocol import Resumption
from baton.train.trainer import seed_of
from tests.support import tiny
from tests.train.resuming import Chunks, as_before

Attach = Callable[..., tuple[Any, attempt.Assembly, Chunks]]


@pytest.fixture
def attach(tiny_base: str, tmp_path: Path) -> Attach:
    """Returns what attaches to the trainer of a chunk."""

    def attached(
        *overrides: str, ranks: Ranks | None = None, restored: FetchedCheckpoint | None = None, **options: Any
    ) -> Any:
        given = tiny.recipe(tiny_base, evaluation={"samples": 0})
        given = load.with_overrides(given, overrides)
        chunks = Chunks(given, tmp_path, "assembled")
        context = chunks.context(1, ranks=ranks or Ranks())
        held_out = chunks.rows.select(range(5))
        trainer = tiny.trainer(tiny.recipe(tiny_base, evaluation={"samples": 0}), chunks.rows, chunks.folder, held_out)
        with as_before(), PreemptionWatch(Preemption()) as watch, Staging() as staging:
            options = {"level": "bitwise", "skipped": [], "reports": True, **options}
            made = attempt.assemble(context, trainer, restored, staging, watch, **options)
            made.close()
        return trainer, made, chunks

    return attached


def test_the_first_rank_commits_and_reports(attach: Attach) -> None:
    trainer, made, chunks = attach("chunks.checkpoint_every=3")
    committer = made.checkpointer.committer
    assert committer
    assert made.report in trainer.callback_handler.callbacks
    assert trainer.callback_handler.callbacks[0] is made.check, "it compares before any other changes something"
    assert trainer.callback_handler.callbacks[-1] is made.save, "it sees what all others have decided"
    assert trainer.ranks is made.checkpointer.context.ranks
    assert type(trainer.watchdog) is Watchdog
    assert trainer.resumption == Resumption()
    assert made.save._schedule == SaveSchedule(target=3, plan=chunks.plan, every_steps=3)
    assert made.check._replicated
    assert (committer.start_step, committer.parent) == (0, None)
    assert not any(isinstance(each, EvaluationsPerEpoch) for each in trainer.callback_handler.callbacks)


def test_other_ranks_have_their_part_alone(attach: Attach) -> None:
    ranks = Ranks(rank=1, size=2, local_rank=1, launched=True)
    trainer, made, _ = attach(ranks=ranks)
    assert made.checkpointer.committer is None
    assert made.report is None
    assert trainer.ranks is ranks
    assert type(trainer.watchdog) is Watchdog
    assert trainer.resumption == Resumption()


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["chunks.checkpoint_every=5m"], {"every_seconds": 300.0}),
        (["chunks.checkpoints_per_epoch=2"], {"per_epoch": 2}),
        (["export.checkpoint=best", "evaluation.every=2"], {"keep_best": True}),
    ],
)
def test_the_recipe_says_when_to_save(overrides: list[str], expected: dict[str, Any], attach: Attach) -> None:
    _, made, chunks = attach(*overrides)
    assert made.save._schedule == SaveSchedule(target=3, plan=chunks.plan, **expected)


def test_evaluations_by_epoch_and_shards(attach: Attach) -> None:
    trainer, made, _ = attach("evaluation.per_epoch=2", "training.parallel={strategy: fsdp, processes: 2}")
    assert any(isinstance(each, EvaluationsPerEpoch) for each in trainer.callback_handler.callbacks)
    assert not made.check._replicated


@pytest.mark.parametrize(
    ("fingerprint", "ranks", "overrides", "reshaped"),
    [
        (Fingerprint(world_size=1), Ranks(), [], False),
        (Fingerprint(world_size=2, strategy="fsdp"), Ranks(), [], True),
        (Fingerprint(world_size=2), Ranks(rank=1, size=2, local_rank=1), [], False),
        (Fingerprint(world_size=2), Ranks(), ["training.parallel={virtual_workers: 2}"], False),
    ],
)
def test_what_is_restored_says_whose_it_was(
    fingerprint: Fingerprint, ranks: Ranks, overrides: list[str], reshaped: bool, attach: Attach, tmp_path: Path
) -> None:
    work = RunCost(trained_seconds=7.0)
    meta = CheckpointMeta(digest="d", state={"weights": "w"}, fingerprint=fingerprint, work=work)
    checkpoint = Checkpoint(2, Manifest(kind="checkpoint", folder="f", files={}), meta)
    restored = FetchedCheckpoint(checkpoint, str(tmp_path / "from-2"))
    trainer, made, _ = attach(*overrides, ranks=ranks, restored=restored, skipped=["step 3"], level="consistent")
    assert trainer.resumption == Resumption(
        folder=str(tmp_path / "from-2"),
        digests={"weights": "w"},
        ranks=fingerprint.world_size,
        strategy=fingerprint.strategy,
        is_reshaped=reshaped,
    )
    if committer := made.checkpointer.committer:
        assert (committer.start_step, committer.parent) == (2, checkpoint)
        assert committer.accounting.before.trained_seconds == 7.0
        assert not committer.lost_race


@pytest.mark.parametrize(
    ("ranks", "overrides", "seed"),
    [
        (Ranks(), [], None),
        (Ranks(rank=1, size=2, local_rank=1), [], seed_of(7, 1)),
        (Ranks(rank=1, size=2, local_rank=1), ["training.parallel={virtual_workers: 2}"], None),
    ],
)
def test_at_a_runs_start_each_rank_draws_on_its_own(
    ranks: Ranks, overrides: list[str], seed: int | None, attach: Attach
) -> None:
    """The first one as upstream has left it; the others from a seed, or all would leave out the same places."""
    trainer, made, _ = attach(*overrides, ranks=ranks)
    trainer.recipe = load.with_overrides(trainer.recipe, overrides)
    with rng.undisturbed():
        set_seed(seed or 123)
        expected = tree_digest(rng.capture())
        set_seed(123)
        made.save.on_train_begin(None, trainer.state, trainer.control)
        assert tree_digest(rng.capture()) == expected


def test_a_rank_that_was_not_there_takes_what_the_first_has_saved(attach: Attach, tmp_path: Path) -> None:
    meta = CheckpointMeta(digest="d", fingerprint=Fingerprint(world_size=1))
    restored = FetchedCheckpoint(
        Checkpoint(2, Manifest(kind="checkpoint", folder="f", files={}), meta), str(tmp_path / "from")
    )
    ranks = Ranks(rank=1, size=2, local_rank=1)
    trainer, made, _ = attach(ranks=ranks, restored=restored)
    (tmp_path / "from").mkdir()
    window = {"tr_loss": torch.tensor(3.0), "globalstep_last_logged": 1, "metrics": {}, "total_train_tokens": 5}
    extra = {"log_window": window, "callbacks": state.callback_states(trainer), "method": {"kept": 1}}
    loaded: list[Any] = []
    trainer.load_method_state = loaded.append
    torch.save(extra, tmp_path / "from" / "baton_state.pt")
    made.save.on_train_begin(None, trainer.state, trainer.control)
    assert float(trainer._tr_loss) == 3.0
    assert loaded == [{"kept": 1}]
    window["tr_loss"] = torch.tensor(4.0)
    torch.save({**extra, "log_window": window}, tmp_path / "from" / "baton_state_1.pt")
    made.save.on_train_begin(None, trainer.state, trainer.control)
    assert float(trainer._tr_loss) == 4.0, "its own, where there is one"
