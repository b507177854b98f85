"""A run that has come to its end, made by hand: split, tokens, plan and one checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from baton.checkpoint.store import CheckpointMeta, CheckpointStore
from baton.models import loading
from baton.recipe.recipe import Recipe
from baton.runs.plan import make_plan
from baton.runs.run import Run
from baton.store import bundle
from baton.store.storage import Storage
from tests.support import tiny

Rows = list[dict[str, Any]]
CHATTY: Rows = [{"prompt": pair["prompt"], "completion": pair["chosen"]} for pair in tiny.PAIRS]


def nudge(model: Any) -> None:
    """Stands for training: moves all weights a little, always the same way."""
    torch.manual_seed(5)
    for parameter in model.parameters():
        parameter.data += 0.02 * torch.randn_like(parameter)


def finished(
    folder: Path, recipe: Recipe, sides: dict[str, Rows], train: Callable[[Any], None] = nudge, name: str = "r"
) -> Run:
    """Makes a run in a folder's store.

    Args:
        folder: Where to.
        recipe: Of a base model.
        sides: Rows by side; each side becomes part of split and tokens.
        train: Changes the base model into the trained one.
        name: Name of the run.
    """
    assert recipe.model.base
    storage, local = Storage(str(folder / "store")), folder / f"local-{name}"
    run = Run(storage, name)
    run.create(recipe)
    for side, rows in sides.items():
        (local / "split").mkdir(parents=True, exist_ok=True)
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (local / f"split/{side}.jsonl").write_text(text, encoding="utf-8")
        if rows:
            tiny.tokens(recipe, rows).save_to_disk(str(local / f"tokens/{side}"))
    tokenizer = loading.load_tokenizer(recipe.model.base)
    tokenizer.save_pretrained(local / "tokens/tokenizer")
    bundle.publish(storage, f"data/{name}/split", str(local / "split"), kind="split", meta={})
    bundle.publish(storage, f"data/{name}/tokens", str(local / "tokens"), kind="tokens", meta={})
    run.put("data.json", {"digest": name})
    run.put("tokens.json", {"prefix": f"data/{name}/tokens"})
    plan = make_plan(recipe, 24)
    run.put("plan.json", plan.to_json())
    model = loading.start_model(recipe, tokenizer, recipe.model.base)
    train(model)
    model.save_pretrained(local / "checkpoint")
    writer = CheckpointStore(run).open_writer(plan.num_steps)
    writer.send(str(local / "checkpoint"))
    CheckpointStore(run).commit(plan.num_steps, writer, CheckpointMeta(digest="state"))
    return run


def recipe_of(base: str, method: str = "sft", **evaluation: Any) -> Any:
    """Returns a recipe whose model writes for six rows, up to eight tokens."""
    settings = {"samples": 6, "max_new_tokens": 8, "batch_size": 4, **evaluation}
    return tiny.recipe(base, training={"method": method}, evaluation=settings)


def saved(base: str, folder: Path, change: Any = nudge) -> str:
    """Saves a changed copy of the base."""
    model = loading.load_model(base)
    change(model)
    model.save_pretrained(folder)
    loading.load_tokenizer(base).save_pretrained(folder)
    return str(folder)


def scoring(base: str, folder: Path) -> str:
    """Saves a reward model."""
    recipe = recipe_of(base, "reward")
    loading.start_model(recipe, loading.load_tokenizer(base), base).save_pretrained(folder)
    return str(folder)


def lines_of(run: Run) -> list[dict[str, Any]]:
    """Returns the lines of the table of examples."""
    text = run.storage.read(run.path("examples.jsonl")).decode()
    return [json.loads(line) for line in text.splitlines()]
