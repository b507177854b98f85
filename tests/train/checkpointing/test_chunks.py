"""Chunks of a tiny run in one process: what each restores, saves, proves, and says of itself."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from baton import events
from baton.checkpoint.proof import proof_part
from baton.errors import ExactnessError
from baton.recipe.recipe import Recipe
from baton.recipe.run import Preemption
from baton.runs.documents import PARTS
from tests.support import tiny
from tests.train.resuming import Chunks

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
    manifest["meta"]["state"][part] = "0" * 64
    chunks.run.storage.write(path, json.dumps(manifest).encode())
    told: list[events.Event] = []
    with events_in(told), pytest.raises(ExactnessError, match=rf"after restoring step 2, {part} in memory differ"):
        chunks.train(2)
    assert chunks.steps == [2]
    (restored,) = (event for event in told if isinstance(event, events.Restored))
    assert (restored.step, restored.wrong) == (2, [part])
    assert chunks.save._check.checked[part] == "mismatch"


class events_in:  # noqa: N801
    """Collects events."""

    def __init__(self, told: list[events.Event]) -> None:
        self._told = told

    def __enter__(self) -> None:
        self._emit = events.emit
        events.emit = self._told.append  # type: ignore[assignment]

    def __exit__(self, *_: object) -> None:
        events.emit = self._emit


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
            import time

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


def test_a_notice_saves_and_ends_the_chunk(make: Callable[..., Chunks], whole: Chunks, tmp_path: Path) -> None:
    notice = tmp_path / "leave"

    class Preempted(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
            import time

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
                chunks.store.commit(7, writer, chunks.at(2).meta.model_copy(update={"digest": "theirs"}))

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
                theirs = digest.at(4).meta if same else digest.at(4).meta.model_copy(update={"digest": "0" * 64})
                chunks.store.commit(4, writer, theirs)

    if same:
        chunks.train(1, callbacks=(Drawing, Beside))
        assert chunks.steps == [4, 7]
        assert chunks.at(7).meta.parent.step == 4  # type: ignore[union-attr]
        return
    with pytest.raises(ExactnessError, match=r"another process committed step 4 with digest 000000000000…, this one"):
        chunks.train(1, callbacks=(Drawing, Beside))
    assert chunks.steps == [4]
