"""The user's own code: found or refused with a reason, and its random draws a function of the batch."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import UserError
from baton.models import hooks
from baton.models.hooks import SeededCollator
from baton.recipe.run import Hooks

USERS = """
class Counter:
    def __init__(self, start=0):
        self.start = start

class Outer:
    class Inner:
        pass

def collator(tokenizer, factor=1):
    return lambda rows: [tokenizer, factor, *rows]

def loss(outputs, labels, num_items_in_batch=None, factor=1.0):
    return factor * (outputs - labels)

def accuracy(prediction):
    return {"accuracy": prediction}

def doubled(prediction, by=2):
    return {"doubled": by * prediction}
"""


@pytest.fixture
def users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules of a user, importable: one that is whole, and several that are not."""
    (tmp_path / "users_code.py").write_text(USERS)
    (tmp_path / "users_raising.py").write_text("raise RuntimeError('no licence')\n")
    (tmp_path / "users_broken.py").write_text("def f(:\n")
    (tmp_path / "users_needing.py").write_text("import users_absent\n")
    monkeypatch.syspath_prepend(tmp_path)


REFUSED = {
    "no module": ("users_gone:Counter", "hook 'users_gone:Counter' cannot be imported: No module named 'users_gone'."),
    "a module it needs": ("users_needing:f", "cannot be imported: No module named 'users_absent'. Give the file in"),
    "no object": ("users_code:Missing", "does not exist: module 'users_code' has no attribute 'Missing'. Check the"),
    "no inner object": ("users_code:Outer.Lost", "hook 'users_code:Outer.Lost' does not exist: type object 'Outer'"),
    "raises": (
        "users_raising:f",
        "hook 'users_raising:f' cannot be imported: RuntimeError: no licence (users_raising.py, line 1, in <module>).",
    ),
    "does not parse": ("users_broken:f", "hook 'users_broken:f' cannot be imported: SyntaxError: "),
}


@pytest.mark.usefixtures("users")
@pytest.mark.parametrize(("path", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_found_is_the_users_mistake(path: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        hooks.find(path)
    assert message in str(caught.value)


@pytest.mark.usefixtures("users")
def test_an_object_inside_another_is_found() -> None:
    assert hooks.find("users_code:Outer.Inner").__qualname__ == "Outer.Inner"


@pytest.mark.usefixtures("users")
def test_callbacks_are_made_with_their_options() -> None:
    given = Hooks(callbacks=["users_code:Counter", {"use": "users_code:Counter", "options": {"start": 3}}])  # type: ignore[list-item]
    assert [callback.start for callback in hooks.callbacks(given)] == [0, 3]


@pytest.mark.usefixtures("users")
def test_options_that_are_not_taken_are_the_users_mistake() -> None:
    given = Hooks(callbacks=[{"use": "users_code:Counter", "options": {"begin": 3}}])  # type: ignore[list-item]
    with pytest.raises(UserError, match=r"hook 'users_code:Counter' does not take these options: .*'begin'"):
        hooks.callbacks(given)


@pytest.mark.usefixtures("users")
def test_collator_loss_and_metrics_are_given_their_options() -> None:
    given = Hooks(
        collator={"use": "users_code:collator", "options": {"factor": 5}},  # type: ignore[arg-type]
        loss={"use": "users_code:loss", "options": {"factor": 3.0}},  # type: ignore[arg-type]
        metrics=["users_code:accuracy", {"use": "users_code:doubled", "options": {"by": 4}}],  # type: ignore[list-item]
    )
    collator, loss, metrics = hooks.collator(given, "tokenizer", 7), hooks.loss(given), hooks.metrics(given)
    assert collator
    assert loss
    assert metrics
    assert collator(["row"]) == ["tokenizer", 5, "row"]
    assert loss(5.0, 3.0, num_items_in_batch=9) == 6.0
    assert metrics(0.5) == {"accuracy": 0.5, "doubled": 2.0}


def test_without_hooks_there_is_nothing() -> None:
    assert (hooks.callbacks(Hooks()), hooks.collator(Hooks(), None, 0)) == ([], None)
    assert (hooks.loss(Hooks()), hooks.metrics(Hooks())) == (None, None)


def drawing(rows: list[Any]) -> tuple[float, float, float]:
    """A collator that draws from every generator."""
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def generators() -> tuple[Any, ...]:
    """What the generators would draw next, drawn from nothing."""
    name, keys, *rest = np.random.get_state()
    return random.getstate(), (name, keys.tobytes(), *rest), torch.get_rng_state().numpy().tobytes()


BATCHES = [[{"input_ids": [n, n + 1]}] for n in range(6)]


@given(order=st.permutations(range(6)), passed=st.integers(0, 5))
def test_a_batch_draws_the_same_whenever_it_is_made(order: list[int], passed: int) -> None:
    random.seed(passed)
    np.random.seed(passed)
    torch.manual_seed(passed)
    collate = SeededCollator(drawing, 7)
    before = generators()
    drawn = {number: collate(BATCHES[number]) for number in order}
    assert generators() == before, "the model's own draws are as if no batch had been made"
    assert drawn == {number: SeededCollator(drawing, 7)(BATCHES[number]) for number in range(6)}
    assert len({value for values in drawn.values() for value in values}) == 18


def test_seed_and_content_decide() -> None:
    collate = SeededCollator(drawing, 7)
    assert collate(BATCHES[0]) == collate([dict(row) for row in BATCHES[0]])
    assert collate(BATCHES[0]) != SeededCollator(drawing, 8)(BATCHES[0])


def test_a_collator_that_fails_leaves_the_generators_as_they_were() -> None:
    def failing(rows: list[Any]) -> None:
        raise ValueError(f"drew {random.random()} {np.random.rand()} {torch.rand(())}")

    before = generators()
    with pytest.raises(ValueError, match="drew"):
        SeededCollator(failing, 7)([])
    assert generators() == before
