"""What is attached to a trainer: in the first rank what commits and reports, in the others their part."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import TrainerControl, set_seed

from baton import events
from baton.checkpoint.digest import tree_digest
from baton.checkpoint.restore import FetchedCheckpoint
from baton.checkpoint.staging import Staging
from baton.checkpoint.store import Checkpoint, CheckpointMeta
from baton.errors import ExactnessError
from baton.models import rng
from baton.recipe import load
from baton.recipe.run import Preemption
from baton.runs.documents import PARTS, RunCost
from baton.runs.plan import Plan
from baton.runs.versions import Fingerprint
from baton.store.manifest import Manifest
from baton.train import attempt, state
from baton.train.attempt import EvaluationsPerEpoch, Pace, SaveSchedule
from baton.train.distributed import Ranks, Watchdog
from baton.train.preemption import PreemptionWatch
from baton.train.protocol import Resumption
from baton.train.trainer import seed_of
from tests.support import tiny
from tests.train.resuming import Chunks, as_before, events_in

Attach = Callable[..., tuple[Any, attempt.Assembly, Chunks]]


@pytest.fixture
def attach(tiny_base: str, tmp_path: Path) -> Attach:
    """Returns what attaches to the trainer of a chunk."""

    def attached(
        *overrides: str,
        ranks: Ranks | None = None,
        restored: FetchedCheckpoint | None = None,
        context: dict[str, Any] | None = None,
        **options: Any,
    ) -> Any:
        given = tiny.recipe(tiny_base, evaluation={"samples": 0})
        given = load.with_overrides(given, overrides)
        chunks = Chunks(given, tmp_path, "assembled")
        found = chunks.context(1, ranks=ranks or Ranks(), **(context or {}))
        held_out = chunks.rows.select(range(5))
        trainer = tiny.trainer(tiny.recipe(tiny_base, evaluation={"samples": 0}), chunks.rows, chunks.folder, held_out)
        with as_before(), PreemptionWatch(Preemption()) as watch, Staging() as staging:
            options = {"level": "bitwise", "skipped": [], "reports": True, **options}
            made = attempt.assemble(found, trainer, restored, staging, watch, **options)
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
    assert (committer.start_step, committer.parent, committer.finished) == (0, None, False)
    assert (committer.live()["step"], committer.live()["checkpoint_step"]) == (0, 0)
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
        assert (committer.live()["step"], committer.live()["checkpoint_step"]) == (2, 2)
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


PLAN = Plan(rows=24, steps_per_epoch=3, num_steps=9, targets=(7, 9))


def stepped(trainer: Any, made: Any, step: int, *, evaluates: bool = False) -> TrainerControl:
    """Ends a step of three an epoch, and returns what the callback wants."""
    trainer.state.global_step, trainer.state.epoch, trainer.state.max_steps = step, step / 3, 9
    control = TrainerControl(should_evaluate=evaluates)
    made.save.on_step_end(None, trainer.state, control)
    return control


STEPS: dict[str, tuple[list[str], int, bool, tuple[bool, bool], bool | None]] = {
    "not due": (["chunks.checkpoint_every=2"], 1, False, (False, False), None),
    "due": (["chunks.checkpoint_every=2"], 2, False, (True, False), None),
    "due where an epoch ends": (["chunks.checkpoint_every=2"], 6, False, (False, False), True),
    "not due where an epoch ends": (["chunks.checkpoint_every=2"], 3, False, (False, False), False),
    "by epoch": (["chunks.checkpoints_per_epoch=2"], 2, False, (True, False), None),
    "not due by epoch": (["chunks.checkpoints_per_epoch=2"], 1, False, (False, False), None),
    "an epoch's end by epoch": (["chunks.checkpoints_per_epoch=1"], 3, False, (False, False), True),
    "the target": ([], 7, False, (True, True), None),
    "behind the target": ([], 8, False, (True, True), None),
    "before the target": ([], 5, False, (False, False), None),
    "the target, evaluated": ([], 7, True, (True, False), None),
}
"""Settings, step, whether it is evaluated → whether it is saved and ends training, and saved at its epoch's end."""


