"""What sinks of metrics hold after several chunks: each chunk's file, with steps that run on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from baton.recipe.recipe import Recipe


def test_steps_run_on_across_chunks(recipes: dict[str, Recipe], undisturbed: dict[str, Any], legs: Any) -> None:
    recipe = legs.changed(recipes["scratch"], chunks__count=3, tracking__tensorboard=True, tracking__jsonl=True)
    run = legs.prepare(recipe, "scratch-board")
    legs.train(run)
    folder = Path(run.storage.key(run.path("tensorboard")))
    assert len(list(folder.iterdir())) == 3
    read = EventAccumulator(str(folder)).Reload()
    assert {"loss", "learning_rate", "grad_norm", "tokens_per_second", "samples_per_second", "eval/loss"} <= set(
        read.Tags()["scalars"]
    )
    losses = {event.step: event.value for event in read.Scalars("loss")}
    expected = dict(legs.losses(undisturbed["scratch"]))
    assert losses.keys() == expected.keys()
    assert all(abs(losses[step] - expected[step]) < 1e-5 for step in expected)
    assert all(event.value > 0 for event in read.Scalars("tokens_per_second"))
    files = sorted(Path(run.storage.key(run.path("metrics"))).iterdir())
    assert [file.name[:9] for file in files] == ["chunk-001", "chunk-002", "chunk-003"]
    logged = [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    assert [(row["step"], row["loss"]) for row in logged if "loss" in row] == legs.losses(undisturbed["scratch"])
