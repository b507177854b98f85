"""Chunks of a tiny run in one process: what each restores, saves, proves, and says of itself."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from baton import events
from baton.checkpoint.proof import proof_part
from baton.checkpoint.store import combined
from baton.errors import ExactnessError, SkipError, UnavailableError, UserError
from baton.recipe.recipe import Recipe
from baton.recipe.run import Preemption
from baton.runs.documents import PARTS, OwnState, Progress
from baton.runs.outcomes import TrialInfo, TrialScore
from baton.train import checkpointer as committing
from tests.support import tiny
from tests.train.resuming import Chunks, events_in

SETTINGS = {"optimizer": "adamw_torch", "max_steps": 7, "learning_rate": 0.01, "log_every": 2, "lr_scheduler": "linear"}
KEPT = {"keep": {"last": 9}, "wait_for_commit": True}


def recipe(base: str, *, training: dict[str, Any] | None = None, **sections: Any) -> Recipe:
    """Returns a recipe of seven steps, of which three are an epoch, logged every second one."""
    sections = {"chunks": KEPT, "evaluation": {"samples": 0}, **sections}
    return tiny.recipe(base, training={**SETTINGS, **(training or {})}, **sections)


class Drawing(TrainerCallback):
    """Draws a number after each step, as dropout would, and learns from it."""

    def __init__(self) -> None:
        self.drawn: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Draws, and moves a weight by what was drawn."""
        self.drawn.append(float(torch.rand(1)))
        next(iter(model.parameters())).data.flatten()[0] += self.drawn[-1] * 1e-3

    def state_dict(self) -> dict[str, Any]:
        """Returns what was drawn."""
        return {"drawn": self.drawn}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Takes what was drawn."""
        self.drawn = list(saved["drawn"])


class DrawingByEpoch(Drawing):
    """Does so after each epoch."""

    def on_step_end(self, *args: Any, **_: Any) -> None:
        """Does nothing."""

    def on_epoch_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Draws, and moves a weight by what was drawn."""
        super().on_step_end(args, state, control, model)


def _drawing_at(event: str) -> type[Drawing]:
    """Returns a callback that draws at one event alone, and moves a weight."""

    def draw(self: Drawing, args: Any, state: Any, control: Any, **options: Any) -> None:
        Drawing.on_step_end(self, args, state, control, **options)

    return type(f"At_{event}", (Drawing,), {"on_step_end": TrainerCallback.on_step_end, event: draw})


@pytest.fixture(scope="module")
def make(tiny_base: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Chunks]:
    """Returns what makes a run."""
    folder = tmp_path_factory.mktemp("chunks")

    def made(name: str, targets: tuple[int, ...] = (), callbacks: Any = (Drawing,), **sections: Any) -> Chunks:
        return Chunks(recipe(tiny_base, **sections), folder, name, targets, callbacks)

    return made


@pytest.fixture(scope="module")
def whole(make: Callable[..., Chunks]) -> Chunks:
    """The run in one chunk."""
    chunks = make("whole")
    chunks.train_all()
    return chunks


@pytest.fixture(scope="module")
def parts(make: Callable[..., Chunks]) -> Chunks:
    """The run in three chunks, which end inside a logging window and inside an epoch."""
    chunks = make("parts", (2, 5, 7))
    chunks.train_all()
    return chunks


def test_chunks_end_on_the_bits_of_one_run(whole: Chunks, parts: Chunks) -> None:
    assert parts.steps == [2, 5, 7]
    assert whole.steps == [7]
    assert parts.at().meta.state == whole.at().meta.state
    assert parts.logged() == whole.logged()
    assert len(parts.logged()) == 3, "every second step"


def test_a_checkpoint_at_an_epochs_end_has_what_callbacks_do_there(make: Callable[..., Chunks]) -> None:
    runs = [make(name, targets, (DrawingByEpoch,)) for name, targets in (("epochs", ()), ("epochs-3", (3, 7)))]
    for run in runs:
        run.train_all()

    assert runs[1].steps == [3, 7]
    assert runs[1].at().meta.state == runs[0].at().meta.state


@pytest.mark.parametrize("event", ["on_step_begin", "on_substep_end", "on_pre_optimizer_step", "on_log"])
def test_the_state_is_compared_before_any_callback_changes_it(event: str, make: Callable[..., Chunks]) -> None:
    runs = [make(f"{event}-{len(ends)}", ends, (_drawing_at(event),)) for ends in ((), (2, 3, 7))]
    for run in runs:
        run.train_all()
    assert runs[1].at().meta.restored.checked["callbacks"] == "match"
    assert runs[1].at().meta.state == runs[0].at().meta.state


