"""A trainer of somebody's own in chunks: the same bits, given back as it was, and clear words for what cannot be."""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from transformers import EarlyStoppingCallback, PrinterCallback, Trainer
from typer.testing import CliRunner

import baton
from baton import events
from baton.cli.app import app
from baton.errors import ExactnessError, OtherRunError, StoreError, UnavailableError
from baton.store.storage import Storage
from tests.support import without
from tests.support.tiny import make_base
from tests.train.attach import own

without.install()


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny base model."""
    return make_base(tmp_path_factory.mktemp("base") / "model")


@pytest.fixture
def build(base: str, tmp_path: Path) -> Any:
    """Builds a trainer, as a process that has just begun does."""
    return lambda rows=None, collator=own.noisy, **settings: own.trainer(base, tmp_path, rows, collator, **settings)


def _weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in trainer.model.state_dict().items()}


def _equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(ours[name], theirs[name]) for name in theirs)


def _state(run_uri: str) -> dict[str, str]:
    return baton.checkpoints(run_uri).open().meta.state


CASES: dict[str, dict[str, Any]] = {
    "rows and a collator that draw": {},
    "workers": {"dataloader_num_workers": 1, "dataloader_persistent_workers": True},
    "grouped by length": {
        "rows": own.FixedRows(), "collator": own.padded, "train_sampling_strategy": "group_by_length",
    },
    "an order that is not seedable": {"accelerator_config": {"use_seedable_sampler": False}},
    "a callback with state": {"callbacks": [own.Slower]},
    "evaluation and saves at the ends of epochs": {
        "eval_dataset": own.FixedRows(4), "eval_strategy": "epoch", "save_strategy": "epoch", "eval_on_start": True,
        "rows": own.FixedRows(), "collator": own.padded,
    },
    "a schedule that follows evaluations": {
        "eval_dataset": own.FixedRows(4), "eval_strategy": "steps", "eval_steps": 2,
        "lr_scheduler_type": "reduce_lr_on_plateau", "lr_scheduler_kwargs": {"patience": 0, "factor": 0.5},
        "rows": own.FixedRows(), "collator": own.padded,
    },
}  # fmt: skip
"""Holes that upstream leaves open, by what opens them."""


@pytest.mark.parametrize("case", CASES)
def test_chunks_end_on_the_bits_of_one_run(case: str, build: Any, tmp_path: Path) -> None:
    def fresh() -> Trainer:
        settings = dict(CASES[case])
        if "callbacks" in settings:
            settings["callbacks"] = [kind() for kind in settings["callbacks"]]
        return build(**settings)

    whole, parts = (str(tmp_path / "store" / "runs" / name) for name in ("whole", "parts"))
    assert baton.attach(fresh(), whole).train().step == 12
    for target in (2, 0.5, "11/12", None):  # inside an epoch, inside one, inside one, the end
        baton.attach(fresh(), parts, target).train()
    assert _state(parts) == _state(whole)
    # The same without the random state, or without the callback's, is another run.
    control = str(tmp_path / "store" / "runs" / "control")
    left_out = ("callbacks",) if case == "a callback with state" else ("rng",)
    baton.attach(fresh(), control, 5).train()
    baton.attach(fresh(), control).train(leave_out=left_out)
    assert _state(control)["weights"] != _state(whole)["weights"]


STATES: dict[str, dict[str, Any]] = {
    "a loss": {"compute_loss_func": own.Growing},
    "a callback": {"callbacks": own.Shrinking},
    "a callback with state_dict": {"callbacks": own.Counting},
    "a trainer's compute_loss": {"kind": own.GrowingTrainer},
}
"""Code that keeps what it computes with, made anew for each process."""


def _fresh(build: Any, case: dict[str, Any]) -> Trainer:
    makes = {"kind": lambda kind: kind, "callbacks": lambda kind: [kind()], "compute_loss_func": lambda kind: kind()}
    return build(own.FixedRows(), own.padded, **{name: makes[name](kind) for name, kind in case.items()})


class LostError(Exception):
    """A process that ends."""


def _ends_after(trainer: Trainer, step: int) -> Trainer:
    """Has a trainer's process end in the step after one."""
    train = trainer.training_step

    def training_step(*arguments: Any, **options: Any) -> Any:
        if trainer.state.global_step == step:
            raise LostError
        return train(*arguments, **options)

    trainer.training_step = training_step
    return trainer


