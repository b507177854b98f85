"""An error of the user's own code comes with its place: file, line and function, whichever hook it is of."""

from __future__ import annotations

import signal
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from baton import errors, events
from baton.errors import BatonError, UserError
from baton.models import hooks, metrics, rewards
from baton.recipe.methods import RewardFunction
from baton.recipe.run import Hooks
from baton.train import distributed, supervisor

FAILING = """\
import json
import torch
from transformers import TrainerCallback

def share(part, whole):
    return part / whole

def loss(outputs, labels, num_items_in_batch=None):
    return share(1.0, 0)

def reward(prompts, completions, **_):
    return [share(1.0, 0) for _ in completions]

def metric(prediction):
    return {"hits": share(1.0, 0)}

def read(*_, **__):
    return json.loads("{")

def function(prompts, completions, references):
    return share(1, 0)

class Collator:
    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
    def __call__(self, rows):
        return share(1, 0)

class Stops(TrainerCallback):
    def on_step_end(self, *_, **__):
        share(1, 0)

class Refuses(TrainerCallback):
    def __init__(self, a=1):
        raise TypeError("not so")

class Layer(torch.nn.Module):
    def forward(self, x):
        return share(x.sum().item(), 0)
"""
SHARE = r"ZeroDivisionError: .* \(failing_hooks.py, line 6, in share\)"
CALLS: dict[str, tuple[Callable[[], Any], str]] = {
    "loss": (lambda: hooks.loss(_hooks(loss="loss"))(None, None), SHARE),  # type: ignore[misc]
    "metric": (lambda: hooks.metrics(_hooks(metrics=["failing_hooks:metric"]))(None), SHARE),  # type: ignore[misc]
    "collator": (lambda: hooks.collator(_hooks(collator="Collator"), "tokenizer", 1)([]), SHARE),  # type: ignore[misc]
    "callback": (
        lambda: hooks.callbacks(_hooks(callbacks=["failing_hooks:Stops"]))[0].on_step_end(None, None, None),
        SHARE,
    ),
    "callback that is made": (
        lambda: hooks.callbacks(_hooks(callbacks=["failing_hooks:Refuses"])),
        r"TypeError: not so \(failing_hooks.py, line 35, in Refuses.__init__\)",
    ),
    "reward": (
        lambda: rewards.build([RewardFunction(use="failing_hooks:reward")])[0](prompts=["a"], completions=["b"]),
        r"ZeroDivisionError: .* \(failing_hooks.py, line 6, in share\)",
    ),
    "code that a library calls": (lambda: hooks.find("failing_hooks:Layer")()(torch.zeros(2)), SHARE),
    "a library that it calls": (
        lambda: hooks.find("failing_hooks:read")(),
        r"JSONDecodeError: .* \(failing_hooks.py, line 18, in read\)",
    ),
}


@pytest.fixture(autouse=True)
def _stages_run_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts back what a stage sets for its process."""
    monkeypatch.setenv("BATON_STORE_PATIENCE", "10")


def _hooks(**given: Any) -> Hooks:
    return Hooks(
        **{name: f"failing_hooks:{value}" if isinstance(value, str) else value for name, value in given.items()}
    )


@pytest.fixture(autouse=True)
def _failing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "failing_hooks.py").write_text(FAILING)
    monkeypatch.syspath_prepend(tmp_path)


def _raised(call: Callable[[], Any]) -> Exception:
    with pytest.raises(Exception) as caught:  # noqa: PT011 - what it is, the caller looks at
        call()
    return caught.value.with_traceback(caught.tb.tb_next.tb_next if caught.tb.tb_next else None)  # without this file's


@pytest.mark.parametrize("hook", CALLS)
def test_an_error_tells_where_it_comes_from(
    hook: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    call, words = CALLS[hook]
    error = _raised(call)
    with pytest.raises(BatonError, match=f"^{words}$"):
        raise supervisor.as_shared(error)

    # So do the event of a stage, Kubernetes' message, and a process of several.
    (tmp_path / "log").touch()
    monkeypatch.setenv("BATON_TERMINATION_LOG", str(tmp_path / "log"))
    monkeypatch.setenv("BATON_EVENTS", "stdout")
    with pytest.raises(type(error)), events.stage("evaluate"):
        call()
    told = [event for event in map(events.parse, capsys.readouterr().out.splitlines()) if event]
    (failure,) = [event for event in told if isinstance(event, events.Error)]
    assert errors.BatonError(failure.message).exit_code == failure.exit_code
    assert words.rpartition("(")[2].replace("\\", "") in failure.message
    assert failure.message in (tmp_path / "log").read_text()
    monkeypatch.setattr(distributed, "PEERS", 0.0)
    monkeypatch.setenv("LOCAL_RANK", "1")
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(BatonError, match=f"^rank 1 failed: {words}.$"):
        distributed._run_rank(call, ())
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_function_of_an_evaluation_tells_where_it_fails() -> None:
    loaded = metrics.load_functions([hooks_function("failing_hooks:function")])
    with pytest.raises(
        UserError, match=r"function failed: ZeroDivisionError: .*\(failing_hooks.py, line 6, in share\)"
    ):
        metrics.function_score("function", loaded["function"], ["a"], ["b"], ["c"])


def hooks_function(use: str) -> Any:
    """Returns a function of a recipe's evaluation."""
    return types.SimpleNamespace(use=use, options={})


def test_an_error_of_others_has_no_place() -> None:
    error = _raised(lambda: torch.zeros(2).reshape(3))
    assert errors.in_words(error) == f"RuntimeError: {error}"