class Epochs(TrainerCallback):
    """Counts the epochs that begin, and lowers the learning rate by their number."""

    def __init__(self) -> None:
        self.epochs = 0

    def on_epoch_begin(self, *_: Any, **__: Any) -> None:
        """Counts."""
        self.epochs += 1

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Moves a weight."""
        next(iter(model.parameters())).data.flatten()[0] += self.epochs * 1e-3

    def state_dict(self) -> dict[str, Any]:
        """Returns their number."""
        return {"epochs": self.epochs}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Takes their number."""
        self.epochs = saved["epochs"]


def test_an_epoch_that_a_chunk_begins_once_more_does_not_count(make: Callable[..., Chunks]) -> None:
    runs = [make(name, targets, (Epochs,)) for name, targets in (("begun", ()), ("begun-4", (2, 3, 5, 7)))]
    for run in runs:
        run.train_all()
    assert runs[1].at().meta.state == runs[0].at().meta.state


def test_a_manifest_says_what_was_restored_and_compared(parts: Chunks) -> None:
    metas = {step: parts.at(step).meta for step in parts.steps}
    assert [metas[step].restored.step for step in (2, 5, 7)] == [0, 2, 5]
    assert metas[2].restored.checked is None
    for step in (5, 7):
        assert metas[step].restored.checked == {**dict.fromkeys(PARTS, "match"), "scaler": "absent"}
        assert metas[step].restored.level == "bitwise"
    assert metas[2].parent is None
    assert [(metas[step].parent.step, metas[step].parent.digest) for step in (5, 7)] == [
        (2, metas[2].digest),
        (5, metas[5].digest),
    ]
    assert len({meta.chain for meta in metas.values()}) == 3
    assert [metas[step].chunk for step in (2, 5, 7)] == [1, 2, 3]
    assert {meta.identity for meta in metas.values()} == {"made of this"}
    parameters = sum(weight.numel() for weight in parts.trainer.model.parameters())
    assert metas[7].trainable_parameters == parameters
    assert not metas[7].finished
    assert metas[7].seconds.keys() >= {"train", "save"}
    assert set(metas[7].state) == {*PARTS, "state"}
    assert metas[7].digest == metas[7].state["state"]
    files = parts.at().manifest.files
    assert {"model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "baton_state.pt"} <= files.keys()
    assert "training_args.bin" not in files, "a pickle that no resume needs"


def test_the_proof_of_a_chunk_is_what_its_checkpoint_says(parts: Chunks) -> None:
    checkpoint, before = parts.at(7), parts.at(5)
    part, meta = proof_part(parts.store, checkpoint), checkpoint.meta
    assert (part.step, part.digest, part.chain) == (7, meta.digest, meta.chain)
    assert (part.parent_step, part.parent_digest) == (5, before.meta.digest)
    assert (part.level, part.checked, part.restored_step) == ("bitwise", meta.restored.checked, 5)
    assert (part.uri, part.bytes) == (parts.store.uri(checkpoint), checkpoint.bytes)
    assert (part.fingerprint, part.seconds, part.moved, part.work) == (
        meta.fingerprint,
        meta.seconds,
        meta.moved,
        meta.work,
    )
    assert (part.skipped, part.forked_from) == ([], None)
    first = proof_part(parts.store, parts.at(2))
    assert (first.parent_step, first.parent_digest) == (None, None)


@pytest.mark.parametrize("part", ["optimizer", "rng", "callbacks"])
def test_what_is_left_out_is_missed(part: str, make: Callable[..., Chunks], whole: Chunks) -> None:
    chunks = make(f"without-{part}", (5, 7))
    chunks.train(1)
    left_out = ("optimizer", "scheduler") if part == "optimizer" else (part,)  # one file, one restore
    chunks.train(2, leave_out=left_out)
    meta = chunks.at().meta
    assert meta.restored.checked is not None
    assert {name for name, verdict in meta.restored.checked.items() if verdict == "left out"} == set(left_out)
    assert set(meta.restored.checked.values()) == {"match", "absent", "left out"}
    wanted = {"optimizer": "weights", "rng": "weights", "callbacks": "callbacks"}[part]
    assert meta.state[wanted] != whole.at().meta.state[wanted]


@pytest.mark.parametrize("part", PARTS)
def test_each_part_is_compared_before_the_first_step(
    part: str, parts: Chunks, make: Callable[..., Chunks], tmp_path: Path
) -> None:
    """The manifest's digest of a part stands for a restore that has failed to bring it back."""
    chunks = make(f"mismatch-{part}", (2, 5), training={"max_steps": 5})
    chunks.train(1)
    path = chunks.store.prefix(2) + "/manifest.json"
    manifest = json.loads(chunks.run.storage.read(path))
    meta = manifest["meta"]
    meta["state"][part] = "0" * 64
    meta["digest"] = meta["state"]["state"] = combined(meta["state"])
    chunks.run.storage.write(path, json.dumps(manifest).encode())
    told: list[events.Event] = []
    with events_in(told), pytest.raises(ExactnessError, match=rf"after restoring step 2, {part} in memory differ"):
        chunks.train(2)
    assert chunks.steps == [2]
    (restored,) = (event for event in told if isinstance(event, events.Restored))
    assert (restored.step, restored.wrong) == (2, [part])
    assert chunks.save._check.checked[part] == "mismatch"


def test_checkpoints_inside_a_chunk_change_nothing(make: Callable[..., Chunks], whole: Chunks) -> None:
    chunks = make("every-second", chunks={**KEPT, "checkpoint_every": 2})
    told: list[events.Event] = []
    with events_in(told):
        chunks.train_all()
    assert chunks.steps == [2, 4, 6, 7]
    assert chunks.at().meta.state == whole.at().meta.state
    assert chunks.at(4).meta.parent.step == 2  # type: ignore[union-attr]
    commits = [event for event in told if isinstance(event, events.CheckpointCommitted)]
    assert [event.step for event in commits] == [2, 4, 6, 7]
    for event in commits:
        checkpoint = chunks.at(event.step)
        assert (event.uri, event.digest) == (chunks.store.uri(checkpoint), checkpoint.digest)
        assert event.bytes == checkpoint.bytes
        assert event.seconds["upload"] >= 0
        assert event.seconds["commit"] >= 0
    losses = {event.step: event.loss for event in told if isinstance(event, events.Step)}
    assert losses == {int(entry["step"]): entry["loss"] for entry in chunks.logged() if "loss" in entry}
    assert {event.of for event in told if isinstance(event, events.Step)} == {7}


def test_checkpoints_by_epoch_come_at_its_end_once(make: Callable[..., Chunks], whole: Chunks) -> None:
    chunks = make("per-epoch", chunks={**KEPT, "checkpoints_per_epoch": 1})
    chunks.train_all()
    assert chunks.steps == [3, 6, 7]
    assert chunks.at().meta.state == whole.at().meta.state
    twice = make("twice-per-epoch", (5, 7), chunks={**KEPT, "checkpoints_per_epoch": 2})
    twice.train_all()
    assert twice.steps == [2, 3, 5, 6, 7]
    assert twice.at().meta.state == whole.at().meta.state


def test_checkpoints_by_time(make: Callable[..., Chunks]) -> None:
    chunks = make("by-time", chunks={**KEPT, "checkpoint_every": "1h"})
    chunks.train_all()
    assert chunks.steps == [7]
    often = make("often", chunks={**KEPT, "checkpoint_every": "1s"})

    class Slow(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
            time.sleep(1.1 if state.global_step in (1, 4) else 0)

    often.callbacks = (Slow,)
    often.train_all()
    assert {2, 5, 7} <= set(often.steps) < set(range(1, 8))


def test_old_checkpoints_go(make: Callable[..., Chunks]) -> None:
    chunks = make("retention", (6, 7), chunks={"keep": {"last": 1}, "wait_for_commit": True, "checkpoint_every": 1})
    chunks.train(1)
    assert chunks.steps == [5, 6], "at its target the checkpoint stage does it"


def test_a_notice_before_the_first_step_saves_nothing(make: Callable[..., Chunks], tmp_path: Path) -> None:
    notice = tmp_path / "leave"
    notice.touch()
    chunks = make("noticed")
    chunks.train(1, preemption=Preemption(notice_file=str(notice)))
    assert chunks.steps == []
    assert chunks.checkpointer.notice is not None
    assert not chunks.checkpointer.committer.finished  # type: ignore[union-attr]


def test_a_notice_saves_and_ends_the_chunk(make: Callable[..., Chunks], whole: Chunks, tmp_path: Path) -> None:
    notice = tmp_path / "leave"

    class Preempted(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
            if state.global_step == 4:
                notice.touch()
            if state.global_step >= 4:
                time.sleep(0.3)

    chunks = make("preempted", callbacks=(Drawing,))
    lead = chunks.train(1, preemption=Preemption(notice_file=str(notice)), callbacks=(Drawing, Preempted))
    (step,) = chunks.steps
    assert 4 <= step < 7
    assert chunks.checkpointer.notice is not None
    assert lead.reached == step
    chunks.train(1)
    assert chunks.at().meta.restored.step == step
    assert chunks.at().meta.state == whole.at().meta.state


def test_what_is_staged_is_gone_after_the_commit(parts: Chunks) -> None:
    assert not [name for name in os.listdir("/dev/shm") if name.startswith("baton-") and f"-{os.getpid()}-" in name]
    assert parts.checkpointer.committer.uploader.is_idle  # type: ignore[union-attr]


def test_callbacks_that_do_not_fit_stop_the_chunk(make: Callable[..., Chunks]) -> None:
    chunks = make("other-callbacks", (2, 5), training={"max_steps": 5})
    chunks.train(1)
    with pytest.raises(ExactnessError, match=r"callbacks cannot be restored: .*Drawing#0"):
        chunks.train(2, callbacks=())
    assert chunks.steps == [2]


def test_while_it_trains_a_request_is_not_tried_for_long(make: Callable[..., Chunks]) -> None:
    """What does not get through is to be noticed soon; the committer has the patience."""
    chunks = make("patience", (2, 5), training={"max_steps": 5})
    found: list[float] = []

    class Looking(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
            found.append(chunks.run.storage.patience)

    chunks.train(1, callbacks=(Drawing, Looking))
    assert found == [5.0, 5.0]
    assert chunks.run.storage.patience == 10.0
    chunks.run.storage.patience = 3.0
    committer = chunks.train(2, callbacks=(Drawing, Looking))
    assert found[2:] == [3.0] * 3
    live = committer.live()
    assert (live["step"], live["target_step"], live["checkpoint_step"]) == (5, 5, 5)
    assert (live["lost_steps"], live["restarts"]) == (0, 0)
    assert 0 < live["goodput"] <= 1
    assert 0 <= live["unsaved_seconds"] < 100
    figures = committer.accounting.figures()
    assert len(figures["save_stalls"]) == 1
    assert 0 <= figures["save_stalls"][0] < 100


EVALUATED = {"evaluation": {"samples": 0, "every": 2}}


def evaluations(chunks: Chunks) -> dict[int, float]:
    """Returns the evaluation losses by step."""
    return chunks.store.evaluation_losses(chunks.at(chunks.steps[-1]))


def test_evaluations_come_where_one_run_has_them(make: Callable[..., Chunks]) -> None:
    whole, parts = make("evaluated", **EVALUATED), make("evaluated-parts", (2, 3, 5, 7), **EVALUATED)
    for each in (whole, parts):
        each.train_all()
    assert sorted(evaluations(whole)) == [2, 4, 6, 7]
    assert parts.steps == [2, 3, 5, 7]
    assert parts.at().meta.state == whole.at().meta.state
    assert parts.logged() == whole.logged()


class Worsening(TrainerCallback):
    """Moves all weights away, further with each step, from some step on."""

    def __init__(self, first: int) -> None:
        self.first = first

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Moves them."""
        if state.global_step >= self.first:
            for weight in model.parameters():
                weight.data.add_(0.5 * state.global_step)

    stateless = True


def test_the_best_is_saved_where_it_is_found(make: Callable[..., Chunks]) -> None:
    settings = {**EVALUATED, "export": {"checkpoint": "best"}, "chunks": {**KEPT, "keep": {"last": 9, "best": 1}}}
    chunks = make("best", callbacks=(lambda: Worsening(5),), **settings)
    chunks.train_all()
    losses = evaluations(chunks)
    best = min(losses, key=losses.__getitem__)
    assert best == 4
    assert chunks.steps == [2, 4, 7], "at 2 and 4 it was the best so far, at 6 not"


@pytest.mark.parametrize("targets", [(), (2, 4, 7), (3, 5, 7)])
def test_early_stopping_ends_the_run_wherever_chunks_end(targets: tuple[int, ...], make: Callable[..., Chunks]) -> None:
    training = {"early_stopping": {"patience": 1, "threshold": 0.0}}
    callbacks = (lambda: Worsening(3),)
    chunks = make(f"stopped-{len(targets)}-{sum(targets)}", targets, callbacks, training=training, **EVALUATED)
    for index in range(1, len(chunks.plan.targets) + 1):
        lead = chunks.train(index)
        if lead.finished:
            break
    assert lead.finished
    assert chunks.steps[-1] == 4
    assert chunks.at(4).meta.finished
    assert [chunks.at(step).meta.finished for step in chunks.steps[:-1]] == [False] * (len(chunks.steps) - 1)


def test_a_chunk_that_another_process_has_finished_stops_and_saves_no_more(make: Callable[..., Chunks]) -> None:
    chunks = make("overtaken", chunks={**KEPT, "checkpoint_every": 2})
    other = make("overtaking")

    class Overtaken(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
            if state.global_step == 3:
                other.run = chunks.run
                writer = chunks.store.open_writer(7)
                local = chunks.folder / "theirs"
                local.mkdir()
                (local / "weights").write_bytes(b"w")
                writer.send(str(local))
                chunks.store.commit(7, writer, chunks.at(2).meta.model_copy(update={"digest": "theirs", "state": {}}))

    lead = chunks.train(1, callbacks=(Drawing, Overtaken))
    assert lead.lost_race
    assert chunks.steps == [2, 4, 7]
    assert chunks.trainer.state.global_step == 5, "it hears of it with its own commit, and leaves after the next step"
    assert chunks.at(7).meta.digest == "theirs"


@pytest.mark.parametrize("same", [True, False])
def test_a_step_that_another_process_has_committed_is_compared(same: bool, make: Callable[..., Chunks]) -> None:
    name = f"beside-{same}"
    chunks = make(name, chunks={**KEPT, "checkpoint_every": 4})
    digest = make(f"{name}-before", (4, 7))
    digest.train(1)
    local = chunks.folder / "theirs"
    local.mkdir()
    (local / "weights").write_bytes(b"w")

    class Beside(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
            if state.global_step == 3:
                writer = chunks.store.open_writer(4)
                writer.send(str(local))
                theirs = (
                    digest.at(4).meta
                    if same
                    else digest.at(4).meta.model_copy(update={"digest": "0" * 64, "state": {}})
                )
                chunks.store.commit(4, writer, theirs)

    if same:
        chunks.train(1, callbacks=(Drawing, Beside))
        assert chunks.steps == [4, 7]
        assert chunks.at(7).meta.parent.step == 4  # type: ignore[union-attr]
        return
    with pytest.raises(ExactnessError, match=r"another process committed step 4 with digest 000000000000…, this one"):
        chunks.train(1, callbacks=(Drawing, Beside))
    assert chunks.steps == [4]


class Asking(TrainerCallback):
    """Asks for an evaluation after the first step."""

    stateless = True

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Asks."""
        control.should_evaluate |= state.global_step == 1


@pytest.mark.parametrize(("per_epoch", "steps"), [(1, [3, 6, 7]), (2, [2, 3, 5, 6, 7]), (9, [1, 2, 3, 4, 5, 6, 7])])
def test_evaluations_by_epoch(per_epoch: int, steps: list[int], make: Callable[..., Chunks]) -> None:
    by_epoch = {"evaluation": {"samples": 0, "per_epoch": per_epoch}}
    chunks = make(f"evaluated-{per_epoch}", **by_epoch)
    chunks.train_all()
    assert sorted(evaluations(chunks)) == steps
    asked = make(f"asked-{per_epoch}", callbacks=(Asking,), **by_epoch)
    asked.train_all()
    assert sorted(evaluations(asked)) == sorted({1, *steps}), "and where another callback asks for one"


def test_one_that_becomes_due_during_an_upload_waits_for_its_end(make: Callable[..., Chunks]) -> None:
    chunks = make("overdue", training={"max_steps": 9}, chunks={"keep": {"last": 9}, "checkpoint_every": 3})
    gate, upload = threading.Event(), chunks.run.storage.upload

    def gated(*arguments: Any) -> str:
        gate.wait(60)
        return upload(*arguments)

    chunks.run.storage.upload = gated  # type: ignore[method-assign]

    class Opening(TrainerCallback):
        """Lets what is on its way arrive in the seventh step."""

        stateless = True

        def on_step_begin(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
            if state.global_step >= 6:
                gate.set()
                while not chunks.checkpointer.committer.uploader.is_idle:  # type: ignore[union-attr]
                    time.sleep(0.01)

    chunks.train(1, callbacks=(Drawing, Opening))
    assert chunks.steps == [3, 7, 9], "that of step 6 came at 7, and none for it at 8"


def test_work_is_unsaved_from_the_first_step_on(make: Callable[..., Chunks]) -> None:
    """Not while the model is loaded."""
    chunks = make("unsaved", training={"max_steps": 3})
    seen: list[float] = []

    class Looking(TrainerCallback):
        stateless = True

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            time.sleep(2)

        def on_step_end(self, *_: Any, **__: Any) -> None:
            seen.append(chunks.checkpointer.committer.live()["unsaved_seconds"])  # type: ignore[union-attr]

    began = time.monotonic()
    chunks.train(1, callbacks=(Looking,))
    assert 0 <= seen[0] < time.monotonic() - began - 2
    assert seen == sorted(seen)


class Generating(TrainerCallback):
    """Keeps a state that no checkpoint carries."""

    def __init__(self) -> None:
        self.it = (number for number in range(99))

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Changes it."""
        next(self.it)


def test_what_is_not_carried_is_said_once(make: Callable[..., Chunks]) -> None:
    chunks = make("named", callbacks=(Generating,), chunks={**KEPT, "checkpoint_every": 2})
    told: list[events.Event] = []
    with events_in(told):
        chunks.train_all()
    (event,) = (each for each in told if isinstance(each, events.NotCarried))
    assert event.step == 2
    (name,) = event.lost
    assert name.endswith("Generating.it")
    assert [list(chunks.at(step).meta.hooks.lost) for step in chunks.steps] == [[name]] * 4


class Counting(TrainerCallback):
    """Counts steps, without a word on how that is saved."""

    def __init__(self) -> None:
        self.steps = self.begun = 0

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Begins."""
        self.begun += 1

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Counts."""
        self.steps += 1


@pytest.mark.parametrize("other", [None, "steps", "all"])
def test_state_of_ones_own_code_is_compared_too(other: str | None, make: Callable[..., Chunks]) -> None:
    chunks = make(f"own-{other}", (2, 5), (Counting,), training={"max_steps": 5})
    chunks.train(1)
    path = chunks.store.prefix(2) + "/manifest.json"
    manifest = json.loads(chunks.run.storage.read(path))
    carried = manifest["meta"]["hooks"]["carried"]
    (name,) = (name for name in carried if name.endswith("Counting.steps"))
    if other:
        manifest["meta"]["hooks"]["carried"] = {**carried, name: "0" * 64} if other == "steps" else {"other": "0" * 64}
        chunks.run.storage.write(path, json.dumps(manifest).encode())
        with pytest.raises(ExactnessError, match="after restoring step 2, hooks in memory differ"):
            chunks.train(2)
        assert chunks.steps == [2]
    else:
        chunks.train(2)
        assert chunks.at().meta.restored.checked["hooks"] == "match"
        counting = next(x for x in chunks.trainer.callback_handler.callbacks if isinstance(x, Counting))
        assert counting.steps == 5


def test_a_run_with_nothing_wrong_warns_of_nothing(
    make: Callable[..., Chunks], caplog: pytest.LogCaptureFixture
) -> None:
    chunks = make("quiet", (2, 5), training={"max_steps": 5}, chunks={**KEPT, "checkpoint_every": 1})
    with caplog.at_level(logging.WARNING, "baton"):
        chunks.train_all()
    assert [record.message for record in caplog.records if record.name == "baton"] == []


def test_what_a_killed_process_has_trained_is_known(
    make: Callable[..., Chunks], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(committing, "LOCAL_NOTES", 0.01)
    chunks = make("noted", training={"max_steps": 5}, chunks={**KEPT, "checkpoint_every": 2})

    class Dying(TrainerCallback):
        stateless = True

        def on_step_begin(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
            until = time.monotonic() + 30
            while state.global_step == 3 and time.monotonic() < until:
                note = chunks.run.read(Progress)
                if note and note.step == 3:
                    raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        chunks.train(1, callbacks=(Dying, Drawing))
    note = chunks.run.read(Progress)
    assert note is not None
    assert (note.step, note.chunk) == (3, 1)
    lead = chunks.train(1)
    assert lead.start_step == 2
    assert (lead.live()["lost_steps"], lead.accounting.figures()["lost_steps"]) == (1, 1)
    assert lead.accounting.lost.seconds == note.seconds_per_step
    (killed,) = (each for each in chunks.run.attempts() if each.outcome == "killed")
    assert (killed.from_step, killed.to_step, killed.lost_steps) == (0, 3, 1)


def as_trial(chunks: Chunks, metric: str = "eval_loss") -> Chunks:
    chunks.run.put(TrialInfo.NAME, {"sweep": "s", "id": "t000", "values": {}, "metric": metric})
    return chunks


def score(chunks: Chunks, index: int) -> TrialScore | None:
    return chunks.run.read(TrialScore, index)


def test_a_trial_is_scored_after_each_chunk_and_its_bits_stay(make: Callable[..., Chunks]) -> None:
    whole, chunks = make("unscored"), as_trial(make("scored", (5, 7)))
    whole.train_all()
    for index in (1, 2):
        chunks.train(index, scores=True)
    found = [score(chunks, index) for index in (1, 2)]
    assert [each.step for each in found] == [5, 7]
    assert all(each.value == each.metrics["eval_loss"] for each in found)
    assert found[0].value != found[1].value
    assert chunks.steps == [5, 7], "the evaluation saves nothing"
    assert chunks.at().meta.state == whole.at().meta.state
    assert chunks.logged() == whole.logged()


def test_a_score_that_is_lost_is_measured_again_and_nothing_is_trained(make: Callable[..., Chunks]) -> None:
    chunks = as_trial(make("lost-score", (5, 7)))
    for index in (1, 2):
        chunks.train(index, scores=True)
    for index in (1, 2):
        before = score(chunks, index)
        chunks.run.storage.remove(chunks.run.path(TrialScore.file_name(index)))
        told: list[events.Event] = []
        with events_in(told):
            committer = chunks.train(index, scores=True)
        after = score(chunks, index)
        assert after.step == 7, "the newest checkpoint is at the first chunk's target or after it"
        assert (after.metrics == before.metrics) == (index == 2)
        assert not [event for event in told if isinstance(event, events.Step | events.CheckpointCommitted)]
        assert committer.lost_race
    assert chunks.steps == [5, 7]


def test_a_chunk_that_leaves_before_its_target_has_no_score(make: Callable[..., Chunks], tmp_path: Path) -> None:
    notice = tmp_path / "leave"

    class Leaving(TrainerCallback):
        stateless = True

        def on_step_end(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
            if state.global_step >= 3:
                notice.touch()
                time.sleep(0.3)

    chunks = as_trial(make("left"))
    chunks.train(1, scores=True, preemption=Preemption(notice_file=str(notice)), callbacks=(Drawing, Leaving))
    assert chunks.steps
    assert chunks.steps[-1] < 7
    assert score(chunks, 1) is None


def test_a_run_that_early_stopping_ends_has_a_score(make: Callable[..., Chunks]) -> None:
    training = {"early_stopping": {"patience": 1, "threshold": 0.0}}
    evaluation = {"evaluation": {"samples": 0, "every": 2}}
    chunks = as_trial(make("stopped-score", callbacks=(lambda: Worsening(3),), training=training, **evaluation))
    chunks.train(1, scores=True)
    assert score(chunks, 1).step == 4


def test_without_a_score_the_checkpoint_is_kept_all_the_same(make: Callable[..., Chunks]) -> None:
    chunks = as_trial(make("no-score", chunks={"keep": {"last": 9}}), metric="no_such_figure")
    upload = chunks.run.storage.upload

    def slow(*arguments: Any) -> str:
        time.sleep(0.2)
        return upload(*arguments)

    chunks.run.storage.upload = slow  # type: ignore[method-assign]
    with pytest.raises(UserError, match=r"sweep.metric is 'no_such_figure'"):
        chunks.train(1, scores=True)
    assert chunks.steps == [7]
    assert score(chunks, 1) is None


def test_a_chunk_says_what_it_is_at(make: Callable[..., Chunks]) -> None:
    chunks = make("phases", (3, 5), training={"max_steps": 5}, chunks={**KEPT, "checkpoint_every": 2})
    chunks.train(1)
    told: list[events.Event] = []
    with events_in(told):
        chunks.train(2)
    phases = [(event.phase, event.step) for event in told if isinstance(event, events.Phase)]
    assert phases == [
        ("restore", 3),
        ("train", None),
        *(("save", 4), ("upload", 4), ("commit", 4), ("train", None)),
        *(("save", 5), ("upload", 5), ("commit", 5), ("train", None)),
        ("upload", None),
    ]


def test_between_steps_a_chunk_holds_one_copy_and_nothing_of_ones_own(make: Callable[..., Chunks]) -> None:
    evaluation = {"evaluation": {"samples": 0, "per_epoch": 1}}
    chunks = make("holding", (2, 5), (), training={"max_steps": 5}, **evaluation)
    seen: list[tuple[bool, bool]] = []

    class Looking(TrainerCallback):
        stateless = True

        def on_step_end(self, *_: Any, **__: Any) -> None:
            crc = torch.serialization.get_crc32_options()
            seen.append((os.path.exists(chunks.trainer.resumption.folder or ""), crc))

    chunks.run.storage.is_local = False  # else it is read where it is
    chunks.train(1)
    chunks.train(2, callbacks=(Looking,))
    assert set(seen) == {(False, False)}, "what was restored is gone, and files are hashed once"
    assert [chunks.at(step).meta.hooks for step in chunks.steps] == [OwnState()] * 2


class Failing(TrainerCallback):
    """Fails as a step begins."""

    stateless = True

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_begin(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        """Fails."""
        if state.global_step == self.step:
            raise ValueError("no such row")


def test_a_chunk_that_fails_waits_for_what_is_on_its_way_and_notes_no_more(
    make: Callable[..., Chunks], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(committing, "LOCAL_NOTES", 0.01)
    chunks = make("failing", chunks={"keep": {"last": 9}, "checkpoint_every": 2})
    upload = chunks.run.storage.upload

    def slow(*arguments: Any) -> str:
        time.sleep(0.3)
        return upload(*arguments)

    monkeypatch.setattr(chunks.run.storage, "upload", slow)
    with pytest.raises(ValueError, match="no such row"):
        chunks.train(1, callbacks=(Drawing, lambda: Failing(2)))
    assert chunks.steps == [2]
    progress = chunks.checkpointer.committer.accounting.progress  # type: ignore[union-attr]
    time.sleep(0.1)
    progress.step = 6
    time.sleep(0.1)
    note = chunks.run.read(Progress)
    assert note is None or note.step < 6


def test_retention_leaves_what_is_not_proven_and_what_was_resumed_from(make: Callable[..., Chunks]) -> None:
    kept = {"keep": {"last": 1}, "wait_for_commit": True, "checkpoint_every": 1}
    chunks = make("kept", (2, 5, 7), chunks=kept)
    chunks.train(1)
    with pytest.raises(ValueError, match="no such row"):
        chunks.train(2, callbacks=(Drawing, lambda: Failing(3)))
    assert chunks.steps == [2, 3]
    chunks.train(2)
    assert chunks.steps == [2, 3, 4, 5], "the last chunk's target, and the step that this one has resumed from"
    chunks.train(3)
    assert chunks.steps == [2, 5, 6, 7]


@pytest.mark.parametrize("error", [UnavailableError("the store has gone."), FileNotFoundError("a manifest has gone")])
def test_a_search_for_another_process_that_fails_keeps_nothing_from_its_end(
    error: Exception, make: Callable[..., Chunks], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    name = f"searching-{type(error).__name__}"
    chunks = make(name, training={"max_steps": 3}, chunks={**KEPT, "checkpoint_every": 2})
    committed = chunks.store.committed

    def failing(*arguments: Any, **options: Any) -> Any:
        if threading.current_thread().name == "baton-commit":
            raise error
        return committed(*arguments, **options)

    monkeypatch.setattr(chunks.store, "committed", failing)
    chunks.train(1)
    assert chunks.steps == [2, 3]
    assert f"another process at the same chunk was not looked for: {error}" in caplog.text


def test_a_killed_attempt_that_cannot_be_recorded_keeps_nothing_from_its_end(
    make: Callable[..., Chunks], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    chunks = make("unrecorded", training={"max_steps": 3})
    chunks.run.write(Progress(step=2, chunk=1, seconds_per_step=1.0))

    def away(*_: Any) -> None:
        raise UnavailableError("the store has gone.")

    monkeypatch.setattr(chunks.run, "record", away)
    lead = chunks.train(1)
    assert chunks.steps == [3]
    assert lead.accounting.lost.steps == 2
    assert "The previous attempt was not recorded: the store has gone." in caplog.text


@pytest.mark.parametrize("is_local", [True, False])
def test_what_is_sent_to_a_cloud_stays_in_the_nodes_cache(
    is_local: bool, make: Callable[..., Chunks], tmp_path: Path
) -> None:
    """The next pod of the node then fetches nothing."""
    store = {"store": {"cache_dir": str(tmp_path / "cache")}}
    chunks = make(f"cached-{is_local}", (2, 3), training={"max_steps": 3}, **store)
    chunks.run.storage.is_local = is_local
    chunks.train(1)
    cached = {path.name for path in (tmp_path / "cache").glob("*")}
    assert cached == (set() if is_local else {entry["sha256"] for entry in chunks.at(2).manifest.files.values()})
    chunks.train(2)
    assert chunks.at().meta.restored.step == 2


SKIPPED = {"guard": {"skip": [3]}}


def test_steps_that_are_skipped_are_known_in_every_chunk(make: Callable[..., Chunks]) -> None:
    runs = [make(f"skipped-{len(ends)}", ends, training=SKIPPED) for ends in ((), (2, 4, 7))]
    for run in runs:
        run.train_all()
    assert [runs[1].at(step).meta.skips for step in runs[1].steps] == [[], [3], [3]]
    assert runs[1].trainer.skipped == (3,)
    assert runs[1].at().meta.state == runs[0].at().meta.state
    whole = make("skipped-none")
    whole.train_all()
    assert whole.at().meta.state["weights"] != runs[0].at().meta.state["weights"]


class Spoiling(TrainerCallback):
    """Makes the loss of a step no number, unless it is skipped."""

    stateless = True

    def __init__(self, chunks: Callable[[], Chunks], step: int) -> None:
        self.chunks, self.step = chunks, step

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Spoils."""
        if state.global_step + 1 == self.step and not self.chunks().trainer.skips_step:
            next(iter(model.parameters())).data.fill_(float("nan"))


@pytest.mark.parametrize("targets", [(7,), (2, 4, 7)], ids=["in one chunk", "in a later chunk"])
def test_a_step_that_cannot_be_trained_is_noted_and_skipped_by_the_next_process(
    targets: tuple[int, ...], make: Callable[..., Chunks]
) -> None:
    found: list[Chunks] = []
    callbacks = (Drawing, lambda: Spoiling(lambda: found[0], 3))
    chunks = make(f"spoiled-{len(targets)}", targets, callbacks, training={"guard": {"nan": True}})
    found.append(chunks)
    for index, target in enumerate(targets, 1):
        if target in (4, 7) and not chunks.run.skips():
            with pytest.raises(SkipError, match="step 3 has the loss nan"):
                chunks.train(index)
        chunks.train(index)
    assert [skip.step for skip in chunks.run.skips()] == [3]
    expected = make(f"spoiled-{len(targets)}-expected", training={"guard": {"nan": True, "skip": [3]}})
    expected.train_all()
    assert chunks.at().meta.skips == [3]
    assert chunks.at().meta.state == expected.at().meta.state