@pytest.mark.parametrize("case", STATES)
def test_code_that_keeps_a_state_goes_on_with_it(case: str, build: Any, tmp_path: Path) -> None:
    whole, parts, control = (str(tmp_path / "store" / "runs" / name) for name in ("whole", "parts", "control"))
    baton.attach(_fresh(build, STATES[case]), whole).train()
    # Inside an epoch, at the end of one, and after a process that ended two steps after its last checkpoint.
    baton.attach(_fresh(build, STATES[case]), parts, 3).train()
    baton.attach(_fresh(build, STATES[case]), parts, 4).train()
    with pytest.raises(LostError):
        baton.attach(_ends_after(_fresh(build, STATES[case]), 6), parts, checkpoint_every=5).train()
    baton.attach(_fresh(build, STATES[case]), parts).train()
    assert _state(parts) == _state(whole)
    meta = baton.checkpoints(parts).open().meta
    part = "callbacks" if "state_dict" in case else "hooks"
    assert (meta.restored.level, meta.restored.checked[part]) == ("bitwise", "match")
    assert meta.restored.step == 5
    baton.attach(_fresh(build, STATES[case]), control, 5).train()
    baton.attach(_fresh(build, STATES[case]), control).train(leave_out=(part,))
    assert _state(control)["weights"] != _state(whole)["weights"]


def test_a_state_that_cannot_be_carried_is_never_called_bitwise(build: Any, tmp_path: Path) -> None:
    heard: list[events.Event] = []
    events._hearers.append(heard.append)
    run, strict = (str(tmp_path / "store" / "runs" / name) for name in ("parts", "strict"))
    try:
        baton.attach(_fresh(build, {"callbacks": own.Iterating}), run, 3).train()
        baton.attach(_fresh(build, {"callbacks": own.Iterating}), run, 5).train()
    finally:
        events._hearers.remove(heard.append)
    first, second = (baton.checkpoints(run).open(step).meta for step in (3, 5))
    assert first.restored.level == "bitwise", "nothing was lost yet"
    assert first.hooks.lost.keys() == {"own.py:Iterating.rates"}
    assert second.restored.level == "consistent"
    told = [event for event in heard if isinstance(event, events.NotCarried)]
    assert [event.step for event in told] == [3, 3, 5]
    assert "tate of `own.py:Iterating.rates` is not carried" in told[0].text
    proof = baton.attach(_fresh(build, {"callbacks": own.Iterating}), run, 5).prove()
    assert (proof.level, proof.hooks) == ("consistent", second.hooks)
    # Who asks for bits gets none that may differ.
    bits = {"exactness": "bitwise"}
    baton.attach(_fresh(build, {"callbacks": own.Iterating}), strict, 3, chunks=bits).train()
    with pytest.raises(ExactnessError, match=r"state of `own.py:Iterating.rates` is not carried"):
        baton.attach(_fresh(build, {"callbacks": own.Iterating}), strict, 5, chunks=bits).train()


def test_a_checkpoint_of_a_baton_that_did_not_look_is_continued_and_not_called_bitwise(
    build: Any, tmp_path: Path
) -> None:
    run = str(tmp_path / "store" / "runs" / "old")
    baton.attach(_fresh(build, STATES["a loss"]), run, 3).train()
    (manifest,) = (tmp_path / "store" / "runs" / "old").rglob("manifest.json")
    document = json.loads(manifest.read_text())
    del document["meta"]["hooks"], document["meta"]["state"]["hooks"]
    document["files"] = {name: each for name, each in document["files"].items() if "hooks" not in name}
    manifest.write_text(json.dumps(document))
    baton.attach(_fresh(build, STATES["a loss"]), run, 5).train()
    baton.attach(_fresh(build, STATES["a loss"]), run, 7).train()
    assert [baton.checkpoints(run).open(step).meta.restored.level for step in (5, 7)] == ["consistent", "bitwise"]


