"""What a recipe asks for and does not get: said once, as soon as it is known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from baton import events
from baton.data.tokenize import without_effect
from baton.runs.plan import make_plan
from tests.data.splitting import split, write
from tests.data.test_turns import tokenized
from tests.support import tiny

STEPS = {"batch_size": 4, "max_steps": 10}
TOLD: dict[str, tuple[dict[str, Any], list[str]]] = {
    "nothing": ({}, []),
    "a warm-up beyond the end": ({"training": {"warmup_steps": 10}}, ["training.warmup_steps is 10"]),
    "a warm-up to the last step": ({"training": {"warmup_steps": 9}}, []),
    "a warm-up that is a share": ({"training": {"warmup_steps": 0.9}}, []),
    "early stopping without an evaluation": (
        {"training": {"early_stopping": {}}, "evaluation": {"every": 11}},
        ["there are 0 evaluations in 10 steps, and patience is 3"],
    ),
    "early stopping with as many as it waits for": (
        {"training": {"early_stopping": {}}, "evaluation": {"every": 3}},
        ["there are 3 evaluations in 10 steps, and patience is 3"],
    ),
    "early stopping with one more": ({"training": {"early_stopping": {}}, "evaluation": {"every": 2}}, []),
    "early stopping by epoch": (
        {"training": {"early_stopping": {"patience": 2}}, "evaluation": {"per_epoch": 1}},
        ["there are 2 evaluations in 10 steps, and patience is 2"],
    ),
    "evaluation beyond the end": ({"evaluation": {"every": 11}}, ["evaluation.every is 11"]),
    "evaluation at the end": ({"evaluation": {"every": 10}}, []),
    "logging beyond the end": ({"training": {"log_every": 11}}, ["training.log_every is 11"]),
    "checkpoints beyond the end": ({"chunks": {"checkpoint_every": 11}}, ["chunks.checkpoint_every is 11"]),
    "a step to skip beyond the end": (
        {"training": {"guard": {"skip": [4, 12]}, "max_steps": None, "epochs": 2}},
        ["training.guard.skip has step 12"],
    ),
}


@pytest.mark.parametrize("name", TOLD)
def test_what_has_no_effect_is_told(name: str) -> None:
    sections, expected = TOLD[name]
    recipe = tiny.recipe("org/model", **{**sections, "training": {**STEPS, **sections.get("training", {})}})
    told = without_effect(recipe, make_plan(recipe, 20))
    assert len(told) == len(expected)
    for text, part in zip(told, expected, strict=True):
        assert part in text


@pytest.mark.parametrize(
    ("method", "pad", "is_told"), [("reward", None, True), ("reward", "<pad>", False), ("dpo", None, False)]
)
def test_a_score_that_is_read_before_the_end_is_told(
    method: str, pad: str | None, is_told: bool, chat_base: str, tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    monkeypatch.setenv("BATON_EVENTS", "stdout")
    own = {"model": {"tokenizer": {"special_tokens": {"pad_token": pad}}}} if pad else {}
    recipe = tiny.recipe(chat_base, training={"method": method, "max_steps": 2}, **own)
    rows = [{"prompt": f"{n}?", "chosen": "yes", "rejected": "no"} for n in range(6)]
    found = tokenized(recipe, rows, tmp_path)
    heard = [
        event
        for line in capsys.readouterr().out.splitlines()
        if isinstance(event := events.parse(line), events.NoEffect)
    ]
    assert [event.text for event in heard] == found["no_effect"]
    assert any("reads its score before the end" in text for text in found["no_effect"]) is is_told


@pytest.mark.parametrize(("labels", "told"), [([True], "label true"), ([False], "label false"), ([True, False], None)])
def test_labels_of_one_side_alone_are_told(
    labels: list[bool], told: str | None, tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    monkeypatch.setenv("BATON_EVENTS", "stdout")
    text = 'say "label": true and "label": false'
    rows = [{"prompt": f"{n}? {text}", "completion": text, "label": labels[n % len(labels)]} for n in range(40)]
    split(str(tmp_path / "store"), write(tmp_path / "rows.jsonl", rows), method="kto")
    heard = [
        event
        for line in capsys.readouterr().out.splitlines()
        if isinstance(event := events.parse(line), events.NoEffect)
    ]
    assert len(heard) == (told is not None)
    assert all(told and told in event.text for event in heard)