@pytest.mark.parametrize("case", STEPS)
def test_a_step_is_saved_and_ends_training_where_it_is_to(case: str, attach: Attach) -> None:
    overrides, step, evaluates, expected, at_epochs_end = STEPS[case]
    trainer, made, _ = attach(*overrides, context={"plan": PLAN, "target": 7})
    control = stepped(trainer, made, step, evaluates=evaluates)
    assert (control.should_save, control.should_training_stop) == expected
    control = TrainerControl(should_evaluate=True, should_log=True)
    made.save.on_epoch_end(None, trainer.state, control)
    if at_epochs_end is None:  # the loop ends with the chunk, no epoch does
        assert control == TrainerControl()
    else:
        assert control == TrainerControl(should_evaluate=True, should_log=True, should_save=at_epochs_end)


def test_the_first_step_may_be_an_epoch(attach: Attach) -> None:
    trainer, made, _ = attach("chunks.checkpoint_every=1", context={"plan": PLAN, "target": 7})
    trainer.state.global_step, trainer.state.epoch = 1, 1.0
    for event in (made.save.on_step_end, made.save.on_epoch_end):
        control = TrainerControl()
        event(None, trainer.state, control)
    assert control.should_save


def test_a_rank_that_waits_for_the_others_has_told_its_step(attach: Attach) -> None:
    """By these it is known which rank hangs, and where."""
    trainer, made, _ = attach(context={"plan": PLAN, "target": 7})
    before = trainer.watchdog._count
    stepped(trainer, made, 2)
    assert (trainer.watchdog._count - before, trainer.watchdog._doing, trainer.watchdog._step) == (2, "rows", 3)


def test_what_another_callback_asks_for_at_an_epochs_end_is_kept(attach: Attach) -> None:
    trainer, made, _ = attach(context={"plan": PLAN, "target": 7})
    stepped(trainer, made, 3)
    control = TrainerControl(should_save=True)
    made.save.on_epoch_end(None, trainer.state, control)
    assert control.should_save
    for should_stop in (True, False):
        control = TrainerControl(should_training_stop=should_stop)
        made.save.on_step_end(None, trainer.state, control)
        assert control.should_training_stop is should_stop


BEST = ["export.checkpoint=best", "evaluation.every=1"]
LOSSES: dict[str, tuple[dict[int, float], list[str], tuple[bool, bool]]] = {
    "the first": ({2: 3.0}, BEST, (True, False)),
    "the lowest": ({1: 3.0, 2: 2.0}, BEST, (True, False)),
    "the highest": ({1: 2.0, 2: 3.0}, BEST, (False, False)),
    "neither": ({0: 1.0, 1: 3.0, 2: 2.0}, BEST, (False, False)),
    "as low as another": ({1: 2.0, 2: 2.0}, BEST, (False, False)),
    "below 0": ({1: 0.0, 2: -1.0}, BEST, (True, False)),
    "no number": ({1: 2.0, 2: math.nan}, BEST, (False, False)),
    "after one that is none": ({1: math.nan, 2: 3.0}, BEST, (True, False)),
    "not measured": ({1: 2.0}, BEST, (False, False)),
    "the best is not kept": ({1: 3.0, 2: 2.0}, [], (False, False)),
}
"""Evaluation losses up to step 2, and settings → whether it is saved and ends training."""


def evaluated(trainer: Any, made: Any, step: int, losses: dict[int, float], *, stops: bool = False) -> TrainerControl:
    """Evaluates a step, and returns what the callback wants; `stops` where another has ended training."""
    control = stepped(trainer, made, step, evaluates=True)
    assert not control.should_training_stop, "the evaluation comes first"
    trainer.state.log_history = [{"step": at, "eval_loss": loss} for at, loss in losses.items()]
    control = TrainerControl(should_training_stop=stops)
    made.save.on_evaluate(None, trainer.state, control)
    return control


@pytest.mark.parametrize("case", LOSSES)
def test_a_step_with_the_lowest_loss_so_far_is_saved(case: str, attach: Attach) -> None:
    losses, overrides, expected = LOSSES[case]
    trainer, made, _ = attach(*overrides, context={"plan": PLAN, "target": 7})
    control = evaluated(trainer, made, 2, losses)
    assert (control.should_save, control.should_training_stop) == expected
    assert not made.save.finished


ENDS: dict[str, tuple[int, bool, tuple[bool, bool, bool]]] = {
    "goes on": (2, False, (False, False, False)),
    "stopped early": (2, True, (True, True, True)),
    "stopped early where the chunk ends": (7, True, (True, True, True)),
    "the chunk's end": (7, False, (False, True, False)),
    "the run's end": (9, False, (False, True, False)),
    "stopped at the run's end": (9, True, (False, True, False)),
}
"""Step, and whether another callback ends training → whether it is saved, ends training, and ends the run."""