def test_what_draws_nothing_ends_where_the_trainer_alone_does(build: Any, tmp_path: Path) -> None:
    alone = build(own.FixedRows(), own.padded)
    alone.train()
    attached = build(own.FixedRows(), own.padded)
    baton.attach(attached, str(tmp_path / "runs" / "a")).train()
    assert _equal(_weights(attached), _weights(alone))
    assert attached.state.log_history[:-1] == alone.state.log_history[:-1]


def test_the_trainer_is_given_back_as_it_was(build: Any, tmp_path: Path) -> None:
    trainer = build(save_strategy="steps", save_steps=5, save_total_limit=1)
    args, callbacks = trainer.args.to_dict(), list(trainer.callback_handler.callbacks)
    before = {name: value for name, value in vars(trainer).items() if name in ("data_collator", "train_dataset")}
    threads, handler = torch.get_num_threads(), signal.getsignal(signal.SIGTERM)
    deterministic = torch.are_deterministic_algorithms_enabled()  # as another test may have left it
    outcome = baton.attach(trainer, str(tmp_path / "runs" / "a"), 6).train()
    assert (outcome.ending, outcome.step, outcome.is_done) == (baton.Ending.DONE, 6, True)
    assert type(trainer) is Trainer
    assert trainer.args.to_dict() == args
    assert trainer.callback_handler.callbacks == callbacks
    assert any(isinstance(each, PrinterCallback) for each in callbacks)
    assert all(vars(trainer)[name] is value for name, value in before.items())
    assert "save_pretrained" not in vars(trainer.model)
    assert (torch.get_num_threads(), signal.getsignal(signal.SIGTERM)) == (threads, handler)
    assert torch.are_deterministic_algorithms_enabled() == deterministic
    # Its own cadence and retention: step 5, and the target; one stays.
    assert [row["step"] for row in baton.checkpoints(str(tmp_path / "runs" / "a"))] == [6]


def test_two_chunks_of_one_trainer_in_a_running_event_loop(build: Any, tmp_path: Path) -> None:
    async def cells() -> None:
        trainer = build()
        baton.attach(trainer, str(tmp_path / "runs" / "a"), (1, 2)).train()
        await asyncio.sleep(0)
        assert baton.attach(trainer, str(tmp_path / "runs" / "a"), (2, 2)).train().step == 12

    asyncio.run(cells())
    whole = str(tmp_path / "runs" / "whole")
    baton.attach(build(), whole).train()
    assert _state(str(tmp_path / "runs" / "a")) == _state(whole)


