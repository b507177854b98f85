"""What a fork gives optimizer and schedule once its parent's state is restored."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

from baton.checkpoint.store import CheckpointMeta
from baton.runs.documents import ForkOrigin
from baton.train.fork import ForkOverrides


def trainer(rate: float, schedule: str, decay: float = 0.0) -> Any:
    """What `Trainer` has of optimizer and schedule: two groups, and at step 0."""
    weights = [torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))]
    groups = [{"params": weights[:1], "weight_decay": decay}, {"params": weights[1:], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=rate)
    made: Any = (
        ReduceLROnPlateau(optimizer, factor=0.1, patience=0)
        if schedule == "plateau"
        else LambdaLR(optimizer, lambda step: max(0.0, 1 - step / 10))
    )
    state = SimpleNamespace(global_step=4, epoch=0.4, max_steps=20)
    return SimpleNamespace(optimizer=optimizer, lr_scheduler=made, state=state)


def trained(one: Any, losses: tuple[float, ...]) -> None:
    """Takes a step for each evaluation loss."""
    for loss in losses:
        for group in one.optimizer.param_groups:
            for weight in group["params"]:
                weight.grad = torch.ones(2)
        one.optimizer.step()
        one.lr_scheduler.step(loss) if isinstance(one.lr_scheduler, ReduceLROnPlateau) else one.lr_scheduler.step()


def restored(parent: Any, fork: Any, folder: Path, changed: dict[str, list[Any]]) -> ForkOverrides:
    """Restores the parent's state in a fork, as `Trainer` does."""
    (folder / "trainer_state.json").write_text(json.dumps({"max_steps": 10}))
    torch.save(parent.lr_scheduler.state_dict(), folder / "scheduler.pt")
    takeover = ForkOverrides(str(folder), changed)
    takeover.remember(fork)
    fork.optimizer.load_state_dict(parent.optimizer.state_dict())
    fork.lr_scheduler.load_state_dict(parent.lr_scheduler.state_dict())
    return takeover


def test_a_schedule_goes_on_with_the_new_peak_and_the_moments_stay(tmp_path: Path) -> None:
    parent, fork = trainer(1.0, "linear"), trainer(0.5, "linear", decay=0.1)
    trained(parent, (1.0,) * 4)
    takeover = restored(parent, fork, tmp_path, {"training.learning_rate": [1.0, 0.5]})
    assert [group["lr"] for group in fork.optimizer.param_groups] == [0.6, 0.6], "as `Trainer` leaves it"
    takeover.apply(fork)
    assert [group["lr"] for group in fork.optimizer.param_groups] == [0.3, 0.3]
    assert fork.lr_scheduler.get_last_lr() == [0.3, 0.3]
    assert [group["weight_decay"] for group in fork.optimizer.param_groups] == [0.1, 0.0]
    moments = zip(fork.optimizer.state.values(), parent.optimizer.state.values(), strict=True)
    assert all(torch.equal(ours["exp_avg"], theirs["exp_avg"]) for ours, theirs in moments)
    trained(fork, (1.0,))
    assert fork.lr_scheduler.get_last_lr() == [0.25, 0.25], "half of the way down, half of the peak"


def test_what_a_plateau_has_lowered_stays_lowered(tmp_path: Path) -> None:
    parent, fork = trainer(1.0, "plateau"), trainer(0.5, "plateau")
    trained(parent, (1.0, 2.0))
    assert parent.optimizer.param_groups[0]["lr"] == pytest.approx(0.1)
    restored(parent, fork, tmp_path, {"training.learning_rate": [1.0, 0.5]}).apply(fork)
    assert fork.optimizer.param_groups[0]["lr"] == pytest.approx(0.05)
    assert fork.lr_scheduler.best == 1.0


def test_the_length_and_form_that_the_fork_decides_are_no_difference_of_state(tmp_path: Path) -> None:
    parent, fork = trainer(1.0, "linear"), trainer(1.0, "linear")
    trained(parent, (1.0,) * 4)
    takeover = restored(parent, fork, tmp_path, {"training.max_steps": [10, 20]})
    found = takeover.expected_digests(fork)
    parent.state.max_steps = 10
    assert found == takeover.expected_digests(parent)
    fork.lr_scheduler.last_epoch += 1
    fork.state.global_step += 1
    other = takeover.expected_digests(fork)
    assert other["scheduler"] != found["scheduler"]
    assert other["position"] != found["position"]
    assert takeover.expected_digests(fork, (2,))["position"] != other["position"]


def test_a_fork_with_nothing_changed_takes_nothing_over(tmp_path: Path) -> None:
    origin = ForkOrigin(run_uri="parent", step=4, digest="d", changed={})
    assert ForkOverrides.of(str(tmp_path), CheckpointMeta(digest="d")) is None
    assert ForkOverrides.of(str(tmp_path), CheckpointMeta(digest="d", forked_from=origin)) is None
    (tmp_path / "trainer_state.json").write_text(json.dumps({"max_steps": 10}))
    torch.save({}, tmp_path / "scheduler.pt")
    changed = origin.model_copy(update={"changed": {"training.max_steps": [10, 20]}})
    found = ForkOverrides.of(str(tmp_path), CheckpointMeta(digest="d", forked_from=changed))
    assert found is not None
    assert found.changed == {"training.max_steps": [10, 20]}