@pytest.mark.parametrize("case", ENDS)
def test_an_evaluation_ends_the_chunk_or_the_run(case: str, attach: Attach) -> None:
    step, stops, expected = ENDS[case]
    trainer, made, _ = attach(context={"plan": PLAN, "target": 7})
    control = evaluated(trainer, made, step, {}, stops=stops)
    assert (control.should_save, control.should_training_stop, made.save.finished) == expected


SCHEDULES: dict[str, tuple[dict[str, Any], list[int], list[float]]] = {
    "none": ({}, [], []),
    "by steps": ({"every_steps": 3}, [3, 6, 9], []),
    "by epochs": ({"per_epoch": 2}, [2, 3, 5, 6, 8, 9], []),
    "by epochs rather than steps": ({"per_epoch": 1, "every_steps": 2}, [3, 6, 9], []),
    "by time": ({"every_seconds": 60.0}, [], [60.0, 61.0]),
    "by its cost, which is not known": ({"pace": Pace()}, [], []),
}
"""Schedule → the steps of nine, and of 0, 59.9, 60 and 61 seconds since the last one, at which one is due."""


@pytest.mark.parametrize("case", SCHEDULES)
def test_a_schedule_knows_its_steps_and_times(case: str) -> None:
    values, steps, seconds = SCHEDULES[case]
    schedule = SaveSchedule(target=9, plan=PLAN, **values)
    assert [step for step in range(1, 10) if schedule.is_due(step)] == steps
    assert [late for late in (0.0, 59.9, 60.0, 61.0) if schedule.is_late(late)] == seconds


OTHERS = {"rng": "of other processes", "log": "of other processes"}
OF_TWO = {"ranks": 2, "is_reshaped": True}
PROOFS: dict[str, tuple[dict[str, Any], tuple[str, ...], dict[str, str]]] = {
    "all as it was": ({}, (), {}),
    "two parts that differ": ({}, ("weights", "log"), {"weights": "mismatch", "log": "mismatch"}),
    "a part that was left out": ({"left_out": ("weights",)}, ("weights",), {"weights": "left out"}),
    "another part than that": (
        {"left_out": ("weights",)}, ("optimizer",), {"weights": "left out", "optimizer": "mismatch"},
    ),
    "parts of other processes": (OF_TWO, ("rng", "log"), OTHERS),
    "another part of other processes": (OF_TWO, ("weights",), {**OTHERS, "weights": "mismatch"}),
    "parts of as many processes": ({"ranks": 2}, ("rng",), {"rng": "mismatch"}),
}  # fmt: skip
"""What is resumed, parts whose digests the checkpoint has otherwise → what is no match."""


@pytest.mark.parametrize("scaler", [None, {"scale": 2.0}], ids=["no scaler", "scaler"])
@pytest.mark.parametrize("case", PROOFS)
def test_each_part_is_compared_where_it_can_be(case: str, scaler: Any, attach: Attach) -> None:
    resumed, others, expected = PROOFS[case]
    trainer, made, _ = attach()
    trainer.create_optimizer_and_scheduler(3)
    trainer._tr_loss, trainer._globalstep_last_logged = torch.tensor(0.0), 0
    trainer.accelerator.scaler = SimpleNamespace(state_dict=lambda: scaler) if scaler else None
    digests = made.check.digests()
    trainer.restored_rng = digests["rng"]
    changed = {**digests, **dict.fromkeys(others, "0" * 64)}
    trainer.resumption = Resumption(folder="folder", digests=changed, **resumed)
    told: list[events.Event] = []
    wrong = [part for part, verdict in expected.items() if verdict == "mismatch"]
    with events_in(told):
        if wrong:
            with pytest.raises(ExactnessError, match=rf"after restoring step 0, {', '.join(wrong)} in memory differ"):
                made.check.prove()
        else:
            made.check.prove()
    absent = {} if scaler else {"scaler": "absent"}
    assert made.check.checked == {**dict.fromkeys(PARTS, "match"), **absent, **expected}
    assert told == [events.Restored(step=0, wrong=wrong)]


def test_random_numbers_that_were_never_restored_are_no_match(attach: Attach) -> None:
    trainer, made, _ = attach()
    trainer.create_optimizer_and_scheduler(3)
    trainer._tr_loss, trainer._globalstep_last_logged = torch.tensor(0.0), 0
    trainer.resumption = Resumption(folder="folder", digests=made.check.digests())
    with pytest.raises(ExactnessError, match="rng in memory differ"):
        made.check.prove()