def test_a_run_begins_with_a_fresh_trainer(build: Any, tmp_path: Path) -> None:
    class Interrupts(own.Slower):
        def on_step_end(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
            if state.global_step == 2 and self.seen < 5:
                self.seen = 5
                raise KeyboardInterrupt

    uri = str(tmp_path / "runs" / "a")
    trainer = build(callbacks=[Interrupts()])
    with pytest.raises(KeyboardInterrupt):
        baton.attach(trainer, uri).train()
    assert type(trainer) is Trainer
    with pytest.raises(baton.UserError, match="Build the trainer again"):
        baton.attach(trainer, uri).train()


def test_a_target_that_is_committed_is_loaded_and_not_trained(build: Any, tmp_path: Path) -> None:
    uri = str(tmp_path / "runs" / "a")
    first = build()
    baton.attach(first, uri, 6).train()
    second = build()
    begins_with = _weights(second)
    chunk = baton.attach(second, uri, 6)
    assert "to step 6 of 12" in repr(chunk)
    outcome = chunk.train()
    assert outcome.ending is baton.Ending.ALREADY_DONE
    assert second.state.global_step == 6
    assert _equal(_weights(second), _weights(first))
    third = build()
    baton.attach(third, uri, 6).train(load=False)
    assert _equal(_weights(third), begins_with)
    assert chunk.load() == 6
    part = chunk.prove()
    assert (part.verified, part.step, part.chunk) == (True, 6, 1)
    assert json.loads((tmp_path / "runs" / "a" / "proof" / "chunk-001.json").read_text())["verified"] is True


def test_early_stopping_ends_the_run_and_the_best_is_loaded(build: Any, tmp_path: Path) -> None:
    def fresh() -> Trainer:
        return build(
            own.FixedRows(),
            own.padded,
            eval_dataset=own.FixedRows(4),
            eval_strategy="steps",
            eval_steps=1,
            save_strategy="steps",
            save_steps=1,
            learning_rate=0.5,
            load_best_model_at_end=True,
            callbacks=[EarlyStoppingCallback(2)],
        )

    uri, whole = str(tmp_path / "runs" / "a"), str(tmp_path / "runs" / "whole")
    alone = fresh()
    baton.attach(alone, whole).train()
    baton.attach(fresh(), uri, 1).train()
    last = fresh()
    outcome = baton.attach(last, uri).train()
    assert outcome.ending is baton.Ending.FINISHED
    assert outcome.step < 12
    assert _state(uri) == _state(whole)
    best = last.state.best_global_step
    assert best < outcome.step
    assert best in [row["step"] for row in baton.checkpoints(uri)]
    assert _equal(_weights(last), _weights(alone))
    again = fresh()
    assert baton.attach(again, uri).train().ending is baton.Ending.ALREADY_DONE
    assert _equal(_weights(again), _weights(alone))


def test_another_trainer_for_the_same_run_is_named(build: Any, base: str, tmp_path: Path) -> None:
    uri = str(tmp_path / "runs" / "a")
    baton.attach(build(own.FixedRows(), own.padded), uri, 2, identity={"data": "v1"}).train()
    same = {"rows": own.FixedRows(), "collator": own.padded}
    for changed, named in (
        ({**same, "learning_rate": 1e-3}, "arguments.learning_rate: 0.005 → 0.001"),
        ({**same, "rows": own.FixedRows(15)}, "rows.rows: 14 → 15"),
        ({**same, "seed": 6}, "arguments.seed: 5 → 6"),
        ({**same, "callbacks": [own.Slower()]}, "callbacks"),
        ({**same, "collator": own.noisy}, "collator"),
    ):
        with pytest.raises(OtherRunError, match=named.replace(".", r"\.")) as error:
            baton.attach(build(**changed), uri, 4, identity={"data": "v1"})
        assert isinstance(error.value, baton.UserError)
    with pytest.raises(OtherRunError, match=r"identity\.data: 'v1' → 'v2'"):
        baton.attach(build(**same), uri, 4, identity={"data": "v2"})
    other = build(**same)
    with torch.no_grad():
        next(other.model.parameters()).add_(1e-3)
    with pytest.raises(OtherRunError, match=r"model\.begins_with"):
        baton.attach(other, uri, 4, identity={"data": "v1"})
    # Where things go and how often is no part of it.
    baton.attach(build(**same, save_steps=7, dataloader_pin_memory=False), uri, 4, identity={"data": "v1"})


def test_one_more_row_of_a_table_is_named(build: Any, tmp_path: Path) -> None:
    table = datasets.Dataset.from_list([own.FixedRows()[0] for _ in range(8)])
    uri = str(tmp_path / "runs" / "a")
    baton.attach(build(table, own.padded, num_train_epochs=1), uri, 1)
    again = datasets.Dataset.from_list([*table.to_list(), own.FixedRows()[0]]).select(range(8))
    baton.attach(build(again, own.padded, num_train_epochs=1), uri, 1)
    other = datasets.Dataset.from_list([*table.to_list()[:-1], {"input_ids": [1, 2, 4], "labels": [1, 2, 4]}])
    with pytest.raises(OtherRunError, match=r"rows\.digest"):
        baton.attach(build(other, own.padded, num_train_epochs=1), uri, 1)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        pytest.param({"ignore_data_skip": True}, "ignore_data_skip begins each chunk with the first rows", id="skip"),
        pytest.param({"auto_find_batch_size": True}, "another batch size", id="batch size"),
        pytest.param({"enable_jit_checkpoint": True}, "in the middle of a step", id="jit"),
        pytest.param(
            {
                "load_best_model_at_end": True, "metric_for_best_model": "accuracy", "eval_strategy": "epoch",
                "save_strategy": "epoch", "eval_dataset": own.FixedRows(4),
            },
            "the best by eval_loss",
            id="best",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_exact_is_refused_by_name(
    settings: dict[str, Any], words: str, build: Any, tmp_path: Path
) -> None:
    with pytest.raises(baton.UserError, match=words):
        baton.attach(build(own.FixedRows(), own.padded, **settings), str(tmp_path / "runs" / "a"))
    assert not (tmp_path / "runs" / "a").exists()


def test_a_stream_is_resumed_in_its_first_pass_and_refused_in_its_second(build: Any, tmp_path: Path) -> None:
    rows = datasets.Dataset.from_list([own.FixedRows()[index] for index in range(12)])

    def fresh(max_steps: int) -> Trainer:
        stream = rows.to_iterable_dataset(num_shards=2).shuffle(seed=3, buffer_size=4)
        return build(stream, own.padded, max_steps=max_steps, gradient_accumulation_steps=1)

    whole, parts = (str(tmp_path / "runs" / name) for name in ("whole", "parts"))
    baton.attach(fresh(6), whole).train()
    for target in (2, 5, 6):
        baton.attach(fresh(6), parts, target).train()
    assert _state(parts) == _state(whole)
    with pytest.raises(ExactnessError, match="ended at step 6 of 8"):
        baton.attach(fresh(8), str(tmp_path / "runs" / "longer")).train()

    class Stream(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter([own.FixedRows()[0]] * 40)

    with pytest.raises(baton.UserError, match="Stream is a stream without state_dict"):
        baton.attach(build(Stream(), own.padded, max_steps=4), str(tmp_path / "runs" / "b"))


def test_a_run_of_a_recipe_and_no_trainer_are_refused(build: Any, tmp_path: Path) -> None:
    (tmp_path / "runs" / "a").mkdir(parents=True)
    head = {"recipe": {"name": "a"}, "created": "2026-01-01T00:00:00Z"}
    (tmp_path / "runs" / "a" / "recipe.json").write_text(json.dumps(head))
    with pytest.raises(baton.UserError, match="belongs to a recipe"):
        baton.attach(build(), str(tmp_path / "runs" / "a"))
    with pytest.raises(baton.UserError, match=r"expected a transformers\.Trainer"):
        baton.attach(object(), str(tmp_path / "runs" / "b"))  # type: ignore[arg-type]


def test_told_to_leave_it_saves_and_says_so(build: Any, tmp_path: Path) -> None:
    notice, uri = tmp_path / "notice", str(tmp_path / "runs" / "a")

    class Preempts(own.Slower):
        def on_step_end(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
            if state.global_step == 3 and not notice.exists():
                notice.touch()
                import time

                time.sleep(1.5)

    chunks = {"preemption": {"notice_file": str(notice)}}
    outcome = baton.attach(build(callbacks=[Preempts()]), uri, chunks=chunks).train()
    assert (outcome.ending, outcome.is_done) == (baton.Ending.PARTIAL, False)
    assert 3 <= outcome.step < 12
    assert baton.attach(build(callbacks=[Preempts()]), uri).train().step == 12


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("losses", "saved", "best"),
    [
        pytest.param([4.0, 3.0, 2.0, 5.0], [1, 2, 3, 4], 3, id="numbers"),
        pytest.param([NAN, 3.0, 4.0, 2.0], [2, 4], 4, id="NaN first"),
        pytest.param([INF, 3.0, 4.0, 5.0], [2, 4], 2, id="infinite first"),
        pytest.param([3.0, NAN, 2.0, NAN], [1, 3, 4], 3, id="NaN in between and last"),
        pytest.param([NAN, NAN, NAN, NAN], [4], None, id="never a number"),
        pytest.param([3.0, 3.0, 2.0, 2.0], [1, 3, 4], 3, id="level"),
    ],
)
def test_the_best_step_is_saved_whatever_is_not_a_number(
    losses: list[float], saved: list[int], best: int | None, build: Any, tmp_path: Path
) -> None:
    class Judged(Trainer):
        def evaluation_loop(self, *arguments: Any, **options: Any) -> Any:
            output = super().evaluation_loop(*arguments, **options)
            output.metrics["eval_loss"] = losses[self.state.global_step - 1]
            return output

    trainer = build(
        own.FixedRows(), own.padded, max_steps=4, eval_dataset=own.FixedRows(4), eval_strategy="steps", eval_steps=1,
        save_strategy="best", metric_for_best_model="eval_loss", greater_is_better=False,
    )  # fmt: skip
    trainer.__class__ = Judged
    uri = str(tmp_path / "runs" / "a")
    chunk = baton.attach(trainer, uri, chunks={"keep": {"last": 9}, "wait_for_commit": True})
    chunk.train()
    assert [row["step"] for row in baton.checkpoints(uri)] == saved
    chunk.prove()
    promoted = json.loads((tmp_path / "runs/a/promoted.json").read_text())
    assert (promoted.get("best") or {}).get("step") == best


@pytest.mark.parametrize(
    "error",
    [
        pytest.param(StoreError("access denied."), id="no right to remove"),
        pytest.param(UnavailableError("the store does not answer."), id="a hiccup"),
        pytest.param(FileNotFoundError("it went"), id="gone meanwhile"),
    ],
)
def test_retention_that_fails_after_the_commit_keeps_nothing_from_its_end(
    error: Exception, build: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Refusing(Storage):
        def remove(self, *_: Any, **__: Any) -> bool:
            raise error

    uri = str(tmp_path / "runs" / "a")
    baton.attach(build(save_total_limit=1), uri, 2).train()
    chunk = baton.attach(build(save_total_limit=1), uri, 4)
    storage = chunk._context.run.storage
    chunk._context.run.storage = chunk._context.store.storage = Refusing(storage.uri())
    outcome = chunk.train()
    assert (outcome.ending, outcome.step) == (baton.Ending.DONE, 4)
    assert chunk.prove().verified
    assert caplog.text.count(f"old checkpoints were not removed: {error}") == 2
    assert (tmp_path / "runs/a/checkpoints/step-00000002/manifest.json").exists()


def test_the_commands_read_its_run_and_damage_is_passed_over(build: Any, tmp_path: Path) -> None:
    def command(*arguments: str) -> tuple[int, str]:
        done = CliRunner().invoke(app, list(arguments))
        return done.exit_code, done.stdout

    uri, whole = str(tmp_path / "runs" / "a"), str(tmp_path / "runs" / "whole")
    baton.attach(build(), whole).train()
    for target in (3, 6):  # one inside a chunk of so quick steps may make way for the next
        baton.attach(build(), uri, target).train()
    code, printed = command("checkpoints", "list", uri)
    assert (code, [line.split()[1] for line in printed.splitlines()]) == (0, ["3", "6"])
    assert command("checkpoints", "verify", uri)[0] == 0
    assert json.loads(command("checkpoints", "show", uri, "--output", "json")[1])["meta"]["chunk"] == 2
    listed = json.loads(command("runs", "list", "--store", str(tmp_path), "--output", "json")[1])["runs"]
    assert {row["name"]: (row["step"], row["num_steps"], row["state"]) for row in listed} == {
        "a": (6, 12, "interrupted"),
        "whole": (12, 12, "succeeded"),
    }
    weights = Path(baton.checkpoints(uri)[-1]["uri"]) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\0")
    assert command("checkpoints", "verify", uri)[0] == 1
    outcome = baton.attach(build(), uri).train()
    assert outcome.step == 12
    assert baton.checkpoints(uri).open().meta.restored.step == 3
    assert _state(uri) == _state(whole)
    assert command("checkpoints", "prune", uri, "--dry-run")[0] == 0
